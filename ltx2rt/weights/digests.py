"""Digests that tell files of weights apart, and the files that a folder or an index stands for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from ltx2rt.errors import InputError
from ltx2rt.system import identity, opened_at_once, pread
from ltx2rt.weights.files import SHARD_INDEX, WEIGHTS, open_one, read_index
from ltx2rt.weights.gguf import split_parts

SHORT_DIGEST, SHORT_BYTES = 12, 2**27  # that a header may have
SAMPLE_BYTES, WHOLE_BYTES, SAMPLES = 2**12, 2**26, 2**12  # see `digest`


def files_of(path: Path) -> list[Path]:
    """Weights and configs of a folder or a shard index. Other paths stand for themselves."""
    if path.is_dir():
        inner = (p for p in path.rglob("*") if p.suffix in WEIGHTS or p.name == "config.json")
        return sorted(p for p in inner if p.is_file())
    if SHARD_INDEX.fullmatch(path.name):
        return sorted({path, *read_index(path).values()})
    return [part for part in split_parts(path) if part.exists()] or [path]


def digest(path: str | os.PathLike[str]) -> str:
    """Sixteen hex digits that tell a file from others without its path.

    They cover its size and, of weights, the header and the first and last 4 KiB of every tensor; of
    other files all bytes, above 64 MiB 4096 pieces. Those of a folder and of a shard index are made
    of their files' digits and names. Earlier versions gave 12 digits.
    """
    path = Path(path)
    if (inner := files_of(path)) == [path]:
        return _digest(path, identity(path))
    lines = (f"{os.path.relpath(file, path)} {_digest(file, identity(file))}\n" for file in inner)
    return sha256("".join(lines).encode()).hexdigest()[:16]


def same_digest(path: Path, stated: str) -> bool:
    """Whether a file or folder has the digest that a clip states, also of an earlier version."""
    return stated == (_short(path) if len(stated) == SHORT_DIGEST else digest(path))


def _short(path: Path) -> str:
    """Twelve hex digits, as version 0.1 made them: of the size and the header of weights, of the
    size and the first MiB of other files."""
    if path.is_dir():
        inner = sorted(p for p in path.rglob("*") if p.suffix in WEIGHTS and p.is_file())
        lines = (f"{file.relative_to(path)} {_short(file)}\n" for file in inner)
        return sha256("".join(lines).encode()).hexdigest()[:SHORT_DIGEST]
    with open(path, "rb", opener=opened_at_once) as file:
        start, size = file.read(8), os.fstat(file.fileno()).st_size
        header = int.from_bytes(start, "little") if path.suffix == ".safetensors" else 2**20 - 8
        found = sha256(f"{size} ".encode() + start + file.read(min(header, SHORT_BYTES)))
    return found.hexdigest()[:SHORT_DIGEST]


@lru_cache(maxsize=4096)
def _digest(path: Path, as_it_is: tuple[int, ...]) -> str:
    """as_it_is: the file's `identity`."""
    size = as_it_is[2]
    found = sha256(f"{size} ".encode())
    with open(path, "rb", opener=opened_at_once) as file:
        for begin, length in _sampled(path, size):
            found.update(pread(file.fileno(), length, begin))
    return found.hexdigest()[:16]


def _sampled(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """(first byte, number of bytes) of the pieces that a digest covers."""
    tensors: list[tuple[int, int]] = []
    if path.suffix in WEIGHTS:
        with suppress(InputError):
            tensors = sorted((begin, info.nbytes) for info, begin in open_one(path).places())
    if tensors:
        yield 0, tensors[0][0]
        for begin, length in tensors:
            yield begin, min(length, SAMPLE_BYTES)
            yield begin + max(length - SAMPLE_BYTES, 0), SAMPLE_BYTES
    elif size <= WHOLE_BYTES:
        yield 0, size
    else:
        step = WHOLE_BYTES // SAMPLES
        yield from ((i * (size - step) // (SAMPLES - 1), step) for i in range(SAMPLES))


def digests(paths: Iterable[Path]) -> dict[str, str]:
    """The size and digest of every file, and of every file in every folder."""
    files: list[Path] = []
    for path in paths:
        files += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    found = {}
    for file in files:
        try:
            said = f"{file.stat().st_size} bytes, digest {_digest(file, identity(file))}"
        except OSError as error:
            said = f"unreadable ({error.strerror})"
        found[str(file)] = said
    return found
