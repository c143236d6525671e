"""What each pipeline consists of: the stages, as data. Both backends run the same list.

two-stage   guided at half size, then 3 distilled steps at full size with the distilled LoRA merged (the default)
distilled   8 distilled steps at half size, then 3 at full size; no guidance
one-stage   guided at full size
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ltx2rt.models.guided_step import Branches
from ltx2rt.pipeline.request import LoraSpec, Request
from ltx2rt.pipeline.schedule import DISTILLED_SIGMAS, STAGE2_SIGMAS, shifted_sigmas


@dataclass(frozen=True, eq=False)
class Stage:
    """One denoising stage. guidance: f32[2, 4], rows video and audio, columns cfg, stg, modality, rescale; neutral
    scales run the conditional branch alone. The first sigma is also the noise scale."""

    name: str
    width: int  # pixels
    height: int
    sigmas: np.ndarray
    guidance: np.ndarray
    loras: tuple[LoraSpec, ...]

    @property
    def branches(self) -> Branches:
        return Branches.of(self.guidance)


NEUTRAL = np.array([[1, 0, 1, 0], [1, 0, 1, 0]], np.float32)


def plan_stages(request: Request, found_lora: Path | None) -> tuple[Stage, ...]:
    """The stages of a resolved request.

    found_lora: the distilled LoRA that lies with the checkpoint, used by two-stage if none was given.
    User LoRAs are merged in the order given, the distilled one last.
    """
    given = request.options.distilled_lora
    distilled = given or (LoraSpec(found_lora) if found_lora else None)
    scales = (request.video_guidance, request.audio_guidance)
    guidance = np.array([[g.cfg, g.stg, g.modality, g.rescale] for g in scales], np.float32)

    def user(stage: str) -> tuple[LoraSpec, ...]:
        return tuple(lora for lora in request.options.loras if lora.stage in (None, stage))

    assert request.steps is not None, "the request is not resolved"
    full, half = (request.width, request.height), (request.width // 2, request.height // 2)
    if request.pipeline == "one-stage":
        return (Stage("stage1", *full, shifted_sigmas(request.steps), guidance, user("stage1")),)
    if request.pipeline == "distilled":
        extra = (given,) if given else ()
        return (
            Stage("stage1", *half, DISTILLED_SIGMAS, NEUTRAL, user("stage1") + extra),
            Stage("stage2", *full, STAGE2_SIGMAS, NEUTRAL, user("stage2") + extra),
        )
    assert distilled is not None, "two-stage needs a distilled LoRA"
    return (
        Stage("stage1", *half, shifted_sigmas(request.steps), guidance, user("stage1")),
        Stage("stage2", *full, STAGE2_SIGMAS, NEUTRAL, (*user("stage2"), distilled)),
    )
