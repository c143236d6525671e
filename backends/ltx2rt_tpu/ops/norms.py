"""Norms."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ltx2rt_tpu.ops.convolutions import biased
from ltx2rt_tpu.ops.products import LANES, heads_times
from ltx2rt_tpu.ops.table import like, op


def _mean(x: Array, axes: tuple[int, ...]) -> Array:
    """The result in float32, with axes of size 1 where it was taken."""
    total = lax.reduce_sum(x, axes)
    return lax.expand_dims(lax.div(total, like(math.prod(x.shape[i] for i in axes), total)), axes)


@op
def rms_norm(x: Array, weight: Array | None = None, *, dims, weight_view, eps: float) -> Array:
    wide = lax.convert_element_type(x, jnp.float32)
    y = lax.mul(wide, lax.rsqrt(lax.add(_mean(lax.square(wide), dims), like(eps, wide))))
    return lax.convert_element_type(_weighted(y, weight, weight_view), x.dtype)


def rms_norm_on_tpu(
    x: Array, weight: Array | None = None, *, dims, weight_view, eps: float
) -> Array:
    """Have the matrix unit add up the squares of heads that do not fill the lanes, in bfloat16."""
    *_, heads, dim = 1, *x.shape
    if x.dtype != jnp.bfloat16 or tuple(dims) != (x.ndim - 1,) or dim >= LANES:
        return rms_norm(x, weight, dims=dims, weight_view=weight_view, eps=eps)
    wide = x.astype(jnp.float32)
    squares = heads_times(jnp.square(wide).astype(x.dtype), np.ones((dim, dim)))
    y = wide.reshape(squares.shape) * lax.rsqrt(squares / dim + eps)
    y = y if weight is None else y * jnp.tile(weight.astype(jnp.float32), heads)
    return y.astype(x.dtype).reshape(x.shape)


def _weighted(y: Array, weight: Array | None, view) -> Array:
    if weight is None:
        return y
    return lax.mul(y, lax.reshape(lax.convert_element_type(weight, jnp.float32), view))


@op
def sum_squares(x: Array, dims) -> Array:
    return lax.reduce_sum(lax.square(lax.convert_element_type(x, jnp.float32)), dims)


@op
def rms_scale(
    x: Array, sum_squares: Array, weight: Array | None = None, *, dims, weight_view, count, eps
) -> Array:
    mean = lax.div(lax.expand_dims(sum_squares, dims), like(count, sum_squares))
    scale = lax.rsqrt(lax.add(mean, like(eps, mean)))
    y = lax.mul(lax.convert_element_type(x, jnp.float32), scale)
    return lax.convert_element_type(_weighted(y, weight, weight_view), x.dtype)


def _standardise(x: Array, axis: int, eps: float) -> Array:
    x = lax.sub(x, _mean(x, (axis,)))
    return lax.mul(x, lax.rsqrt(lax.add(_mean(lax.square(x), (axis,)), like(eps, x))))


@op
def layer_norm(x: Array, dim: int, eps: float) -> Array:
    return _standardise(x.astype(jnp.float32), dim, eps).astype(x.dtype)


@op
def group_norm(x: Array, weight: Array, bias: Array, groups: int, eps: float) -> Array:
    y = _standardise(x.astype(jnp.float32).reshape(x.shape[0], groups, -1), 2, eps).reshape(x.shape)
    y = _weighted(y, weight, (1, len(weight), *(1,) * (x.ndim - 2)))
    return biased(y, bias.astype(jnp.float32)).astype(x.dtype)
