"""One program per token, all its heads at once; y may be a view, such as an attention's transposed result.

It moves the minimum: y and the logits read once, the result written once.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ltx2rt_kernels.triton_blocks import MAX_BLOCK, block, dtype_reason, jit, num_warps


@jit
def head_gate_kernel(
    y, logits, out, T, y_b, y_t, y_h, logits_b, logits_t,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = row // T
    t = row % T
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (h < HEADS) & (d < DIM)
    gate = 2.0 * tl.sigmoid(tl.load(logits + b * logits_b + t * logits_t + h, h < HEADS, 0.0).to(tl.float32))
    v = tl.load(y + b * y_b + t * y_t + h * y_h + d, inside, 0.0).to(tl.float32)
    tl.store(out + row * (HEADS * DIM) + h * DIM + d, v * gate, inside)


def why_not(y: Tensor, logits: Tensor) -> str | None:
    if y.ndim != 4:
        return f"y has {y.ndim} axes, the kernel takes (B, tokens, heads, head_dim)"
    if block(y.shape[2]) * block(y.shape[3]) > MAX_BLOCK:
        return f"{y.shape[2]} heads of {y.shape[3]}, the kernel takes at most {MAX_BLOCK} numbers a token"
    if y.stride(3) != 1 or logits.stride(2) != 1:
        return "an operand's last axis is strided"
    return dtype_reason(y, logits)


def head_gate(y: Tensor, logits: Tensor) -> Tensor:
    batch, tokens, heads, dim = y.shape
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    block_h, block_d = block(heads), block(dim)
    head_gate_kernel[(batch * tokens,)](
        y, logits, out, tokens, *y.stride()[:3], *logits.stride()[:2],
        HEADS=heads, DIM=dim, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=num_warps(block_h * block_d),
    )  # fmt: skip
    return out
