"""Quantised files: a stored matrix and its companions, read as the float32 matrix that they stand
for.

| format | `X.weight` | companions |
|---|---|---|
| float8 | e4m3 [out, in] | `X.weight_scale` f32: one number, or [out, 1] |
| int8   | int8 [out, in], rotated if `comfy_quant` says so | `X.weight_scale` as above, \
`X.comfy_quant` uint8: JSON |
| nvfp4  | uint8 [out, in/2], two e2m1 numbers each, the high half first | `X.weight_scale` e4m3 \
for each 16 inputs, in the tiles of `swizzled`; `X.weight_scale_2` f32: one number |

ComfyUI's older "scaled" float8 files call the scale `X.scale_weight`, and have one tensor
`scaled_fp8` as a mark. Each may have `X.input_scale`, of activations that are quantised by a fixed
scale, and nvfp4 `X.torchao_nvfp4`, JSON that repeats the layout; neither is used. Which matrices
are stored so is discovered from the header, never assumed: releases differ in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.graph import encodings
from ltx2rt.graph.encodings import E4M3_FORMAT, KEPT, decoded
from ltx2rt.graph.ir import Cut
from ltx2rt.weights.files import TensorFile, TensorFolder, TensorInfo, TensorReader, selected

E4M3, F32 = np.dtype(encodings.E4M3), np.dtype(np.float32)
SCALES = ("weight_scale", "scale_weight")
COMPANIONS = (
    *SCALES,
    "weight_scale_2",
    "input_scale",
    "scale_input",
    "comfy_quant",
    "torchao_nvfp4",
)
MARK = "scaled_fp8"
BLOCK = 16  # inputs that share a scale in nvfp4
# Fields of an encoding (`graph.encodings`), or numbers [rows, n] and None: to be encoded with one
# scale.
Fields = tuple[Any, ...]


@dataclass(frozen=True)
class Packed(TensorInfo):
    """shape, dtype: of what reading gives. nbytes: of what is stored. group: inputs that are
    decoded together."""

    format: str
    stored_bytes: int
    group: int = 1
    scale: str = ""  # the name of the tensor with the scales

    @property
    def nbytes(self) -> int:
        return self.stored_bytes

    @property
    def stored_as(self) -> str:
        """`Encoding.format` of the encoding that has its fields."""
        rotated = self.format == "int8" and self.group > 1
        return f"int8 rotated by {self.group}" if rotated else self.format

    @property
    def kept(self) -> str:
        """The encoding in which it is decoded, or kept."""
        return KEPT[self.stored_as]

    @property
    def encoding(self) -> str | None:
        """The encoding in which a device can keep the matrix as it is stored."""
        whole = len(self.shape) == 2 and self.shape[1] % self.group == 0
        return KEPT.get(self.stored_as) if whole else None


class Dequantised:
    """A file (or the files of a folder) whose quantised matrices are read as float32; companions
    have no name."""

    def __init__(self, file: TensorFile | TensorFolder):
        """Raises InputError for companions that do not fit their matrix."""
        self.file, self.path, self.metadata = file, file.path, file.metadata
        names = set(file.names())
        self._packed = {name: packed for name in names if (packed := _packed(file, name, names))}
        self._hidden = {
            name[: -len("weight")] + companion for name in self._packed for companion in COMPANIONS
        }
        if self._packed:
            self._hidden |= {name for name in names if name.rpartition(".")[2] == MARK}

    def names(self) -> Iterable[str]:
        return (name for name in self.file.names() if name not in self._hidden)

    def info(self, name: str) -> TensorInfo:
        return self._packed.get(name) or self.file.info(name)

    def read(self, name: str, *cuts: Cut) -> np.ndarray:
        """The matrix, or a slice of it, for which only what is stored for it is read."""
        packed = self._packed.get(name)
        if packed is None:
            return self.file.read(name, *cuts)
        rows, columns = (selected(size, dim, cuts) for dim, size in enumerate(packed.shape))
        start = columns.start // packed.group * packed.group
        stop = -(-columns.stop // packed.group) * packed.group
        whole = (0, rows.start, rows.stop), (1, start, stop)
        array = decoded(packed.kept, _fields(self.file, name, packed, *whole))
        return array[:, columns.start - start : columns.stop - start]

    def stored(self, format: str, name: str, *cuts: Cut) -> Fields | None:
        """The fields as they are stored; None for what is not stored in the format."""
        packed = self._packed.get(name)
        if packed is None or packed.stored_as != format:
            return None
        rows, columns = (selected(size, dim, cuts) for dim, size in enumerate(packed.shape))
        whole = (0, rows.start, rows.stop), (1, columns.start, columns.stop)
        return _fields(self.file, name, packed, *whole)


def dequantised(file: Any) -> Any:
    """The file (or another source) itself, or as `Dequantised` if it holds what one can be read
    of."""
    if not isinstance(file, (TensorFile, TensorFolder)):
        return file
    found = Dequantised(file)
    return found if found._packed else file


def stored_fields(source: TensorReader, format: str, name: str, *cuts: Cut) -> Fields | None:
    """`source.stored`, for the sources that have it."""
    read = getattr(source, "stored", None)
    return read(format, name, *cuts) if read else None


# ---- recognising ---------------------------------------------------------------------------------


def _packed(file: TensorFile | TensorFolder, name: str, names: set[str]) -> Packed | None:
    """A quantised matrix by the header (and its JSON); None for any other tensor."""
    stem = name[: -len("weight")]
    scale = next((stem + each for each in SCALES if stem + each in names), "")
    if not name.endswith(".weight") or not scale or len(file.info(name).shape) != 2:
        return None
    (rows, columns), dtype = file.info(name).shape, file.info(name).dtype
    size = sum(
        file.info(stem + part).nbytes for part in ("weight", *COMPANIONS) if stem + part in names
    )
    if dtype == np.uint8 and f"{stem}weight_scale_2" in names and scale == f"{stem}weight_scale":
        shape = (rows, 2 * columns)
        expected = -(-rows // 128) * 128 * -(-shape[1] // BLOCK // 4) * 4
        _expect(file, f"{stem}weight_scale", prod(file.info(f"{stem}weight_scale").shape) == expected,
                f"{expected} scales, for each {BLOCK} inputs in tiles of 128x4")  # fmt: skip
        _expect(
            file,
            f"{stem}weight_scale_2",
            prod(file.info(f"{stem}weight_scale_2").shape) == 1,
            "one number",
        )
        _expect(file, name, shape[1] % BLOCK == 0, f"a multiple of {BLOCK // 2} bytes in each row")
        return Packed(shape, F32, "nvfp4", size, BLOCK)
    if dtype not in (E4M3, np.int8):
        return None
    fits = file.info(scale).shape in ((), (1,), (rows, 1))
    _expect(file, scale, fits, f"one number or [{rows}, 1]")
    group = (
        _rotation(file, f"{stem}comfy_quant")
        if f"{stem}comfy_quant" in names and dtype == np.int8
        else 1
    )
    _expect(file, name, columns % group == 0, f"rows of groups of {group}")
    return Packed(
        (rows, columns), F32, E4M3_FORMAT if dtype == E4M3 else "int8", size, group, scale
    )


def _rotation(file: TensorFile | TensorFolder, name: str) -> int:
    """Inputs that were rotated together, 1: none."""
    try:
        said = json.loads(file.read(name).tobytes())
        group = said["convrot_groupsize"] if said.get("convrot") else 1
    except (ValueError, KeyError, AttributeError) as error:
        raise InputError(
            f"{file.path}: {name} is no JSON of this format ({error}); download the file again"
        ) from None
    known = said.get("format") == "int8_tensorwise" and group in (4**power for power in range(7))
    _expect(
        file,
        name,
        known,
        f'"int8_tensorwise" in groups of a power of 4, it says {json.dumps(said)[:120]}',
    )
    return group


def _expect(file: TensorFile | TensorFolder, name: str, fits: bool, expected: str) -> None:
    if not fits:
        info = file.info(name)
        raise InputError(
            f"{file.path}: {name} is {info.dtype} {list(info.shape)}, expected {expected}; pass "
            "the bfloat16 file"
        )


# ---- decoding ------------------------------------------------------------------------------------


def _fields(file: TensorReader, name: str, packed: Packed, rows: Cut, columns: Cut) -> Fields:
    """Those of whole groups of a slice."""
    _, start, stop = columns
    if packed.format != "nvfp4":
        values = file.read(name, rows, columns)
        return values, _scale(file, packed.scale, rows)
    halves = file.read(name, rows, (1, start // 2, stop // 2))
    scales = swizzled(
        file.read(f"{name}_scale").view(E4M3), packed.shape[0], packed.shape[1] // BLOCK
    )
    scales = scales[rows[1] : rows[2], start // BLOCK : stop // BLOCK]
    return halves, scales, _scale(file, f"{name}_scale_2", rows)


def _scale(file: TensorReader, stored: str, rows: Cut) -> np.ndarray:
    """f32[rows, 1], those of the rows that are read. stored: the name of the scales."""
    scale, (_, start, stop) = file.read(stored).astype(np.float32), rows
    if scale.size == 1:
        return np.full((stop - start, 1), scale.reshape(()))
    return scale[start:stop]


def swizzled(stored: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """[rows, columns] of a matrix in tiles of 128 x 4, each of which lies as [32, 4, 4]: row mod
    32, row div 32, column mod 4; both sizes are padded to whole tiles. Source: cuBLAS, "1D block
    scaling factors layout".
    """
    down, right = -(-rows // 128), -(-columns // 4)
    tiles = stored.reshape(down, right, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return tiles.reshape(128 * down, 4 * right)[:rows, :columns]
