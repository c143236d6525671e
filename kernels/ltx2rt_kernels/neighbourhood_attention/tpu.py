"""Neighbourhood attention on a TPU (Pallas): the scores of a block stay in the core's own memory.

A block is the queries of some frames, 7 where windows are 11 x 11 x 11, with just enough rows and
columns that their windows reach a box of BOX x BOX keys in every frame: 6 x 6. Scores are keys by
queries, and powers of two. A query's window has one frame out of every `window` of them: those of
one multiplication are a frame for the first queries of the block and, where windows begin later,
the frame `window` after it, both in one row of keys; the queries are zero where the other frame's
keys are. So no frame is multiplied that a query does not see.

Columns of keys are copied for every block of columns, because a box may begin at any column and
memory is addressed in tiles; rows and frames are read where they are. Heads are side by side, and a
program reads LANES numbers of them: XLA would copy an axis of heads to and fro. Rows of ones under
the transposed values have the matrix unit add up the weights. As in `attention.tpu`, nothing is
subtracted from small scores, and another kernel keeps a running maximum.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ltx2rt.graph.network_ops import window_blocks
from ltx2rt_kernels.attention.tpu import HIDDEN, MAX_SCORE, MAX_SUM, MAX_VALUE, PACKED

LANES = 128
BOX = 16  # the columns of a bfloat16 tile; BOX x BOX keys fill the matrix unit
QUERIES = 256  # the most in a block: columns of the matrix unit
LEAST = 8  # in a smaller window a box would show each query less than a quarter
# Scores of later frames, and of the next head, that are multiplied before a frame's values: of 2, 4,
# 8 and all, 4 take the fewest bundles.
AHEAD = 4
# (B, block, token of frames, block, token of rows, block, token of columns, numbers of all heads) ->
# (B, blocks by columns, rows, frames, tokens by frame, row, column, numbers)
IN_BLOCKS = (0, 5, 3, 1, 2, 4, 6, 7)


def why_not(q: Array, k: Array, v: Array, *, window, first, scale: float) -> str | None:
    heads, dim = q.shape[4:]
    if q.dtype != jnp.bfloat16:
        return f"the operands are {q.dtype}, the kernel multiplies in bfloat16"
    if LANES % dim or heads % (LANES // dim):
        return f"{heads} heads of {dim} do not fill {LANES} lanes"
    if not (window[0] <= BOX and all(LEAST <= n <= BOX for n in window[1:])):
        return f"a window of {window}, the kernel takes {LEAST} to {BOX} rows and columns"
    if min(k.shape[2:4]) < BOX:
        return f"{k.shape[2]} rows, {k.shape[3]} columns of keys: less than a box of {BOX}"
    return None


class _Axis(NamedTuple):
    """An axis in blocks. boxes int[blocks]: where each block's box of keys begins; seen bool[blocks,
    queries of a block, keys of a box]."""

    boxes: np.ndarray
    seen: np.ndarray

    @classmethod
    def plan(cls, queries: int, keys: int, window: int, first: int, block: int):
        return cls(*window_blocks(-(-queries // block) * block, keys, window, first, block)[1:])


def neighbourhood_attention(
    q: Array, k: Array, v: Array, *, window, first, scale: float, interpret: bool = False
) -> Array:
    """q (B, frames, rows, columns, heads, head_dim), k and v alike, with at least q's positions ->
    q's shape; softmax in float32. interpret: run the kernel without a TPU, slowly."""
    rows, columns = (BOX - n + 1 for n in window[1:])
    block = (min(QUERIES // (rows * columns), window[0] + 1), rows, columns)
    sizes = zip(q.shape[1:4], k.shape[1:4], window, first, block, strict=True)
    axes = [_Axis.plan(*size) for size in sizes]

    # in float32, as in `attention`
    powers = (q.astype(jnp.float32) * (scale * math.log2(math.e))).astype(q.dtype)
    heads = [x.reshape(*x.shape[:4], -1) for x in (powers, k, v)]
    run = partial(
        _attend, dim=q.shape[5], window=window, axes=axes, block=block, interpret=interpret
    )
    small = _is_small(heads, q.shape[5], window)
    return lax.cond(small, run, partial(run, running=True), *heads).reshape(q.shape)


def _attend(
    q: Array, k: Array, v: Array, *,
    dim: int, window, axes, block, interpret: bool, running: bool = False,
) -> Array:  # fmt: skip
    """Attend with q in powers of two, heads of dim numbers side by side (B, frames, rows, columns,
    numbers). running: subtract the largest score so far."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    t, r, c = axes
    counts = [len(x.boxes) for x in axes]
    padded = [n * size for n, size in zip(counts, block, strict=True)]
    missing = [(0, n - size) for n, size in zip(padded, q.shape[1:4], strict=True)]
    pairs = (n for pair in zip(counts, block, strict=True) for n in pair)
    blocks = jnp.pad(q, ((0, 0), *missing, (0, 0)))
    blocks = blocks.reshape(q.shape[0], *pairs, q.shape[4]).transpose(IN_BLOCKS)
    split = blocks.shape
    blocks = blocks.reshape(*split[:4], -1, split[-1])
    tokens = blocks.shape[4]
    blocks = jnp.pad(blocks, (*[(0, 0)] * 4, (0, -tokens % LANES), (0, 0)))

    mask, tables = _masks(t, r, c)
    size = blocks.shape[4]
    of_queries = pl.BlockSpec(
        (*[None] * 4, size, LANES), lambda b, g, c, r, t, *_: (b, c, r, t, 0, g)
    )
    of_keys = pl.BlockSpec(
        (pl.squeezed, pl.squeezed, *map(pl.Element, (t.seen.shape[2], BOX, BOX, LANES))),
        lambda b, g, c, r, t, frames, rows, *_: (b, c, frames[t], rows[r], 0, g * LANES),
    )
    of_mask = pl.BlockSpec(
        (None, None, *mask.shape[2:]),
        lambda b, g, c, r, t, _t, _r, of_row, of_column, *_: (of_column[c], of_row[r], 0, 0),
    )
    multiplied = (window[0] * (LANES // dim), BOX * BOX, size)
    y: Any = pl.pallas_call(
        partial(_program, frames=window[0], dim=dim, running=running),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(q.shape[0], q.shape[4] // LANES, *blocks.shape[1:4]),
            in_specs=[of_queries, of_keys, of_keys, of_mask],
            out_specs=of_queries,
            scratch_shapes=[pltpu.VMEM(multiplied, q.dtype)],
        ),
        out_shape=jax.ShapeDtypeStruct(blocks.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 5),
        interpret=interpret,
        name="neighbourhood_attention",
    )(*tables, blocks, _by_columns(k, c.boxes), _by_columns(v, c.boxes), mask)
    y = y[..., :tokens, :].reshape(split).transpose(np.argsort(IN_BLOCKS))
    y = y.reshape(q.shape[0], *padded, q.shape[4])
    return y[:, : q.shape[1], : q.shape[2], : q.shape[3]]


def _is_small(heads: list[Array], dim: int, window) -> Array:
    """Whether softmax needs no shift, bool[]; heads: q, times the scale in powers of two, k and v."""
    longest_q, longest_k = (_longest(x, dim) for x in heads[:2])
    most = min(MAX_SCORE, MAX_SUM - math.log2(MAX_VALUE * math.prod(window)))
    scores = jnp.sqrt(longest_q * longest_k).max()
    return (scores <= most) & (jnp.abs(heads[2]).max() <= MAX_VALUE)


def _longest(x: Array, dim: int) -> Array:
    """At least the largest square of a length, by the numbers of its head, float32 (numbers): a
    product adds the squares up, which rounds them by 2^-9 at most."""
    head = np.arange(x.shape[4]) // dim
    ones = jnp.asarray(head[:, None] == head, x.dtype)
    squares = jnp.square(x.astype(jnp.float32)).astype(x.dtype)
    sums = jnp.dot(squares, ones, preferred_element_type=jnp.float32)
    return sums.max(axis=(0, 1, 2, 3)) * (1 + 2**-7)


def _by_columns(x: Array, begins: np.ndarray) -> Array:
    """-> (B, blocks of columns, frames, rows, BOX, numbers of all heads)"""
    return jnp.stack([x[:, :, :, n : n + BOX] for n in map(int, begins)], axis=1)


def _masks(t: _Axis, r: _Axis, c: _Axis) -> tuple[Array, list[Array]]:
    """Masks that hide keys of other rows and columns, f32[kinds of columns, kinds of rows, keys of
    a frame, queries], and the first arguments of `_program`."""
    rows, of_row = np.unique(r.seen, axis=0, return_inverse=True)
    columns, of_column = np.unique(c.seen, axis=0, return_inverse=True)
    shown = np.einsum("rqk,cxy->crkyqx", rows, columns)
    frames = t.seen.shape[1]
    shown = np.broadcast_to(shown[:, :, :, :, None], (*shown.shape[:4], frames, *shown.shape[4:]))
    mask = np.where(shown, 0, HIDDEN).astype(np.float32)
    mask = mask.reshape(*shown.shape[:2], BOX * BOX, -1)
    windows = t.seen.argmax(axis=2)  # where they begin, in the block's box
    # by frame of a window: the first token of a block of which the window begins later
    early = windows[:, None] - windows[:, :1, None] <= np.arange(frames - 1)[:, None]
    later = early.sum(axis=2) * (mask.shape[3] // frames)
    tables = [t.boxes, r.boxes, of_row, of_column, windows[:, 0], later]
    mask = np.pad(mask, (*[(0, 0)] * 3, (0, -mask.shape[3] % LANES)))
    return jnp.asarray(mask), [jnp.asarray(x.ravel(), jnp.int32) for x in tables]


def _program(
    _boxes_t, _boxes_r, _of_row, _of_column, begins, later, q, k, v, mask, y, weights,
    *, frames: int, dim: int, running: bool,
):  # fmt: skip
    """q and y (tokens, LANES), k and v (frames, BOX, BOX, LANES), mask (keys, tokens); weights
    (frames times heads, keys, tokens). running: subtract the largest score so far."""
    from jax.experimental import pallas as pl

    block, (keys, tokens) = pl.program_id(4), mask.shape
    heads, pairs = LANES // dim, len(later) // len(begins)
    queries, zero = q[...].T, jnp.zeros((dim, tokens), q.dtype)
    place = lax.broadcasted_iota(jnp.int32, (dim, tokens), 1)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    multiply = partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)

    def early(i: int) -> Array:
        return place < later[block * pairs + i]

    def load(ref, i: int) -> list[Array]:
        """One frame of the windows: of the first queries, and of those that begin later."""
        here = begins[block] + i
        found = [here, jnp.minimum(here + frames, len(ref) - 1)] if i < pairs else [here]
        return [ref[frame].reshape(keys, LANES) for frame in found]

    def weigh(n: int, most: Array) -> Array:
        """Store the weights of a head and a frame; return the largest score that was subtracted."""
        head, i = divmod(n, frames)
        parts = [queries[head * dim : (head + 1) * dim]]
        if i < pairs:
            parts = [jnp.where(early(i), *x) for x in ((parts[0], zero), (zero, parts[0]))]
        placed = [x if h == head else zero for x in parts for h in range(heads)]
        found = multiply(jnp.concatenate(load(k, i), axis=1), jnp.concatenate(placed)) + mask[...]
        if running:
            most = jnp.maximum(most, found.max(axis=0, keepdims=True))
            found = found - most
        weights[n] = jnp.exp2(found).astype(v.dtype)
        return most

    def add(n: int) -> Array:
        """Weighed values of a head and a frame and, under them, the sum of the weights."""
        head, i = divmod(n, frames)
        values = [x.T[head * dim : (head + 1) * dim] for x in load(v, i)]
        found = multiply(jnp.concatenate([*values, jnp.ones((PACKED, keys), v.dtype)]), weights[n])
        if i >= pairs:
            return found
        mine = jnp.where(early(i), found[:dim], found[dim : 2 * dim])
        return jnp.concatenate([mine, found[2 * dim :]])

    most: list[Array] = []
    sums: list[Any] = [None] * heads
    for n in range(heads * frames + AHEAD):
        if n < heads * frames:
            most.append(weigh(n, most[-1] if n % frames else jnp.full((1, tokens), HIDDEN)))
        if (n := n - AHEAD) >= 0:
            head, i = divmod(n, frames)
            before = sums[head] if i else 0.0
            if running and i:
                before = before * jnp.exp2(most[n - 1] - most[n])
            sums[head] = before + add(n)
    y[...] = jnp.concatenate([x[:dim] / x[dim : dim + 1] for x in sums]).T.astype(y.dtype)
