"""The host's memory: weights kept there, from where a GPU fetches them at the full rate of its
link, and a CPU's own allocations.

Pinned memory is taken in slabs of one size, a power of two, to which torch rounds pinned sizes up;
slabs that one set frees serve the next.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ltx2rt.errors import InputError
from ltx2rt.system import libc, read_ahead, read_at
from ltx2rt.weights.files import TensorFile

FOLDER = "/var/tmp"
SLAB = 2**30  # bytes
ALIGNMENT = 256  # bytes, at which a tensor begins in a slab
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # option of mallopt(3)
LARGE = 2**30  # bytes from which an allocation is the system's own
# in the environment, by the user
DECIDED = {"GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}


FilePart = tuple["TensorFile | SpillFile", int, int]  # file, first byte, number of bytes


class Slabs:
    """Pinned memory for tensors, given back when none of them is used any more."""

    def __init__(self, pinned: bool):
        self.pinned, self.left = pinned, torch.empty(0, dtype=torch.uint8)

    def like(self, x: Tensor) -> Tensor:
        """Memory for what x holds, with its strides."""
        size = x.numel() * x.element_size()
        if size > len(self.left):
            self.left = torch.empty(max(size, SLAB), dtype=torch.uint8, pin_memory=self.pinned)
        taken, self.left = self.left[:size], self.left[-(-size // ALIGNMENT) * ALIGNMENT :]
        return taken.view(x.dtype).as_strided(x.shape, x.stride())


def pins_no_more(error: RuntimeError, pinned: bool = True) -> bool:
    """Whether the system refused to pin so much: torch raises no special type for it."""
    return pinned and "out of memory" in str(error).lower()


class FileWeight:
    """A weight as files have it: the bytes of `parts` in order, and zeros up to its size."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, parts: Sequence[FilePart]):
        self.shape, self.dtype, self.parts = torch.Size(shape), dtype, parts
        self.nbytes = self.shape.numel() * dtype.itemsize

    def stride(self) -> tuple[int, ...]:
        return torch.empty(self.shape, device="meta").stride()

    def read_ahead(self) -> None:
        for file, begin, size in self.parts:
            file.read_ahead(begin, size)

    def read_into(self, place: Tensor, first: int) -> None:
        """Fill `place`, u8[n], with bytes from `first` on. Raises InputError if a file changed."""
        at, out = 0, place.numpy().data
        for file, begin, size in self.parts:
            skipped = max(0, first - at)
            at += size
            if skipped < size and len(out):
                taken = min(size - skipped, len(out))
                file.read_into(out[:taken], begin + skipped)
                first, out = first + taken, out[taken:]
        out[:] = bytes(len(out))


class SpillFile:
    """A file without a name for weights that have no room in the host's memory and are in no file
    as the device wants them. It is in TMPDIR, or else in /var/tmp: /tmp may be memory."""

    def __init__(self, size: int):
        """size: bytes that it will take at most. Raises InputError if the disk has no room."""
        usual = FOLDER if os.path.isdir(FOLDER) else tempfile.gettempdir()
        folder = os.environ.get("TMPDIR") or usual
        self._said = said = (
            f"weights that are merged or encoded while they are loaded need {size / 1e9:.3g} GB of "
            f"the host's memory, or of the disk of {folder}; set TMPDIR to a folder on a disk with "
            "room, or leave out LoRAs and --weights-dtype"
        )
        try:
            self._open = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            weakref.finalize(self, self._open.close)
            self._file, left = self._open.fileno(), shutil.disk_usage(folder).free
        except OSError as error:
            raise InputError(f"{said}: {error.strerror}") from error
        self._end = 0
        if left < size:
            raise InputError(f"{said}: {left / 1e9:.3g} GB are free")

    def kept(self, x: Tensor) -> FileWeight:
        """The weight, written. Raises InputError if the disk is full."""
        out = x.cpu().flatten().view(torch.uint8).numpy().data
        begin = self._end
        try:
            while len(out):
                self._open.seek(self._end)
                written = self._open.write(out)
                self._end, out = self._end + written, out[written:]
        except OSError as error:
            raise InputError(f"{self._said}: {error.strerror}") from error
        return FileWeight(tuple(x.shape), x.dtype, [(self, begin, self._end - begin)])

    def read_into(self, place: memoryview, begin: int) -> None:
        read_at(self._file, place, begin)

    def read_ahead(self, begin: int, size: int) -> None:
        read_ahead(self._file, begin, size)


def parked(weights: Mapping[str, Any], pinned: bool = False) -> dict[str, Any]:
    """Copies in the host's memory; done when the device has come so far."""
    slabs, found = Slabs(pinned), dict(weights)
    for name, x in weights.items():
        if isinstance(x, Tensor):
            found[name] = slabs.like(x).copy_(x, non_blocking=True)
    return found


def unparked(kept: Mapping[str, Any], left: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Copies on the device, written over the tensors in `left` with the same layout, so that
    recordings of their addresses stay valid. `left` is empty afterwards."""
    found = dict(kept)
    for name, x in kept.items():
        if not isinstance(x, Tensor):
            continue
        place = left.pop(name, None)
        if not isinstance(place, Tensor) or layout(place) != layout(x):
            place = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        found[name] = place.copy_(x, non_blocking=True)
    left.clear()
    return found


def layout(x: Tensor | FileWeight) -> tuple[Any, ...]:
    """Tensors with the same one fit the same memory."""
    return x.dtype, x.shape, x.stride()


def keep_freed() -> None:
    """Make this process reuse memory that it frees. By default glibc returns large tensors' memory,
    and the system clears it, page by page, for the next one."""
    mallopt = getattr(libc(), "mallopt", None)  # glibc's
    if mallopt and DECIDED.isdisjoint(os.environ):
        mallopt(M_TRIM_THRESHOLD, -1)
        mallopt(M_MMAP_THRESHOLD, LARGE)


def give_back_freed() -> None:
    """To the system, all that `keep_freed` has kept."""
    if malloc_trim := getattr(libc(), "malloc_trim", None):
        malloc_trim(0)
