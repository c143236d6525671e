"""LoRAs that stay apart from the weights: adapters of a graph, and their values. The factors of
several LoRAs become one pair for each linear: joined along the rank, with zeros up to a power of
two, so that LoRAs of equal targets share a program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ltx2rt.backend import TensorSource
from ltx2rt.errors import InputError
from ltx2rt.graph.ir import Cut
from ltx2rt.passes.adapters import MARK, Adapters, starred, tensors
from ltx2rt.weights.files import cut, stored_fields
from ltx2rt.weights.lora.changes import Pair
from ltx2rt.weights.lora.file import Lora, MergedSource
from ltx2rt.weights.names import collapse
from ltx2rt.weights.quant.packed import Fields

LEAST_RANK = 8
BLOCKS = "transformer_blocks."


class WithAdapters:
    """A tensor source and the values of adapters."""

    def __init__(self, source: TensorSource, arrays: Mapping[str, np.ndarray]):
        self.source, self.arrays = source, arrays

    def names(self) -> Iterable[str]:
        return [*self.source.names(), *self.arrays]

    def info(self, name: str) -> Any:
        return self.arrays[name] if name in self.arrays else self.source.info(name)

    def read(self, name: str, *cuts: Cut) -> Any:
        own = name in self.arrays
        return cut(self.arrays[name], *cuts) if own else self.source.read(name, *cuts)

    def stored(self, format: str, name: str, *cuts: Cut) -> Fields | None:
        return stored_fields(self.source, format, name, *cuts)


@dataclass(frozen=True)
class LoraAdapters(Mapping[str, np.ndarray]):
    """Adapters of LoRAs on a source's weights, and a mapping of their parameters' names to values,
    float32, that reads them when asked: A [rank, in] and B [out, rank], which has the strength and
    alpha / rank. changes: of each LoRA, by weight. blocks: how many the transformer has."""

    source: TensorSource
    loras: tuple[Lora, ...]
    changes: tuple[Mapping[str, Pair], ...]
    adapters: Adapters
    blocks: int

    def __getitem__(self, name: str) -> np.ndarray:
        module, half = name.removesuffix(".weight").split(MARK)
        shape, at = self.source.info(f"{module}.weight").shape, 0
        size = (self.adapters.rank, shape[1]) if half == "A" else (shape[0], self.adapters.rank)
        found = np.zeros(size, np.float32)
        for lora, changes in zip(self.loras, self.changes, strict=True):
            if change := changes.get(f"{module}.weight"):
                (((up, down),), scale) = change.factors(lora.file, ())
                own = slice(at, at := at + len(down))
                if half == "A":
                    found[own] = down
                else:
                    found[:, own] = np.asarray(up, np.float32) * np.float32(scale)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(tensors(self.adapters.targets, self.blocks))

    def __len__(self) -> int:
        return 2 * len(self.adapters.targets) * self.blocks

    def __contains__(self, name: object) -> bool:
        return MARK in str(name)


def beside(
    source: TensorSource,
    loras: Sequence[Lora],
    dtype: str,
    blocks: int,
    allow_partial: bool = False,
) -> LoraAdapters:
    """Raises InputError for LoRAs of another model, and of more than the blocks' linears."""
    fitting = MergedSource(source, loras, dtype, allow_partial=allow_partial).fitting
    found: list[dict[str, Pair]] = []
    for lora, names in zip(loras, fitting, strict=True):
        changes = {name: c for name in names if isinstance(c := lora.changes[name], Pair)}
        elsewhere = sorted(name for name in names if BLOCKS not in name)
        if elsewhere or len(changes) < len(names):
            what = f"also changes {collapse(elsewhere)}" if elsewhere else f"is a {lora.kind}"
            raise InputError(
                f"--lora-mode unmerged: {lora.path} {what}, and LoRAs of the blocks' linears alone "
                "stay apart; pass --lora-mode merged"
            )
        found.append(changes)
    touched = set().union(*found)
    rank = max(sum(c[name].rank for c in found if name in c) for name in touched)
    rank = max(LEAST_RANK, 1 << (rank - 1).bit_length())
    targets = frozenset(starred(name.removesuffix(".weight")) for name in touched)
    adapters = Adapters(targets, rank, dtype=dtype)
    return LoraAdapters(source, tuple(loras), tuple(found), adapters, blocks)
