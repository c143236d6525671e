"""One program per row: read once, its GELU taken where one stands before the product, its largest
number found, divided and rounded to e4m3 as it is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from ltx2rt.graph.encodings import E4M3_STEP, E4M3_TINY
from ltx2rt_kernels.triton_blocks import MAX_BLOCK, block, dtype_reason, jit, num_warps


@jit
def store_rows(
    v, values, scales, row, N: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    TINY: tl.constexpr,
):  # fmt: skip
    """Write the numbers v of a row, zeros behind N, as e4m3 and their scale."""
    d = tl.arange(0, BLOCK)
    scale = tl.maximum(tl.max(tl.abs(v), axis=0), TINY) * STEP
    tl.store(scales + row, scale)
    # div_rn: Triton's own division errs by a last bit, which would move numbers over the edge
    # between two steps.
    tl.store(values + row * N + d, tl.div_rn(v, scale).to(tl.float8e4nv), d < N)


@jit
def quantise_rows_kernel(
    x, values, scales, x_r, STEP: tl.constexpr, TINY: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    v = tl.load(x + row * x_r + d, d < N, 0.0).to(tl.float32)
    # by tanh: (1 + tanh z) / 2 is the logistic function of 2 z, here with z = sqrt(2 / pi) (v +
    # 0.044715 v^3)
    if GELU:
        v = v * tl.sigmoid(1.5957691216057308 * v * (1.0 + 0.044715 * v * v))
    store_rows(v, values, scales, row, N, BLOCK, STEP, TINY)


def empty_rows(shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory of e4m3 values (..., n) and float32 scales (..., 1)."""
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    return values, torch.empty((*shape[:-1], 1), dtype=torch.float32, device=device)


def why_not(x: Tensor, *, gelu: bool = False) -> str | None:
    if x.ndim != 2:
        return f"x has {x.ndim} axes, the kernel takes (rows, n)"
    if x.shape[1] > MAX_BLOCK:
        return f"rows of {x.shape[1]} numbers, the kernel takes at most {MAX_BLOCK}"
    if x.stride(1) != 1:
        return "an operand's last axis is strided"
    if x.is_cuda and (capability := torch.cuda.get_device_capability(x.device)) < (8, 9):
        own = ".".join(map(str, capability))
        return f"compute capability {own} has no e4m3, the kernel takes 8.9 and later"
    return dtype_reason(x)


def quantise_rows(x: Tensor, *, gelu: bool = False) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    values, scales = empty_rows(x.shape, x.device)
    size = block(width)
    quantise_rows_kernel[(rows,)](
        x, values, scales, x.stride(0),
        STEP=E4M3_STEP, TINY=E4M3_TINY, N=width, BLOCK=size, GELU=gelu, num_warps=num_warps(size),
    )  # fmt: skip
    return values, scales
