"""inset: pictures of any size within those of the model, whose sides and length have steps.

The clip's pictures take a corner or the middle of larger ones. Around them their edges are
repeated or mirrored, and cut away again after the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

import numpy as np

from ltx2rt.media.images import cover
from ltx2rt.session.session import Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.stage import FramesStage, State


@dataclass(frozen=True)
class Inset:
    """size_px: height and width of the clip's pictures, whole_px: of the model's. middle: their
    place is the middle, else the top left corner. mirrored: a border shows the picture mirrored,
    as the official HDR pipeline has it, else its edge."""

    size_px: tuple[int, int]
    whole_px: tuple[int, int]
    middle: bool = False
    mirrored: bool = False

    @property
    def _widths(self) -> list[tuple[int, int]]:
        """Pixels around the clip's pictures: above and below, left and right."""
        over = [whole - size for whole, size in zip(self.whole_px, self.size_px, strict=True)]
        before = [n // 2 if self.middle else 0 for n in over]
        return [(first, n - first) for first, n in zip(before, over, strict=True)]

    def pad(self, pixels: np.ndarray) -> np.ndarray:
        """u8[H, W, 3], or f32 -> the model's size; pictures of another size than the clip's are scaled to
        cover it first. A border as wide as the picture is its edge in any case."""
        if pixels.shape[:2] != self.size_px:
            covered = cover(pixels, *self.size_px[::-1])
            exact = pixels.dtype == np.float32
            pixels = covered if exact else np.rint(covered).astype(pixels.dtype)
        narrow = all(max(n) < size for n, size in zip(self._widths, self.size_px, strict=True))
        mode = "reflect" if self.mirrored and narrow else "edge"
        return np.pad(pixels, (*self._widths, (0, 0)), mode=mode)

    def cut(self, chunk: np.ndarray) -> np.ndarray:
        """f32[3, n, H, W] or integers [n, H, W, 3] -> of the clip's size."""
        rows, columns = (
            slice(first, first + size)
            for (first, _), size in zip(self._widths, self.size_px, strict=True)
        )
        if chunk.dtype in (np.uint8, np.uint16):
            return chunk[:, rows, columns]
        return chunk[:, :, rows, columns]


@dataclass(frozen=True)
class Cut(FramesStage):
    """Keep the first `num_frames` of the made frames, or of every `step`-th, within `inset` if there
    is one. fps: of these frames, with which the sound ends as well; None: it has that length
    already."""

    num_frames: int
    inset: Inset | None = None
    fps: Fraction | None = None
    step: int = 1
    name = "cut"

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        super().run(session, state, watch)
        if self.fps and state.waveforms is not None and state.sample_rate is not None:
            size = round(self.num_frames / self.fps * state.sample_rate)
            state.hear(np.asarray(state.waveforms)[..., :size], state.sample_rate)

    def changed(self, chunks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        left, first = self.num_frames, 0  # the first frame of a chunk that is kept
        for chunk in chunks:
            whole = chunk.dtype in (np.uint8, np.uint16)
            size = chunk.shape[0 if whole else 1]
            found = range(first, size, self.step)[:left]
            which = slice(first, found.stop, self.step)
            if found:
                kept = chunk[which] if whole else chunk[:, which]
                yield self.inset.cut(kept) if self.inset else kept
            left, first = left - len(found), (first - size) % self.step


def lasting(frames: Iterator[np.ndarray], num_frames: int) -> Iterator[np.ndarray]:
    """Yield exactly `num_frames` frames; the last one is repeated."""
    pixels = None
    count = 0
    for pixels in islice(frames, num_frames):
        yield pixels
        count += 1
    assert pixels is not None, "a file without frames is refused"
    for _ in range(num_frames - count):
        yield pixels
