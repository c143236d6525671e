"""A given clip, or other videos, that the tokens of a clip see, and the IC-LoRA that has learnt it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of
from ltx2rt.media.footage import Footage
from ltx2rt.media.video import is_light
from ltx2rt.models.geometry import Geometry, latent_frames, pixel_frames
from ltx2rt.pipelines.groups.group import Group
from ltx2rt.pipelines.groups.size import check_step
from ltx2rt.pipelines.groups.source_clip import SourceClip
from ltx2rt.session.options import LoraSpec, ModelOptions
from ltx2rt.stages.inset import Inset
from ltx2rt.stages.references import Reference
from ltx2rt.stages.source_video import SourceVideo, usable_frames
from ltx2rt.stages.tiling import plan_encoder_tiles
from ltx2rt.weights import hub
from ltx2rt.weights.checkpoint import Checkpoint
from ltx2rt.weights.lora.file import reference_factors, release_of
from ltx2rt.weights.parts import only

if TYPE_CHECKING:
    from ltx2rt.pipelines.build import Loras
    from ltx2rt.pipelines.clip import Clip, Draft
    from ltx2rt.pipelines.request import Request

flag = flags_of("conditioning")


@dataclass(frozen=True)
class Learnt(Group):
    """LoRAs of a pipeline that cannot do without. words: in the names of released ones, of which
    the one near the weights is taken where no flag names any. learnt: once resolved."""

    words: ClassVar[tuple[str, ...]] = ()

    learnt: tuple[LoraSpec, ...] = field(default=(), repr=False)

    def wanted(self, request: Request) -> tuple[str, ...]:
        """The words for this request; empty if only its user knows the LoRA."""
        return self.words

    def check_options(self, request: Request, options: ModelOptions) -> None:
        if not options.loras and (not self.wanted(request) or hub.parse_repo(options.model)):
            raise self._lacking(request)

    def _lacking(self, request: Request, near: Path | None = None) -> InputError:
        words, where = self.wanted(request), f", and none is near {near}" if near else ""
        known = f" (*{words[0]}*.safetensors)" if words else " that its references are for"
        text = f"--lora: the {request.name} pipeline needs the LoRA{known}{where}; pass its file"
        return InputError(text)

    def from_options(
        self, request: Request, options: ModelOptions, checkpoint: Checkpoint
    ) -> dict[str, Any]:
        if options.loras:
            return {"learnt": options.loras}
        words = self.wanted(request)
        named = [p for p in checkpoint.loras_found if any(word in p.name.lower() for word in words)]
        own = [path for path in named if release_of(path) == checkpoint.config.release.name]
        if found := only("lora", own or named):
            return {"learnt": (LoraSpec(found),)}
        raise self._lacking(request, checkpoint.path)


@dataclass(frozen=True)
class ReferenceClip(Learnt, SourceClip):
    """A clip whose frames every stage sees, with the one LoRA that has learnt it in all. whole_px:
    pixels of a frame up to which the reference is encoded whole, however clips are decoded.
    larger: the clip's sides over the file's. moving: it has more frames than one latent."""

    whole_px: ClassVar[int] = 0
    moving: ClassVar[bool] = True

    larger: int = field(default=1, repr=False)

    reference_strength: float = flag(
        1.0, "strength of the clip as a reference, 1 as it is", least=0, most=1
    )

    def check(self, request: Request) -> None:
        super().check(request)
        if is_light(self.path):
            raise InputError(
                f"{self.spelled}: {self.path} holds EXR images, expected a clip of 8 bits"
            )
        if request.num_videos > 1:
            raise InputError(
                f"--num-videos: {request.num_videos}, but {request.name} makes one; run it for "
                "each seed"
            )

    def check_options(self, request: Request, options: ModelOptions) -> None:
        super().check_options(request, options)
        if len(options.loras) > 1:
            raise InputError(
                f"--lora: {len(options.loras)} given, {request.name} takes one, its IC-LoRA"
            )
        for lora in options.loras:
            if lora.stage:
                raise InputError(
                    f"--lora: {lora.path} is for {lora.stage}, {request.name} merges it in all "
                    "stages; write FILE or FILE:STRENGTH"
                )

    def into(self, draft: Draft, model: ModelConfig) -> None:
        super().into(draft, model)
        found, step = draft.request.num_frames, model.video_vae.time_factor
        if self.moving and found <= step:
            raise InputError(
                f"{self.spelled}: {self.path} has {found} frames, expected {step + 1} or more"
            )

    def seen(
        self, clip: Clip, number: int, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> Reference:
        """The file's frames as the reference of a stage, of which 0 is the first: scaled to its size,
        then with a border. Where a smaller reference does not divide the clip, it reaches over its
        edge."""
        scale = 1 if number else clip.request.factor(model)
        geometry = clip.geometry(model, scale)
        factors = reference_factors(lora.path for lora in loras.user)
        factors = max(factors[0], self.larger), factors[1]
        cells = (-(-n // factors[0]) for n in (geometry.rows, geometry.columns))
        height, width = (n * geometry.space_factor for n in cells)
        tiling = "off" if height * width <= self.whole_px else options.vae_tiling
        share, mirrored = factors[0] * scale, clip.request.mirrored
        own = max(round(clip.height / share), 1), max(round(clip.width / share), 1)
        inset = Inset(own, (height, width), mirrored=mirrored) if own != (height, width) else None
        footage = clip.given
        if footage.resize and (footage.resize.keeps_shape or footage.resize.how == "crop"):
            footage = replace(footage, resize=None)  # it is scaled once, in float
        return reference(
            footage, self.reference_strength, geometry, factors, tiling, number,
            inset=inset, whole=pixel_frames(geometry.frames, geometry.time_factor),
        )  # fmt: skip


def references_of(clip: Clip, model: ModelConfig, loras: tuple[LoraSpec, ...]) -> tuple[int, int]:
    """How much smaller and sparser references are, by the LoRAs' headers. Raises InputError if
    the clip's size does not divide."""
    downscale, stride = reference_factors(lora.path for lora in loras)
    unit = model.video_vae.space_factor * clip.request.factor(model).numerator * downscale
    height, width = clip.geometry(model).size_px
    for side, value in (("--width", width), ("--height", height)):
        rule = f"divisible by {unit} ({clip.request.name} with a LoRA for references of 1/{downscale} the size)"
        check_step(side, value, unit, 0, "px", rule)
    return downscale, stride


def reference(
    footage: Footage,
    strength: float,
    clip: Geometry,
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
    source = SourceVideo(footage, own, plan_encoder_tiles(tiling, own), stride, **how)
    return Reference(source, clip, number, strength, downscale, attention, mask)
