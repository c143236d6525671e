"""LoRA, LoHa and LoKr files, and a tensor source that merges them while its tensors are read.

Decides which weight each change belongs to and the order of rounding; its numbers are in `changes`.
Which LoRAs a stage takes, and in what order, is the pipeline's decision. One tensor is in memory at
a time; a backend merges it on its own device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ltx2rt.atomic_file import check_outputs
from ltx2rt.errors import InputError
from ltx2rt.graph.ir import Cut
from ltx2rt.release import of_version, version_tuple
from ltx2rt.weights.changes import Change, Factors, change_of
from ltx2rt.weights.files import TensorFile, TensorInfo, TensorReader, write_tensors
from ltx2rt.weights.names import collapse, component_of, to_official
from ltx2rt.weights.part_table import PARTS
from ltx2rt.weights.quant_formats import Fields
from ltx2rt.weights.quantised import stored_fields

if TYPE_CHECKING:
    from ltx2rt.weights.checkpoint import Checkpoint

Merging = Callable[
    [np.ndarray, Sequence[Factors], bool], Any
]  # as `merge`; where its result lies is its own
MAX_SCALE = 1000.0  # beyond any use; float32 overflows far above it
NUM_CHUNKS = 16  # chunks of a weight's rows; more are less memory and slower products
BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
DTYPES = {"bfloat16": BF16, "float32": F32}
FACTORS = (
    "reference_downscale_factor",
    "reference_temporal_scale_factor",
)  # in the header of an IC-LoRA
_KEY = re.compile(
    r"(?P<module>.+)\.(?:(?:(?P<down>lora_A|lora_down)|(?P<up>lora_B|lora_up))(?:\.default)?\.weight"
    r"|(?P<part>hada_w[12]_[ab]|lokr_w[12](?:_[ab])?|alpha))"
)
# Parts of changes that are more than a product: of convolutions, and of DoRA.
_REFUSED = re.compile(
    r".+\.(?:hada_t[12]|lokr_t2|lora_mid\.weight|dora_scale|lora_magnitude_vector.*)"
)
_FLAT = ("lycoris_", "lora_unet_")  # before module names with "_" in place of "."
_TRANSFORMER = re.compile(
    r"^(?:base_model\.model\.)?(?:(?:model\.)?(?:diffusion_model|transformer)\.)?"
)
_TEXT_PROJECTION = re.compile(
    r"^(?:model\.)?(?:text_embedding_projection\.|connectors\.(?:\w+_)?text_proj_in$)"
)


@dataclass(frozen=True)
class Lora:
    path: Path
    strength: float
    file: TensorFile
    changes: dict[str, Change]  # by the official name of the weight, or one that `on` knows
    skipped: tuple[
        str, ...
    ]  # modules of the text projection, which the official code does not merge either
    unknown: tuple[str, ...]  # keys that are no LoRA pair

    @property
    def kind(self) -> str:
        """Such as "LoRA"."""
        return " and ".join(sorted({change.kind for change in self.changes.values()})) or "LoRA"

    def on(self, names: Iterable[str]) -> dict[str, Change]:
        """The changes by name of the weight, of a model with these; those of other models under
        their own."""
        flat = {prefix + _flat(name): name for name in names for prefix in _FLAT}
        return {flat.get(name, name): change for name, change in self.changes.items()}


@dataclass(frozen=True)
class Merge:
    """How many modules of a LoRA were merged. beside: they stay apart from the weights."""

    file: str
    strength: float
    matched: int
    total: int
    skipped: int
    kind: str = "LoRA"
    beside: bool = False

    def line(self, stage: str = "", role: str = "") -> str:
        """Such as "stage2, distilled: merged 130/130 modules of FILE at strength 1"; without a
        stage: "merged ..."; of those that stay apart: "beside the weights 130/130 ..."."""
        where = ", ".join(filter(None, (stage, role)))
        skipped = f", skipped {self.skipped} of the text projection" if self.skipped else ""
        modules = "modules" if self.kind == "LoRA" else f"{self.kind} modules"
        how = "beside the weights" if self.beside else "merged"
        merged = f"{how} {self.matched}/{self.total} {modules} of {self.file}"
        merged += f" at strength {self.strength:g}{skipped}"
        return f"{where}: {merged}" if where else merged


def open_lora(path: str | Path, strength: float = 1.0) -> Lora:
    """Read the header (and the alpha scalars). Keys: official, diffusers/PEFT, LyCORIS, and
    lora_down/lora_up."""
    file = TensorFile(path)
    modules: dict[str, dict[str, str]] = {}
    unknown = []
    for key in file.names():
        if _REFUSED.fullmatch(key):
            raise InputError(
                f"{path}: {key} is of a convolution or of DoRA, which is not merged; pass a LoRA, "
                "LoHa or LoKr without"
            )
        match = _KEY.fullmatch(key)
        if match is None:
            unknown.append(key)
            continue
        part = match["part"] or ("down" if match["down"] else "up")
        other = modules.setdefault(match["module"], {}).setdefault(part, key)
        if other != key:
            raise InputError(f"{path}: {other} and {key} are the same half of one module")
    lone = [module for module, parts in modules.items() if parts.keys() == {"alpha"}]
    unknown += [modules.pop(module)["alpha"] for module in sorted(lone)]
    if not modules:
        raise InputError(
            f"{path}: no LoRA: none of its {len(list(file.names()))} keys ends in lora_A.weight, "
            "lora_down.weight, hada_w1_a or lokr_w1"
        )
    halves = [m for m, parts in modules.items() if len({"up", "down"} & parts.keys()) == 1]
    if halves := sorted(halves):
        raise InputError(
            f"{path}: {len(halves)} modules have only one half of their pair: {collapse(halves)}"
        )
    changes: dict[str, Change] = {}
    skipped, keys = [], {}
    for module, parts in modules.items():
        if _TEXT_PROJECTION.match(module):
            skipped.append(module)
            continue
        target = module
        if not module.startswith(_FLAT):
            target = to_official("transformer", _TRANSFORMER.sub("", module) + ".weight")
        change = change_of(file, module, parts, strength)
        if not abs(change.scale) <= MAX_SCALE:  # nan is not
            raise InputError(
                f"{path}: scaled by {change.scale:g} at {module}, expected at most {MAX_SCALE:g}; "
                "lower its strength"
            )
        first = min(parts.values())
        if (other := keys.setdefault(target, first)) != first:
            raise InputError(f"{path}: {other} and {first} both belong to {target}")
        changes[target] = change
    return Lora(Path(path), strength, file, changes, tuple(skipped), tuple(unknown))


def _flat(name: str) -> str:
    """The module of an official name as LyCORIS and kohya write it, behind a prefix."""
    prefix, module = PARTS["transformer"].prefix, name.removesuffix(".weight")
    return module.removeprefix(prefix).replace(".", "_")


def reference_factors(paths: Iterable[Path]) -> tuple[int, int]:
    """How much coarser than the clip the references of IC-LoRAs are, in space and in time; 1 if no
    header says more.

    Raises InputError for what is no whole number, and where two LoRAs say more than 1 and differ.
    """
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


def check_lora(lora: Lora, version: tuple[int, ...]) -> None:
    """Raises InputError for a LoRA of an earlier release on LTX-2.5, or the other way round, if
    both state theirs."""
    own = version_tuple(lora.file.metadata.get("model_version"))
    if own and version and not of_version(own).goes_with(of_version(version)):
        words = [".".join(map(str, found)) for found in (own, version)]
        raise InputError(
            f"{lora.path}: a LoRA of LTX-{words[0]}, the model is LTX-{words[1]}; pass one of its "
            "release"
        )


def merge(weight: np.ndarray, factors: Sequence[Factors], rounded: bool) -> np.ndarray:
    """W' = W[out, in] + the sum of all s * (B @ A), every product accumulated in float32: the
    definition.

    rounded: as the official code in bfloat16, the first Delta = bf16(bf16(B*s) @ A), each further
    Delta = bf16(Delta + s*(B @ A)), and W' = bf16(Delta + W), which stays float32 if W is (it was
    dequantised, and its reader rounds). Otherwise float32 throughout. A change of several terms is
    a product in float32 in any case; where it is the first, Delta = bf16(s * product).
    """

    def wide(term: Iterable[np.ndarray], terms: Sequence) -> list[np.ndarray]:
        return [_floats(half, rounded and len(terms) == 1) for half in term]

    changes = [
        ([wide(term, terms) for term in terms], np.float32(scale)) for terms, scale in factors
    ]
    merged = np.empty(weight.shape, F32 if weight.dtype == F32 or not rounded else BF16)
    for rows in row_chunks(len(weight)):
        delta = None  # f32, holding bf16 values where rounded
        for terms, scale in changes:
            if delta is None and len(terms) == 1:
                ((up, down),) = terms
                delta = _floats(_floats(up[rows] * scale, rounded) @ down, rounded)
                continue
            change = scale * reduce(mul, (up[rows] @ down for up, down in terms))
            delta = _floats(change if delta is None else delta + change, rounded)
        assert delta is not None
        merged[rows] = delta + weight[rows].astype(np.float32)
    return merged


def row_chunks(num_rows: int) -> Iterator[slice]:
    """Slices of rows, so that what is computed in passing stays small beside the weight."""
    step = -(-num_rows // NUM_CHUNKS)
    return (slice(start, start + step) for start in range(0, num_rows, step))


def _floats(array: np.ndarray, rounded: bool) -> np.ndarray:
    return (array.astype(BF16) if rounded else array).astype(np.float32, copy=False)


class MergedSource:
    """A tensor source whose touched weights are read with the LoRAs merged, in the order given.

    dtype bfloat16 rounds as the official code does, float32 does not (see `merge`). Untouched
    tensors are the source's own views.
    """

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
        self._dtype = DTYPES[dtype] if isinstance(dtype, str) else np.dtype(dtype)
        if self._dtype not in (BF16, F32):
            raise ValueError(f"merged weights are bfloat16 or float32, not {self._dtype}")
        self._merge = merge
        files = [lora.path.resolve() for lora in loras]
        if twice := [
            str(lora.path) for lora, file in zip(loras, files, strict=True) if files.count(file) > 1
        ]:
            raise InputError(
                f"{twice[-1]}: the same LoRA twice ({' and '.join(twice)}); give it once, with "
                "its strength"
            )
        self._changes: dict[str, list[tuple[Lora, Change]]] = {}
        self.merges = [self._match(lora, allow_partial) for lora in loras]

    def _match(self, lora: Lora, allow_partial: bool) -> Merge:
        names = set(self._source.names())
        changes = lora.on(names)
        matched = [name for name in changes if name in names]
        lost = [*(name for name in changes if name not in names), *lora.unknown]
        if not matched:
            raise InputError(
                f"{lora.path}: a LoRA of another model: none of its {len(changes)} modules is in "
                "this one; pass one that was trained for it"
            )
        for name in matched:
            own, shape = changes[name].shape, self._source.info(name).shape
            if own != tuple(shape):
                raise InputError(
                    f"{lora.path}: a LoRA of another model: it changes {name} as {list(own)}, "
                    f"this one has {list(shape)}; pass one that was trained for it"
                )
        if lost and not allow_partial:
            raise InputError(
                f"{lora.path}: {len(lost)} keys match no weight: {collapse(lost)}; "
                f"pass --lora-allow-partial to merge the other {len(matched)}/{len(changes)} "
                "modules"
            )
        for name in matched:
            if changes[name].scale != 0:
                self._changes.setdefault(name, []).append((lora, changes[name]))
        return Merge(
            str(lora.path), lora.strength, len(matched), len(changes), len(lora.skipped), lora.kind
        )

    def names(self) -> Iterable[str]:
        return self._source.names()

    def touched(self) -> set[str]:
        """Names whose values differ from the source's."""
        return set(self._changes)

    def info(self, name: str) -> TensorInfo:
        info = self._source.info(name)
        return (
            TensorInfo(info.shape, F32 if info.dtype == F32 else self._dtype)
            if name in self._changes
            else info
        )

    def stored(self, format: str, name: str, *cuts: Cut) -> Fields | None:
        """As it is stored, or merged and to be encoded anew: None for what is not stored in the
        format."""
        kept = stored_fields(self._source, format, name, *cuts)
        return (self.read(name, *cuts), None) if kept and name in self._changes else kept

    def read(self, name: str, *cuts: Cut) -> Any:
        """The merged tensor, or a slice of it, for which only the slices of the LoRAs that reach it
        are multiplied.

        What `merge` gives if LoRAs touch it, else the source's numpy view.
        """
        weight = self._source.read(name, *cuts)
        if name not in self._changes:
            return weight
        factors = [change.factors(lora.file, cuts) for lora, change in self._changes[name]]
        return self._merge(weight, factors, self._dtype == BF16)


def merge_to_file(
    checkpoint: Checkpoint,
    loras: Sequence[Lora],
    tensor_names: Sequence[str],
    output: str | Path,
    dtype: str,
) -> list[Merge]:
    """Write the named tensors, merged, under their official names as `dtype`; returns what was
    merged."""
    check_outputs([("--output", Path(output))], [*checkpoint.files, *(lora.path for lora in loras)])
    for lora in loras:
        check_lora(lora, checkpoint.config.version)
    merged = MergedSource(checkpoint.source("transformer"), loras, dtype)

    def home(name: str) -> TensorReader:
        component = component_of(name)
        source = merged if component == "transformer" else checkpoint.sources.get(component or "")
        if source is None or name not in set(source.names()):
            raise InputError(
                f"{checkpoint.path}: no tensor {name}; `ltx2rt weights inspect --json` lists the "
                "official names"
            )
        return source

    sources = {name: home(name) for name in tensor_names}
    infos = {
        name: TensorInfo(source.info(name).shape, DTYPES[dtype]) for name, source in sources.items()
    }
    write_tensors(
        output, infos, lambda name: sources[name].read(name).astype(DTYPES[dtype], copy=False)
    )
    return merged.merges
