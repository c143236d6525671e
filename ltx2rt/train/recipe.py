"""Draws for a training step, and which linears a mode trains: the official trainer's recipe.

Everything that is drawn is a function of the seed, the step and the sample's place in it, so that
neither the backend, the number of devices nor an interruption changes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.stages.noise import standard_normal, uniform
from ltx2rt.suggest import hint

# tokens, and the mean of the noise levels' logits there; a straight line
MU_TOKENS, MU = ((1024, 4096), (0.95, 2.05))
# standard deviations of z that become the levels 0 and 1: the 0.5 % and 99.9 % quantiles
TAILS = (-2.5758, 3.0902)
LEAST = 1e-3  # noise level; smaller ones are mirrored at it
PLAIN = 0.1  # share of levels that are uniform

VIDEO, AUDIO = ("attn1", "attn2"), ("audio_attn1", "audio_attn2")
CROSS = ("audio_to_video_attn", "video_to_audio_attn")


def _projections(*attentions: str) -> tuple[str, ...]:
    return tuple(f"{a}.{part}" for a in attentions for part in ("to_q", "to_k", "to_v", "to_out.0"))


GROUPS: Mapping[str, tuple[str, ...]] = {  # modules of a block by group
    "video-attn": _projections(*VIDEO),
    "audio-attn": _projections(*AUDIO),
    "cross": _projections(*CROSS),
    "video-to-audio": _projections(CROSS[1]),  # the half of `cross` that the sound reads
    "video-ff": ("ff.net.0.proj", "ff.net.2"),
    "audio-ff": ("audio_ff.net.0.proj", "audio_ff.net.2"),
    # LTX-2.3 and 2.5; the official trainer never targets them
    "gates": tuple(f"{name}.to_gate_logits" for name in (*VIDEO, *AUDIO, *CROSS)),
}
STREAM_OF = dict.fromkeys(GROUPS, "cross")
STREAM_OF |= {f"{name}-{part}": name for name in ("video", "audio") for part in ("attn", "ff")}


@dataclass(frozen=True)
class Mode:
    """streams: the present ones; trained: those that are noised; targets: groups; lr and steps:
    defaults. first_frame to reference: how often a sample has the condition, which is the first
    latent frame, the first latent frames and the sound of their time, the area of a mask or a
    rectangle, or tokens of a reference. heard: both streams have a reference."""

    streams: tuple[str, ...]
    trained: tuple[str, ...]
    targets: tuple[str, ...]
    lr: float = 1e-4
    steps: int = 2000
    first_frame: float = 0.0
    prefix: tuple[int, float] = (0, 0.0)
    mask: float = 0.0
    crop: float = 0.0
    reference: float = 0.0
    heard: bool = False


BOTH, PICTURE = ("video", "audio"), ("video",)
ATTENTIONS = ("video-attn", "audio-attn", "cross")
SOUND = Mode(("audio",), ("audio",), ("audio-attn", "audio-ff"), 2e-4, 3000)
MODES = {  # configs/*.yaml of the official trainer
    "t2v": Mode(BOTH, BOTH, ATTENTIONS),
    "i2v": Mode(BOTH, BOTH, ATTENTIONS, first_frame=0.5),
    "a2v": Mode(BOTH, ("video",), ATTENTIONS),
    "v2a": Mode(BOTH, ("audio",), ("audio-attn", "audio-ff", "video-to-audio")),
    "t2a": SOUND,
    "a2a": replace(SOUND, reference=1.0),
    "av2av": Mode(BOTH, BOTH, ATTENTIONS, 2e-4, 3000, reference=1.0, heard=True),
    "ic-lora": Mode(
        PICTURE, PICTURE, ("video-attn", "video-ff"), 2e-4, 3000, first_frame=0.2, reference=1.0
    ),
    "extend": Mode(BOTH, BOTH, ATTENTIONS, prefix=(8, 1.0)),
    "inpaint": Mode(PICTURE, PICTURE, ("video-attn",), mask=1.0),
    "outpaint": Mode(PICTURE, PICTURE, ("video-attn",), crop=1.0),
}


def reached(words: Sequence[str]) -> set[str]:
    """The streams, of video, audio and cross, with linears that the targets name."""
    found = set()
    for word in words:
        if word in GROUPS:
            found.add(STREAM_OF[word])
            continue
        for group, parts in GROUPS.items():
            if any(_pattern(word).search(f"transformer_blocks.0.{part}") for part in parts):
                found.add(STREAM_OF[group])
    return found


def _pattern(word: str) -> re.Pattern[str]:
    try:
        return re.compile(word)
    except re.error as error:
        raise InputError(
            f"--targets: {word!r} is no regular expression ({error}); expected that, or some of "
            f"{', '.join(GROUPS)}"
        ) from None


def targeted(words: Sequence[str], known: Collection[str], blocks: int = 1) -> list[str]:
    """The modules of `known` (with `*` for one of the blocks) that are of a group, or match a
    regular expression. Raises InputError for a word that names none, or only some blocks, and for
    nothing but gates."""
    found: list[str] = []
    for word in words:
        if word in GROUPS:
            own = [name for name in known if name.partition(".*.")[2] in GROUPS[word]]
            if not own:
                raise InputError(
                    f"--targets: {word} is not part of this training; leave it out, or choose "
                    "another --mode"
                )
        else:
            own = _matching(word, known, blocks)
        found += [name for name in own if name not in found]
    if all(name.endswith("to_gate_logits") for name in found):
        raise InputError("--targets: gates alone teach nothing; add attentions, such as video-attn")
    return found


def _matching(word: str, known: Collection[str], blocks: int) -> list[str]:
    pattern, own = _pattern(word), []
    for name in known:
        hits = [bool(pattern.search(name.replace("*", str(i)))) for i in range(blocks)]
        if any(hits) and not all(hits):
            raise InputError(
                f"--targets: {word!r} matches {name.replace('*', 'N')} in {sum(hits)} of "
                f"{blocks} blocks; all blocks are trained alike, so match any number: "
                "blocks\\.\\d+\\."
            )
        own += [name] * all(hits)
    if not own:
        raise InputError(
            f"--targets: {word!r}, expected some of {', '.join(GROUPS)}{hint(word, GROUPS)}, or a "
            f"regular expression that matches some of {len(known)} linears, such as "
            f"{next(iter(known))}"
        )
    return own


def group_of(name: str) -> str:
    """The group of a module's parameter."""
    module = name.partition("transformer_blocks.")[2].partition(".")[2]
    return next(group for group, parts in GROUPS.items() if module.startswith(parts))


@dataclass(frozen=True)
class NoiseLevels:
    """kind: `shifted`, a logistic normal that is shifted by the tokens, stretched so that it
    reaches 0 and 1, and now and then uniform instead; `uniform`; or `logit`, a plain logistic
    normal. shift: its mean before the sigmoid, None: by the tokens. least, most: range of levels.
    """

    kind: str = "shifted"
    shift: float | None = None
    least: float = 0.0
    most: float = 1.0


def sigma(tokens: int, seed: int, stream: str, levels: NoiseLevels = NoiseLevels()) -> float:
    """Return the noise level of one sample; tokens: of its target, given ones included."""
    return levels.least + (levels.most - levels.least) * _level(tokens, seed, stream, levels)


def _level(tokens: int, seed: int, stream: str, levels: NoiseLevels) -> float:
    z = float(standard_normal(seed, f"{stream}.z", (1,))[0])
    plain, level = uniform(seed, f"{stream}.level", 2)
    if levels.kind == "uniform":
        return float(level)
    if levels.kind == "shifted" and plain < PLAIN:
        return float(LEAST + (1 - LEAST) * level)
    slope = (MU[1] - MU[0]) / (MU_TOKENS[1] - MU_TOKENS[0])
    mu = MU[0] + slope * (tokens - MU_TOKENS[0]) if levels.shift is None else levels.shift
    low, high, s = (1 / (1 + math.exp(-mu - x)) for x in (*TAILS, z))
    if levels.kind == "logit":
        return s
    s = (s - low) / (high - low)
    s = 2 * LEAST - s if s < LEAST else s
    return min(max(s, 0.0), 1.0)


def _half_cosine(part: float) -> float:
    return 0.5 + 0.5 * math.cos(math.pi * part)


SCHEDULES: Mapping[str, Callable[[int, int], float]] = {  # share of --lr by step and steps
    "linear": lambda step, steps: 1 - 0.9 * step / steps,
    "constant": lambda step, steps: 1.0,
    "cosine": lambda step, steps: _half_cosine(step / steps),
    "restarts": lambda step, steps: _half_cosine(step % (n := max(1, steps // 4)) / n),
    "polynomial": lambda step, steps: 1 - step / steps,
    "step": lambda step, steps: 0.1 ** (step // max(1, steps // 2)),
}


def rate(base: float, step: int, steps: int, schedule: str, warmup: int) -> float:
    """Return the rate of a step, which rises from 0 in `warmup` steps. SCHEDULES are torch's
    LinearLR, CosineAnnealingLR, CosineAnnealingWarmRestarts, PolynomialLR and StepLR."""
    return base * SCHEDULES[schedule](step, max(1, steps)) * min(1.0, (step + 1) / (warmup + 1))


def initial(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """A parameter before the first step, as PEFT has it: A uniform in 1 / sqrt(in), B zero."""
    if ".lora_B." in name:
        return np.zeros(shape, np.float32)
    drawn = uniform(seed, f"train.init.{name}", math.prod(shape)).reshape(shape)
    return ((2 * drawn - 1) / math.sqrt(shape[1])).astype(np.float32)
