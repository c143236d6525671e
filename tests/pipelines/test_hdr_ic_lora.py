"""hdr-ic-lora: every step is the formula over diffusers without sound; EXR frames of its codes."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from ltx2rt.media import hdr
from ltx2rt.media.footage import Footage
from ltx2rt.media.video import video_info
from ltx2rt.models.geometry import pack_video, video_positions
from ltx2rt.pipelines import make_request
from ltx2rt.pipelines.clip import resolve
from ltx2rt.pipelines.recipes import settings_in
from ltx2rt.run.plan import resolved_stages
from ltx2rt.run.recording import high_range
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.inset import Cut
from ltx2rt.stages.schedule import DISTILLED_SIGMAS
from tests.conftest import denoised, refused
from tests.pipelines.test_retake import write
from tests.reference import assert_stage, positions_of, stored_module

STRENGTH = 0.75
STAGE2 = np.array([0.909375, 0.725, 0.0], np.float32)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """17 frames of 128x128, without sound."""
    return write(tmp_path_factory.mktemp("clips") / "a.mp4", 17, size=(128, 128), sound_s=0)


def test_every_step_is_the_formula_over_diffusers(tiny, following, clip):
    """On both backends; the frames are of the last latents' codes."""
    folder = tiny("tiny-2.3", "diffusers")
    given = {"prompt": "a fox", "video_path": clip, "seed": 3, "reference_strength": STRENGTH}
    runs = {b: denoised(s, make_request("hdr-ic-lora", **given)) for b, s in following.items()}
    plan, state = runs["cuda"]
    request = plan.clip
    assert (request.width, request.height, request.num_frames) == (128, 128, 17)
    assert not [n for n in state.record if ".audio." in n]
    made = pack_video(state.record["upsampled"])[0].astype(np.float64)
    module = stored_module(folder)
    stages = (("stage1", 2, 0, DISTILLED_SIGMAS), ("stage2", 1, 1, STAGE2))
    for stage, scale, number, sigmas in stages:
        g = request.geometry(following["cuda"].config, scale)
        coarse = replace(g, rows=g.rows // 2, columns=g.columns // 2)
        seen = pack_video(state.record[f"reference.{number}"])[0].astype(np.float64)
        places = positions_of(g)
        places["video"] = np.concatenate([places["video"], video_positions(coarse, 2)], 1)
        silent = np.zeros((g.audio_latents, 128))
        clean = {"video": np.concatenate([np.zeros((g.num_video_tokens, 128)), seen])}
        start = {m: np.zeros(x.shape) for m, x in (clean | {"audio": silent}).items()}
        if stage == "stage2":
            start["video"][: g.num_video_tokens] = made
        masks = {"video": np.repeat([1.0, 1 - STRENGTH], [g.num_video_tokens, len(seen)])}
        masks["audio"], clean["audio"] = np.zeros(len(silent)), silent
        how = {"frozen": ("audio",), "alone": True}
        assert_stage(runs, stage, module, places, sigmas, masks, clean, start, **how)
        assert len(state.record[f"{stage}.video.steps"]) == len(sigmas) - 1
    assert high_range(following["cuda"], request) == hdr.HighRange("SRGB_LINEAR", "logc3")


def test_references_are_encoded_whole_up_to_512x768(following, tmp_path):
    """However long, and however the clip is decoded: tiles of 80 frames give latents 0.09 away."""
    film = write(tmp_path / "long.mp4", 97, size=(128, 128), sound_s=0)
    session = following["cuda"]
    given = {"prompt": "a fox", "video_path": film, "seed": 3}
    for side, tiles in ((128, [1, 1]), (2048, [1, 2])):
        request = make_request("hdr-ic-lora", **given, width=side, height=side)
        stages = resolved_stages(session.checkpoint, session.options, request)
        found = [s.given[0].source.tiling.frames for s in stages if isinstance(s, Denoise)]
        assert [len(spans) for spans in found] == tiles
        assert len(stages[-1].tiling.frames) == 2


@pytest.mark.parametrize(("size", "mode"), [((180, 100), "reflect"), ((60, 60), "replicate")])
def test_borders_mirror_the_picture(following, tmp_path, size, mode):
    """Of what was scaled, at no multiples of 64 or 128; one as wide as the picture repeats its edge."""
    film = write(tmp_path / "a.mp4", 9, size=size, sound_s=0)
    session = following["cuda"]
    request = make_request("hdr-ic-lora", prompt="a fox", video_path=film, seed=3)
    stages = resolved_stages(session.checkpoint, session.options, request)
    sources = [s.given[0].source for s in stages if isinstance(s, Denoise)]
    pixels = next(sources[0].pictures())
    assert pixels.shape[:2] == size[::-1]
    planes = torch.tensor(pixels.transpose(2, 0, 1).copy())[None].double() / 127.5 - 1
    for source, share in zip(sources, (4, 2), strict=True):
        (height, width), (columns, rows) = source.geometry.size_px, (n // share for n in size)
        scaled = torch.nn.functional.interpolate(
            planes, size=(rows, columns), mode="bilinear", align_corners=False
        )
        around = (0, width - columns, 0, height - rows)
        expected = torch.nn.functional.pad(scaled, around, mode=mode if share == 4 else "reflect")
        np.testing.assert_allclose(source.fitted(pixels), expected[0], atol=1e-6)  # float32


@pytest.mark.parametrize("speed", [1, 2])
def test_of_high_quality_each_frame_is_seen_twice_and_every_second_one_stays(
    following, tmp_path, speed
):
    """At the file's rate, of a part of the file at any speed; prompts by time count as it is played."""
    film, session = write(tmp_path / "a.mp4", 45, sound_s=0), following["cuda"]
    given = {"prompt": "a fox", "video_path": film, "seed": 3, "start_time": 0.25, "speed": speed}
    how = {"high_quality": True, "prompt_at": ["0:0.5=it rains"]}
    request = make_request("hdr-ic-lora", **given, **how)
    stages = resolved_stages(session.checkpoint, session.options, request)
    first = next(s for s in stages if isinstance(s, Denoise))
    source, count = first.given[0].source, 39 // speed + speed - 1
    assert first.geometry.frames == -(-(2 * count - 2) // 8) + 1
    pixels = [*Footage.read(film, "").frames()][6::speed]
    shown = [*source.pictures()]
    assert len(shown) == 8 * first.geometry.frames - 7
    for i, seen in enumerate(shown[: 2 * count - 1]):
        np.testing.assert_array_equal(seen, pixels[i // 2])
    usual = replace(first.geometry, fps=Fraction(24), motion_speed=1.0)
    np.testing.assert_array_equal(video_positions(first.geometry), video_positions(usual))
    assert stages[-1] == Cut(count, step=2)
    columns = [range(0, 1)]
    bias = first.relay.biases(first.geometry, columns)["video"][:, 0]
    half_s = 2 * 0.5 * 24 / 8  # in latent frames
    assert bias[: int(half_s) + 2].max() == 0 and bias[-2] < 0
    made = resolve(request, session.config)
    assert made.clip_frames == count and made.clip_fps == 24
    (twice,) = (x for x in made.remarks(session.config) if "every second" in x)
    assert twice.startswith(f"{2 * count - 1} frames")
    end_s = {1: 1.875, 2: 1.917}[speed]
    assert any(f"0.25 to {end_s} s of it" in x for x in made.remarks(session.config))


def test_high_quality_beyond_the_models_limit_is_refused(following, tmp_path):
    film = write(tmp_path / "a.mp4", 252, sound_s=0)
    request = make_request("hdr-ic-lora", prompt="a fox", video_path=film, high_quality=True)
    with refused("--high-quality: 503 frames.* 20.92 s .*limit is 20 s.*--end-time"):
        resolve(request, following["cuda"].config)
    assert resolve(replace(request, end_time=10.0), following["cuda"].config).num_frames == 479


@pytest.mark.parametrize("sizes", [(17,), (1, 8, 8), (4, 5, 5, 3)])
def test_every_second_frame_stays_whatever_chunks_it_comes_in(sizes):
    frames = np.arange(17, dtype=np.float32)[None, :, None, None] * np.ones(
        (3, 1, 2, 2), np.float32
    )
    chunks = np.split(frames, np.cumsum(sizes)[:-1], axis=1)
    for count in (9, 4):
        kept = np.concatenate([*Cut(count, step=2).changed(iter(chunks))], 1)
        np.testing.assert_array_equal(kept, frames[:, ::2][:, :count])
        codes = [np.moveaxis(chunk, 0, 3).astype(np.uint16) for chunk in chunks]
        kept = np.concatenate([*Cut(count, step=2).changed(iter(codes))])
        np.testing.assert_array_equal(kept[:, 0, 0, 0], np.arange(0, 17, 2)[:count])


def test_frames_are_in_linear_light(tiny, command, half, tmp_path):
    clip = write(tmp_path / "given.mp4", 9, size=(116, 70), sound_s=0)
    model = ("--model", tiny("tiny-2.3", "official"), "--distilled-lora", "none", "--lora", half)
    start = ("generate", "--backend", "cuda", "--device", "cpu", "--pipeline", "hdr-ic-lora")
    words = (*start, *model, "--prompt", "a fox", "--seed", 3, "--video-path", clip)
    both = (tmp_path / "hlg.mp4", tmp_path / "%05d.exr")
    status, out, err = command(*words, "--hdr", "ACESCG", "--high-quality", "--output", *both)
    assert status == 0, err
    assert [line.split(": ")[0] for line in out.splitlines()] == [*map(str, both)], err
    info = video_info(both[0], "")
    assert (info.width, info.height, info.num_frames) == (116, 70, 9) and "HLG" in info.ignored[0]
    assert not info.has_sound and info.fps == 24 and settings_in(both[0])["high_quality"] is True
    shown = [hdr.read_exr(path) for path in sorted(tmp_path.glob("*.exr"))]
    assert len(shown) == 9 and shown[0].shape == (70, 116, 3)
    light = np.stack(shown) @ hdr.AP1_TO_709.T
    assert light.min() > -0.1 and light.max() < 55.2  # the brightest code of LogC3 is 55.08
