"""two-stage: guided at half the size, then 3 distilled steps at full size with the distilled LoRA
merged."""

from __future__ import annotations

from ltx2rt.config import ModelConfig
from ltx2rt.pipelines.groups import GUIDED, NEW, PICTURES, SEGMENTED
from ltx2rt.pipelines.groups.images import Images
from ltx2rt.pipelines.groups.size import Size
from ltx2rt.pipelines.groups.sound import SoundFrom
from ltx2rt.pipelines.request import Loras, Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.schedule import STAGE2_SIGMAS, shifted_sigmas
from ltx2rt.stages.stage import Stage


def two_stages(
    request: Request, model: ModelConfig, options: ModelOptions, loras: Loras, sound: bool = True
) -> list[Stage]:
    """Merges user LoRAs in their order, the distilled one last. sound: whether it is made."""
    assert loras.distilled, "the request is not resolved"
    first = {"sigmas": shifted_sigmas(request.steps), "loras": loras.of("stage1")}
    second = {"sigmas": STAGE2_SIGMAS, "loras": (*loras.of("stage2"), loras.distilled)}
    return [
        *request.text,
        *request.in_two_passes(model, options, first | request.guiding, second),
        *request.decoded(request.geometry(model), model, options, sound),
    ]


class TwoStage(Request):
    name = "two-stage"
    summary = "guided at half size, then 3 distilled steps at full size"
    scale = 2
    num_stages = 2
    distilled = "needed"
    example = "--image fox.png:0"
    groups = (*NEW, Size(), Images(), *PICTURES, *GUIDED, *SEGMENTED, SoundFrom())
    stages = two_stages


PIPELINE = TwoStage
