"""Neighbourhood attention on a TPU (Pallas): the scores of a block stay in the core's own memory.

A block is FRAMES frames of queries, with just enough rows and columns that their windows reach a
box of BOX x BOX keys in every frame: 6 x 6 where windows are 11 x 11. Columns of keys are copied
for every block of columns, because a box may begin at any column and memory is addressed in tiles;
rows and frames are read where they are. A program brings the keys of SHARING blocks. Heads of fewer
than LANES numbers share the lanes: the queries of one are zero in the lanes of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ltx2rt.graph.network_ops import window_blocks

LANES = 128
BOX = 16  # the columns of a bfloat16 tile; BOX x BOX keys fill the matrix unit
FRAMES = 2
SHARING = (4, 2)  # blocks along frames and along rows
LEAST = 8  # in a smaller window a box would show each query less than a quarter
HIDDEN = -1e30
# (groups, program, block, token of frames, of rows, of columns, LANES) -> (groups, programs by
# columns, rows, frames, blocks by rows, frames, tokens by frame, row, column, LANES)
IN_BLOCKS = (0, 7, 4, 1, 5, 2, 3, 6, 8, 9, 10)


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


@dataclass(frozen=True)
class _Axis:
    """An axis in programs of `sharing` blocks of `block` queries, of which `blocks` hold queries.

    slabs int[programs]: where the keys of a program begin, `slab` of them; boxes int[programs,
    sharing]: where in its slab the box of each block begins; seen bool[programs, sharing, block,
    box].
    """

    block: int
    blocks: int
    slab: int
    slabs: np.ndarray
    boxes: np.ndarray
    seen: np.ndarray

    @classmethod
    def plan(cls, queries: int, keys: int, window: int, first: int, block: int, sharing: int):
        programs = -(-queries // (block * sharing))
        padded = programs * sharing * block
        _, slabs, wide = window_blocks(padded, keys, window, first, block * sharing)
        _, boxes, seen = window_blocks(padded, keys, window, first, block)
        boxes = boxes.reshape(programs, sharing) - slabs[:, None]
        seen = seen.reshape(programs, sharing, *seen.shape[1:])
        return cls(block, -(-queries // block), wide.shape[2], slabs, boxes, seen)

    @property
    def shape(self) -> tuple[int, int, int]:
        return *self.boxes.shape, self.block

    @property
    def padded(self) -> int:
        return self.boxes.size * self.block


def neighbourhood_attention(
    q: Array, k: Array, v: Array, *, window, first, scale: float, interpret: bool = False
) -> Array:
    """q (B, frames, rows, columns, heads, head_dim), k and v alike, with at least q's positions ->
    q's shape; softmax in float32. interpret: run the kernel without a TPU, slowly."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    heads, dim = q.shape[4:]
    together = LANES // dim
    groups = q.shape[0] * heads // together
    block = (FRAMES, BOX - window[1] + 1, BOX - window[2] + 1)
    sizes = zip(q.shape[1:4], k.shape[1:4], window, first, block, (*SHARING, 1), strict=True)
    t, r, c = (_Axis.plan(*size) for size in sizes)
    tokens, frames = math.prod(block), t.seen.shape[3]

    missing = [(0, x.padded - n) for x, n in zip((t, r, c), q.shape[1:4], strict=True)]
    blocks = jnp.pad(_by_group(q), ((0, 0), *missing, (0, 0)))
    blocks = blocks.reshape(groups, *t.shape, *r.shape, *c.shape, LANES)
    blocks = blocks.transpose(IN_BLOCKS)  # programs, then the blocks of each, then their tokens
    programs, split = blocks.shape[:4], blocks.shape
    blocks = blocks.reshape(*programs, *split[4:6], tokens, LANES)

    mask, of_row, of_column = _masks(t, r, c)
    tables = [t.slabs, r.slabs, of_column, t.boxes, r.boxes, of_row]

    one = (*[None] * 4, *blocks.shape[4:])
    of_queries = pl.BlockSpec(one, lambda g, c, r, t, *_: (g, c, r, t, 0, 0, 0, 0))
    of_keys = pl.BlockSpec(
        (pl.squeezed, pl.squeezed, *map(pl.Element, (t.slab, r.slab, BOX, LANES))),
        lambda g, c, r, t, frames, rows, *_: (g, c, frames[t], rows[r], 0, 0),
    )
    of_mask = pl.BlockSpec(
        (None, *mask.shape[1:]), lambda g, c, r, t, _t, _r, of_column, *_: (of_column[c], 0, 0, 0)
    )
    y: Any = pl.pallas_call(
        partial(_program, t=t, r=r, dim=dim, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables) + 1,
            grid=programs,
            in_specs=[of_queries, of_keys, of_keys, of_mask],
            out_specs=of_queries,
            scratch_shapes=[pltpu.VMEM((frames, together * tokens, BOX * BOX), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(blocks.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * len(programs)),
        interpret=interpret,
        name="neighbourhood_attention",
    )(
        *(jnp.asarray(x.ravel(), jnp.int32) for x in tables),
        jnp.asarray(np.where(t.seen, 0, HIDDEN).ravel(), jnp.float32),
        blocks,
        _by_columns(k, c.slabs),
        _by_columns(v, c.slabs),
        jnp.asarray(mask),
    )
    y = y.reshape(split).transpose(np.argsort(IN_BLOCKS))
    y = y.reshape(groups, t.padded, r.padded, c.padded, LANES)
    y = y[:, : q.shape[1], : q.shape[2], : q.shape[3]].reshape(q.shape[0], -1, *q.shape[1:4], LANES)
    return jnp.moveaxis(y, 1, 4).reshape(q.shape)


def _by_group(x: Array) -> Array:
    """-> (groups of heads, frames, rows, columns, LANES)"""
    x = jnp.moveaxis(x.reshape(*x.shape[:4], -1, LANES), 4, 1)
    return x.reshape(-1, *x.shape[2:])


def _by_columns(x: Array, begins: np.ndarray) -> Array:
    """-> (groups of heads, blocks of columns, frames, rows, BOX, LANES)"""
    x = _by_group(x)
    return jnp.stack([x[:, :, :, n : n + BOX] for n in map(int, begins)], axis=1)


def _masks(t: _Axis, r: _Axis, c: _Axis) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Masks that hide keys of other rows and columns, f32[kinds of columns, kinds of rows, tokens,
    keys of a frame], and the kinds that blocks of rows and of columns are."""
    rows, of_row = np.unique(r.seen.reshape(-1, r.block, BOX), axis=0, return_inverse=True)
    columns, of_column = np.unique(c.seen[:, 0], axis=0, return_inverse=True)
    shown = rows[None, :, None, :, None, :, None] & columns[:, None, None, None, :, None, :]
    shown = np.broadcast_to(shown, (*shown.shape[:2], t.block, *shown.shape[3:]))
    mask = np.where(shown, 0, HIDDEN).astype(np.float32)
    return mask.reshape(*shown.shape[:2], -1, BOX * BOX), of_row, of_column


def _program(
    _slabs_t, _slabs_r, _of_column, boxes_t, boxes_r, of_row, hidden_frames,
    q, k, v, mask, y, scores, *, t: _Axis, r: _Axis, dim: int, scale: float,
):  # fmt: skip
    """q and y (blocks along rows, along frames, tokens, LANES), k and v (frames, rows, BOX, LANES),
    mask (kinds of rows, tokens, keys); scores (frames, heads tokens, keys) of one block."""
    from jax.experimental import pallas as pl

    tokens, (frames, _, keys) = q.shape[2], scores.shape
    number_r, number_t = pl.program_id(2), pl.program_id(3)
    here_r = jnp.minimum(q.shape[0], r.blocks - number_r * q.shape[0])
    here_t = jnp.minimum(q.shape[1], t.blocks - number_t * q.shape[1])
    lane = lax.broadcasted_iota(jnp.int32, (tokens, LANES), 1)
    own = [(lane >= start) & (lane < start + dim) for start in range(0, LANES, dim)]
    token = lax.broadcasted_iota(jnp.int32, (tokens, LANES), 0)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def multiply(x: Array, y: Array, axis: int) -> Array:
        return lax.dot_general(
            x, y, (((1,), (axis,)), ((), ())), precision, preferred_element_type=jnp.float32
        )

    def attend(number, _):
        in_r, in_t = lax.div(number, here_t), lax.rem(number, here_t)
        block_r, block_t = number_r * q.shape[0] + in_r, number_t * q.shape[1] + in_t
        row, frame, hidden = boxes_r[block_r], boxes_t[block_t], mask[of_row[block_r]]
        queries = q[in_r, in_t].astype(jnp.float32)
        queries = jnp.concatenate([jnp.where(x, queries, 0.0) for x in own]).astype(q.dtype)
        most = jnp.full((len(queries), LANES), HIDDEN, jnp.float32)
        for i in range(frames):
            here = jnp.zeros((tokens, LANES), jnp.float32)
            for j in range(t.block):
                bias = hidden_frames[(block_t * t.block + j) * frames + i]
                here = jnp.where(token >= j * (tokens // t.block), bias, here)
            here = hidden + jnp.concatenate([here] * (keys // LANES), axis=1)
            found = multiply(queries, k[frame + i, pl.ds(row, BOX)].reshape(keys, LANES), 1) * scale
            found = (found.reshape(len(own), tokens, keys) + here).reshape(found.shape)
            scores[i] = found
            most = jnp.maximum(most, jnp.maximum(found[:, :LANES], found[:, LANES:]))
        most = jnp.max(most, axis=1, keepdims=True)
        total = sums = jnp.zeros((len(queries), LANES), jnp.float32)
        for i in range(frames):
            weights = jnp.exp(scores[i] - most)
            total = total + (weights[:, :LANES] + weights[:, LANES:])
            values = v[frame + i, pl.ds(row, BOX)].reshape(keys, LANES)
            sums = sums + multiply(weights.astype(v.dtype), values, 0)
        sums = (sums / jnp.sum(total, axis=1, keepdims=True)).reshape(-1, tokens, LANES)
        parts = (jnp.where(x, sums[i], 0.0) for i, x in enumerate(own))
        y[in_r, in_t] = reduce(jnp.add, parts).astype(y.dtype)
        return 0

    lax.fori_loop(0, here_r * here_t, attend, 0)
