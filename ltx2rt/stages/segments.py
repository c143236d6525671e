"""A clip that is made segment after segment: each is a file of its own, which the next one continues.

Decides where segments begin, what a file of one holds, and what of each is in the clip. A segment
continues the frames and the sound that were written, so that a run that goes on from files makes
what one makes that never stopped.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path

import numpy as np

from ltx2rt.atomic_file import replacing
from ltx2rt.config import ModelConfig
from ltx2rt.media.mp4 import EXACT, write_mp4
from ltx2rt.media.sound import read_sound, resample
from ltx2rt.media.splice import stacked
from ltx2rt.media.video import VideoInfo, read_frames
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.joined import SourceClip
from ltx2rt.stages.stage import Stage, State


def segment_starts(num_frames: int, segment: int, overlap: int) -> tuple[int, ...]:
    """The first pixel frame of each segment of a clip: segments overlap by `overlap` frames, the
    last one by more where they would not end where the clip ends."""
    new = segment - overlap
    count = 1 + max(-(-(num_frames - segment) // new), 0)
    return (*(i * new for i in range(count - 1)), num_frames - segment)


@dataclass(frozen=True)
class Part(SourceClip):
    """The file of a segment, which need not be there yet, from its frame `first` on.

    start: the clip's frame that is the segment's first. heard_s: seconds of the segment until which
    it has sound that was made, not filled up. Sound is cut at the clip's samples.
    """

    start: int = 0
    first: int = 0
    heard_s: Fraction = Fraction(0)

    @classmethod
    def of(cls, path: Path, num_frames: int, fps: Fraction, has_sound: bool, start: int) -> Part:
        info = VideoInfo(0, 0, num_frames, fps, 0, has_sound, (Fraction(0),))
        return cls(path, info, "a segment", start)

    @property
    def num_frames(self) -> int:
        return self.info.num_frames - self.first

    def frames(self) -> Iterator[np.ndarray]:
        return islice(read_frames(self.path, self.flag, self.info.num_frames), self.first, None)

    @property
    def _sound(self) -> tuple[np.ndarray, int, list[str]]:
        """Read anew each time: a long clip has many."""
        waveform, rate = read_sound(self.path)
        return waveform[:, self._sample(self.first, rate) :], rate, []

    def sound(self, rate: int) -> np.ndarray:
        """f32[2, N] at `rate` Hz of what was made."""
        waveform, own_rate, _ = self._sound
        made = waveform if own_rate == rate else resample(waveform[None], own_rate, rate)[0]
        return made[:, : round((self.heard_s - self.first / self.info.fps) * rate)]

    @property
    def said(self) -> list[str]:
        return []

    def heard(self, stop: int) -> tuple[np.ndarray, int]:
        """f32[2, N] up to the clip's frame `stop`, and the rate in Hz."""
        waveform, rate, _ = self._sound
        return waveform[:, : self._sample(stop - self.start, rate)], rate

    def _sample(self, frame: int, rate: int) -> int:
        """The clip's sample at a frame of the segment, counted from the segment's first sample."""
        fps = self.info.fps
        return round((self.start + frame) / fps * rate) - round(self.start / fps * rate)


@dataclass(frozen=True)
class Keep(Stage):
    """Writes the segment that was made, and clears the state for the next one.

    number: from 1; of: how many there are.
    """

    part: Part
    number: int
    of: int
    name = "segment"

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        return iter(())

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        if session.backend.is_main:
            self._write(next(state.frames), state)
        for frames in state.frames:
            deque(frames, maxlen=0)
        watch.check()  # all processes wait for the file
        watch.say(f"segment {self.number} of {self.of} is made")
        empty = State()
        for f in fields(State):
            setattr(state, f.name, getattr(empty, f.name))

    def _write(self, frames: Iterator[np.ndarray], state: State) -> None:
        info = self.part.info
        with replacing(self.part.path) as partial:
            write_mp4(
                partial,
                frames,
                num_frames=info.num_frames,
                fps=info.fps,
                waveform=None if state.waveforms is None else state.waveforms[0],
                sample_rate=state.sample_rate or 0,
                container=EXACT,
            )
            with partial.open("rb") as file:
                os.fsync(file.fileno())


@dataclass(frozen=True)
class Segments(Stage):
    """The clip of all segments, of which each is read up to where the next one begins."""

    parts: Sequence[Part]
    name = "segments"

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        return iter(())

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        if not session.backend.is_main:
            return
        state.frames = iter([self._frames()])
        if self.parts[0].info.has_sound:
            heard = [part.heard(stop) for part, stop in self._stops()]
            state.waveforms = np.concatenate([waveform for waveform, _ in heard], axis=1)[None]
            state.sample_rate = heard[0][1]

    def _stops(self) -> Iterator[tuple[Part, int]]:
        for part, following in pairwise(self.parts):
            yield part, following.start
        yield self.parts[-1], self.parts[-1].start + self.parts[-1].info.num_frames

    def _frames(self) -> Iterator[np.ndarray]:
        for part, stop in self._stops():
            yield from stacked(islice(part.frames(), stop - part.start))
