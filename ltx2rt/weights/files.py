"""Tensors in files: headers first, data as memory-mapped views, files written as a stream.

The safetensors package says what a readable file is, as an attacker may have written it; names and
meaning are left to `names`, `configs` and `checkpoint`. A *tensor source* is anything with
`names()`, `info(name)` and `read(name)`; `TensorFile` and `TensorFolder` are two.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import stat
import struct
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ltx2rt.atomic_file import replacing
from ltx2rt.errors import InputError, few
from ltx2rt.graph.encodings import E4M3, E5M2, E8M0
from ltx2rt.graph.ir import Cut
from ltx2rt.notes import note
from ltx2rt.system import READ, first_bytes, identity, opened_at_once, pread, read_ahead, read_at
from ltx2rt.weights.names import called, official_names

DTYPES: dict[str, np.dtype] = {  # the safetensors format's names
    "BOOL": np.dtype(np.bool_),
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(E4M3),
    "F8_E5M2": np.dtype(E5M2),
    "F8_E8M0": np.dtype(E8M0),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# the bits of the least non-finite value, above zero and below; e4m3 has only NaN, and E8M0 are
# powers of two, scales of other tensors
INFINITY = {
    dtype: tuple(np.array([np.inf, -np.inf]).astype(dtype).view(f"u{dtype.itemsize}").tolist())
    for name, dtype in DTYPES.items()
    if "F" in name and name != "F8_E8M0"
}
BARE_TRANSFORMER = "audio_patchify_proj.weight"
CACHED_BYTES = 2**20
WEIGHTS = (".safetensors", ".gguf")  # suffixes of files that are looked into
# The name of a file that lists its folder's shards; diffusers and transformers have put a variant
# such as `bf16` in three places of it.
SHARD_INDEX = re.compile(
    r"(?P<stem>[^.]+)(?:\.(?P<a>[^.]+))?\.safetensors"
    r"(?:\.(?P<b>[^.]+))?\.index(?:\.(?P<c>[^.]+))?\.json"
)
SINGLE = re.compile(
    r"(?P<stem>[^.]+?)(?:\.(?P<variant>[a-zA-Z]\w*))?(?P<shard>-\d+-of-\d+)?\.safetensors"
)
VARIANTS = ("", "fp32", "bf16", "fp16")  # in the order in which they are taken
NOT_FINITE = "NaN or infinite values; download the file again"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS, MAX_NAME = 64, 1000  # numpy's limit; names are shown in messages
GGUF = b"GGUF"
FOREIGN = {  # first bytes of other files: what such a file is, and what to do
    GGUF: "a GGUF file; --model and --text-encoder read those, here a safetensors file is needed",
    b"PK": "a zip archive, as PyTorch saves .pt files; pass the same weights in safetensors",
    b"\x80": "a Python pickle, such as a .pt or .ckpt file; pass the same weights in safetensors",
    b"\x93NUMPY": "a numpy array; pass a safetensors file",
    b"\x89HDF": "an HDF5 file; pass a safetensors file",
    b"\x89PNG": "a PNG image; pass a safetensors file",
    b"\xff\xd8\xff": "a JPEG image; pass a safetensors file",
    b"GIF8": "a GIF image; pass a safetensors file",
    b"RIFF": "a WebP image or a WAV sound; pass a safetensors file",
    b"%PDF": "a PDF document; pass a safetensors file",
    b"\x1f\x8b": "a gzip archive; unpack it",
    b"7z\xbc\xaf": "a 7z archive; unpack it",
    b"<": "a web page, as a server answers in place of a file; get the file by `hf download`",
    b"Entry not found": "a server's answer in place of a file; get the file by `hf download`",
    b"{": "a JSON file; pass the safetensors file beside it",
}


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


def selected(size: int, dim: int, cuts: Iterable[Cut]) -> range:
    """The part of a dimension that cuts leave."""
    found = range(size)
    for at, start, stop in cuts:
        found = found[start:stop] if at == dim else found
    return found


class TensorReader(Protocol):
    def names(self) -> Iterable[str]: ...
    def info(self, name: str) -> TensorInfo: ...
    def read(self, name: str, *cuts: Cut) -> np.ndarray: ...


def stored_fields(source: TensorReader, format: str, name: str, *cuts: Cut) -> Any:
    """`source.stored`, for the sources that have it; else None."""
    read = getattr(source, "stored", None)
    return read(format, name, *cuts) if read else None


OPENED: weakref.WeakSet[TensorFile] = weakref.WeakSet()


class TensorFile:
    """One safetensors file. Opening reads the header; arrays are read-only views of the file,
    through one descriptor, so a file that replaces it is not mixed in."""

    def __init__(self, path: str | os.PathLike[str]):
        """Raises InputError for a file that is no safetensors file, a git-lfs pointer or a FIFO."""
        self.path = Path(path)
        try:
            self._file = os.open(path, READ)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot read: {getattr(error, 'strerror', error)}") from error
        weakref.finalize(self, os.close, self._file)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise InputError(f"{path}: not a regular file; pass a safetensors file")
        self.identity = identity(self._file)
        self.metadata, self._tensors = self._header()
        self._map = mmap.mmap(self._file, 0, access=mmap.ACCESS_READ)
        self.address = np.frombuffer(self._map, np.uint8).ctypes.data
        OPENED.add(self)

    def _header(self) -> tuple[dict[str, str], dict[str, tuple[TensorInfo, int]]]:
        """Metadata, and (info, first byte) by name, with the official prefix. Raises InputError."""
        metadata, tensors = _parsed(self._file, self.path)
        if BARE_TRANSFORMER in tensors:
            names = self.official(tensors)
            tensors = {names[name]: each for name, each in tensors.items()}
        return metadata, tensors

    def official(self, names: Iterable[str]) -> dict[str, str]:
        """The official name of each. Raises InputError if two become one."""
        found = official_names(names)
        if len(set(found.values())) < len(found):
            raise InputError(f"{self.path}: names with and without prefix clash; pass another file")
        return found

    def check(self) -> None:
        """Raises InputError if the file has changed since it was opened."""
        if identity(self._file) != self.identity:
            raise InputError(
                f"{self.path}: changed since it was opened; start again when it is complete"
            )

    @property
    def architecture(self) -> str:
        """The architecture that a GGUF file states, such as "ltxv" or "gemma3"; else empty."""
        return self.metadata.get("general.architecture", "")

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def info(self, name: str) -> TensorInfo:
        return self._tensors[name][0]

    def places(self) -> Iterable[tuple[TensorInfo, int]]:
        """Info and first byte of each tensor."""
        return self._tensors.values()

    def read(self, name: str, *cuts: Cut) -> np.ndarray:
        """The tensor, or a slice of it.

        Raises InputError if the file has changed since it was opened, and for values that are NaN
        or infinite. Touching the array once the file has become shorter is a SIGBUS.
        """
        info, begin = self._tensors[name]
        self.check()
        if 0 in info.shape:
            return cut(np.empty(info.shape, info.dtype), *cuts)
        whole = np.frombuffer(self._map, info.dtype, math.prod(info.shape), begin)
        array = cut(whole.reshape(info.shape), *cuts)
        if not finite(array):
            raise InputError(f"{self.path}: {name} holds {NOT_FINITE}")
        return array

    def read_into(self, place: memoryview, begin: int) -> None:
        """Fill `place` with bytes from `begin` on. Raises InputError if the file has changed."""
        try:
            read_at(self._file, place, begin)
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot read: {error.strerror}; check the disk"
            ) from error
        self.check()

    def read_ahead(self, begin: int, size: int) -> None:
        read_ahead(self._file, begin, size)

    def unmap(self, begin: int, size: int) -> None:
        """Release the pages of these bytes, which this process needs no more."""
        start = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, begin + size - start)


def in_file(array: np.ndarray) -> tuple[TensorFile, int] | None:
    """The open file that holds an array's bytes in one piece, and where they begin; or None."""
    if not array.flags.c_contiguous or not array.nbytes:
        return None
    for file in list(OPENED):
        begin = array.ctypes.data - file.address
        if 0 <= begin <= file.identity[2] - array.nbytes:
            return file, begin
    return None


def unchanged() -> list[TensorFile]:
    """The open files that are as they were when they were opened."""
    return [file for file in list(OPENED) if identity(file._file) == file.identity]


def check_opened(files: Iterable[TensorFile] | None = None) -> None:
    """Raises InputError if one of the files, or of all that are open, has changed."""
    for file in list(OPENED) if files is None else files:
        file.check()


def finite(array: np.ndarray) -> bool:
    """Whether no value is NaN or infinite: as integers, those are the largest of either sign.

    Faster than a sum: few blocks of weights have a value above 2, without which no exponent has all
    its bits.
    """
    if array.dtype not in INFINITY or array.size == 0:
        return True
    (above, below), bits = INFINITY[array.dtype], np.atleast_1d(array).view(f"u{array.itemsize}")
    # rows at once, so that later passes find them cached
    step = max(1, CACHED_BYTES * len(bits) // bits.nbytes)

    def passes(part: np.ndarray) -> bool:
        if array.itemsize > 1 and int(np.bitwise_or.reduce(part, axis=None)) & above != above:
            return True
        return part.max() < below and part.view(f"i{array.itemsize}").max() < above

    return all(passes(bits[row : row + step]) for row in range(0, len(bits), step))


class Gathered:
    """Tensors of several sources as one. home: the source of each name, and the name there."""

    def __init__(self, home: Mapping[str, tuple[TensorReader, str]]):
        self._home = dict(home)

    def names(self) -> Iterable[str]:
        return self._home.keys()

    def info(self, name: str) -> TensorInfo:
        source, stored = self._home[name]
        return source.info(stored)

    def read(self, name: str, *cuts: Cut) -> np.ndarray:
        source, stored = self._home[name]
        return source.read(stored, *cuts)

    def stored(self, format: str, name: str, *cuts: Cut) -> Any:
        source, stored = self._home[name]
        return stored_fields(source, format, stored, *cuts)


class TensorFolder(Gathered):
    """Several files read as one source; a name may live in one file only."""

    def __init__(self, path: Path, files: Iterable[TensorFile]):
        self.path = path
        self.files = list(files)
        self.metadata = self.files[0].metadata if self.files else {}
        home: dict[str, TensorFile] = {}
        for file in self.files:
            for name in file.names():
                if (other := home.setdefault(name, file)) is not file:
                    raise InputError(
                        f"{path}: tensor {name} is in both {other.path.name} and {file.path.name}"
                    )
        super().__init__({name: (file, name) for name, file in home.items()})

    @property
    def architecture(self) -> str:
        return self.files[0].architecture if self.files else ""


def open_file(path: str | os.PathLike[str]) -> TensorFile | TensorFolder:
    """A safetensors or GGUF file, by its first bytes, with all split parts. Raises InputError."""
    from ltx2rt.weights.gguf import GgufFile

    file = open_one(path)
    return file.whole() if isinstance(file, GgufFile) else file


def open_one(path: str | os.PathLike[str]) -> TensorFile:
    from ltx2rt.weights.gguf import GgufFile

    return GgufFile(path) if first_bytes(path, len(GGUF)) == GGUF else TensorFile(path)


def open_tensors(path: str | os.PathLike[str]) -> TensorFile | TensorFolder:
    """Open a file, an index of shards, or a folder with one model's file, shards or variants."""
    path = Path(path)
    if not path.is_dir():
        return _open_shards(path, path) if SHARD_INDEX.fullmatch(path.name) else open_file(path)
    forms = _forms(path)
    if len({stem for stem, _ in forms}) > 1 or not forms:
        found = few(file.name for files in forms.values() for file in files)
        raise InputError(f"{path}: expected one .safetensors file or a shard index, found {found}")
    if len(forms) > 1:
        kinds = ", ".join(sorted(variant or "plain" for _, variant in forms))
        note(f"{path}: of its variants ({kinds}) one is read")
    order = {name: place for place, name in enumerate(VARIANTS)}
    files = forms[min(forms, key=lambda each: (order.get(each[1], len(order)), each))]
    if SHARD_INDEX.fullmatch(files[0].name):
        return _open_shards(path, files[0])
    if len(files) == 1 and "-of-" not in files[0].name:
        return TensorFile(files[0])
    count = int(files[0].stem.rpartition("-of-")[2])
    if len(files) != count:
        raise InputError(f"{path}: {len(files)} of {count} shards and no index; download them all")
    return TensorFolder(path, [TensorFile(file) for file in files])


def _forms(folder: Path) -> dict[tuple[str, str], list[Path]]:
    """Files by start of name and variant: an index, one file, or shards without an index."""
    indices, files = {}, defaultdict(list)
    for file in visible(folder):
        if (match := SHARD_INDEX.fullmatch(file.name)) and file.is_file():
            variant = next((each for each in match.group("a", "b", "c") if each), "")
            indices[match["stem"], variant] = [file]
        elif file.suffix == ".safetensors":
            match = SINGLE.fullmatch(file.name)
            form = (match["stem"], match["variant"] or "") if match else (file.stem, "")
            files[form].append(file)
    stems = {stem for stem, _ in indices}
    return {form: each for form, each in (files | indices).items() if form[0] in stems or not stems}


def visible(folder: Path) -> list[Path]:
    """A folder's entries, sorted, without hidden ones. Raises OSError."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith((".", "__MACOSX")))


def read_index(index: Path) -> dict[str, Path]:
    """The shard of each tensor. Raises InputError if the file is no shard index."""
    try:
        with open(index, "rb", opener=opened_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError(f"{index}: not a regular file; pass a shard index")
            shards = json.loads(file.read())["weight_map"]
        for name, shard in shards.items():
            if not isinstance(shard, str):
                raise InputError(
                    f"{index}: weight_map of {name[:80]} is {str(shard)[:80]!r}, expected the "
                    "name of a file beside it"
                )
        places = {shard: index.parent / shard for shard in set(shards.values())}
        return {called(name): places[shard] for name, shard in shards.items()}
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{index}: cannot read: {error.strerror}; check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{index}: not a shard index: {error}") from error


def _open_shards(path: Path, index: Path) -> TensorFolder:
    home = read_index(index)
    folder = TensorFolder(path, [TensorFile(shard) for shard in sorted(set(home.values()))])
    if missing := sorted(home.keys() - set(folder.names())):
        raise InputError(
            f"{index}: {len(missing)} tensors of the index are in no shard, first {missing[0]}"
        )
    return folder


def _parsed(file: int, path: Path) -> tuple[dict[str, str], dict[str, tuple[TensorInfo, int]]]:
    """(metadata, name -> (info, first byte)) of an open file, read by safetensors."""
    if (start := pread(file, 24, 0)).startswith(b"version https://git-lfs"):
        raise InputError(
            f"{path}: a git-lfs pointer, not the weights; run `git lfs pull` in its repository"
        )
    try:
        named = f"/dev/fd/{file}"  # the same file, whatever has the path's name by now
        with safe_open(named if os.path.exists(named) else path, "np") as parsed:
            metadata = parsed.metadata() or {}
            slices = [(name, parsed.get_slice(name)) for name in parsed.offset_keys()]
            header = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices]
    except (SafetensorError, OSError) as error:
        if said := foreign(start):
            raise InputError(f"{path}: not a safetensors file but {said}") from error
        said = f"{os.fstat(file).st_size} bytes; {' '.join(str(error).split())[:200]}"
        raise InputError(
            f"{path}: truncated, damaged or not a safetensors file ({said}); download it again"
        ) from error
    tensors, end = {}, 8 + int.from_bytes(start[:8], "little")
    for name, dtype, shape in header:
        if not name.isprintable() or len(name) > MAX_NAME:
            said = f"is not printable or longer than {MAX_NAME}: {name[:40]!r}"
            raise InputError(f"{path}: a tensor's name {said}")
        if dtype not in DTYPES:
            said = f"unknown dtype {dtype}, known are {', '.join(DTYPES)}"
            raise InputError(f"{path}: tensor {name}: {said}")
        info = TensorInfo(shape, DTYPES[dtype])
        if len(shape) > MAX_DIMS or math.prod(filter(None, shape)) * info.dtype.itemsize >= 2**63:
            said = f"no array has {len(shape)} dimensions of such sizes"
            raise InputError(f"{path}: tensor {name}: {said}")
        tensors[called(name)] = info, end
        end += info.nbytes
    return metadata, tensors


def foreign(start: bytes) -> str | None:
    """The format of a file with these first bytes, and advice. None: safetensors, or not known."""
    if start[4:9] == b"\0\0\0\0{":  # the end of a header's length, and its beginning
        return None
    start = start.removeprefix(b"\xef\xbb\xbf").lstrip() or start
    return next((said for first, said in FOREIGN.items() if start.startswith(first)), None)


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, TensorInfo],
    produce: Callable[[str], np.ndarray] | None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `path` holding one tensor at a time: `produce(name)` is called once per name, in file
    order. Without `produce` every value is zero and takes no room on a disk that knows sparse
    files. The file appears under its name only when complete. Wide dtypes come first, so every
    tensor is aligned."""
    path = Path(path)
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, dict[str, Any]] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        info, begin = tensors[name], end
        end += info.nbytes
        header[name] = {"dtype": DTYPE_NAMES[info.dtype], "shape": list(info.shape)}
        header[name] |= {"data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if produce is None:
            file.truncate(file.tell() + end)
            return
        for name in order:
            array = produce(name)
            info = tensors[name]
            if array.shape != info.shape or array.dtype != info.dtype:
                raise ValueError(f"{name}: got {array.dtype}{array.shape}, declared {info}")
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def write_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write arrays that are in memory already."""
    infos = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}
    write_tensors(path, infos, arrays.__getitem__, metadata)
