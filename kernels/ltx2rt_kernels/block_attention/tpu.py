"""Attention of blocks of tokens to some of the blocks by jax's splash kernel (Pallas), whose mask is
the table: no block of it is partly seen, so no mask is held.

Decides which operands the kernel takes. What it computes is the op `block_attention` of the graph.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from ltx2rt_kernels.attention import tpu as dense

LANES = dense.LANES
KEYS_AT_ONCE = 512


def why_not(
    q: Array, k: Array, v: Array, table: Array, *, scale: float, size: int, ends: int
) -> str | None:
    if size % LANES:
        return f"blocks of {size} tokens, the kernel takes multiples of {LANES}"
    return dense.why_not(q, k, v, scale=scale)


def scalars(table: Array, blocks: int) -> tuple[Array, Array]:
    """The blocks that each row reads, and that it sees all of each, in the smallest types: they lie
    in the scalar memory of the core. Both (1, rows, kept)."""
    smallest = jnp.int8 if blocks <= 127 else jnp.int16
    return table[None].astype(smallest), jnp.full((1, *table.shape), 2, jnp.int8)


def block_attention(
    q: Array,
    k: Array,
    v: Array,
    table: Array,
    *,
    scale: float,
    size: int,
    ends: int,
    interpret: bool = False,
) -> Array:
    """q, k, v (B, tokens, heads, head_dim), table int32 (rows, kept) -> q's shape; softmax in
    float32. interpret: run the kernel without a TPU, slowly."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as inner
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

    batch, tokens, heads, head_dim = q.shape
    whole, missing = ends * size, -tokens % size
    queries = dense._by_head(q[:, whole:] * scale, missing)
    keys, values = dense._by_head(k, missing), dense._by_head(v, missing)
    seen, block_mask = scalars(table, keys.shape[1] // size)
    segments = None
    if missing:  # queries see the keys of their own segment
        there = jnp.arange(tokens + missing) >= tokens
        segments = splash.SegmentIds(
            jnp.zeros(queries.shape[1], jnp.int32), there.astype(jnp.int32)
        )
    kernel: Any = inner.SplashAttentionKernel(
        info.MaskInfo(seen, None, block_mask, None, None),
        None,
        None,
        block_sizes=splash.BlockSizes(size, size, min(size, KEYS_AT_ONCE)),
        is_mqa=False,
        save_residuals=False,
        mask_value=inner.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=None,
        mask_function=None,
        interpret=interpret,
    )
    y = kernel(queries, keys, values, segments)[:, : tokens - whole]
    y = y.reshape(batch, heads, tokens - whole, head_dim).swapaxes(1, 2)
    if not ends:
        return y
    first = dense.attention(q[:, :whole], k, v, scale=scale, interpret=interpret)
    return jnp.concatenate([first, y], axis=1)
