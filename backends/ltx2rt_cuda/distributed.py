"""Where this process stands on the mesh, and the process groups behind its axes: NCCL on GPUs, gloo on a CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from ltx2rt.errors import InputError

TIMEOUT = timedelta(minutes=10)  # of one collective; a dead rank is noticed by the launcher long before


@dataclass(frozen=True)
class Position:
    """coordinates: on each mesh axis; groups: names of the process groups along them."""

    mesh: Mapping[str, int] = field(default_factory=dict)
    coordinates: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.mesh else 0


ALONE = Position()


def join(mesh: Mapping[str, int], device_kind: str) -> Position:
    """Enter the process group that the launcher's environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Raises InputError if its size is not the mesh's.
    """
    used = {axis: size for axis, size in mesh.items() if size > 1}
    if not used:
        return ALONE
    if len(used) > 1:
        raise InputError(f"mesh {dict(used)}: this backend runs one mesh axis at a time")
    ((axis, size),) = used.items()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != size:
        raise InputError(f"mesh {axis}={size} needs {size} processes, {world} were launched; use --num-gpus {size}")
    if not dist.is_initialized():
        if device_kind == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if device_kind == "cuda" else "gloo", timeout=TIMEOUT)
    assert dist.group.WORLD is not None
    return Position(used, {axis: dist.get_rank()}, {axis: dist.group.WORLD.group_name})
