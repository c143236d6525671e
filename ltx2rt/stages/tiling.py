"""Decode a video latent in overlapping tiles and hand out its frames as soon as no later tile
touches them; and encode frames in the same tiles, which then blend in latents.

Decides which latents form a tile, how tiles blend, and in which order frames leave. Leaves to the
caller how a tile is decoded, and where. Tiles of equal shape share one program there.

The same tiles are used on every backend and any number of devices: the decoder sees further (13 to
22 latents) than tiles overlap, so another layout is another video. That is why the last tile of an
axis keeps its own size. Moved back to the others' size, it would save programs
(1280x704x121 needs four, 1920x1088x257 twelve) and change pictures.

Blending weights are trapezoids per axis, multiplied. A tile that starts inside the clip decodes its
first latent to one frame, not to `time_factor`; so it starts one latent early, and that first frame
has weight zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ltx2rt.models.geometry import Geometry

# The official automatic layout.
# the long side; the short one follows the aspect ratio
TILE_PX, MIN_TILE_PX, OVERLAP_PX = 768, 96, 64
TILE_FRAMES, OVERLAP_FRAMES = 80, 24
# Cells of features in a tile: a clip of 121 frames at 768x512 is one tile of 375 000 cells and
# needs 20 GB. Fewer are for devices without room for that: the last are 5 GB.
TILE_CELLS = 400_000
FEWER_CELLS = (300_000, 200_000, 150_000, 100_000)
BLEND_THREADS = 8  # frames at once


@dataclass(frozen=True, eq=False)
class Span:
    """One axis of a tile: latents [start, stop), weights of the output from `first` on."""

    start: int
    stop: int
    first: int
    # f32[positions]; over all spans of the axis they sum to 1 at every position
    weights: np.ndarray

    @property
    def end(self) -> int:
        return self.first + len(self.weights)

    @property
    def latents(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def positions(self) -> slice:
        return slice(self.first, self.end)


@dataclass(frozen=True)
class Tiling:
    """A video's tiles: all spans of frames with all of rows and of columns, in that order."""

    frames: tuple[Span, ...]
    rows: tuple[Span, ...]
    columns: tuple[Span, ...]

    def __iter__(self) -> Iterator[tuple[Span, Span, Span]]:
        return itertools.product(self.frames, self.rows, self.columns)


def plan_tiles(mode: str, geometry: Geometry) -> Tiling:
    """The tiles of a clip's latents. mode: "auto", or "off" for one tile."""
    g = geometry
    long, shortest = TILE_PX // g.space_factor, MIN_TILE_PX // g.space_factor
    sides = [max(shortest, round(long * n / max(g.grid[1:]))) for n in g.grid[1:]]
    return _plan(mode, g, sides, g.time_factor, g.space_factor)


def plan_encoder_tiles(mode: str, geometry: Geometry) -> Tiling:
    """Tiles that frames are encoded in, of the largest size along every axis; `Span.weights` are
    for latents. mode: "auto", or "off" for one tile."""
    return _plan(mode, geometry, [TILE_PX // geometry.space_factor] * 2, 1, 1)


def _plan(mode: str, geometry: Geometry, sides: list[int], time: int, space: int) -> Tiling:
    """sides: rows and columns of a tile; time, space: positions of weights to a latent."""
    g, overlap = geometry, OVERLAP_PX // geometry.space_factor
    size, *sides = g.grid if mode == "off" else (TILE_FRAMES // g.time_factor, *sides)
    frames = time_spans(g.frames, size, OVERLAP_FRAMES // g.time_factor, time)
    pairs = zip(g.grid[1:], sides, strict=True)
    return Tiling(frames, *(space_spans(n, s, overlap, space) for n, s in pairs))


def intervals(length: int, size: int, overlap: int) -> list[tuple[int, int]]:
    """[start, stop) of tiles of `size` latents that overlap; the last ends at `length`."""
    if length <= size:
        return [(0, length)]
    return [
        (start, min(start + size, length)) for start in range(0, length - overlap, size - overlap)
    ]


def plan_feature_tiles(
    mode: str,
    cells: tuple[int, int, int],
    overlap: Sequence[int],
    scale: tuple[int, int, int],
    most: int | None = None,
) -> Tiling:
    """The tiles of features of (frames, rows, columns). mode: "auto", or "off" for one tile.

    overlap: cells that two tiles share. scale: frames, rows and columns of pixels to a cell. Of the
    layouts of at most `most` in a tile (TILE_CELLS) the one with the least work. Cells [a, b) of a factor 2
    in time become frames [2a - 1, 2b - 1), frame -1 left out. Source of the frames: the official
    decoder, which takes tiles as large as fit its memory.
    """

    def splits(n: int, shared: int) -> list[tuple[int, int]]:
        """(size of a tile, cells of all) in one tile, two, ... above twice the overlap; of a size
        the fewest tiles, as more have the more work."""
        cells_of = {n: n}
        for more in range(1, n):
            size = -(-(n + more * shared) // (more + 1))
            if size > 2 * shared:
                cells_of.setdefault(size, n + more * shared)
        return [*cells_of.items()]

    def tile_and_work(layout: tuple[tuple[int, int], ...]) -> tuple[int, int]:
        tile, work = (math.prod(column) for column in zip(*layout, strict=True))
        return max(most or TILE_CELLS, tile), work

    sizes = list(cells)
    if mode == "auto":
        layouts = itertools.product(
            *(splits(n, shared) for n, shared in zip(cells, overlap, strict=True))
        )
        sizes = [size for size, _ in min(layouts, key=tile_and_work)]
    early = (scale[0] - 1, 0, 0)
    return Tiling(*map(space_spans, cells, sizes, overlap, scale, early))


def slabs(cells: tuple[int, int, int], scale: tuple[int, int, int], devices: int) -> Tiling:
    """Features of (frames, rows, columns) in slabs of columns that share nothing. scale: as of
    `plan_feature_tiles`."""
    sizes = *cells[:2], cells[2] // devices
    return Tiling(*map(space_spans, cells, sizes, (0, 0, 0), scale, (scale[0] - 1, 0, 0)))


def space_spans(
    length: int, size: int, overlap: int, factor: int, early: int = 0
) -> tuple[Span, ...]:
    """Latent i covers positions [factor i, factor (i + 1)); weights rise and fall over the overlap,
    never to 0. early: subtracted from all positions; negative ones are left out."""
    tiles, ramp = intervals(length, size, overlap), overlap * factor
    rise = np.arange(1, ramp + 1) / (ramp + 1)
    spans = []
    for start, stop in tiles:
        first = max(0, start * factor - early)
        weights = np.ones(stop * factor - early - first)
        if start > 0:
            weights[:ramp] *= rise
        if stop < length and ramp:
            weights[-ramp:] *= rise[::-1]
        spans.append(Span(start, stop, first, weights))
    return _normalised(spans)


def time_spans(length: int, size: int, overlap: int, factor: int) -> tuple[Span, ...]:
    """Latents [a, b) decode to frames [factor a, factor (b - 1) + 1), from the second tile on."""
    tiles, ramp = intervals(length, size, overlap), overlap * factor
    spans = []
    for start, stop in tiles:
        start -= start > 0
        weights = np.ones((stop - start - 1) * factor + 1)
        if start > 0:
            weights[: ramp + 1] *= np.arange(ramp + 1) / (ramp + 1)
        if stop < length:
            weights[-ramp:] *= np.arange(ramp, 0, -1) / (ramp + 1)
        spans.append(Span(start, stop, start * factor, weights))
    return _normalised(spans)


def _normalised(spans: list[Span]) -> tuple[Span, ...]:
    """Weights divided by their sum, which is not 1 where three short tiles overlap."""
    total = np.zeros(spans[-1].end)
    for s in spans:
        total[s.positions] += s.weights
    total = np.maximum(total, 1e-8)
    return tuple(
        Span(s.start, s.stop, s.first, (s.weights / total[s.positions]).astype(np.float32))
        for s in spans
    )


def tile_latents(latent: np.ndarray, tiling: Tiling) -> Iterator[np.ndarray]:
    """Each tile's part of [1, channels, frames, rows, columns], ordered as in `blend_tiles`."""
    for t, r, c in tiling:
        yield latent[:, :, t.latents, r.latents, c.latents]


def blend_tiles(
    decoded: Iterator[Any], tiling: Tiling, to_host: Callable[[Any], np.ndarray] = np.asarray
) -> Iterator[np.ndarray]:
    """Finished frames f32[3, n, H, W] of one video in order, one chunk per span of frames.

    decoded: every tile's frames [1, 3, F, h, w], on a device if they like, in the order of
    `tile_latents`; no more are taken than the video has tiles. to_host: its array is changed where
    a tile has all rows and columns, and is the chunk.
    """
    height, width = tiling.rows[-1].end, tiling.columns[-1].end
    ends = [*(t.first for t in tiling.frames[1:]), tiling.frames[-1].end]
    # frames [done, done + n), partly summed
    done, waiting = 0, np.zeros((3, 0, height, width), np.float32)
    with ThreadPoolExecutor(BLEND_THREADS, thread_name_prefix="blend") as pool:
        for t, end in zip(tiling.frames, ends, strict=True):
            frames, seen = None, waiting.shape[1]
            seams = map(_seams, (tiling.rows, tiling.columns))
            for (r, top), (c, left) in itertools.product(*seams):
                tile = to_host(next(decoded))
                expected = 1, 3, len(t.weights), len(r.weights), len(c.weights)
                assert tile.shape == expected, f"a tile of {tile.shape}, expected {expected}"
                each = tile[0].swapaxes(0, 1)
                if tile.shape[3:] == (height, width):
                    before = itertools.chain(waiting.swapaxes(0, 1), itertools.repeat(None))
                    list(pool.map(_weigh, each, t.weights, before))
                    frames = tile[0]
                    continue
                if frames is None:
                    frames = np.empty((3, t.end - done, height, width), np.float32)
                    frames[:, :seen] = waiting
                place = frames[..., r.positions, c.positions].swapaxes(0, 1)
                tops = [len(r.weights)] * seen + [top] * (len(each) - seen)
                add = partial(_add_weighted, left=left, weights=r.weights[:, None] * c.weights)
                list(pool.map(add, place, each, t.weights, tops))
            assert frames is not None, "a video has tiles"
            yield frames[:, : end - done]
            done, waiting = end, frames[:, end - done :]


def _seams(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Each span, and how many of its positions the spans before it have."""
    ends = 0, *(s.end for s in spans[:-1])
    return [(s, end - s.first) for s, end in zip(spans, ends, strict=True)]


def _weigh(frame: np.ndarray, weight: np.float32, before: np.ndarray | None) -> None:
    """frame[3, h, w] x weight, in place, plus the tiles before it."""
    if weight != 1:
        frame *= weight
    if before is not None:
        frame += before


def _add_weighted(
    place: np.ndarray,
    frame: np.ndarray,
    weight: np.float32,
    top: int,
    *,
    left: int,
    weights: np.ndarray,
) -> None:
    """place[3, h, w] += frame x weight x weights[h, w] in rows above `top` and columns before
    `left`, which tiles before this one wrote; = elsewhere. One frame at a time to save memory."""
    weights = weight * weights
    np.multiply(frame[:, top:, left:], weights[top:, left:], out=place[:, top:, left:])
    place[:, :top] += frame[:, :top] * weights[:top]
    place[:, top:, :left] += frame[:, top:, :left] * weights[top:, :left]
