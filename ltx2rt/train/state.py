"""Files of a training run: states to go on from, LoRAs to use, metrics, and the picture of the
losses.

Decides their names. Each is written under another name first, so that an interruption or a full
disk leaves the last one whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ltx2rt.atomic_file import NotWritten, replacing
from ltx2rt.errors import InputError
from ltx2rt.passes.adapters import MARK
from ltx2rt.weights.files import TensorFile, write_arrays
from ltx2rt.weights.names import to_diffusers
from ltx2rt.weights.part_table import PARTS

Arrays = Mapping[str, np.ndarray]
METRICS, PICTURE, LOCK = "metrics.jsonl", "loss.svg", ".lock"
STATES, CONFIGURATION = "state", "train.toml"

METADATA = {  # keys of a LoRA's header that other programs read, and the facts they hold
    "model_version": "version",
    "reference_downscale_factor": "reference_downscale_factor",
    "reference_spatial_scale_factor": "reference_downscale_factor",
    "reference_temporal_scale_factor": "reference_temporal_scale_factor",
}


def states(run: Path) -> list[Path]:
    """Whole states, the oldest first; folders of other names are not the run's."""
    found = [p for p in (run / STATES).glob("[0-9]*") if p.name.isdecimal()]
    return sorted((p for p in found if (p / "state.json").is_file()), key=lambda p: int(p.name))


def write_state(
    run: Path,
    step: int,
    arrays: Mapping[str, Arrays],
    about: Mapping[str, Any],
    keep: int,
    keep_every: int = 0,
) -> None:
    """keep: how many of the latest states stay; keep_every: those of its multiples stay, too, 0:
    none. Raises NotWritten if the disk is full; earlier states are whole."""
    folder, partial = run / STATES / f"{step:06d}", run / STATES / f".{step:06d}.partial"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        for kind, tensors in arrays.items():
            write_arrays(
                partial / f"{kind}.safetensors",
                {name: np.asarray(x, np.float32) for name, x in tensors.items()},
            )
        (partial / "state.json").write_text(json.dumps(dict(about) | {"step": step}, indent=1))
        for file in partial.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        kept = states(run)
        last = (
            f"the state of step {int(kept[-1].name)} is whole"
            if kept
            else "nothing is lost but this run"
        )
        why = f"{error.strerror}; {last}: make room and give the same command"
        raise NotWritten(error.errno, why, str(folder)) from error
    for old in states(run)[:-keep]:
        if not keep_every or int(old.name) % keep_every:
            shutil.rmtree(old)


def read_state(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
    """The arguments of `write_state`: about, arrays by kind. Raises InputError if it is damaged."""
    arrays = {}
    try:
        about = json.loads((folder / "state.json").read_text())
        for path in sorted(folder.glob("*.safetensors")):
            file = TensorFile(path)
            arrays[path.stem] = {name: np.array(file.read(name)) for name in file.names()}
    except (OSError, ValueError, InputError) as error:
        raise InputError(
            f"{folder} is damaged ({str(error).split(':')[0]}); move it away, and the same command "
            "goes on from the state before"
        ) from None
    return about, arrays


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


def write_configuration(run: Path, values: Mapping[str, Any]) -> None:
    """`train.toml`: text, numbers, switches and lists of text, by name."""
    with replacing(run / CONFIGURATION) as partial:
        partial.write_text("".join(f"{name} = {json.dumps(x)}\n" for name, x in values.items()))


def kept_metrics(run: Path, step: int) -> list[dict[str, Any]]:
    """The lines of the steps before `step`, which the file then has alone."""
    path = run / METRICS
    lines = path.read_text().splitlines() if path.exists() else []
    found = [row for row in map(_parsed, lines) if row is not None and row["step"] < step]
    with replacing(path) as partial:
        partial.write_text("".join(json.dumps(row) + "\n" for row in found))
    return found


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except json.JSONDecodeError:  # cut off by an interruption
        return None


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Raises InputError if another process works on the run."""
    import fcntl

    handle = os.open(run / LOCK, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise InputError(
            f"--output: another process trains in {run}; wait for it, or choose another name"
        ) from None
    try:
        yield
    finally:
        os.close(handle)


def draw_losses(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """An SVG of the losses by step, each a mean over a tenth of the steps before it; of clips that
    are not trained on, as they were measured."""
    width, height = 640, 320
    colours = {"video_loss": "#1f77b4", "audio_loss": "#d62728"}
    colours |= {"held_out_video_loss": "#0b3d66", "held_out_audio_loss": "#7a1111"}
    curves: dict[str, list[tuple[int, float]]] = {}
    for name in colours:
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        span = 1 if name.startswith("held") else max(1, len(points) // 10)
        curves[name] = [
            (step, float(np.mean([y for _, y in points[max(0, i - span + 1) : i + 1]])))
            for i, (step, _) in enumerate(points)
        ]
    most = max((y for points in curves.values() for _, y in points), default=1.0) or 1.0
    last = max((x for points in curves.values() for x, _ in points), default=1) or 1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif">'
    ]
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for row, (name, points) in enumerate((n, p) for n, p in curves.items() if p):
        line = " ".join(f"{40 + 590 * x / last:.1f},{300 - 280 * y / most:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colours[name]}"/>')
        label = f"{name.replace('_', ' ')} {points[-1][1]:.3f}"
        parts.append(
            f'<text x="440" y="{30 + 16 * row}" font-size="12" '
            f'fill="{colours[name]}">{label}</text>'
        )
    parts.append(
        f'<text x="4" y="24" font-size="12">{most:.2f}</text><text x="560" y="316" font-size="12">'
    )
    parts.append(f"step {last}</text></svg>")
    with replacing(path) as partial:
        partial.write_text("".join(parts))
