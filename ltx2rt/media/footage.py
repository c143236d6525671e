"""A video that a run is given: its file, and how its frames and its sound are taken.

Decides which frames are read, at what size, and when their sound begins and ends. Everything that
reads a given video takes one of these, so that no reader misses a choice of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from ltx2rt.media.images import Resize
from ltx2rt.media.sound import read_sound, resample
from ltx2rt.media.streams import AUTO, Tracks
from ltx2rt.media.video import VideoInfo, read_frames, video_info


@dataclass(frozen=True)
class Footage:
    """flag: names the file in messages. info: of the file, at its own size. resize: brings its
    pictures to another. window: the frames that are taken, None: all. tracks: of the file, which
    the user chose."""

    path: Path
    flag: str
    info: VideoInfo
    resize: Resize | None = None
    window: range | None = None
    tracks: Tracks = AUTO

    @classmethod
    def read(cls, path: Path, flag: str, most: int | None = None, tracks: Tracks = AUTO) -> Footage:
        """A file, of which the first `most` frames or all are decoded once. Raises InputError."""
        return cls(path, flag, video_info(path, flag, most, tracks.video), tracks=tracks)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of its pictures as they are taken."""
        shown = self.resize or self.info
        return shown.width, shown.height

    @property
    def taken(self) -> range:
        return range(self.info.num_frames) if self.window is None else self.window

    def part(self, start: int, stop: int) -> Footage:
        """The file's frames from `start` to `stop`, as far as there are any."""
        return replace(self, window=range(start, min(stop, self.info.num_frames)))

    def said(self) -> Iterator[str]:
        """A sentence for each thing that is read otherwise than it is."""
        yield from self.info.said()
        if self.resize:
            yield self.resize.said

    def frames(self, wide: bool = False) -> Iterator[np.ndarray]:
        """As of `read_frames`, those that are taken."""
        taken = self.taken
        read = read_frames(self.path, self.flag, taken.stop, wide, self.resize, self.tracks.video)
        return islice(read, taken.start, None)

    @property
    def start_s(self) -> float:
        """Time in the file of the first frame that is taken."""
        assert self.info.times_s, "a file without timestamps is refused"
        return float(self.info.times_s[0] + self.taken.start / self.info.fps)

    @cached_property
    def _sound(self) -> tuple[np.ndarray, int, list[str]]:
        said: list[str] = []
        length_s = float(len(self.taken) / self.info.fps)
        how = {"on_time": True, "say": said.append, "track": self.tracks.audio}
        return *read_sound(self.path, self.start_s, length_s, **how), said

    def sound(self, rate: int) -> np.ndarray:
        """f32[2, N] at `rate` Hz, as long as the frames, or silence. Raises InputError."""
        size = round(len(self.taken) / self.info.fps * rate)
        if not self.info.has_sound:
            return np.zeros((2, size), np.float32)
        waveform, own_rate, _ = self._sound
        stereo = np.broadcast_to(waveform, (2, waveform.shape[1]))
        found = stereo if own_rate == rate else resample(stereo[None], own_rate, rate)[0]
        return np.pad(found, ((0, 0), (0, max(size - found.shape[1], 0))))[:, :size]

    @property
    def rate(self) -> int:
        """Samples of its sound a second, in Hz."""
        return self._sound[1]

    @property
    def missing(self) -> list[str]:
        """Sentences about parts of its sound that are not there. Raises InputError."""
        return self._sound[2] if self.info.has_sound else []
