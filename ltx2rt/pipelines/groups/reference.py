"""A given clip, or other videos, that the tokens of a clip see beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of
from ltx2rt.media.footage import Footage
from ltx2rt.media.video import is_light
from ltx2rt.models.geometry import Geometry, latent_frames, pixel_frames
from ltx2rt.pipelines.groups.size import check_step
from ltx2rt.pipelines.groups.source_clip import FLAG, SourceClip
from ltx2rt.session.options import LoraSpec, ModelOptions
from ltx2rt.stages.inset import Inset
from ltx2rt.stages.references import Reference
from ltx2rt.stages.source_video import SourceVideo, usable_frames
from ltx2rt.stages.tiling import plan_encoder_tiles
from ltx2rt.weights.lora import reference_factors

flag = flags_of("conditioning")


@dataclass(frozen=True)
class ReferenceClip(SourceClip):
    """A clip whose frames both stages see, with the one LoRA that has learnt it in both. whole_px:
    pixels of a frame up to which the reference is encoded whole, however clips are decoded."""

    whole_px: ClassVar[int] = 0

    reference_strength: float = flag(
        1.0, "strength of the clip as a reference, 1 as it is", least=0, most=1
    )

    def check(self, request: Any) -> None:
        super().check(request)
        if is_light(self.path):
            raise InputError(f"{FLAG}: {self.path} holds EXR images, expected a clip of 8 bits")
        if request.num_videos > 1:
            raise InputError(
                f"--num-videos: {request.num_videos}, but {request.name} makes one; run it for "
                "each seed"
            )

    def check_options(self, request: Any, options: ModelOptions) -> None:
        if len(options.loras) != 1:
            raise InputError(
                f"--lora: {len(options.loras)} given, {request.name} takes one, its IC-LoRA"
            )
        if options.loras[0].stage:
            raise InputError(
                f"--lora: {options.loras[0].path} is for {options.loras[0].stage}, {request.name} "
                "merges it in both stages; write FILE or FILE:STRENGTH"
            )

    def restated(self, request: Any, model: ModelConfig) -> dict[str, Any]:
        facts, step = super().restated(request, model), model.video_vae.time_factor
        if facts["num_frames"] <= step:
            found = facts["num_frames"]
            raise InputError(f"{FLAG}: {self.path} has {found} frames, expected {step + 1} or more")
        return facts

    def seen(
        self, request: Any, number: int, model: ModelConfig, options: ModelOptions, loras: Any
    ) -> Reference:
        """The file's frames as the reference of a stage, of which 0 is the first. Where a smaller
        reference does not divide the clip, it reaches over its edge."""
        scale = 1 if number else request.factor(model)
        clip = request.geometry(model, scale)
        factors = reference_factors(lora.path for lora in loras.user)
        height, width = (-(-n // factors[0]) * clip.space_factor for n in (clip.rows, clip.columns))
        tiling = "off" if height * width <= self.whole_px else options.vae_tiling
        own, unit = (request.height, request.width), factors[0] * scale
        around = int(height * unit), int(width * unit)
        inset = Inset(own, around, mirrored=request.mirrored) if around != own else None
        return reference(
            self.found, self.reference_strength, clip, model, factors, tiling, number,
            inset=inset, whole=pixel_frames(clip.frames, clip.time_factor),
        )  # fmt: skip


def references_of(request: Any, model: ModelConfig, loras: tuple[LoraSpec, ...]) -> tuple[int, int]:
    """How much smaller and sparser references are, by the LoRAs' headers. Raises InputError if
    the request's size does not divide."""
    downscale, stride = reference_factors(lora.path for lora in loras)
    unit = model.video_vae.space_factor * request.factor(model).numerator * downscale
    height, width = request.geometry(model).size_px
    for side, value in (("--width", width), ("--height", height)):
        rule = f"divisible by {unit} ({request.name} with a LoRA for references of 1/{downscale} the size)"
        check_step(side, value, unit, 0, "px", rule)
    return downscale, stride


def reference(
    footage: Footage,
    strength: float,
    clip: Geometry,
    model: ModelConfig,
    factors: tuple[int, int],
    tiling: str,
    number: int = 0,
    attention: float = 1.0,
    mask: Path | None = None,
    whole: int = 0,
    **how: Any,
) -> Reference:
    """A file's frames as reference of a stage. factors: as `references_of`; whole: frames to which
    its last one is repeated; how: more fields of `SourceVideo`."""
    downscale, stride = factors
    found = whole or footage.info.num_frames
    frames = latent_frames(usable_frames(found, clip.time_factor, stride), clip.time_factor)
    rows, columns = (-(-n // downscale) for n in (clip.rows, clip.columns))
    own = replace(clip, frames=frames, rows=rows, columns=columns)
    tiles = plan_encoder_tiles(tiling, (frames, rows, columns), model.video_vae)
    source = SourceVideo(footage, own, tiles, stride, **how)
    return Reference(source, clip, number, strength, downscale, attention, mask)
