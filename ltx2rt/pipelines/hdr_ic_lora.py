"""hdr-ic-lora: a given clip of 8 bits in high dynamic range, by an IC-LoRA that has learnt it.

Both stages see the file's frames as a reference beside the clip, and stage 2 takes two steps. The
clip has no sound, and no node of the sound's stream is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.flags import flag_like
from ltx2rt.media.hdr import LOGC3_LOG, SPACES, HighRange
from ltx2rt.pipelines.dubit import SeenClip
from ltx2rt.pipelines.given_clip import FromClip
from ltx2rt.pipelines.request import NEUTRAL, Loras, VideoRequest
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, STAGE2_SIGMAS
from ltx2rt.stages.stage import Stage
from ltx2rt.stages.upsample import Upsample

WHOLE_PX = 512 * 768
SIGMAS = STAGE2_SIGMAS[[0, 1, 3]]  # the official pipeline's second stage


@dataclass(frozen=True)
class HdrICLora(SeenClip):
    name: ClassVar[str] = "hdr-ic-lora"
    summary: ClassVar[str] = "a given clip in high dynamic range, by an IC-LoRA"
    example: ClassVar[str] = "--video-path clip.mp4 --lora hdr.safetensors --hdr ACESCG"

    video_path: Path | None = flag_like(
        FromClip, "video_path", help="clip of 8 bits; its length and rate are kept (required)"
    )
    hdr: str = flag_like(
        VideoRequest,
        "hdr",
        SPACES[0],
        help="space of *%05d.exr; *.mp4 is HLG, or PQ by --hdr-transfer",
    )
    hdr_transfer: str = flag_like(VideoRequest, "hdr_transfer")
    audio: bool = field(default=False, init=False)

    @property
    def high_range(self) -> HighRange:
        """Codes are LogC3 unless the LoRA says otherwise."""
        return HighRange(self.hdr, LOGC3_LOG, self.hdr_transfer)

    def encoder_tiling(self, options: ModelOptions, pixels: int) -> str:
        """Whole, as the official pipeline does up to this size."""
        return "off" if pixels <= WHOLE_PX else super().encoder_tiling(options, pixels)

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        """The LoRA is merged in both stages, the distilled one last."""
        half, full = self.geometry(model, self.factor(model)), self.geometry(model)
        merged = (*loras.user, *([loras.distilled] if loras.distilled else []))

        def made(name: str, number: int, clip: Any, sigmas: np.ndarray) -> list[Stage]:
            given = (self.seen(clip, number, model, options, loras),)
            how = {"guidance": NEUTRAL, "streams": ("video",)}
            return self.denoise(name, clip, options, sigmas, merged, given, **how)

        return [
            *self.text,
            *made("stage1", 0, half, DISTILLED_SIGMAS),
            Upsample(half, self.num_videos, self.factor(model)),
            *made("stage2", 1, full, SIGMAS),
            *self.decoded(full, model, options),
        ]


PIPELINE = HdrICLora
