"""distilled: 8 distilled steps at half the size, then 3 at full size; no guidance.

The weights are a distilled checkpoint's as they are, or any other's with the distilled LoRA merged in both stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.flags import flag
from ltx2rt.pipelines.request import NEUTRAL, Loras, VideoRequest
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, STAGE2_SIGMAS
from ltx2rt.stages.stage import Stage
from ltx2rt.stages.text import Text
from ltx2rt.stages.upsample import Upsample


@dataclass(frozen=True)
class Distilled(VideoRequest):
    name: ClassVar[str] = "distilled"
    summary: ClassVar[str] = "8 distilled steps at half size, then 3 at full size; no guidance"
    scale: ClassVar[int] = 2
    num_stages: ClassVar[int] = 2
    distilled: ClassVar[str] = "optional"

    audio_from: str = flag("stage2", "which stage's sound is kept", choices=("stage1", "stage2"))

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        half, full = self.geometry(model, 2), self.geometry(model)
        extra = (loras.distilled,) if loras.distilled else ()

        def steps(name, geometry, sigmas) -> list[Stage]:
            merged, kept = (*loras.of(name), *extra), self.audio_from == name
            return self.denoise(name, geometry, options, sigmas, merged, guidance=NEUTRAL, sound=kept)

        return [
            Text(self.prompts),
            *steps("stage1", half, DISTILLED_SIGMAS),
            Upsample(half, self.num_videos),
            *steps("stage2", full, STAGE2_SIGMAS),
            *self.decoded(full, model, options),
        ]


PIPELINE = Distilled
