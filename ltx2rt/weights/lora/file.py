"""LoRA files, and a tensor source that merges them while its tensors are read.

Decides which tensor each change belongs to and the order of rounding; its numbers are in `changes`.
One tensor is in memory at a time; a backend merges it on its own device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import product
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ltx2rt.atomic_file import check_outputs
from ltx2rt.errors import InputError
from ltx2rt.graph.ir import Cut
from ltx2rt.release import of_version, stated, version_tuple
from ltx2rt.weights.files import (
    TensorFile,
    TensorInfo,
    TensorReader,
    cut,
    stored_fields,
    write_tensors,
)
from ltx2rt.weights.lora.changes import Change, Factors, LowRank, changes_of
from ltx2rt.weights.lora.config import lora_file, read_config
from ltx2rt.weights.lora.keys import FORMS, holds_lora, parse, writer
from ltx2rt.weights.lora.names import UNREAD, bare, part_of, target, unfused
from ltx2rt.weights.names import collapse
from ltx2rt.weights.part_table import PARTS, TEXT_PROJECTION
from ltx2rt.weights.quant.packed import Fields

if TYPE_CHECKING:
    from ltx2rt.weights.checkpoint import Checkpoint

# As `merge`; a backend's returns the result on its device.
Merging = Callable[[np.ndarray, Sequence[Factors], bool], Any]
MAX_SCALE = 1000.0  # beyond any use; float32 overflows far above it
NUM_CHUNKS = 16  # chunks of a weight's rows; more are less memory and slower products
BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
# Tensors of a fused LoRA. SHARED: common to all projections. ROWS: split by rows.
SHARED = ("down", "alpha", "norm", "hada_w1_b", "hada_w2_b")
ROWS = (
    "up",
    "up_bias",
    "magnitude",
    "diff",
    "diff_b",
    "whole",
    "whole_b",
    "hada_w1_a",
    "hada_w2_a",
)
# in the header of an IC-LoRA
FACTORS = ("reference_downscale_factor", "reference_temporal_scale_factor")


@dataclass(frozen=True)
class Lora:
    """A LoRA file."""

    path: Path
    strength: float
    file: TensorFile
    changes: dict[str, Change]  # by official name of the tensor
    skipped: tuple[str, ...]  # modules of the text projection; the official code merges none either
    unknown: tuple[str, ...]  # keys that change no tensor of the family
    unread: tuple[str, ...]  # modules of parts of Gemma that no prompt goes through
    writer: str = ""  # the program that made it, if that is known
    alpha_from: str = ""  # the config that has its scale

    @property
    def kind(self) -> str:
        """Such as "LoRA"."""
        return " and ".join(sorted({change.kind for change in self.changes.values()})) or "LoRA"

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a checkpoint that it changes, of "transformer", "text" and "gemma"."""
        found = {part_of(name) for name in self.changes}
        return tuple(part for part in PARTS if part in found)

    def on(self, names: Collection[str]) -> dict[str, Change]:
        """Its changes of the parts that these tensors are of, whether or not a tensor is there."""
        parts = {part_of(name) for name in names}
        return {name: change for name, change in self.changes.items() if part_of(name) in parts}


def modules_of(names: Iterable[str]) -> set[str]:
    """The modules that tensors belong to."""
    return {re.sub(r"\.(?:weight|bias)$", "", name) for name in names}


@dataclass(frozen=True)
class Merge:
    """A count of the modules of a LoRA that were merged."""

    file: str
    strength: float
    matched: int
    total: int
    skipped: int
    kind: str = "LoRA"
    beside: bool = False  # they stay apart from the weights
    parts: frozenset[str] = frozenset()  # those of the checkpoint that they belong to
    alpha_from: str = ""  # the config that has their scale
    unread: int = 0

    def with_parts(self, other: Merge) -> Merge:
        """The modules of both, which are of one LoRA, and of other parts of the checkpoint."""
        if self.parts & other.parts:
            return self
        matched, total = self.matched + other.matched, self.total + other.total
        return replace(self, matched=matched, total=total, parts=self.parts | other.parts)

    def line(self, stage: str = "", role: str = "") -> str:
        """Such as "stage2, distilled: merged 130/130 modules of FILE at strength 1"; without a
        stage: "merged ..."; of those that stay apart: "beside the weights 130/130 ..."."""
        where = ", ".join(filter(None, (stage, role)))
        skipped = f", skipped {self.skipped} of the text projection" if self.skipped else ""
        skipped += f", skipped {self.unread} of Gemma that no prompt reaches" if self.unread else ""
        modules = "modules" if self.kind == "LoRA" else f"{self.kind} modules"
        how = "beside the weights" if self.beside else "merged"
        merged = f"{how} {self.matched}/{self.total} {modules} of {self.file}"
        alpha = f", alpha from {self.alpha_from}" if self.alpha_from else ""
        merged += f" at strength {self.strength:g}{alpha}{skipped}"
        if not self.matched:
            merged += "; it changes nothing, since this run reads none of them"
        return f"{where}: {merged}" if where else merged


class LoraFile(TensorFile):
    """The file of a LoRA. A change of a fused projection is one of each of its projections, which
    share `down` and have their rows of `up`. fused: the module in the file, for each of these."""

    def _header(self) -> tuple[dict[str, str], dict[str, tuple[TensorInfo, int]]]:
        metadata, stored = super()._header()
        found, self.fused = dict(stored), {}
        for name, (info, begin) in stored.items():
            key = parse(name)
            if not key or key.part not in (*SHARED, *ROWS) or not (own := unfused(key.module)):
                continue
            del found[name]
            step = 0
            if key.part in ROWS:
                count, rest = divmod((*info.shape, 0)[0], len(own))
                if rest or not count:
                    raise InputError(
                        f"{self.path}: {name} is {list(info.shape)}, expected rows of "
                        f"{len(own)} projections; pass another file"
                    )
                info = TensorInfo((count, *info.shape[1:]), info.dtype)
                step = info.nbytes
            for i, module in enumerate(own):
                new = module + name.removeprefix(key.module)
                if new in found:
                    raise InputError(f"{self.path}: {name} and {new} change one module")
                found[new] = info, begin + i * step
                self.fused[module] = key.module
        return metadata, found


def open_lora(path: str | Path, strength: float = 1.0) -> Lora:
    """Read a LoRA's header, alphas and config; of a folder its one file. Raises InputError."""
    file = LoraFile(lora_file(Path(path)))
    modules, unknown = _modules(file)
    ranks = {file.info(parts["down"]).shape[:1] for parts in modules.values() if "down" in parts}
    config = read_config(file, {rank for (rank,) in filter(None, ranks)})
    config.check(any("magnitude" in parts for parts in modules.values()))
    # musubi-tuner's files for ComfyUI are made for its norm, which is the base weight's
    base_norm = file.metadata.get("ss_network_module", "").startswith("networks.")
    changes: dict[str, Change] = {}
    skipped, unread, keys = [], [], {}
    for module, parts in modules.items():
        names = {tensor: target(module, tensor) for tensor in ("weight", "bias")}
        named, first = next(filter(None, names.values()), None), min(parts.values())
        if named is None and UNREAD.search(module):
            unread.append(module)
            continue
        if named is None:
            unknown += parts.values()
            continue
        if named.startswith(TEXT_PROJECTION):
            skipped.append(module)
            continue
        stated = partial(config.scale, part_of(named), bare(file.fused.get(module, module)))
        own_norm = base_norm and parts.get("magnitude", "").endswith("dora_scale")
        for tensor, change in changes_of(file, module, parts, strength, stated, own_norm).items():
            if not abs(change.scale) <= MAX_SCALE:  # nan is not
                said = f"scaled by {change.scale:g} at {module}, expected at most {MAX_SCALE:g}"
                raise InputError(f"{path}: {said}; lower its strength")
            name = names[tensor] or f"{named.removesuffix('.weight')}.{tensor}"
            if (other := keys.setdefault(name, first)) != first:
                raise InputError(f"{path}: {other} and {first} both belong to {name}")
            changes[name] = change
    whole = tuple(f"{module}." for module in modules if target(module)) if unknown else ()
    if strange := [key for key in unknown if key.startswith(whole)]:
        said = "belong to modules that are read and change them in a way that is not"
        raise InputError(f"{path}: {collapse(strange)} {said}; {FORMS}")
    if not changes:
        first = min([*unknown, *skipped, *unread], default="no key")
        raise InputError(f"{path}: no LoRA of LTX-2, its first key is {first}; {FORMS}")
    return Lora(
        path=Path(path),
        strength=strength,
        file=file,
        changes=changes,
        skipped=tuple(skipped),
        unknown=tuple(unknown),
        unread=tuple(unread),
        writer=writer(file.metadata, modules),
        alpha_from=config.source,
    )


def _modules(file: TensorFile) -> tuple[dict[str, dict[str, str]], list[str]]:
    """The keys of every module by part, and the keys in no known form. Raises InputError."""
    modules: dict[str, dict[str, str]] = {}
    unknown = []
    if not holds_lora(file.names()):
        first = min(file.names(), default="absent")
        raise InputError(f"{file.path}: no LoRA, its first key is {first}; {FORMS}")
    for name in file.names():
        if (key := parse(name)) is None:
            unknown.append(name)
            continue
        if key.part == "norm":
            continue
        if key.part == "multiplied":
            raise InputError(
                f"{file.path}: {name} is of an OFT, BOFT, GLoRA or (IA)^3, which are not read; pass "
                "a LoRA, DoRA, LoHa or LoKr, or a file of differences (.diff)"
            )
        other = modules.setdefault(key.module, {}).setdefault(key.part, name)
        if other != name:
            raise InputError(f"{file.path}: {other} and {name} are the same part of one module")
    lone = [module for module, parts in modules.items() if parts.keys() == {"alpha"}]
    unknown += [modules.pop(module)["alpha"] for module in sorted(lone)]
    halves = [m for m, parts in modules.items() if len({"up", "down"} & parts.keys()) == 1]
    if halves:
        raise InputError(
            f"{file.path}: {len(halves)} modules have only one half of their pair: "
            f"{collapse(sorted(halves))}"
        )
    return modules, unknown


def reference_factors(paths: Iterable[Path]) -> tuple[int, int]:
    """Factors (space, time) by which references of IC-LoRAs are coarser than the clip; 1 by
    default. Raises InputError unless they are whole numbers that agree."""
    found: dict[str, tuple[int, Path]] = {}
    for path, key in product(paths, FACTORS):
        text = TensorFile(path).metadata.get(key, "1")
        if not re.fullmatch(r"[1-9]\d{0,2}", text):
            raise InputError(
                f"{path}: its {key} is {text[:80]!r}, expected a whole number from 1 to 999"
            )
        if int(text) > 1 and found.setdefault(key, (int(text), path))[0] != int(text):
            first, other = found[key]
            raise InputError(
                f"--lora: {key} is {first} in {other} and {text} in {path}; give LoRAs that agree"
            )
    space, time = (found.get(key, (1, None))[0] for key in FACTORS)
    return space, time


def release_of(path: Path) -> str:
    """The release that a LoRA's header states, else its name; "" for neither. Raises InputError."""
    named = re.search(r"ltx-?(2(?:\.\d)?)", path.name.lower())
    said = {"2": "2.0"}.get(named[1], named[1]) if named else ""
    return stated(TensorFile(path).metadata) or said


def check_lora(lora: Lora, version: tuple[int, ...], allow_partial: bool = False) -> None:
    """Raises InputError for a LoRA whose stated release does not go with the model's."""
    if allow_partial:
        return
    own = version_tuple(lora.file.metadata.get("model_version"))
    if own and version and not of_version(own).goes_with(of_version(version)):
        words = [".".join(map(str, found)) for found in (own, version)]
        raise InputError(
            f"{lora.path}: a LoRA of LTX-{words[0]}, the model is LTX-{words[1]}; pass one of "
            "its release, or --lora-allow-partial to merge what fits"
        )


def merge(weight: np.ndarray, factors: Sequence[Factors], rounded: bool) -> np.ndarray:
    """W' = W[out, in] + the sum of all s * (B @ A), every product accumulated in float32: the
    definition.

    rounded: as the official code in bfloat16, the first Delta = bf16(bf16(B*s) @ A), each further
    Delta = bf16(Delta + s*(B @ A)), and W' = bf16(Delta + W), which stays float32 if W is (it was
    dequantised, and its reader rounds). Otherwise float32 throughout. A change of several terms is
    a product in float32 in any case; where it is the first, Delta = bf16(s * product).
    """

    changes = [
        (
            [[_floats(x, rounded and len(terms) == 1) for x in term] for term in terms],
            F32.type(scale),
        )
        for terms, scale in factors
    ]
    merged = np.empty(weight.shape, F32 if weight.dtype == F32 or not rounded else BF16)
    for rows in row_chunks(len(weight)):
        delta = 0  # f32, holding bf16 values where rounded
        for number, (terms, scale) in enumerate(changes):
            if number == 0 and len(terms) == 1:
                ((up, down),) = terms
                delta = _floats(_floats(up[rows] * scale, rounded) @ down, rounded)
            else:
                change = scale * reduce(mul, (up[rows] @ down for up, down in terms))
                delta = _floats(delta + change, rounded)
        merged[rows] = delta + weight[rows].astype(np.float32)
    return merged


def row_chunks(num_rows: int) -> Iterator[slice]:
    """Slices of rows, so that intermediates stay small compared with the weight."""
    step = -(-num_rows // NUM_CHUNKS)
    return (slice(start, start + step) for start in range(0, num_rows, step))


def _floats(array: np.ndarray, rounded: bool) -> np.ndarray:
    return (array.astype(BF16) if rounded else array).astype(np.float32, copy=False)


class MergedSource:
    """A tensor source that merges LoRAs, in their order, into the weights that they touch."""

    def __init__(
        self,
        source: TensorReader,
        loras: Sequence[Lora],
        dtype: str | np.dtype,
        merge: Merging = merge,
        allow_partial: bool = False,
    ):
        """merge: a backend's own, for a source that only this backend loads."""
        self._source = source
        self._dtype = np.dtype(dtype)
        if self._dtype not in (BF16, F32):
            raise ValueError(f"merged weights are bfloat16 or float32, not {self._dtype}")
        self._merge = merge
        files = [lora.path.resolve() for lora in loras]
        if twice := [str(lora.path) for lora in loras if files.count(lora.path.resolve()) > 1]:
            raise InputError(
                f"{twice[-1]}: the same LoRA twice ({' and '.join(twice)}); give it once, with "
                "its strength"
            )
        self._changes: dict[str, list[tuple[Lora, Change]]] = {}
        self.fitting: list[set[str]] = []  # tensors, of each LoRA
        self.merges = [self._match(lora, allow_partial) for lora in loras]

    def _match(self, lora: Lora, allow_partial: bool) -> Merge:
        names = set(self._source.names())
        changes = lora.on(names)
        shapes = {name: tuple(self._source.info(name).shape) for name in changes if name in names}
        fitting = {name for name, shape in shapes.items() if changes[name].shape == tuple(shape)}
        others = [name for name in shapes if name not in fitting]
        advice = "pass one that was trained for it"
        if others and not (allow_partial and fitting):
            said = f"it changes {others[0]} as {list(changes[others[0]].shape)}"
            said += f", the model has {list(shapes[others[0]])}"
            raise InputError(f"{lora.path}: it does not fit this model: {said}; {advice}")
        if not changes:
            words = " and ".join(PARTS[part].word for part in lora.parts)
            raise InputError(f"{lora.path}: it changes the {words}, which was not found")
        if not fitting:
            said = f"none of its {len(changes)} tensors is in this model"
            raise InputError(f"{lora.path}: {said}, the first is {min(changes)}; {advice}")
        lost = [*(name for name in changes if name not in fitting), *lora.unknown]
        modules, merged = modules_of(changes), modules_of(fitting)
        if lost and not allow_partial:
            other = f"the other {len(merged)}/{len(modules)} modules"
            said = f"{lora.path}: {len(lost)} keys match no weight: {collapse(lost)};"
            raise InputError(f"{said} pass --lora-allow-partial to merge {other}")
        self.fitting.append(fitting)
        for name, change in changes.items():
            if name in fitting and change.scale != 0:
                self._changes.setdefault(name, []).append((lora, change))
        return Merge(
            str(lora.path), lora.strength, len(merged), len(modules), len(lora.skipped), lora.kind,
            parts=frozenset(map(part_of, changes)), alpha_from=lora.alpha_from,
            unread=len(lora.unread),
        )  # fmt: skip

    def names(self) -> Iterable[str]:
        return self._source.names()

    def merges_into(self, read: Collection[str]) -> list[Merge]:
        """The merges, counting only tensors that a network reads."""
        return [
            replace(merge, matched=len(modules_of(fitting & set(read))))
            for merge, fitting in zip(self.merges, self.fitting, strict=True)
        ]

    def touched(self) -> set[str]:
        """Names of the tensors that differ from the source's."""
        return set(self._changes)

    def info(self, name: str) -> TensorInfo:
        info = self._source.info(name)
        if name not in self._changes:
            return info
        return TensorInfo(info.shape, F32 if info.dtype == F32 else self._dtype)

    def stored(self, format: str, name: str, *cuts: Cut) -> Fields | None:
        """The stored fields, or the merged ones encoded again; None without that format."""
        kept = stored_fields(self._source, format, name, *cuts)
        return (self.read(name, *cuts), None) if kept and name in self._changes else kept

    def read(self, name: str, *cuts: Cut) -> Any:
        """The merged tensor, or a slice of it, for which only the slices of the LoRAs that reach it
        are multiplied, unless one of them is no sum of products: then it is cut at the end. What
        `merge` gives if LoRAs touch it, else the source's numpy view."""
        changes = self._changes.get(name, [])
        if not changes:
            return self._source.read(name, *cuts)
        if any(not isinstance(change, LowRank) for _, change in changes):
            weight = self._source.read(name).astype(np.float32)
            for lora, change in changes:
                weight = change.applied(lora.file, weight)
            return cut(weight, *cuts).astype(self.info(name).dtype, copy=False)
        factors = [c.factors(lora.file, cuts) for lora, c in changes if isinstance(c, LowRank)]
        return self._merge(self._source.read(name, *cuts), factors, self._dtype == BF16)


def merge_to_file(
    checkpoint: Checkpoint,
    loras: Sequence[Lora],
    tensor_names: Sequence[str],
    output: str | Path,
    dtype: str,
    allow_partial: bool = False,
) -> list[Merge]:
    """Write the named tensors, merged, under their official names as `dtype`; returns the merges.
    allow_partial: also merge LoRAs of another release, and those with keys that match nothing."""
    check_outputs([("--output", Path(output))], [*checkpoint.files, *(lora.path for lora in loras)])
    for lora in loras:
        check_lora(lora, checkpoint.config.version, allow_partial)
    whole = checkpoint.source("transformer")
    for part in ("text", "gemma"):
        if part in checkpoint.sources:
            whole = whole.joined(checkpoint.source(part), checkpoint.source(part).names())
    merged = MergedSource(whole, loras, dtype, allow_partial=allow_partial)

    def home(name: str) -> TensorReader:
        source = checkpoint.sources.get(part_of(name))
        if source is None or name not in set(source.names()):
            raise InputError(
                f"{checkpoint.path}: no tensor {name}; `ltx2rt weights inspect --json` lists "
                "the official names"
            )
        return merged if part_of(name) in ("transformer", "text", "gemma") else source

    homes, kind = {name: home(name) for name in tensor_names}, np.dtype(dtype)
    infos = {name: TensorInfo(homes[name].info(name).shape, kind) for name in homes}
    write_tensors(output, infos, lambda name: homes[name].read(name).astype(kind, copy=False))
    return merged.merges
