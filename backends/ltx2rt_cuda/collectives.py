"""Derivatives of exchanges between ranks.

A program of several ranks is one function of what all of them hold, and every exchange in it is
linear: its derivative is its transpose. all_reduce is its own transpose, that of all_gather is
reduce_scatter, that of all_to_all is the all_to_all that sends everything back. What a rank then
has is its part of the gradient of the sum of all ranks' losses; a parameter that several ranks hold
alike gets the sum of theirs, which is the trainer's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Exchange = Callable[..., Iterable[Tensor]]


def differentiated(xs: Sequence[Tensor]) -> bool:
    """Whether a gradient is wanted of any of these operands."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in xs)


def with_transpose(exchange: Exchange, transpose: Exchange, *xs: Tensor) -> tuple[Tensor, ...]:
    """`exchange(*xs)`, whose gradients are what `transpose` makes of those of its results."""
    return Transposed.apply(exchange, transpose, *xs)  # pyright: ignore[reportReturnType]


class Transposed(torch.autograd.Function):
    """See `with_transpose`. Neither way does autograd look into what travels."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, transpose: Exchange, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.transpose = transpose
        return tuple(exchange(*xs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *ctx.transpose(*gradients)
