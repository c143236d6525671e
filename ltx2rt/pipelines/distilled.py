"""distilled: 8 distilled steps at half the size, then 3 at full size; no guidance.

The weights are a distilled checkpoint's as they are, or any other's with the distilled LoRA merged
in both stages. With LTX-2.5 the steps of stage 1 add fresh noise (ancestral).
"""

from __future__ import annotations

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of
from ltx2rt.pipelines.build import Loras, in_two_passes
from ltx2rt.pipelines.clip import Clip, Draft
from ltx2rt.pipelines.groups import NAGGED, NEW, PICTURES, SEGMENTED
from ltx2rt.pipelines.groups.images import Images
from ltx2rt.pipelines.groups.size import Size
from ltx2rt.pipelines.groups.sound import SoundFrom
from ltx2rt.pipelines.request import Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.stage import Stage

flag = flags_of("sampling")


class Distilled(Request):
    name = "distilled"
    summary = "8 distilled steps at half size, then 3 at full size; no guidance"
    scale = 2
    distilled = "optional"
    groups = (
        *NEW, Size(), Images(), *PICTURES, *SEGMENTED, *NAGGED, SoundFrom("stage2")
    )  # fmt: skip

    stage2_sampler: str = flag(
        "euler", "sampler of stage 2; ancestral: LTX-2.5", choices=("euler", "ancestral")
    )

    def into(self, draft: Draft, model: ModelConfig) -> None:
        if self.stage2_sampler not in (known := model.release.samplers):
            raise InputError(
                f"--stage2-sampler: {self.stage2_sampler}, but LTX-{model.release.name} takes "
                f"{', '.join(known)}"
            )

    def stages(
        self, clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> list[Stage]:
        first, second = {"sampler": model.release.samplers[0]}, {"sampler": self.stage2_sampler}
        return in_two_passes(clip, model, options, loras, first, second)


PIPELINE = Distilled
