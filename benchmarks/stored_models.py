"""Copies of a model whose transformer is stored in fewer bits, for `benchmarks.quality`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ltx2rt.graph.encodings import E2M1
from ltx2rt.weights.files import TensorFile, write_arrays
from ltx2rt.weights.names import component_of
from ltx2rt.weights.part_table import PARTS

PREFIX = PARTS["transformer"].prefix
F32, E4M3 = np.float32, ml_dtypes.float8_e4m3fn
SMALL = 1024  # a tensor of no more numbers stays in float32, as converters have it
Stored = tuple[str, np.ndarray]  # a type of GGUF, and its bytes


def write_copy(model: Path, folder: Path, form: str) -> Path:
    """The folder, with a copy of the model: its transformer in `form`, everything else as it is."""
    arrays: dict[str, dict[str, np.ndarray]] = {}
    metadata: Mapping[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(model.glob("*-of-*.safetensors")):
        file = TensorFile(path)
        metadata = metadata or file.metadata
        for name in file.names():
            part = {"vocoder": "audio_vae"}.get(part := str(component_of(name)), part)
            arrays.setdefault(part, {})[name] = file.read(name)
    for path in model.iterdir():
        used = "-of-" in path.name or path.name.endswith(".index.json")
        if not used and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path.resolve())
    transformer = arrays.pop("transformer")
    for part, own in arrays.items():
        write_arrays(folder / f"{part}.safetensors", own, dict(metadata))
    if form == "nvfp4":
        found: dict[str, np.ndarray] = {}
        for name, array in transformer.items():
            large = _large(array, 16) and name.endswith(".weight")
            found |= nvfp4(name, array) if large else {name: array}
        write_arrays(folder / "transformer.safetensors", found, dict(metadata))
    else:
        _write_gguf(folder / "transformer.gguf", transformer, GGUF[form], metadata["config"])
    return folder


def _large(array: np.ndarray, group: int) -> bool:
    return array.ndim == 2 and array.size > SMALL and array.shape[1] % group == 0


def _write_gguf(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    store: Callable[[np.ndarray], Stored],
    config: str,
) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "ltxv")
    writer.add_string("config", config)
    for name, array in arrays.items():
        name, wide = name.removeprefix(PREFIX), np.ascontiguousarray(array.astype(F32))
        if _large(array, 32) and not name.endswith("scale_shift_table"):
            type_, stored = store(wide)
            writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType[type_])
        else:
            writer.add_tensor(name, wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _by_package(type_: str, x: np.ndarray) -> Stored:
    import gguf

    return type_, gguf.quants.quantize(x, gguf.GGMLQuantizationType[type_])


def q4_k(x: np.ndarray) -> Stored:
    """By the largest and least number of each 32; rows that are not of blocks of 256 as Q4_0."""
    if x.shape[1] % 256:
        return _by_package("Q4_0", x)
    blocks = x.reshape(-1, 8, 32)
    least = np.minimum(blocks.min(2), 0)
    steps, minima = (blocks.max(2) - least) / 15, -least
    d, dmin = ((v.max(1, keepdims=True) / 63).astype(np.float16) for v in (steps, minima))
    sc, mn = (
        np.rint(v / np.maximum(unit.astype(F32), 1e-12)).clip(0, 63).astype(np.uint8)
        for v, unit in ((steps, d), (minima, dmin))
    )
    step = np.maximum(d.astype(F32) * sc, 1e-12)[:, :, None]
    shifted = blocks + (dmin.astype(F32) * mn)[:, :, None]
    q = np.rint(shifted / step).clip(0, 15).astype(np.uint8)
    c = np.concatenate(
        [
            sc[:, :4] | (sc[:, 4:] >> 4) << 6,
            mn[:, :4] | (mn[:, 4:] >> 4) << 6,
            (sc[:, 4:] & 15) | (mn[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    s = (q[:, 0::2] | q[:, 1::2] << 4).reshape(len(q), 128)
    halves = (v.view(np.uint8).reshape(len(q), 2) for v in (d, dmin))
    return "Q4_K", np.concatenate([*halves, c, s], axis=1).reshape(len(x), -1)


GGUF: dict[str, Callable[[np.ndarray], Stored]] = {
    "Q8_0": lambda x: _by_package("Q8_0", x),
    "Q4_K": q4_k,
}


def nvfp4(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """A matrix as two numbers a byte, scales of 16 in tiles of 128 x 4, and one for all."""
    x = array.astype(F32)
    rows, columns = x.shape
    groups = x.reshape(rows, columns // 16, 16)
    whole = F32(np.abs(x).max() / (6 * 448))
    scales = (np.abs(groups).max(2) / 6 / whole).astype(E4M3)
    ratio = groups / np.maximum(scales.astype(F32) * whole, 1e-12)[:, :, None]
    table = np.array(E2M1, F32)
    q = np.abs(ratio[..., None] - table).argmin(-1).astype(np.uint8).reshape(rows, columns)
    down, right = -(-rows // 128), -(-columns // 64)
    tiles = np.zeros((128 * down, 4 * right), E4M3)
    tiles[:rows, : columns // 16] = scales
    tiles = tiles.reshape(down, 4, 32, right, 4).transpose(0, 3, 2, 1, 4)
    found: dict[str, Any] = {name: q[:, 0::2] << 4 | q[:, 1::2]}
    found[f"{name}_scale"] = np.ascontiguousarray(tiles).reshape(128 * down, 4 * right)
    return found | {f"{name}_scale_2": whole.reshape(())}
