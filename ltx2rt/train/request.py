"""The flags of `train run`, and how their values are spelled."""

from __future__ import annotations

from argparse import SUPPRESS
from dataclasses import MISSING, dataclass, fields, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from ltx2rt.backend import REMAT
from ltx2rt.flags import flags_of
from ltx2rt.train.recipe import GROUPS, MODES, SCHEDULES, NoiseLevels

flag = flags_of("training")
shown_flag = partial(flag, common="training")  # in the short help
free_flag = partial(flag, marks="free")
setting = partial(flag, typed=False)  # read from a configuration file and by Python


@dataclass(frozen=True)
class Data:
    """A cache, and how often each of its samples is drawn against those of others."""

    cache: Path
    weight: float = 1.0

    def __str__(self) -> str:
        return str(self.cache) if self.weight == 1 else f"{self.cache}:{self.weight:g}"


def parse_data(text: str | Path) -> Data:
    """CACHE or CACHE:WEIGHT. Raises ValueError."""
    if isinstance(text, Data):
        return text
    path, _, weight = str(text).rpartition(":")
    try:
        found = Data(Path(path), float(weight))
    except ValueError:  # no colon, or one of the path
        return Data(Path(text))
    return _allowed(found, 0 < found.weight < 1e6)


def _allowed(found: Any, fits: bool) -> Any:
    if not fits:
        raise ValueError
    return found


def _pair(given: Any) -> tuple[float, float]:
    one, other = map(float, given.split(",") if isinstance(given, str) else given)
    return one, other


def parse_betas(given: Any) -> tuple[float, float]:
    """Two decays, at least 0 and below 1. Raises ValueError."""
    return _allowed(found := _pair(given), all(0 <= beta < 1 for beta in found))


def parse_range(given: Any) -> tuple[float, float]:
    """Two noise levels, 0 <= A < B <= 1. Raises ValueError."""
    return _allowed(found := _pair(given), 0 <= found[0] < found[1] <= 1)


def parse_shift(given: Any) -> float | None:
    """A logit, None for `auto`. Raises ValueError."""
    return None if given == "auto" else _allowed(float(given), abs(float(given)) <= 20)


def parse_ratio(given: Any) -> float | None:
    """A ratio of losses, None for `off`. Raises ValueError."""
    return None if given == "off" else _allowed(float(given), 0 < float(given) <= 1e3)


def _with_share(given: Any) -> tuple[list[int], float]:
    """Whole numbers, and a share, 1 if none is given, of N,N,...:P or of a sequence."""
    if not isinstance(given, str):
        *numbers, share = given if isinstance(given, (tuple, list)) else (given, 1)
        given = f"{','.join(map(str, numbers))}:{share}"
    text, _, end = given.partition(":")
    share = float(end or 1)
    return _allowed(([int(n) for n in text.split(",")], share), 0 <= share <= 1)


def parse_span(given: Any) -> tuple[int, float]:
    """N or N:P; N = 0: none. Raises ValueError."""
    (count,), share = _with_share(given)
    return _allowed((count, share), count >= 0)


def parse_crop(given: Any) -> tuple[int, int, int, int, float]:
    """Y1,X1,Y2,X2 or Y1,X1,Y2,X2:P; all zero: the middle. Raises ValueError."""
    (top, left, bottom, right), share = _with_share(given)
    fits = not any(found := (top, left, bottom, right))
    fits |= 0 <= top < bottom and 0 <= left < right
    return _allowed((*found, share), fits)


span_flag = partial(flag, None, parse=parse_span, metavar="N:P")
SPAN = ", with their sound, and the share of such clips; latents of sound in t2a and a2a"


@dataclass(frozen=True)
class TrainRequest:
    """A training run. None: the mode's own."""

    data: tuple[Data, ...] = shown_flag(
        MISSING,
        "caches that `train prepare` made; WEIGHT multiplies how often a sample is drawn "
        "(default: 1)",
        parse_data,
        metavar="CACHE[:WEIGHT]",
        repeat=True,
        marks="free",
    )
    output: Path = free_flag(
        MISSING, "folder; the same command goes on", group="output", metavar="RUN"
    )
    mode: str = shown_flag(
        "i2v",
        "what is learnt: t2v picture and sound; i2v the same, half of the clips with their first "
        "frame given; a2v the picture to a sound; v2a the sound to a picture; t2a sound alone; "
        "ic-lora the picture after a reference; extend what follows a beginning; inpaint what a "
        "mask leaves; outpaint what is around a rectangle",
        choices=tuple(MODES),
        marks="shapes plan",
    )
    streams: tuple[str, ...] = flag(
        (),
        "streams that are trained, of video and audio (default: by --mode and the data)",
        metavar="STREAM,...",
        choices=("video", "audio"),
        repeat=True,
        split=True,
        marks="shapes",
    )
    targets: tuple[str, ...] = flag(
        (),
        f"groups of linears to train, of {', '.join(GROUPS)}, or regular expressions over their "
        "names, such as "
        r"attn1\.to_[qkv] (default: by --mode)",
        metavar="GROUP|REGEX",
        repeat=True,
        marks="shapes plan",
    )
    rank: int = shown_flag(32, "rank of the LoRA", least=1, most=1024, marks="shapes plan")
    audio_rank: int | None = flag(
        None, "rank of the sound's linears (default: --rank)", least=1, most=1024, marks="shapes"
    )
    init: Path | None = free_flag(None, "LoRA file to begin with; one of a smaller rank is widened")
    alpha: float | None = flag(
        None, "factor of the LoRA, times its rank (default: --rank, which is 1)", above=0, most=1e4
    )
    lr: float | None = shown_flag(
        None, "learning rate of AdamW (default: 1e-4, for t2a and ic-lora 2e-4)", above=0, most=1
    )
    schedule: str = flag(
        "linear",
        "learning rate over the steps: linear falls to a tenth, cosine and polynomial to zero, "
        "restarts four times to zero, step to a tenth in the middle",
        choices=tuple(SCHEDULES),
    )
    warmup: int = flag(0, "steps in which the learning rate rises from zero", least=0)
    steps: int | None = shown_flag(
        None, "steps (default: 2000, for t2a and ic-lora 3000)", least=1, most=10**6, marks="free"
    )
    batch: int = shown_flag(
        1, "samples of each device of the mesh axis data", least=1, most=1024, marks="free plan"
    )
    accumulate: int = free_flag(1, "batches whose gradients make one step", least=1, most=1024)
    weight_decay: float = flag(0.01, "weight decay of AdamW", least=0, most=1)
    betas: tuple[float, float] = setting(
        (0.9, 0.999), "decays of AdamW's moments (default: 0.9,0.999)", parse_betas, metavar="B1,B2"
    )
    ema: float | None = flag(
        None, "decay of an averaged LoRA, written as well", above=0, most=0.999999, marks="plan"
    )
    max_grad_norm: float = flag(
        1.0, "largest norm of the gradient; a larger one is scaled down", above=0, most=1e6
    )
    first_frame: float | None = flag(
        None, "share of the clips whose first frame is given (default: by --mode)", least=0, most=1
    )
    prefix: tuple[int, float] | None = span_flag(
        help=f"latent frames that are given at the beginning{SPAN} (default: by --mode)"
    )
    suffix: tuple[int, float] | None = span_flag(
        help=f"latent frames that are given at the end{SPAN} (default: none)"
    )
    mask: float | None = flag(
        None, "share of the clips whose masked part is given (default: by --mode)", least=0, most=1
    )
    crop: tuple[int, int, int, int, float] | None = flag(
        None,
        "rectangle that is given, in pixels of the bucket, and the share of such clips (default: "
        "by --mode, the middle half of both sides)",
        parse_crop,
        metavar="Y1,X1,Y2,X2:P",
    )
    reference: float | None = flag(
        None, "share of the batches that see their references (default: by --mode)", least=0, most=1
    )
    sigma: str = flag(
        "shifted",
        "distribution of the noise levels: shifted by the number of tokens and stretched; "
        "uniform; or logit, not stretched",
        choices=("shifted", "uniform", "logit"),
    )
    sigma_shift: float | None = setting(
        None, "mean of the noise levels' logits (default: by tokens)", parse_shift, metavar="auto|X"
    )
    sigma_range: tuple[float, float] = setting(
        (0.0, 1.0), "range of the noise levels (default: 0,1)", parse_range, metavar="A,B"
    )
    audio_sigma: str = flag(
        "independent", "noise level of the sound", choices=("independent", "shared")
    )
    video_loss: float = flag(1.0, "weight of the picture's loss", least=0, most=1e6)
    audio_loss: float = flag(1.0, "weight of the sound's loss", least=0, most=1e6)
    audio_balance: float | None = setting(
        None,
        "ratio to which the sound's loss is weighed against the picture's, by their running "
        "means, or off (default: off)",
        parse_ratio,
        metavar="off|RATIO",
    )
    sound_share: float | None = setting(
        None, "share of samples with sound (default: as in the data)", least=0, most=1
    )
    caption_dropout: float = flag(
        0.0, "share of the captions replaced by the empty one", least=0, most=1
    )
    lora_dropout: float = flag(
        0.0, "share of its inputs that each matrix A drops", least=0, most=0.99
    )
    remat: str = flag(
        "block",
        "block computes each block anew in the backward pass, exchanges all of it but what comes from "
        "other devices; none keeps all values, for speed",
        choices=REMAT,
        marks="plan",
    )
    held_out: float | None = flag(
        None,
        "share of the clips that are not trained on, whose loss is measured with every "
        "--validate-every and every save (default: those that `train prepare` set apart)",
        least=0,
        most=0.5,
    )
    validate_every: int = free_flag(
        250, "steps between two measurements, and between two validations", least=1
    )
    validation: Path | None = shown_flag(
        None,
        "JSONL file of prompts (prompt, image, reference, size, seed, or any clip flag) to make "
        "clips of in RUN/validation, also before the first step",
        marks="free",
    )
    validation_seed: int = setting(
        42, "seed of the first validation clip", least=0, most=2**63, marks="free"
    )
    save_every: int = shown_flag(250, "steps between two LoRAs and states", least=1, marks="free")
    keep: int = free_flag(2, "number of states to keep", least=1)
    keep_every: int = setting(
        0, "steps whose multiples keep their states, too; 0: none", least=0, marks="free"
    )
    seed: int = flag(42, "seed of noise, order and initial values", least=0, most=2**64 - 1)
    dry_run: bool = shown_flag(
        False, "print groups and sizes, and train nothing", marks="free once"
    )
    deterministic: bool = free_flag(
        False, "resume to the bit on GPUs, too, where steps are then slower"
    )
    tensorboard: Path | None = free_flag(
        None, "folder for TensorBoard", group="output", metavar="DIR"
    )
    json: bool = flag(
        False, "print each step's metrics as a line of JSON", group="output", marks="free once"
    )
    allow_change: bool = flag(
        False, "continue a run with other flags than it was begun with", marks="free once"
    )
    allow_distilled: bool = free_flag(False, "train on a distilled model")
    allow_partial_sound: bool = setting(False, SUPPRESS, marks="free")  # decides nothing any more

    @property
    def levels(self) -> NoiseLevels:
        return NoiseLevels(self.sigma, self.sigma_shift, *self.sigma_range)

    def resolved(self) -> TrainRequest:
        """With the mode's own values in place of None. A rectangle of zeros is the middle half."""
        mode, rank = MODES[self.mode], self.rank
        defaults = fields(mode)[2:]  # without its streams
        own = {f.name: getattr(mode, f.name) for f in defaults if hasattr(self, f.name)}
        crop = (0, 0, 0, 0, mode.crop)
        own |= dict(alpha=float(rank), audio_rank=rank, suffix=(0, 0.0), crop=crop)
        absent = {name: x for name, x in own.items() if getattr(self, name) in (None, ())}
        return replace(self, **absent)


def to_text(value: Any) -> Any:
    """A field's value as a flag or a configuration file spells it."""
    if isinstance(value, tuple) and value and isinstance(value[-1], float):
        last = ":" if isinstance(value[0], int) else ","
        return f"{','.join(map(str, value[:-1]))}{last}{value[-1]}"
    if isinstance(value, tuple):
        return [to_text(x) for x in value]
    return str(value) if isinstance(value, (Path, Data, Fraction)) else value
