"""Ops of any array: elementwise, reductions, shapes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ltx2rt.graph.ops import ALIKE, BINARY, UNARY, drawn_bits
from ltx2rt_cuda.ops.table import DTYPES, OPS, fused, op


def _binary(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, y, views: function(x.reshape(views[0]), y.reshape(views[1]))


OPS |= {
    **{name: getattr(torch, name) for name in UNARY},
    **{name: _binary(getattr(torch, name)) for name in BINARY},
    **ALIKE,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "clamp": lambda x, low, high: x.clamp(low, high),
    "leaky_relu": lambda x, slope: F.leaky_relu(x, slope),
    "cast": lambda x, dtype: x.to(DTYPES[dtype]),
    "max": lambda x, dims: x.amax(dims),
    "min": lambda x, dims: x.amin(dims),
    "transpose": lambda x, perm: x.permute(perm),
    "at": lambda x, dim, index: x.select(dim, index),
    "concat": lambda *xs, dim: torch.cat(xs, dim),
    "stack": lambda *xs, dim: torch.stack(xs, dim),
    "expand": lambda x, shape, dim: x.unsqueeze(dim).expand(shape),
}
for _name, _function in OPS.items():
    if _function.__name__ == "<lambda>":  # FX prints call targets by their qualified name
        _function.__name__ = _function.__qualname__ = f"{_name}_"
        globals()[f"{_name}_"] = _function


def channels_last(x: Tensor) -> Tensor:
    """The layout in which Hopper's convolutions multiply; norm, SiLU, padding and residuals keep
    it, so that inside the VAE's blocks nothing is copied."""
    return x.contiguous(memory_format=torch.channels_last_3d)


@op
def full(value: Tensor, shape, dtype) -> Tensor:
    return value.to(DTYPES[dtype]).expand(shape).contiguous()


@op
def add(x: Tensor, y: Tensor, views) -> Tensor:
    x, y = x.reshape(views[0]), y.reshape(views[1])
    if x.ndim != 5 or not y.is_contiguous(memory_format=torch.channels_last_3d):
        return x + y
    # A sum lies as its first operand does: in a residual that is a convolution's result, not what
    # it is added to. Of one sample it may have a first stride by which torch takes it for channels
    # first, and pads it into that.
    total = y + x
    return total.movedim(1, -1).flatten(0, 1).unflatten(0, total.shape[0:3:2]).movedim(-1, 1)


@op
def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@op
def affine(x: Tensor, scale: float, offset: float) -> Tensor:
    x = x * scale if scale != 1.0 else x
    return x + offset if offset != 0.0 else x


@op
def select(condition: Tensor, x: Tensor, y: Tensor, views) -> Tensor:
    return torch.where(condition.reshape(views[0]) != 0, x.reshape(views[1]), y.reshape(views[2]))


@op
def slice_(x: Tensor, dim: int, start: int, stop: int, step: int) -> Tensor:
    x = x.narrow(dim, start, stop - start)
    return x if step == 1 else x[(slice(None),) * dim + (slice(None, None, step),)]


@op
def pad(x: Tensor, widths, mode: str) -> Tensor:
    if mode == "zeros":
        return F.pad(x, [n for pair in reversed(widths) for n in pair])
    for dim, (before, after) in enumerate(widths):
        n = x.shape[dim]
        if mode == "edge":
            head, tail = x.narrow(dim, 0, 1), x.narrow(dim, n - 1, 1)
            parts = [head] * before + [x] + [tail] * after
        else:
            parts = [x.narrow(dim, 1, before).flip(dim)] if before else []
            parts += [x] + ([x.narrow(dim, n - 1 - after, after).flip(dim)] if after else [])
        x = torch.cat(parts, dim) if before or after else x
    return x


@op
def halo(x: Tensor, dim: int, size: int) -> Tensor:
    first, last = x.narrow(dim, 0, size), x.narrow(dim, x.shape[dim] - size, size)
    start, end = first[:1].narrow(dim, 0, 1), last[-1:].narrow(dim, size - 1, 1)
    before = torch.cat([start.expand_as(first[:1]), last[:-1]])
    after = torch.cat([first[1:], end.expand_as(first[:1])])
    return torch.cat([before, x, after], dim)


@op
def take(x: Tensor, index: Tensor, dim: int, batch_dims: int) -> Tensor:
    """One look-up, whatever the batch: rows of all samples lie one after the other."""
    if batch_dims == 0:
        found = x.index_select(dim, index.reshape(-1))
        return found.reshape(x.shape[:dim] + index.shape + x.shape[dim + 1 :])
    lead, count, size = x.shape[:batch_dims], prod(x.shape[:batch_dims]), x.shape[dim]
    rows = x.movedim(dim, batch_dims).flatten(0, batch_dims)
    first = torch.arange(0, count * size, size, device=x.device).unsqueeze(1)
    found = rows.index_select(0, (index.reshape(count, -1) + first).flatten())
    found = found.reshape(*lead, *index.shape[batch_dims:], *rows.shape[1:])
    own = range(batch_dims, index.ndim)  # dimensions of a look-up
    return found.movedim(list(own), [i - batch_dims + dim for i in own])


@op
def dropout(x: Tensor, keys: Tensor, columns: Tensor, rate: Tensor, *, salt: int, views) -> Tensor:
    rate = rate.reshape(views[2])
    kept = drawn_bits(keys, columns, salt, views) * 2.0**-24 >= rate
    return torch.where(kept, x.float() * (1 / (1 - rate)), 0.0).to(x.dtype)


@fused
def modulate(x: Tensor, scale: Tensor, shift: Tensor, *, views) -> Tensor:
    return torch.addcmul(shift.reshape(views[1]), x, 1 + scale.reshape(views[0]))
