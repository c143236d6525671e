"""t2a: sound alone, guided; no node of the video stream is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flag
from ltx2rt.models.geometry import Geometry
from ltx2rt.models.guided_step import Branches
from ltx2rt.pipelines.request import Loras, Request, default_steps, negative_prompt, parse_blocks, stg_blocks
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.stages.sound import Sound
from ltx2rt.stages.stage import Stage


@dataclass(frozen=True)
class TextToAudio(Request):
    name: ClassVar[str] = "t2a"
    summary: ClassVar[str] = "sound alone, guided"

    duration: float | None = flag(None, "t2a: seconds of sound, in place of --num-frames", float, metavar="S")
    negative_prompt: str | None = flag(None, "default: the model's", metavar="TEXT")
    steps: int | None = flag(None, "of the guided stage (default: 40 for 2.0, 30 for 2.3)", int, metavar="N")
    audio_cfg: float = flag(7.0, "guidance", float)
    audio_stg: float = flag(1.0, "guidance", float)
    audio_rescale: float = flag(0.7, "guidance", float)
    stg_blocks: tuple[int, ...] | None = flag(None, "default: 29 for 2.0, 28 for 2.3", parse_blocks, metavar="LIST")

    @property
    def guidance(self) -> np.ndarray:
        return np.array([[1, 0, 1, 0], [self.audio_cfg, self.audio_stg, 1, self.audio_rescale]], np.float32)

    @property
    def prompts(self) -> tuple[str, ...]:
        negative = (self.negative_prompt or "",) if Branches.of(self.guidance).uncond else ()
        return (self.enhanced_prompt or self.prompt, *negative)

    def check(self) -> None:
        super().check()
        if self.num_frames is not None and self.num_frames < 1:
            raise InputError(f"--num-frames: {self.num_frames}, expected at least 1")
        if self.duration is not None and self.num_frames is not None:
            raise InputError("--duration: given beside --num-frames; leave one of the two out")
        if self.duration is not None and self.duration < 0.04:
            raise InputError(f"--duration: {self.duration:g} s, expected at least 0.04")

    def resolved(self: Any, model: ModelConfig) -> Any:
        if self.duration is not None:  # the frames that last as long, at this rate
            self.check()
            frames = max(round(self.duration * self.fps), 1)
            self = replace(self, num_frames=frames, duration=None)
        full = super().resolved(model)
        return replace(
            full,
            negative_prompt=negative_prompt(model) if self.negative_prompt is None else self.negative_prompt,
            steps=self.steps or default_steps(model),
            stg_blocks=stg_blocks(model, self.stg_blocks, bool(self.audio_stg)),
        )

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        assert self.steps and self.stg_blocks is not None, "the request is not resolved"
        sound = Geometry.of(model, 0, 0, self.num_frames, self.fps)
        stage = Denoise(
            "stage1", sound, shifted_sigmas(self.steps), loras.of("stage1"), self.noise, self.guidance,
            self.stg_blocks, sound=True, streams=("audio",),
        )  # fmt: skip
        return [*self.text, stage, Sound(sound, self.num_videos)]


PIPELINE = TextToAudio
