"""Draws for a training step, and which linears a mode trains: the official trainer's recipe.

Everything that is drawn is a function of the seed, the step and the sample's place in it, so that
neither the backend, the number of devices nor an interruption changes it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.stages.noise import standard_normal, uniform
from ltx2rt.suggest import hint

MU_TOKENS, MU = (
    (1024, 4096),
    (0.95, 2.05),
)  # tokens, and the mean of the noise levels' logits there; a straight line
TAILS = (
    -2.5758,
    3.0902,
)  # standard deviations of z that become the levels 0 and 1: the 0.5 % and 99.9 % quantiles
LEAST = 1e-3  # noise level; smaller ones are mirrored at it
PLAIN = 0.1  # share of levels that are uniform

GROUPS: Mapping[str, tuple[str, ...]] = {  # modules of a block by group
    "video-attn": tuple(
        f"attn{i}.{part}" for i in (1, 2) for part in ("to_q", "to_k", "to_v", "to_out.0")
    ),
    "audio-attn": tuple(
        f"audio_attn{i}.{part}" for i in (1, 2) for part in ("to_q", "to_k", "to_v", "to_out.0")
    ),
    "cross": tuple(
        f"{way}_attn.{part}"
        for way in ("audio_to_video", "video_to_audio")
        for part in ("to_q", "to_k", "to_v", "to_out.0")
    ),
    "video-ff": ("ff.net.0.proj", "ff.net.2"),
    "audio-ff": ("audio_ff.net.0.proj", "audio_ff.net.2"),
}
STREAM_OF = {
    "video-attn": "video",
    "video-ff": "video",
    "audio-attn": "audio",
    "audio-ff": "audio",
    "cross": "cross",
}


@dataclass(frozen=True)
class Mode:
    """streams: the present ones; trained: those that are noised; targets: groups; rate and steps:
    defaults. first_frame: how often the first latent frame is given."""

    streams: tuple[str, ...]
    trained: tuple[str, ...]
    targets: tuple[str, ...]
    rate: float = 1e-4
    steps: int = 2000
    first_frame: float = 0.0


BOTH = ("video", "audio")
ATTENTIONS = ("video-attn", "audio-attn", "cross")
MODES = {  # configs/*.yaml of the official trainer
    "t2v": Mode(BOTH, BOTH, ATTENTIONS),
    "i2v": Mode(BOTH, BOTH, ATTENTIONS, first_frame=0.5),
    "a2v": Mode(BOTH, ("video",), ATTENTIONS),
    "v2a": Mode(BOTH, ("audio",), ("audio-attn", "audio-ff", "cross")),
    "t2a": Mode(("audio",), ("audio",), ("audio-attn", "audio-ff"), 2e-4, 3000),
}


def targeted(words: Sequence[str], known: Collection[str]) -> list[str]:
    """Those of the modules `known` (with `*` for the block) that the groups name. Raises InputError
    for an unknown group, and for one that the graph lacks, as one without sound has no sound's."""
    found: list[str] = []
    for word in words:
        if word not in GROUPS:
            raise InputError(
                f"--targets: {word!r}, expected some of {', '.join(GROUPS)}{hint(word, GROUPS)}"
            )
        own = [name for name in known if name.partition(".*.")[2] in GROUPS[word]]
        if not own:
            raise InputError(
                f"--targets: {word} is not part of this training; leave it out, or choose another --mode"
            )
        found += own
    return found


def group_of(name: str) -> str:
    """The group of a module's parameter."""
    module = name.partition("transformer_blocks.")[2].partition(".")[2]
    return next(group for group, parts in GROUPS.items() if module.startswith(parts))


def sigma(tokens: int, seed: int, stream: str) -> float:
    """The noise level of one sample of so many noised tokens: a logistic normal that is shifted by
    the tokens, stretched so that it reaches 0 and 1, and now and then uniform instead."""
    z = float(standard_normal(seed, f"{stream}.z", (1,))[0])
    plain, level = uniform(seed, f"{stream}.level", 2)
    if plain < PLAIN:
        return float(LEAST + (1 - LEAST) * level)
    slope = (MU[1] - MU[0]) / (MU_TOKENS[1] - MU_TOKENS[0])
    mu = MU[0] + slope * (tokens - MU_TOKENS[0])
    low, high = (_sigmoid(mu + tail) for tail in TAILS)
    s = (_sigmoid(mu + z) - low) / (high - low)
    s = 2 * LEAST - s if s < LEAST else s
    return min(max(s, 0.0), 1.0)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def rate(base: float, step: int, steps: int, schedule: str, warmup: int) -> float:
    """The rate of step `step` of `steps`: from 0 in `warmup` steps, then `constant`, `linear` down
    to a tenth, or `cosine` to zero."""
    part = step / max(1, steps)
    shape = {
        "constant": 1.0,
        "linear": 1 - 0.9 * part,
        "cosine": 0.5 + 0.5 * math.cos(math.pi * part),
    }[schedule]
    return base * shape * min(1.0, (step + 1) / (warmup + 1))


def initial(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """An adapter's parameter before the first step, as PEFT has it: A uniform within 1 / sqrt(in),
    B zero."""
    if ".lora_B." in name:
        return np.zeros(shape, np.float32)
    drawn = uniform(seed, f"train.init.{name}", math.prod(shape)).reshape(shape)
    return ((2 * drawn - 1) / math.sqrt(shape[1])).astype(np.float32)
