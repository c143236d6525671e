"""Tensors in safetensors files: headers first, data as memory-mapped views, files written as a stream.

Decides what a readable file is; leaves names and meaning to `names`, `configs` and `checkpoint`.
A *tensor source* is anything with `names()`, `info(name)` and `read(name)`; `TensorFile` and `TensorFolder` are two.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from ltx2rt.atomic_file import replacing
from ltx2rt.errors import InputError
from ltx2rt.graph.ir import Cut

DTYPES: dict[str, np.dtype] = {  # the safetensors format's names
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "I16": np.int16,
        "U16": np.uint16,
        "I32": np.int32,
        "U32": np.uint32,
        "I64": np.int64,
        "U64": np.uint64,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
    }.items()
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def cut(array: np.ndarray, *cuts: Cut) -> np.ndarray:
    """The slice of an array, a view."""
    for dim, start, stop in cuts:
        array = array[(slice(None),) * dim + (slice(start, stop),)]
    return array


class TensorSource(Protocol):
    def names(self) -> Iterable[str]: ...
    def info(self, name: str) -> TensorInfo: ...
    def read(self, name: str, *cuts: Cut) -> np.ndarray: ...


class TensorFile:
    """One safetensors file. Opening reads the header only; arrays are read-only views of the mapped file."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.metadata, self._tensors, self._data_start = read_header(self.path)
        self._map: mmap.mmap | None = None
        self.requested_bytes = 0

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def info(self, name: str) -> TensorInfo:
        return self._tensors[name][0]

    def read(self, name: str, *cuts: Cut) -> np.ndarray:
        """The tensor, or a slice of it; what is asked for adds to `requested_bytes`."""
        info, begin = self._tensors[name]
        array = cut(self._view(info.shape, info.dtype, begin), *cuts)
        self.requested_bytes += array.nbytes
        return array

    def _view(self, shape: tuple[int, ...], dtype: np.dtype, begin: int) -> np.ndarray:
        if 0 in shape:
            return np.empty(shape, dtype)
        if self._map is None:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        flat = np.frombuffer(self._map, dtype, math.prod(shape), self._data_start + begin)
        return flat.reshape(shape)


class TensorFolder:
    """Several files read as one source; a name may live in one file only."""

    def __init__(self, path: Path, files: Iterable[TensorFile]):
        self.path = path
        self.files = list(files)
        self.metadata = self.files[0].metadata if self.files else {}
        self._home: dict[str, TensorFile] = {}
        for file in self.files:
            for name in file.names():
                if name in self._home:
                    raise InputError(
                        f"{path}: tensor {name} is in both {self._home[name].path.name} and {file.path.name}"
                    )
                self._home[name] = file

    def names(self) -> Iterable[str]:
        return self._home.keys()

    def info(self, name: str) -> TensorInfo:
        return self._home[name].info(name)

    def read(self, name: str, *cuts: Cut) -> np.ndarray:
        return self._home[name].read(name, *cuts)


def open_tensors(path: str | os.PathLike[str]) -> TensorFile | TensorFolder:
    """Open a file, a folder with one `*.safetensors.index.json`, or a folder with one safetensors file."""
    path = Path(path)
    if not path.is_dir():
        return TensorFile(path)
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise InputError(f"{path}: {len(indices)} shard indices ({', '.join(i.name for i in indices)}), expected one")
    if indices:
        return _open_shards(path, indices[0])
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        found = ", ".join(f.name for f in files) or "none"
        raise InputError(f"{path}: expected one .safetensors file or a shard index, found {found}")
    return TensorFile(files[0])


def _open_shards(path: Path, index: Path) -> TensorFolder:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        shards = sorted(set(weight_map.values()))
        folder = TensorFolder(path, [TensorFile(path / shard) for shard in shards])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{index}: not a shard index: {error}") from error
    if missing := sorted(weight_map.keys() - set(folder.names())):
        raise InputError(f"{index}: {len(missing)} tensors of the index are in no shard, first {missing[0]}")
    return folder


def read_header(path: Path) -> tuple[dict[str, str], dict[str, tuple[TensorInfo, int]], int]:
    """(metadata, name -> (info, first byte within the data), first byte of the data).

    Raises InputError for a missing or truncated file, a git-lfs pointer and anything else that is no safetensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(24)
            if start.startswith(b"version https://git-lfs"):
                raise InputError(f"{path}: a git-lfs pointer, not the weights; run `git lfs pull` in its repository")
            length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else MAX_HEADER_BYTES + 1
            if length > MAX_HEADER_BYTES:
                raise InputError(f"{path}: not a safetensors file ({size} bytes, no valid header length)")
            if 8 + length > size:
                raise InputError(f"{path}: truncated: the header takes {8 + length} bytes, the file has {size}")
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}") from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise InputError(f"{path}: not a safetensors file: its header is not an object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputError(f"{path}: __metadata__ must map strings to strings")
    tensors = {name: _entry(path, name, value) for name, value in header.items()}
    end = 0
    for name, (info, begin) in sorted(tensors.items(), key=lambda item: (item[1][1], item[1][0].nbytes)):
        if begin != end:
            raise InputError(f"{path}: tensor {name} starts at byte {begin}, expected {end}")
        end = begin + info.nbytes
    if 8 + length + end != size:
        state = "truncated" if 8 + length + end > size else "has bytes that no tensor owns"
        raise InputError(f"{path}: {state}: the header describes {8 + length + end} bytes, the file has {size}")
    return metadata, tensors, 8 + length


def _entry(path: Path, name: str, value: object) -> tuple[TensorInfo, int]:
    def natural(x: object) -> bool:
        return type(x) is int and 0 <= x < 2**62

    if not isinstance(value, dict):
        raise InputError(f"{path}: tensor {name}: the header entry is not an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InputError(f"{path}: tensor {name}: unknown dtype {dtype!r}, known are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(natural(size) for size in shape):
        raise InputError(f"{path}: tensor {name}: shape {shape!r} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(natural(offset) for offset in offsets):
        raise InputError(f"{path}: tensor {name}: data_offsets {offsets!r} are not two byte positions")
    info = TensorInfo(tuple(shape), DTYPES[dtype])
    if offsets[1] - offsets[0] != info.nbytes:
        raise InputError(f"{path}: tensor {name}: {info.nbytes} bytes by shape, {offsets[1] - offsets[0]} by offsets")
    return info, offsets[0]


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, TensorInfo],
    produce: Callable[[str], np.ndarray] | None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `path` holding one tensor at a time: `produce(name)` is called once per name, in file order.
    Without `produce` every value is zero and takes no room on a disk that knows sparse files.

    The file appears under its name only when complete. Wide dtypes come first, so every tensor is aligned.
    """
    path = Path(path)
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        info = tensors[name]
        offsets = [end, end := end + info.nbytes]
        header[name] = {"dtype": DTYPE_NAMES[info.dtype], "shape": list(info.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if produce is None:
            file.truncate(file.tell() + end)
            return
        for name in order:
            array = produce(name)
            if array.shape != tensors[name].shape or array.dtype != tensors[name].dtype:
                raise ValueError(f"{name}: got {array.dtype}{array.shape}, declared {tensors[name]}")
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def write_arrays(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays that are in memory already."""
    infos = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}
    write_tensors(path, infos, arrays.__getitem__, metadata)
