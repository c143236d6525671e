"""Attention of blocks of tokens to some of the blocks, in float64: token by token."""

from __future__ import annotations

import numpy as np

from ltx2rt_kernels.traffic import Bytes, size

QUERIES = 128  # queries in one program


def block_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    table: np.ndarray,
    *,
    scale: float,
    size: int,
    ends: int,
) -> np.ndarray:
    """q, k, v (B, tokens, heads, head_dim); table (rows, kept)."""
    y = np.empty(q.shape)
    blocks = np.arange(q.shape[1]) // size
    for place in np.ndindex(*q.shape[:3]):
        sample, token, head = place
        row = blocks[token] - ends
        seen = np.isin(blocks, table[row]) if row >= 0 else blocks >= 0
        scores = k[sample, seen, head] @ q[place] * scale
        weights = np.exp(scores - scores.max())
        y[place] = weights @ v[sample, seen, head] / weights.sum()
    return y


def bytes_moved(op: str, shapes: list[tuple[int, ...]], dtype: str) -> Bytes:
    """shapes: of q, k, v and the table. Every program asks for the keys and values of its blocks,
    which are taken to be of 512 tokens."""
    q, k, v, table = shapes
    programs = -(-q[1] // QUERIES)
    boxes = (2 * programs * table[1] * 512, q[0], *q[2:])
    return Bytes(size([q, boxes, q], dtype), size([q, k, v, q], dtype))
