"""Blocks of video tokens, and which of them see each other in sparse self-attention.

Tokens are put in the order of tiles of the latent grid, so that a block of tokens that follow one
another is a box of the clip. Every block sees the same number of blocks, those nearest to it; what
is no token of the clip's own, and a first frame that is given, come first, see all and are seen by
all. One order and one table for all heads, all layers, both backends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

BLOCK = 512  # tokens: what kernels multiply at once
TILE = (8, 12, 6)  # frames, rows and columns of a tile of about BLOCK tokens
# Frames, rows and columns that are equally far: a third and a quarter of the window of STA (arXiv
# 2502.04507), 18 x 24 x 24.
UNITS = (3.0, 4.0, 4.0)
LEAST_BLOCKS = 8  # fewer blocks in a stage leave nothing to choose from
DENSE_FROM = 0.9  # noise level from which on every token sees all; Sol-Attn (2607.24027) has .909


@dataclass(frozen=True)
class Blocks:
    """The sizes of sparse self-attention in a graph.

    size: tokens of a block. kept: blocks that each block sees, itself included. ends: blocks at the
    front that see all, and are among those that each sees. rows: blocks behind these. dense: layers
    of the transformer in which every token sees all. measured: attention is dense everywhere, and
    the graph's result `video_recall` (layers, B, heads) says what sparse attention would have seen.
    """

    size: int
    kept: int
    ends: int
    rows: int
    dense: tuple[int, ...] = (0,)
    measured: bool = False


@dataclass(frozen=True)
class Density:
    """The user's choice. share: share of the blocks that each token sees; block: tokens in a block;
    dense: layers in which every token sees all. measured: as in `Blocks`."""

    share: float
    block: int = BLOCK
    dense: tuple[int, ...] = (0,)
    measured: bool = False


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """order int32[T]: the tokens in the order of their blocks. table int32[rows, kept]: the blocks
    that each block sees, ascending."""

    blocks: Blocks
    order: np.ndarray
    table: np.ndarray

    @property
    def inverse(self) -> np.ndarray:
        return np.argsort(self.order)


def tile(block: int) -> tuple[int, int, int]:
    """The tile for blocks of so many tokens: TILE, its axes halved in turn."""
    halvings = round(math.log2(BLOCK / block))
    frames, rows, columns = (
        max(side >> (halvings + 2 - axis) // 3, 1) for axis, side in enumerate(TILE)
    )
    return frames, rows, columns


def block_plan(grid: tuple[int, int, int], fixed: np.ndarray, density: Density) -> BlockPlan | None:
    """grid: latent frames, rows and columns of the clip, whose tokens come first. fixed: bool[T],
    tokens that see all. None where every token sees all anyway."""
    size, count = density.block, math.prod(grid)
    blocks = -(-len(fixed) // size)
    ends = -(-int(fixed.sum()) // size)
    rows = blocks - ends
    kept = ends + math.ceil(density.share * rows)
    if blocks < LEAST_BLOCKS or kept >= blocks:
        return None
    places = np.full((len(fixed), 3), -1)
    places[:count] = np.indices(grid).reshape(3, -1).T
    sides = tile(size)
    keys = np.concatenate([places // sides, places % sides], axis=1)
    own = np.flatnonzero(~fixed)
    order = np.append(np.flatnonzero(fixed), own[np.lexsort(keys[own].T[::-1])])
    starts = np.arange(ends, blocks) * size
    sums = np.add.reduceat(places[order].astype(np.float64), starts, axis=0)
    centres = sums / np.diff(np.append(starts, len(order)))[:, None]
    table = np.empty((rows, kept), np.int32)
    table[:, :ends] = np.arange(ends)
    for row, centre in enumerate(centres):
        # Distances that differ by rounding alone are equal.
        distance = np.square((centres - centre) / UNITS).sum(axis=1).round(9)
        distance[row] = -1
        nearest = np.argsort(distance, kind="stable")[: kept - ends]
        table[row, ends:] = ends + np.sort(nearest)
    found = Blocks(size, kept, ends, rows, density.dense, density.measured)
    return BlockPlan(found, order.astype(np.int32), table)
