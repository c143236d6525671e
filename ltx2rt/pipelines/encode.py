"""encode: the prompt's contexts, in the file of `--latents-out`, which `--context` reads on a
machine without the text encoder."""

from __future__ import annotations

from fractions import Fraction
from typing import ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.pipelines.build import Loras
from ltx2rt.pipelines.clip import Clip
from ltx2rt.pipelines.groups import RUN
from ltx2rt.pipelines.groups.text import NegativePrompt, Prompt
from ltx2rt.pipelines.request import Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.stage import Stage
from ltx2rt.stages.text import Text


class Encode(Request):
    name = "encode"
    summary = "only the prompt's contexts, for --context of later runs"
    example = "--latents-out fox.safetensors"
    groups = (Prompt(), *RUN, NegativePrompt())
    num_frames: ClassVar[int] = 1
    fps: ClassVar[Fraction] = Fraction(1)
    length: ClassVar[tuple[int, Fraction]] = num_frames, fps  # pyrefly: ignore[bad-override]
    auto_duration: ClassVar[None] = None
    # both prompts are encoded, whatever reads them
    negated: ClassVar[bool] = True  # pyrefly: ignore[bad-override]

    def stages(
        self, clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> list[Stage]:
        return [Text(clip.prompts, record=True)]


PIPELINE = Encode
