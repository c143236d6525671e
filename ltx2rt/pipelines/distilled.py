"""distilled: 8 distilled steps at half the size, then 3 at full size; no guidance.

The weights are a distilled checkpoint's as they are, or any other's with the distilled LoRA merged
in both stages. With LTX-2.5 the steps of stage 1 add fresh noise (ancestral).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flag
from ltx2rt.pipelines.nag import Nagged
from ltx2rt.pipelines.request import NEUTRAL, Loras
from ltx2rt.pipelines.segments import Segmented
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, STAGE2_SIGMAS
from ltx2rt.stages.stage import Stage
from ltx2rt.stages.upsample import Upsample


@dataclass(frozen=True)
class Distilled(Nagged, Segmented):
    name: ClassVar[str] = "distilled"
    summary: ClassVar[str] = "8 distilled steps at half size, then 3 at full size; no guidance"
    scale: ClassVar[int] = 2
    num_stages: ClassVar[int] = 2
    distilled: ClassVar[str] = "optional"

    audio_from: str = flag(
        "stage2",
        "stage whose sound is kept",
        group="sampling",
        choices=("stage1", "stage2"),
    )
    stage2_sampler: str = flag(
        "euler",
        "sampler of stage 2; ancestral adds noise at each step, LTX-2.5",
        group="sampling",
        choices=("euler", "ancestral"),
    )

    def resolved(self, model: ModelConfig) -> Any:
        if self.stage2_sampler not in (known := model.release.samplers):
            said = f"{self.stage2_sampler}, but LTX-{model.release.name} takes {', '.join(known)}"
            raise InputError(f"--stage2-sampler: {said}")
        return super().resolved(model)

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        half, full = self.geometry(model, self.factor(model)), self.geometry(model)
        extra = (loras.distilled,) if loras.distilled else ()

        def steps(name, geometry, sigmas, sampler) -> list[Stage]:
            merged, kept = (*loras.of(name), *extra), self.audio_from == name
            more = {"guidance": NEUTRAL, "sound": kept, "sampler": sampler}
            return self.denoise(name, geometry, options, sigmas, merged, **more)

        return [
            *self.text,
            *steps("stage1", half, DISTILLED_SIGMAS, model.release.samplers[0]),
            Upsample(half, self.num_videos, self.factor(model)),
            *steps("stage2", full, STAGE2_SIGMAS, self.stage2_sampler),
            *self.decoded(full, model, options),
        ]


PIPELINE = Distilled
