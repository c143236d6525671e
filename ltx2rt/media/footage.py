"""A video that a run is given: its file, and how its frames and its sound are taken.

Decides which frames are read, at what size, and when their sound begins and ends. Everything that
reads a given video takes one of these, so that no reader misses a choice of another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import repeat
from pathlib import Path

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.media.images import Resize
from ltx2rt.media.mp4 import Sound, fitted_blocks
from ltx2rt.media.sound import resampled, sound_blocks, stretched
from ltx2rt.media.streams import AUTO, Tracks
from ltx2rt.media.video import VideoInfo, read_frames, video_info


@dataclass(frozen=True)
class Footage:
    """flag: names the file in messages. info: of the file, at its own size. resize: brings its
    pictures to another. window: the frames that are taken, None: all. tracks: of the file, which
    the user chose. first: the frame of the file that counts as 0; speed: at which the file is played;
    `info` and `window` count the frames as they are played. times: each is shown so often, the last
    once.
    """

    path: Path
    flag: str
    info: VideoInfo
    resize: Resize | None = None
    window: range | None = None
    tracks: Tracks = AUTO
    first: int = 0
    speed: Fraction = Fraction(1)
    times: int = 1

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

    def retimed(self, speed: Fraction) -> Footage:
        """The file played at this speed, at its own rate: frame i is the file's floor(speed i)."""
        if speed == 1:
            return self
        count, sound_s = -(-self.info.num_frames // speed), float(self.info.sound_s / speed)
        info = replace(self.info, num_frames=count, sound_s=sound_s)
        return replace(self, info=info, speed=speed)

    def doubled(self) -> Footage:
        """Show each frame twice, the last once, at twice the rate."""
        info = replace(self.info, num_frames=2 * self.info.num_frames - 1, fps=2 * self.info.fps)
        return replace(self, info=info, times=2)

    def between(self, start_s: float | None, end_s: float | None) -> Footage:
        """The part of the file between two times, None for its beginning and its end. Raises
        InputError."""
        frames = self.span(start_s, end_s)
        if len(frames) == self.info.num_frames:
            return self
        length_s = float(len(frames) / self.info.fps)
        sound_s = min(self.info.sound_s - frames.start / self.info.fps, length_s)
        info = replace(self.info, num_frames=len(frames), sound_s=sound_s)
        return replace(self, info=info, first=frames.start)

    def span(self, start_s: float | None, end_s: float | None) -> range:
        """Its frames between two times, as of `between`. Raises InputError."""
        count, fps = self.info.num_frames, self.info.fps
        start, stop = (
            count if time_s is None else round(min(time_s * fps, count))
            for time_s in (start_s or 0.0, end_s)
        )
        if start >= stop:
            end_s = float(count / fps) if end_s is None else end_s
            raise InputError(
                f"--start-time: {start_s or 0:g} s, and the part ends at {end_s:.4g} s; "
                f"{self.path} lasts {float(count / fps):.4g} s; start earlier, or end later"
            )
        return range(start, stop)

    def said(self) -> Iterator[str]:
        """A sentence for each thing that is read otherwise than it is."""
        yield from self.info.said()
        if self.resize:
            yield self.resize.said
        if self.speed != 1:
            yield (
                f"played at {float(self.speed):g} times its speed, {self.info.num_frames} frames; "
                "its sound keeps its pitch"
            )

    def frames(self, wide: bool = False) -> Iterator[np.ndarray]:
        """As of `read_frames`, those that are taken."""
        shown = Counter(self.first + int(i // self.times * self.speed) for i in self.taken)
        stop = max(shown, default=-1) + 1
        read = read_frames(self.path, self.flag, stop, wide, self.resize, self.tracks.video)
        for number, pixels in enumerate(read):
            yield from repeat(pixels, shown[number])

    @property
    def start_s(self) -> float:
        """Time in the file of the first frame that is taken."""
        assert self.info.times_s, "a file without timestamps is refused"
        first = self.first + self.taken.start * self.speed
        return float(self.info.times_s[0] + first / self.info.fps)

    @property
    def length_s(self) -> float:
        """Seconds of the file."""
        return float(len(self.taken) * self.speed / self.info.fps)

    def _blocks(self, say: Callable[[str], None]) -> Iterator[tuple[int, np.ndarray]]:
        track = self.tracks.audio
        return sound_blocks(self.path, self.start_s, self.length_s, True, say, track)

    @cached_property
    def _heard(self) -> tuple[int, list[str]]:
        """The sound's rate, and sentences about it; it is read whole, and not kept."""
        said: list[str] = []
        rates = {rate for rate, _ in self._blocks(said.append)}
        return rates.pop(), said

    def sound(self, rate: int) -> Sound:
        """f32[2, N] at `rate` Hz, as long as the frames, or silence. Its blocks raise
        InputError."""
        size = round(len(self.taken) / self.info.fps * rate)

        def blocks() -> Iterator[np.ndarray]:
            read = (block for _, block in self._blocks(lambda sentence: None))
            heard = read if self.info.has_sound else iter(())
            if self.info.has_sound and self.rate != rate:
                stereo = (np.broadcast_to(block, (2, block.shape[1])) for block in heard)
                heard = resampled(stereo, self.rate, rate)
            heard = stretched(heard, rate, self.speed)
            return fitted_blocks(heard, size)

        return Sound(size, blocks)

    @property
    def rate(self) -> int:
        """Samples of its sound a second, in Hz."""
        return self._heard[0]

    @property
    def missing(self) -> list[str]:
        """Sentences about parts of its sound that are not there. Raises InputError."""
        return self._heard[1] if self.info.has_sound else []
