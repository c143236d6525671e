"""y * 2 sigmoid(logits), one logit per head, in float64."""

from __future__ import annotations

import numpy as np

from ltx2rt.graph.encodings import E4M3, quantise_rows
from ltx2rt_kernels.traffic import Bytes, size


def head_gate(y: np.ndarray, logits: np.ndarray, *choice: np.ndarray) -> np.ndarray:
    """y (B, T, heads, head_dim), logits (B, T, heads); keep (B) and v: a sample with keep 0 is
    v's."""
    if choice:
        y = np.stack([y[b] if choice[0][b] else choice[1][b] for b in range(len(y))])
    return y * (2 / (1 + np.exp(-logits.astype(np.float64))))[..., None]


def head_gate_rows(*operands: np.ndarray) -> list[np.ndarray]:
    """The result of `head_gate` as values (rows, n) and scales (rows, 1), a row each token's
    heads."""
    y = head_gate(*operands)
    return list(quantise_rows(y.reshape(y.shape[0] * y.shape[1], -1)))


def bytes_moved(op: str, shapes: list[tuple[int, ...]], dtype: str) -> Bytes:
    """shapes: of y and the logits, and of keep and v, which is read instead of y."""
    y, logits, *choice = shapes
    written = size([y], dtype) if op == "head_gate" else size([y], E4M3) + size([y[:2]], "float32")
    moved = size([y, logits], dtype) + written + size(choice[:1], "float32")
    return Bytes(moved, moved)
