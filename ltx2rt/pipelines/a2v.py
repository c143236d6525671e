"""a2v: a clip for a given sound, which both stages of `two-stage`, or on distilled weights of
`distilled`, keep as it is and which the file gets unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import INPUTS, flag_like, flags_of, parse_seconds
from ltx2rt.media.sound import read_sound
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines.groups import NEW, PICTURES
from ltx2rt.pipelines.groups.group import Group
from ltx2rt.pipelines.groups.guidance import ByWeights, Nag, VideoScales
from ltx2rt.pipelines.groups.images import Images
from ltx2rt.pipelines.groups.segments import Segments
from ltx2rt.pipelines.groups.size import STEP, Size
from ltx2rt.pipelines.groups.source_clip import SourceClip
from ltx2rt.pipelines.groups.steps import Interval, Skips, Steps
from ltx2rt.pipelines.groups.text import NegativePrompt
from ltx2rt.pipelines.request import Loras, Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.source_sound import SourceSound, frames_within
from ltx2rt.stages.stage import Stage

flag = flags_of("conditioning")


@dataclass(frozen=True)
class GivenSound(Group):
    """Every stage keeps it."""

    audio_path: Path | None = flag(
        None,
        "audio or video file whose sound to generate the video for (required)",
        also=("--audio",),
        asks="a2v",
        file="sound",
        kept=True,
        common=INPUTS,
    )
    audio_start_time: float = flag(
        0.0, "seconds of the sound to skip at its start", parse_seconds, least=0
    )
    audio_max_duration: float | None = flag(
        None, "seconds of the sound at most (default: all, or the clip's)", parse_seconds, above=0
    )
    audio_track: int | None = flag_like(SourceClip, "audio_track")
    audio_fit: str = flag(
        "error", "refuse sound that is too short, or add silence", choices=("error", "pad")
    )

    heard_s: float | None = field(default=None, repr=False)

    def check(self, request: Any) -> None:
        if self.audio_path is None:
            raise InputError(
                f"--audio-path: the {request.name} pipeline makes a clip for a sound, none was "
                "given"
            )

    def measured(self, request: Any) -> dict[str, Any]:
        """The most frames within the sound, where the request states no length, or seconds that are
        within it and round to more."""
        path, asked_s = self.audio_path, request.seconds
        if not (request.length_by_sound or asked_s) or path is None or not path.is_file():
            return {}
        cut = self.audio_start_time, self.audio_max_duration
        waveform, rate = read_sound(path, *cut, say=lambda text: None, track=self.audio_track)
        heard_s = waveform.shape[1] / rate
        within = frames_within(heard_s, request.fps, STEP)
        if asked_s and not heard_s >= asked_s > within / request.fps:
            return {}
        return {"num_frames": within, "seconds": None, "heard_s": heard_s}

    def restated(self, request: Any, model: ModelConfig) -> dict[str, Any]:
        return self.measured(request)

    def remarks(self, request: Any, model: ModelConfig) -> Iterator[str]:
        if self.heard_s:
            count, seconds = request.num_frames, float(request.num_frames / request.fps)
            yield f"the sound lasts {self.heard_s:.2f} s: {count} frames, {seconds:.2f} s"

    def added(self, request: Any, name: str, geometry: Geometry) -> dict[str, Any]:
        return {"frozen": ("audio",)}

    def stage(self, request: Any, full: Geometry) -> SourceSound:
        assert self.audio_path is not None, "the request is not checked"
        cut = self.audio_start_time, self.audio_max_duration, self.audio_fit
        how = {"track": self.audio_track}
        return SourceSound(self.audio_path, full, *cut, request.num_videos, request.audio, **how)


class AudioToVideo(Request):
    name = "a2v"
    summary = "two-stage for a given sound, which the clip keeps"
    task = "Sound to video"
    example = "--audio-path song.mp3"
    scale = 2
    distilled = "needed"
    groups = (
        *NEW, Size(), Images(), *PICTURES, NegativePrompt(), Steps(), Skips(),
        Interval(), VideoScales(), Nag(), ByWeights(), GivenSound(), Segments(),
    )  # fmt: skip

    @property
    def length_by_sound(self) -> bool:
        return self.num_frames is None and self.seconds is None and not self.auto_duration

    def given_sound(self, model: ModelConfig) -> SourceSound | None:
        whole = replace(self, num_frames=self.clip_frames, segment_frames=None, number=1)
        return self[GivenSound].stage(self, whole.geometry(model))

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        sound = self[GivenSound].stage(self, self.geometry(model))
        return [sound, *self.in_two_passes(model, options, loras, sound=False)]


PIPELINE = AudioToVideo
