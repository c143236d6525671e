"""keyframes: two-stage between images, each of them a guide beside the clip's own tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ltx2rt.flags import flag_like
from ltx2rt.pipelines.two_stage import TwoStage


@dataclass(frozen=True)
class Keyframes(TwoStage):
    name: ClassVar[str] = "keyframes"
    summary: ClassVar[str] = "two-stage between two or more images"
    append_images: ClassVar[bool] = True
    least_images: ClassVar[int] = 2
    example: ClassVar[str] = "--image dawn.png:0 dusk.png:120"

    audio_from: str = flag_like(TwoStage, "audio_from", "stage2")


PIPELINE = Keyframes
