"""y * 2 sigmoid(logits), one logit per head, in float64."""

from __future__ import annotations

import numpy as np

from ltx2rt_kernels.traffic import Bytes, size


def head_gate(y: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """y (B, T, heads, head_dim), logits (B, T, heads)."""
    return y * (2 / (1 + np.exp(-logits.astype(np.float64))))[..., None]


def bytes_moved(op: str, shapes: list[tuple[int, ...]], dtype: str) -> Bytes:
    """shapes: of y and the logits."""
    y, logits = shapes
    return Bytes(size([y, logits, y], dtype), size([y, logits, y], dtype))
