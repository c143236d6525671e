"""Images enter a stage as kept tokens; everything else is noise and start."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltx2rt.models.geometry import Geometry, keyframe_positions, pack_video, video_positions
from ltx2rt.stages.conditioning import audio_state, image_tokens, video_state

G = Geometry(3, 2, 3, 16, 8, 32, Fraction(24), 7, 8, 16, 4, 160, 16000)


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_a_later_image_appends_tokens_and_the_first_frame_is_replaced():
    first, later = random(1, 16, 1, 2, 3, seed=1), random(1, 16, 1, 2, 3, seed=2)
    state = video_state(G, [image_tokens(G, later, 9, 0.25), image_tokens(G, first, 0, 1.0)])
    assert state.shape == (1, 18 + 6, 16) and state.num_target_tokens == 18
    np.testing.assert_array_equal(state.clean[:, :6], pack_video(first))
    np.testing.assert_array_equal(state.clean[:, 18:], pack_video(later))
    assert np.all(state.clean[:, 6:18] == 0)
    np.testing.assert_array_equal(state.mask[0, :, 0], np.repeat(np.float32([0, 1, 0.75]), [6, 12, 6]))
    np.testing.assert_array_equal(state.positions[:, :18], video_positions(G))
    np.testing.assert_array_equal(state.positions[:, 18:], keyframe_positions(G, 9))


@given(st.floats(0, 1), st.floats(0, 1))
def test_the_initial_latent_blends_clean_start_and_noise(strength, scale):
    image = random(1, 16, 1, 2, 3)
    state = video_state(G, [image_tokens(G, image, 0, strength), image_tokens(G, image, 8, strength)])
    noise, start = random(1, 24, 16, seed=3), random(1, 18, 16, seed=4)
    x = state.initial(noise, scale, start)
    m = state.mask.astype(np.float64)
    full = np.concatenate([start, np.zeros((1, 6, 16))], 1)
    expected = (1 - m) * state.clean + m * ((1 - scale) * full + scale * noise)
    assert x.dtype == np.float32
    np.testing.assert_allclose(x, expected, atol=1e-6, rtol=1e-6)  # four float32 roundings of values below 5
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


def test_misshapen_images_and_noise_are_refused():
    with pytest.raises(ValueError, match=r"image latent: shape \[1, 16, 1, 3, 2\]"):
        video_state(G, [image_tokens(G, random(1, 16, 1, 3, 2), 0, 1.0)])
    with pytest.raises(ValueError, match="noise"):
        audio_state(G).initial(random(1, 6, 128), 1.0)
