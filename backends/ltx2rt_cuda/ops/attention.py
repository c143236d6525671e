"""Attention, its gate, and positions."""

from __future__ import annotations

import torch
from torch import Tensor

from ltx2rt_cuda.device import attention as kernels
from ltx2rt_cuda.device import device_of
from ltx2rt_cuda.neighbourhood import neighbourhood_attention
from ltx2rt_cuda.ops.table import fused, op


@op
def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, scale: float, bias_view
) -> Tensor:
    mask = None if bias is None else bias.reshape(bias_view).to(q.dtype)
    return device_of(q).attention(q, k, v, mask, scale)


@op
def rope(x: Tensor, cos: Tensor, sin: Tensor, view) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos.reshape(view), sin.reshape(view)
    turned = (torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin))
    return torch.cat(turned, dim=-1).to(x.dtype)


@op
def axial_rope(x: Tensor, frequencies: Tensor, sizes, first) -> Tensor:
    y, start = torch.empty_like(x), 0
    for dim, (size, begin) in enumerate(zip(sizes, first, strict=True), 1):
        positions = torch.arange(begin, begin + x.shape[dim], dtype=torch.float32, device=x.device)
        angles = positions[:, None] * frequencies[start // 2 : (start + size) // 2]
        view = [x.shape[dim] if i == dim else 1 for i in range(x.ndim - 1)]
        cos, sin = angles.cos().reshape(*view, -1), angles.sin().reshape(*view, -1)
        even, odd = slice(start, start + size, 2), slice(start + 1, start + size, 2)
        a, b = x[..., even].float(), x[..., odd].float()
        y[..., even], y[..., odd] = a * cos - b * sin, a * sin + b * cos
        start += size
    return y


@op
def sinusoid(t: Tensor, frequencies: Tensor) -> Tensor:
    angles = t.unsqueeze(-1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


fused(neighbourhood_attention)


@op
def attention_part(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, scale: float, bias_view
) -> Tensor:
    bias = None if bias is None else bias.reshape(bias_view)
    y, log_sum = kernels.attention_part(q, k, v, bias, scale, device_of(q).part)
    log_sum = log_sum.transpose(1, 2).unsqueeze(-1).contiguous()
    upper = (log_sum.view(torch.int32) & -0x10000).view(torch.float32)
    return torch.cat([y, upper.to(q.dtype), (log_sum - upper).to(q.dtype)], dim=-1)


@op
def attention_join(parts: Tensor) -> Tensor:
    wide = parts.float()
    weights = (wide[..., -2:-1] + wide[..., -1:]).softmax(dim=0)
    return (wide[..., :-2] * weights).sum(dim=0).to(parts.dtype)


@fused
def head_gate(y: Tensor, logits: Tensor, *choice: Tensor) -> Tensor:
    if choice:
        keep, v = choice
        y = torch.where(keep.reshape(-1, *[1] * (y.ndim - 1)) != 0, y, v)
    return y * (2 * torch.sigmoid(logits)).unsqueeze(-1)
