"""Neighbourhood attention out of plain attention: blocks of queries, each to the box of keys that
its windows reach, masked to each query's. One call takes a line of blocks, all columns of a few
frames and rows: memory holds the boxes and masks of one line.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from ltx2rt.graph.network_ops import window_blocks
from ltx2rt_cuda.device import device_of

# queries along each axis: boxes are a few times a window of 11, scores still fill the matrix units
BLOCK = 8


# A compiler would write the loop out, hundreds of lines for one clip. `torch.compiler.disable` is
# the same, but imports the compiler at once instead of with the first call: 2 s of every process'
# start.
@_disable_dynamo
def neighbourhood_attention(q: Tensor, k: Tensor, v: Tensor, window, first, scale: float) -> Tensor:
    """q (B, frames, rows, columns, heads, head_dim); k, v the same, at least q's positions."""
    plans = map(window_blocks, q.shape[1:4], k.shape[1:4], window, first, [BLOCK] * 3)
    begins, boxes, seen = zip(*plans, strict=True)
    sizes = [mask.shape[1:] for mask in seen]  # sizes along an axis: a block, a box
    block, box = ([size[i] for size in sizes] for i in (0, 1))
    reads = [
        (start[2][:, None] + np.arange(size[2])).ravel()
        for start, size in ((begins, block), (boxes, box))
    ]
    once = np.unique(reads[0], return_index=True)[1]  # the last two blocks may overlap
    columns_q, columns_k, once = (torch.from_numpy(x).to(q.device) for x in (*reads, once))
    masks = [torch.from_numpy(mask).to(q.device) for mask in seen]
    count = len(begins[2])

    def line(x: Tensor, frame: int, row: int, size: list[int], columns: Tensor) -> Tensor:
        """(B, frames, rows, columns, heads, head_dim) -> (B blocks, tokens, heads, head_dim)."""
        x = x[:, frame : frame + size[0], row : row + size[1]].index_select(3, columns)
        x = x.unflatten(3, (count, size[2])).movedim(3, 1)
        return x.reshape(-1, math.prod(size), *x.shape[-2:])

    y = torch.empty_like(q)
    for (t, frame), (r, row) in itertools.product(enumerate(begins[0]), enumerate(begins[1])):
        queries = line(q, frame, row, block, columns_q)
        keys, values = (line(x, boxes[0][t], boxes[1][r], box, columns_k) for x in (k, v))
        mask = (
            masks[0][t][:, None, None, :, None, None]
            & masks[1][r][:, None, None, :, None]
            & masks[2][:, None, None, :, None, None, :]
        )
        mask = mask.reshape(count, 1, queries.shape[1], keys.shape[1]).repeat(len(q), 1, 1, 1)
        found = device_of(q).attention(queries, keys, values, mask, scale)
        found = found.reshape(len(q), count, *block, *q.shape[4:]).movedim(1, 3).flatten(3, 4)
        y[:, frame : frame + block[0], row : row + block[1]] = found.index_select(3, once)
    return y
