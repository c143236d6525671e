"""Convolutions, and the vocoder's filters around an activation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from ltx2rt.fused.snake_beta import snake_windows
from ltx2rt_cuda.device import device_of
from ltx2rt_cuda.ops.arrays import channels_last
from ltx2rt_cuda.ops.table import fused, op


@op
def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride, dilation, padding=0
) -> Tensor:
    function = (F.conv1d, F.conv2d, F.conv3d)[weight.ndim - 3]
    if weight.ndim == 5 and device_of(x).channels_last:
        x, weight = channels_last(x), channels_last(weight)
    plan = {"stride": stride, "padding": padding, "dilation": dilation}
    if x.dtype == torch.bfloat16 and x.device.type == "cpu":
        # Rounded once either way; a CPU without products of bfloat16 takes ten to seven hundred
        # times as long for them. One that has them would be faster with them, untried.
        wide = None if bias is None else bias.float()
        return function(x.float(), weight.float(), wide, **plan).to(x.dtype)
    return function(x, weight, bias, **plan)


@op
def padded_conv(x: Tensor, *weights: Tensor, padding, stride, dilation) -> Tensor:
    return conv(x, *weights, stride=stride, dilation=dilation, padding=padding)


@op
def conv_transpose(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: int) -> Tensor:
    return F.conv_transpose1d(x, weight, bias, stride=stride)


@fused
def snake_beta(
    x: Tensor, up: Tensor, down: Tensor, alpha: Tensor, beta: Tensor, *, eps: float
) -> Tensor:
    b, c, t = x.shape
    pad, start, edges = snake_windows(up.shape[-1])

    def snake(y: Tensor) -> Tensor:
        turned = (y * alpha.exp()[:, None]).sin().square()
        return torch.addcdiv(y, turned, beta.exp()[:, None] + eps)

    if x.device.type == "cpu" and x.dtype == torch.float32:
        return _snake_beta_by_phase(x, up.flatten(), down.flatten(), snake, pad, start, edges[0])
    y = F.pad(x.reshape(b * c, 1, t), (pad, pad), mode="replicate")
    y = 2 * F.conv_transpose1d(y, up, stride=2)[..., start : start + 2 * t]
    y = snake(y.reshape(b, c, 2 * t))
    y = F.pad(y.reshape(b * c, 1, 2 * t), edges, mode="replicate")
    return F.conv1d(y, down, stride=2).reshape(b, c, t)


def _snake_beta_by_phase(
    x: Tensor, up: Tensor, down: Tensor, snake, pad: int, start: int, edge: int
) -> Tensor:
    """`snake_beta` in whole-signal multiply-adds: a CPU runs a convolution of one channel several
    times as slowly. The signal at twice the rate is held as its even and its odd samples."""
    t, taps = x.shape[-1], len(up)
    x = F.pad(x, (pad, pad), mode="replicate")
    y = []
    for p in (0, 1):
        reads = range((p + start) % 2, taps, 2)
        terms = ((2 * up[k], x[..., (p + start - k) // 2 :][..., :t]) for k in reads)
        y.append(snake(_weighted(terms)))
    first, last = y[0][..., :1].expand(*x.shape[:2], pad), y[1][..., -1:].expand(*x.shape[:2], pad)
    y = [torch.cat([first, phase, last], -1) for phase in y]
    return _weighted(
        (down[k], y[(k - edge) % 2][..., pad + (k - edge) // 2 :][..., :t]) for k in range(taps)
    )


def _weighted(terms: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of the signals, each times its weight (a scalar)."""
    (weight, signal), *others = terms
    total = signal * weight
    for weight, signal in others:
        total.addcmul_(signal, weight)
    return total
