"""A given file becomes the latents that the reference makes of it, in one tile or in many."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTX2Video

import ltx2rt
from ltx2rt.media.footage import Footage
from ltx2rt.media.images import fit
from ltx2rt.media.mp4 import write_mp4
from ltx2rt.media.video import read_frames
from ltx2rt.models.geometry import Geometry
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.source_video import SourceVideo, usable_frames
from ltx2rt.stages.stage import State
from ltx2rt.stages.tiling import Tiling, plan_encoder_tiles, space_spans, time_spans
from tests.conftest import refused
from tests.parity import relative_l2

NUM_FRAMES, WIDTH, HEIGHT = 33, 96, 64


@pytest.fixture(scope="module")
def session(folder):
    with ltx2rt.open(folder, backend="cuda", device="cpu") as opened:
        yield opened.resident


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """36 frames of another size, of which three are over."""
    f, y, x = np.mgrid[:36, :50, :70].astype(np.float32)
    waves = np.sin(x / 7 + f / 3), np.cos(y / 5 + f / 4), np.sin(f / 2) * np.sin(x * y / 200)
    path = tmp_path_factory.mktemp("source") / "a.mp4"
    write_mp4(path, [np.stack(waves)], num_frames=36, fps=Fraction(24))
    return path


@pytest.fixture(scope="module")
def vae(folder):
    return AutoencoderKLLTX2Video.from_pretrained(folder / "vae", torch_dtype=torch.float32)


def pixels(file, count=NUM_FRAMES, stride=1):
    read = list(read_frames(file, "--f", count))
    return np.stack([fit(frame, WIDTH, HEIGHT) for frame in [read[0], *read[1::stride]]], 1)[None]


def encode(vae, frames):
    """diffusers' own, normalised."""
    mean, std = (x.view(1, -1, 1, 1, 1) for x in (vae.latents_mean, vae.latents_std))
    with torch.no_grad():
        return ((vae.encode(torch.from_numpy(frames)).latent_dist.mode() - mean) / std).numpy()


def source(session, file, num_frames=NUM_FRAMES, tiles="off", **how):
    """The stage of a clip of so many frames."""
    g = Geometry.of(session.config, WIDTH, HEIGHT, num_frames, 24)
    if isinstance(tiles, str):
        tiles = plan_encoder_tiles(tiles, g)
    return SourceVideo(Footage.read(file, "--video-path"), g, tiles, **how)


def run(session, stage):
    state = State(keep=True)
    stage.check(session)
    session.audit([stage])
    stage.run(session, state, Stopwatch())
    np.testing.assert_array_equal(state.record["source.video"], state.source["video"])
    return state.source["video"]


def test_many_frames_in_one_tile_are_diffusers(session, file, vae):
    stage = source(session, file, tiles="auto")
    assert [call.sizes for call in stage.needs(session.config)] == [(1, 3, 33, 64, 96)]
    found = run(session, stage)
    assert found.shape == (1, 128, 5, 2, 3)
    # Float32 on both sides, other orders of summation.
    assert relative_l2(found, encode(vae, pixels(file))) < 1e-5


def test_tiles_blend_in_latents_as_the_reference_does(session, file, vae):
    """Tiles of 3 x 2 x 2 latents; later ones start early at weight 0."""
    spans = (time_spans(5, 3, 1, 1), space_spans(2, 2, 1, 1), space_spans(3, 2, 1, 1))
    found = run(session, source(session, file, tiles=Tiling(*spans)))

    frames, expected, total = pixels(file), np.zeros((1, 128, 5, 2, 3)), np.zeros((5, 2, 3))
    in_time = [((0, 3), [1, 1, 0.5]), ((1, 5), [0, 0.5, 1, 1])]
    in_rows = [((0, 2), [1, 1])]
    in_columns = [((0, 2), [1, 0.5]), ((1, 3), [0.5, 1])]
    tiles = itertools.product(in_time, in_rows, in_columns)
    for ((t0, t1), wt), ((r0, r1), wr), ((c0, c1), wc) in tiles:
        tile = frames[:, :, 8 * t0 : 8 * (t1 - 1) + 1, 32 * r0 : 32 * r1, 32 * c0 : 32 * c1]
        weights = np.einsum("t,r,c->trc", wt, wr, wc)
        expected[:, :, t0:t1, r0:r1, c0:c1] += encode(vae, np.ascontiguousarray(tile)) * weights
        total[t0:t1, r0:r1, c0:c1] += weights
    np.testing.assert_allclose(total, 1)
    assert relative_l2(found, expected) < 1e-5
    # It is another encoding than that of one tile.
    assert relative_l2(found, encode(vae, frames)) > 1e-3


def test_official_tiles_of_a_large_source(session):
    """768 px that share 64 and 80 frames that share 24, alike along rows and columns."""
    large = Geometry.of(session.config, 1920, 1088, 121, 24)
    tiling = plan_encoder_tiles("auto", large)
    axes = tiling.frames, tiling.rows, tiling.columns
    ranges = [[(s.start, s.stop) for s in spans] for spans in axes]
    assert ranges == [[(0, 10), (6, 16)], [(0, 24), (22, 34)], [(0, 24), (22, 46), (44, 60)]]
    for spans, length in ((tiling.frames, 16), (tiling.rows, 34), (tiling.columns, 60)):
        total = np.zeros(length)
        for span in spans:
            assert len(span.weights) == span.stop - span.start
            total[span.positions] += span.weights
        np.testing.assert_allclose(total, 1, atol=1e-6)
    off = plan_encoder_tiles("off", large)
    assert all(len(spans) == 1 for spans in vars(off).values())
    calls = list(SourceVideo("x", large, tiling).needs(session.config))
    assert len(calls) == 12 and len(set(calls)) == 4  # shapes
    assert calls[0].sizes == (1, 3, 73, 768, 768) and calls.count(calls[0]) == 4


def test_every_other_frame_after_the_first(session, file, vae):
    found = run(session, source(session, file, 17, stride=2))
    assert relative_l2(found, encode(vae, pixels(file, 32, 2))) < 1e-5


def test_a_longer_file_is_cut_with_a_note_and_a_shorter_one_refused(session, file):
    (said,) = source(session, file).check(session)
    assert "the last 3 of its 36 frames are left out" in said
    with refused(r"--video-path: .*a\.mp4 has 36 frames, 49 are read; pass a longer one"):
        source(session, file, 49).check(session)


@pytest.mark.parametrize(
    ("given", "stride", "usable"),
    [
        (1, 1, 1), (8, 1, 1), (9, 1, 9), (36, 1, 33), (36, 2, 17), (17, 2, 9), (18, 2, 9),
        (16, 2, 9), (1, 4, 1),
    ],
)  # fmt: skip
def test_usable_frames(given, stride, usable):
    assert usable_frames(given, 8, stride) == usable
