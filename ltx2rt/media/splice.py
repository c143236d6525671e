"""Splice a regenerated part into its source clip, and join new frames to clips.

Decides which parts are copied: outside the generated part, and outside a short fade at a seam,
every pixel and every sample is the source's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

import numpy as np

from ltx2rt.media.mp4 import Sound, fitted_blocks, to_rgb8

FADE_S = 0.005  # from the source's sound to the new one, within the part: a jump would click
SEAM_S = 0.02  # from one sound to the next at a seam, where both are of the same moment
LAG_S = 0.01  # by how much a new sound may move to fit: half a period of 50 Hz, and no one sees it
COMPARED_S = 0.08  # the stretch of two sounds, from which the lag between them is found
FADE_FRAMES = 8  # blended at a seam, which hides what a pass through the VAE changes
CHUNK_FRAMES = 16  # frames of a source at once


def splice_frames(
    chunks: Iterable[np.ndarray],
    source: Iterable[np.ndarray],
    made: range,
    levels: Callable[[np.ndarray], np.ndarray] = to_rgb8,
) -> Iterator[np.ndarray]:
    """The frames of `made` from the chunks, all others from the source; u8[n, H, W, 3], chunk by
    chunk. chunks: f32[3, n, H, W] in [-1, 1] or u8[n, H, W, 3] of the whole clip; source: u8[H, W,
    3] for each of its frames, taken as they are needed. made: pixel frames. levels: as of
    `join_frames`. Raises ValueError if the source ends early or has another size."""
    frames, first = iter(source), 0
    for chunk in chunks:
        rgb = np.array(levels(chunk))
        for number, pixels in enumerate(rgb, first):
            kept, expected = next(frames, None), f"{rgb.shape[2]}x{rgb.shape[1]}"
            if kept is None or kept.shape != pixels.shape:
                found = "nothing" if kept is None else f"{kept.shape[1]}x{kept.shape[0]}"
                raise ValueError(f"source: {found} at frame {number}, expected {expected}")
            if number not in made:
                pixels[:] = kept
        first += len(rgb)
        yield rgb


def splice_sound(
    made: np.ndarray, source: Sound, start_s: float, end_s: float, sample_rate: int, first: int = 0
) -> Sound:
    """The samples of [start_s, end_s) from `made` f32[2, N], short fades at its ends, all others
    from the source. first: the source's sample with which `made` begins."""
    start, end = (min(max(round(s * sample_rate), 0), source.size) for s in (start_s, end_s))
    fade = round(FADE_S * sample_rate)

    def blocks() -> Iterator[np.ndarray]:
        position = 0
        for block in source.blocks():
            since, until = max(start, position), min(end, position + block.shape[1])
            if since < until:
                at = np.arange(since, until, dtype=np.float32)
                rise = 1.0 if start == 0 else (at - start + 1) / (fade + 1)
                fall = 1.0 if end == source.size else (end - at) / (fade + 1)
                weight = np.clip(np.minimum(rise, fall), 0, 1).astype(np.float32)
                new = made[:, max(since - first, 0) : max(until - first, 0)]
                new = np.pad(new, ((0, 0), (0, until - since - new.shape[1])))
                part = slice(since - position, until - position)
                block = block.astype(np.float32)
                block[:, part] += weight * (new - block[:, part])
            position += block.shape[1]
            yield block

    return Sound(source.size, blocks)


@dataclass(frozen=True)
class Seam:
    """The frames of a segment that joins clips: `before` frames that repeat the end of one clip (0:
    there is none), `new` ones, and `after` frames that repeat the beginning of another. fade:
    whether up to FADE_FRAMES shared frames are blended. heard_s: seconds of the segment that repeat
    the sound of the first clip, where that ends before its frames."""

    before: int
    new: int
    after: int
    fade: bool = True
    heard_s: Fraction | None = None

    @property
    def stop(self) -> int:
        """The segment's first frame after the new ones."""
        return self.before + self.new

    @property
    def num_frames(self) -> int:
        return self.stop + self.after

    def faded(self, overlap: int) -> int:
        """Number of an overlap's frames that are blended."""
        return min(overlap, FADE_FRAMES) if self.fade else 0

    def cuts(self, fps: Fraction, rate: int) -> tuple[int, int, int]:
        """Samples at which the new part starts and stops, and at which the segment ends."""
        heard_s = Fraction(self.before) / fps if self.heard_s is None else self.heard_s
        times_s = heard_s, self.stop / fps, self.num_frames / fps
        start, stop, end = (round(time_s * rate) for time_s in times_s)
        return start, stop, end


def join_frames(
    chunks: Iterable[np.ndarray],
    before: tuple[Iterator[np.ndarray], int],
    after: Iterator[np.ndarray],
    seam: Seam,
    levels: Callable[[np.ndarray], np.ndarray] = to_rgb8,
) -> Iterator[np.ndarray]:
    """The clip before, the segment's new frames, the clip after; u8[n, H, W, 3], chunk by chunk.

    chunks: f32[3, n, H, W] in [-1, 1] or u8[n, H, W, 3] of the whole segment. before, after:
    u8[H, W, 3] for each frame of the clips, taken as they are needed; with `before`, their number.
    levels: what makes such frames of a chunk; u16 of `to_codes` in high dynamic range.
    Frame i of c blended ones is lerp(before, segment, (i + 1) / (c + 1)), or lerp(segment, after).
    """
    frames, count = before
    left, right = seam.faded(seam.before), seam.faded(seam.after)
    yield from stacked(islice(frames, count - left))
    number = 0
    for chunk in chunks:
        kept = []
        for pixels in levels(chunk):
            if seam.before - left <= number < seam.before:
                weight = (number - seam.before + left + 1) / (left + 1)
                kept.append(_lerp(next(frames), pixels, weight))
            elif seam.before <= number < seam.stop:
                kept.append(pixels)
            elif seam.stop <= number < seam.stop + right:
                weight = (number - seam.stop + 1) / (right + 1)
                kept.append(_lerp(pixels, next(after), weight))
            number += 1
        if kept:
            yield np.stack(kept)
    yield from stacked(after)


def stacked(frames: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """u8[H, W, 3] each -> u8[n, H, W, 3], a few at once."""
    while held := list(islice(frames, CHUNK_FRAMES)):
        yield np.stack(held)


def _lerp(a: np.ndarray, b: np.ndarray, weight: float) -> np.ndarray:
    """Whole numbers, rounded to nearest."""
    x = a.astype(np.float32)
    return (x + np.float32(weight) * (b - x) + np.float32(0.5)).astype(a.dtype)


def join_sounds(
    made: np.ndarray, before: Sound, after: Sound, start: int, stop: int, sample_rate: int
) -> Sound:
    """As `join_sound`, of clips whose sound is taken in blocks."""
    near = round(COMPARED_S * sample_rate)
    left, right = max(before.size - near, 0), min(near, after.size)
    end, beginning = before.part(left, before.size), after.part(0, right)
    middle = join_sound(made, end, beginning, start, stop, sample_rate)

    def blocks() -> Iterator[np.ndarray]:
        yield from fitted_blocks(before.blocks(), left)
        yield middle
        skip = right
        for block in after.blocks():
            yield block[:, skip:]
            skip = max(skip - block.shape[1], 0)

    return Sound(left + middle.shape[1] + after.size - right, blocks)


def join_sound(
    made: np.ndarray, before: np.ndarray, after: np.ndarray, start: int, stop: int, sample_rate: int
) -> np.ndarray:
    """The sound before, samples [start, stop) of the segment's, the sound after; f32[2, N].

    made, before, after: f32[2, n] at one rate, an empty one where no clip is. A raised cosine goes
    from one sound to the next in the last 20 ms before the first cut and the first 20 ms after the
    second, where both are of the same moments. A vocoder chooses its own phase, so the segment's
    sound is moved by up to LAG_S to where it fits best; between two clips it is stretched.
    """
    fade, compared = (round(seconds * sample_rate) for seconds in (SEAM_S, COMPARED_S))
    end = before.shape[1]
    near = before[:, max(end - compared, 0) :], after[:, :compared]
    places, most = (start - near[0].shape[1], stop), round(LAG_S * sample_rate)
    lags = [_lag(made, clip, at, most) for clip, at in zip(near, places, strict=True) if clip.size]
    made = _moved(made, [start, stop], lags)
    out = np.concatenate([before, made[:, start:stop], after], axis=1).astype(np.float32)
    left, right = min(fade, end, start), min(fade, after.shape[1], made.shape[1] - stop)
    last, first = slice(end - left, end), slice(end + stop - start, end + stop - start + right)
    out[:, last] += _rise(left) * (made[:, start - left : start] - out[:, last])
    out[:, first] += _rise(right)[::-1] * (made[:, stop : stop + right] - out[:, first])
    return out


def _lag(made: np.ndarray, clip: np.ndarray, at: int, most: int) -> int:
    """Delay of `made` in samples, up to `most`, against a clip that begins at its sample `at`."""
    size = clip.shape[1]
    heard = np.pad(made.astype(np.float64), ((0, 0), (most, most)))[:, at : at + size + 2 * most]
    heard = np.pad(heard, ((0, 0), (0, size + 2 * most - heard.shape[1])))
    pairs = zip(heard, clip.astype(np.float64), strict=True)
    found = sum(np.correlate(x, y, "valid") for x, y in pairs)
    total = np.cumsum(np.pad((heard**2).sum(0), (1, 0)))
    likeness = found / np.sqrt(np.maximum(total[size:] - total[:-size], 1e-12))
    lags = np.arange(-most, most + 1)
    near = 1 - 0.1 * np.abs(lags) / most  # prefers the shorter of two that fit equally well
    return int(lags[(likeness * near).argmax()]) if likeness.max() > 0 else 0


def _moved(wave: np.ndarray, at: list[int], lags: list[int]) -> np.ndarray:
    """The wave, later by the lags at two places, evenly stretched between; one lag moves it."""
    if not any(lags):
        return wave
    samples = np.arange(wave.shape[1])
    places = samples + np.interp(samples, at[: len(lags)], lags)
    return np.stack([np.interp(places, samples, x, 0, 0) for x in wave]).astype(np.float32)


def _rise(size: int) -> np.ndarray:
    """f32[size] of a raised cosine from 0 to 1, both left out."""
    at = np.arange(1, size + 1) / (size + 1)
    return (0.5 - 0.5 * np.cos(math.pi * at)).astype(np.float32)
