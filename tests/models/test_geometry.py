"""Sizes, packing and token positions agree with the published geometry and with diffusers."""

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltx2rt.models import geometry as latents
from ltx2rt.models.geometry import Geometry

NTSC = Fraction(24000, 1001)


def geometry(frames=3, rows=2, columns=5, fps=Fraction(24), channels=16, num_audio=7) -> Geometry:
    return Geometry(frames, rows, columns, channels, 8, 32, fps, num_audio, 8, 16, 4, 160, 16000)


@pytest.mark.parametrize("num_frames,fps,expected", [
    (121, Fraction(24), 126), (1, Fraction(25), 1), (9, NTSC, 9), (481, Fraction(24), 501),
    (5, Fraction(50), 2), (1, Fraction(50), 1), (1, Fraction(120), 1),
])  # fmt: skip
def test_audio_length_is_the_rounded_duration(num_frames, fps, expected):
    assert latents.audio_latents(num_frames, fps, 25.0) == expected


@given(st.integers(1, 100))
def test_frame_counts_round_trip(frames):
    assert latents.latent_frames(latents.pixel_frames(frames, 8), 8) == frames


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9))
def test_packing_round_trips_in_official_order(frames, rows, columns, num_audio):
    g = geometry(frames, rows, columns, num_audio=num_audio)
    video = np.arange(np.prod(g.video_shape), dtype=np.float32).reshape(g.video_shape)
    tokens = latents.pack_video(video)
    assert tokens.shape == (1, g.num_video_tokens, 16)
    f, h, w = frames - 1, rows - 1, columns // 2
    np.testing.assert_array_equal(tokens[0, (f * rows + h) * columns + w], video[0, :, f, h, w])
    np.testing.assert_array_equal(latents.unpack_video(tokens, g), video)

    audio = np.arange(np.prod(g.audio_shape), dtype=np.float32).reshape(g.audio_shape)
    tokens = latents.pack_audio(audio)
    assert tokens[0, -1, 3 * 16 + 5] == audio[0, 3, -1, 5]
    np.testing.assert_array_equal(latents.unpack_audio(tokens, g), audio)


@pytest.mark.parametrize("fps", [Fraction(24), NTSC, Fraction(30)])
@pytest.mark.parametrize("frames,num_audio", [(3, 7), (61, 501)])
@pytest.mark.parametrize("motion", [1.0, 0.2])
def test_positions_equal_diffusers_bitwise(fps, frames, num_audio, motion):
    from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed as Rope
    from diffusers.pipelines.ltx2.utils import conditioning_frame_rate

    g = replace(geometry(frames=frames, fps=fps, num_audio=num_audio), motion_speed=motion)
    video = Rope(dim=32, modality="video", scale_factors=(8, 32, 32))
    expected = video.prepare_video_coords(
        1, frames, g.rows, g.columns, "cpu", fps=conditioning_frame_rate(float(fps), motion)
    ).numpy()[0]
    np.testing.assert_array_equal(latents.video_positions(g), expected)
    audio = Rope(dim=32, modality="audio", scale_factors=(4,), sampling_rate=16000, hop_length=160)
    expected = audio.prepare_audio_coords(1, num_audio, "cpu").numpy()[0]
    np.testing.assert_array_equal(latents.audio_positions(g), expected)
    assert latents.video_positions(g).dtype == latents.audio_positions(g).dtype == np.float32


@pytest.mark.parametrize("frames, index", [(1, 2), (2, 1), (4, 3)])
def test_positions_of_a_clip_at_a_later_frame_equal_diffusers_bitwise(frames, index):
    from diffusers import LTX2ConditionPipeline as Pipeline

    g, frame = geometry(frames=9, fps=NTSC), 8 * index - 7
    factors = {"vae_temporal_compression_ratio": 8, "vae_spatial_compression_ratio": 32}
    patches = dict.fromkeys(
        ("transformer_spatial_patch_size", "transformer_temporal_patch_size"), 1
    )
    expected = Pipeline._prepare_keyframe_coords(
        SimpleNamespace(**factors, **patches), frames, g.rows, g.columns, frame, 8 * frames - 7,
        float(NTSC), "cpu",
    )[0].numpy()  # fmt: skip
    np.testing.assert_array_equal(latents.keyframe_positions(g, frame, frames), expected)


def test_a_clip_beside_frame_0_is_where_the_first_latents_are():
    g = geometry(frames=3)
    np.testing.assert_array_equal(latents.keyframe_positions(g, 0, 3), latents.video_positions(g))


def test_a_keyframe_lasts_one_pixel_frame_where_it_was_put():
    g = geometry(fps=NTSC)
    positions = latents.keyframe_positions(g, 11)
    assert positions.shape == (3, 10, 2) and positions.dtype == np.float32
    expected = np.float32([11, 12]) / np.float32(24000 / 1001)
    assert np.all(positions[0] == expected)
    np.testing.assert_array_equal(positions[1:], latents.video_positions(g)[1:, :10])
