"""Ops of any array: elementwise, reductions, shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from ltx2rt.graph.ops import ALIKE, BINARY, UNARY, drawn_bits
from ltx2rt_tpu.ops.table import OPS, like, op


def _binary(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, y, views: function(lax.reshape(x, views[0]), lax.reshape(y, views[1]))


def zeros_around(x: Array, widths) -> Array:
    return lax.pad(x, like(0, x), [(before, after, 0) for before, after in widths])


OPS |= {
    **{name: getattr(lax, name) for name in UNARY},
    **{name: _binary(getattr(lax, name)) for name in BINARY},
    **ALIKE,
    "full": lambda value, shape, dtype: jnp.full(shape, value, dtype),
    "sigmoid": lax.logistic,
    "silu": lambda x: lax.mul(x, lax.logistic(x)),
    "gelu": partial(jax.nn.gelu, approximate=True),
    "clamp": lambda x, low, high: jnp.clip(x, low, high),
    "leaky_relu": lambda x, slope: jnp.where(x >= 0, x, x * slope),
    "cast": lambda x, dtype: lax.convert_element_type(x, dtype),
    "max": lambda x, dims: x.max(dims),
    "min": lambda x, dims: x.min(dims),
    "transpose": lambda x, perm: lax.transpose(x, perm),
    "at": lambda x, dim, index: lax.index_in_dim(x, index, axis=dim, keepdims=False),
    "concat": lambda *xs, dim: lax.concatenate(xs, dim),
    "stack": lambda *xs, dim: lax.concatenate([lax.expand_dims(x, (dim,)) for x in xs], dim),
    "expand": lambda x, shape, dim: lax.broadcast_in_dim(
        x, shape, [i for i in range(len(shape)) if i != dim]
    ),
    "barrier": lambda *xs: lax.optimization_barrier(xs),
}
# A product would recompute the GELU in front of it for every tile of its columns: on tpu7x 0.8 of a
# step's 89 ms, by the compiler's code; v6e has `linear_once`, which costs tpu7x 0.7 of 54 ms.
ONCE = {"gelu": lambda x: lax.optimization_barrier(OPS["gelu"](x))}


@op
def affine(x: Array, scale: float, offset: float) -> Array:
    x = lax.mul(x, like(scale, x)) if scale != 1.0 else x
    return lax.add(x, like(offset, x)) if offset != 0.0 else x


@op
def select(condition: Array, x: Array, y: Array, views) -> Array:
    return jnp.where(condition.reshape(views[0]) != 0, x.reshape(views[1]), y.reshape(views[2]))


@op
def modulate(x: Array, scale: Array, shift: Array, views) -> Array:
    return lax.add(
        lax.mul(x, lax.add(lax.reshape(scale, views[0]), like(1, x))), lax.reshape(shift, views[1])
    )


@op
def slice_(x: Array, dim: int, start: int, stop: int, step: int) -> Array:
    return lax.slice_in_dim(x, start, stop, step, axis=dim)


@op
def pad(x: Array, widths, mode: str) -> Array:
    return zeros_around(x, widths) if mode == "zeros" else jnp.pad(x, widths, mode=mode)


@op
def halo(x: Array, dim: int, size: int) -> Array:
    first, last = (lax.slice_in_dim(x, *ends, axis=dim) for ends in ((0, size), (-size, None)))
    border, one = partial(lax.slice_in_dim, axis=dim), first[:1].shape
    start, end = border(first[:1], 0, 1), border(last[-1:], -1, None)
    before = jnp.concatenate([jnp.broadcast_to(start, one), last[:-1]])
    after = jnp.concatenate([first[1:], jnp.broadcast_to(end, one)])
    return jnp.concatenate([before, x, after], axis=dim)


@op
def take(x: Array, index: Array, dim: int, batch_dims: int) -> Array:
    if batch_dims == 0:
        return jnp.take(x, index, axis=dim)
    return jax.vmap(lambda a, b: take(a, b, dim - 1, batch_dims - 1))(x, index)


@op
def dropout(x: Array, keys: Array, columns: Array, rate: Array, *, salt: int, views) -> Array:
    rate = lax.reshape(rate, views[2])
    drawn = lax.convert_element_type(drawn_bits(keys, columns, salt, views), jnp.float32)
    y = lax.convert_element_type(x, jnp.float32) * (1 / (1 - rate))
    return jnp.where(drawn * 2.0**-24 >= rate, y, 0).astype(x.dtype)
