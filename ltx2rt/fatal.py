"""Signals that the kernel or C++ raises: a handler of Python's runs between bytecodes, and after
these comes none."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # end a process as an exception does
_SIG_DFL = 0
_kept: dict[int, Callable[[int], None]] = {}  # what C calls must live


def on_fatal(number: int, call: Callable[[], None]) -> None:
    """Have `call` run in the thread that the signal hits; unless it ends the process, the signal
    does."""
    libc = ctypes.CDLL(None)

    def handle(_: int) -> None:
        call()
        libc.signal(number, _SIG_DFL)  # what raised it is repeated

    _kept[number] = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    libc.signal(number, _kept[number])
