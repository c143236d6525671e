"""A linear layer with bias, then GELU by tanh, in float64."""

from __future__ import annotations

import math

import numpy as np

from ltx2rt_kernels.traffic import Bytes, size


def linear_gelu(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, *, num_contracted: int, out_shape
) -> np.ndarray:
    """x (..., n), n over the last `num_contracted` axes; weight (m, n); bias (m); m over
    `out_shape`."""
    lead = x.shape[: x.ndim - num_contracted]
    y = x.astype(np.float64).reshape(*lead, weight.shape[1]) @ weight.T + bias
    y = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    return y.reshape(*lead, *out_shape)


def bytes_moved(op: str, shapes: list[tuple[int, ...]], dtype: str) -> Bytes:
    """shapes: of x, weight and bias. How often a product reads its operands is cuBLASLt's choice:
    the minimum."""
    x, weight, bias = shapes
    rows = math.prod(x) // weight[1]
    moved = size([x, weight, bias, (rows, weight[0])], dtype)
    return Bytes(moved, moved)
