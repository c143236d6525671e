"""Changes of tensors, as LoRA, DoRA, LoHa and LoKr files hold them.

Low-rank ones are Delta W[out, in] = scale * the elementwise product of terms up[out, r] @
down[r, in]:

| kind | tensors of a module | terms | scale |
|---|---|---|---|
| LoRA | `lora_A` [r, in], `lora_B` [out, r] | (B, A) | alpha / r |
| LoHa | `hada_w1_a` [out, r], `hada_w1_b` [r, in], `hada_w2_a`, `hada_w2_b` | (w1_a, w1_b), \
(w2_a, w2_b) | alpha / r |
| LoKr | `lokr_w1` [o1, i1], or `_a` [o1, r] and `_b` [r, i1]; `lokr_w2` [o2, i2] likewise | \
kron(w1, w2) is w1 with every row and column repeated o2 and i2 times, times w2 over and over | \
alpha / r of w2, else of w1; 1 if both are whole |

Without `alpha` the scale is that of the file's config (`lora_config`), else 1. Where a LoKr has no
factor it has no rank either, and trainers write any alpha there.

| kind | result at strength 1 |
|---|---|
| DoRA | V = W + Delta W; W' = m V / |V|, the norm over a row's inputs if m is [out] or \
[out, 1], over a column's outputs if it is [1, in] |
| difference, of any tensor | W' = W + D |
| whole tensor | W' is the tensor in the file |

At another strength s it is W + s (W' - W). Sources: LyCORIS (arXiv 2108.06098, 2309.14859) and its
files, DoRA (arXiv 2402.09353), PEFT's and ComfyUI's code. Reading keys is decided in `lora`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import mul
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.graph.encodings import E4M3, E5M2
from ltx2rt.graph.ir import Cut
from ltx2rt.weights.files import TensorFile, selected

# Eight bits are casts, which have no scale.
STORED = [np.dtype(kind) for kind in (ml_dtypes.bfloat16, "f4", "f2", "f8", E4M3, E5M2)]
FACTORS = {"up", "down", *(f"hada_w{i}_{half}" for i in "12" for half in "ab")}
FACTORS |= {f"lokr_w{i}{half}" for i in "12" for half in ("", "_a", "_b")}
# Parts that are a tensor: which one of the module they change, and whether they take its place.
TENSORS = {
    "diff": ("weight", False),
    "whole": ("weight", True),
    "up_bias": ("bias", False),
    "diff_b": ("bias", False),
    "whole_b": ("bias", True),
}
TINY = 1e-30  # the least norm of a row; a row of zeros stays one


class Factors(NamedTuple):
    """Delta W = scale * the elementwise product of the terms (up[out, r], down[r, in])."""

    terms: tuple[tuple[np.ndarray, np.ndarray], ...]
    scale: float

    def product(self) -> np.ndarray:
        """Delta W in float32."""
        wide = (tuple(half.astype(np.float32) for half in term) for term in self.terms)
        return np.float32(self.scale) * reduce(mul, (up @ down for up, down in wide))


@dataclass(frozen=True)
class Change(ABC):
    """A change of one tensor."""

    kind: str  # such as "LoRA"
    scale: float  # strength times the file's own
    shape: tuple[int, ...]  # the tensor's
    rank: int  # 0 if it has none

    @abstractmethod
    def applied(self, file: TensorFile, weight: np.ndarray) -> np.ndarray:
        """The changed tensor, float32 as `weight` is."""


@dataclass(frozen=True)
class LowRank(Change):
    """A change that is a sum of products, which backends add to a slice of a weight."""

    shape: tuple[int, int]

    @abstractmethod
    def factors(self, file: TensorFile, cuts: tuple[Cut, ...]) -> Factors:
        """The factors of the slice of Delta W that the cuts leave."""

    def applied(self, file: TensorFile, weight: np.ndarray) -> np.ndarray:
        return weight + self.factors(file, ()).product()


@dataclass(frozen=True)
class Products(LowRank):
    """The elementwise product of products, two for a LoHa. terms: keys of (up, down)."""

    terms: tuple[tuple[str, str], ...]

    def factors(self, file: TensorFile, cuts: tuple[Cut, ...]) -> Factors:
        rows, columns = ([c for c in cuts if c[0] == dim] for dim in (0, 1))
        terms = ((_read(file, up, *rows), _read(file, down, *columns)) for up, down in self.terms)
        return Factors(tuple(terms), self.scale)


class Pair(Products):
    """LoRA: one product."""


@dataclass(frozen=True)
class Kronecker(LowRank):
    """LoKr. w1, w2: keys of a whole factor, or of its up and down. second: w2's shape."""

    w1: tuple[str, ...]
    w2: tuple[str, ...]
    second: tuple[int, int]

    def factors(self, file: TensorFile, cuts: tuple[Cut, ...]) -> Factors:
        rows, columns = (np.array(selected(n, dim, cuts)) for dim, n in enumerate(self.shape))
        o2, i2 = self.second

        def term(keys: tuple[str, ...], rows: np.ndarray, columns: np.ndarray) -> tuple:
            up, *down = (_read(file, key) for key in keys)
            chosen = down[0] if down else np.eye(up.shape[1], dtype=up.dtype)
            return up[rows], chosen[:, columns]

        first = term(self.w1, rows // o2, columns // i2)
        return Factors((first, term(self.w2, rows % o2, columns % i2)), self.scale)


@dataclass(frozen=True)
class Decomposed(Change):
    """DoRA."""

    change: LowRank  # Delta W without the strength
    magnitude: str  # the key of m
    axis: int  # that the norm sums over
    base_norm: bool  # m is divided by |W| in place of |V|, as ComfyUI divides one of [out, 1]

    def applied(self, file: TensorFile, weight: np.ndarray) -> np.ndarray:
        moved = self.change.applied(file, weight)
        of = weight if self.base_norm else moved
        norm = np.sqrt(np.einsum("oi,oi->" + "oi"[1 - self.axis], of, of, dtype=np.float64))
        magnitude = file.read(self.magnitude).astype(np.float32).reshape(-1)
        factor = (magnitude / np.maximum(norm, TINY)).astype(np.float32)
        moved *= np.expand_dims(factor, self.axis)
        return moved if self.scale == 1 else weight + np.float32(self.scale) * (moved - weight)


@dataclass(frozen=True)
class Difference(Change):
    """A tensor that is added, or that takes the place of the model's (whole)."""

    shape: tuple[int, ...]
    key: str
    whole: bool

    def applied(self, file: TensorFile, weight: np.ndarray) -> np.ndarray:
        value = file.read(self.key).astype(np.float32).reshape(self.shape)
        if self.whole and self.scale == 1:
            return value
        return weight + np.float32(self.scale) * (value - weight if self.whole else value)


def _read(file: TensorFile, key: str, *cuts: Cut) -> np.ndarray:
    """A factor; one of eight bits as bfloat16, which holds its numbers."""
    found = file.read(key, *cuts)
    return found.astype(ml_dtypes.bfloat16) if found.itemsize == 1 else found


def own_scale(change: Change) -> float:
    """The scale of a change that was opened at strength 1, without a magnitude: alpha / r."""
    return (change.change if isinstance(change, Decomposed) else change).scale


def changes_of(
    file: TensorFile,
    module: str,
    parts: Mapping[str, str],
    strength: float,
    stated: Callable[[int], float | None],
    base_norm: bool,
) -> dict[str, Change]:
    """The changes of a module's `weight` and `bias`. parts: its keys, by the parts of `keys`.
    stated: the scale that the file's config gives for a rank. Raises InputError."""
    for part, key in parts.items():
        if part != "alpha" and (dtype := file.info(key).dtype) not in STORED:
            raise InputError(
                f"{file.path}: {key} is {dtype}, expected {', '.join(map(str, STORED))}"
            )

    def scale(rank: int, own: int) -> float:
        """own: the rank that the config's has to be, 0 for any."""
        if "alpha" in parts:
            return _alpha(file, parts["alpha"]) / rank if rank else 1.0
        found = stated(own)
        return 1.0 if found is None else found

    found: dict[str, list[Change]] = {"weight": [], "bias": []}
    factors = {part: key for part, key in parts.items() if part in FACTORS}
    low = _low_rank(file, module, factors, scale) if factors else None
    if low is not None and (key := parts.get("magnitude")):
        axis = _axis(file, key, low.shape)
        by_base = base_norm and axis == 1
        found["weight"].append(
            Decomposed("DoRA", strength, low.shape, low.rank, low, key, axis, by_base)
        )
    elif low is not None:
        found["weight"].append(replace(low, scale=strength * low.scale))
    elif "magnitude" in parts:
        raise InputError(f"{file.path}: {parts['magnitude']} has no pair; pass another file")
    for part, (tensor, whole) in TENSORS.items():
        if part in parts:
            own = low.scale if part == "up_bias" and low is not None else 1
            shape = file.info(parts[part]).shape
            changed = Difference("difference", strength * own, shape, 0, parts[part], whole)
            found[tensor].append(changed)
    if twice := [tensor for tensor, several in found.items() if len(several) > 1]:
        named = ", ".join(sorted(parts.values()))
        raise InputError(f"{file.path}: {named} change one {twice[0]} in several ways")
    return {tensor: several[0] for tensor, several in found.items() if several}


def _low_rank(
    file: TensorFile, module: str, parts: Mapping[str, str], scale: Callable[[int, int], float]
) -> LowRank:
    """The change of a LoRA, LoHa or LoKr without its strength."""
    shapes = {part: file.info(key).shape for part, key in parts.items()}

    def product(up: str, down: str) -> tuple[tuple[str, str], tuple[int, int], int]:
        """Keys, shape and rank of up @ down."""
        a, b = shapes[down], shapes[up]
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] == 0:
            raise InputError(
                f"{file.path}: {parts[down]} {list(a)} and {parts[up]} {list(b)} are no pair "
                "[rank, in], [out, rank]"
            )
        return (parts[up], parts[down]), (b[0], a[1]), a[0]

    def factor(name: str) -> tuple[tuple[str, ...], tuple[int, int], int]:
        if f"{name}_a" in parts:
            return product(f"{name}_a", f"{name}_b")
        shape = shapes[name]
        if len(shape) != 2:
            raise InputError(f"{file.path}: {parts[name]} is {list(shape)}, expected [out, in]")
        return (parts[name],), (shape[0], shape[1]), 0

    names = set(parts)
    if names == {"up", "down"}:
        keys, shape, rank = product("up", "down")
        return Pair("LoRA", scale(rank, rank), shape, rank, (keys,))
    if names == {f"hada_w{i}_{half}" for i in "12" for half in "ab"}:
        first, shape, rank = product("hada_w1_a", "hada_w1_b")
        second, same, _ = product("hada_w2_a", "hada_w2_b")
        if shape != same:
            said = f"are {list(shape)} and {list(same)}, expected one shape"
            raise InputError(f"{file.path}: the two products of {module} {said}")
        return Products("LoHa", scale(rank, 0), shape, rank, (first, second))
    wholes = [
        {f"lokr_{w}"} if f"lokr_{w}" in names else {f"lokr_{w}_a", f"lokr_{w}_b"}
        for w in ("w1", "w2")
    ]
    if names == wholes[0] | wholes[1]:
        w1, (o1, i1), rank1 = factor("lokr_w1")
        w2, second, rank2 = factor("lokr_w2")
        shape, rank = (o1 * second[0], i1 * second[1]), rank2 or rank1
        return Kronecker("LoKr", scale(rank, 0), shape, rank, w1, w2, second)
    said = f"{file.path}: {module} has {', '.join(sorted(parts.values()))}, which is no whole LoRA,"
    raise InputError(f"{said} LoHa or LoKr; pass another file")


def _axis(file: TensorFile, key: str, shape: tuple[int, int]) -> int:
    """The axis that a magnitude's norms sum over, 1 for one number of each row."""
    own = file.info(key).shape
    for axis, expected in ((1, [(shape[0],), (shape[0], 1)]), (0, [(1, shape[1])])):
        if own in expected:
            return axis
    expected = f"[{shape[0]}], [{shape[0]}, 1] or [1, {shape[1]}]"
    raise InputError(f"{file.path}: {key} is {list(own)}, expected {expected}")


def _alpha(file: TensorFile, key: str) -> float:
    value = file.read(key).astype(np.float32)
    if value.size != 1 or not np.isfinite(value).all():
        raise InputError(
            f"{file.path}: {key} has shape {list(value.shape)}, expected one finite number"
        )
    return float(value.reshape(()))
