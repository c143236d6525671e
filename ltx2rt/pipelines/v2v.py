"""v2v: a given clip made anew from some noise level on: the less noise, the more of it stays.

The clip's latents are mixed with noise, x = (1 - level) source + level noise, and take the steps of
the schedule that are left below that level. ComfyUI calls this denoise, diffusers strength; both of
those are shares of the steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flag, flag_like
from ltx2rt.pipelines import step_plans
from ltx2rt.pipelines.given_clip import FLAG, GivenClip, read_clip
from ltx2rt.pipelines.request import Loras, VideoRequest
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.conditioning import ImageSpec
from ltx2rt.stages.schedule import from_level
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.source_video import SourceVideo
from ltx2rt.stages.stage import Stage
from ltx2rt.stages.tiling import plan_encoder_tiles


@dataclass(frozen=True)
class VideoToVideo(GivenClip):
    name: ClassVar[str] = "v2v"
    summary: ClassVar[str] = "make a given clip anew, from a noise level on"
    example: ClassVar[str] = "--video-path clip.mp4 --noise-level 0.725"

    noise_level: float = flag(
        0.725,
        "noise level to start from, 1 to keep nothing of the clip",
        group="conditioning",
        above=0,
        most=1,
    )
    sound: str | None = flag(
        None,
        "keep the clip's sound, mix it with noise as well, or make new sound for the clip first "
        "(default: keep, or new if it has none)",
        group="conditioning",
        choices=("keep", "noise", "new"),
    )
    images: tuple[ImageSpec, ...] = flag_like(VideoRequest, "images")
    latents_in: Path | None = flag_like(VideoRequest, "latents_in")

    def check(self) -> None:
        super().check()
        step_plans.check(
            replace(self, guidance_interval=None),
            "v2v begins within the schedule; use --steps",
        )

    def resolved(self, model: ModelConfig) -> Any:
        """Reads the file whole, once."""
        self.check()
        info = self.info or read_clip(self.source_path, FLAG, model, whole=True)
        sound = self.sound or ("keep" if info.has_sound else "new")
        if sound != "new" and not info.has_sound:
            raise InputError(
                f"--sound: {sound}, but {self.source_path} has no sound; leave it out, and sound "
                "is made"
            )
        if sound == "new" and self.num_videos > 1:
            raise InputError(
                f"--num-videos: {self.num_videos}, but new sound is made for one; run it for each "
                "seed"
            )
        sizes = {name: getattr(info, name) for name in ("width", "height", "num_frames", "fps")}
        return replace(self, info=info, sound=sound, **sizes).with_defaults(model)

    def remarks(self, model: ModelConfig) -> Iterator[str]:
        steps = len(self.schedule) - 1
        left = len(from_level(self.schedule, self.noise_level)) - 1
        from_there = f"{left} of {steps} steps from noise level {self.noise_level:g} on"
        yield f"{from_there}, a strength of {left / steps:.2g} in diffusers"
        if self.sound == "new":
            yield f"sound is made first, in {steps} steps, for the file's own pictures"

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        """New sound is made before the pictures, for those of the file, by all steps of the
        schedule."""
        full = self.geometry(model)
        shape = (full.frames, full.rows, full.columns)
        times = self.source.times_s
        assert times, "a file without timestamps is refused"
        tiles = plan_encoder_tiles(options.vae_tiling, shape, model.video_vae)
        stages: list[Stage] = [SourceVideo(self.source_path, full, tiles)]
        if self.sound != "new":
            kept = {"sound": self.audio and self.sound == "keep", "num_videos": self.num_videos}
            start_s = float(times[0])
            stages += [
                SourceSound(
                    self.source_path, full, start_s, fit="zeros", record="source.audio", **kept
                )
            ]
        stages += self.text
        if self.sound == "new":
            bare = replace(self, images=(), latents_in=None)
            stages += bare.denoise_once(full, options, loras, name="sound", frozen=("video",))
        mixed = ("video", "audio") if self.sound == "noise" else ("video",)
        frozen = () if self.sound == "noise" else ("audio",)
        level = {"level": self.noise_level, "mixed": mixed, "frozen": frozen}
        stages += self.denoise_once(full, options, loras, sound=self.sound == "noise", **level)
        sounds = replace(self, audio=self.audio and self.sound != "keep")
        return [*stages, *sounds.decoded(full, model, options)]


PIPELINE = VideoToVideo
