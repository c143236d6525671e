"""RMSNorm over all heads together, with a weight, then split RoPE, in float64."""

from __future__ import annotations

import math

import numpy as np

from ltx2rt_kernels.traffic import Bytes, size


def sum_squares(x: np.ndarray) -> np.ndarray:
    """x (B, T, heads, head_dim) -> (B, T)."""
    return np.sum(x.astype(np.float64) ** 2, axis=(-2, -1))


def qk_scale_rope(*operands: np.ndarray, count: int, eps: float) -> list[np.ndarray]:
    """operands: x (B, T, heads, head_dim), of which pairs (i, i + head_dim/2) turn; total (B, T):
    the sum of squares of `count` numbers; weight (heads * head_dim); cos, sin broadcast to (B, T,
    heads, head_dim/2). For q, and then for k.
    """
    results = []
    for x, total, weight, cos, sin in zip(*[iter(operands)] * 5, strict=True):
        y = x / np.sqrt(total / count + eps)[..., None, None] * weight.reshape(x.shape[-2:])
        a, b = np.split(y, 2, axis=-1)
        results.append(np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1))
    return results


def qk_norm_rope(*operands: np.ndarray, eps: float) -> list[np.ndarray]:
    """`qk_scale_rope` with the sum of x itself."""
    found = []
    for x, *others in zip(*[iter(operands)] * 4, strict=True):
        found += qk_scale_rope(x, sum_squares(x), *others, count=math.prod(x.shape[-2:]), eps=eps)
    return found


def qk_scale(*operands: np.ndarray, count: int, eps: float, spread=()) -> list[np.ndarray]:
    """qk_scale_rope without tables: operands x, total, weight; spread: index of the k, and of the v
    behind all, that each sample uses."""
    return _still(qk_scale_rope, 3, operands, spread, count=count, eps=eps)


def qk_norm(*operands: np.ndarray, eps: float, spread=()) -> list[np.ndarray]:
    """qk_norm_rope without tables: operands x, weight; spread: as in qk_scale."""
    return _still(qk_norm_rope, 2, operands, spread, eps=eps)


def _still(turn, size: int, operands, spread, **keywords) -> list[np.ndarray]:
    groups = zip(*[iter(operands[:-1] if spread else operands)] * size, strict=True)
    found = turn(*(x for group in groups for x in (*group, np.ones(1), np.zeros(1))), **keywords)
    return [found[0], *(x[list(spread)] for x in (found[1], operands[-1]))] if spread else found


def bytes_moved(op: str, shapes: list[tuple[int, ...]], dtype: str) -> Bytes:
    """shapes: of x, the sums of squares if they are given, weight, cos and sin if it turns, and
    again of k's; sums and tables are float32. Tables that q and k share are counted for both. A v
    behind all is copied, it and k for every sample of q.

    Tables without a batch axis are asked for once per sample; the samples of a token run next to
    each other, so all but the first read the cache.
    """
    if op == "sum_squares":
        both = size(shapes, dtype) + size([shapes[0][:2]], "float32")
        return Bytes(both, both)
    moved = minimum = 0
    tables = 2 if op.endswith("rope") else 0
    if len(shapes) % (2 + tables + ("scale" in op)):
        *shapes, v = shapes
        # samples that are written beyond those that are read: of k and of v
        more = (shapes[0][0] - v[0], *v[1:])
        moved = minimum = size([more, more, v, v], dtype)
    for x, *others in zip(*[iter(shapes)] * (2 + tables + ("scale" in op)), strict=True):
        cos_and_sin, (*given, weight) = (
            others[len(others) - tables :],
            others[: len(others) - tables],
        )
        each = (*x[:-1], x[-1] // 2)
        moved += size([x, (x[0], x[1], *weight), x], dtype) + size(
            [each] * tables + given, "float32"
        )
        minimum += size([x, weight, x], dtype) + size([*cos_and_sin, *given], "float32")
    return Bytes(moved, minimum)
