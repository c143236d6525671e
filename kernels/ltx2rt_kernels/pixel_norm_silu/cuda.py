"""One program holds all channels of some pixels; how the channels lie is a matter of strides.

It moves the minimum: every pixel read once and written once. Videos are written channels last,
whatever they come as: the convolution behind the norm wants them so.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import triton.language as tl
from torch import Tensor

from ltx2rt_kernels.triton_blocks import block, dtype_reason, jit

MAX_CHANNELS = 2048


@jit
def pixel_norm_silu_kernel(
    x, out, pixels, eps, x_b, x_c, x_p, o_c, o_p,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK_P
    c = tl.arange(0, BLOCK_C).to(tl.int64)[:, None]
    p = (start + tl.arange(0, BLOCK_P))[None, :]
    inside = (c < CHANNELS) & (p < pixels)
    sample = tl.program_id(1).to(tl.int64)
    v = tl.load(x + sample * x_b + c * x_c + p * x_p, inside, 0.0).to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, axis=0) / CHANNELS + eps)[None, :]
    tl.store(out + sample * CHANNELS * pixels + c * o_c + p * o_p, v * tl.sigmoid(v), inside)


def _pixel_stride(x: Tensor) -> int | None:
    """Stride from one pixel to the next, if all have the same."""
    axes = [(n, stride) for n, stride in zip(x.shape[2:], x.stride()[2:], strict=True) if n > 1]
    uniform = all(outer == n * stride for (_, outer), (n, stride) in pairwise(axes))
    return (axes[-1][1] if axes else 1) if uniform else None


def why_not(x: Tensor, *, dim: int, eps: float) -> str | None:
    if dim != 1 or x.ndim < 3:
        return f"the norm is over axis {dim} of {x.ndim}, the kernel takes (B, channels, ...)"
    if x.shape[1] > MAX_CHANNELS:
        return f"{x.shape[1]} channels, the kernel takes at most {MAX_CHANNELS}"
    if _pixel_stride(x) is None:
        return "x's pixels do not follow one another in memory"
    return dtype_reason(x)


def pixel_norm_silu(x: Tensor, *, dim: int, eps: float) -> Tensor:
    batch, channels = x.shape[:2]
    pixels, stride = math.prod(x.shape[2:]), _pixel_stride(x)
    last = torch.channels_last_3d if x.ndim == 5 else torch.contiguous_format
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=last)
    first = stride == 1
    block_c = block(channels)
    # Channels first: neighbours fill whole 32-byte sectors, of 1024 channels no more than registers
    # hold. Channels last: rows are long enough by themselves.
    block_p = max(8192 // block_c, min(32, 16384 // block_c) if first else 1)
    block_p = min(block_p, block(pixels))
    strides = (1, channels) if x.ndim == 5 else (pixels, 1)
    pixel_norm_silu_kernel[(-(-pixels // block_p), batch)](
        x, out, pixels, eps, x.stride(0), x.stride(1), stride, *strides,
        CHANNELS=channels, BLOCK_C=block_c, BLOCK_P=block_p,
        num_warps=min(max(block_c * block_p // 1024, 1), 16),
    )  # fmt: skip
    return out
