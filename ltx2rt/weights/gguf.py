"""GGUF files: the header read within bounds, and tensors decoded while they are read.

The layout is llama.cpp's ggml, versions 2 and 3, little-endian. Decides which headers are readable;
an attacker may have written them. `graph.encodings` defines the numbers of a block; `names`,
`configs` and `checkpoint` interpret names. Sources: ggml's docs/gguf.md, ggml.h, ggml-quants.c.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.graph.encodings import ENCODINGS, decoded
from ltx2rt.graph.ir import Cut
from ltx2rt.system import pread
from ltx2rt.weights.configs.transformer import KEYFRAME_VECTOR
from ltx2rt.weights.files import (
    CACHED_BYTES,
    DTYPES,
    GGUF,
    MAX_HEADER_BYTES,
    MAX_NAME,
    NOT_FINITE,
    Gathered,
    TensorFile,
    TensorFolder,
    TensorInfo,
    cut,
    finite,
    selected,
)
from ltx2rt.weights.names import official_names
from ltx2rt.weights.quant.packed import Fields, Packed

F32 = np.dtype(np.float32)


@dataclass(frozen=True)
class BlockFormat:
    """weights: in a block. size: its bytes."""

    name: str
    weights: int
    size: int

    @property
    def read(self) -> bool:
        return self.name in ENCODINGS


# By ggml's number of the type: the names of types that have an encoding, name and sizes of others.
READ = {2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
        13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 23: "IQ4_XS"}  # fmt: skip
OTHERS = {
    9: ("Q8_1", 32, 40), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
FIELDS = {code: (name, ENCODINGS[name].fields[0]) for code, name in READ.items()}
BLOCKS = {code: BlockFormat(name, own.weights, own.size) for code, (name, own) in FIELDS.items()}
BLOCKS |= {code: BlockFormat(*about) for code, about in OTHERS.items()}
PLAIN = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
SPLIT = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
VERSIONS = (2, 3)
SCALARS = dict(zip(range(8), ("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?"), strict=True))
SCALARS |= {10: "<Q", 11: "<q", 12: "<d"}  # codes of `struct` by value type
FLOAT, STRING, ARRAY = 6, 8, 9  # numbers of value types
ORIGINAL_SHAPE = "comfy.gguf.orig_shape."  # and a tensor's name: its shape if stored in another
MAX_KEYS, MAX_TENSORS, MAX_DIMS = 10_000, 100_000, 4
MAX_NUMBERS = 256  # in an array that counts as metadata: one for each layer
MAX_STRINGS = 4_000_000  # in arrays: a vocabulary and its merges have less than a million
CHUNK = CACHED_BYTES // 4  # weights that are decoded at once, so that later passes find them cached
BY_NAME = {block.name: block for block in BLOCKS.values()}
READ_TYPES = ", ".join(block.name for block in BLOCKS.values() if block.read)
UNREAD = np.dtype(np.uint8)  # the dtype of tensors of unread types: their bytes


class GgufFile(TensorFile):
    """One GGUF file, as `TensorFile` is one safetensors file. Opening reads the header only.

    F32, F16, BF16 and integers are read-only views of the mapped file. Every other type is read as
    float32, which a backend rounds once; its `info` is a `Packed`, and only the blocks that a slice
    touches are decoded. Shapes are [out, in], the reverse of the stored order. metadata: strings as
    they are; numbers, booleans and short arrays of them as JSON. `arrays` reads the others.
    """

    def _header(self) -> tuple[dict[str, str], dict[str, tuple[TensorInfo, int]]]:
        if pread(self._file, len(GGUF), 0) != GGUF:
            raise InputError(f"{self.path}: not a GGUF file; pass one, or a safetensors file")
        with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as data:
            reader = HeaderReader(data, self.path)
            metadata, tensors = reader.read()
        self.long_arrays = {key for key, value in reader.values.items() if value == ()}
        names = self.official(tensors)
        self._stored_names = {official: name for name, official in names.items()}
        found = {names[name]: each for name, each in tensors.items()}
        if KEYFRAME_VECTOR in found and len((info := found[KEYFRAME_VECTOR][0]).shape) == 1:
            shape = (1, *info.shape)  # ggml's own tools drop outer dimensions of 1
            found[KEYFRAME_VECTOR] = replace(info, shape=shape), found[KEYFRAME_VECTOR][1]
        return metadata, found

    def arrays(self, *keys: str) -> dict[str, list[Any]]:
        """The values of these keys that are arrays, of any length. Reads the header again."""
        with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as data:
            reader = HeaderReader(data, self.path, keys)
            reader.read()
        return {key: list(reader.values[key]) for key in keys if key in reader.values}

    def whole(self) -> TensorFile | TensorFolder:
        """This file, or all parts of a split one. Raises InputError if one is missing."""
        text = self.metadata.get("split.count", "1")
        if not re.fullmatch("[0-9]{1,5}", text):
            raise InputError(f"{self.path}: split.count = {text!r:.40} is no number of files")
        if (count := int(text)) <= 1:
            return self
        paths = split_parts(self.path)
        if len(paths) != count:
            raise InputError(
                f"{self.path}: one of {count} parts of a split GGUF file, but its name is not "
                f"NAME-0000N-of-{count:05}.gguf, by which the others are found; rename it"
            )
        if missing := [path.name for path in paths if not path.exists()]:
            raise InputError(
                f"{self.path}: one of {count} parts of a split GGUF file, and {missing[0]} is "
                "not beside it; download all parts"
            )
        files = [self if path == self.path else GgufFile(path) for path in paths]
        names = official_names(name for file in files for name in file._stored_names.values())
        for file in files:
            old = file._stored_names
            file._tensors = {names[old[name]]: found for name, found in file._tensors.items()}
        return TensorFolder(paths[0], files)

    def read(self, name: str, *cuts: Cut) -> np.ndarray:
        """The tensor or a slice, in `info(name).dtype`. Raises InputError, as for unread types."""
        info, begin = self._tensors[name]
        if not isinstance(info, Packed):
            return super().read(name, *cuts)
        block = BY_NAME[info.format]
        if not block.read:
            raise InputError(f"{self.path}: {name} is {unread(info.format)}")
        if 0 in info.shape:
            self.check()
            return cut(np.empty(info.shape, F32), *cuts)
        size = info.shape[-1]
        if size % block.weights:  # rows that share blocks, as ORIGINAL_SHAPE makes them
            self.check()
            stored = np.frombuffer(self._map, np.uint8, info.nbytes, begin)
            rows = stored.reshape(-1, block.size)
            return cut(self._decoded(name, block, rows).reshape(info.shape), *cuts)
        stored, columns = self._blocks(name, *cuts)
        rows = stored.reshape(math.prod(stored.shape[:-2]), -1 if stored.size else 0)
        array = self._decoded(name, block, rows)
        array = array.reshape(*stored.shape[:-2], stored.shape[-2] * block.weights)
        begin = columns.start % block.weights
        return array[..., begin : begin + len(columns)]

    def _blocks(self, name: str, *cuts: Cut) -> tuple[np.ndarray, range]:
        """The blocks that a slice touches, uint8 [..., blocks of a row, bytes], and its columns."""
        self.check()
        info, begin = self._tensors[name]
        assert isinstance(info, Packed)
        block, (*rest, size) = BY_NAME[info.format], info.shape
        columns = selected(size, len(rest), cuts)
        first, last = columns.start // block.weights, -(-columns.stop // block.weights)
        stored = np.frombuffer(self._map, np.uint8, info.nbytes, begin)
        stored = stored.reshape(*rest, size // block.weights, block.size)
        above = (c for c in cuts if c[0] < len(rest))
        return cut(stored, *above, (len(rest), first, last)), columns

    def stored(self, format: str, name: str, *cuts: Cut) -> Fields | None:
        """The bytes of a matrix, or of a slice of whole blocks, uint8 [rows, bytes of a row]; None
        if it is not stored in the format. Raises InputError if the file has changed, and for NaN or
        infinite scales: all other blocks hold finite numbers."""
        info = self.info(name)
        if not isinstance(info, Packed) or info.format != format:
            return None
        blocks, _ = self._blocks(name, *cuts)
        for at in ENCODINGS[format].halves:
            if not finite(blocks[..., at : at + 2].view(np.float16)):
                raise InputError(f"{self.path}: {name} holds {NOT_FINITE}")
        return (blocks.reshape(len(blocks), -1),)

    def _decoded(self, name: str, block: BlockFormat, rows: np.ndarray) -> np.ndarray:
        """float32 [n, weights of a row]. rows: uint8 [n, bytes]; some are decoded at a time."""
        width = rows.shape[1] // block.size * block.weights
        array = np.empty((len(rows), width), F32)
        step = max(1, CHUNK // max(1, width))
        for row in range(0, len(rows) if width else 0, step):
            with np.errstate(invalid="ignore"):  # what comes of an infinite scale is refused below
                part = decoded(block.name, (rows[row : row + step],))
            if not finite(part):
                raise InputError(f"{self.path}: {name} holds {NOT_FINITE}")
            array[row : row + step] = part
        return array


def unread(type_: str) -> str:
    """The end of a message about tensors of a type that is not read."""
    return (
        f"of type {type_}, which is not read; pass a file with other types, such as Q4_K or "
        f"Q8_0 (read: {READ_TYPES})"
    )


def split_parts(path: Path) -> list[Path]:
    """All parts of the GGUF file that llama.cpp has split into files named so; else the path."""
    if (match := SPLIT.fullmatch(path.name)) is None:
        return [path]
    name, count = match["name"], int(match["count"])
    return [path.with_name(f"{name}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


def later_part(path: Path) -> bool:
    """Whether a name belongs to a later part of a split GGUF file."""
    match = SPLIT.fullmatch(path.name)
    return match is not None and int(match["number"]) > 1


class CenteredNorms(Gathered):
    """A text encoder in llama.cpp's layout, which stores RMSNorm weights as 1 + w. They are read as
    w, in float32. Source: llama.cpp's convert_hf_to_gguf.py, Gemma3Model.norm_shift."""

    def info(self, name: str) -> TensorInfo:
        info = super().info(name)
        return TensorInfo(info.shape, F32) if name.endswith("norm.weight") else info

    def read(self, name: str, *cuts: Cut) -> np.ndarray:
        array = super().read(name, *cuts)
        return array.astype(F32) - np.float32(1) if name.endswith("norm.weight") else array

    def stored(self, format: str, name: str, *cuts: Cut) -> Fields | None:
        norm = name.endswith("norm.weight")
        return None if norm else super().stored(format, name, *cuts)


class HeaderReader:
    """A header read from its beginning on; `at` is the next byte. Methods raise InputError."""

    def __init__(self, data: mmap.mmap, path: Path, keep: Collection[str] = ()):
        """keep: keys of arrays to keep, whatever their length."""
        self.data, self.path, self.at, self.keep = data, path, len(GGUF), keep
        self.values: dict[str, Any] = {}
        self.end = min(len(data), MAX_HEADER_BYTES)
        self.strings = 0

    def damaged(self, found: str) -> InputError:
        return InputError(
            f"{self.path}: truncated or damaged GGUF file ({len(self.data)} bytes; {found}); "
            "download it again"
        )

    def skip(self, count: int) -> int:
        """Position of the next `count` bytes, which are skipped."""
        begin, self.at = self.at, self.at + count
        if self.at <= self.end:
            return begin
        if self.end < len(self.data):
            raise InputError(
                f"{self.path}: its header is larger than {MAX_HEADER_BYTES} bytes; pass "
                "another file"
            )
        raise self.damaged("it ends within its header")

    def number(self, code: str) -> Any:
        return struct.unpack_from(code, self.data, self.skip(struct.calcsize(code)))[0]

    def text(self) -> str:
        length = self.number("<Q")
        begin = self.skip(length)
        return self.data[begin : self.at].decode("utf-8", "replace")

    def count(self, what: str, most: int) -> int:
        if (found := self.number("<Q")) > most:
            raise self.damaged(f"{found} {what}, expected at most {most}")
        return found

    def read(self) -> tuple[dict[str, str], dict[str, tuple[TensorInfo, int]]]:
        """Metadata as `GgufFile` has it, and (info, first byte in the file) by stored name."""
        if (version := self.number("<I")) not in VERSIONS:
            big = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            said = "big-endian" if big else f"of GGUF version {version}"
            raise InputError(f"{self.path}: it is {said}; pass one of version 3, little-endian")
        num_tensors = self.count("tensors", MAX_TENSORS)
        num_keys = self.count("keys", MAX_KEYS)
        values = self.values
        for _ in range(num_keys):
            key = self.name("key")
            if key in values:
                raise self.damaged(f"two keys {key}")
            values[key] = self.value(key)
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment % 8:
            raise self.damaged(f"general.alignment is {alignment!r:.40}, expected a multiple of 8")
        listed = [self.tensor() for _ in range(num_tensors)]
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, tuple[TensorInfo, int]] = {}
        for name, info, offset in listed:
            if name in tensors:
                raise self.damaged(f"two tensors {name}")
            if offset % alignment:
                raise self.damaged(
                    f"tensor {name} is at {offset}, expected a multiple of {alignment}"
                )
            shape = values.get(ORIGINAL_SHAPE + name, info.shape)
            whole = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
            if not whole or math.prod(shape) != math.prod(info.shape):
                raise self.damaged(f"tensor {name} is of {list(info.shape)}, was {shape!r:.80}")
            tensors[name] = replace(info, shape=shape), start + offset
        self.check_places(tensors)
        short = {key: value for key, value in values.items() if value != ()}
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in short.items()}
        return texts, tensors

    def name(self, what: str) -> str:
        name = self.text()
        if not name.isprintable() or len(name) > MAX_NAME or "\ufffd" in name:
            raise self.damaged(
                f"the name of a {what} is not printable or longer than {MAX_NAME}: {name[:40]!r}"
            )
        return name

    def value(self, key: str) -> Any:
        """An array is a tuple if it has few numbers or is kept; any other is passed over, ()."""
        kind = self.number("<I")
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array(key)
        if kind not in SCALARS:
            raise self.damaged(f"key {key} has a value of unknown type {kind}")
        value = self.number(SCALARS[kind])
        # A float32 of 1e-06 is 1e-06, not the float64 that has the same value.
        return float(str(np.float32(value))) if kind == FLOAT else value

    def array(self, key: str) -> tuple[Any, ...]:
        kind, count = self.number("<I"), self.number("<Q")
        if kind in SCALARS:
            begin = self.skip(count * struct.calcsize(SCALARS[kind]))
            if count > MAX_NUMBERS and key not in self.keep:
                return ()
            return struct.unpack_from(f"<{count}{SCALARS[kind][1]}", self.data, begin)
        if kind != STRING:
            raise self.damaged(f"key {key} is an array of values of unknown type {kind}")
        self.strings += count
        if self.strings > MAX_STRINGS:
            raise self.damaged(
                f"{self.strings} strings up to key {key}, expected at most {MAX_STRINGS}"
            )
        if key in self.keep:
            return tuple(self.text() for _ in range(count))
        for _ in range(count):
            self.skip(self.number("<Q"))
        return ()

    def tensor(self) -> tuple[str, TensorInfo, int]:
        """Name, type and shape, and the offset in the data."""
        name, num_dims = self.name("tensor"), self.number("<I")
        if num_dims > MAX_DIMS:
            said = f"{num_dims} dimensions, expected at most {MAX_DIMS}"
            raise self.damaged(f"tensor {name} has {said}")
        shape = tuple(reversed([self.number("<Q") for _ in range(num_dims)]))
        code, offset = self.number("<I"), self.number("<Q")
        if code not in PLAIN and code not in BLOCKS:
            said = f"tensor {name} is of unknown type {code}"
            raise InputError(f"{self.path}: {said}; pass a file with {READ_TYPES}")
        if math.prod(filter(None, shape)) >= 2**60:
            raise self.damaged(f"tensor {name}: no array has the sizes {list(shape)}")
        if code in PLAIN:
            return name, TensorInfo(shape, DTYPES[PLAIN[code]]), offset
        block = BLOCKS[code]
        if not shape or shape[-1] % block.weights:
            raise self.damaged(
                f"tensor {name} has the sizes {list(shape)}, rows of {block.name} are of whole "
                f"blocks of {block.weights}"
            )
        size = math.prod(shape) // block.weights * block.size
        dtype = F32 if block.read else UNREAD
        packed = Packed(shape, dtype, block.name, size, block.weights, block.name)
        return name, packed, offset

    def check_places(self, tensors: dict[str, tuple[TensorInfo, int]]) -> None:
        """Every tensor is within the file, and no two share bytes."""
        end, before = 0, ""
        placed = sorted((begin, info.nbytes, name) for name, (info, begin) in tensors.items())
        for begin, size, name in placed:
            if begin < end:
                raise self.damaged(f"tensors {before} and {name} share bytes")
            end, before = begin + size, name
            if end > len(self.data):
                raise self.damaged(f"tensor {name} ends at byte {end}")
