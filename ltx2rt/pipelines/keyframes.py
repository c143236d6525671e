"""keyframes: two-stage between images, each of them a guide beside the clip's own tokens; on
distilled weights as `distilled`."""

from __future__ import annotations

from ltx2rt.pipelines.groups import GUIDED, NEW, PICTURES, SEGMENTED
from ltx2rt.pipelines.groups.guidance import ByWeights, Nag
from ltx2rt.pipelines.groups.images import Between
from ltx2rt.pipelines.groups.size import Size
from ltx2rt.pipelines.groups.sound import SoundFrom
from ltx2rt.pipelines.request import Request


class Keyframes(Request):
    name = "keyframes"
    summary = "a clip from one picture to the next"
    task = "Between photos"
    scale = 2
    distilled = "needed"
    example = "--image dawn.png:0 dusk.png:120"
    groups = (
        *NEW, Size(), Between(), *PICTURES, *GUIDED, Nag(), ByWeights(), *SEGMENTED,
        SoundFrom("stage2"),
    )  # fmt: skip


PIPELINE = Keyframes
