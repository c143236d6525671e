"""RMSNorm over all heads together, with a weight, then split RoPE, in float64."""

from __future__ import annotations

import math

import numpy as np

from ltx2rt_kernels.traffic import Bytes, size


def sum_squares(x: np.ndarray) -> np.ndarray:
    """x (B, T, heads, head_dim) -> (B, T)."""
    return np.sum(x.astype(np.float64) ** 2, axis=(-2, -1))


def qk_scale_rope(
    x: np.ndarray, total: np.ndarray, weight: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, count: int, eps: float
) -> np.ndarray:
    """x (B, T, heads, head_dim), of which pairs (i, i + head_dim/2) turn; total (B, T): the sum of squares of `count`
    numbers; weight (heads * head_dim); cos, sin broadcast to (B, T, heads, head_dim/2)."""
    y = x / np.sqrt(total / count + eps)[..., None, None] * weight.reshape(x.shape[-2:])
    a, b = np.split(y, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def qk_norm_rope(x: np.ndarray, weight: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, eps: float) -> np.ndarray:
    return qk_scale_rope(x, sum_squares(x), weight, cos, sin, count=math.prod(x.shape[-2:]), eps=eps)


def bytes_moved(op: str, shapes: list[tuple[int, ...]], dtype: str) -> Bytes:
    """shapes: of x, the sums of squares if they are given, weight, cos and sin; sums and tables are float32.

    Tables without a batch axis are asked for once per sample; the samples of a token run next to each other, so all
    but the first read the cache.
    """
    x, *others = shapes
    sums = size([x[:2]], "float32")
    if op == "sum_squares":
        return Bytes(size([x], dtype) + sums, size([x], dtype) + sums)
    *_, weight, cos, sin = others
    given = sums if op == "qk_scale_rope" else 0
    each = (*x[:-1], x[-1] // 2)
    moved = size([x, (x[0], x[1], *weight), x], dtype) + size([each, each], "float32") + given
    return Bytes(moved, size([x, weight, x], dtype) + size([cos, sin], "float32") + given)
