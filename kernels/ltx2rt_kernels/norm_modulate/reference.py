"""RMSNorm without weight, then x * (1 + scale) + shift for every pair of rows, in float64."""

from __future__ import annotations

import numpy as np

from ltx2rt_kernels.traffic import Bytes, size


def norm_modulate(x: np.ndarray, *rows: np.ndarray, eps: float) -> list[np.ndarray]:
    """x (B, T, D); rows broadcast to it: (B, 1, D), (1, 1, D) or (B, T, D); one result per (scale, shift)."""
    x = x.astype(np.float64)
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return [y * (1 + scale.astype(np.float64)) + shift for scale, shift in zip(rows[::2], rows[1::2], strict=True)]


def bytes_moved(op: str, shapes: list[tuple[int, ...]], dtype: str) -> Bytes:
    """shapes: of x and of the rows."""
    x, *rows = shapes
    results = [x] * (len(rows) // 2)
    return Bytes(size([x, *[x] * len(rows), *results], dtype), size([x, *rows, *results], dtype))
