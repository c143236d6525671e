"""two-stage: guided at half the size, then 3 distilled steps at full size with the distilled LoRA
merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.flags import flag
from ltx2rt.pipelines.request import NEUTRAL, Guided, Loras
from ltx2rt.pipelines.segments import Segmented
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.schedule import STAGE2_SIGMAS, shifted_sigmas
from ltx2rt.stages.stage import Stage
from ltx2rt.stages.upsample import Upsample


@dataclass(frozen=True)
class TwoStage(Segmented, Guided):
    name: ClassVar[str] = "two-stage"
    summary: ClassVar[str] = "guided at half size, then 3 distilled steps at full size"
    scale: ClassVar[int] = 2
    num_stages: ClassVar[int] = 2
    distilled: ClassVar[str] = "needed"
    example: ClassVar[str] = "--image fox.png:0"

    audio_from: str = flag(
        "stage1",
        "stage whose sound is kept",
        group="sampling",
        choices=("stage1", "stage2"),
    )

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        """User LoRAs are merged in the order given, the distilled one last."""
        assert self.steps and self.stg_blocks is not None and loras.distilled, (
            "the request is not resolved"
        )
        half, full = self.geometry(model, self.factor(model)), self.geometry(model)
        guided = {
            "guidance": self.guidance,
            "plan": self.plan,
            "interval": self.guidance_interval,
            "stg_blocks": self.stg_blocks,
            "sound": self.audio_from == "stage1",
        }
        fine = {"guidance": NEUTRAL, "sound": self.audio_from == "stage2"}
        return [
            *self.text,
            *self.denoise(
                "stage1", half, options, shifted_sigmas(self.steps), loras.of("stage1"), **guided
            ),
            Upsample(half, self.num_videos, self.factor(model)),
            *self.denoise(
                "stage2",
                full,
                options,
                STAGE2_SIGMAS,
                (*loras.of("stage2"), loras.distilled),
                **fine,
            ),
            *self.decoded(full, model, options),
        ]


PIPELINE = TwoStage
