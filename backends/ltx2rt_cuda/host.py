"""The host's memory: weights kept there, from where a GPU fetches them at the full rate of its
link, and what a CPU computes in.

Pinned memory is taken in slabs of one size, a power of two: torch rounds what it pins up to one, a
third more for a packed matrix of three, and what one set has given back is of use to the next.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SLAB = 2**30  # bytes
ALIGNMENT = 256  # bytes, at which a tensor begins in a slab
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # option of mallopt(3)
LARGE = 2**30  # bytes from which an allocation is the system's own
DECIDED = {
    "GLIBC_TUNABLES",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
}  # in the environment, by the user


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


def parked(weights: Mapping[str, Any], pinned: bool = False) -> dict[str, Any]:
    """Copies in the host's memory; done when the device has come so far."""
    on_device = {
        name: x for name, x in weights.items() if isinstance(x, Tensor)
    }  # the others are here
    slabs, found = Slabs(pinned), dict(weights)
    for name, x in on_device.items():
        found[name] = slabs.like(x).copy_(x, non_blocking=True)
    return found


def unparked(kept: Mapping[str, Any], left: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Copies on the device, in the place of those `left` there that lie alike, so that what is
    recorded with their addresses stays valid. `left` is empty afterwards."""
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


def layout(x: Tensor) -> tuple[Any, ...]:
    """Tensors with the same one fit the same memory."""
    return x.dtype, x.shape, x.stride()


def keep_freed() -> None:
    """From now on this process reuses the memory of what it frees. By default glibc gives that of
    large tensors back, and the system clears it, page by page, for the next one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt and DECIDED.isdisjoint(os.environ):
        mallopt(M_TRIM_THRESHOLD, -1)
        mallopt(M_MMAP_THRESHOLD, LARGE)


def give_back_freed() -> None:
    """To the system, all that `keep_freed` has kept."""
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        malloc_trim(0)
