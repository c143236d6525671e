"""Several processes of one JAX program, usually one for each host of a TPU slice: how they meet,
and in which order their devices make a mesh. Every process runs every program, in the same order.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from ltx2rt.errors import InputError
from ltx2rt.ranks.environment import interface
from ltx2rt_tpu.hosts import HOST_VARIABLES, hosts

ARRIVAL_S = 120  # until all processes have started
# a process on another host that is silent for so long is dead; JAX ends the others then
HEARTBEAT_S = 60
FOREVER_MS = 2**31 - 1


class CoordinatorStore:
    """Text by key in the coordinator of JAX's processes: a `ranks.crew.Store`."""

    def __init__(self, client: Any):
        self.client = client

    def set(self, key: str, value: str) -> None:
        self.client.key_value_set(key, value, allow_overwrite=True)

    def get(self, key: str) -> bytes:
        return self.client.blocking_key_value_get(key, FOREVER_MS).encode()

    def delete(self, key: str) -> None:
        self.client.key_value_delete(key)

    def check(self, keys: list[str]) -> bool:
        return all(self._find(key) is not None for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert expected == "", "an existing value is never replaced"
        try:
            self.client.key_value_set(key, desired)
        except JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
        return (self._find(key) or "").encode()

    def _find(self, key: str) -> str | None:
        try:
            return self.client.key_value_try_get(key)
        except JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
        return None


def rendezvous() -> CoordinatorStore:
    join()
    from jax._src.distributed import global_state  # JAX offers its store nowhere else

    return CoordinatorStore(global_state.client)


@cache
def _rounds() -> count:
    """Counter of agreements: every process asks for the same ones in the same order."""
    return count()


def agree(flag: bool) -> bool:
    """Whether any process says so. All of them must ask; through the coordinator, because a
    collective of their devices would wait for all that these have to do."""
    rank, size = hosts(os.environ)
    if size == 1:
        return flag
    store, number = rendezvous(), next(_rounds())
    store.set(f"agree/{number}/{rank}", str(int(flag)))
    said = [store.get(f"agree/{number}/{other}") for other in range(size)]
    store.delete(f"agree/{number - 1}/{rank}")  # everybody is here, so everybody has read it
    return b"1" in said


def join() -> tuple[int, int]:
    """(number of this process, how many there are). Meets the others unless it has, or is the only
    one. Raises InputError if they cannot meet."""
    rank, size = hosts(os.environ)
    if size == 1 or jax.distributed.is_initialized():
        return rank, size
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address is not None:
        _check(address, rank == 0)
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM
    try:
        times = {"initialization_timeout": ARRIVAL_S, "heartbeat_timeout_seconds": HEARTBEAT_S}
        jax.distributed.initialize(
            address, size, rank, coordinator_bind_address=_listening(address), **times
        )
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"process {rank} of {size} cannot meet the others: {error}; set "
            f"{', '.join(HOST_VARIABLES)}"
        ) from error
    return rank, size


def _check(address: str, here: bool) -> None:
    """Raise InputError where JAX would abort: no port to listen on, or no answering process."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise InputError(
            f"JAX_COORDINATOR_ADDRESS {address}: expected HOST:PORT, a free port on the host of "
            "process 0"
        )
    deadline = time.monotonic() + ARRIVAL_S
    while True:
        try:
            if here:
                socket.create_server((interface(host), int(port))).close()
            else:
                socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError as error:
            if here or time.monotonic() > deadline:
                what = "cannot listen there" if here else "process 0 does not answer"
                raise InputError(
                    f"JAX_COORDINATOR_ADDRESS {address}: {what}: {error.strerror or error}"
                ) from error
        time.sleep(0.2)


def _listening(address: str | None) -> str | None:
    """On which interface the coordinator listens; None leaves it to JAX, which takes all."""
    host, _, port = (address or "").rpartition(":")
    found = interface(host)
    return f"{found}:{port}" if found else None


@cache  # a second call would keep the silenced stdout
def silence_gloo() -> None:
    """Point the C library's stdout at nothing: gloo greets every peer among the results."""
    sys.stdout.flush()
    kept = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
    sys.stdout = os.fdopen(kept, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def device_mesh(devices: Sequence[Any], mesh: Mapping[str, int]) -> Mesh:
    """The first devices as a mesh, host by host: `tensor`, the busiest, within one host."""
    ordered = sorted(devices, key=lambda d: (d.process_index, d.id))
    sizes = {axis: mesh[axis] for axis in sorted(mesh, key="tensor".__eq__)}
    return Mesh(np.array(ordered[: math.prod(sizes.values())]).reshape(*sizes.values()), (*sizes,))
