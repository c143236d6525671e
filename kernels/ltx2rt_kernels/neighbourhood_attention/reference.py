"""Attention of each query to the window of keys around it, in float64: query by query."""

from __future__ import annotations

import math

import numpy as np

from ltx2rt_kernels.traffic import Bytes, size

# sizes of the decoder's largest stage; queries of one program
WINDOW, BLOCK = ((11, 11, 11), (4, 4, 8))


def neighbourhood_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    window: tuple[int, ...],
    first: tuple[int, ...],
    scale: float,
) -> np.ndarray:
    """q, k, v (B, frames, rows, columns, heads, head_dim)."""
    y = np.empty(q.shape)
    for place in np.ndindex(*q.shape[:5]):
        sample, *at, head = place
        begin = [
            max(0, min(f + i - w // 2, n - w))
            for i, f, w, n in zip(at, first, window, k.shape[1:4], strict=True)
        ]
        box = (sample, *(slice(b, b + w) for b, w in zip(begin, window, strict=True)), head)
        keys, values = (x[box].reshape(-1, x.shape[-1]) for x in (k, v))
        scores = keys @ q[place] * scale
        weights = np.exp(scores - scores.max())
        y[place] = weights @ values / weights.sum()
    return y


def bytes_moved(op: str, shapes: list[tuple[int, ...]], dtype: str) -> Bytes:
    """shapes: of q, k and v. Every block of queries asks for a box of keys and of values."""
    q, k, v = shapes
    blocks = math.prod(-(-n // b) for n, b in zip(q[1:4], BLOCK, strict=True))
    box = math.prod(min(b + w - 1, n) for b, w, n in zip(BLOCK, WINDOW, k[1:4], strict=True))
    boxes = (2 * blocks * box, k[0], *k[4:])
    return Bytes(size([q, boxes, q], dtype), size([q, k, v, q], dtype))
