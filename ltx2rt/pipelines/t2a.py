"""t2a: sound alone, guided, or on distilled weights in 8 steps; no node of the video stream is
computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.pipelines.build import Loras, denoise_once, freshening, text
from ltx2rt.pipelines.clip import Clip
from ltx2rt.pipelines.groups import RUN
from ltx2rt.pipelines.groups.guidance import ByWeights, Nag, SoundScales
from ltx2rt.pipelines.groups.size import Length
from ltx2rt.pipelines.groups.sound import SoundToFollow, Voice
from ltx2rt.pipelines.groups.steps import Interval, Sigmas, Skips, Steps
from ltx2rt.pipelines.groups.text import NegativePrompt, Prompt
from ltx2rt.pipelines.request import Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.sound import Sound
from ltx2rt.stages.stage import Stage


@dataclass(frozen=True)
class SoundLength(Length):
    whole: ClassVar[bool] = False


class TextToAudio(Request):
    name = "t2a"
    summary = "sound alone, guided"
    example = "--seconds 5"
    about: ClassVar = {
        "num_frames": "number of frames that the sound lasts (default: 121; LTX-2.5: chosen by the "
        "prompt)",
        "seconds": "length in seconds, rounded to a frame, in place of --num-frames",
    }
    groups = (
        Prompt(), SoundLength(), *RUN, SoundToFollow(), Voice(), NegativePrompt(), Sigmas(), Steps(),
        Skips(), Interval(), SoundScales(), Nag(), ByWeights(),
    )  # fmt: skip

    def stages(
        self, clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> list[Stage]:
        sound, how = clip.geometry(model), freshening(clip, model)
        return [
            *text(clip),
            *denoise_once(clip, sound, options, loras, streams=("audio",), **how),
            Sound(sound, len(clip.seeds)),
        ]


PIPELINE = TextToAudio
