"""Tensor sources made of files: with quantised matrices read as float32 and their companions
hidden, under other names, or with rows joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.graph.encodings import decoded
from ltx2rt.graph.ir import Cut
from ltx2rt.weights.configs.keys import parse_json
from ltx2rt.weights.files import (
    Gathered,
    TensorFile,
    TensorFolder,
    TensorInfo,
    TensorReader,
    cut,
    selected,
)
from ltx2rt.weights.quant.formats import HEADER, cast, recipe, refusal
from ltx2rt.weights.quant.packed import (
    COMPANIONS,
    DESCRIPTIONS,
    F32,
    SMALL_FLOATS,
    Fields,
    Matrix,
    Recipe,
)  # fmt: skip

MARK = "scaled_fp8"
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.")


class Dequantised:
    """Files that read quantised matrices as float32 and hide their companions."""

    def __init__(self, file: TensorFile | TensorFolder):
        """Raises InputError for companions and descriptions that do not fit their matrix."""
        self.file, self.path, self.metadata = file, file.path, file.metadata
        children: dict[str, set[str]] = {}
        for name in file.names():
            stem, _, child = name.rpartition(".")
            children.setdefault(stem, set()).add(child)
        described = _header(file, children)
        self._recipes: dict[str, Recipe] = {}
        self._hidden: set[str] = set()
        for stem, own in children.items():
            if "weight" not in own:
                continue
            matrix = Matrix(file, stem, frozenset(own), described.get(stem, {}), bool(described))
            if found := recipe(matrix):
                self._recipes[matrix.name] = found
            if found or matrix.idle_scale():
                self._hidden |= {f"{stem}.{child}" for child in own & {*COMPANIONS, *DESCRIPTIONS}}
        for name in () if not self._recipes else file.names():
            if name.rpartition(".")[2] == MARK:
                self._hidden.add(name)
            if name not in self._recipes and file.info(name).dtype in SMALL_FLOATS:
                self._recipes[name] = cast(file, name)

    def names(self) -> Iterable[str]:
        return (name for name in self.file.names() if name not in self._hidden)

    def info(self, name: str) -> TensorInfo:
        found = self._recipes.get(name)
        return found.packed if found else self.file.info(name)

    def read(self, name: str, *cuts: Cut) -> np.ndarray:
        """The matrix, or a slice of it; only the slice's bytes are read."""
        if name not in self._recipes:
            return self.file.read(name, *cuts)
        packed, fields, decode = self._recipes[name]
        if len(packed.shape) != 2:
            (scale,) = fields((0, 0, 1), (1, 0, 1))
            return self.file.read(name, *cuts).astype(F32) * scale
        rows, columns = (selected(size, dim, cuts) for dim, size in enumerate(packed.shape))
        start = columns.start // packed.group * packed.group
        stop = -(-columns.stop // packed.group) * packed.group
        array = decoded(decode, fields((0, rows.start, rows.stop), (1, start, stop)))
        array = array[:, columns.start - start : columns.stop - start]
        factors = f"{name.removesuffix('weight')}pre_quant_scale"
        if factors in self._hidden:
            array = array * self.file.read(factors, (0, columns.start, columns.stop)).astype(F32)
        return array

    def stored(self, format: str, name: str, *cuts: Cut) -> Fields | None:
        """The fields as stored; None if it is not stored in the format."""
        found = self._recipes.get(name)
        if found is None or found.packed.stored_as != format:
            return None
        rows, columns = (selected(n, dim, cuts) for dim, n in enumerate(found.packed.shape))
        return found.fields((0, rows.start, rows.stop), (1, columns.start, columns.stop))


def dequantised(file: Any) -> Any:
    """The source as `Dequantised` if it is a file with quantised matrices, else unchanged."""
    if not isinstance(file, (TensorFile, TensorFolder)):
        return file
    found = Dequantised(file)
    return found if found._recipes or found._hidden else file


# ---- descriptions --------------------------------------------------------------------------------


def _header(file: TensorFile | TensorFolder, stems: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Descriptions in headers by module, whatever prefix they leave out. Raises InputError."""
    stems, found = set(stems), {}
    for one in file.files if isinstance(file, TensorFolder) else [file]:
        if (text := one.metadata.get(HEADER)) is None:
            continue
        data = parse_json(text, f"{one.path}: {HEADER}").data
        layers = data.get("layers", data)
        unknown = [
            key for key in data if layers is not data and key not in ("layers", "format_version")
        ]
        if unknown or not isinstance(layers, dict):
            raise refusal(f"{one.path}: {HEADER}", f"key {(unknown or ['layers'])[0]!r:.80}")
        for layer, said in layers.items():
            names = [layer, *(p + layer for p in PREFIXES)]
            names += [layer.removeprefix(p) for p in PREFIXES]
            stem = next((name for name in names if name in stems), layer)
            found[stem] = {"format": said} if isinstance(said, str) else said
    return found


# ---- sources that are made of others -------------------------------------------------------------


class RenamedSource(Gathered):
    """Part of one or more sources, under canonical names."""

    def __init__(self, where: Path, home: Mapping[str, tuple[TensorReader, str]]):
        super().__init__(home)
        self.where = where

    def joined(self, other: RenamedSource, names: Iterable[str]) -> RenamedSource:
        return RenamedSource(self.where, self._home | {name: other._home[name] for name in names})


@dataclass(frozen=True)
class JoinedRows:
    """Tensors of a source as one, row after row. joined: the parts of each."""

    source: TensorReader
    joined: Mapping[str, tuple[str, ...]]

    def names(self) -> Iterable[str]:
        return self.joined

    def info(self, name: str) -> TensorInfo:
        first, *more = map(self.source.info, self.joined[name])
        rows = first.shape[0] + sum(info.shape[0] for info in more)
        return TensorInfo((rows, *first.shape[1:]), first.dtype)

    def read(self, name: str, *cuts: Cut) -> np.ndarray:
        return cut(np.concatenate([*map(self.source.read, self.joined[name])]), *cuts)


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
