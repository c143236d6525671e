"""The fixed filters that checkpoints store as tensors: anti-aliasing taps, STFT bases, the blur
kernel.

They are computed here only to write checkpoints; a loaded checkpoint's own values are used as they
are. The mel bases are those of `ltx2rt.models.mel`.
"""

from __future__ import annotations

import numpy as np


def antialias_taps(size: int = 12) -> np.ndarray:
    """Kaiser-windowed sinc low-pass of a x2 resampler, f64[size], sum 1 (BigVGAN: cutoff 1/4,
    half-width 0.3)."""
    attenuation = 2.285 * (size // 2 - 1) * np.pi * 4 * 0.3 + 7.95
    window = np.kaiser(size, 0.1102 * (attenuation - 8.7))
    taps = window * np.sinc(0.5 * (np.arange(size) - (size - 1) / 2))
    return taps / taps.sum()


def stft_basis(size: int) -> np.ndarray:
    """Windowed DFT, f64[2 * (size/2 + 1), 1, size]: the real rows, then the imaginary rows;
    periodic Hann window."""
    time, bins = np.arange(size), np.arange(size // 2 + 1)[:, None]
    window = np.sin(np.pi * time / size) ** 2
    angle = 2 * np.pi * bins * time / size
    return np.concatenate([np.cos(angle), -np.sin(angle)])[:, None] * window


def blur_kernel() -> np.ndarray:
    """Binomial 5 x 5, f64[1, 1, 5, 5], sum 1."""
    row = np.array([1, 4, 6, 4, 1]) / 16
    return np.outer(row, row)[None, None]
