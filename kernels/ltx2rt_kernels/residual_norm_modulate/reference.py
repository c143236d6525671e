"""x + y * gate, then RMSNorm and modulation of the sum, in float64."""

from __future__ import annotations

import numpy as np

from ltx2rt_kernels.norm_modulate.reference import at_levels, norm_modulate, rows_bytes
from ltx2rt_kernels.traffic import Bytes


def gated_residual(x: np.ndarray, y: np.ndarray, gate: np.ndarray, index: np.ndarray | None = None) -> np.ndarray:
    """x, y (B, T, D); gate broadcasts to them, with an index as `at_levels` takes it."""
    (gate,) = at_levels([gate], index)
    return x + y.astype(np.float64) * gate


def residual_norm_modulate(
    x: np.ndarray, y: np.ndarray, gate: np.ndarray, *rows: np.ndarray, eps: float, index: np.ndarray | None = None
) -> list[np.ndarray]:
    """[x + y * gate, a result per (scale, shift)]; without rows, [x + y * gate, its RMSNorm]."""
    total = gated_residual(x, y, gate, index)
    zero = np.zeros((1, 1, 1))
    return [total, *norm_modulate(total, *(rows or (zero, zero)), eps=eps, index=index)]


def bytes_moved(op: str, shapes: list[tuple[int, ...]], dtype: str) -> Bytes:
    """shapes: of x, y, the gate, the other rows, and the index if there is one."""
    x, y, *rows = shapes
    index = rows.pop() if len(rows) % 2 == 0 else None
    return rows_bytes([x, y], rows, index, 1 if op == "gated_residual" else 1 + max(1, len(rows) // 2), dtype)
