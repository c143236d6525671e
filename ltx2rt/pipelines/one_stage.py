"""one-stage: guided at full size."""

from __future__ import annotations

from ltx2rt.config import ModelConfig
from ltx2rt.flags import flags_of
from ltx2rt.pipelines.build import Loras, decoded, denoise_once, text
from ltx2rt.pipelines.clip import Clip
from ltx2rt.pipelines.groups import GUIDED, NEW, PICTURES, SEGMENTED
from ltx2rt.pipelines.groups.images import Images
from ltx2rt.pipelines.groups.size import Size
from ltx2rt.pipelines.request import Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.stage import Stage

flag = flags_of("sampling")


class OneStage(Request):
    name = "one-stage"
    summary = "guided at full size"
    groups = (*NEW, Size(), Images(), *PICTURES, *GUIDED, *SEGMENTED)

    audio_from: str = flag("stage1", "stage whose sound is kept", choices=("stage1",))

    def stages(
        self, clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> list[Stage]:
        full = clip.geometry(model)
        return [
            *text(clip),
            *denoise_once(clip, full, options, loras),
            *decoded(clip, full, model, options),
        ]


PIPELINE = OneStage
