"""The mel front end gives librosa's numbers."""

import numpy as np
import pytest

from ltx2rt.models.mel import log_mel, mel_basis
from ltx2rt.weights.presets import preset

AUDIO = preset("ltx-2.3").config.audio_vae
BINS = (0, 1, 5, 20, 40, 62, 63)
# librosa 0.11.0, melspectrogram(power=1, htk=False, norm="slaney") in float64: (channel, frame) ->
# BINS
LIBROSA = {
    (0, 9): (-11.512925, -11.512925, -11.512925, -9.228413, -4.278593, -11.512925, -11.512925),
    (1, 0): (-1.379361, -1.963773, -3.083231, -4.304949, -5.247416, -5.975595, -5.988074),
    (1, 1): (-0.374665, -1.243773, -2.391778, -3.643587, -4.56648, -5.293884, -5.301255),
    (1, 10): (-0.990233, -11.512925, -11.512925, -11.512925, -11.512925, -11.512925, -11.512925),
    (1, 20): (-0.971395, -4.914397, -4.889241, -4.504847, -5.035283, -7.012085, -7.028849),
}


def signal(rate: int, size: int) -> np.ndarray:
    """A chirp, and a tone with a step: f32[2, size]."""
    t = np.arange(size) / rate
    chirp = 0.5 * np.sin(2 * np.pi * (300 * t + 9000 * t**2))
    tone = 0.3 * np.cos(2 * np.pi * 1700 * t)
    return np.stack([chirp, tone + 0.2 * (t > 0.02)]).astype(np.float32)


def test_log_mel_is_librosas():
    found = log_mel(signal(16000, 3333)[None], AUDIO)
    assert found.shape == (1, 2, 3333 // 160 + 1, 64) and found.dtype == np.float32
    for (channel, frame), values in LIBROSA.items():
        # Both compute in float64; the table has six decimals, float32 seven digits.
        np.testing.assert_allclose(found[0, channel, frame, BINS], values, rtol=0, atol=2e-6)


def test_silence_is_the_floor_and_too_little_is_refused():
    assert np.unique(log_mel(np.zeros((1, 2, 513), np.float32), AUDIO)) == np.float32(np.log(1e-5))
    with pytest.raises(ValueError, match="512 samples at 16000 Hz, expected more than 512"):
        log_mel(np.zeros((1, 2, 512), np.float32), AUDIO)


def test_every_triangle_has_area_one():
    mel = mel_basis(64, 512, 16000)
    assert mel.shape == (64, 257) and (mel.max(axis=1) > 0).all()
    width = 8000 / 256  # narrow ones are sampled coarsely, hence the wide bound
    np.testing.assert_allclose(mel[32:].sum(axis=1) * width, 1, rtol=0.05)
