"""x + y * gate, then RMSNorm and modulation of the sum, in float64."""

from __future__ import annotations

import numpy as np

from ltx2rt_kernels.norm_modulate.reference import norm_modulate
from ltx2rt_kernels.traffic import Bytes, size


def gated_residual(x: np.ndarray, y: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """x, y (B, T, D); gate broadcasts to them."""
    return x + y.astype(np.float64) * gate


def residual_norm_modulate(
    x: np.ndarray, y: np.ndarray, gate: np.ndarray, *rows: np.ndarray, eps: float
) -> list[np.ndarray]:
    """[x + y * gate, a result per (scale, shift)]; without rows, [x + y * gate, its RMSNorm]."""
    total = gated_residual(x, y, gate)
    zero = np.zeros(1)
    return [total, *norm_modulate(total, *(rows or (zero, zero)), eps=eps)]


def bytes_moved(op: str, shapes: list[tuple[int, ...]], dtype: str) -> Bytes:
    """shapes: of x, y, gate and the rows."""
    x, y, gate, *rows = shapes
    results = [x] if op == "gated_residual" else [x] * (1 + max(1, len(rows) // 2))
    return Bytes(size([x, y, x, *[x] * len(rows), *results], dtype), size([x, y, gate, *rows, *results], dtype))
