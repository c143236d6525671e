"""Norms, and what is fused with them: modulation, gated residuals, RoPE."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ltx2rt.fused.norm_modulate import pairs, rows_per_token
from ltx2rt.fused.pattern import one_or_many
from ltx2rt.fused.qk_norm_rope import normed, rotated
from ltx2rt_cuda.ops.attention import rope
from ltx2rt_cuda.ops.table import fused, op


@op
def rms_norm(x: Tensor, weight: Tensor | None = None, *, dims, weight_view, eps: float) -> Tensor:
    # where torch's own writes all squares to memory first
    if x.device.type == "cpu" and x.dtype == torch.float32:
        length = torch.linalg.vector_norm(x, dim=dims, keepdim=True)
        y = x * torch.rsqrt(length.square() / (x.numel() // length.numel()) + eps)
        return y if weight is None else y * weight.reshape(weight_view)
    # The fused kernel wants one dtype; Gemma has float32 weights and bfloat16 activations.
    if dims == tuple(range(x.ndim - len(dims), x.ndim)) and (
        weight is None or weight.dtype == x.dtype
    ):
        shape = x.shape[-len(dims) :]
        return F.rms_norm(x, shape, None if weight is None else weight.reshape(shape), eps)
    # no copy in float32: all of Gemma's states are 1 GB
    if x.device.type != "cpu" and weight is None and not torch.is_grad_enabled():
        length = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=torch.float32)
        inverse = torch.rsqrt(length.square() / (x.numel() // length.numel()) + eps)
        return torch.mul(x, inverse, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    return (y if weight is None else y * weight.float().reshape(weight_view)).to(x.dtype)


@op
def rms_scale(
    x: Tensor, sum_squares: Tensor, weight: Tensor | None = None, *, dims, weight_view, count, eps
) -> Tensor:
    scale = torch.rsqrt(sum_squares / count + eps)
    for dim in dims:
        scale = scale.unsqueeze(dim)
    y = x.float() * scale
    return (y if weight is None else y * weight.float().reshape(weight_view)).to(x.dtype)


@op
def layer_norm(x: Tensor, dim: int, eps: float) -> Tensor:
    assert dim == x.ndim - 1, f"layer_norm over axis {dim} of {x.ndim}"
    return F.layer_norm(x, x.shape[-1:], None, None, eps)


@op
def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    # F.group_norm refuses groups of one number, a picture of 32 pixels a side; the mean is its own.
    return torch.group_norm(x, groups, weight, bias, eps)


def _take_along(x: Tensor, index: Tensor, dim: int) -> Tensor:
    return torch.take_along_dim(x, index.long(), dim)


def _norm_modulated(x: Tensor, rows, eps: float) -> tuple[Tensor, ...]:
    """The norm of x with each scale and shift among `rows`, or as it is."""
    y = rms_norm(x, dims=(x.ndim - 1,), weight_view=None, eps=eps)
    return tuple(torch.addcmul(shift, y, 1 + scale) for scale, shift in pairs(rows)) or (y,)


@fused
def norm_modulate(x: Tensor, *rows: Tensor, views, eps: float, index_view=None):
    shaped = rows_per_token(rows, views, index_view, _take_along)
    return one_or_many(_norm_modulated(x, shaped, eps))


@fused
def norm_scale(x: Tensor, scale: Tensor, *, views, eps: float) -> Tensor:
    return rms_norm(x, 1 + scale, dims=(x.ndim - 1,), weight_view=views[0], eps=eps)


def _residual(
    x: Tensor, y: Tensor, *rows: Tensor, views, index_view=None, biased=False
) -> tuple[Tensor, list[Tensor]]:
    """x + y * gate, and the rows behind the gate."""
    shaped = rows_per_token(rows, views, index_view, _take_along)
    y = y + shaped.pop(0) if biased else y
    y = F.pad(y, [0, 0] * (x.ndim - 1) + [0, len(x) - len(y)]) if len(y) < len(x) else y
    gate, *others = shaped
    return torch.addcmul(x, y, gate), others


@fused
def gated_residual(*operands: Tensor, **plan) -> Tensor:
    return _residual(*operands, **plan)[0]


@fused
def residual_norm_modulate(*operands: Tensor, eps: float, **plan):
    x, shaped = _residual(*operands, **plan)
    return x, *_norm_modulated(x, shaped, eps)


@fused
def qk_norm(*operands: Tensor, **plan):
    return normed(rms_norm, torch.cat, 2, *operands, **plan)


@fused
def qk_scale(*operands: Tensor, **plan):
    return normed(rms_scale, torch.cat, 3, *operands, **plan)


@fused
def qk_norm_rope(*operands: Tensor, **plan):
    return rotated(rms_norm, rope, 4, *operands, **plan)


@fused
def qk_scale_rope(*operands: Tensor, **plan):
    return rotated(rms_scale, rope, 5, *operands, **plan)


@fused
def sum_squares(x: Tensor, *, dims) -> Tensor:
    return x.float().square().sum(dims)


@fused
def pixel_norm_silu(x: Tensor, *, dim: int, eps: float) -> Tensor:
    return F.silu(rms_norm(x, dims=(dim,), weight_view=None, eps=eps))
