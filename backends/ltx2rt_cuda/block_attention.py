"""Attention of blocks of tokens to some of the blocks, out of plain attention: a row of the table at
a time, so that the keys of one row exist as a copy."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from ltx2rt_cuda.device import device_of


def _rows(table: Tensor, size: int, ends: int, tokens: int) -> Iterator[tuple[slice, Tensor]]:
    """For each row of the table its queries, and the tokens int64[kept size] that they see; a
    number of `tokens` or more is none."""
    inside = torch.arange(size, device=table.device)
    for i, row in enumerate(table.long().unbind(), ends):
        yield slice(i * size, min((i + 1) * size, tokens)), (row[:, None] * size + inside).flatten()


@_disable_dynamo
def block_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, *, scale: float, size: int, ends: int
) -> Tensor:
    """q, k, v (B, tokens, heads, head_dim); table int32 (rows, kept)."""
    attend, tokens = device_of(q).attention, q.shape[1]
    first = [attend(q[:, : ends * size], k, v, None, scale)] if ends else []
    found = []
    for queries, seen in _rows(table, size, ends, tokens):
        keys, values = (x.index_select(1, seen.clamp(max=tokens - 1)) for x in (k, v))
        there = (seen < tokens)[None, None, None] if tokens % size else None
        mask = None if there is None else there.expand(1, 1, queries.stop - queries.start, -1)
        found.append(attend(q[:, queries], keys, values, mask, scale))
    return torch.cat([*first, *found], dim=1)


def block_recall(
    q: Tensor, k: Tensor, table: Tensor, *, scale: float, size: int, ends: int
) -> Tensor:
    """float32 (B, heads)."""
    tokens, found = q.shape[1], []
    for queries, seen in _rows(table, size, ends, tokens):
        scores = torch.einsum("btnd,bsnd->bnts", q[:, queries].float(), k.float()) * scale
        there = torch.zeros(tokens + size, device=q.device).index_fill(0, seen, 1)[:tokens]
        found.append((scores.softmax(dim=-1) @ there).sum(dim=2))
    return torch.stack(found).sum(dim=0) / (tokens - ends * size)
