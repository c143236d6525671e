"""x + y * gate, then RMSNorm and modulation of the sum, in float64."""

from __future__ import annotations

import numpy as np

from ltx2rt_kernels.norm_modulate.reference import at_levels, norm_modulate, rows_bytes
from ltx2rt_kernels.traffic import Bytes


def gated_residual(
    x: np.ndarray,
    y: np.ndarray,
    *rows: np.ndarray,
    index: np.ndarray | None = None,
    biased: bool = False,
) -> np.ndarray:
    """x (B, T, D), y the same or of fewer samples; rows: the gate, which broadcasts to them, with
    an index as `at_levels` takes it; biased: behind the bias of y."""
    *bias, gate = rows
    (gate,) = at_levels([gate], index)
    total = y.astype(np.float64) + sum(bias)
    return x + np.concatenate([total, np.zeros_like(x[len(y) :])]) * gate


def residual_norm_modulate(
    x: np.ndarray,
    y: np.ndarray,
    *rows: np.ndarray,
    eps: float,
    index: np.ndarray | None = None,
    biased: bool = False,
) -> list[np.ndarray]:
    """[gated_residual, a result per (scale, shift) behind the gate]; without any, [it, its
    RMSNorm]."""
    own, rows = rows[: 1 + biased], rows[1 + biased :]
    total = gated_residual(x, y, *own, index=index, biased=biased)
    zero = np.zeros((1, 1, 1))
    return [total, *norm_modulate(total, *(rows or (zero, zero)), eps=eps, index=index)]


def bytes_moved(op: str, shapes: list[tuple[int, ...]], dtype: str) -> Bytes:
    """shapes: of x, y, the bias if there is one, the gate, the other rows, and the index if there
    is one."""
    x, y, *rows = shapes
    index = rows.pop() if rows[-1][-1] != x[-1] else None
    return rows_bytes(
        [x, y],
        rows,
        index,
        1 if op == "gated_residual" else 1 + max(1, (len(rows) - 1) // 2),
        dtype,
    )
