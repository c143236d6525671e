"""Exchanges between ranks, each with its derivative."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from ltx2rt_cuda.collectives import differentiated, with_transpose
from ltx2rt_cuda.ops.table import op


@op
def shard(x: Tensor, dim: int, parts: int, index: int) -> Tensor:
    size = x.shape[dim] // parts
    return x.narrow(dim, index * size, size)


@op
def all_reduce(*xs: Tensor, group: str, in_place: bool = False) -> tuple[Tensor, ...]:
    """One communication for all operands, which `arrived` waits for. in_place: nothing else reads
    them, or memory that they are in."""
    if differentiated(xs):
        summed = partial(_summed, group=group)
        return with_transpose(summed, summed, *xs)
    functional = torch.ops._c10d_functional
    # Inductor finds that out itself
    own = "_" if in_place and not torch.compiler.is_compiling() else ""
    if len(xs) == 1:
        return (getattr(functional, f"all_reduce{own}")(xs[0].contiguous(), "sum", group),)
    together = getattr(functional, f"all_reduce_coalesced{own}")
    return tuple(together([x.contiguous() for x in xs], "sum", group))


def _summed(*xs: Tensor, group: str) -> Iterable[Tensor]:
    """Results of `all_reduce` that are there."""
    return map(arrived, all_reduce(*xs, group=group))


@op
def barrier(*xs: Tensor) -> tuple[Tensor, ...]:
    """A stream keeps its order."""
    return xs


def arrived(x: Tensor) -> Tensor:
    """A result of `all_reduce` for those that read it: the stream waits, on a CPU the caller."""
    if differentiated((x,)):
        return x  # it was waited for
    return torch.ops._c10d_functional.wait_tensor(x)


@op
def all_gather(x: Tensor, dim: int, parts: int, group: str) -> Tensor:
    if differentiated((x,)):
        how = {"dim": dim, "parts": parts, "group": group}
        there, back = (lambda x: [all_gather(x, **how)]), (lambda g: [_reduce_scatter(g, **how)])
        return with_transpose(there, back, x)[0]
    functional = torch.ops._c10d_functional
    joined = functional.wait_tensor(functional.all_gather_into_tensor(x.contiguous(), parts, group))
    return joined.unflatten(0, (parts, x.shape[0])).movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scatter(x: Tensor, dim: int, parts: int, group: str) -> Tensor:
    """This rank's part along `dim` of the sum of what all ranks have."""
    functional = torch.ops._c10d_functional
    shares = x.unflatten(dim, (parts, -1)).movedim(dim, 0).flatten(0, 1).contiguous()
    return functional.wait_tensor(functional.reduce_scatter_tensor(shares, "sum", parts, group))


@op
def all_to_all(*xs: Tensor, split: int, concat: int, parts: int, group: str) -> tuple[Tensor, ...]:
    """Operands of one shape travel stacked, in one communication."""
    if differentiated(xs):
        there = partial(all_to_all, split=split, concat=concat, parts=parts, group=group)
        return with_transpose(there, partial(there, split=concat, concat=split), *xs)
    if len({x.shape for x in xs}) > 1:
        how = {"split": split, "concat": concat, "parts": parts, "group": group}
        return tuple(all_to_all(x, **how)[0] for x in xs)
    functional = torch.ops._c10d_functional
    shares = [x.unflatten(split, (parts, -1)).movedim(split, 0) for x in xs]
    sent = torch.stack(shares, 1) if len(xs) > 1 else shares[0].unsqueeze(1).contiguous()
    sizes = [1] * parts
    received = functional.wait_tensor(functional.all_to_all_single(sent, sizes, sizes, group))
    return received.movedim(0, concat + 1).flatten(concat + 1, concat + 2).unbind(0)


@op
def swap_edges(
    first: Tensor, last: Tensor, dim: int, parts: int, index: int, group: str
) -> tuple[Tensor, Tensor]:
    sizes = [int(abs(i - index) == 1) for i in range(parts)]
    sent = [first] * (index > 0) + [last] * (index < parts - 1)
    functional = torch.ops._c10d_functional
    received = functional.all_to_all_single(torch.stack(sent), sizes, sizes, group)
    received = functional.wait_tensor(received)
    before = received[0] if index else first.narrow(dim, 0, 1).expand_as(first)
    after = received[-1] if index < parts - 1 else last.narrow(dim, -1, 1).expand_as(last)
    return before, after
