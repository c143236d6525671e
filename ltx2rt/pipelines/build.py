"""The stages of a clip, as most pipelines put them together: text, denoising in one pass or two,
decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.models.geometry import Geometry, pixel_frames
from ltx2rt.pipelines.clip import Clip
from ltx2rt.pipelines.groups.guidance import NEUTRAL
from ltx2rt.session.options import LoraSpec, ModelOptions
from ltx2rt.stages.conditioning import Conditioning, GivenLatents
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.duration import PredictDuration
from ltx2rt.stages.frames import decoding
from ltx2rt.stages.inset import Cut
from ltx2rt.stages.schedule import STAGE2_SIGMAS, from_level
from ltx2rt.stages.sound import Sound
from ltx2rt.stages.stage import Stage
from ltx2rt.stages.text import GivenText, Text
from ltx2rt.stages.upsample import Upsample

NO_CHANGE: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Loras:
    """user: in the order given; distilled: what the pipeline merges last where it wants it, None if
    it has none; text: LoRAs that change the text encoder or its connectors; idle: distilled ones
    that flags name and that distilled weights do not take."""

    user: tuple[LoraSpec, ...] = ()
    distilled: LoraSpec | None = None
    text: tuple[LoraSpec, ...] = ()
    idle: tuple[LoraSpec, ...] = ()

    @property
    def extra(self) -> tuple[LoraSpec, ...]:
        """The distilled one, if there is any."""
        return (self.distilled,) if self.distilled else ()

    def of(self, stage: str) -> tuple[LoraSpec, ...]:
        return tuple(lora for lora in self.user if lora.stage in (None, stage))


def text(clip: Clip) -> list[Stage]:
    """The stages that read the prompts, and choose the clip's length where the model is to."""
    window_s, given = clip.request.auto_duration, clip.request.context
    read = GivenText(given, clip.prompts) if given else Text(clip.prompts)
    return [read, *([PredictDuration(window_s, clip.fps)] if window_s else [])]


def guiding(clip: Clip) -> dict[str, Any]:
    """Fields of the first stage if it is guided."""
    return vars(clip.guiding) if clip.guiding else {}


def freshening(clip: Clip, model: ModelConfig) -> dict[str, Any]:
    """Fields of the first stage of a new clip in distilled steps, which add fresh noise with
    LTX-2.5."""
    fresh = clip.guiding is None and clip.request.by_weights
    return {"sampler": model.release.samplers[0]} if fresh else {}


def denoise(
    clip: Clip, name: str, geometry: Geometry, options: ModelOptions, sigmas: np.ndarray,
    loras: tuple[LoraSpec, ...],
    given: Sequence[Conditioning] = (), kind: type[Denoise] = Denoise, **more: Any,
) -> list[Stage]:  # fmt: skip
    """One denoising stage, after the encoding of what its groups and `given` condition it on. more:
    fields of `Denoise` in place of those of the groups; guidance: none by default."""
    fields: dict[str, Any] = {"guidance": NEUTRAL, "rule": options.cross_timestep_rule}
    added = [group.stages(clip, name, geometry, options.vae_tiling) for group in clip.request]
    for one in added:
        fields |= one.fields
    sigmas = fields.pop("sigmas", sigmas)
    given = *(x for one in added for x in one.given), *given
    stage = kind(name, geometry, sigmas, loras, clip.noise, **fields | more | {"given": given})
    return [
        *(stage for one in added for stage in one.before),
        *([GivenLatents(name, given)] if given else []),
        stage,
        *(stage for one in added for stage in one.after),
    ]


def denoise_once(
    clip: Clip, geometry: Geometry, options: ModelOptions, loras: Loras,
    given: Sequence[Conditioning] = (), name: str = "stage1", level: float = 1.0, **more: Any,
) -> list[Stage]:  # fmt: skip
    """The only denoising stage, which makes the sound as well. level: of noise, from which it
    starts. more: as of `denoise`."""
    merged = (*loras.of("stage1"), *loras.extra)
    how: dict[str, Any] = {"sound": True, **guiding(clip), **more}
    sigmas = from_level(clip.schedule, level)
    return denoise(clip, name, geometry, options, sigmas, merged, given, **how)


def in_two_passes(
    clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras,
    first: Mapping[str, Any] = NO_CHANGE, second: Mapping[str, Any] = NO_CHANGE,
    sound: bool = True, **both: Any,
) -> list[Stage]:  # fmt: skip
    """All stages of a clip that is denoised at the first stage's size, upsampled, and denoised at
    full size. User LoRAs are merged in their order, the distilled one last, into dev weights in
    stage 2 alone where they are guided in stage 1. first, second: arguments of `denoise` in place of
    these; both: of both. sound: whether there is any to decode."""
    request, half, full = clip.request, clip.first(model), clip.geometry(model)
    early = loras.extra if request.takes_distilled == "optional" else ()
    one: Any = {"sigmas": clip.schedule, "loras": (*loras.of("stage1"), *early)}
    one |= guiding(clip) | freshening(clip, model)
    two: Any = {"sigmas": STAGE2_SIGMAS, "loras": (*loras.of("stage2"), *loras.extra)}
    return [
        *text(clip),
        *denoise(clip, "stage1", half, options, **{**one, **both, **first}),
        Upsample(half, len(clip.seeds), request.factor(model)),
        *denoise(clip, "stage2", full, options, **{**two, **both, **second}),
        *decoded(clip, full, model, options, sound),
    ]


def decoded(
    clip: Clip, geometry: Geometry, model: ModelConfig, options: ModelOptions, sound: bool = True
) -> list[Stage]:
    """The stages that make the clip of the last latents, and of the sound that a stage kept. sound:
    whether there is any to decode."""
    heard = sound and clip.audio
    draft = clip.request.quality == "draft" and model.video_vae.decoder
    asked = options.video_decoder or ("conv" if draft else None)
    frames = decoding(asked, geometry, model, options.vae_tiling, clip.noise)
    inset = clip.inset(model, geometry)
    made = pixel_frames(geometry.frames, geometry.time_factor)
    over = made - clip.seen_frames if clip.source else 0
    stages: list[Stage] = [Sound(geometry, len(clip.seeds))] if heard else []
    return [*stages, frames, *([Cut(made - over, inset)] if inset or over else [])]
