"""One program per token, all its heads at once; y may be a view. It moves the minimum: y and the
logits read once, the result written once. Where there is a choice, a program reads y or the values
that stand for it; in front of a float8 product it writes e4m3 numbers and the token's scale.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ltx2rt.graph.encodings import E4M3_STEP, E4M3_TINY
from ltx2rt_kernels.triton_blocks import MAX_BLOCK, block, dtype_reason, jit, num_warps


@jit
def head_gate_kernel(
    y, logits, keep, v, out, scales, T, y_b, y_t, y_h, logits_b, logits_t, keep_b, v_b, v_t, v_h,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    CHOICE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = row // T
    t = row % T
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (h < HEADS) & (d < DIM)
    logit = tl.load(logits + b * logits_b + t * logits_t + h, h < HEADS, 0.0)
    gate = 2.0 * tl.sigmoid(logit.to(tl.float32))
    place = y + b * y_b + t * y_t + h * y_h + d
    if CHOICE:  # noqa: SIM102 - compiled or not, then run or not
        if tl.load(keep + b * keep_b) == 0:
            place = v + b * v_b + t * v_t + h * v_h + d
    result = tl.load(place, inside, 0.0).to(tl.float32) * gate
    if ROWS:
        scale = tl.maximum(tl.max(tl.max(tl.abs(result), axis=1), axis=0), TINY) * STEP
        tl.store(scales + row, scale)
        result = tl.div_rn(result, scale).to(tl.float8e4nv)
    tl.store(out + row * (HEADS * DIM) + h * DIM + d, result, inside)


def why_not(y: Tensor, logits: Tensor, *choice: Tensor) -> str | None:
    if y.ndim != 4:
        return f"y has {y.ndim} axes, the kernel takes (B, tokens, heads, head_dim)"
    if block(y.shape[2]) * block(y.shape[3]) > MAX_BLOCK:
        return f"{y.shape[2]} heads of {y.shape[3]}, the kernel takes at most {MAX_BLOCK} numbers a token"
    if any(x.stride(-1) != 1 for x in (y, logits, *choice[1:])):
        return "an operand's last axis is strided"
    return dtype_reason(y, logits, *choice[1:])


def head_gate_rows(y: Tensor, *gate: Tensor) -> tuple[Tensor, Tensor]:
    scales = torch.empty((y.shape[0] * y.shape[1], 1), dtype=torch.float32, device=y.device)
    return head_gate(y, *gate, scales=scales).reshape(len(scales), -1), scales


def head_gate(y: Tensor, logits: Tensor, *choice: Tensor, scales: Tensor | None = None) -> Tensor:
    """scales: where the e4m3 numbers' scales go; None: the result is not quantised."""
    batch, tokens, heads, dim = y.shape
    keep, v = choice or (None, None)
    others = (0,) * 4 if v is None or keep is None else (*keep.stride(), *v.stride()[:3])
    dtype = y.dtype if scales is None else torch.float8_e4m3fn
    out = torch.empty(y.shape, dtype=dtype, device=y.device)
    block_h, block_d = block(heads), block(dim)
    head_gate_kernel[(batch * tokens,)](
        y, logits, keep, v, out, scales, tokens, *y.stride()[:3], *logits.stride()[:2], *others,
        HEADS=heads, DIM=dim, BLOCK_H=block_h, BLOCK_D=block_d, CHOICE=bool(choice),
        ROWS=scales is not None, STEP=E4M3_STEP, TINY=E4M3_TINY,
        num_warps=num_warps(block_h * block_d),
    )  # fmt: skip
    return out
