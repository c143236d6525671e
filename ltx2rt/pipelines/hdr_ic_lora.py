"""hdr-ic-lora: a given clip of 8 bits in high dynamic range, by an IC-LoRA that has learnt it.

`--video-path` with `--hdr` chooses it. Both stages see the file's frames as a reference beside the
clip, and stage 2 takes two steps. The clip has no sound, and no node of the sound's stream is
computed. With `--high-quality` the model sees each frame twice and makes as many, at the file's rate, of
which every second one is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of
from ltx2rt.media.hdr import LOGC3_LOG, SPACES, HighRange
from ltx2rt.pipelines.build import Loras, in_two_passes
from ltx2rt.pipelines.clip import Clip
from ltx2rt.pipelines.groups import NAGGED, RUN
from ltx2rt.pipelines.groups.images import Hdr
from ltx2rt.pipelines.groups.reference import ReferenceClip
from ltx2rt.pipelines.groups.size import longest_s
from ltx2rt.pipelines.groups.source_clip import FileSize
from ltx2rt.pipelines.groups.text import Prompt, PromptsByTime
from ltx2rt.pipelines.request import Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.inset import Cut
from ltx2rt.stages.schedule import STAGE2_SIGMAS
from ltx2rt.stages.stage import Stage

flag = flags_of("sampling")

SIGMAS = STAGE2_SIGMAS[[0, 1, 3]]  # the official pipeline's second stage


@dataclass(frozen=True)
class WholeReference(ReferenceClip):
    """Encoded whole up to this size, as the official pipeline does."""

    whole_px: ClassVar[int] = 512 * 768
    words: ClassVar = ("hdr",)


class HdrICLora(Request):
    name = "hdr-ic-lora"
    summary = "a given clip in high dynamic range, by an IC-LoRA"
    task = "Convert to HDR"
    example = "--video-path clip.mp4 --lora hdr.safetensors --hdr ACESCG"
    scale = 2
    distilled = "optional"
    mirrored = True
    groups = (
        Prompt(),
        WholeReference(),
        *RUN,
        FileSize(),
        PromptsByTime(),
        *NAGGED,
        Hdr(SPACES[0]),
    )
    about: ClassVar = {
        "video_path": "clip of 8 bits; its length and rate are kept (required)",
        "hdr": "space of *%05d.exr; *.mp4 is HLG, or PQ by --hdr-transfer",
    }

    high_quality: bool = flag(
        False,
        "make each frame of the clip twice and write every second one, in over twice the time",
    )

    def completed(self, clip: Clip, model: ModelConfig) -> Clip:
        if not self.high_quality:
            return clip
        frames, limit_s = 2 * clip.num_frames - 1, longest_s(self, model)
        if (seconds := float((frames - 1) / clip.fps)) > limit_s:
            raise InputError(
                f"--high-quality: {frames} frames, each of {self.video_path} twice, are {seconds:.2f} s at "
                f"its rate, the model's limit is {limit_s:g} s; leave it out, or give --end-time"
            )
        return replace(
            clip,
            source=clip.given.doubled(),
            num_frames=frames,
            fps=2 * clip.fps,
            motion_speed=2.0,
        )

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        yield from super().remarks(clip, model)
        if self.high_quality:
            yield f"{clip.num_frames} frames are made, of which every second one is written"

    @property
    def high_range(self) -> HighRange:
        """Codes are LogC3 unless the LoRA says otherwise."""
        return HighRange(self.hdr or SPACES[0], LOGC3_LOG, self.hdr_transfer)

    def stages(
        self, clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> list[Stage]:
        seen = self[ReferenceClip].seen
        first = {"given": (seen(clip, 0, model, options, loras),)}
        second = {"given": (seen(clip, 1, model, options, loras),), "sigmas": SIGMAS}
        stages = in_two_passes(
            clip, model, options, loras, first, second, sound=False, streams=("video",)
        )
        return [*stages, Cut(clip.clip_frames, step=2)] if self.high_quality else stages


PIPELINE = HdrICLora
