"""SnakeBeta at twice the rate between two filters, in float64: written as sums over taps, sample by
sample."""

from __future__ import annotations

import numpy as np

from ltx2rt_kernels.traffic import Bytes, size


def snake_beta(
    x: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    alpha: np.ndarray,
    beta: np.ndarray,
    *,
    eps: float,
) -> np.ndarray:
    """x (B, channels, T); up, down (1, 1, taps); alpha, beta (channels).

    Twice the rate: zeros between the samples, the first and the last sample continued, times 2.
    """
    length, taps = x.shape[-1], up.shape[-1]
    fine = np.zeros((*x.shape[:2], 2 * length))
    for m in range(2 * length):
        for j in range(taps):
            n, odd = divmod(m + (taps - 1) // 2 - j, 2)
            if not odd:
                fine[..., m] += 2 * up[0, 0, j] * x[..., np.clip(n, 0, length - 1)]
    fine += np.sin(fine * np.exp(alpha)[:, None]) ** 2 / (np.exp(beta)[:, None] + eps)
    places = 2 * np.arange(length)[:, None] + np.arange(taps) - (taps // 2 - 1)
    return fine[..., np.clip(places, 0, 2 * length - 1)] @ down[0, 0]


def bytes_moved(op: str, shapes: list[tuple[int, ...]], dtype: str) -> Bytes:
    """shapes: of x, both filters, alpha and beta. A sample is asked for by every tap of both, from
    the cache."""
    x, up, down, alpha, beta = shapes
    taps = up[-1] * down[-1] // 2
    return Bytes(size([x] * (taps + 1), dtype), size([x, x, up, down, alpha, beta], dtype))
