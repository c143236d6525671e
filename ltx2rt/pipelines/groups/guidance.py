"""Guidance: its scales, the choice to have it, and a negative prompt without it (NAG)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from operator import index
from typing import TYPE_CHECKING

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of, spelling
from ltx2rt.models.geometry import Geometry
from ltx2rt.models.guided_step import STG, Branches, perturbed_blocks
from ltx2rt.pipelines.groups.group import Added, Group
from ltx2rt.pipelines.groups.steps import Interval, Skips, Steps
from ltx2rt.stages.schedule import DISTILLED_SIGMAS
from ltx2rt.stages.stage import MODALITIES

if TYPE_CHECKING:
    from ltx2rt.pipelines.clip import Clip, Draft
    from ltx2rt.pipelines.request import Request

flag = flags_of("guidance")

NONE = {"cfg": 1, "stg": 0, "modality": 1, "rescale": 0}  # scales that guide by nothing
NONE_OF = {f"{m}_{name}": value for m in MODALITIES for name, value in NONE.items()}
UNGUIDED = NONE | {"steps": len(DISTILLED_SIGMAS) - 1}  # as distilled steps are
NEUTRAL = np.array([[[*NONE.values()]] * 2], np.float32)  # the conditional branch alone
NAG = "--nag"
TAU, ALPHA = 2.5, 0.25  # those of ComfyUI-KJNodes' node for LTX-2, whose scale is 11


def parse_blocks(text: str | Sequence[int | str]) -> tuple[int | str, ...]:
    """Block numbers, or text with commas; after `video=` or `audio=` those of one stream. Raises
    TypeError or ValueError."""
    found, of = list[int | str](), ""
    for part in text.split(",") if isinstance(text, str) else text:
        name, equals, number = str(part).strip().rpartition("=")
        if equals and name not in MODALITIES:
            raise ValueError
        of = f"{name}=" if equals else of
        if number or equals:
            block = int(number) if isinstance(part, str) else index(part)
            found.append(f"{of}{block}" if of else block)
    return tuple(found)


def changes(scale: float | str) -> list[tuple[float, float]]:
    """The noise levels from which on a scale has each of its values, and these. Raises ValueError."""
    first, *rest = str(scale).split(",")
    pairs = (map(float, part.split(":")) for part in rest)
    return [(1.0, float(first)), *((level, value) for level, value in pairs)]


def parse_scale(given: str | float) -> float | str:
    """A number, or X,LEVEL:X,... with levels that fall from 1. Raises TypeError or ValueError."""
    levels, values = np.array(changes(given)).T
    if len(levels) == 1:
        return float(given)
    if not ((np.diff(levels) < 0).all() and levels[-1] > 0 and (abs(values) < 1e6).all()):
        raise ValueError
    return str(given).replace(" ", "")


scale_flag = partial(
    flag,
    parse=parse_scale,
    metavar="X[,LEVEL:X]",
    expects="a number, or one and others from noise levels down, such as 7,0.9:3,0.5:1",
    json=["number", "string"],
)


@dataclass(frozen=True)
class Scales(Group):
    """Scales of guidance, which noise levels may change; a modality without flags is guided by
    nothing."""

    stg_blocks: tuple[int | str, ...] | None = flag(
        None,
        "transformer blocks whose self-attention STG skips, such as 14,19 or, of one stream each, "
        "video=14,19,audio=29 (default: 29 for LTX-2.0, else 28)",
        parse_blocks,
        metavar="LIST",
        expects="block numbers such as 28, 14,19 or video=14,19,audio=29",
        json="array",
    )

    @property
    def given(self) -> dict[str, float | str]:
        """All eight scales by name."""
        return {name: vars(self).get(name, usual) for name, usual in NONE_OF.items()}

    @property
    def levels(self) -> tuple[float, ...]:
        """Noise levels, falling, from which on some scale is another."""
        found = {level for scale in self.given.values() for level, _ in changes(scale)[1:]}
        return tuple(sorted(found, reverse=True))

    @property
    def scales(self) -> np.ndarray:
        """f32[1 + levels, 2, 4]: at the start and from each level on, rows video and audio, columns
        cfg, stg, modality, rescale."""
        found = [
            next(value for start, value in reversed(changes(scale)) if level <= start)
            for level in (1.0, *self.levels)
            for scale in self.given.values()
        ]
        return np.array(found, np.float32).reshape(-1, len(MODALITIES), len(NONE))

    def into(self, draft: Draft, model: ModelConfig) -> None:
        if not draft.request.is_guided:
            return
        num_layers = model.transformer.num_layers
        usual = model.release.stg_blocks(num_layers)
        given = usual if self.stg_blocks is None else self.stg_blocks
        if given == () and self.scales[..., STG].any():
            raise InputError(
                "--stg-blocks: no block is given; name one, or set --video-stg 0 --audio-stg 0"
            )
        for stream in MODALITIES if given else ():
            own = perturbed_blocks(given, stream)
            if wrong := [block for block in own if not 0 <= block < num_layers]:
                raise InputError(
                    f"--stg-blocks: block {wrong[0]}, but the model has blocks 0 to {num_layers - 1}"
                )
            given += () if own else tuple(f"{stream}={block}" for block in usual)
        draft.fill(stg_blocks=given)

    def negates(self, request: Request) -> bool:
        return request.is_guided and Branches.of(self.scales).uncond


@dataclass(frozen=True)
class VideoScales(Scales):
    video_cfg: float | str = scale_flag(
        3.0, "scale of classifier-free guidance for video, 1 for none"
    )
    video_stg: float | str = scale_flag(
        1.0, "scale of spatio-temporal guidance (STG) for video, 0 for none"
    )
    video_modality: float | str = scale_flag(
        3.0, "scale of guidance by the sound for video, 1 for none"
    )
    video_rescale: float | str = scale_flag(
        0.7, "rescaling of guided video to its unguided spread, 0 for none"
    )


@dataclass(frozen=True)
class SoundScales(Scales):
    """Scales for sound that no video guides."""

    audio_cfg: float | str = scale_flag(
        7.0, "scale of classifier-free guidance for sound, 1 for none"
    )
    audio_stg: float | str = scale_flag(
        1.0, "scale of spatio-temporal guidance (STG) for sound, 0 for none"
    )
    audio_rescale: float | str = scale_flag(
        0.7, "rescaling of guided sound to its unguided spread, 0 for none"
    )


@dataclass(frozen=True)
class Guidance(SoundScales, VideoScales):
    audio_modality: float | str = scale_flag(
        3.0, "scale of guidance by the video for sound, 1 for none"
    )


GUIDES = (Steps, Skips, Interval, Scales)  # groups of flags that only guided steps read


def guiding(request: Request) -> str:
    """The first flag that asks for other steps than distilled ones, "" for none."""
    for group in request.groups:
        if isinstance(group, GUIDES):
            for f in fields(group):
                value, usual = getattr(request, f.name), getattr(group, f.name)
                neutral = UNGUIDED.get(f.name.rpartition("_")[2], usual)
                if value not in (usual, neutral):
                    return spelling(f)
    return ""


@dataclass(frozen=True)
class ByWeights(Group):
    """Steps are guided unless the weights turn out to be distilled (`Request.unguided`)."""

    guided: bool | None = field(default=None, repr=False)


@dataclass(frozen=True)
class ByChoice(Group):
    """Steps are guided only if asked for; else flags of guidance are refused."""

    guided: bool = flag(
        False, "run --steps guided steps in place of 8 distilled ones", group="sampling"
    )

    def check(self, request: Request) -> None:
        if not self.guided and (flag := guiding(request)):
            raise InputError(
                f"{flag}: 8 distilled steps are made, without guidance; leave it out, or add "
                "--guided"
            )


def parse_nag(text: str | float | Sequence[float]) -> tuple[float, float, float]:
    """SCALE[:TAU[:ALPHA]], or as many numbers. Raises TypeError or ValueError."""
    given = text.split(":") if isinstance(text, str) else text
    parts = [given] if isinstance(given, (int, float)) else given
    scale, tau, alpha = [*map(float, parts), *(TAU, ALPHA)[max(len(parts) - 1, 0) :]]
    if not (1 <= scale < math.inf and 0 < tau < math.inf and 0 <= alpha <= 1):
        raise ValueError
    return scale, tau, alpha


@dataclass(frozen=True)
class Nag(Group):
    nag: tuple[float, float, float] | None = flag(
        None,
        "strength of the negative prompt in attention where no guidance runs (NAG), 1 for none, "
        "often 11",
        parse_nag,
        metavar="SCALE[:TAU[:ALPHA]]",
        expects="SCALE[:TAU[:ALPHA]], a scale of 1 or more, TAU above 0 and ALPHA from 0 to 1, such "
        f"as 11 or 11:{TAU}:{ALPHA}",
        json="string",
    )

    def check(self, request: Request) -> None:
        if self.nag and request.guided:
            raise InputError(f"{NAG}: for steps without guidance; leave it or --guided out")
        if not self.nag and request.negative_prompt is not None and not request.is_guided:
            instead = "add --guided" if request.has(ByChoice) else "leave it out"
            raise InputError(
                f"--negative-prompt: {request.name} has no guidance; add {NAG} 11, or {instead}"
            )

    def fits(self, clip: Clip, model: ModelConfig) -> None:
        if self.nag and clip.guiding:
            raise InputError(
                f"{NAG}: {clip.request.name} is guided, as these weights are not known to be "
                "distilled; leave it out: guidance obeys --negative-prompt"
            )

    def stages(self, clip: Clip, name: str, geometry: Geometry, tiling: str) -> Added:
        return Added({"nag": self.nag})

    def negates(self, request: Request) -> bool:
        return self.nag is not None
