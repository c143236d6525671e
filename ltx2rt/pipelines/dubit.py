"""dubit: a given clip whose people say something else, in their own voices, by the DubIt IC-LoRA.

Both stages of `distilled` see the file's frames as a reference beside the clip, and stage 1 the
file's sound as sound before it. Stage 2 keeps the sound of stage 1, beside that same sound as its
reference. The prompt says who speaks, and what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flag, flag_like
from ltx2rt.media.video import VideoInfo, require_constant_rate, video_info
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines.given_clip import FLAG, FromClip
from ltx2rt.pipelines.ic_lora import reference, references_of
from ltx2rt.pipelines.nag import Nagged
from ltx2rt.pipelines.request import NEUTRAL, Loras, VideoRequest, check_step, parse_fps
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.conditioning import Reference, ReferenceSpec
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, STAGE2_SIGMAS
from ltx2rt.stages.sound_reference import LatentSound, SoundReference
from ltx2rt.stages.stage import Stage
from ltx2rt.stages.upsample import Upsample


@dataclass(frozen=True)
class SeenClip(FromClip):
    """Two distilled stages beside a reference of the file's frames, both with the one LoRA that has
    learnt it."""

    scale: ClassVar[int] = 2
    num_stages: ClassVar[int] = 2
    distilled: ClassVar[str] = "optional"

    reference_strength: float = flag(
        1.0,
        "strength of the clip's frames as a reference, 1 to keep them as they are",
        group="conditioning",
        least=0,
        most=1,
    )
    width: int = flag_like(
        VideoRequest, "width", None, parse=int, help="width in pixels (default: the file's)"
    )
    height: int = flag_like(
        VideoRequest, "height", None, parse=int, help="height in pixels (default: the file's)"
    )

    # --- checks -----------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        if self.num_videos > 1:
            raise InputError(
                f"--num-videos: {self.num_videos}, but {self.name} makes one; run it for each seed"
            )

    def check_options(self, options: ModelOptions) -> None:
        super().check_options(options)
        if len(options.loras) != 1:
            raise InputError(
                f"--lora: {len(options.loras)} given, {self.name} takes one, its IC-LoRA"
            )
        if options.loras[0].stage:
            raise InputError(
                f"--lora: {options.loras[0].path} is for {options.loras[0].stage}, {self.name} "
                "merges it in both stages; write FILE or FILE:STRENGTH"
            )

    def check_clip(self, info: VideoInfo) -> None:
        """Raises InputError for a file that the pipeline cannot start from."""

    def resolved(self: Any, model: ModelConfig) -> Any:
        """Reads the file whole, once."""
        self.check()
        path, step = self.source_path, model.video_vae.time_factor
        info = self.info or video_info(path, FLAG)
        require_constant_rate(path, FLAG, info)
        self.check_clip(info)
        if info.num_frames <= step:
            raise InputError(
                f"{FLAG}: {path} has {info.num_frames} frames, expected {step + 1} or more"
            )
        unit = model.video_vae.space_factor * self.factor(model).numerator
        for side in ("width", "height"):
            if getattr(self, side) is None:
                rule = f"divisible by {unit} (--{side} gives another one than the file's)"
                check_step(f"{FLAG}: {side}", getattr(info, side), unit, 0, "px", rule)
        sizes = {
            "width": self.width or info.width,
            "height": self.height or info.height,
            "num_frames": (info.num_frames - 1) // step * step + 1,
            "fps": parse_fps(info.fps),
        }
        return Nagged.resolved(replace(self, info=info, **sizes), model)

    # --- what is made -----------------------------------------------------------------------------

    def remarks(self, model: ModelConfig) -> Iterator[str]:
        if over := self.source.num_frames - self.num_frames:
            yield f"the last {over} of the file's {self.source.num_frames} frames are left out"

    def encoder_tiling(self, options: ModelOptions, pixels: int) -> str:
        """How a reference with so many pixels in a frame is encoded; not how clips are decoded."""
        return options.vae_tiling

    def seen(
        self, clip: Geometry, number: int, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> Reference:
        """The file's frames as the reference of a stage."""
        spec, factors = (
            ReferenceSpec(self.source_path, self.reference_strength),
            references_of(self, model, loras),
        )
        height, width = (side // factors[0] for side in clip.size_px)
        tiling = self.encoder_tiling(options, height * width)
        return reference(spec, self.num_frames, FLAG, clip, model, factors, tiling, number)


@dataclass(frozen=True)
class DubIt(SeenClip):
    """The file's sound is a reference, too."""

    name: ClassVar[str] = "dubit"
    summary: ClassVar[str] = "a given clip with other words, in its own voices, by an IC-LoRA"
    example: ClassVar[str] = "--video-path talk.mp4 --lora dubit.safetensors"

    video_path: Path | None = flag_like(
        FromClip,
        "video_path",
        help="clip whose people get other words; its length and rate are kept (required)",
    )

    def check_clip(self, info: VideoInfo) -> None:
        if not info.has_sound:
            raise InputError(
                f"{FLAG}: {self.source_path} has no sound, whose voices dubit keeps; pass a clip "
                "with sound"
            )

    def remarks(self, model: ModelConfig) -> Iterator[str]:
        yield from super().remarks(model)
        if model.release.name == "2.0":
            yield "no DubIt LoRA is known for LTX-2.0"

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        """The DubIt LoRA is merged in both stages, the distilled one last."""
        half, full = self.geometry(model, self.factor(model)), self.geometry(model)
        merged = (*loras.user, *([loras.distilled] if loras.distilled else []))
        how = model, options, loras
        sound = SoundReference(self.source_path, half, FLAG, before=True)
        first = {"guidance": NEUTRAL, "sound": True}
        second = {"guidance": NEUTRAL, "frozen": ("audio",)}
        return [
            *self.text,
            *self.denoise(
                "stage1",
                half,
                options,
                DISTILLED_SIGMAS,
                merged,
                (self.seen(half, 0, *how), sound),
                **first,
            ),
            Upsample(half, self.num_videos, self.factor(model)),
            *self.denoise(
                "stage2",
                full,
                options,
                STAGE2_SIGMAS,
                merged,
                (self.seen(full, 1, *how), LatentSound(full)),
                **second,
            ),
            *self.decoded(full, model, options),
        ]


PIPELINE = DubIt
