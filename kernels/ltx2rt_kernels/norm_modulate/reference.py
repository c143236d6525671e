"""RMSNorm without weight, then x * (1 + scale) + shift for every pair of rows, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ltx2rt_kernels.traffic import Bytes, size


def at_levels(rows: Sequence[np.ndarray], index: np.ndarray | None) -> list[np.ndarray]:
    """Rows (B or 1, levels or 1, D) as each token reads them, given the levels (B or 1, T) of the
    tokens."""
    if index is None:
        return list(rows)
    found = []
    for row in rows:
        batch = max(len(row), len(index))
        row, levels = (
            np.broadcast_to(row, (batch, *row.shape[1:])),
            np.broadcast_to(index, (batch, index.shape[1])),
        )
        found.append(
            np.stack(
                [
                    r[level if len(r) > 1 else 0 * level]
                    for r, level in zip(row, levels, strict=True)
                ]
            )
        )
    return found


def norm_modulate(
    x: np.ndarray, *rows: np.ndarray, eps: float, index: np.ndarray | None = None
) -> list[np.ndarray]:
    """x (B, T, D); rows broadcast to it: (B, 1, D), (1, 1, D) or (B, T, D), with an index as
    `at_levels` takes them; one result per (scale, shift)."""
    rows = tuple(at_levels(rows, index))
    x = x.astype(np.float64)
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return [
        y * (1 + scale.astype(np.float64)) + shift
        for scale, shift in zip(rows[::2], rows[1::2], strict=True)
    ]


def norm_scale(x: np.ndarray, scale: np.ndarray, *, eps: float) -> np.ndarray:
    """x (..., D) over its last axis; scale broadcasts to it."""
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (1 + scale)


def modulate(x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    return x * (1 + scale.astype(np.float64)) + shift


def bytes_moved(op: str, shapes: list[tuple[int, ...]], dtype: str) -> Bytes:
    """shapes: of x, the rows, and the index if there is one."""
    x, *rows = shapes
    if op == "norm_scale":  # scale by a float32 weight
        return Bytes(
            size([x, x], dtype) + size([x], "float32"), size([x, x], dtype) + size(rows, "float32")
        )
    index = rows.pop() if len(rows) % 2 else None
    return rows_bytes([x], rows, index, len(rows) // 2, dtype)


def rows_bytes(
    read: list[tuple[int, ...]],
    rows: list[tuple[int, ...]],
    index: tuple[int, ...] | None,
    num_results: int,
    dtype: str,
) -> Bytes:
    """Bytes of tensors like x, of which some are read and some are results, of rows, and of an
    index if there is one."""
    x, results = read[0], [read[0]] * num_results
    moved = size([*read, *[x] * len(rows), *results], dtype) + size(
        [x[:2]] if index else [], "int32"
    )
    return Bytes(
        moved, size([*read, *rows, *results], dtype) + size([index] if index else [], "int32")
    )
