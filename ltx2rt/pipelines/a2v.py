"""a2v: a clip for a given sound, which both stages of `two-stage`, or on distilled weights of
`distilled`, keep as it is and which the file gets unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import INPUTS, flag_like, flags_of, parse_seconds
from ltx2rt.media.sound import read_sound
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines.build import Loras, in_two_passes
from ltx2rt.pipelines.clip import Clip
from ltx2rt.pipelines.groups import NEW, PICTURES
from ltx2rt.pipelines.groups.group import Added, Group
from ltx2rt.pipelines.groups.guidance import ByWeights, Nag, VideoScales
from ltx2rt.pipelines.groups.images import Images
from ltx2rt.pipelines.groups.segments import Segments
from ltx2rt.pipelines.groups.size import STEP, Size
from ltx2rt.pipelines.groups.source_clip import SourceClip
from ltx2rt.pipelines.groups.steps import Interval, Skips, Steps
from ltx2rt.pipelines.groups.text import NegativePrompt
from ltx2rt.pipelines.request import Request
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

    shapes: ClassVar[bool] = True

    def check(self, request: Request) -> None:
        if self.audio_path is None:
            raise InputError(
                f"--audio-path: the {request.name} pipeline makes a clip for a sound, none was "
                "given"
            )

    def heard_s(self, path: Path) -> float:
        """Seconds of the sound."""
        waveform, rate = read_sound(
            path,
            self.audio_start_time,
            self.audio_max_duration,
            say=lambda text: None,
            track=self.audio_track,
        )
        return waveform.shape[1] / rate

    def length(self, request: Request) -> tuple[int | None, Fraction] | None:
        """The most frames within the sound, where the request states no length, or seconds that are
        within it and round to more."""
        path, asked_s = self.audio_path, request.seconds
        by_sound = request.num_frames is None and asked_s is None and not request.auto_duration
        if not (by_sound or asked_s) or path is None or not path.is_file():
            return None
        heard_s = self.heard_s(path)
        within = frames_within(heard_s, request.fps, STEP)
        if asked_s and not heard_s >= asked_s > within / request.fps:
            return None
        return within, request.fps

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        if self.audio_path and self.length(clip.asked):
            count, seconds = clip.num_frames, float(clip.num_frames / clip.fps)
            heard_s = self.heard_s(self.audio_path)
            yield f"the sound lasts {heard_s:.2f} s: {count} frames, {seconds:.2f} s"

    def stages(self, clip: Clip, name: str, geometry: Geometry, tiling: str) -> Added:
        return Added({"frozen": ("audio",)})

    def sound(self, clip: Clip, model: ModelConfig) -> SourceSound:
        """The sound of the clip's frames."""
        assert self.audio_path is not None, "`check` requires it"
        return SourceSound(
            self.audio_path,
            clip.geometry(model),
            start_s=self.audio_start_time,
            max_duration_s=self.audio_max_duration,
            num_videos=len(clip.seeds),
            sound=clip.audio,
            track=self.audio_track,
        )

    def whole_sound(self, clip: Clip, model: ModelConfig) -> SourceSound | None:
        return self.sound(replace(clip, num_frames=clip.clip_frames, segments=None), model)


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

    def stages(
        self, clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> list[Stage]:
        sound = self[GivenSound].sound(clip, model)
        return [sound, *in_two_passes(clip, model, options, loras, sound=False)]


PIPELINE = AudioToVideo
