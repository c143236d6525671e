"""One program per token, which holds all its heads: their two halves, cos and sin are read once, the result written
once, the minimum but for the weight, which all tokens but the first read from the cache. q and k of one attention are
one launch, whatever their lengths. Under tensor parallelism two kernels: the sum of squares of this device's heads,
and, after the all-reduce, the rest, given the sum.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ltx2rt_kernels.triton_blocks import MAX_BLOCK, block, dtype_reason, jit, num_warps, spread


@jit
def sum_squares_kernel(
    x, out, T, x_b, x_t, x_h, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    v = tl.load(x + row // T * x_b + row % T * x_t + h * x_h + d, (h < HEADS) & (d < DIM), 0.0).to(tl.float32)
    tl.store(out + row, tl.sum(tl.sum(v * v, axis=1), axis=0))


@jit
def rotate(
    program, x, given, weight, cos, sin, out, T, x_b, x_t, x_h, given_b, given_t, table_b, table_t, table_h,
    B, count, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    # The samples of one token are neighbours, so that they find its tables in the cache.
    b = program % B
    t = program // B
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (h < HEADS) & (d < HALF)
    first = x + b * x_b + t * x_t + h * x_h + d
    lower = tl.load(first, inside, 0.0).to(tl.float32)
    upper = tl.load(first + HALF, inside, 0.0).to(tl.float32)
    if GIVEN:
        total = tl.load(given + b * given_b + t * given_t)
    else:
        total = tl.sum(tl.sum(lower * lower + upper * upper, axis=1), axis=0)
    scale = tl.rsqrt(total / count + eps)
    place = h * (2 * HALF) + d
    lower = lower * scale * tl.load(weight + place, inside, 0.0).to(tl.float32)
    upper = upper * scale * tl.load(weight + place + HALF, inside, 0.0).to(tl.float32)
    table = b * table_b + t * table_t + h * table_h + d
    c = tl.load(cos + table, inside, 0.0)
    s = tl.load(sin + table, inside, 0.0)
    result = out + (b * T + t) * (2 * HEADS * HALF) + place
    tl.store(result, lower * c - upper * s, inside)
    tl.store(result + HALF, upper * c + lower * s, inside)


@jit
def qk_norm_rope_kernel(
    q, q_given, q_weight, q_cos, q_sin, q_out, q_T, q_b, q_t, q_h,
    q_given_b, q_given_t, q_table_b, q_table_t, q_table_h,
    k, k_given, k_weight, k_cos, k_sin, k_out, k_T, k_b, k_t, k_h,
    k_given_b, k_given_t, k_table_b, k_table_t, k_table_h, B, count, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, GIVEN: tl.constexpr,
    TWO: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    if TWO:
        after = program - q_T * B
        if after >= 0:
            rotate(
                after, k, k_given, k_weight, k_cos, k_sin, k_out, k_T, k_b, k_t, k_h,
                k_given_b, k_given_t, k_table_b, k_table_t, k_table_h, B, count, eps,
                HEADS, HALF, BLOCK_H, BLOCK_D, GIVEN,
            )  # fmt: skip
            return
    rotate(
        program, q, q_given, q_weight, q_cos, q_sin, q_out, q_T, q_b, q_t, q_h,
        q_given_b, q_given_t, q_table_b, q_table_t, q_table_h, B, count, eps, HEADS, HALF, BLOCK_H, BLOCK_D, GIVEN,
    )  # fmt: skip


def why_not(*operands: Tensor, dims=None, table_views=((),), **plan) -> str | None:
    if dims is not None and dims != (2, 3):
        return f"the sum is over axes {dims}, the kernel takes (2, 3)"
    if len(table_views) > 2:
        return f"{len(table_views)} tensors, the kernel takes q, or q and k"
    groups = list(zip(*[iter(operands)] * (len(operands) // len(table_views)), strict=True))
    for (x, *others), view in zip(groups, table_views, strict=True):
        if x.ndim != 4:
            return f"x has {x.ndim} axes, the kernel takes (B, tokens, heads, head_dim)"
        if block(x.shape[2]) * block(x.shape[3]) > MAX_BLOCK:
            return f"{x.shape[2]} heads of {x.shape[3]}, the kernel takes at most {MAX_BLOCK} numbers a token"
        if (x.shape[0], *x.shape[2:]) != (groups[0][0].shape[0], *groups[0][0].shape[2:]):
            return "q and k differ in more than tokens"
        if x.stride(3) != 1:
            return "x's last axis is strided"
        if others:
            *_, weight, cos, sin = others
            cos, sin = cos.reshape(view), sin.reshape(view)
            if cos.stride() != sin.stride() or cos.stride(3) != 1 or not weight.is_contiguous():
                return "cos, sin or the weight are strided"
        if (reason := dtype_reason(x)) is not None:
            return reason
    return None


def _blocks(heads: int, dim: int) -> dict[str, int]:
    block_h, block_d = block(heads), block(dim)
    return {"BLOCK_H": block_h, "BLOCK_D": block_d, "num_warps": num_warps(block_h * block_d)}


def sum_squares(x: Tensor, *, dims) -> Tensor:
    batch, tokens, heads, dim = x.shape
    out = torch.empty(batch, tokens, dtype=torch.float32, device=x.device)
    sum_squares_kernel[(batch * tokens,)](x, out, tokens, *x.stride()[:3], HEADS=heads, DIM=dim, **_blocks(heads, dim))
    return out


def _launch(groups: list[tuple[Any, ...]], views, count: int, eps: float):
    """groups: x, its sum of squares or None, weight, cos and sin; of one tensor or of two."""
    batch, _, heads, dim = groups[0][0].shape
    arguments, results = [], []
    for (x, given, weight, cos, sin), view in zip(groups, views, strict=True):
        tokens = x.shape[1]
        cos, sin = (spread(table, view, (*x.shape[:3], dim // 2)) for table in (cos, sin))
        results.append(torch.empty(x.shape, dtype=x.dtype, device=x.device))
        arguments += [x, given, weight, cos, sin, results[-1], tokens, *x.stride()[:3]]
        arguments += [*((0, 0) if given is None else given.stride()), *cos.stride()[:3]]
    two = len(groups) == 2
    arguments += [] if two else [None] * len(arguments)
    blocks = _blocks(heads, dim // 2) | {"num_warps": _blocks(heads, dim)["num_warps"]}
    qk_norm_rope_kernel[(batch * sum(x.shape[1] for x in results),)](
        *arguments, batch, float(count), eps,
        HEADS=heads, HALF=dim // 2, GIVEN=groups[0][1] is not None, TWO=two, **blocks,
    )  # fmt: skip
    return tuple(results) if two else results[0]


def qk_norm_rope(*operands: Tensor, weight_views, table_views, eps: float):
    groups = [(x, None, *others) for x, *others in zip(*[iter(operands)] * 4, strict=True)]
    return _launch(groups, table_views, operands[0].shape[2] * operands[0].shape[3], eps)


def qk_scale_rope(*operands: Tensor, weight_views, table_views, count: int, eps: float):
    return _launch(list(zip(*[iter(operands)] * 5, strict=True)), table_views, count, eps)
