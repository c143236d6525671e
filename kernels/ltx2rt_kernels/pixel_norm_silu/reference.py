"""RMSNorm over the channels of every pixel, without weight, then SiLU, in float64."""

from __future__ import annotations

import numpy as np

from ltx2rt_kernels.traffic import Bytes, size


def pixel_norm_silu(x: np.ndarray, *, eps: float) -> np.ndarray:
    """x (B, channels, ...)."""
    x = x.astype(np.float64)
    y = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps)
    return y / (1 + np.exp(-y))


def bytes_moved(op: str, shapes: list[tuple[int, ...]], dtype: str) -> Bytes:
    """shapes: of x."""
    return Bytes(size([*shapes, *shapes], dtype), size([*shapes, *shapes], dtype))
