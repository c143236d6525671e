"""One program per token, which holds all its heads: their two halves, cos and sin are read once,
the result written once, the minimum but for the weight, which comes from the cache. q and k of one
attention are one launch; where they have their tables in common, a program turns both. Without
tables it is only the norm, for the text's attention; where several samples read one text, keys are
written and values copied for each. Under tensor parallelism two kernels: the sum of squares of this
device's heads, and, after the all-reduce, the rest, given the sum.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ltx2rt.fused.pattern import grouped
from ltx2rt_kernels.triton_blocks import MAX_BLOCK, block, dtype_reason, jit, num_warps
from ltx2rt_kernels.triton_blocks import spread as spread_row


@jit
def sum_squares_kernel(
    x, out, T, x_b, x_t, x_h,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    v = tl.load(x + row // T * x_b + row % T * x_t + h * x_h + d, (h < HEADS) & (d < DIM), 0.0).to(
        tl.float32
    )
    tl.store(out + row, tl.sum(tl.sum(v * v, axis=1), axis=0))


@jit
def read_tables(cos, sin, b, t, table_b, table_t, table_h, HEADS: tl.constexpr, HALF: tl.constexpr,
                BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (h < HEADS) & (d < HALF)
    table = b * table_b + t * table_t + h * table_h + d
    return tl.load(cos + table, inside, 0.0), tl.load(sin + table, inside, 0.0)


@jit
def turn(
    b, source, t, x, given, weight, out, T, x_b, x_t, x_h, given_b, given_t, c, s, count, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    GIVEN: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (h < HEADS) & (d < HALF)
    first = x + source * x_b + t * x_t + h * x_h + d
    lower = tl.load(first, inside, 0.0).to(tl.float32)
    upper = tl.load(first + HALF, inside, 0.0).to(tl.float32)
    if GIVEN:
        total = tl.load(given + source * given_b + t * given_t)
    else:
        total = tl.sum(tl.sum(lower * lower + upper * upper, axis=1), axis=0)
    scale = tl.rsqrt(total / count + eps)
    place = h * (2 * HALF) + d
    lower = lower * scale * tl.load(weight + place, inside, 0.0).to(tl.float32)
    upper = upper * scale * tl.load(weight + place + HALF, inside, 0.0).to(tl.float32)
    result = out + (b * T + t) * (2 * HEADS * HALF) + place
    if ROTATE:
        tl.store(result, lower * c - upper * s, inside)
        tl.store(result + HALF, upper * c + lower * s, inside)
    else:
        tl.store(result, lower, inside)
        tl.store(result + HALF, upper, inside)


@jit
def source_of(b, SPREAD: tl.constexpr):
    """The sample that b reads: its 4 bits of SPREAD, or b."""
    source = b
    if SPREAD > 0:
        source = (SPREAD >> (4 * b)) & 15
    return source


@jit
def copy(
    program, x, out, T, B, x_b, x_t, x_h,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    b = program % B
    t = program // B
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (h < HEADS) & (d < HALF)
    first = x + source_of(b, SPREAD) * x_b + t * x_t + h * x_h + d
    result = out + (b * T + t) * (2 * HEADS * HALF) + h * (2 * HALF) + d
    tl.store(result, tl.load(first, inside, 0.0), inside)
    tl.store(result + HALF, tl.load(first + HALF, inside, 0.0), inside)


@jit
def one(
    program, x, given, weight, cos, sin, out, T, B,
    x_b, x_t, x_h, given_b, given_t, table_b, table_t, table_h, count, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    GIVEN: tl.constexpr, ROTATE: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    # The samples of one token are neighbours, so that they find its tables in the cache.
    b = program % B
    t = program // B
    c = 0.0
    s = 0.0
    if ROTATE:
        c, s = read_tables(cos, sin, b, t, table_b, table_t, table_h, HEADS, HALF, BLOCK_H, BLOCK_D)
    turn(
        b, source_of(b, SPREAD), t, x, given, weight, out, T,
        x_b, x_t, x_h, given_b, given_t, c, s, count, eps,
        HEADS, HALF, BLOCK_H, BLOCK_D, GIVEN, ROTATE,
    )  # fmt: skip


@jit
def qk_norm_rope_kernel(
    q, q_given, q_weight, q_cos, q_sin, q_out, q_T, q_B, q_b, q_t, q_h,
    q_given_b, q_given_t, q_table_b, q_table_t, q_table_h,
    k, k_given, k_weight, k_cos, k_sin, k_out, k_T, k_B, k_b, k_t, k_h,
    k_given_b, k_given_t, k_table_b, k_table_t, k_table_h, v, v_out, v_b, v_t, v_h, count, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    GIVEN: tl.constexpr, ROTATE: tl.constexpr,
    TWO: tl.constexpr, SHARED: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    if SHARED:
        b = program % q_B
        t = program // q_B
        c, s = read_tables(
            q_cos, q_sin, b, t, q_table_b, q_table_t, q_table_h, HEADS, HALF, BLOCK_H, BLOCK_D
        )
        turn(
            b, b, t, q, q_given, q_weight, q_out, q_T, q_b, q_t, q_h, q_given_b, q_given_t, c, s,
            count, eps,
            HEADS, HALF, BLOCK_H, BLOCK_D, GIVEN, ROTATE,
        )  # fmt: skip
        turn(
            b, b, t, k, k_given, k_weight, k_out, k_T, k_b, k_t, k_h, k_given_b, k_given_t, c, s,
            count, eps,
            HEADS, HALF, BLOCK_H, BLOCK_D, GIVEN, ROTATE,
        )  # fmt: skip
        return
    if TWO:
        after = program - q_T * q_B
        if SPREAD > 0:  # noqa: SIM102 - compiled or not, then run or not
            if after >= k_T * k_B:
                copy(
                    after - k_T * k_B, v, v_out, k_T, k_B, v_b, v_t, v_h,
                    HEADS, HALF, BLOCK_H, BLOCK_D, SPREAD,
                )  # fmt: skip
                return
        if after >= 0:
            one(
                after, k, k_given, k_weight, k_cos, k_sin, k_out, k_T, k_B, k_b, k_t, k_h,
                k_given_b, k_given_t, k_table_b, k_table_t, k_table_h, count, eps,
                HEADS, HALF, BLOCK_H, BLOCK_D, GIVEN, ROTATE, SPREAD,
            )  # fmt: skip
            return
    one(
        program, q, q_given, q_weight, q_cos, q_sin, q_out, q_T, q_B, q_b, q_t, q_h,
        q_given_b, q_given_t, q_table_b, q_table_t, q_table_h, count, eps,
        HEADS, HALF, BLOCK_H, BLOCK_D, GIVEN, ROTATE, 0,
    )  # fmt: skip


def why_not(
    *operands: Tensor, dims=None, weight_views=((),), table_views=None, spread=(), **plan
) -> str | None:
    operands, v = (operands[:-1], operands[-1]) if spread else (operands, operands[0])
    if v.stride(-1) != 1:
        return "v's last axis is strided"
    if dims is not None and dims != (2, 3):
        return f"the sum is over axes {dims}, the kernel takes (2, 3)"
    if len(weight_views) > 2:
        return f"{len(weight_views)} tensors, the kernel takes q, or q and k"
    groups = grouped(operands, len(operands) // len(weight_views))
    for i, (x, *others) in enumerate(groups):
        if x.ndim != 4:
            return f"x has {x.ndim} axes, the kernel takes (B, tokens, heads, head_dim)"
        if block(x.shape[2]) * block(x.shape[3]) > MAX_BLOCK:
            return f"{x.shape[2]} heads of {x.shape[3]}, the kernel takes at most {MAX_BLOCK} numbers a token"
        if x.shape[2:] != groups[0][0].shape[2:]:
            return "q and k differ in their heads"
        if x.stride(3) != 1:
            return "x's last axis is strided"
        if table_views:
            *others, cos, sin = others
            cos, sin = cos.reshape(table_views[i]), sin.reshape(table_views[i])
            if cos.stride() != sin.stride() or cos.stride(3) != 1:
                return "cos or sin are strided"
        if others and not others[-1].is_contiguous():
            return "the weight is strided"
        if dims is None and x.shape[3] % 2:
            return f"heads of {x.shape[3]}, the kernel takes them in halves"
        if (reason := dtype_reason(x)) is not None:
            return reason
    return None


def _blocks(heads: int, dim: int) -> dict[str, int]:
    block_h, block_d = block(heads), block(dim)
    return {"BLOCK_H": block_h, "BLOCK_D": block_d, "num_warps": num_warps(block_h * block_d)}


def sum_squares(x: Tensor, *, dims) -> Tensor:
    batch, tokens, heads, dim = x.shape
    out = torch.empty(batch, tokens, dtype=torch.float32, device=x.device)
    sum_squares_kernel[(batch * tokens,)](
        x, out, tokens, *x.stride()[:3], HEADS=heads, DIM=dim, **_blocks(heads, dim)
    )
    return out


def _launch(
    groups: list[tuple[Any, ...]], views, count: int, eps: float, spread=(), v: Tensor | None = None
):
    """groups: x, its sum of squares or None, weight, cos and sin or None; of one tensor or two."""
    shape = groups[0][0].shape
    heads, dim = shape[2:]
    arguments, results = [], []
    for (x, given, weight, cos, sin), view in zip(groups, views, strict=True):
        if cos is not None:
            cos, sin = (spread_row(table, view, (*x.shape[:3], dim // 2)) for table in (cos, sin))
        batch = len(spread) if spread and results else x.shape[0]
        results.append(torch.empty((batch, *x.shape[1:]), dtype=x.dtype, device=x.device))
        arguments += [x, given, weight, cos, sin, results[-1], x.shape[1], batch, *x.stride()[:3]]
        arguments += [
            *((0, 0) if given is None else given.stride()),
            *((0, 0, 0) if cos is None else cos.stride()[:3]),
        ]
    two, rotate = len(groups) == 2, groups[0][3] is not None
    # Two tensors of the same tokens with the same tables: one program turns both.
    same = [a is b for a, b in zip(groups[0][3:], groups[-1][3:], strict=True)]
    shared = two and rotate and all(same) and groups[1][0].shape == shape
    arguments += [] if two else [None] * len(arguments)
    if v is not None:
        results.append(torch.empty(results[1].shape, dtype=v.dtype, device=v.device))
    arguments += [None, None, 0, 0, 0] if v is None else [v, results[2], *v.stride()[:3]]
    programs = [x.shape[0] * x.shape[1] for x in results]
    blocks = _blocks(heads, dim // 2) | {"num_warps": _blocks(heads, dim)["num_warps"]}
    qk_norm_rope_kernel[(programs[0] if shared else sum(programs),)](
        *arguments, float(count), eps,
        HEADS=heads, HALF=dim // 2, GIVEN=groups[0][1] is not None, ROTATE=rotate, TWO=two,
        SHARED=shared,
        SPREAD=sum(source << 4 * b for b, source in enumerate(spread)), **blocks,
    )  # fmt: skip
    return tuple(results) if two else results[0]


def qk_norm_rope(*operands: Tensor, weight_views, table_views, eps: float):
    groups = [(x, None, *others) for x, *others in grouped(operands, 4)]
    return _launch(groups, table_views, operands[0][0, 0].numel(), eps)


def qk_scale_rope(*operands: Tensor, weight_views, table_views, count: int, eps: float):
    return _launch(grouped(operands, 5), table_views, count, eps)


def qk_norm(*operands: Tensor, weight_views, eps: float, spread=()):
    operands, v = (operands[:-1], operands[-1]) if spread else (operands, None)
    groups = [(x, None, weight, None, None) for x, weight in grouped(operands, 2)]
    return _launch(groups, weight_views, operands[0][0, 0].numel(), eps, spread, v)


def qk_scale(*operands: Tensor, weight_views, count: int, eps: float, spread=()):
    operands, v = (operands[:-1], operands[-1]) if spread else (operands, None)
    groups = [(*group, None, None) for group in grouped(operands, 3)]
    return _launch(groups, weight_views, count, eps, spread, v)
