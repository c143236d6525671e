"""Changes of matrices by few numbers, as LoRA, LoHa and LoKr files hold them.

Each is Delta W[out, in] = scale * the elementwise product of its terms up[out, r] @ down[r, in]:

| kind | tensors of a module | terms | scale |
|---|---|---|---|
| LoRA | `lora_A` [r, in], `lora_B` [out, r] | (B, A) | alpha / r |
| LoHa | `hada_w1_a` [out, r], `hada_w1_b` [r, in], `hada_w2_a`, `hada_w2_b` | (w1_a, w1_b), \
(w2_a, w2_b) | alpha / r |
| LoKr | `lokr_w1` [o1, i1], or `_a` [o1, r] and `_b` [r, i1]; `lokr_w2` [o2, i2] likewise | \
kron(w1, w2) is w1 with every row and column repeated o2 and i2 times, times w2 over and over | \
alpha / r of w2, else of w1; 1 if both are whole |

Without `alpha` the scale is 1. Where a LoKr has no factor it has no rank either, and trainers write
any alpha there. Sources: LyCORIS (arXiv 2108.06098, 2309.14859) and its files. Reading keys is
decided in `lora`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.graph.ir import Cut
from ltx2rt.weights.files import TensorFile, selected

STORED = tuple(map(np.dtype, (ml_dtypes.bfloat16, np.float32, np.float16, np.float64)))


class Factors(NamedTuple):
    """Delta W = scale * the elementwise product of the terms (up[out, r], down[r, in])."""

    terms: tuple[tuple[np.ndarray, np.ndarray], ...]
    scale: float


class Change(Protocol):
    """Delta W of one matrix. scale: strength times the file's own. rank: 0 if it has none."""

    kind: ClassVar[str]

    @property
    def scale(self) -> float: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def rank(self) -> int: ...
    def factors(self, file: TensorFile, cuts: tuple[Cut, ...]) -> Factors:
        """Those of the slice of Delta W that the cuts leave."""
        ...


@dataclass(frozen=True)
class Products:
    """The elementwise product of one (LoRA) or two (LoHa) products. terms: keys of (up, down)."""

    kind: ClassVar[str] = "LoRA"
    terms: tuple[tuple[str, str], ...]
    scale: float
    shape: tuple[int, int]
    rank: int

    def factors(self, file: TensorFile, cuts: tuple[Cut, ...]) -> Factors:
        rows, columns = ([c for c in cuts if c[0] == dim] for dim in (0, 1))
        terms = ((file.read(up, *rows), file.read(down, *columns)) for up, down in self.terms)
        return Factors(tuple(terms), self.scale)


class Pair(Products):
    """LoRA."""

    @property
    def up(self) -> str:
        return self.terms[0][0]

    @property
    def down(self) -> str:
        return self.terms[0][1]


class Hadamard(Products):
    """LoHa."""

    kind: ClassVar[str] = "LoHa"


@dataclass(frozen=True)
class Kronecker:
    """LoKr. w1, w2: the key of a whole factor, or those of its up and down. second: the shape of
    w2."""

    kind: ClassVar[str] = "LoKr"
    w1: tuple[str, ...]
    w2: tuple[str, ...]
    scale: float
    shape: tuple[int, int]
    second: tuple[int, int]
    rank: int

    def factors(self, file: TensorFile, cuts: tuple[Cut, ...]) -> Factors:
        rows, columns = (np.array(selected(n, dim, cuts)) for dim, n in enumerate(self.shape))
        o2, i2 = self.second

        def term(keys: tuple[str, ...], rows: np.ndarray, columns: np.ndarray) -> tuple:
            up, *down = map(file.read, keys)
            chosen = down[0] if down else np.eye(up.shape[1], dtype=up.dtype)
            return up[rows], chosen[:, columns]

        first = term(self.w1, rows // o2, columns // i2)
        return Factors((first, term(self.w2, rows % o2, columns % i2)), self.scale)


def change_of(file: TensorFile, module: str, parts: Mapping[str, str], strength: float) -> Change:
    """The change of a module. parts: its keys, by `up`, `down`, `alpha` and the names in the table.

    Raises InputError.
    """
    infos = {part: file.info(key) for part, key in parts.items()}
    for part, info in infos.items():
        if info.dtype not in STORED:
            raise InputError(
                f"{file.path}: {parts[part]} is {info.dtype}, expected "
                f"{', '.join(map(str, STORED))}"
            )

    def product(up: str, down: str) -> tuple[tuple[str, str], tuple[int, int], int]:
        """Keys, shape and rank of up @ down."""
        a, b = infos[down].shape, infos[up].shape
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] == 0:
            raise InputError(
                f"{file.path}: {parts[down]} {list(a)} and {parts[up]} {list(b)} are no pair "
                "[rank, in], [out, rank]"
            )
        return (parts[up], parts[down]), (b[0], a[1]), a[0]

    def factor(name: str) -> tuple[tuple[str, ...], tuple[int, int], int]:
        if f"{name}_a" in parts:
            return product(f"{name}_a", f"{name}_b")
        shape = infos[name].shape
        if len(shape) != 2:
            raise InputError(f"{file.path}: {parts[name]} is {list(shape)}, expected [out, in]")
        return (parts[name],), (shape[0], shape[1]), 0

    def scale(rank: int) -> float:
        return strength * (_alpha(file, parts["alpha"]) / rank if "alpha" in parts and rank else 1)

    names = parts.keys() - {"alpha"}
    if names == {"up", "down"}:
        keys, shape, rank = product("up", "down")
        return Pair((keys,), scale(rank), shape, rank)
    if names == {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}:
        first, shape, rank = product("hada_w1_a", "hada_w1_b")
        second, same, _ = product("hada_w2_a", "hada_w2_b")
        if shape != same:
            raise InputError(
                f"{file.path}: the two products of {module} are {list(shape)} and {list(same)}, "
                "expected one shape"
            )
        return Hadamard((first, second), scale(rank), shape, rank)
    wholes = [
        {f"lokr_{w}"} if f"lokr_{w}" in names else {f"lokr_{w}_a", f"lokr_{w}_b"}
        for w in ("w1", "w2")
    ]
    if names == wholes[0] | wholes[1]:
        w1, (o1, i1), rank1 = factor("lokr_w1")
        w2, second, rank2 = factor("lokr_w2")
        shape, rank = (o1 * second[0], i1 * second[1]), rank2 or rank1
        return Kronecker(w1, w2, scale(rank), shape, second, rank)
    raise InputError(
        f"{file.path}: {module} has {', '.join(sorted(names))}, which is no whole LoRA, LoHa or "
        "LoKr; pass another file"
    )


def _alpha(file: TensorFile, key: str) -> float:
    value = file.read(key).astype(np.float32)
    if value.size != 1 or not np.isfinite(value).all():
        raise InputError(
            f"{file.path}: {key} has shape {list(value.shape)}, expected one finite number"
        )
    return float(value.reshape(()))
