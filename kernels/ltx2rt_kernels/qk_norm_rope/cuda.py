"""One program per token, which holds all its heads: their two halves, cos and sin are read once, the result written
once. Under tensor parallelism two kernels: the sum of squares of this device's heads, and, after the all-reduce, the
rest, given the sum.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ltx2rt_kernels.launch import MAX_BLOCK, block, dtype_reason, jit, num_warps, spread


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
def qk_norm_rope_kernel(
    x, given, weight, cos, sin, out, B, T, count, eps, x_b, x_t, x_h, given_b, given_t, table_b, table_t, table_h,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    # The samples of one token are neighbours, so that they find its tables in the cache.
    program = tl.program_id(0).to(tl.int64)
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


def why_not(x: Tensor, *operands: Tensor, dims=None, table_view=None, **plan) -> str | None:
    if x.ndim != 4:
        return f"x has {x.ndim} axes, the kernel takes (B, tokens, heads, head_dim)"
    if dims is not None and dims != (2, 3):
        return f"the sum is over axes {dims}, the kernel takes (2, 3)"
    if block(x.shape[2]) * block(x.shape[3]) > MAX_BLOCK:
        return f"{x.shape[2]} heads of {x.shape[3]}, the kernel takes at most {MAX_BLOCK} numbers a token"
    if x.stride(3) != 1:
        return "x's last axis is strided"
    if table_view is not None:
        *_, weight, cos, sin = operands
        cos, sin = cos.reshape(table_view), sin.reshape(table_view)
        if cos.stride() != sin.stride() or cos.stride(3) != 1 or not weight.is_contiguous():
            return "cos, sin or the weight are strided"
    return dtype_reason(x)


def _blocks(heads: int, dim: int) -> dict[str, int]:
    block_h, block_d = block(heads), block(dim)
    return {"BLOCK_H": block_h, "BLOCK_D": block_d, "num_warps": num_warps(block_h * block_d)}


def sum_squares(x: Tensor, *, dims) -> Tensor:
    batch, tokens, heads, dim = x.shape
    out = torch.empty(batch, tokens, dtype=torch.float32, device=x.device)
    sum_squares_kernel[(batch * tokens,)](x, out, tokens, *x.stride()[:3], HEADS=heads, DIM=dim, **_blocks(heads, dim))
    return out


def _launch(x: Tensor, given: Tensor | None, weight: Tensor, cos: Tensor, sin: Tensor, view, count: int, eps: float):
    batch, tokens, heads, dim = x.shape
    cos, sin = (spread(table, view, (*x.shape[:3], dim // 2)) for table in (cos, sin))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks = _blocks(heads, dim // 2) | {"num_warps": _blocks(heads, dim)["num_warps"]}
    qk_norm_rope_kernel[(batch * tokens,)](
        x, given, weight, cos, sin, out, batch, tokens, float(count), eps, *x.stride()[:3],
        *((0, 0) if given is None else given.stride()), *cos.stride()[:3],
        HEADS=heads, HALF=dim // 2, GIVEN=given is not None, **blocks,
    )  # fmt: skip
    return out


def qk_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, weight_view, table_view, eps: float) -> Tensor:
    return _launch(x, None, weight, cos, sin, table_view, x.shape[2] * x.shape[3], eps)


def qk_scale_rope(
    x: Tensor, sum_squares: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, weight_view, table_view, count, eps
) -> Tensor:
    return _launch(x, sum_squares, weight, cos, sin, table_view, count, eps)
