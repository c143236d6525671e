"""One program per token: the row is read once, held in float32, and written once per result.

The same kernel with RESIDUAL adds y * gate first and writes the sum too; the norm then sees the unrounded sum. Rows
that all tokens of a sample share are read from the L2 cache by all but the first of them.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ltx2rt_kernels.launch import MAX_BLOCK, block, dtype_reason, jit, num_warps, spread


@jit
def rows_kernel(
    x, y, gate, scale_0, shift_0, scale_1, shift_1, total, out_0, out_1, T, eps,
    x_b, x_t, y_b, y_t, gate_b, gate_t,
    scale_0_b, scale_0_t, shift_0_b, shift_0_t, scale_1_b, scale_1_t, shift_1_b, shift_1_t,
    D: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, RESULTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = row // T
    t = row % T
    d = tl.arange(0, BLOCK)
    inside = d < D
    v = tl.load(x + b * x_b + t * x_t + d, inside, 0.0).to(tl.float32)
    if RESIDUAL:
        delta = tl.load(y + b * y_b + t * y_t + d, inside, 0.0).to(tl.float32)
        v += delta * tl.load(gate + b * gate_b + t * gate_t + d, inside, 0.0).to(tl.float32)
        tl.store(total + row * D + d, v, inside)
    if RESULTS > 0:
        n = v * tl.rsqrt(tl.sum(v * v, axis=0) / D + eps)
        z = n
        if ROWS:
            scale = tl.load(scale_0 + b * scale_0_b + t * scale_0_t + d, inside, 0.0).to(tl.float32)
            z = n * (1.0 + scale) + tl.load(shift_0 + b * shift_0_b + t * shift_0_t + d, inside, 0.0).to(tl.float32)
        tl.store(out_0 + row * D + d, z, inside)
        if RESULTS > 1:
            scale = tl.load(scale_1 + b * scale_1_b + t * scale_1_t + d, inside, 0.0).to(tl.float32)
            z = n * (1.0 + scale) + tl.load(shift_1 + b * shift_1_b + t * shift_1_t + d, inside, 0.0).to(tl.float32)
            tl.store(out_1 + row * D + d, z, inside)


def why_not(x: Tensor, *rows: Tensor, views=(), eps: float = 0.0) -> str | None:
    if x.ndim != 3:
        return f"x has {x.ndim} axes, the kernel takes (B, tokens, D)"
    if len(rows) > 4:
        return f"{len(rows) // 2} pairs of rows, the kernel takes at most 2"
    if x.shape[-1] > MAX_BLOCK:
        return f"rows of {x.shape[-1]} numbers, the kernel takes at most {MAX_BLOCK}"
    if any(row.stride(-1) != 1 for row in (x, *rows)):
        return "an operand's last axis is strided"
    return dtype_reason(x, *rows)


def launch(
    x: Tensor, residual: tuple[Tensor, Tensor] | None, rows: list[Tensor], num_results: int, eps: float
) -> list[Tensor]:
    """[x + y * gate if there is a residual (y, gate)] + results; all operands spread to x's shape."""
    batch, tokens, width = x.shape
    outputs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(num_results + bool(residual))]
    total = outputs[0] if residual else None
    results = outputs[1:] if residual else outputs
    operands = [x, *(residual or (None, None)), *rows, *[None] * (4 - len(rows))]
    strides = [n for v in operands for n in ((0, 0) if v is None else v.stride()[:2])]
    size = block(width)
    rows_kernel[(batch * tokens,)](
        *operands, total, *results, *[None] * (2 - num_results), tokens, eps, *strides,
        D=width, BLOCK=size, RESIDUAL=residual is not None, RESULTS=num_results, ROWS=len(rows) > 0,
        num_warps=num_warps(size),
    )  # fmt: skip
    return outputs


def norm_modulate(x: Tensor, *rows: Tensor, views, eps: float):
    spread_rows = [spread(row, view, x.shape) for row, view in zip(rows, views, strict=True)]
    results = launch(x, None, spread_rows, len(rows) // 2, eps)
    return tuple(results) if len(results) > 1 else results[0]
