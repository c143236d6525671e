"""hq: both stages with res_2s, two evaluations a step, and the distilled LoRA in both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flag, flag_like
from ltx2rt.pipelines import step_plans
from ltx2rt.pipelines.request import NEUTRAL, Loras
from ltx2rt.pipelines.two_stage import TwoStage
from ltx2rt.session.options import NO_LORA, ModelOptions
from ltx2rt.stages.schedule import STAGE2_SIGMAS, shifted_sigmas
from ltx2rt.stages.stage import Stage
from ltx2rt.stages.upsample import Upsample


@dataclass(frozen=True)
class HQ(TwoStage):
    name: ClassVar[str] = "hq"
    summary: ClassVar[str] = "two-stage with the second-order sampler res_2s"

    steps: int = flag_like(TwoStage, "steps", 15, help="denoising steps of stage 1")
    width: int = flag_like(TwoStage, "width", 1920)
    height: int = flag_like(TwoStage, "height", 1088)
    video_stg: float = flag_like(TwoStage, "video_stg", 0.0)
    audio_stg: float = flag_like(TwoStage, "audio_stg", 0.0)
    video_rescale: float = flag_like(TwoStage, "video_rescale", 0.45)
    audio_rescale: float = flag_like(TwoStage, "audio_rescale", 1.0)
    distilled_lora_strength_stage_1: float = flag(
        0.25,
        "strength of the distilled LoRA in stage 1",
        group="sampling",
    )
    distilled_lora_strength_stage_2: float = flag(
        0.5,
        "strength of the distilled LoRA in stage 2",
        group="sampling",
    )

    def check(self) -> None:
        super().check()
        step_plans.check(self, "hq's res_2s evaluates between steps; use --steps")

    def check_options(self, options: ModelOptions) -> None:
        super().check_options(options)
        lora = options.distilled_lora
        if lora is not None and lora != NO_LORA and lora.strength != 1:
            raise InputError(
                f"--distilled-lora: strength {lora.strength:g}, but hq has one for each stage; "
                "give --distilled-lora-strength-stage-1 and --distilled-lora-strength-stage-2"
            )

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        """The schedule of stage 1 is shifted by its own tokens; user LoRAs come before the
        distilled one."""
        assert self.steps and self.stg_blocks is not None and loras.distilled, (
            "the request is not resolved"
        )
        half, full = self.geometry(model, self.factor(model)), self.geometry(model)
        first = (
            *loras.of("stage1"),
            replace(loras.distilled, strength=self.distilled_lora_strength_stage_1),
        )
        second = (
            *loras.of("stage2"),
            replace(loras.distilled, strength=self.distilled_lora_strength_stage_2),
        )
        guided = {
            "guidance": self.guidance,
            "stg_blocks": self.stg_blocks,
            "sound": self.audio_from == "stage1",
        }
        fine = {"guidance": NEUTRAL, "sound": self.audio_from == "stage2"}
        sigmas = shifted_sigmas(self.steps, half.num_video_tokens)
        return [
            *self.text,
            *self.denoise("stage1", half, options, sigmas, first, sampler="res2s", **guided),
            Upsample(half, self.num_videos, self.factor(model)),
            *self.denoise("stage2", full, options, STAGE2_SIGMAS, second, sampler="res2s", **fine),
            *self.decoded(full, model, options),
        ]


PIPELINE = HQ
