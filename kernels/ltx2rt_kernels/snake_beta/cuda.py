"""One program per stretch of one channel: the signal at twice the rate exists in registers only.

Each result recomputes the samples under its filter, in place of a dozen passes over memory at twice
the rate. Which inputs and taps a sample reads is known at compile time, so that each of the
taps - 1 inputs under a result's filter is loaded once, all but one of them from the cache.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ltx2rt_kernels.triton_blocks import dtype_reason, jit

BLOCK = 512


@jit
def sin_squared(z):
    """sin(z)^2 in float32, of period pi. pi is split so that multiples of its first part are exact
    up to |z| = 1e5; the library's sine keeps a table in memory for larger arguments, where float32
    no longer tells their phase.

    Source: pi/4 as split in Cephes' sinf, times 4; then the Taylor series, which on +-pi/2 leaves
    1e-9.
    """
    n = tl.floor(z * 0.3183098861837907 + 0.5)
    r = ((z - n * 3.140625) - n * 9.67502593994140625e-4) - n * 1.509957990978376432e-7
    q = r * r
    s = 1.0 + q * (
        -1 / 6
        + q * (1 / 120 + q * (-1 / 5040 + q * (1 / 362880 + q * (-1 / 39916800 + q / 6227020800))))
    )
    return q * s * s


@jit
def sample(x, up, t, J: tl.constexpr, T, HALF: tl.constexpr):
    """Sample m = 2 t + J - HALF + 1 at twice the rate: input (m + HALF - 1 - i) / 2 through tap i,
    every other one."""
    total = 0.0
    for k in tl.static_range(HALF):
        n = tl.minimum(tl.maximum(t + (J // 2 - k), 0), T - 1)
        total += tl.load(up + (2 * k + J % 2)).to(tl.float32) * tl.load(x + n).to(tl.float32)
    return 2.0 * total


@jit
def snake_beta_kernel(
    x, up, down, alpha, beta, out, x_b, x_c, T, CHANNELS, eps,
    TAPS: tl.constexpr, HALF: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    signal = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    x += signal // CHANNELS * x_b + signal % CHANNELS * x_c
    frequency = tl.exp(tl.load(alpha + signal % CHANNELS).to(tl.float32))
    height = 1.0 / (tl.exp(tl.load(beta + signal % CHANNELS).to(tl.float32)) + eps)
    total = tl.zeros([BLOCK_T], tl.float32)
    before, behind = sample(x, up, 0, HALF - 1, T, HALF), sample(x, up, T, HALF - 2, T, HALF)
    for j in tl.static_range(TAPS):
        m = 2 * t + (j - HALF + 1)
        fine = sample(x, up, t, j, T, HALF)
        fine = tl.where(m < 0, before, tl.where(m < 2 * T, fine, behind))
        total += tl.load(down + j).to(tl.float32) * (fine + sin_squared(fine * frequency) * height)
    tl.store(out + signal * T + t, total, t < T)


def why_not(
    x: Tensor, up: Tensor, down: Tensor, alpha: Tensor, beta: Tensor, *, eps: float
) -> str | None:
    if x.stride(2) != 1 or not all(v.is_contiguous() for v in (up, down, alpha, beta)):
        return "an operand's last axis is strided"
    if x.shape[0] * x.shape[1] > 65535:
        return f"{x.shape[0] * x.shape[1]} signals, a grid holds 65535"
    return dtype_reason(x, up, down, alpha, beta)


def snake_beta(
    x: Tensor, up: Tensor, down: Tensor, alpha: Tensor, beta: Tensor, *, eps: float
) -> Tensor:
    batch, channels, time = x.shape
    taps = up.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    snake_beta_kernel[(-(-time // BLOCK), batch * channels)](
        x, up, down, alpha, beta, out, x.stride(0), x.stride(1), time, channels, eps,
        TAPS=taps, HALF=taps // 2, BLOCK_T=BLOCK, num_warps=4,
    )  # fmt: skip
    return out
