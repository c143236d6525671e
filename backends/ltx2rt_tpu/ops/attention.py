"""Attention and positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from ltx2rt_kernels.attention import tpu as kernel
from ltx2rt_kernels.neighbourhood_attention import tpu as neighbourhood_kernel

from ltx2rt.graph.network_ops import window_blocks
from ltx2rt.scheduling import in_use
from ltx2rt_tpu.ops.products import heads_times
from ltx2rt_tpu.ops.table import like, op, precision


def _scores(q: Array, k: Array, bias: Array | None, scale: float, bias_view) -> Array:
    """float32 (B, kv_heads, group, tokens, context)."""
    b, t, heads, d = q.shape
    n = k.shape[2]
    q = q.reshape(b, t, n, heads // n, d)
    scores = jnp.einsum(
        "btngd,bsnd->bngts", q, k, precision=precision(q), preferred_element_type=jnp.float32
    )
    scores = lax.mul(scores, like(scale, scores))
    return scores if bias is None else scores + bias.reshape(bias_view)[:, None].astype(jnp.float32)


# rows of weighed attention at once; with the bias of 12288 tokens all would take 19 GB
SCORES_BYTES = 2**28


@op
def attention(
    q: Array, k: Array, v: Array, bias: Array | None = None, *, scale: float, bias_view
) -> Array:
    """Attend, with a bias in blocks of queries that SCORES_BYTES hold, at least a kernel's."""
    tokens = q.shape[1]
    room = SCORES_BYTES // (4 * q.shape[0] * q.shape[2] * k.shape[1])
    size = max(room // kernel.LANES, 1) * kernel.LANES
    if bias is None or tokens <= size:
        return _attend(q, k, v, bias, scale, bias_view)
    bias, per_query = bias.reshape(bias_view), bias_view[2] > 1
    view = (*bias_view[:2], size if per_query else 1, bias_view[3])

    def attend(number, y):
        # the last block may repeat queries of the one before
        start = jnp.minimum(number * size, tokens - size)
        queries = lax.dynamic_slice_in_dim(q, start, size, 1)
        weighed = lax.dynamic_slice_in_dim(bias, start, size, 2) if per_query else bias
        found = _attend(queries, k, v, weighed, scale, view)
        return lax.dynamic_update_slice_in_dim(y, found, start, 1)

    return lax.fori_loop(0, -(-tokens // size), attend, jnp.zeros_like(q))


def attention_on_tpu(
    q: Array, k: Array, v: Array, bias: Array | None = None, *, scale: float, bias_view
) -> Array:
    """Use the Pallas kernel if it supports these operands."""
    if kernel.why_not(q, k, v, bias, scale=scale, bias_view=bias_view):
        return attention(q, k, v, bias, scale=scale, bias_view=bias_view)
    return kernel.attention(q, k, v, scale=scale)


def _attend(q: Array, k: Array, v: Array, bias: Array | None, scale: float, bias_view) -> Array:
    """Attend by batched products, the only ones that XLA runs fast on a CPU even in a loop."""
    b, t, heads, d = q.shape
    n = k.shape[2]
    weights = jax.nn.softmax(_scores(q, k, bias, scale, bias_view), axis=-1).astype(v.dtype)
    weights = lax.reshape(weights, (b, n, heads // n * t, v.shape[1]))
    y = lax.batch_matmul(weights, lax.transpose(v, (0, 2, 1, 3)), precision=precision(v))
    y = lax.reshape(y, (b, n, heads // n, t, d))
    return lax.reshape(lax.transpose(y, (0, 3, 1, 2, 4)), q.shape)


@op
def rope(x: Array, cos: Array, sin: Array, view) -> Array:
    half, dim = x.shape[-1] // 2, x.ndim - 1
    a, b = lax.split(lax.convert_element_type(x, jnp.float32), (half, half), dim)
    cos, sin = lax.reshape(cos, view), lax.reshape(sin, view)
    first = lax.sub(lax.mul(a, cos), lax.mul(b, sin))
    second = lax.add(lax.mul(b, cos), lax.mul(a, sin))
    return lax.convert_element_type(lax.concatenate([first, second], dim), x.dtype)


# Frames, rows and columns of queries that are multiplied with one box of keys. Of those tried on
# both TPUs these take the fewest cycles by the compiler's code: larger blocks see more keys that
# their windows leave out, smaller ones copy more.
NEIGHBOURS = (4, 4, 8)


@op
def neighbourhood_attention(q: Array, k: Array, v: Array, window, first, scale: float) -> Array:
    """A loop over blocks of queries, each with the box of keys that its windows reach. Heads come
    first, and queries and keys of a block are one axis each: a TPU pads the last two axes. A column
    of ones next to the values has the matrix unit add up the weights."""
    plans = map(window_blocks, q.shape[1:4], k.shape[1:4], window, first, NEIGHBOURS)
    begins, boxes, masks = zip(*plans, strict=True)
    block, box = ([mask.shape[i] for mask in masks] for i in (1, 2))
    counts = [len(begin) for begin in begins]
    kinds, masks = zip(*(_of_boxes(i, masks) for i in range(3)), strict=True)
    begins, boxes, kinds = ([jnp.asarray(x) for x in found] for found in (begins, boxes, kinds))
    q, k, v = (jnp.moveaxis(x, 4, 1) for x in (q, k, v))
    lead, dim = q.shape[:2], q.shape[5]
    v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=5)

    def attend(number, y):
        place = jnp.unravel_index(number, counts)
        here, there = (
            (0, 0, *(x[i] for x, i in zip(start, place, strict=True)), 0)
            for start in (begins, boxes)
        )
        queries = lax.dynamic_slice(q, here, (*lead, *block, dim)).reshape(*lead, -1, dim)
        keys, values = (
            lax.dynamic_slice(x, there, (*lead, *box, x.shape[5])).reshape(*lead, -1, x.shape[5])
            for x in (k, v)
        )
        how = {"precision": precision(q), "preferred_element_type": jnp.float32}
        scores = jnp.einsum("bnqd,bnkd->bnqk", queries, keys, **how)
        t, r, c = (x[kind[i]] for x, kind, i in zip(masks, kinds, place, strict=True))
        scores = jnp.where(t & r & c, scores * scale, -jnp.inf)
        weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True)).astype(v.dtype)
        found = jnp.einsum("bnqk,bnkd->bnqd", weights, values, **how)
        found = found[..., :dim] / found[..., dim:]
        return lax.dynamic_update_slice(y, found.astype(y.dtype).reshape(*lead, *block, dim), here)

    return jnp.moveaxis(lax.fori_loop(0, math.prod(counts), attend, jnp.zeros_like(q)), 1, 4)


def _of_boxes(axis: int, masks: Sequence[np.ndarray]) -> tuple[np.ndarray, Array]:
    """Which of the masks each block along an axis has, and the masks, bool[kinds, queries of a
    block, keys of a box]: a TPU takes long to make these of the three axes' parts."""
    kinds, which = np.unique(masks[axis], axis=0, return_inverse=True)
    view, shape = [1] * 6, [mask.shape[i] for i in (1, 2) for mask in masks]
    view[axis], view[axis + 3] = kinds.shape[1:]
    whole = np.broadcast_to(kinds.reshape(-1, *view), (len(kinds), *shape))
    return which.reshape(-1), jnp.asarray(whole.reshape(len(kinds), math.prod(shape[:3]), -1))


def neighbourhood_attention_on_tpu(
    q: Array, k: Array, v: Array, window, first, scale: float
) -> Array:
    """Use the Pallas kernel if it is on and supports these operands."""
    plan = {"window": window, "first": first, "scale": scale}
    if not in_use("neighbourhood") or neighbourhood_kernel.why_not(q, k, v, **plan):
        return neighbourhood_attention(q, k, v, **plan)
    return neighbourhood_kernel.neighbourhood_attention(q, k, v, **plan)


@op
def axial_rope(x: Array, frequencies, sizes, first) -> Array:
    heads, dim = x.shape[4:]
    swapped = heads_times(x, np.kron(np.eye(dim // 2), [[0, 1], [1, 0]]))
    axis = np.repeat(np.arange(3), sizes)
    signs = np.resize(np.asarray([-1, 1], np.float32), heads * dim)
    cos, sin = 1.0, 0.0
    for i, begin in enumerate(first):
        positions = jnp.arange(begin, begin + x.shape[i + 1], dtype=jnp.float32)
        angles = positions[:, None] * np.tile(np.repeat(frequencies, 2) * (axis == i), heads)
        view = [x.shape[i + 1] if j == i + 1 else 1 for j in range(4)]
        cos *= jnp.cos(angles).reshape(*view, -1)
        sin += (signs * jnp.sin(angles)).reshape(*view, -1)
    wide = x.astype(jnp.float32).reshape(swapped.shape)
    return (wide * cos + swapped * sin).astype(x.dtype).reshape(x.shape)


@op
def sinusoid(t: Array, frequencies) -> Array:
    angles = t[..., None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


@op
def attention_part(
    q: Array, k: Array, v: Array, bias: Array | None = None, *, scale: float, bias_view
) -> Array:
    b, t, heads, d = q.shape
    scores = _scores(q, k, bias, scale, bias_view)
    log_sum = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - log_sum).astype(v.dtype)
    y = jnp.einsum(
        "bngts,bsnd->btngd", weights, v, precision=precision(v), preferred_element_type=jnp.float32
    ).reshape(b, t, heads, d)
    return _part(y, log_sum.reshape(b, heads, t).swapaxes(1, 2), q.dtype)


def _part(y: Array, log_sum: Array, dtype: jnp.dtype) -> Array:
    """y and, behind it, log_sum in two halves; by its bits: XLA takes x - bfloat16(x) for zero."""
    bits = lax.bitcast_convert_type(log_sum, jnp.uint32) & jnp.uint32(0xFFFF0000)
    upper = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.concatenate([y, upper[..., None], (log_sum - upper)[..., None]], axis=-1).astype(
        dtype
    )


@op
def attention_join(parts: Array) -> Array:
    wide = parts.astype(jnp.float32)
    weights = jax.nn.softmax(wide[..., -2:-1] + wide[..., -1:], axis=0)
    return (wide[..., :-2] * weights).sum(axis=0).astype(parts.dtype)
