"""one-stage: guided at full size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.flags import flag
from ltx2rt.pipelines.request import Guided, Loras
from ltx2rt.pipelines.segments import Segmented
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.stages.stage import Stage


@dataclass(frozen=True)
class OneStage(Segmented, Guided):
    name: ClassVar[str] = "one-stage"
    summary: ClassVar[str] = "guided at full size"

    audio_from: str = flag(
        "stage1",
        "stage whose sound is kept",
        group="sampling",
        choices=("stage1",),
    )

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        assert self.steps and self.stg_blocks is not None, "the request is not resolved"
        full = self.geometry(model)
        guided = {
            "guidance": self.guidance,
            "plan": self.plan,
            "interval": self.guidance_interval,
            "stg_blocks": self.stg_blocks,
            "sound": True,
        }
        return [
            *self.text,
            *self.denoise(
                "stage1", full, options, shifted_sigmas(self.steps), loras.of("stage1"), **guided
            ),
            *self.decoded(full, model, options),
        ]


PIPELINE = OneStage
