"""Tiles cover, blend to one, stay aligned in time, and leave in order."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ltx2rt.models.geometry import Geometry
from ltx2rt.stages.tiling import (
    Tiling,
    blend_tiles,
    intervals,
    plan_tiles,
    space_spans,
    tile_latents,
    time_spans,
)
from tests.conftest import normal

TIME, SPACE = 4, 2  # the local decoder's factors


def latents(frames, rows, columns):
    return Geometry(frames, rows, columns, 16, 8, 32, Fraction(24), 1, 8, 16, 4, 160, 16000)


def ranges(spans):
    return [(s.start, s.stop) for s in spans]


@pytest.mark.parametrize("width, height, rows, columns", [
    (768, 512, [(0, 16)], [(0, 24)]),
    (1280, 704, [(0, 13), (11, 22)], [(0, 24), (22, 40)]),
    (1920, 1088, [(0, 14), (12, 26), (24, 34)], [(0, 24), (22, 46), (44, 60)]),
    (704, 1280, [(0, 24), (22, 40)], [(0, 13), (11, 22)]),
])  # fmt: skip
def test_official_layouts_of_121_frames(width, height, rows, columns):
    tiling = plan_tiles("auto", latents(16, height // 32, width // 32))
    assert ranges(tiling.frames) == [(0, 10), (6, 16)]
    assert ranges(tiling.rows) == rows
    assert ranges(tiling.columns) == columns


def tile_shapes(tiling):
    """Latent shapes that occur: one decoder program each."""
    axes = (tiling.frames, tiling.rows, tiling.columns)
    return {tuple(s.stop - s.start for s in tile) for tile in itertools.product(*axes)}


def test_off_is_one_tile():
    tiling = plan_tiles("off", latents(16, 34, 60))
    assert tile_shapes(tiling) == {(16, 34, 60)}
    assert all((s.weights == 1).all() for (s,) in (tiling.frames, tiling.rows, tiling.columns))


def test_time_ramps():
    first, second = time_spans(16, 10, 3, 8)
    assert (first.positions, second.positions) == (slice(0, 73), slice(48, 121))
    assert (first.weights[:49] == 1).all()
    # 24 falling frames against 25 rising ones, of which the first is zero.
    assert np.allclose(first.weights[49:], 1 - np.arange(1, 25) / 25)
    assert np.allclose(second.weights[:25], np.arange(25) / 25)
    assert (second.weights[25:] == 1).all()


def test_space_ramps():
    first, second = space_spans(7, 4, 1, 3)
    assert np.allclose(first.weights, [1] * 9 + [0.75, 0.5, 0.25])
    assert np.allclose(second.weights, [0.25, 0.5, 0.75] + [1] * 9)


sizes = st.integers(2, 12).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size - 1)))


@given(st.integers(1, 60), sizes)
def test_intervals_cover_and_overlap(length, size_overlap):
    size, overlap = size_overlap
    tiles = intervals(length, size, overlap)
    assert tiles[0][0] == 0 and tiles[-1][1] == length
    assert all(stop - start <= size for start, stop in tiles)
    assert all(a[1] - b[0] == overlap for a, b in itertools.pairwise(tiles))


@given(st.integers(1, 60), sizes, st.sampled_from([space_spans, time_spans]), st.integers(1, 8))
def test_weights_sum_to_one(length, size_overlap, spans, factor):
    result = spans(length, *size_overlap, factor)
    total = np.zeros(result[-1].end)
    for s in result:
        assert (s.weights >= 0).all()
        total[s.positions] += s.weights
    assert np.allclose(total, 1, atol=1e-6)


def local_decode(latent: np.ndarray) -> np.ndarray:
    """A decoder that repeats each latent's first three channels over its output."""
    x = latent[:, :3].repeat(SPACE, 3).repeat(SPACE, 4)
    return np.concatenate([x[:, :, :1], x[:, :, 1:].repeat(TIME, 2)], axis=2)


def tiled(grid, time_tile, space_tile):
    space = (space_spans(length, *space_tile, SPACE) for length in grid[1:])
    return Tiling(time_spans(grid[0], *time_tile, TIME), *space)


def decode_tiles(latent, tiling, decode):
    return blend_tiles(map(decode, tile_latents(latent, tiling)), tiling)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 25), st.integers(2, 9), st.integers(2, 9), sizes, sizes)
def test_tiling_a_local_decoder_changes_nothing(frames, rows, columns, time_tile, space_tile):
    latent = normal(1, 4, frames, rows, columns, seed=frames)
    tiling = tiled((frames, rows, columns), time_tile, space_tile)
    chunks = list(decode_tiles(latent, tiling, local_decode))
    assert len(chunks) == len(tiling.frames)
    video = np.concatenate(chunks, axis=1)
    assert video.dtype == np.float32
    assert np.allclose(video, local_decode(latent)[0], atol=1e-5)
    summed = np.zeros_like(video)
    axes = (tiling.frames, tiling.rows, tiling.columns)
    for tile, (t, r, c) in zip(tile_latents(latent, tiling), itertools.product(*axes), strict=True):
        weights = t.weights[:, None, None] * (r.weights[:, None] * c.weights)
        summed[:, t.positions, r.positions, c.positions] += local_decode(tile)[0] * weights
    np.testing.assert_array_equal(video, summed)  # every product and sum is there, in that order


def test_time_stays_aligned():
    """Frame n of the whole shows content n, also in tiles after the first."""
    latent = np.broadcast_to(np.arange(16, dtype=np.float32)[:, None, None], (1, 3, 16, 2, 2))
    tiling = tiled((16, 2, 2), (10, 3), (2, 1))
    video = np.concatenate(list(decode_tiles(latent, tiling, local_decode)), axis=1)
    expected = np.concatenate([[0], np.arange(1, 16).repeat(TIME)])
    assert np.allclose(video[0, :, 0, 0], expected, atol=1e-5)


def test_frames_leave_before_later_tiles_are_decoded():
    decoded = []

    def decode(latent):
        decoded.append(latent.shape)
        return local_decode(latent)

    latent = np.zeros((1, 3, 30, 4, 4), np.float32)
    tiling = tiled((30, 4, 4), (10, 3), (3, 1))
    stream = decode_tiles(latent, tiling, decode)
    assert next(stream).shape[1] == 6 * TIME  # up to where the next tile begins
    assert len(decoded) == 4  # the tiles of this chunk
    assert sum(chunk.shape[1] for chunk in stream) == 29 * TIME + 1 - 6 * TIME
    assert {shape[2:] for shape in decoded} == tile_shapes(tiling)


def test_a_tile_of_all_rows_and_columns_is_not_copied():
    tiling = plan_tiles("auto", latents(16, 4, 6))
    shapes = [(1, 3, len(t.weights), 128, 192) for t in tiling.frames]
    tiles = [np.ones(shape, np.float32) for shape in shapes]
    chunks = list(blend_tiles(iter(tiles), tiling))
    assert all(np.shares_memory(*each) for each in zip(tiles, chunks, strict=True))


def test_a_tile_of_the_wrong_shape_is_refused():
    tiling = plan_tiles("off", latents(2, 2, 2))
    with pytest.raises(AssertionError, match=r"expected \(1, 3, 9, 64, 64\)"):
        next(decode_tiles(np.zeros((1, 3, 2, 2, 2), np.float32), tiling, local_decode))
