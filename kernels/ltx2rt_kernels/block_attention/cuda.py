"""One program per 128 queries of one head: an online softmax over the blocks of keys that their
block sees, 64 keys at once. The table of blocks is read from memory, so that a recorded step may be
replayed with another one of its shape.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltx2rt_kernels.triton_blocks import block, dtype_reason, jit

QUERIES, KEYS = 128, 64
MAX_HEAD_DIM = 128  # more would not leave room for scores and result in registers


@jit
def block_attention_kernel(
    q, k, v, table, out, scale, TOKENS, HEADS, ENDS, KEPT, table_r,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(1) % HEADS).to(tl.int64)
    sample = (tl.program_id(1) // HEADS).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    t = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row = tl.program_id(0) * BLOCK_Q // SIZE - ENDS
    inside = (t < TOKENS)[:, None] & (d < DIM)[None, :]
    place = sample * q_b + head * q_h + t.to(tl.int64)[:, None] * q_t + d[None, :]
    queries = tl.load(q + place, inside, 0.0)
    k += sample * k_b + head * k_h
    v += sample * v_b + head * v_h
    top = tl.full([BLOCK_Q], -1e30, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    result = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    # The first blocks see all, the others those of their row.
    count = tl.where(row < 0, tl.cdiv(TOKENS, SIZE), KEPT)
    for step in range(0, count * PARTS):
        number = step // PARTS
        if row >= 0:
            number = tl.load(table + row * table_r + number)
        j = number * SIZE + (step - step // PARTS * PARTS) * BLOCK_K + tl.arange(0, BLOCK_K)
        there = j < TOKENS
        read = there[:, None] & (d < DIM)[None, :]
        keys = tl.load(k + j.to(tl.int64)[:, None] * k_t + d[None, :], read, 0.0)
        values = tl.load(v + j.to(tl.int64)[:, None] * v_t + d[None, :], read, 0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * (
            scale * 1.4426950408889634
        )  # log2(e)
        scores = tl.where(there[None, :], scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.where(there[None, :], tl.exp2(scores - higher[:, None]), 0.0)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        result = result * shrink[:, None] + tl.dot(
            weights.to(values.dtype), values, input_precision="ieee"
        )
        top = higher
    to = ((sample * TOKENS + t) * HEADS + head)[:, None] * DIM + d[None, :]
    tl.store(out + to, result / total[:, None], inside)


def why_not(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, *, scale: float, size: int, ends: int
) -> str | None:
    if any(x.stride(3) != 1 for x in (q, k, v, table[None, None])):
        return "an operand's last axis is strided"
    if q.shape[3] > MAX_HEAD_DIM:
        return f"heads of {q.shape[3]}, the kernel takes at most {MAX_HEAD_DIM}"
    if size < 16:
        return f"blocks of {size} tokens, the kernel multiplies at least 16"
    if q.shape[0] * q.shape[2] > 65535:
        return f"{q.shape[0] * q.shape[2]} heads of all samples, a grid holds 65535"
    return dtype_reason(q, k, v)


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, *, scale: float, size: int, ends: int
) -> Tensor:
    batch, tokens, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    queries, keys = min(QUERIES, size), min(KEYS, size)
    block_attention_kernel[(triton.cdiv(tokens, queries), batch * heads)](
        q, k, v, table, out, scale, tokens, heads, ends, table.shape[1], table.stride(0),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        SIZE=size, DIM=dim, BLOCK_D=max(16, block(dim)), BLOCK_Q=queries, BLOCK_K=keys,
        PARTS=size // keys, num_warps=8,
    )  # fmt: skip
    return out
