"""Derivatives of exchanges between ranks.

Every exchange is linear: its derivative is its transpose. all_reduce is its own, all_gather's is
reduce_scatter, all_to_all's sends everything back. Each rank then has its part of the gradient of
the sum of all ranks' losses; the trainer sums up what several ranks hold alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

Exchange = Callable[..., Iterable[Tensor]]


def differentiated(xs: Sequence[Tensor]) -> bool:
    """Whether a gradient is wanted of any of these operands."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in xs)


class Transposed(torch.autograd.Function):
    """`exchange(*xs)`; its backward pass applies `transpose` to the gradients of the results.
    Neither way does autograd look into what travels."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, transpose: Exchange, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.transpose = transpose
        return _kept[-1](lambda: tuple(exchange(*xs))) if _kept else tuple(exchange(*xs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.transpose(*gradients)


with_transpose: Callable[..., tuple[Tensor, ...]] = Transposed.apply
Results = tuple[Tensor, ...]
_kept: list[Callable[[Callable[[], Results]], Results]] = []  # handlers that wrap an exchange now


def keeping() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a block's forward pass and of its second one, which takes the first one's
    exchanges. Gathered weights, which have no gradient, are gathered again."""
    results: list[Results] = []

    def first(exchange: Callable[[], Results]) -> Results:
        made = exchange()
        results.append(tuple(x.detach() for x in made))
        return made

    def again(exchange: Callable[[], Results]) -> Results:
        return tuple(x.detach() for x in results.pop(0))

    return _with(first), _with(again)


@contextmanager
def _with(way: Callable[[Callable[[], Results]], Results]) -> Iterator[None]:
    _kept.append(way)
    try:
        yield
    finally:
        _kept.pop()
