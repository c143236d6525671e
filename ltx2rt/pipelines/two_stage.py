"""two-stage: guided at half the size, then 3 distilled steps at full size with the distilled LoRA
merged.

On distilled weights it is `distilled`, and `keyframes` where two images or more are given.
"""

from __future__ import annotations

from ltx2rt.pipelines.distilled import Distilled
from ltx2rt.pipelines.groups import GUIDED, NEW, PICTURES, SEGMENTED
from ltx2rt.pipelines.groups.images import Between, Images
from ltx2rt.pipelines.groups.size import Size
from ltx2rt.pipelines.groups.sound import SoundFrom
from ltx2rt.pipelines.keyframes import Keyframes
from ltx2rt.pipelines.request import Request


class TwoStage(Request):
    name = "two-stage"
    summary = "guided at half size, then 3 distilled steps at full size"
    scale = 2
    distilled = "needed"
    example = "--image fox.png:0"
    groups = (*NEW, Size(), Images(), *PICTURES, *GUIDED, *SEGMENTED, SoundFrom())

    def unguided(self) -> Request | None:
        if len(self.images) < Between.least:
            return self.made_by(Distilled)
        return self.made_by(Keyframes).unguided()


PIPELINE = TwoStage
