"""Exchanges between devices, and those of a TPU that computes only during permutations."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from ltx2rt_tpu.as_run import LEAST_BYTES
from ltx2rt_tpu.ops.table import op


@op
def shard(x: Array, dim: int, mesh_axis: str, parts: int) -> Array:
    size = x.shape[dim] // parts
    return lax.dynamic_slice_in_dim(x, lax.axis_index(mesh_axis) * size, size, axis=dim)


@op
def all_reduce(*xs: Array, mesh_axis: str) -> tuple[Array, ...]:
    return lax.psum(xs, mesh_axis)


@op
def all_gather(x: Array, dim: int, mesh_axis: str, parts: int) -> Array:
    return lax.all_gather(x, mesh_axis, axis=dim, tiled=True)


def _exchanged(x: Array, mesh_axis: str) -> Array:
    """Piece i of the first axis goes to device i, and what device i sends takes its place."""
    return lax.all_to_all(x, mesh_axis, 0, 0)


@op
def all_to_all(
    *xs: Array, split: int, concat: int, mesh_axis: str, parts: int, exchange=_exchanged
) -> tuple[Array, ...]:
    """Operands (B, tokens, heads, head_dim) of one shape travel stacked, in one communication.

    The devices' pieces lie along a first axis, heads before tokens in each: of the axes as they are
    the TPU compiler makes the one that is split the outermost, and copies tiles of as few rows as a
    device has heads (3 ms of a step of 88 on tpu7x).
    """
    if len({x.shape for x in xs}) > 1:
        how = {"split": split, "concat": concat, "mesh_axis": mesh_axis, "parts": parts}
        return tuple(all_to_all(x, **how, exchange=exchange)[0] for x in xs)
    split, concat = split + 1, concat + 1
    x = jnp.stack(xs)
    x = x.reshape(*x.shape[:split], parts, -1, *x.shape[split + 1 :])
    y = exchange(jnp.moveaxis(x, split, 0).swapaxes(-3, -2), mesh_axis)
    y = jnp.moveaxis(y.swapaxes(-3, -2), 0, concat)
    return tuple(y.reshape(*y.shape[:concat], -1, *y.shape[concat + 2 :]))


@op
def swap_edges(
    first: Array, last: Array, dim: int, mesh_axis: str, parts: int
) -> tuple[Array, Array]:
    there = [(i, i + 1) for i in range(parts - 1)]
    before = lax.ppermute(last, mesh_axis, there)
    after = lax.ppermute(first, mesh_axis, [(i, j) for j, i in there])
    own, border = lax.axis_index(mesh_axis), partial(lax.slice_in_dim, axis=dim)
    before = jnp.where(own == 0, border(first, 0, 1), before)
    return before, jnp.where(own == parts - 1, border(last, -1, None), after)


def _all_reduce_by_pairs(*xs: Array, mesh_axis: str) -> tuple[Array, ...]:
    """Small exchanges come first: behind a big one they would keep their readers waiting."""
    if lax.axis_size(mesh_axis) > 2 or sum(x.nbytes for x in xs) < LEAST_BYTES:
        return all_reduce(*xs, mesh_axis=mesh_axis)

    def swapped(x: Array) -> Array:
        return lax.ppermute(x, mesh_axis, [(0, 1), (1, 0)])

    small = {i: x for i, x in enumerate(xs) if x.nbytes < LEAST_BYTES}
    big = {i: x for i, x in enumerate(xs) if i not in small}
    came = {i: swapped(x) for i, x in small.items()}
    if small and big:
        came, big = lax.optimization_barrier((came, big))
    came |= {i: swapped(x) for i, x in big.items()}
    return tuple(x + came[i] for i, x in enumerate(xs))


def _exchanged_by_pairs(x: Array, mesh_axis: str) -> Array:
    """A permutation for each distance, if much is exchanged."""
    if x.nbytes < LEAST_BYTES:
        return _exchanged(x, mesh_axis)
    parts, own = len(x), lax.axis_index(mesh_axis)
    y = x
    for far in range(1, parts):
        sent = lax.dynamic_index_in_dim(x, lax.rem(own + far, parts), 0)
        came = lax.ppermute(sent, mesh_axis, [(i, (i + far) % parts) for i in range(parts)])
        y = lax.dynamic_update_slice_in_dim(y, came, lax.rem(own + parts - far, parts), 0)
    return y


BY_PAIRS = {"all_reduce": _all_reduce_by_pairs}
HEADS_BY_PAIRS = {"all_to_all": partial(all_to_all, exchange=_exchanged_by_pairs)}
