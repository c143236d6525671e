"""Calls that one operating system has and another lacks.

POSIX locks, limits, signals and reads at a place of a file are missing on Windows, a part of them on
macOS. Each function says what it does there. No other module imports `fcntl` or `resource`.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import importlib
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError


def _module(name: str) -> Any:
    """The module, or None on a system without it."""
    with suppress(ImportError):
        return importlib.import_module(name)


_fcntl, _resource = _module("fcntl"), _module("resource")


def _signals(*names: str) -> tuple[signal.Signals, ...]:
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


def _flags(*names: str) -> int:
    """Flags of `os.open` that exist here, in one number."""
    return sum({getattr(os, name, 0) for name in names})


ENDING = _signals("SIGTERM", "SIGHUP", "SIGQUIT")  # end a process as an exception does
AT_ONCE = _flags("O_NONBLOCK", "O_BINARY")  # opens without waiting for the other end of a pipe
READ = os.O_RDONLY | AT_ONCE | _flags("O_CLOEXEC")
WRITE = os.O_CREAT | os.O_WRONLY | _flags("O_BINARY")
NO_LINK = _flags("O_NOFOLLOW")
_SIG_DFL = 0
_kept: dict[int, Callable[[int], None]] = {}  # what C calls must live
_moving = threading.Lock()  # held while a read moves a descriptor's place


def hold(path: Path) -> socket.socket | None:
    """Hold the name of a path until the result is closed or this process ends; None if another
    process holds it. Nothing is written: Linux keeps such names, elsewhere all are free."""
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    held = socket.socket(getattr(socket, "AF_UNIX", socket.AF_INET))
    try:
        if sys.platform == "linux":
            held.bind(f"\0ltx2rt-{os.getuid()}-{name}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            held.close()
            return None
    return held


def libc() -> Any:
    """This process's C library; an object without functions on Windows."""
    return ctypes.CDLL(None) if _fcntl else object()


def on_fatal(name: str, call: Callable[[], None]) -> None:
    """Have `call` run in the thread that the signal `name`, such as SIGBUS, hits; unless it ends the
    process, the signal does. Nothing happens on a system without the signal.

    The kernel or C++ raises these signals: a handler of Python's runs between bytecodes, and none
    comes after them.
    """
    if not _fcntl or not hasattr(signal, name):
        return
    number, c = getattr(signal, name), libc()

    def handle(_: int) -> None:
        call()
        c.signal(number, _SIG_DFL)  # what raised it is repeated

    _kept[number] = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    c.signal(number, _kept[number])


def read_into(file: int, place: memoryview, begin: int) -> int:
    """Read from byte `begin` of a descriptor into `place`; returns the number of bytes."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [place], begin)
    read = pread(file, min(len(place), 2**24), begin)
    place[: len(read)] = read
    return len(read)


def pread(file: int, size: int, begin: int) -> bytes:
    """At most `size` bytes of a descriptor from byte `begin` on."""
    if hasattr(os, "pread"):
        return os.pread(file, size, begin)
    with _moving:
        os.lseek(file, begin, os.SEEK_SET)
        return os.read(file, size)


def take_lock(file: int) -> None:
    """Take the lock of an open file, which ends with the process or the descriptor.

    Raises BlockingIOError if another process has it. Windows locks the first byte.
    """
    if _fcntl:
        _fcntl.flock(file, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
    elif windows := _module("msvcrt"):
        try:
            windows.locking(file, windows.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(error.errno, error.strerror) from None


def lock_folder(folder: str | os.PathLike[str]) -> int | None:
    """A descriptor that holds the lock of a folder until it is closed; None on Windows, which opens
    no folder. Raises BlockingIOError if another process has the lock."""
    if not _fcntl:
        return None
    found = os.open(folder, os.O_RDONLY | _flags("O_DIRECTORY"))
    try:
        take_lock(found)
    except OSError:
        os.close(found)
        raise
    return found


def sync(path: str | os.PathLike[str]) -> None:
    """Wait until a file, or a folder's names, are on the disk; Windows opens no folder for that."""
    if _fcntl:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def limit(name: str, most: int, hard: int | None = None) -> None:
    """Set a limit of this process, such as RLIMIT_AS; macOS refuses some, which then stay."""
    with nullcontext() if sys.platform == "linux" else suppress(ValueError, OSError):
        _resource.setrlimit(getattr(_resource, name), (most, most if hard is None else hard))


def allow_open_files(needed: int) -> None:
    """Raise the number of files that this process may open to `needed`, or the most there is."""
    soft, hard = _resource.getrlimit(_resource.RLIMIT_NOFILE)
    endless = _resource.RLIM_INFINITY
    if soft != endless and soft < (most := needed if hard == endless else min(needed, hard)):
        _resource.setrlimit(_resource.RLIMIT_NOFILE, (most, hard))


def require_posix(what: str) -> None:
    """Raises InputError on Windows."""
    if not (_fcntl and _resource):
        raise InputError(f"{what} needs Linux or macOS, this is {sys.platform}; use WSL 2 there")


def require_linux(what: str) -> None:
    """Raises InputError on another system."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        raise InputError(f"{what} needs Linux, this is {sys.platform}; run it there, or in WSL 2")


def identity(file: int | str | os.PathLike[str]) -> tuple[int, ...]:
    """Device, inode, size and time of the last change: one differs once a file is replaced or
    written. file: a path or a descriptor. Raises OSError."""
    status = os.stat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_at(file: int, place: memoryview, begin: int) -> None:
    """Fill `place` from byte `begin` of a descriptor on, as far as the file goes."""
    filled = 0
    while filled < len(place) and (got := read_into(file, place[filled:], begin + filled)):
        filled += got


def read_ahead(file: int, begin: int, size: int) -> None:
    """Announce that `size` bytes of a descriptor from `begin` on will be read soon."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, begin, size, os.POSIX_FADV_WILLNEED)


def opened_at_once(path: str, flags: int) -> int:
    """For `open`: a FIFO without a writer would be waited for."""
    return os.open(path, flags | AT_ONCE)


def first_bytes(path: str | os.PathLike[str], count: int) -> bytes:
    """The first bytes of a file; none if it is no regular file or cannot be read."""
    with suppress(OSError, ValueError), open(path, "rb", opener=opened_at_once) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file.read(count)
    return b""
