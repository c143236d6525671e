"""two-stage: guided at half the size, then 3 distilled steps at full size with the distilled LoRA
merged."""

from __future__ import annotations

from ltx2rt.pipelines.groups import GUIDED, NEW, PICTURES, SEGMENTED
from ltx2rt.pipelines.groups.images import Images
from ltx2rt.pipelines.groups.size import Size
from ltx2rt.pipelines.groups.sound import SoundFrom
from ltx2rt.pipelines.request import Request


class TwoStage(Request):
    name = "two-stage"
    summary = "guided at half size, then 3 distilled steps at full size"
    scale = 2
    distilled = "needed"
    example = "--image fox.png:0"
    groups = (*NEW, Size(), Images(), *PICTURES, *GUIDED, *SEGMENTED, SoundFrom())


PIPELINE = TwoStage
