"""Tensor sources that are made of others: under other names, or with rows joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.graph.ir import Cut
from ltx2rt.weights.files import TensorInfo, TensorReader, cut
from ltx2rt.weights.quant_formats import Fields
from ltx2rt.weights.quantised import dequantised, stored_fields


class RenamedSource:
    """Part of one or more sources, under canonical names."""

    def __init__(self, where: Path, home: Mapping[str, tuple[TensorReader, str]]):
        self.where, self._home = where, dict(home)

    def names(self) -> Iterable[str]:
        return self._home.keys()

    def info(self, name: str) -> TensorInfo:
        source, stored = self._home[name]
        return source.info(stored)

    def read(self, name: str, *cuts: Cut) -> np.ndarray:
        source, stored = self._home[name]
        return source.read(stored, *cuts)

    def stored(self, format: str, name: str, *cuts: Cut) -> Fields | None:
        source, stored = self._home[name]
        return stored_fields(source, format, stored, *cuts)

    def joined(self, other: RenamedSource, names: Iterable[str]) -> RenamedSource:
        return RenamedSource(self.where, self._home | {name: other._home[name] for name in names})


class JoinedRows:
    """A source in which some tensors of another are one, row after row."""

    def __init__(self, source: TensorReader, joined: Mapping[str, tuple[str, ...]]):
        self._source, self._joined = source, dict(joined)

    def names(self) -> Iterable[str]:
        gone = {part for parts in self._joined.values() for part in parts}
        return [*(name for name in self._source.names() if name not in gone), *self._joined]

    def info(self, name: str) -> TensorInfo:
        if name not in self._joined:
            return self._source.info(name)
        first, *more = (self._source.info(part) for part in self._joined[name])
        return TensorInfo(
            (first.shape[0] + sum(i.shape[0] for i in more), *first.shape[1:]), first.dtype
        )

    def read(self, name: str, *cuts: Cut) -> np.ndarray:
        if name not in self._joined:
            return self._source.read(name, *cuts)
        return cut(np.concatenate([self._source.read(part) for part in self._joined[name]]), *cuts)


def renamed(
    tensors: TensorReader, where: Path, canonical: Callable[[str], str | None]
) -> RenamedSource:
    """canonical: a tensor's name, None leaves it out. Raises InputError for two of one name."""
    home: dict[str, tuple[TensorReader, str]] = {}
    tensors = dequantised(tensors)
    for stored in tensors.names():
        name = canonical(stored)
        if name is None:
            continue
        if name in home:
            raise InputError(f"{where}: {home[name][1]} and {stored} are two spellings of {name}")
        home[name] = (tensors, stored)
    return RenamedSource(where, home)
