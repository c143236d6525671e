"""Linear layers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ltx2rt.graph.encodings import E4M3, E4M3_STEP, E4M3_TINY
from ltx2rt_tpu.ops.arrays import modulate
from ltx2rt_tpu.ops.table import op, precision

# Sizes of operands that v6e computes once. Smaller ones take no time; of larger ones, XLA fuses the GELU
# into the product before it, which then takes 0.71 ms in place of 0.44 (4080 x 4096 x 8192).
ONCE_BYTES = (2**20, 2**24)
LANES = 128
UNIT = 256  # rows and columns of the matrix unit


@op
def linear(
    x: Array, weight: Array, bias: Array | None = None, *, num_contracted: int, out_shape
) -> Array:
    lead = x.shape[: x.ndim - num_contracted]
    x = lax.reshape(x, (*lead, weight.shape[1]))
    y = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision=precision(x))
    y = y if bias is None else lax.add(y, lax.reshape(bias, (*(1,) * len(lead), len(bias))))
    return lax.reshape(y, (*lead, *out_shape))


def linear_once(x: Array, *operands: Array, **how: Any) -> Array:
    """Multiply an operand that is computed once: XLA would make a norm or a GELU in front of a
    product part of it, and compute that for every block of columns."""
    least, most = ONCE_BYTES
    x = lax.optimization_barrier(x) if least <= x.nbytes <= most else x
    return linear(x, *operands, **how)


def modulate_once(x: Array, *rows: Array, **how: Any) -> Array:
    """Modulate once a norm that is too large for `linear_once`: no product is in front of it, which
    could take it in as it does a GELU."""
    y = modulate(x, *rows, **how)
    return lax.optimization_barrier(y) if y.nbytes > ONCE_BYTES[1] else y


ONCE_ON_V6E = {"linear": linear_once, "modulate": modulate_once}


def heads_times(x: Array, matrix: np.ndarray) -> Array:
    """Multiply each head of x (..., heads, head_dim) by a matrix of zeros and ones, head_dim times
    head_dim; float32 (..., heads * head_dim). As many heads at once as fill the matrix unit: in
    axes of their own, XLA would put another axis in the lanes, and copy all of x."""
    wide, dim = x.reshape(*x.shape[:-2], -1), x.shape[-1]
    width = wide.shape[-1]
    unit = width if width % UNIT or UNIT % dim else UNIT
    ones = jnp.asarray(np.kron(np.eye(unit // dim), matrix), x.dtype)
    how = {"precision": precision(x), "preferred_element_type": jnp.float32}
    made = [jnp.dot(wide[..., i : i + unit], ones, **how) for i in range(0, width, unit)]
    return jnp.concatenate(made, axis=-1)


def quantise_rows(x: Array) -> tuple[Array, Array]:
    """x [..., n] as e4m3, and the float32 scale [..., 1] of each row."""
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(x).max(axis=-1, keepdims=True), E4M3_TINY) * E4M3_STEP
    return (x / scale).astype(E4M3), scale


@op
def quantised_linear(
    x: Array, weight: Array, scale: Array, bias: Array | None = None, *, num_contracted, out_shape
) -> Array:
    """e4m3 numbers are bfloat16 numbers: the product is one of bfloat16, summed in float32."""
    lead = x.shape[: x.ndim - num_contracted]
    values, row_scale = quantise_rows(x.reshape(*lead, weight.shape[1]))
    a, b = values.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    y = lax.dot_general(a, b, (((a.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    y = y * row_scale * scale[:, 0]
    y = y if bias is None else y + bias
    return y.astype(x.dtype).reshape(*lead, *out_shape)
