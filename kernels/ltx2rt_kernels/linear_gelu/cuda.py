"""cuBLASLt's own epilogue: GELU is applied to the sums of a product while they are still on the
chip, which saves the feed-forward's widest tensor one write and one read. cuBLASLt's GELU is the
one by tanh, to no more digits than bfloat16 results need.
"""

from __future__ import annotations

import torch
from torch import Tensor


def why_not(x: Tensor, weight: Tensor, bias: Tensor, **plan) -> str | None:
    if x.dtype != torch.bfloat16:
        return f"the operands are {x.dtype}, the epilogue takes bfloat16"
    return None


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor, *, num_contracted: int, out_shape
) -> Tensor:
    lead = x.shape[: x.ndim - num_contracted]
    product = torch._addmm_activation
    y = product(bias, x.reshape(-1, weight.shape[1]), weight.t(), use_gelu=True)
    return y.reshape(*lead, *out_shape)
