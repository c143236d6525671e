"""Attention by jax's splash kernel (Pallas): the scores stay in the chip's own memory.

Decides which operands the kernel takes, how they are padded to whole blocks, and the blocks.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

LANES = 128  # blocks are multiples of it, so a length is padded by at most 127
# 1024 x 1024 float32 scores and their bfloat16 exponentials, and two copies of 3072 keys and
# values, fit into the 16 MiB that a kernel has by default; of the blocks that do, a v6e's code has
# the fewest bundles for these.
MAX_QUERIES, MAX_KEYS, MAX_KEYS_AT_ONCE = 1024, 3072, 1024


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


def block(length: int, most: int) -> int:
    """The largest multiple of LANES, at most `most`, that divides a padded length."""
    lanes = length // LANES
    return LANES * max(n for n in range(1, most // LANES + 1) if lanes % n == 0)


def attention(q: Array, k: Array, v: Array, *, scale: float, interpret: bool = False) -> Array:
    """q (B, tokens, heads, head_dim), k and v (B, context, kv_heads, head_dim) -> q's shape;
    softmax in float32. Differentiable. interpret: run the kernel without a TPU, slowly."""
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


def _by_head(x: Array, missing: int) -> Array:
    """(B, tokens, heads, head_dim) -> (B heads, tokens, head_dim), zeros for missing tokens."""
    b, t, h, d = x.shape
    return jnp.pad(x.swapaxes(1, 2).reshape(b * h, t, d), ((0, 0), (0, missing), (0, 0)))
