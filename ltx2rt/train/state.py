"""Files of a training run: states to go on from, LoRAs to use, and metrics. Each is written under
another name first, so that an interruption or a full disk leaves the last one whole. A state
appears after every other file of its step."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ltx2rt.atomic_file import NotWritten
from ltx2rt.backend import EMA, MOMENTS
from ltx2rt.errors import InputError
from ltx2rt.passes.adapters import MARK
from ltx2rt.system import AT_ONCE, sync, take_lock
from ltx2rt.text_files import parse, read_json, read_text
from ltx2rt.weights.files import TensorFile, write_arrays
from ltx2rt.weights.lora.file import FACTORS
from ltx2rt.weights.names import to_diffusers
from ltx2rt.weights.part_table import PARTS

Arrays = Mapping[str, np.ndarray]
METRICS, LOCK = "metrics.jsonl", ".lock"
STATES, CONFIGURATION = "state", "train.toml"
KINDS = ("parameters", *MOMENTS, EMA)  # files of a state
ABOUT = {
    "step": int, "updates": int, "running": {str: float}, "base": str, "data": str, "dtype": str,
    "samples": int, "kinds?": [str], "weights_dtype?": (str, None), "trigger?": (str, None),
    "request": {"rank": int, "alpha": float, "mode": str, "targets": [str], "seed": int},
}  # fmt: skip
ROW = {"step": int, "video_loss?": (float, None), "audio_loss?": (float, None)}
ROW |= {f"held_out_{name}": shape for name, shape in ROW.items() if name != "step"}

METADATA = dict(zip(FACTORS, FACTORS, strict=True)) | {
    "model_version": "version", "reference_spatial_scale_factor": FACTORS[0]
}  # fmt: skip


def lora_path(run: Path, step: int) -> Path:
    return run / f"lora-{step:06d}.safetensors"


def states(run: Path) -> list[Path]:
    """Whole states, the oldest first; folders of other names are not the run's."""
    found = [p for p in (run / STATES).glob("[0-9]*") if p.name.isdecimal()]
    return sorted((p for p in found if (p / "state.json").is_file()), key=lambda p: int(p.name))


def remove_halves(run: Path) -> None:
    """Remove states that a killed process began to write or to remove. Other folders stay."""
    names = {f"{kind}.safetensors" for kind in KINDS}
    for path in (run / STATES).iterdir():
        half = path.name.isdecimal() and path.is_dir() and {p.name for p in path.iterdir()} <= names
        if half or re.fullmatch(r"\.[0-9]+\.partial", path.name):
            shutil.rmtree(path)


def make_folders(run: Path) -> None:
    """Raises InputError where they cannot be made."""
    if (folder := run / STATES).is_symlink() and not folder.exists():
        raise InputError(
            f"--output: {folder} is a link to {os.readlink(folder)}, which does not exist; "
            "mount its disk, or choose another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--output: {folder} cannot be created ({error.strerror}); choose another folder"
        ) from None


@contextmanager
def new_state(
    run: Path,
    step: int,
    arrays: Mapping[str, Arrays],
    about: Mapping[str, Any],
    keep: int,
    keep_every: int,
) -> Iterator[None]:
    """Write a state, which counts after the files that are written meanwhile. keep: number of
    latest states that stay; keep_every: steps that stay are multiples of it, 0: none. Raises
    NotWritten if the disk is full; earlier states are whole."""
    folder = run / STATES / f"{step:06d}"
    partial = _partial(folder)
    try:
        partial.mkdir()
        for kind, tensors in arrays.items():
            floats = {name: np.asarray(x, np.float32) for name, x in tensors.items()}
            write_arrays(partial / f"{kind}.safetensors", floats)
        facts = dict(about) | {"step": step, "kinds": list(arrays)}
        (partial / "state.json").write_text(json.dumps(facts, indent=1))
        for file in (*partial.iterdir(), partial):
            sync(file)
        yield
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        sync(folder.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not folder.parent.is_dir():
            raise InputError(f"{run} was moved or removed while it was trained") from None
        kept = [int(path.name) for path in states(run)]
        last = f"the state of step {kept[-1]} is whole" if kept else "no state was written before"
        why = f"{error.strerror}; {last}: make room and give the same command"
        raise NotWritten(error.errno, why, str(folder)) from error
    for old in states(run)[:-keep]:
        if not keep_every or int(old.name) % keep_every:
            shutil.rmtree(old.rename(_partial(old)))


def _partial(state: Path) -> Path:
    return state.with_name(f".{state.name}.partial")


def read_state(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
    """The arguments of `new_state`: about, arrays by kind. Raises InputError if it is damaged."""
    arrays = {}
    try:
        about = read_json(folder / "state.json", ABOUT, "")
        if about["step"] != int(folder.name) or about["request"]["rank"] < 1:
            raise InputError(f"it is of step {about['step']}, rank {about['request']['rank']}")
        there = [kind for kind in KINDS if (folder / f"{kind}.safetensors").exists()]
        for kind in about.get("kinds", there):
            file = TensorFile(folder / f"{kind}.safetensors")
            arrays[kind] = {name: np.array(file.read(name)) for name in file.names()}
        if "parameters" not in arrays:
            raise InputError("it has no parameters")
    except (OSError, ValueError) as error:
        raise _damaged(folder, str(error).removeprefix(f"{folder}/").rstrip("; ")) from None
    return about, arrays


def require_shapes(
    folder: Path, arrays: Mapping[str, Arrays], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises InputError for a state without the tensors of this training."""
    for kind in ("parameters", *MOMENTS):
        found = {name: x.shape for name, x in arrays.get(kind, {}).items()}
        for name in {**shapes, **found}:
            if (shape := found.get(name)) != (expected := shapes.get(name)):
                why = f"{kind} has {name} of shape {shape}, expected {expected}"
                raise _damaged(folder, why)


def _damaged(folder: Path, why: str) -> InputError:
    return InputError(
        f"{folder} is damaged ({why}); move it away, and the same command goes on from the "
        "state before"
    )


FORMATS = ("official", "diffusers", "kohya")


def write_lora(
    path: Path,
    parameters: Arrays,
    scale: float,
    about: Mapping[str, Any],
    dtype: str = "bfloat16",
    format: str = "official",
) -> None:
    """alpha / rank is part of B. Keys of the formats:

    official    diffusion_model.<module>.lora_A.weight, which ComfyUI and diffusers read, too
    diffusers   transformer.<module by diffusers' name>.lora_A.weight
    kohya       lora_unet_<module with _>.lora_down.weight, and alpha, which is the rank
    """
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    arrays = {}
    for name, x in parameters.items():
        module, half = name.removesuffix(".weight").split(MARK)
        value = (x * np.float32(scale) if half == "B" else x).astype(kind)
        arrays[_key(module, half, format)] = value
        if format == "kohya" and half == "A":
            arrays[f"{_flat(module)}.alpha"] = np.array(len(x), kind)
    metadata = {"format": "pt", "ltx2rt": json.dumps(dict(about))}
    metadata |= {key: str(about[name]) for key, name in METADATA.items() if about.get(name, 1) != 1}
    write_arrays(path, arrays, metadata)


def _key(module: str, half: str, format: str) -> str:
    if format == "kohya":
        return f"{_flat(module)}.lora_{'down' if half == 'A' else 'up'}.weight"
    if format == "diffusers":
        name = to_diffusers("transformer", f"{module}.weight").removesuffix(".weight")
        return f"transformer.{name}{MARK}{half}.weight"
    return f"{module.removeprefix('model.')}{MARK}{half}.weight"


def _flat(module: str) -> str:
    return "lora_unet_" + module.removeprefix(PARTS["transformer"].prefix).replace(".", "_")


def kept_metrics(run: Path, step: int) -> list[dict[str, Any]]:
    """The lines of the steps before `step`. Raises InputError for a damaged file; its last line may
    be cut off by an interruption."""
    if not (path := run / METRICS).exists():
        return []
    found, lines = [], [line for line in read_text(path).split("\n") if line.strip()]
    for number, line in enumerate(lines, 1):
        try:
            found += [row for row in [parse(line, ROW)] if row["step"] < step]
        except ValueError as error:
            if number < len(lines):
                raise InputError(
                    f"{path} is damaged (line {number}: {error}); move it away, and the same "
                    "command goes on without it"
                ) from None
    return found


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Raises InputError if another process works on the run."""
    try:
        handle = os.open(run / LOCK, os.O_CREAT | os.O_RDWR | AT_ONCE, 0o666)
    except OSError as error:
        raise InputError(
            f"--output: {run / LOCK} cannot be opened ({error.strerror}); remove it"
        ) from None
    try:
        try:
            take_lock(handle)
        except OSError:
            raise InputError(
                f"--output: another process trains in {run}; wait for it, or choose another name"
            ) from None
        yield
    finally:
        os.close(handle)
