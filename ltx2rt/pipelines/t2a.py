"""t2a: sound alone, guided; no node of the video stream is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.flags import flag
from ltx2rt.pipelines.groups import RUN
from ltx2rt.pipelines.groups.group import refuse_beside
from ltx2rt.pipelines.groups.guidance import SoundScales
from ltx2rt.pipelines.groups.size import Length
from ltx2rt.pipelines.groups.sound import SoundToFollow, Voice
from ltx2rt.pipelines.groups.steps import Interval, SoundSkips, Steps
from ltx2rt.pipelines.groups.text import NegativePrompt, Prompt
from ltx2rt.pipelines.request import Loras, Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.stages.sound import Sound
from ltx2rt.stages.stage import Stage


@dataclass(frozen=True)
class SoundLength(Length):
    whole: ClassVar[bool] = False

    duration: float | None = flag(
        None,
        "length of the sound in seconds, in place of --num-frames",
        group="clip",
        metavar="S",
        least=0.04,
    )

    def check(self, request: Any) -> None:
        super().check(request)
        refuse_beside(num_frames=self.num_frames is not None, duration=self.duration is not None)

    def restated(self, request: Any, model: ModelConfig) -> dict[str, Any]:
        """The frames that last as long, at this rate."""
        if self.duration is None:
            return {}
        return {"num_frames": max(round(self.duration * self.fps), 1), "duration": None}


class TextToAudio(Request):
    name = "t2a"
    summary = "sound alone, guided"
    example = "--duration 5"
    groups = (
        Prompt(), SoundLength(), *RUN, SoundToFollow(), Voice(), NegativePrompt(), Steps(),
        SoundSkips(), Interval(), SoundScales(),
    )  # fmt: skip

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        sound, sigmas = self.geometry(model), shifted_sigmas(self.steps)
        more: dict[str, Any] = {"sound": True, "streams": ("audio",), **self.guiding}
        return [
            *self.text,
            *self.denoise("stage1", sound, options, sigmas, loras.of("stage1"), **more),
            Sound(sound, self.num_videos),
        ]


PIPELINE = TextToAudio
