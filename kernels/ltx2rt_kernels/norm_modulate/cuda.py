"""One program per token: the row is read once, held in float32, and written once per result.

A scale may come without a shift. A result can also, or only, be written as e4m3 numbers and the
token's scale. With RESIDUAL the kernel adds y * gate first, or (y + bias) * gate, and writes the
sum; the norm then sees the unrounded sum. Without NORM it only modulates. With an index, rows are by
level. Rows that tokens share come from the cache: memory delivers x (and y), and the results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ltx2rt.graph.encodings import E4M3_STEP, E4M3_TINY
from ltx2rt_kernels.quantise_rows.cuda import empty_rows, store_rows
from ltx2rt_kernels.triton_blocks import MAX_BLOCK, block, dtype_reason, jit, num_warps, spread


@jit
def gated(y, bias, gate, D: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr):
    d = tl.arange(0, BLOCK)
    inside = d < D
    delta = tl.load(y + d, inside, 0.0).to(tl.float32)
    if BIASED:
        delta += tl.load(bias + d, inside, 0.0).to(tl.float32)
    return delta * tl.load(gate + d, inside, 0.0).to(tl.float32)


@jit
def stored(
    z, x, out, values, scales, row, D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    TINY: tl.constexpr,
):  # fmt: skip
    """Write a result, and the rows that `quantise_rows` makes of it as x's dtype holds it."""
    d = tl.arange(0, BLOCK)
    if out is not None:
        tl.store(out + row * D + d, z, d < D)
    if values is not None:
        z = z.to(x.dtype.element_ty).to(tl.float32)
        store_rows(z, values, scales, row, D, BLOCK, STEP, TINY)


@jit
def rows_kernel(
    x, y, bias, gate, scale_0, shift_0, scale_1, shift_1, index, total,
    out_0, values_0, scales_0, out_1, values_1, scales_1, T, y_B, eps,
    x_b, x_t, y_b, y_t, gate_b, gate_t,
    scale_0_b, scale_0_t, shift_0_b, shift_0_t, scale_1_b, scale_1_t, shift_1_b, shift_1_t,
    index_b, index_t,
    D: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, RESULTS: tl.constexpr,
    ROWS: tl.constexpr,
    BY_LEVEL: tl.constexpr, BIASED: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr,
    SHIFTED: tl.constexpr, STEP: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = row // T
    t = row % T
    r = t
    if BY_LEVEL:
        r = tl.load(index + b * index_b + t * index_t).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    v = tl.load(x + b * x_b + t * x_t + d, inside, 0.0).to(tl.float32)
    if RESIDUAL:
        y += b * y_b + t * y_t
        gate += b * gate_b + r * gate_t
        if PADDED:
            if b < y_B:
                v += gated(y, bias, gate, D, BLOCK, BIASED)
        else:
            v += gated(y, bias, gate, D, BLOCK, BIASED)
        tl.store(total + row * D + d, v, inside)
    if RESULTS > 0:
        n = v
        if NORM:
            n = v * tl.rsqrt(tl.sum(v * v, axis=0) / D + eps)
        z = n
        if ROWS:
            scale = tl.load(scale_0 + b * scale_0_b + r * scale_0_t + d, inside, 0.0).to(tl.float32)
            z = n * (1.0 + scale)
            if SHIFTED:
                shift = tl.load(shift_0 + b * shift_0_b + r * shift_0_t + d, inside, 0.0)
                z += shift.to(tl.float32)
        stored(z, x, out_0, values_0, scales_0, row, D, BLOCK, STEP, TINY)
        if RESULTS > 1:
            scale = tl.load(scale_1 + b * scale_1_b + r * scale_1_t + d, inside, 0.0).to(tl.float32)
            shift = tl.load(shift_1 + b * shift_1_b + r * shift_1_t + d, inside, 0.0)
            z = n * (1.0 + scale) + shift.to(tl.float32)
            stored(z, x, out_1, values_1, scales_1, row, D, BLOCK, STEP, TINY)


def why_not(x: Tensor, *rows: Tensor, views=(), index_view=None, eps: float = 0.0) -> str | None:
    rows = rows[:-1] if index_view else rows
    shared = bool(views) and not index_view and all(math.prod(view[1:-1]) == 1 for view in views)
    if x.ndim != 3 and not (x.ndim == 4 and len(rows) == 1) and not (x.ndim > 4 and shared):
        return f"x has {x.ndim} axes, the kernel takes (B, tokens, D)"
    if x.ndim > 4 and not x.is_contiguous():
        return "the axes of x's tokens do not lie as one"
    if len(rows) > 4:
        return f"{len(rows) // 2} pairs of rows, the kernel takes at most 2"
    if x.shape[-1] > MAX_BLOCK:
        return f"rows of {x.shape[-1]} numbers, the kernel takes at most {MAX_BLOCK}"
    if any(row.stride(-1) != 1 for row in (x, *rows)):
        return "an operand's last axis is strided"
    return dtype_reason(x, *rows)


def rows_launch(
    x: Tensor, y: Tensor | None, rows: tuple[Tensor, ...], views, index_view, results: int,
    eps: float,
    biased: bool = False, norm: bool = True, quantised: Sequence[int] = (),
    unread: Sequence[int] = (),
) -> tuple[Any, ...]:  # fmt: skip
    """[x + y * the first row if there is a y] + results, normalised and modulated by the other
    rows. biased: a bias of y's comes first. x may have several axes for tokens, if all of a
    sample's read the same rows. unread: numbers of the outputs that are None; behind all outputs
    come the e4m3 numbers (shaped like x) and float32 scales (B, tokens, 1) of the `quantised`."""
    shape = x.shape
    if x.ndim > 4:
        x, views = x.flatten(1, -2), [(view[0], 1, view[-1]) for view in views]
    x = x.flatten(0, -3)
    batch, tokens, width = x.shape
    index = rows[-1].reshape(index_view).expand(batch, tokens) if index_view else None
    count = max([view[1] for view in views], default=1) if index_view else tokens
    viewed = list(zip(rows[: len(views)], views, strict=True))
    bias = viewed.pop(0)[0].reshape(width) if biased else None
    shaped = [spread(row, view, (batch, count, width)) for row, view in viewed]
    gate, pairs = (shaped[0], shaped[1:]) if y is not None else (None, shaped)
    count = results + (y is not None)
    like = {"dtype": x.dtype, "device": x.device}
    outputs = [None if i in unread else torch.empty(shape, **like) for i in range(count)]
    rows_of = {i: empty_rows(shape, x.device) for i in quantised}
    total, first = (None, 0) if y is None else (outputs[0], 1)
    outs = [out for i in range(first, count) for out in (outputs[i], *rows_of.get(i, (None, None)))]
    read = [gate, *pairs, *[None] * (4 - len(pairs)), index]
    strides = [n for v in (x, y, *read) for n in ((0, 0) if v is None else v.stride()[:2])]
    rows_kernel[(batch * tokens,)](
        x, y, bias, *read, total, *outs, *[None] * (6 - len(outs)), tokens,
        0 if y is None else len(y), eps,
        *strides,
        D=width, BLOCK=block(width), RESIDUAL=y is not None, RESULTS=results, ROWS=len(pairs) > 0,
        BY_LEVEL=index is not None, BIASED=biased, PADDED=y is not None and len(y) < batch,
        NORM=norm,
        SHIFTED=len(pairs) > 1, STEP=E4M3_STEP, TINY=E4M3_TINY, num_warps=num_warps(block(width)),
    )  # fmt: skip
    return *outputs, *(x for i in quantised for x in rows_of[i])


def norm_modulate(x: Tensor, *rows: Tensor, views, eps: float, index_view=None, **written):
    """written: `quantised` and `unread` of `rows_launch`."""
    results = len(views) // 2
    first, *others = rows_launch(x, None, rows, views, index_view, results, eps, **written)
    return (first, *others) if others else first


def norm_scale(x: Tensor, scale: Tensor, *, views, eps: float) -> Tensor:
    """x may have an axis more, such as the heads of a token."""
    return rows_launch(x, None, (scale,), (views[0][-3:],), None, 1, eps)[0]


def modulate(x: Tensor, *rows: Tensor, views, **written):
    first, *others = rows_launch(x, None, rows, views, None, 1, 0.0, norm=False, **written)
    return (first, *others) if others else first
