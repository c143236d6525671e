"""Weights in the encodings of `graph.encodings`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
from jax import Array, lax

from ltx2rt.graph.encodings import ENCODINGS, encoded, rotation
from ltx2rt_tpu.ops.products import quantise_rows
from ltx2rt_tpu.ops.table import op

DECODED = 2**21  # bytes of a stored matrix that are decoded at once


def _bits(x: Array, dtype: str) -> Array:
    array = lax.bitcast_convert_type(x, dtype)
    return array if array.ndim == x.ndim else lax.expand_dims(array, (array.ndim,))


def _lookup(table: tuple[float, ...], index: Array) -> Array:
    """Look up by comparing: TPUs have no fast gather."""
    found = jnp.full(index.shape, table[0], jnp.float32)
    for i, value in enumerate(table[1:], 1):
        found = jnp.where(index == i, jnp.float32(value), found)
    return found


# the namespace of `graph.encodings`
JAX = SimpleNamespace(
    quantise_rows=quantise_rows,
    cast=lax.convert_element_type,
    bits=_bits,
    stack=jnp.stack,
    lookup=_lookup,
    where=jnp.where,
    rotate=lambda x, size: jnp.matmul(x, rotation(size), precision=lax.Precision.HIGHEST),
    largest=lambda x: x.max(axis=1, keepdims=True),
    rint=partial(lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN),
)
encode = partial(encoded, o=JAX)


@op
def unpack(*fields: Array, encoding: str, dtype: str) -> Array:
    """XLA decodes where the product reads its operand; blocks of GGUF, which it does not, some rows
    at a time. It may drop a cast to bfloat16 and back, this rounding it keeps."""

    def decoded(rows: Sequence[Array]) -> Array:
        matrix = ENCODINGS[encoding].decode(JAX, *rows)
        matrix = lax.reduce_precision(matrix, 8, 7) if dtype == "bfloat16" else matrix
        return lax.convert_element_type(matrix, dtype)

    rows, width = fields[0].shape
    least = -(-rows * width // DECODED) if ENCODINGS[encoding].group > 1 else 1
    parts = next(n for n in range(least, rows + 1) if rows % n == 0)
    if parts == 1:
        return decoded(fields)
    matrix = lax.map(decoded, [x.reshape(parts, rows // parts, x.shape[1]) for x in fields])
    return matrix.reshape(rows, matrix.shape[2])
