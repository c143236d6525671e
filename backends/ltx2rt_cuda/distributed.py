"""This process's place on the mesh, and the process groups behind its axes: NCCL on GPUs, gloo on a
CPU. Decides how ranks find each other.
"""

from __future__ import annotations

import atexit
import errno
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from ltx2rt.errors import InputError
from ltx2rt.ranks.environment import STORE, TOKEN, interface, rank_and_size
from ltx2rt_cuda.device.torch_device import HOST, DeviceEvent, TorchDevice

# for one collective; a dead rank is noticed by the others long before
TIMEOUT = timedelta(minutes=10)
ARRIVAL = timedelta(minutes=2)  # until all ranks have started


@dataclass(frozen=True)
class Position:
    """coordinates: on each mesh axis; groups: names of the process groups along them. made: the
    names by members, for other meshes of the same processes. device: each process's own."""

    mesh: Mapping[str, int] = field(default_factory=dict)
    coordinates: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    made: dict[tuple[int, ...], str] = field(default_factory=dict, repr=False)
    device: TorchDevice = HOST

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.mesh else 0

    @property
    def size(self) -> int:
        return dist.get_world_size() if self.mesh else 1

    def agree(self, flag: bool) -> bool:
        """Whether any process says so. All of them must ask; hosts wait, not for a GPU."""
        if not self.mesh:
            return flag
        found = torch.tensor(int(flag))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=_hosts())
        return bool(found)

    def records(self) -> bool:
        """Whether collectives can be recorded."""
        device = self.device
        return not self.mesh or (device.exchanges and dist.get_backend() == device.group)

    def on(self, mesh: Mapping[str, int]) -> Position:
        """This process on another mesh of the same processes. All must ask in the same order."""
        if not mesh or tuple(mesh.items()) == tuple(self.mesh.items()):
            return self
        if math.prod(mesh.values()) != self.size:
            raise ValueError(f"a graph is placed on {dict(mesh)}, {self.size} processes run")
        return _position(mesh, self.made, self.device)


ALONE = Position()


@cache
def _hosts() -> dist.ProcessGroup:
    """All processes, through their hosts' memory."""
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    assert isinstance(group, dist.ProcessGroup), "every process is a member"
    return group


def rendezvous() -> PrefixStore:
    """A new connection to the store of the launch; rank 0 holds it unless torchrun's agent does.
    Raises InputError if it cannot be reached."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        if os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            _hold_store(host, port)
        store = TCPStore(host, port, None, False, ARRIVAL)
    except (OSError, dist.DistNetworkError) as error:
        in_use = getattr(error, "errno", None) == errno.EADDRINUSE
        why = f"port {port} is in use" if in_use else f"no store answers: {error}"
        raise InputError(
            f"MASTER_ADDR {host}, MASTER_PORT {port}: {why}; choose another port"
        ) from error
    return PrefixStore(f"ltx2rt/{os.environ.get(TOKEN, '')}", store)


@cache
def _hold_store(host: str, port: int) -> TCPStore:
    """Serve the store, on the launcher's socket or on a new one that listens at `host`."""
    given = os.environ.get(STORE)
    listening = int(given or socket.create_server((interface(host), port)).detach())
    how = {"wait_for_workers": False, "master_listen_fd": listening}
    return TCPStore(host, port, None, True, ARRIVAL, **how)


def join(mesh: Mapping[str, int], device: TorchDevice) -> Position:
    """Enter the process group that the launcher's environment describes (RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT). Raises InputError if its size is not the mesh's."""
    used = {axis: size for axis, size in mesh.items() if size > 1}
    if not used:
        return ALONE
    size, named = math.prod(used.values()), ",".join(f"{axis}={n}" for axis, n in used.items())
    rank, world = rank_and_size(os.environ)
    if world != size:
        raise InputError(
            f"mesh {named} needs {size} processes, {world} were launched; use --num-gpus {size}"
        )
    if not dist.is_initialized():
        # With its device the communicator is made now, by all ranks, and no collective has to guess
        # where it runs.
        how = {"device_id": device.take(named), "pg_options": device.group_options(device.group)}
        dist.init_process_group(device.group, None, TIMEOUT, world, rank, rendezvous(), **how)
        atexit.register(dist.destroy_process_group)
    _hosts()
    return _position(used, {}, device)


def _position(
    mesh: Mapping[str, int], made: dict[tuple[int, ...], str], device: TorchDevice
) -> Position:
    """Rank r is device r of the mesh, the last axis fastest. All ranks make every group."""
    rank, numbers = dist.get_rank(), torch.arange(math.prod(mesh.values())).reshape(*mesh.values())
    options, new = device.group_options(dist.get_backend()), []
    coordinates: dict[str, int] = {}
    groups: dict[str, str] = {}
    for i, (axis, size) in enumerate(mesh.items()):
        for members in numbers.movedim(i, -1).reshape(-1, size).tolist():
            if tuple(members) not in made:
                whole = len(members) == numbers.numel()
                group = dist.group.WORLD if whole else dist.new_group(members, pg_options=options)
                # "": a group of other ranks
                made[tuple(members)] = getattr(group, "group_name", "")
                new += [group] if rank in members else []
            if rank in members:
                coordinates[axis], groups[axis] = members.index(rank), made[tuple(members)]
    for group in new:
        device.begin(group)
    return Position(mesh, coordinates, groups, made, device)


@dataclass
class Arriving:
    """A tensor that another rank is sending."""

    tensor: torch.Tensor
    work: Any

    def wait(self) -> torch.Tensor:
        if self.work is not None:  # gloo would wait for another one
            self.work.wait()
            self.work = None
        return self.tensor


@dataclass(frozen=True)
class Sending:
    """A tensor on its way to another rank. made: behind the work that makes it."""

    tensor: torch.Tensor
    work: Any
    made: DeviceEvent

    def wait(self) -> None:
        self.work.wait()
        self.made.synchronize()  # NCCL's `wait` is the stream's, not the host's
