"""Attention on a TPU (Pallas): the scores stay in the core's own memory.

Decides which operands the kernel takes, its blocks, and whether it keeps a running maximum.

Scores are transposed, keys by queries, so that maxima go along sublanes, and exponentials are
powers of two: log2(e) is part of q's scale. Rows of ones under the transposed values have the
matrix unit add up the weights as it multiplies them, rounded. The scores of the next tile are
multiplied before the powers of this one are taken, so that the unit does not wait. Keys that fill
no block are a slice that each query begins with; nothing is masked.

Softmax needs no shift where no power overflows or vanishes: where |q| times the longest |k| is
small for every query, none is subtracted. Elsewhere another kernel keeps a running maximum, chosen
outside: two bodies in one kernel would cost the time of both. A gradient is that of jax's splash
kernel, which then runs the forward pass too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

LANES = 128  # what a head is a multiple of, and the stock kernel's blocks
# Blocks of the stock kernel: 1024 x 1024 float32 scores and their bfloat16 exponentials, and two
# copies of 3072 keys and values, fit into the 16 MiB that a kernel has by default.
MAX_QUERIES, MAX_KEYS, MAX_KEYS_AT_ONCE = 1024, 3072, 1024
# Scores of a tile, and tiles of a block at most: 4096 keys of 1024 queries or 2048 of 2048, which
# fit into the same 16 MiB. Of those tried these take the fewest bundles on both TPUs. With a
# running maximum half as many take 5 % longer to run, and half as long to compile.
TILE_QUERIES, TILE_KEYS, TILES = 1024, 512, 8
COLUMNS = 256  # queries that the matrix unit holds
PACKED = 16  # rows of a bfloat16 tile: where a block of keys may begin
SUBLANES = 8  # rows of a float32 tile
# The largest scores, in powers of two, and values: a sum over 2^15 keys then stays below 2^127, and
# 2^-100 is no denormal number.
MAX_SCORE, MAX_VALUE, MAX_SUM = 100, 2.0**12, 127
HIDDEN = -1e30


def why_not(
    q: Array, k: Array, v: Array, bias: Array | None = None, *, scale: float, bias_view=None
) -> str | None:
    if bias is not None:
        return "there is a bias, the kernel has none"
    if q.dtype != jnp.bfloat16:
        return f"the operands are {q.dtype}, the kernel multiplies in bfloat16"
    if q.shape[3] % LANES:
        return f"head_dim is {q.shape[3]}, the kernel takes multiples of {LANES}"
    if min(q.shape[1], k.shape[1]) < LANES:
        return f"{q.shape[1]} queries, {k.shape[1]} keys: less than a block of {LANES}"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attention(q: Array, k: Array, v: Array, scale: float, interpret: bool) -> Array:
    batch, tokens, heads, head_dim = q.shape
    # in float32: log2(e) alone would be off by 2^-9 in bfloat16, for every score alike
    powered = q.astype(jnp.float32) * (scale * math.log2(math.e))
    q, k, v = _by_head(powered.astype(q.dtype)), _by_head(k), _by_head(v)
    run = partial(powers, interpret=interpret)
    y = lax.cond(is_small(q, k, v), run, partial(run, running=True), q, k, v)
    return y.reshape(batch, heads, tokens, head_dim).swapaxes(1, 2)


def attention(q: Array, k: Array, v: Array, *, scale: float, interpret: bool = False) -> Array:
    """q (B, tokens, heads, head_dim), k and v (B, context, kv_heads, head_dim) -> q's shape;
    softmax in float32. Differentiable. interpret: run the kernel without a TPU, slowly."""
    return _attention(q, k, v, scale, interpret)


def _forward(q: Array, k: Array, v: Array, scale: float, interpret: bool) -> tuple[Array, Any]:
    return jax.vjp(partial(stock, scale=scale, interpret=interpret), q, k, v)


def _backward(_scale: float, _interpret: bool, pull: Callable[[Array], Any], slope: Array) -> Any:
    return pull(slope)


_attention.defvjp(_forward, _backward)


def is_small(q: Array, k: Array, v: Array) -> Array:
    """Whether softmax needs no shift, bool[]; operands as in `powers`."""
    longest_q, longest_k = (
        jnp.square(x.astype(jnp.float32)).sum(axis=2).max(axis=1, keepdims=True) for x in (q, k)
    )
    group = len(q) // len(k)
    scores = jnp.sqrt(longest_q.reshape(-1, group) * longest_k).max()
    most = min(MAX_SCORE, MAX_SUM - math.log2(MAX_VALUE * k.shape[1]))
    return (scores <= most) & (jnp.abs(v).max() <= MAX_VALUE)


class Blocks(NamedTuple):
    """queries and keys of a block; rest: keys in front, fewer than blocks times PACKED."""

    queries: int
    keys: int
    rest: int


def blocks(tokens: int, context: int, tiles: int = TILES) -> Blocks:
    """Blocks of nearly one size, whole columns of the matrix unit and whole rows of memory."""
    number = -(-context // (TILE_KEYS * tiles))
    keys = context // number // PACKED * PACKED
    most = TILE_QUERIES * (2 if keys <= TILE_KEYS * tiles // 2 else 1)
    queries = -(-tokens // -(-tokens // most))
    return Blocks(-(-queries // COLUMNS) * COLUMNS, keys, context - number * keys)


def powers(
    q: Array, k: Array, v: Array, *, running: bool = False, interpret: bool = False
) -> Array:
    """Attention with weights 2^(q k): q (heads, tokens, head_dim), k and v (kv_heads, context,
    head_dim) -> q's shape. running: with a running maximum; else without any shift."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (heads, tokens, dim), (kv_heads, context, _) = q.shape, k.shape
    block, group = blocks(tokens, context, TILES // 2 if running else TILES), heads // kv_heads
    q = jnp.pad(q, ((0, 0), (0, max(0, block.queries - tokens)), (0, 0)))  # a block at the least
    number = context // block.keys
    of_queries = pl.BlockSpec((None, block.queries, dim), lambda h, i, j: (h, i, 0))
    of_keys = pl.BlockSpec((None, block.keys, dim), lambda h, i, j: (lax.div(h, group), j, 0))
    of_rest = pl.BlockSpec((None, block.rest, dim), lambda h, i, j: (lax.div(h, group), 0, 0))
    rest = [x[:, number * block.keys :] for x in (k, v)] if block.rest else []
    pairs = heads * tokens * context
    y: Any = pl.pallas_call(
        partial(_program, keys=block.keys, running=running),
        grid=(heads, -(-q.shape[1] // block.queries), number),
        in_specs=[of_queries, of_keys, of_keys, *[of_rest] * len(rest)],
        out_specs=of_queries,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[
            pltpu.VMEM((n, block.queries), jnp.float32) for n in (SUBLANES, dim + PACKED)
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * dim, transcendentals=pairs, bytes_accessed=2 * q.nbytes + 2 * k.nbytes
        ),
        interpret=interpret,
        name="attention_of_any_size" if running else "attention",
        # `cycles` counts blocks by these: the rest is part of each
        metadata={"block_q": str(block.queries), "block_kv": str(-(-context // number))},
    )(q, k, v, *rest)
    return y[:, :tokens]


class _Sums(NamedTuple):
    """Sums of a tile's queries, float32. most: the largest score so far, (SUBLANES, queries), all
    rows alike. values: weighed ones and, under them, the sum of the weights, (head_dim + PACKED,
    queries)."""

    most: Array
    values: Array


def _cut(length: int, size: int) -> list[slice]:
    return [slice(n, min(n + size, length)) for n in range(0, length, size)]


def _program(q, k, v, *others, keys: int, running: bool) -> None:
    """q and y (queries, head_dim), k and v (keys, head_dim), then those of the rest if there are
    any; scratch as `_Sums`."""
    from jax.experimental import pallas as pl

    *first, y, most, values = others
    refs, dim = _Sums(most, values), q.shape[1]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    multiply = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    queries, chunks = _cut(len(q), TILE_QUERIES), _cut(keys, TILE_KEYS)

    def scores(keys: Array, of: slice) -> Array:
        return multiply(keys, q[of, :], (((1,), (1,)), ((), ())))

    def load(of: slice) -> _Sums:
        return _Sums(*(ref[:, of] for ref in refs))

    def store(sums: _Sums, of: slice) -> None:
        for ref, x in zip(refs, sums, strict=True):
            ref[:, of] = x

    def add(sums: _Sums, found: Array, weighed: Array) -> _Sums:
        if running:
            most = jnp.maximum(sums.most, found.max(axis=0, keepdims=True))
            sums = _Sums(most, sums.values * jnp.exp2(sums.most - most)[:1])
            found = found - most[:1]
        weighed = jnp.concatenate([weighed.T, jnp.ones((PACKED, len(weighed)), v.dtype)])
        more = multiply(weighed, jnp.exp2(found).astype(v.dtype), (((1,), (0,)), ((), ())))
        return _Sums(sums.most, sums.values + more)

    @pl.when(pl.program_id(2) == 0)
    def _():
        most[...] = jnp.full(most.shape, HIDDEN)
        values[...] = jnp.zeros(values.shape)
        for of in queries if first else ():
            store(add(load(of), scores(first[0][...], of), first[1][...]), of)

    tiles = [(of, at) for of in queries for at in chunks]
    ahead = scores(k[chunks[0], :], queries[0])
    sums = load(queries[0])
    for (of, at), after in zip(tiles, [*tiles[1:], None], strict=True):
        found = ahead
        if after:
            ahead = scores(k[after[1], :], after[0])
        sums = add(sums, found, v[at, :])
        if at is chunks[-1]:
            store(sums, of)
            sums = load(after[0]) if after else sums

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        y[...] = (values[:dim] / values[dim : dim + 1]).T.astype(y.dtype)


def block(length: int, most: int) -> int:
    """The largest multiple of LANES, at most `most`, that divides a padded length."""
    lanes = length // LANES
    return LANES * max(n for n in range(1, most // LANES + 1) if lanes % n == 0)


def stock(q: Array, k: Array, v: Array, *, scale: float, interpret: bool = False) -> Array:
    """`attention` by jax's splash kernel, which has a gradient."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    batch, tokens, heads, head_dim = q.shape
    context = k.shape[1]
    missing, hidden = -tokens % LANES, -context % LANES
    q, k, v = _by_head(q * scale, missing), _by_head(k, hidden), _by_head(v, hidden)
    queries, keys = block(tokens + missing, MAX_QUERIES), block(context + hidden, MAX_KEYS)
    at_once = block(keys, MAX_KEYS_AT_ONCE)
    sizes = splash.BlockSizes(
        queries, keys, at_once,
        block_q_dkv=queries, block_kv_dkv=keys, block_kv_dkv_compute=at_once, block_q_dq=queries,
        block_kv_dq=keys,
    )  # fmt: skip
    # A sample's heads are the kernel's heads; every sample has the same number of query heads in a
    # group.
    whole = splash.FullMask((tokens + missing, context + hidden))
    mask = splash.MultiHeadMask([whole] * (batch * heads))
    how = {"block_sizes": sizes, "head_shards": 1, "q_seq_shards": 1}
    kernel = splash.make_splash_mha(mask, **how, interpret=interpret)
    segments = None
    if hidden:  # queries see only their segment's keys
        seen = jnp.arange(context + hidden) >= context
        segments = splash.SegmentIds(jnp.zeros(tokens + missing, jnp.int32), seen.astype(jnp.int32))
    y: Any = kernel(q, k, v, segments)  # typed as the array or, with residuals, a pair
    return y[:, :tokens].reshape(batch, heads, tokens, head_dim).swapaxes(1, 2)


def _by_head(x: Array, missing: int = 0) -> Array:
    """(B, tokens, heads, head_dim) -> (B heads, tokens, head_dim), zeros for missing tokens."""
    b, t, h, d = x.shape
    return jnp.pad(x.swapaxes(1, 2).reshape(b * h, t, d), ((0, 0), (0, missing), (0, 0)))
