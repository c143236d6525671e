"""Waveforms to the log-mel spectrograms that the audio VAE reads. In numpy: it takes milliseconds,
once a clip.

Decides window, filters and logarithm; the hop, the rate and the number of bins are the model's.
"""

from __future__ import annotations

import numpy as np

from ltx2rt.config import AudioVaeConfig

# The `preprocessing` of every released checkpoint; its hop and number of bins are read from there.
WINDOW = 1024  # samples of a periodic Hann window, and of its Fourier transform
FLOOR = 1e-5  # below which magnitudes count as silence


def log_mel(waveform: np.ndarray, config: AudioVaeConfig) -> np.ndarray:
    """f32[B, 2, N] at config.sample_rate -> f32[B, 2, N // hop + 1, mel bins], the natural
    logarithm of magnitudes. Frame i is centred at sample i * hop; beyond its ends the waveform is
    mirrored. Computed in float64. Raises ValueError if N is not above half a window, which the
    mirror needs."""
    half = WINDOW // 2
    if waveform.shape[-1] <= half:
        raise ValueError(
            f"waveform: {waveform.shape[-1]} samples at {config.sample_rate} Hz, expected more "
            f"than {half}"
        )
    padded = np.pad(
        waveform.astype(np.float64), [(0, 0)] * (waveform.ndim - 1) + [(half, half)], mode="reflect"
    )
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW, axis=-1)[
        ..., :: config.mel_hop, :
    ]
    magnitudes = np.abs(np.fft.rfft(frames * np.sin(np.pi * np.arange(WINDOW) / WINDOW) ** 2))
    mel = magnitudes @ mel_basis(config.mel_bins, WINDOW, config.sample_rate).T
    return np.log(np.maximum(mel, FLOOR)).astype(np.float32)


def mel_basis(num_mels: int, size: int, sample_rate: int) -> np.ndarray:
    """Triangles on Slaney's mel scale (linear below 1 kHz), area 1, f64[num_mels, size/2 + 1]."""
    # Slaney: 27 logarithmic steps from 1 kHz to 6.4 kHz, 200/3 Hz per mel below
    step = np.log(6.4) / 27

    def to_mel(hz: float) -> float:
        return hz * 3 / 200 if hz < 1000 else 15 + np.log(hz / 1000) / step

    mels = np.linspace(0, to_mel(sample_rate / 2), num_mels + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(step * (mels - 15)))[:, None]
    bins = np.linspace(0, sample_rate / 2, size // 2 + 1)
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])
