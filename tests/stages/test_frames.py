"""Frames by the diffusion decoder on both backends: tiles, noise, small clips, their plan."""

import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from functools import cache
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from ltx2rt.media.video import read_frames
from ltx2rt.models import diffusion_decoder
from ltx2rt.models.diffusion_decoder import ATTENTION_TOKENS, DiffusionDecoderConfig
from ltx2rt.models.geometry import Geometry
from ltx2rt.run.run import run_stages
from ltx2rt.session.open import open_session
from ltx2rt.session.options import ModelOptions
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages import tiling
from ltx2rt.stages.denoise import Noise
from ltx2rt.stages.frames import DiffusionSlabs, decoding
from ltx2rt.stages.noise import standard_normal
from ltx2rt.stages.stage import State
from ltx2rt.weights.checkpoint import RenamedSource, open_checkpoint
from ltx2rt.weights.presets import preset
from tests.conftest import normal, refused
from tests.parity import ArraySource, random_params, relative_l2, run_graph

# The released strides, so that cells are 2 frames by 8 px; windows small.
CONFIG = DiffusionDecoderConfig(
    latent_channels=128, patch_size=4, head_dim=8, channels=(32, 16, 16, 16, 8),
    depths=(1, 1, 1, 1, 2), windows=((3, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 5)),
    strides=((1, 2, 2), (2, 1, 1), (2, 2, 2), (2, 2, 2)), timestep_width=16, timestep_scale=1000.0,
)  # fmt: skip
RELEASED = replace(
    CONFIG, head_dim=64, channels=(2048, 1024, 512, 512, 256), depths=(4, 6, 4, 2, 8),
    windows=((3, 7, 7), (3, 7, 7), (3, 5, 5), (3, 5, 5), (11, 11, 11)), timestep_width=384,
)  # fmt: skip


@cache
def params() -> dict[str, np.ndarray]:
    shape = diffusion_decoder.whole(CONFIG, 1, (3, 3, 3))
    found = random_params(diffusion_decoder.trace_features(CONFIG, 1, 3, 3, 3, "float32"), seed=1)
    return found | random_params(diffusion_decoder.trace(CONFIG, shape, "float32"), seed=2)


@pytest.fixture(scope="module")
def opened(tiny):
    """opened(backend, weights) -> a session of a model with a diffusion decoder."""
    checkpoint = open_checkpoint(tiny("tiny-2.3", "official"))

    def session(backend: str, weights: dict[str, np.ndarray] | None = None):
        source = ArraySource(weights or params())
        tensors = RenamedSource(checkpoint.path, {name: (source, name) for name in source.names()})
        made = replace(
            checkpoint,
            config=replace(checkpoint.config, parts={"diffusion_decoder": CONFIG}),
            sources={**checkpoint.sources, "diffusion_decoder": tensors},
        )
        return open_session(
            ModelOptions(model=checkpoint.path, backend=backend, device="cpu"), "float32", made
        )

    return session


def decoded(
    session, latents, noise: Noise, mode: str = "auto", keep: bool = False, begun: bool = False
):
    """Frames [videos, 3, F, H, W], and the state."""
    _, _, frames, rows, columns = latents.shape
    geometry = Geometry.of(session.config, columns * 32, rows * 32, 8 * frames - 7, Fraction(24))
    stage = decoding("diffusion", geometry, session.config, mode, noise)
    session.audit([stage])
    session.memory.require([stage])
    state = State(video=latents, keep=keep)
    if begun:
        stage.begin(session.config, state)
        assert list(state.begun) == [(0, 0)]
    stage.run(session, state, Stopwatch())
    return np.stack([np.concatenate(list(chunks), axis=1) for chunks in state.frames]), state


def whole(latent, noise, weights=None) -> np.ndarray:
    """The same untiled and uncropped, from the graphs themselves."""
    _, _, *grid = latent.shape
    graph = diffusion_decoder.trace_features(CONFIG, 1, *grid, "float32")
    features = run_graph("cuda", graph, weights or params(), {"latent": latent})["features"]
    shape, feeds = diffusion_decoder.whole(CONFIG, 1, tuple(grid)), {"features": features}
    graph = diffusion_decoder.trace(CONFIG, shape, "float32")
    return run_graph("cuda", graph, weights or params(), feeds | {"noise": noise})["frames"]


def drawn(seed: int, frames: int, rows: int, columns: int) -> np.ndarray:
    shape = (3, rows, columns)
    made = [standard_normal(seed, f"decoder.{i}", shape) for i in range(frames)]
    return np.stack(made, axis=1)[None]


@pytest.mark.parametrize("backend", ["cuda", pytest.param("tpu", marks=pytest.mark.slow)])
def test_two_videos_are_decoded_from_their_own_noise(opened, backend):
    latents = normal(2, 128, 3, 3, 4)
    found, state = decoded(opened(backend), latents, Noise((4, 5)), keep=True)
    for number, seed in enumerate((4, 5)):
        noise = drawn(seed, 17, 96, 128)
        assert np.array_equal(state.record["decoder.noise"][number], noise[0])
        # Summation order.
        assert relative_l2(found[number][None], whole(latents[[number]], noise)) <= 1e-5


def test_noise_that_was_begun_before_is_the_same(opened):
    latents = normal(2, 128, 3, 3, 4)
    found, state = decoded(opened("cuda"), latents, Noise((4, 5)), begun=True)
    assert not state.begun  # all of it was taken
    assert np.array_equal(found, decoded(opened("cuda"), latents, Noise((4, 5)))[0])


def test_a_run_that_fails_draws_no_more_noise(opened, monkeypatch):
    session = opened("cuda")
    geometry = Geometry.of(session.config, 128, 96, 17, Fraction(24))
    stage = decoding("diffusion", geometry, session.config, "auto", Noise((4,)))
    threads, go = ThreadPoolExecutor(1), Event()
    threads.submit(go.wait)
    monkeypatch.setattr("ltx2rt.stages.frames._pool", lambda: threads)
    state, bad = State(video=np.full((1, 128, 3, 3, 4), np.nan, np.float32)), "NaN or infinite"
    with pytest.raises(RuntimeError, match=bad):
        run_stages(session, SimpleNamespace(stages=[stage]), Stopwatch(), state)
    (drawing,) = state.begun.values()
    assert all(one.cancelled() for one in drawing.drawn)
    go.set()
    threads.shutdown()


def test_noise_of_a_file_is_read(opened, tmp_path):
    latents, noise = normal(2, 128, 3, 3, 3), normal(2, 3, 17, 96, 96, seed=8)
    save_file({"decoder": noise}, tmp_path / "noise.safetensors")
    found, _ = decoded(opened("cuda"), latents, Noise((4, 5), tmp_path / "noise.safetensors"))
    assert relative_l2(found[1][None], whole(latents[1:], noise[1:])) <= 1e-6


def test_a_small_clip_is_cut_out_of_what_its_padding_makes(opened):
    latents = normal(1, 128, 1, 2, 3)
    found, _ = decoded(opened("cuda"), latents, Noise((4,)))
    assert found.shape == (1, 3, 1, 64, 96)
    padded = np.pad(latents, ((0, 0), (0, 0), (0, 2), (0, 1), (0, 0)), mode="edge")
    assert relative_l2(found, whole(padded, drawn(4, 17, 96, 96))[:, :, :1, :64]) <= 1e-6


@pytest.mark.parametrize(
    ("backend", "cells", "tiles"),
    [("cuda", 500, (3, 2, 2)), pytest.param("tpu", 1200, (2, 2, 1), marks=pytest.mark.slow)],
)
def test_tiles_that_see_no_further_than_themselves_are_the_whole(
    opened, backend, cells, tiles, monkeypatch
):
    """Without attention in the last two stages a border changes nothing."""
    attention = re.compile(r"(?=.*attn\.proj).*(det_stages\.3|diff_blocks)")
    weights = {name: 0 * x if attention.match(name) else x for name, x in params().items()}
    monkeypatch.setattr(tiling, "TILE_CELLS", cells)
    latents, session = normal(1, 128, 5, 3, 4), opened(backend, weights)
    plan = tiling.plan_feature_tiles("auto", *features(CONFIG, (5, 3, 4)))
    assert tuple(len(spans) for spans in (plan.frames, plan.rows, plan.columns)) == tiles
    found, _ = decoded(session, latents, Noise((4,)))
    assert relative_l2(found, whole(latents, drawn(4, 33, 96, 128), weights)) <= 1e-5


def features(config, grid):
    """Cells, overlap and scale of the features of a latent of `grid`."""
    cells = diffusion_decoder.cells(config, grid)
    return cells, diffusion_decoder.overlap(config), diffusion_decoder.cell(config)


def ranges(spans):
    return [(s.start, s.stop) for s in spans]


@pytest.mark.parametrize(
    ("width", "height", "rows", "columns", "work"),
    [
        (768, 512, [(0, 64)], [(0, 96)], 1.0),
        (1280, 704, [(0, 88)], [(0, 67), (47, 114), (94, 160)], 1.25),
        (1920, 1088, [(0, 78), (58, 136)], [(0, 75), (55, 130), (110, 185), (165, 240)], 1.434),
    ],
)  # fmt: skip
def test_tiles_of_121_frames(width, height, rows, columns, work):
    released = features(RELEASED, (16, height // 32, width // 32))
    found = tiling.plan_feature_tiles("auto", *released)
    assert ranges(found.frames) == [(0, 61)] and ranges(found.rows) == rows
    assert ranges(found.columns) == columns
    done = math.prod(
        sum(s.stop - s.start for s in spans) for spans in (found.frames, found.rows, found.columns)
    )
    assert done / math.prod(released[0]) == pytest.approx(work, abs=1e-3)
    off = tiling.plan_feature_tiles("off", *released)
    assert [len(spans) for spans in (off.frames, off.rows, off.columns)] == [1, 1, 1]


def test_a_long_clip_is_cut_in_time_too_and_ramps_are_the_official_ones():
    released = features(RELEASED, (61, 16, 24))
    found = tiling.plan_feature_tiles("auto", *released)
    first, second = found.frames[:2]
    assert first.stop - second.start == 20 and second.first == 2 * second.start - 1
    assert first.first == 0 and found.frames[-1].end == 481
    rise = np.arange(1, 41) / 41
    np.testing.assert_allclose(second.weights[:40], rise, rtol=1e-6)
    np.testing.assert_allclose(first.weights[-40:], rise[::-1], rtol=1e-6)
    assert (first.weights[:-40] == 1).all()


def test_tiles_of_a_long_large_clip_are_chosen_within_a_second():
    """Of 2.8 million layouts most have tiles of the same sizes, and more of them."""
    before = time.process_time()
    tiling.plan_feature_tiles("auto", *features(CONFIG, (60, 32, 48)))
    assert time.process_time() - before < 1


def test_the_plan_knows_every_call(opened):
    session = opened("cuda")
    geometry = Geometry.of(session.config, 128, 96, 33, Fraction(24))
    stage = decoding("diffusion", geometry, session.config, "auto", Noise((1, 2)))
    networks = [call.network for call in stage.needs(session.config)]
    assert networks == ["diffusion-features", "diffusion-decoder"] * 2
    assert stage.draws(session.config) == {"decoder": (2, 3, 33, 96, 128)}
    (cost,) = session.memory.costs([stage])
    assert cost.flops > 0 and cost.weights_bytes == sum(4 * x.size for x in params().values())
    conv = decoding("conv", geometry, session.config, "auto", Noise((1, 2)))
    assert [call.network for call in conv.needs(session.config)] == ["video-decoder"] * 2
    assert not conv.draws(session.config)
    without = replace(session.config, parts={})
    with refused("--video-decoder: diffusion, but no video VAE with that decoder was found"):
        decoding("diffusion", geometry, without, "auto", Noise((1,)))


def test_memory_decides_tiles_and_what_stays_on_the_device(opened):
    """Features stay, and attention takes all tokens, where there is room for both."""
    session = opened("cuda")
    geometry = Geometry.of(session.config, 512, 256, 33, Fraction(24))
    asked = decoding("diffusion", geometry, session.config, "auto", Noise((1,)))
    most = session.memory.costs([asked.within(session)])[0].peak_bytes
    found = []
    for size in (most, most - 1, 0):
        session.use(replace(session.options, max_memory=size / 1e9 or 1e-9))
        found.append(asked.within(session))
        held = found[-1].holds(session.config)
        assert size == 0 or session.memory.costs([found[-1]])[0].peak_bytes <= size
        assert held == found[-1].kept_bytes
    first, second, least = found
    assert (first.kept_bytes > 0, first.at_once) == (True, 0)
    assert (second.kept_bytes, second.at_once) != (first.kept_bytes, 0)
    assert (least.kept_bytes, least.at_once) == (0, ATTENTION_TOKENS)


def test_a_run_ends_before_the_slabs_of_a_video_or_behind_them(opened):
    """Between two slabs some devices would wait for others that have left."""
    asked: list[bool] = []
    watch = Stopwatch(agree=lambda flag: bool(asked.append(flag)))
    geometry = Geometry.of(preset("tiny-2.5").config, 512, 64, 9, Fraction(24))
    config = diffusion_decoder.config_of(preset("tiny-2.5").config)
    cells = diffusion_decoder.cells(config, geometry.grid)
    tiles = tiling.slabs(cells, diffusion_decoder.cell(config), 4)
    stage = DiffusionSlabs(geometry, tiles, 2, noise=Noise((1, 2)))
    assert [*stage._checked(iter(range(8)), watch)] == [*range(8)] and asked == [False] * 2
    assert [len(s.weights) for s in tiles.columns] == [128] * 4


@pytest.mark.long
def test_ranks_that_share_a_clip_do_not_wait_for_each_other(generate_on_ranks, tiny):
    """What they make is compared in `tests/backends/test_tensor_parallel.py`."""
    flags = "--prompt a --pipeline distilled --width 256 --height 64 --num-frames 9 --seed 1"
    run = generate_on_ranks(2, tiny("tiny-2.5", "official"), *flags.split())
    assert run.status == 0 and "diffusion-slabs" in run.stderr, run.stderr
    assert len([*read_frames(run.clip, "clip", 9)]) == 9
