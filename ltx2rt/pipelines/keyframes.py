"""keyframes: two-stage between images, each of them a guide beside the clip's own tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ltx2rt.errors import InputError
from ltx2rt.pipelines.two_stage import TwoStage


@dataclass(frozen=True)
class Keyframes(TwoStage):
    name: ClassVar[str] = "keyframes"
    summary: ClassVar[str] = "two-stage between two or more images"
    append_images: ClassVar[bool] = True
    sound_of: ClassVar[str] = "stage2"

    def check(self) -> None:
        super().check()
        if len(self.images) < 2:
            raise InputError(f"--image: {len(self.images)} given, keyframes goes between at least 2")


PIPELINE = Keyframes
