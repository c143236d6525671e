"""hq: both stages with res_2s, two evaluations a step, and the distilled LoRA in both.

Distilled weights are refused, unless it is --preset best that chose it: then it is `distilled` at
its size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of
from ltx2rt.pipelines.build import Loras, in_two_passes
from ltx2rt.pipelines.clip import Clip
from ltx2rt.pipelines.groups import NEW, PICTURES, SEGMENTED
from ltx2rt.pipelines.groups.guidance import Guidance
from ltx2rt.pipelines.groups.images import Images
from ltx2rt.pipelines.groups.size import BEST_PX, Size
from ltx2rt.pipelines.groups.sound import SoundFrom
from ltx2rt.pipelines.groups.steps import Steps
from ltx2rt.pipelines.groups.text import NegativePrompt
from ltx2rt.pipelines.request import Request
from ltx2rt.pipelines.two_stage import TwoStage
from ltx2rt.session.options import NO_LORA, DistilledWeights, LoraSpec, ModelOptions
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.stages.stage import Stage

flag = flags_of("sampling")

STRENGTH_1, STRENGTH_2 = 0.25, 0.5
SCALES = Guidance(video_stg=0.0, audio_stg=0.0, video_rescale=0.45, audio_rescale=1.0)


@dataclass(frozen=True)
class LargeSize(Size):
    usual: ClassVar = BEST_PX


class HQ(Request):
    name = "hq"
    summary = "two-stage with the second-order sampler res_2s"
    scale = 2
    distilled = "needed"
    example = "--image fox.png:0"
    groups = (
        *NEW, LargeSize(), Images(), *PICTURES, NegativePrompt(), Steps(15), SCALES,
        *SEGMENTED, SoundFrom(),
    )  # fmt: skip
    about: ClassVar = {"steps": "denoising steps of stage 1"} | {
        side: f"{side} in pixels; from the first image if there is one (default: {px})"
        for side, px in zip(("width", "height"), LargeSize.usual, strict=True)
    }

    distilled_lora_strength_stage_1: float = flag(
        STRENGTH_1, "strength of the distilled LoRA in stage 1"
    )
    distilled_lora_strength_stage_2: float = flag(
        STRENGTH_2, "strength of the distilled LoRA in stage 2"
    )

    def unguided(self) -> Request | None:
        own = self.distilled_lora_strength_stage_1, self.distilled_lora_strength_stage_2
        chosen = self.quality == "best" and own == (STRENGTH_1, STRENGTH_2)
        return self.made_by(TwoStage).unguided() if chosen else None

    def check_options(self, options: ModelOptions) -> None:
        super().check_options(options)
        lora = options.distilled_lora
        if lora is not None and lora != NO_LORA and lora.strength != 1:
            raise InputError(
                f"--distilled-lora: strength {lora.strength:g}, but hq has one for each stage; "
                "give --distilled-lora-strength-stage-1 and --distilled-lora-strength-stage-2"
            )

    def stages(
        self, clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> list[Stage]:
        """Stage 1's schedule shifts by its own tokens; the distilled LoRA is merged last.
        A distilled transformer in place of the LoRA is only of stage 2."""
        assert loras.distilled, "`distilled_lora` refuses a run without"
        tokens = clip.first(model).num_video_tokens
        weak: tuple[LoraSpec, ...] = ()
        strong: tuple[LoraSpec, ...] = loras.extra
        if not isinstance(loras.distilled, DistilledWeights):
            weak = (replace(loras.distilled, strength=self.distilled_lora_strength_stage_1),)
            strong = (replace(loras.distilled, strength=self.distilled_lora_strength_stage_2),)
        sigmas = shifted_sigmas(clip.request.steps, tokens)
        first = {"sigmas": sigmas, "loras": (*loras.of("stage1"), *weak)}
        second = {"loras": (*loras.of("stage2"), *strong)}
        return in_two_passes(clip, model, options, loras, first, second, sampler="res2s")


PIPELINE = HQ
