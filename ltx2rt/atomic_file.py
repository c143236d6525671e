"""Files that appear under their name only when complete, and what must hold of them before a run
begins.

Decides the name of the unfinished file: it follows only from the writing process, so that a
process that outlives it can remove it. Also decides which outputs are refused: the ones that
replace an input or each other, and those that could not be written in the end.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ltx2rt.errors import InputError
from ltx2rt.system import NO_LINK, WRITE, lock_folder

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)


class NotWritten(OSError):
    """A file could not be written: errno and strerror say why, filename says which."""

    def __str__(self) -> str:
        return f"{self.filename} could not be written: {self.strerror}; nothing is left of it"


def partial_path(path: Path, pid: int) -> Path:
    """Path at which process `pid` writes the future `path`."""
    return path.with_name(f".{path.name}.{pid}.partial")


def remove_partial(path: Path, pid: int) -> None:
    """Remove the parts of `path`, a file or a folder of files, that process `pid` left
    unfinished."""
    partial = partial_path(path, pid)
    if partial.is_dir() and not partial.is_symlink():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        partial.unlink(missing_ok=True)


def remove_abandoned(folder: Path, names: Collection[str] | None = None) -> None:
    """Remove the unfinished files of processes that no longer run on this machine; names: only of
    these files."""
    import psutil

    for partial in folder.glob(".*.partial"):
        name, _, pid = partial.name[1:].removesuffix(".partial").rpartition(".")
        if (names is None or name in names) and pid.isdecimal() and not psutil.pid_exists(int(pid)):
            remove_partial(folder / name, int(pid))


_unfinished: set[Path] = set()  # files of this process


def remove_unfinished() -> None:
    """For a process that ends without unwinding."""
    for path in list(_unfinished):
        remove_partial(path, os.getpid())


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Path at which this process makes `path`, a file or a folder of files; removed in the end.

    Raises OSError naming `path`, and not where it is made, if it cannot be written.
    """
    partial = partial_path(path, os.getpid())
    path.parent.mkdir(parents=True, exist_ok=True)
    _unfinished.add(path)
    try:
        yield partial
    except OSError as error:
        if not path.parent.is_dir():
            text = f"{path}: its folder was removed while the file was made"
            raise OSError(text) from error
        if not _is_of(partial, error):
            raise
        reason = error.strerror or os.strerror(error.errno or 0)
        raise NotWritten(error.errno, reason, str(path)) from error
    finally:
        remove_partial(path, os.getpid())
        _unfinished.discard(path)


def _is_of(partial: Path, error: OSError) -> bool:
    """Whether the error came from writing `partial`. A write to an open file names no file."""
    if error.filename is None:
        return error.errno in DISK_ERRORS
    return str(error.filename).startswith(str(partial))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file in the folder of `path`, renamed to it on success and deleted on any
    failure.

    Raises OSError as `unfinished` does.
    """
    with unfinished(path) as partial:
        yield partial
        os.replace(partial, path)


def remove_left(folder: Path) -> None:
    """Remove the unfinished files of a folder in which no process writes any more."""
    for partial in folder.glob(".*.[0-9]*.partial"):
        partial.unlink(missing_ok=True)


@contextmanager
def alone_in(folder: Path, flag: str) -> Iterator[None]:
    """Keep other runs out of a folder meanwhile, and remove what killed ones left unfinished in it;
    the folder may be removed.

    Raises InputError if another run is in it, OSError if it cannot be opened.
    """
    try:
        found = lock_folder(folder)
    except BlockingIOError:
        text = f"{flag}: another run is writing {folder}; wait for it, or choose another name"
        raise InputError(text) from None
    try:
        remove_left(folder)
        yield
    finally:
        if found is not None:
            os.close(found)


def check_outputs(outputs: Iterable[tuple[str, Path]], inputs: Iterable[Path]) -> None:
    """Refuse outputs (flag and path) that cannot be written, are the same file, or would replace an
    input.

    inputs: files, and folders, within which nothing is written. Raises InputError naming the flag
    and the path.
    """
    read = [path for path in inputs if path.exists()]
    folders = [path.resolve() for path in read if path.is_dir()]
    nested = [x for folder in folders for some in ("*", "*/*") for x in folder.glob(some)]  # links
    taken = {_identity(path): f"the input {path}" for path in [*nested, *read] if path.exists()}
    for flag, path in outputs:
        identity = _writable(flag, path)
        if (other := taken.get(identity)) is not None:
            raise InputError(f"{flag}: {path} is the same file as {other}; choose another name")
        where = (path.resolve(), path.parent.resolve() / path.name)
        if inside := [folder for folder in folders if any(w.is_relative_to(folder) for w in where)]:
            raise InputError(
                f"{flag}: {path} is in {inside[0]}, which the run reads; write it elsewhere"
            )
        taken[identity] = f"{flag} {path}"


def _identity(path: Path) -> tuple[int, int, str]:
    """One identity for every spelling of a file: its inode, or, before it exists, its future
    place."""
    try:
        status = path.stat()
        return status.st_dev, status.st_ino, ""
    except FileNotFoundError:
        folder = existing_folder(path)
        status = folder.stat()
        return status.st_dev, status.st_ino, str(path.relative_to(folder))


def existing_folder(path: Path) -> Path:
    """The innermost folder of a future file that is there."""
    return next(folder for folder in path.parents if folder.exists())


def _writable(flag: str, path: Path) -> tuple[int, int, str]:
    """The identity of an output that can be written. Raises InputError."""
    try:
        if path.is_dir():
            raise InputError(f"{flag}: {path} is a folder; add a file name")
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            wrong = "is write-protected or no regular file"
            raise InputError(f"{flag}: {path} {wrong}; choose another name")
        partial = partial_path(existing_folder(path) / path.name, os.getpid())
        os.close(os.open(partial, WRITE | NO_LINK, 0o666))
        partial.unlink()
        return _identity(path)
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        wrong = f"cannot be written ({getattr(error, 'strerror', error)})"
        raise InputError(f"{flag}: {str(path)[:300]!r} {wrong}; choose another name") from None


def require_space(sizes: Mapping[Path, int]) -> None:
    """Refuse files for which the disks of their folders have no room. Raises InputError."""
    needed: Counter[int] = Counter()
    for path, size in sizes.items():
        folder = existing_folder(path)
        device = folder.stat().st_dev
        needed[device] += size
        if needed[device] > (free := shutil.disk_usage(folder).free):
            raise InputError(
                f"{path}: about {needed[device] / 1e9:.2g} GB will be written to its disk, "
                f"{free / 1e9:.2g} GB are free; make room or write elsewhere"
            )
