"""One program per block of 4 x 4 x 8 queries of one head: an online softmax over the box of keys
that their windows reach, which is 2.7 times a window of 11^3. Scores stay in registers; a key is
asked for by the blocks around it, all of them but the first finding it in the cache.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltx2rt_kernels.triton_blocks import block, dtype_reason, jit

BLOCK = (4, 4, 8)  # queries along frames, rows and columns
KEYS = 64  # at once
MAX_HEAD_DIM = 64  # more would not leave room for scores and result in registers
LOG2_E = tl.constexpr(1.4426950408889634)


@jit
def starts(place, first, keys, WINDOW: tl.constexpr, SIZE: tl.constexpr):
    """Where the windows around `place` begin, moved inwards so that SIZE keys fit."""
    return tl.minimum(tl.maximum(first + place - WINDOW // 2, 0), keys - SIZE)


@jit
def within(place, start, WINDOW: tl.constexpr):
    """0 <= place - start < WINDOW, in one comparison."""
    return (place[None, :] - start[:, None]).to(tl.uint32, bitcast=True) < WINDOW


@jit
def neighbourhood_attention_kernel(
    q, k, v, out, scale, HEADS, T, R, C, KT, KR, KC, first_t, first_r, first_c,
    q_b, q_t, q_r, q_c, q_h, k_b, k_t, k_r, k_c, k_h, v_b, v_t, v_r, v_c, v_h,
    WT: tl.constexpr, WR: tl.constexpr, WC: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr, BOX_T: tl.constexpr, BOX_R: tl.constexpr, BOX_C: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    columns, rows, number = tl.cdiv(C, BC), tl.cdiv(R, BR), tl.program_id(0)
    t0 = number // (columns * rows) * BT
    r0 = number // columns % rows * BR
    c0 = number % columns * BC
    head = (tl.program_id(1) % HEADS).to(tl.int64)
    sample = (tl.program_id(1) // HEADS).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    i = tl.arange(0, BT * BR * BC)
    t = t0 + i // (BC * BR)
    r = r0 + i // BC % BR
    c = c0 + i % BC
    inside = ((t < T) & (r < R) & (c < C))[:, None] & (d < DIM)[None, :]
    # Queries beyond the border see the last one's keys, and are not stored.
    start_t = starts(tl.minimum(t, T - 1), first_t, KT, WT, WT)
    start_r = starts(tl.minimum(r, R - 1), first_r, KR, WR, WR)
    start_c = starts(tl.minimum(c, C - 1), first_c, KC, WC, WC)
    box_t = starts(t0, first_t, KT, WT, BOX_T)
    box_r = starts(r0, first_r, KR, WR, BOX_R)
    box_c = starts(c0, first_c, KC, WC, BOX_C)

    place = t.to(tl.int64) * q_t + r.to(tl.int64) * q_r + c * q_c
    queries = tl.load(q + sample * q_b + head * q_h + place[:, None] + d[None, :], inside, 0.0)
    k += sample * k_b + head * k_h
    v += sample * v_b + head * v_h
    top = tl.full([BT * BR * BC], -1e30, tl.float32)
    total = tl.zeros([BT * BR * BC], tl.float32)
    result = tl.zeros([BT * BR * BC, BLOCK_D], tl.float32)
    for begin in range(0, BOX_T * BOX_R * BOX_C, BLOCK_K):
        j = begin + tl.arange(0, BLOCK_K)
        there = j < BOX_T * BOX_R * BOX_C
        kt = box_t + j // (BOX_C * BOX_R)
        kr = box_r + j // BOX_C % BOX_R
        kc = box_c + j % BOX_C
        read = there[:, None] & (d < DIM)[None, :]
        from_k = kt.to(tl.int64) * k_t + kr.to(tl.int64) * k_r + kc * k_c
        from_v = kt.to(tl.int64) * v_t + kr.to(tl.int64) * v_r + kc * v_c
        keys = tl.load(k + from_k[:, None] + d[None, :], read, 0.0)
        values = tl.load(v + from_v[:, None] + d[None, :], read, 0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * (scale * LOG2_E)
        seen = within(kt, start_t, WT) & within(kr, start_r, WR) & within(kc, start_c, WC)
        scores = tl.where(seen & there[None, :], scores, -1e30)
        # A query that has seen no key yet counts all of them; the first that it sees makes their
        # weight 0.
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        found = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        result = result * shrink[:, None] + found
        top = higher
    result = result / total[:, None]
    token = ((sample * T + t) * R + r) * C + c
    tl.store(out + (token * HEADS + head)[:, None] * DIM + d[None, :], result, inside)


def why_not(q: Tensor, k: Tensor, v: Tensor, *, window, first, scale: float) -> str | None:
    if any(x.stride(5) != 1 for x in (q, k, v)):
        return "an operand's last axis is strided"
    if q.shape[5] > MAX_HEAD_DIM:
        return f"heads of {q.shape[5]}, the kernel takes at most {MAX_HEAD_DIM}"
    if q.shape[0] * q.shape[4] > 65535:
        return f"{q.shape[0] * q.shape[4]} heads of all samples, a grid holds 65535"
    return dtype_reason(q, k, v)


def neighbourhood_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window, first, scale: float
) -> Tensor:
    batch, *sizes, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    blocks = math.prod(triton.cdiv(n, b) for n, b in zip(sizes, BLOCK, strict=True))
    box = [min(b + w - 1, n) for b, w, n in zip(BLOCK, window, k.shape[1:4], strict=True)]
    neighbourhood_attention_kernel[(blocks, batch * heads)](
        q, k, v, out, scale, heads, *sizes, *k.shape[1:4], *first, *q.stride()[:5], *k.stride()[:5],
        *v.stride()[:5], WT=window[0], WR=window[1], WC=window[2], BT=BLOCK[0], BR=BLOCK[1],
        BC=BLOCK[2], BOX_T=box[0], BOX_R=box[1], BOX_C=box[2], DIM=dim, BLOCK_D=max(16, block(dim)),
        BLOCK_K=KEYS, num_warps=8,
    )  # fmt: skip
    return out
