"""upscale: every step is the formula over diffusers with the clip as a reference of half the size."""

from dataclasses import replace

import av
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ltx2rt.media.images import fit
from ltx2rt.media.sound import read_sound
from ltx2rt.media.video import read_frames
from ltx2rt.models.geometry import pack_audio, pack_video, video_positions
from ltx2rt.pipelines import make_request
from ltx2rt.pipelines.kind import fitted
from ltx2rt.run.plan import resolved_stages
from ltx2rt.session.open import opened_checkpoint
from ltx2rt.session.options import LoraSpec, ModelOptions
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.schedule import DISTILLED_SIGMAS
from tests.conftest import denoised, refused
from tests.pipelines.test_retake import write
from tests.reference import assert_stage, positions_of, stored_module

CLIP = {"prompt": "a fox", "seed": 3}


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """17 frames of 64x64 with sound."""
    return write(tmp_path_factory.mktemp("clips") / "a.mp4", 17)


def test_every_step_is_the_formula_over_diffusers(tiny, following, clip):
    """On both backends: the file's tokens lie over the clip's, which has the file's sound."""
    given = CLIP | {"upscale": clip}
    runs = {b: denoised(s, make_request(None, **given)) for b, s in following.items()}
    plan, state = runs["cuda"]
    request, record = plan.clip, state.record
    assert (request.request.name, request.width, request.height, request.num_frames) == (
        "upscale", 128, 128, 17,
    )  # fmt: skip
    g = request.geometry(following["cuda"].config)
    coarse = replace(g, rows=g.rows // 2, columns=g.columns // 2)
    seen = pack_video(record["reference.0"])[0].astype(np.float64)
    assert len(seen) == coarse.num_video_tokens
    places = positions_of(g)
    places["video"] = np.concatenate([places["video"], video_positions(coarse, 2)], 1)
    sound = pack_audio(record["source.audio"])[0].astype(np.float64)
    clean = {"video": np.concatenate([np.zeros((g.num_video_tokens, 128)), seen]), "audio": sound}
    masks = {"video": np.repeat([1.0, 0.0], [g.num_video_tokens, len(seen)])}
    masks["audio"] = np.zeros(len(sound))
    starts = {m: np.zeros(x.shape) for m, x in clean.items()}
    module = stored_module(tiny("tiny-2.3", "diffusers"))
    how = {"frozen": ("audio",)}
    assert_stage(runs, "stage1", module, places, DISTILLED_SIGMAS, masks, clean, starts, **how)
    assert [s.name for s in plan.stages if isinstance(s, Denoise)] == ["stage1"]


@pytest.fixture
def stages(following):
    """stages(path, **more) -> those of the request, and the request."""

    def make(path, **more):
        session = following["cuda"]
        request = make_request(None, **CLIP, upscale=path, **more)
        return resolved_stages(session.checkpoint, session.options, request)

    return make


@pytest.mark.parametrize("size", [(64, 64), (66, 38), (110, 90)])
def test_the_reference_is_the_file_at_its_own_size(stages, tmp_path, size):
    """Pixel for pixel, with its edge repeated up to the model's cells."""
    film = write(tmp_path / "a.mp4", 9, size=size, sound_s=0)
    (stage,) = (s for s in stages(film) if isinstance(s, Denoise))
    assert stage.streams == ("video",)
    source = stage.given[0].source
    pixels = next(read_frames(film, "", 1))
    height, width = source.geometry.size_px
    around = ((0, height - size[1]), (0, width - size[0]), (0, 0))
    expected = fit(np.pad(pixels, around, mode="edge"), width, height)
    np.testing.assert_array_equal(source.fitted(pixels), expected)
    assert stage.geometry.size_px == tuple(-(-2 * side // 32) * 32 for side in size[::-1])


def test_the_loras_header_decides_the_factor(tiny, half, clip, tmp_path):
    four = tmp_path / "x4.safetensors"
    save_file(load_file(half), four, {"reference_downscale_factor": "4"})
    how = {"distilled_lora": LoraSpec(half, 0.0), "assume": "distilled"}
    found = {}
    for path in (half, four):
        options = ModelOptions("cuda", tiny("tiny-2.3", "official"), loras=(LoraSpec(path),), **how)
        request = make_request(None, **CLIP, upscale=clip)
        stages = resolved_stages(opened_checkpoint(options), options, request)
        (stage,) = (s for s in stages if isinstance(s, Denoise))
        found[path] = stage.geometry.size_px
    assert found == {half: (128, 128), four: (256, 256)}


def test_without_a_factor_in_the_header_it_is_two(tiny, half, clip, tmp_path):
    plain = tmp_path / "plain.safetensors"
    save_file(load_file(half), plain)
    how = {"distilled_lora": LoraSpec(half, 0.0), "assume": "distilled"}
    model = tiny("tiny-2.3", "official")
    options = ModelOptions("cuda", model, loras=(LoraSpec(plain),), **how)
    checkpoint = opened_checkpoint(options)
    request = fitted(make_request(None, **CLIP, upscale=clip), options, checkpoint)
    assert f"{plain} states no reference_downscale_factor: 2 is taken" in [
        *request.remarks(checkpoint.config)
    ]
    (stage,) = (s for s in resolved_stages(checkpoint, options, request) if isinstance(s, Denoise))
    assert stage.given[0].downscale == 2 and stage.geometry.size_px == (128, 128)


def test_a_size_is_that_of_the_clip(stages, clip):
    (stage,) = (s for s in stages(clip, size="192x160") if isinstance(s, Denoise))
    assert stage.geometry.size_px == (160, 192)
    assert stage.given[0].source.footage.size == (96, 80)
    with refused("--width: 131, expected divisible by 2"):
        stages(clip, width=131)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"video_path": "a.mp4"}, "--upscale: given beside|--video-path: given beside --upscale"),
        ({"num_videos": 2}, "--num-videos: 2, but upscale makes one"),
        ({"num_frames": 9}, "--num-frames: the file"),
    ],
)
def test_what_does_not_go_with_it_is_refused(clip, more, says):
    with refused(says):
        make_request(None, **CLIP, upscale=clip, **more)


def test_the_clip_keeps_the_files_sound(released, command, clip, tmp_path):
    """As it is typed, with the released files and the LoRA beside them."""
    out = tmp_path / "large.mp4"
    small = ("--backend", "cuda", "--device", "cpu", "--video-decoder", "conv")
    folder = released("distilled", "upscaler", "ingredients", "hdr")
    words = ("--model", folder, "--upscale", clip, "--prompt", "a fox", "--seed", 3)
    status, _, err = command("generate", *words, *small, "--output", out)
    assert status == 0, err
    assert "pipeline upscale, 8 steps, unguided" in err and "upscaler-x2-1.0.safetensors" in err
    with av.open(str(out)) as made:
        stream = made.streams.video[0]
        assert (stream.width, stream.height, stream.frames) == (128, 128, 17)
    given, rate = read_sound(clip, 0.0, 1.0)
    kept, _ = read_sound(out, 0.0, 1.0)
    size = min(given.shape[1], kept.shape[1])
    alike = np.corrcoef(given[0, :size], kept[0, :size])[0, 1]  # AAC, twice
    assert rate * 0.7 < size and alike > 0.99
