"""v2v: a given clip made anew from some noise level on: the less noise, the more of it stays.

The clip's latents are mixed with noise, x = (1 - level) source + level noise, and take the steps of
the schedule that are left below that level. ComfyUI calls this denoise, diffusers strength; both of
those are shares of the steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of
from ltx2rt.pipelines.build import Loras, decoded, denoise_once, text
from ltx2rt.pipelines.clip import Clip, Draft
from ltx2rt.pipelines.groups import FROM_CLIP
from ltx2rt.pipelines.groups.guidance import ByChoice, Guidance, Nag
from ltx2rt.pipelines.groups.images import Images
from ltx2rt.pipelines.groups.segments import Segments
from ltx2rt.pipelines.groups.source_clip import SourceClip
from ltx2rt.pipelines.groups.steps import Interval, Steps
from ltx2rt.pipelines.groups.text import NegativePrompt, PromptsByTime
from ltx2rt.pipelines.request import Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.schedule import from_level
from ltx2rt.stages.stage import Stage

flag = flags_of("conditioning")


class VideoToVideo(Request):
    name = "v2v"
    summary = "redraw a given clip, starting from a noise level"
    task = "Restyle a clip"
    example = "--video-path clip.mp4 --noise-level 0.725"
    distilled = "optional"
    groups = (
        *FROM_CLIP, PromptsByTime(), Images(), NegativePrompt(), Steps(), Interval(), Guidance(),
        Nag(), ByChoice(), Segments(),
    )  # fmt: skip

    noise_level: float = flag(
        0.725, "noise level to start from, 1 to keep nothing", asks="v2v", above=0, most=1
    )
    sound: str | None = flag(
        None,
        "keep the clip's sound, mix it with noise as well, or make new sound for the clip first "
        "(default: keep; a silent clip stays silent)",
        choices=("keep", "noise", "new"),
    )

    def into(self, draft: Draft, model: ModelConfig) -> None:
        if self.sound == "noise" and not draft.given.info.has_sound:
            raise InputError(
                f"--sound: noise, but {self.video_path} has no sound; leave it out, or write new"
            )
        if self.sound == "new" and self.num_videos > 1:
            raise InputError(
                f"--num-videos: {self.num_videos}, but new sound is made for one; run it for each "
                "seed"
            )
        draft.sound = self.sound or "keep"
        draft.fill(sound=draft.sound)

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        steps = len(clip.schedule) - 1
        left = len(from_level(clip.schedule, self.noise_level)) - 1
        yield (
            f"{left} of {steps} steps from noise level {self.noise_level:g} on, a strength of "
            f"{left / steps:.2g} in diffusers"
        )
        yield from super().remarks(clip, model)
        if self.sound == "new":
            yield f"sound is made first, in {steps} steps, for the file's own pictures"

    def stages(
        self, clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> list[Stage]:
        """Makes new sound first, for the file's pictures, by all steps of the schedule."""
        full, given = clip.geometry(model), self[SourceClip]
        silent = self.sound == "keep" and not clip.keeps_sound
        stages: list[Stage] = [given.video(clip, model, options)]
        if self.sound != "new" and not silent:
            stages += [given.sound(clip, model, sound=clip.audio and self.sound == "keep")]
        stages += text(clip)
        if self.sound == "new":
            bare = replace(clip, images=())
            stages += denoise_once(bare, full, options, loras, name="sound", frozen=("video",))
        mixed = ("video", "audio") if self.sound == "noise" else ("video",)
        frozen = () if self.sound == "noise" else ("audio",)
        level: dict[str, Any] = {"level": self.noise_level, "mixed": mixed, "frozen": frozen}
        if silent:
            level |= {"frozen": (), "streams": ("video",)}
        stages += denoise_once(clip, full, options, loras, sound=self.sound == "noise", **level)
        return [*stages, *decoded(clip, full, model, options, sound=self.sound != "keep")]


PIPELINE = VideoToVideo
