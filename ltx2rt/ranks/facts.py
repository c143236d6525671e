"""Facts that ranks compare before they work together: versions, and the files that they read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ltx2rt.version import VERSION

HEAD_BYTES = (
    1 << 20
)  # the part of a file without a header that the digest covers, in addition to the size


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of ltx2rt and of the installed packages among `packages`."""
    found = {"ltx2rt": VERSION}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def digests(paths: Sequence[Path]) -> dict[str, str]:
    """Size and digest of the header of every file, and of every file in every folder; no tensor
    data is read."""
    files: list[Path] = []
    for path in paths:
        files += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return {str(file): _digest(file) for file in files}


def _digest(path: Path) -> str:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = min(size, HEAD_BYTES)
            if path.suffix == ".safetensors":
                length = min(size, 8 + int.from_bytes(file.read(8), "little"))
                file.seek(0)
            digest = hashlib.sha256()
            while length > 0 and (data := file.read(min(length, HEAD_BYTES))):
                digest.update(data)
                length -= len(data)
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return f"{size} bytes, header {digest.hexdigest()[:12]}"
