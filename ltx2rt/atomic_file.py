"""Files that appear under their name only when complete.

Decides the name of the unfinished file: it follows from the writing process alone, so that whoever outlives that
process can remove it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def partial_path(path: Path, pid: int) -> Path:
    """Where process `pid` writes what becomes `path`."""
    return path.with_name(f".{path.name}.{pid}.partial")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path`, renamed to it on success and deleted on any failure."""
    partial = partial_path(path, os.getpid())
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
