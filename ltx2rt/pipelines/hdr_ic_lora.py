"""hdr-ic-lora: a given clip of 8 bits in high dynamic range, by an IC-LoRA that has learnt it.

`--video-path` with `--hdr` chooses it. Both stages see the file's frames as a reference beside the
clip, and stage 2 takes two steps. The clip has no sound, and no node of the sound's stream is
computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.media.hdr import LOGC3_LOG, SPACES, HighRange
from ltx2rt.pipelines.build import Loras, in_two_passes
from ltx2rt.pipelines.clip import Clip
from ltx2rt.pipelines.groups import NAGGED, RUN
from ltx2rt.pipelines.groups.images import Hdr
from ltx2rt.pipelines.groups.reference import ReferenceClip
from ltx2rt.pipelines.groups.source_clip import FileSize
from ltx2rt.pipelines.groups.text import Prompt, PromptsByTime
from ltx2rt.pipelines.request import Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.schedule import STAGE2_SIGMAS
from ltx2rt.stages.stage import Stage

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
        return in_two_passes(
            clip, model, options, loras, first, second, sound=False, streams=("video",)
        )


PIPELINE = HdrICLora
