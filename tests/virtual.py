"""Several devices on one CPU: XLA's flags for a process of JAX, and processes that are torch's
ranks."""

import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def xla_flags(devices: int) -> str:
    """This process's own flags, `devices`, and patience: with more devices than cores a thread may
    come late to a rendezvous, which XLA takes for a deadlock after 40 s."""
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    return f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices} {patience}"


def on_devices(count: int, *words: object, **environment: str) -> str:
    """The output of Python's `words` in a process with `count` devices of JAX on the CPU, a number
    that JAX fixes at its start."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    env = os.environ | {"XLA_FLAGS": xla_flags(count), "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [sys.executable, *map(str, words)]
    ran = subprocess.run(
        command, env=env | environment, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def forked(count: int, run: Callable[[int], object]) -> None:
    """run(rank) in `count` processes, forked from this one, with what it has imported. Raises
    SystemExit if one of them fails."""
    import torch

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                torch.set_num_threads(1)
                os.environ |= world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                run(rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise SystemExit(f"{count} ranks ended with {statuses}")
