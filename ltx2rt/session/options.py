"""Which model, and how and where it runs: the flags that every command with a checkpoint shares.

`check` refuses options that no model could satisfy, before any framework is imported.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, make_dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltx2rt.errors import InputError
from ltx2rt.flags import HARDWARE, MODEL, check_bounds, flag, flags_of
from ltx2rt.graph.encodings import QUANTISED
from ltx2rt.placement.mesh import MESH_AXES, canonical
from ltx2rt.suggest import same
from ltx2rt.weights.distilled import KINDS
from ltx2rt.weights.lora.config import lora_file
from ltx2rt.weights.part_table import FILES

DISTILLED_STAGES = ("stage1", "stage2")
ATTENTION = ("auto", "flash", "cudnn", "torch", "sage")
MEMORY = "devices and memory"  # a group of flags
memory_flag, model_flag = flags_of(MEMORY), flags_of("model")
gigabytes_flag = partial(memory_flag, None, metavar="GB", most=1e9)


@dataclass(frozen=True)
class LoraSpec:
    """A LoRA file, its strength, and its only stage ("stage1", "stage2"; None: both)."""

    path: Path
    strength: float = 1.0
    stage: str | None = None


@dataclass(frozen=True)
class PlannedLora(LoraSpec):
    """A LoRA of a run: another file of the same name is another LoRA. file: what
    `system.identity` gave when the run was planned. beside: it stays apart from the weights.
    parts: the parts of the checkpoint that it changes."""

    file: tuple[int, ...] = ()
    beside: bool = False
    parts: tuple[str, ...] = ("transformer",)


@dataclass(frozen=True)
class DistilledWeights(LoraSpec):
    """Mark a set of LoRAs that is merged into the checkpoint's distilled transformer, not into the
    dev one. path: its file."""


NO_LORA = LoraSpec(Path("none"), 0.0)  # `--distilled-lora none`: the weights as they are


def parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def from_tuple(given: Sequence[Any], *kinds: Callable[[Any], Any]) -> list[Any]:
    """The parts of a tuple that a Python caller gave for a flag, each read by its kind. Raises what
    `flags` makes an InputError that names the flag."""
    if not 1 <= len(given) <= len(kinds):
        raise ValueError
    return [kind(part) for kind, part in zip(kinds[: len(given)], given, strict=True)]


def as_number(given: Any) -> float:
    """Raises TypeError for text and None, which `float` may take."""
    return float(given + 0)


def parse_part(given: Any) -> Path:
    """A path, or the name of a repository; a name that begins with ./ is always a path."""
    absent = isinstance(given, str) and given.startswith("./") and not Path(given).exists()
    return Path.cwd() / given if absent else Path(given)


def parse_backend(given: str) -> str:
    """The name of a backend; torch and jax stand for theirs."""
    return same(given, ("cuda", "tpu")) or given


def _stage(given: Any) -> str | None:
    if given not in (None, *DISTILLED_STAGES):
        raise ValueError
    return given


def parse_lora(text: str | tuple | Path, name: str = "--lora") -> LoraSpec:
    """FILE[:STRENGTH[:stage1|stage2]], read from the right, so file names may contain colons; or a
    tuple of those. A folder stands for the one LoRA in it."""
    if isinstance(text, LoraSpec):
        return text
    if isinstance(text, Path):
        return LoraSpec(lora_file(text))
    if isinstance(text, (tuple, list)):
        spec = LoraSpec(*from_tuple(text, Path, as_number, _stage))
        return replace(spec, path=lora_file(spec.path))
    path, stage = text, None
    head, _, last = text.rpartition(":")
    if head and last in DISTILLED_STAGES:
        path, stage = head, last
    head, _, last = path.rpartition(":")
    strength = parse_number(last) if head else None
    if strength is not None:
        path = head
    elif stage:
        raise InputError(
            f"{name}: {text!r} names a stage but no strength; write FILE:STRENGTH:{stage}"
        )
    elif head and not os.path.exists(text) and os.path.isfile(head.rpartition(":")[0] or head):
        raise InputError(f"{name}: {last!r} in {text!r}, expected FILE[:STRENGTH[:stage1|stage2]]")
    if strength is not None and not math.isfinite(strength):
        raise InputError(f"{name}: strength {strength} in {text!r}, expected a finite number")
    return LoraSpec(lora_file(Path(path)), 1.0 if strength is None else strength, stage)


def parse_distilled(text: str | tuple | Path) -> LoraSpec:
    """Parse like `parse_lora`, or "none"."""
    return NO_LORA if text == "none" else parse_lora(text, "--distilled-lora")


def parse_mesh(given: str | int | Mapping[str, int]) -> dict[str, int]:
    """`tensor=2` -> sizes by mesh axis, in the order of the devices however they are written. A
    plain number is of `tensor`."""
    items = given.items() if isinstance(given, Mapping) else ()
    text = ",".join(f"{axis}={size}" for axis, size in items) or str(given)
    mesh: dict[str, int] = {}
    for item in (f"tensor={text}" if text.isdecimal() else text).split(","):
        axis, _, size = item.partition("=")
        known_axis = axis in MESH_AXES and axis not in mesh
        if not known_axis or not size.isdecimal() or len(size) > 9 or int(size) < 1:
            known = ", ".join(MESH_AXES)
            raise InputError(
                f"--mesh: {text[:80]!r}, expected AXIS=N with an axis of {known}, such as tensor=2"
            )
        mesh[axis] = int(size)
    return canonical(mesh)


@dataclass(frozen=True)
class Model:
    """The model, and the backend that runs it."""

    backend: str = memory_flag(
        MISSING,
        "cuda (PyTorch) or tpu (JAX), which also run on a CPU; auto: the one installed here",
        parse_backend,
        metavar="NAME",
        marks="prepare train",
    )
    model: Path = model_flag(
        MISSING,
        "model file or folder, or a repository of the Hugging Face hub",
        parse_part,
        metavar="PATH|ORG/NAME[@REVISION]",
        common=MODEL,
        marks="prepare train toml",
    )


if TYPE_CHECKING:
    PartFiles = Model
else:
    _OWN = {
        name: model_flag(
            None, part.help, parse_part, metavar=part.metavar,
            marks="plan compile" + " prepare train toml" * (part.every and not part.wanted),
        )
        for name, part in FILES.items()
    }  # fmt: skip
    _FIELDS = [(name, "Path | None", own) for name, own in _OWN.items()]
    PartFiles = make_dataclass("PartFiles", _FIELDS, bases=(Model,), frozen=True)


@dataclass(frozen=True)
class ModelOptions(PartFiles):
    """The model flags of `generate`; those that name files of parts are of the part table."""

    distilled_lora: LoraSpec | None = model_flag(
        None,
        "distilled LoRA, strength 1.0 unless given, or none (default: found near --model if the "
        "pipeline takes one and the model is not distilled)",
        parse_distilled,
        metavar="FILE[:STRENGTH]|none",
        marks="plan",
    )
    loras: tuple[LoraSpec, ...] = model_flag(
        (),
        "LoRAs, strength 1.0 and both stages unless given",
        parse_lora,
        name="--lora",
        metavar="FILE|FOLDER[:STRENGTH[:stage1|stage2]]",
        repeat=True,
        common=MODEL,
        marks="plan compile",
    )
    lora_allow_partial: bool = model_flag(
        False, "merge what fits of a LoRA of another release or with unknown keys"
    )
    lora_mode: str = model_flag(
        "merged",
        "merge LoRAs into the weights; or compute them beside the weights in every step, which "
        "changes between LoRAs without reading the model again (unmerged)",
        choices=("merged", "unmerged"),
    )
    dtype: str | None = memory_flag(
        None,
        "dtype of the computation (default: bfloat16, float32 on a CPU and in probe)",
        choices=("bfloat16", "float32"),
        marks="plan prepare train",
    )
    weights_dtype: str | None = memory_flag(
        None,
        "dtype of the transformer blocks' weights: int8 and float8 halve their memory, float8 "
        "rounds what they are multiplied by, too; bfloat16 decodes files of fewer bits while they "
        "are loaded (default: as stored)",
        choices=("bfloat16", *QUANTISED),
        marks="plan compile placed train toml",
    )
    device: str = memory_flag(
        "auto", "device: auto, cpu, cuda or tpu", metavar="NAME", marks="prepare train"
    )
    cross_timestep_rule: str = flag(
        "C",
        "timesteps between video and audio: C official, B as diffusers, A each its own",
        group="sampling",
        choices=("A", "B", "C"),
    )
    vae_tiling: str = memory_flag(
        "auto",
        "decode the video in tiles that fit the memory, or in one piece (off)",
        choices=("auto", "off"),
        marks="plan compile",
    )
    layers: str = memory_flag(
        "scan", "loop over blocks, or write them out", choices=("scan", "unrolled")
    )
    compile: bool = memory_flag(False, "compile the transformer's block with PyTorch Inductor")
    attention: str = memory_flag(
        "auto",
        "attention kernel on GPUs: FlashAttention, cuDNN's, PyTorch's choice, or SageAttention, which "
        "rounds scores to 8 bits; auto takes the fastest that rounds none",
        choices=ATTENTION,
    )
    memory: str = memory_flag(
        "auto",
        "if a run does not fit: auto frees weights once they are used and streams layers from host "
        "memory, which changes no number; resident refuses the run",
        choices=("auto", "resident"),
        common=HARDWARE,
        marks="plan train",
    )
    max_memory: float | None = gigabytes_flag(
        "use at most this much device memory (default: all that is free)",
        above=0,
        marks="plan train",
    )
    host_memory: float | None = gigabytes_flag(
        "keep streamed layers in the file if they need more of the host's memory than this "
        "(default: what is free, less 8 GB)",
        least=0,
        marks="plan",
    )
    profile: str | None = memory_flag(
        None,
        "how networks are split over devices (default: the one for the device kind)",
        metavar="NAME",
        marks="plan compile placed train",
    )
    mesh: Mapping[str, int] = memory_flag(
        {},
        "devices along each mesh axis, such as tensor=4; 4 means the same",
        parse_mesh,
        metavar="AXIS=N",
        also=("--tp-size",),
        marks="plan compile placed prepare train",
    )
    num_gpus: int | None = memory_flag(
        None, "number of GPUs, each with a process", least=1, common=HARDWARE, marks="train"
    )
    video_decoder: str | None = model_flag(
        None,
        "video decoder of LTX-2.5, which has two (default: diffusion if it is found and the device has room)",
        choices=("conv", "diffusion"),
        marks="plan compile",
    )
    config_from: Path | None = model_flag(
        None, "complete file, for what --model lacks", marks="prepare train toml"
    )
    offline: bool = model_flag(False, "use only files that are here already", marks="prepare train")
    assume: str | None = model_flag(
        None,
        "kind of the weights of --model, which decides the pipelines that take it (default: by its "
        "files' headers and names)",
        choices=KINDS,
        marks="plan train toml",
    )

    def compute_dtype(self, default: str) -> str:
        """The dtype asked for; weights of another one than float32 are multiplied in bfloat16."""
        return self.dtype or ("bfloat16" if self.weights_dtype else default)

    def on_mesh(self, launched: int) -> dict[str, int]:
        """The mesh that the flags ask for; by default `tensor` takes each of the processes that
        were launched. Raises InputError where flags contradict each other or the launch."""
        check_bounds(self)
        if launched > 1 and self.num_gpus not in (None, launched):
            raise InputError(
                f"--num-gpus: {self.num_gpus}, but {launched} processes were launched; leave "
                "the flag out"
            )
        devices = self.num_gpus or launched
        mesh = dict(self.mesh) or ({"tensor": devices} if devices > 1 else {})
        if devices > 1 and (size := math.prod(mesh.values())) != devices:
            raise InputError(
                f"mesh {mesh} is of {size} devices, {devices} are asked for; make the two agree"
            )
        return mesh

    def check(self) -> None:
        """Refuse options that no model could satisfy. Raises InputError; reads no file."""
        check_bounds(self)
        existing("--model", self.model)
        if snapshots := sorted(self.model.glob("snapshots/*")):
            raise InputError(
                f"--model: {self.model} is a cache of the hub; pass its snapshot, such as "
                f"{snapshots[-1]}"
            )
        for option, path in self.parts.items():
            existing(FILES[option].flag, path)
        if self.config_from:
            existing_file("--config-from", self.config_from)
        if self.distilled_lora and self.distilled_lora != NO_LORA:
            existing_file("--distilled-lora", self.distilled_lora.path)
            if self.distilled_lora.stage:
                raise InputError(
                    "--distilled-lora: the pipeline decides its stage; write FILE or FILE:STRENGTH"
                )
        for lora in self.loras:
            existing_file("--lora", lora.path)
        if self.attention == "sage" and self.compile:
            raise InputError(
                "--attention sage: PyTorch Inductor does not see into sageattention; leave "
                "out --compile"
            )
        if self.weights_dtype and self.dtype == "float32":
            raise InputError(
                f"--weights-dtype: {self.weights_dtype} weights go with --dtype bfloat16, not "
                "float32; leave one out"
            )

    @property
    def parts(self) -> dict[str, Path]:
        """The files and folders of parts that it names, by option; LoRAs apart."""
        return {option: path for option in FILES if (path := getattr(self, option))}

    @property
    def files(self) -> list[Path]:
        """The files and folders that it names."""
        loras = (lora for lora in (*self.loras, self.distilled_lora) if lora and lora != NO_LORA)
        return [self.model, *self.parts.values(), *(lora.path for lora in loras)]


_WEB = re.compile(r"\w+:/+\w+\.")


def existing(name: str, path: Path) -> None:
    try:
        found = path.exists()
    except (OSError, ValueError) as error:  # too long a name, a zero byte
        why = getattr(error, "strerror", error)
        raise InputError(f"{name}: {str(path)[:80]!r} is no path ({why}); check it") from None
    if not found:
        if _WEB.match(str(path)):
            raise InputError(f"{name}: {path} is a web address; download it and pass the file")
        raise InputError(f"{name}: {path} does not exist; check the path")


def existing_file(name: str, path: Path) -> None:
    existing(name, path)
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no regular file"
        raise InputError(f"{name}: {path} is {found}, expected a file")


def plain(value: Any, path: Callable[[Path], Any] = str) -> Any:
    """Return a JSON-able form: of a dataclass with `__str__` its text, of a path what `path` makes
    of it."""
    if isinstance(value, Path):
        return path(value)
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, Mapping):
        return {name: plain(item, path) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item, path) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        if "__str__" in vars(type(value)):
            return str(value)
        return {f.name: plain(getattr(value, f.name), path) for f in fields(value)}
    return value
