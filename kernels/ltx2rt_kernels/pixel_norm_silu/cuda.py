"""One program holds all channels of some pixels; channels first and channels last are two sets of strides.

It moves the minimum: every pixel read once and written once.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor

from ltx2rt_kernels.launch import block, dtype_reason, jit

MAX_CHANNELS = 2048


@jit
def pixel_norm_silu_kernel(
    x, out, pixels, eps, x_b, x_c, x_p, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * BLOCK_P
    c = tl.arange(0, BLOCK_C).to(tl.int64)[:, None]
    p = (start + tl.arange(0, BLOCK_P))[None, :]
    inside = (c < CHANNELS) & (p < pixels)
    place = tl.program_id(1).to(tl.int64) * x_b + c * x_c + p * x_p
    v = tl.load(x + place, inside, 0.0).to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, axis=0) / CHANNELS + eps)[None, :]
    tl.store(out + place, v * tl.sigmoid(v), inside)


def _is_channels_last(x: Tensor) -> bool:
    return x.movedim(1, -1).is_contiguous()


def why_not(x: Tensor, *, dim: int, eps: float) -> str | None:
    if dim != 1 or x.ndim < 3:
        return f"the norm is over axis {dim} of {x.ndim}, the kernel takes (B, channels, ...)"
    if x.shape[1] > MAX_CHANNELS:
        return f"{x.shape[1]} channels, the kernel takes at most {MAX_CHANNELS}"
    if not x.is_contiguous() and not _is_channels_last(x):
        return "x is contiguous neither channels first nor channels last"
    return dtype_reason(x)


def pixel_norm_silu(x: Tensor, *, dim: int, eps: float) -> Tensor:
    batch, channels = x.shape[:2]
    pixels = math.prod(x.shape[2:])
    first = x.is_contiguous()
    out = torch.empty_like(x)
    block_c = block(channels)
    # Channels first: 32 neighbours fill whole 64-byte sectors. Channels last: rows are long enough by themselves.
    block_p = max(8192 // block_c, 32 if first else 1)
    block_p = min(block_p, block(pixels))
    strides = (pixels, 1) if first else (1, channels)
    pixel_norm_silu_kernel[(-(-pixels // block_p), batch)](
        x, out, pixels, eps, channels * pixels, *strides, CHANNELS=channels, BLOCK_C=block_c, BLOCK_P=block_p,
        num_warps=min(max(block_c * block_p // 1024, 1), 16),
    )  # fmt: skip
    return out
