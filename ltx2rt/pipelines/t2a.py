"""t2a: sound alone, guided; no node of the video stream is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flag, flag_like
from ltx2rt.models.geometry import Geometry
from ltx2rt.models.guided_step import Branches
from ltx2rt.pipelines import step_plans
from ltx2rt.pipelines.request import (
    Guided,
    Loras,
    Request,
    stg_blocks,
)
from ltx2rt.pipelines.sound_following import SoundFollowing
from ltx2rt.pipelines.step_plans import PlanFile
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.given import GivenLatents
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.stages.sound import Sound
from ltx2rt.stages.stage import Stage


@dataclass(frozen=True)
class TextToAudio(SoundFollowing):
    name: ClassVar[str] = "t2a"
    summary: ClassVar[str] = "sound alone, guided"
    example: ClassVar[str] = "--duration 5"

    num_frames: int = flag_like(Request, "num_frames", least=1)
    duration: float | None = flag(
        None,
        "length of the sound in seconds, in place of --num-frames",
        float,
        group="clip",
        metavar="S",
        least=0.04,
    )
    negative_prompt: str | None = flag_like(Guided, "negative_prompt")
    steps: int | None = flag_like(Guided, "steps")
    step_plan: str | PlanFile | None = flag_like(Guided, "step_plan")
    skip_step: int | None = flag_like(Guided, "skip_step")
    audio_skip_step: int | None = flag_like(Guided, "audio_skip_step")
    guidance_interval: tuple[float, float] | None = flag_like(Guided, "guidance_interval")
    audio_cfg: float = flag_like(Guided, "audio_cfg")
    audio_stg: float = flag_like(Guided, "audio_stg")
    audio_rescale: float = flag_like(Guided, "audio_rescale")
    stg_blocks: tuple[int, ...] | None = flag_like(Guided, "stg_blocks")

    @property
    def guidance(self) -> np.ndarray:
        return np.array(
            [[1, 0, 1, 0], [self.audio_cfg, self.audio_stg, 1, self.audio_rescale]], np.float32
        )

    @property
    def prompts(self) -> tuple[str, ...]:
        negative = (self.negative_prompt or "",) if Branches.of(self.guidance).uncond else ()
        return (self.positive, *negative)

    @property
    def files(self) -> list[Path]:
        return [*super().files, *step_plans.files(self)]

    def check_files(self) -> None:
        super().check_files()
        step_plans.check_files(self)

    def check(self) -> None:
        super().check()
        step_plans.check(self)
        if self.duration is not None and self.num_frames is not None:
            raise InputError("--duration: given beside --num-frames; leave one of the two out")

    def resolved(self: Any, model: ModelConfig) -> Any:
        if self.duration is not None:  # the frames that last as long, at this rate
            self.check()
            frames = max(round(self.duration * self.fps), 1)
            self = replace(self, num_frames=frames, duration=None)
        full = super().resolved(model)
        return step_plans.resolved(
            replace(
                full,
                negative_prompt=model.release.negative_prompt
                if self.negative_prompt is None
                else self.negative_prompt,
                steps=self.steps or model.release.steps,
                stg_blocks=stg_blocks(model, self.stg_blocks, bool(self.audio_stg)),
            )
        )

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        assert self.steps and self.stg_blocks is not None, "the request is not resolved"
        sound = Geometry.of(model, 0, 0, self.num_frames, self.fps)
        follows = self.following("stage1", sound)
        stage = Denoise(
            "stage1", sound, shifted_sigmas(self.steps), loras.of("stage1"), self.noise, self.guidance,
            self.stg_blocks, sound=True, streams=("audio",), plan=step_plans.plan_of(self),
            interval=self.guidance_interval, **follows,
        )  # fmt: skip
        before: list[Stage] = [GivenLatents("stage1", stage.given)] if stage.given else []
        return [*self.text, *before, stage, Sound(sound, self.num_videos)]


PIPELINE = TextToAudio
