"""Rows as e4m3 numbers times one float32 scale each: the op table's own definition, which fixes
every bit."""

from __future__ import annotations

import numpy as np

from ltx2rt.graph import encodings
from ltx2rt.graph.encodings import E4M3
from ltx2rt_kernels.traffic import Bytes, size


def quantise_rows(x: np.ndarray, *, gelu: bool = False) -> list[np.ndarray]:
    """x (rows, n), numbers of float32; values (rows, n), scales (rows, 1). gelu: of its GELU by
    tanh."""
    x = x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) if gelu else x
    return list(encodings.quantise_rows(x))


def bytes_moved(op: str, shapes: list[tuple[int, ...]], dtype: str) -> Bytes:
    """shapes: of x."""
    ((rows, n),) = shapes
    moved = size([(rows, n)], dtype) + size([(rows, n)], E4M3) + size([(rows, 1)], "float32")
    return Bytes(moved, moved)
