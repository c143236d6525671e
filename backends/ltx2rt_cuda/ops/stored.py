"""Weights in the encodings of `graph.encodings`."""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace

import torch
from torch import Tensor

from ltx2rt.graph.encodings import DECODED, ENCODINGS, encoded, rotation
from ltx2rt_cuda.ops.products import quantise_rows
from ltx2rt_cuda.ops.table import DTYPES, fused


@cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


@cache
def _rotation(size: int, device: torch.device) -> Tensor:
    return torch.from_numpy(rotation(size)).to(device)


# the namespace of `graph.encodings`
TORCH = SimpleNamespace(
    quantise_rows=quantise_rows,
    cast=lambda x, dtype: x.to(DTYPES[dtype]),
    bits=lambda x, dtype: x.view(getattr(torch, dtype)),
    stack=torch.stack,
    lookup=lambda table, index: _table(table, index.device)[index.int()],
    where=torch.where,
    rotate=lambda x, size: x @ _rotation(size, x.device),
    largest=lambda x: x.amax(1, keepdim=True),
    rint=torch.round,
)
encode = partial(encoded, o=TORCH)


@partial(fused, switch="unpack")
def unpack(*fields: Tensor, encoding: str, dtype: str) -> Tensor:
    """Decode some rows at a time, so that the float32 intermediates stay small."""
    row, count = ENCODINGS[encoding], len(fields[0])
    n = row.numbers(fields[0].shape[1])
    matrix = torch.empty((count, n), dtype=DTYPES[dtype], device=fields[0].device)
    rows = max(1, DECODED // n)
    for start in range(0, count, rows):
        part = slice(start, start + rows)
        matrix[part] = row.decode(TORCH, *(field[part] for field in fields))
    return matrix
