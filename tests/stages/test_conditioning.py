"""Images enter a stage as kept tokens; everything else is noise and start."""

from contextlib import closing
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltx2rt.media.images import load_conditioning_image
from ltx2rt.models.geometry import (
    Geometry,
    keyframe_positions,
    pack_audio,
    pack_video,
    video_positions,
)
from ltx2rt.pipelines import make_request
from ltx2rt.pipelines.build import Loras
from ltx2rt.pipelines.clip import resolve
from ltx2rt.session.call import Call
from ltx2rt.session.open import open_session
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.conditioning import Tokens, audio_state, image_tokens, video_state
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.references import StageReference
from ltx2rt.stages.stage import State
from ltx2rt.weights.files import write_arrays
from ltx2rt.weights.presets import preset
from tests.conftest import assert_same, refused
from tests.conftest import normal as random

G = Geometry(3, 2, 3, 16, 8, 32, Fraction(24), 7, 8, 16, 4, 160, 16000)


def test_a_later_image_appends_tokens_and_the_first_frame_is_replaced():
    first, later = random(1, 16, 1, 2, 3, seed=1), random(1, 16, 1, 2, 3, seed=2)
    state = video_state(G, [image_tokens(G, later, 9, 0.25), image_tokens(G, first, 0, 1.0)])
    assert state.shape == (1, 18 + 6, 16) and state.num_target_tokens == 18
    np.testing.assert_array_equal(state.clean[:, :6], pack_video(first))
    np.testing.assert_array_equal(state.clean[:, 18:], pack_video(later))
    assert np.all(state.clean[:, 6:18] == 0)
    mask = np.repeat(np.float32([0, 1, 0.75]), [6, 12, 6])
    np.testing.assert_array_equal(state.mask[0, :, 0], mask)
    np.testing.assert_array_equal(state.positions[:, :18], video_positions(G))
    np.testing.assert_array_equal(state.positions[:, 18:], keyframe_positions(G, 9))


def test_a_clip_replaces_the_first_latents_or_is_appended_whole():
    clip = random(1, 16, 2, 2, 3)
    tokens = [image_tokens(G, clip, 0, 0.75), image_tokens(G, clip, 1, 0.25)]
    state = video_state(G, tokens)
    np.testing.assert_array_equal(state.clean[:, :12], pack_video(clip))
    np.testing.assert_array_equal(state.clean[:, 18:], pack_video(clip))
    assert state.mask[0, :, 0].tolist() == [0.25] * 12 + [1] * 6 + [0.75] * 12
    np.testing.assert_array_equal(state.positions[:, 18:], keyframe_positions(G, 1, 2))


def test_tokens_of_keyframes_are_the_first_latents_and_those_that_are_generated():
    frame, image = random(1, 16, 1, 2, 3), image_tokens(G, random(1, 16, 1, 2, 3), 9, 0.25)
    slot = Tokens(pack_video(frame), np.float32(1), keyframe_positions(G, 9), slot=9)
    state = video_state(G, [image, slot])
    np.testing.assert_array_equal(state.keyframes, np.repeat([1, 0, 0, 1], [6, 12, 6, 6]))


def test_latents_of_an_earlier_stage_cover_as_many_pixels_as_they_stand_for():
    half = replace(G, rows=1)
    given = StageReference("stage1", half, downscale=2)
    np.testing.assert_array_equal(given.blank().positions, video_positions(half, 2))


@given(st.floats(0, 1), st.floats(0, 1))
def test_the_initial_latent_blends_clean_start_and_noise(strength, scale):
    image = random(1, 16, 1, 2, 3)
    state = video_state(G, [image_tokens(G, image, frame, strength) for frame in (0, 8)])
    noise, start = random(1, 24, 16, seed=3), random(1, 18, 16, seed=4)
    x = state.initial(noise, scale, start)
    m = state.mask.astype(np.float64)
    full = np.concatenate([start, np.zeros((1, 6, 16))], 1)
    expected = (1 - m) * state.clean + m * ((1 - scale) * full + scale * noise)
    assert x.dtype == np.float32
    # Four float32 roundings of values below 5.
    np.testing.assert_allclose(x, expected, atol=1e-6, rtol=1e-6)
    assert state.clear(x).shape == (1, 18, 16)


def test_a_kept_token_is_exact_and_pure_noise_is_exact():
    image = random(1, 16, 1, 2, 3)
    state, noise = video_state(G, [image_tokens(G, image, 0, 1.0)]), random(1, 18, 16, seed=5)
    x = state.initial(noise, 1.0)
    np.testing.assert_array_equal(x[:, :6], pack_video(image))
    np.testing.assert_array_equal(x[:, 6:], noise[:, 6:])


def test_audio_is_generated_whole():
    state = audio_state(G)
    assert state.shape == (1, 7, 128) and state.positions.shape == (1, 7, 2)
    assert np.all(state.mask == 1)


def test_misshapen_noise_is_refused():
    with pytest.raises(ValueError, match="noise"):
        audio_state(G).initial(random(1, 6, 128), 1.0)


def reference(tokens, weights=None):
    clean, positions = random(1, tokens, 16), random(3, tokens, 2)
    own = None if weights is None else np.asarray(weights, np.float32)
    return Tokens(clean, np.float32(0), positions, own)


def grown(num_targets, items):
    """The weights as published: a matrix that grows from the first item with weights."""
    weights, count = np.ones((num_targets, num_targets)), num_targets
    started = False
    for size, weight in items:
        started = started or weight is not None
        larger = np.full((count + size, count + size), 0.0 if started else 1.0)
        larger[:count, :count] = weights
        larger[count:, count:] = 1
        larger[:num_targets, count:] = 1 if weight is None else weight
        larger[count:, :num_targets] = 1 if weight is None else np.reshape(weight, (-1, 1))
        weights, count = larger, count + size
    return weights


@pytest.mark.parametrize("items", [
    [(3, None), (2, [0.5, 0])],
    [(2, [0.25, 1]), (3, None), (1, [0.5])],
    [(3, None), (2, None), (2, [1, 1]), (2, [0.3, 0.7])],
], ids=str)  # fmt: skip
def test_what_tokens_see_of_references(items):
    image = image_tokens(G, random(1, 16, 1, 2, 3), 0, 1.0)
    state = video_state(G, [image, *(reference(*item) for item in items)])
    assert state.masked and state.num_target_tokens == 18
    found = state.attention()
    np.testing.assert_array_equal(found, grown(18, items).astype(np.float32))
    np.testing.assert_array_equal(found, found.T)
    assert found.diagonal().min() == 1  # no row sees nothing


def test_without_weights_there_is_no_mask():
    assert not video_state(G, [reference(3), reference(2)]).masked
    assert video_state(G, [reference(3), reference(2, [1, 1])]).masked


@pytest.mark.parametrize(("downscale", "stride"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_positions_of_a_reference(downscale, stride):
    """By the definition in float64: latent frame k has frames [8k - 7, 8k + 1)."""
    fps, expected = 24.0, []
    for k in range(G.frames):
        times = [max(8 * k - 7, 0) / (fps / stride), (8 * k + 1) / (fps / stride)]
        times = [max(t - (stride - 1) / fps, 0) for t in times] if stride != 1 else times
        for row in range(G.rows):
            for column in range(G.columns):
                places = [[n * 32 * downscale for n in (i, i + 1)] for i in (row, column)]
                expected.append([times, *places])
    found = video_positions(G, downscale, stride)
    assert found.dtype == np.float32
    # Three float32 roundings.
    np.testing.assert_allclose(found, np.array(expected).transpose(1, 0, 2), rtol=3e-7)
    if downscale == stride == 1:
        np.testing.assert_array_equal(found, video_positions(G))


def test_a_clip_starts_from_latents_at_the_first_level(tmp_path):
    """x = scale noise + (1 - scale) latents, as diffusers' latents with noise_scale, to which
    test_denoise.py holds stage 2."""
    model, file = preset("tiny-2.3").config, tmp_path / "start.safetensors"
    sides = {"width": 128, "height": 64, "num_frames": 9, "sigmas": ["0.725,0.4", "stage2=0.3"]}

    def stages(**change):
        given = sides | {"num_videos": 2, "seed": 3, "latents_in": file} | change
        clip = resolve(make_request("distilled", prompt="a fox", **given), model)
        found = clip.stages(model, ModelOptions("cuda", tmp_path), Loras())
        return [stage for stage in found if isinstance(stage, Denoise)]

    first, second = stages()
    latents = {"video": random(*first.geometry.video_shape)}
    latents["audio"] = random(*first.geometry.audio_shape, seed=2)
    write_arrays(file, {f"{m}_latent": x for m, x in latents.items()})
    state = State(keep=True)
    first.check(None)
    found = first._started(state, first.blank)
    for m, pack in (("video", pack_video), ("audio", pack_audio)):
        noise = state.record[f"stage1.{m}.noise"].astype(np.float64)
        expected = 0.725 * noise + (1 - 0.725) * pack(latents[m])
        assert found[f"{m}_latent"].shape[0] == 2
        np.testing.assert_allclose(found[f"{m}_latent"], expected, rtol=0, atol=1e-6)  # float32
    assert second.file is None and first.steps() == 2
    for change, message in (
        ({"sigmas": []}, "no --image latent:K:FRAME reads it"),
        ({"width": 192}, r"video_latent in .* expected float32 \[1, 128, 2, 1, 3\] in stage1"),
        ({"num_frames": 33, "segment_frames": 25, "num_videos": 1}, "a clip in segments"),
    ):
        with refused(message):
            stages(**change)[0].check(None)
    write_arrays(file, {"video_latent": latents["video"]})
    with refused("has no tensor audio_latent, but video_latent$"):
        first.check(None)
    write_arrays(file, {f"layer.{i}": latents["video"] for i in range(11)})
    with refused(r"video_latent, but (layer\.\d+, ){7}layer\.\d+ and 3 more$"):
        first.check(None)


@pytest.mark.long
def test_latents_of_a_file_are_the_images_that_they_were_made_of(tiny, generate, images, tmp_path):
    """At the size of each stage; by hand encoded as the stages encode them."""
    model = tiny("tiny-2.3", "official")
    plain = generate("cuda", model, "--seed", 3, "--image", f"{images[0]}:0", f"{images[1]}:9:0.6")
    latents = {}
    options = ModelOptions("cuda", model, device="cpu", dtype="float32")
    with closing(open_session(options)) as session:
        for stage, (width, height) in (("stage1", (64, 32)), ("stage2", (128, 64))):
            for k, path in enumerate(images):
                frames = load_conditioning_image(path, width, height, 0)
                call = Call("video-encoder", frames.shape)
                made = session.run(call, {"frames": frames})["latent"]
                latents[f"{stage}.image.{k}"] = np.asarray(session.backend.to_host(made))
    latents["image.1"] = latents.pop("stage1.image.1")  # what a stage has none of its own of
    file = tmp_path / "latents.safetensors"
    write_arrays(file, latents)
    flags = ("--image", "latent:0:0", "latent:1:9:0.6", "--latents-in", file)
    given = generate("cuda", model, "--seed", 3, *flags)
    assert given.status == 0, given.stderr
    assert_same(given.latents, plain.latents)
