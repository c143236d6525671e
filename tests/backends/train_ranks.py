"""Runs training steps on torch ranks over gloo, or on JAX host devices; not a test, started by one
as a process.

    python train_ranks.py cuda FOLDER NUMBER   ranks of that mesh of MESHES, each a process
    python train_ranks.py tpu FOLDER NUMBER    needs
    XLA_FLAGS=--xla_force_host_platform_device_count=4

Written to FOLDER: losses, gradients' moments and parameters of the mesh, as
`{kind}-{mesh}-{remat}.npz`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from math import prod
from pathlib import Path

import numpy as np
from train_cases import step, trained, trainer

from ltx2rt.backend import get_backend

MESHES: tuple[dict[str, int], ...] = (
    {"tensor": 2},
    {"sequence": 2},
    {"data": 2},
    {"fsdp": 2},
    {"tensor": 3},
    {"tensor": 2, "sequence": 2},
    {"tensor": 2, "data": 2},
)
GENERATION = "2.3"
KEPT = {"tensor": 2, "sequence": 2}  # the mesh that keeps its exchanges, too


def label(mesh: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def run(kind: str, number: int, folder: Path) -> None:
    mesh = MESHES[number]
    backend = get_backend(kind, "cpu", mesh)
    inputs = step(GENERATION)[1]
    for remat in ("block", "exchanges") if mesh == KEPT else ("block",):
        made = trainer(backend, GENERATION, mesh, remat)
        found = trained(made, inputs)
        if kind == "tpu" and mesh == KEPT:
            text = made.batches[0].lowered().as_text()  # pyright: ignore[reportAttributeAccessIssue]
            found["all-reduces"] = np.array(text.count("all_reduce"))
        if backend.is_main:
            np.savez(folder / f"{kind}-{label(mesh)}-{remat}.npz", **found)  # pyright: ignore[reportArgumentType]


def main(kind: str, folder: Path, number: int) -> None:
    if kind == "tpu" or "RANK" in os.environ:
        run(kind, number, folder)
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    size = prod(MESHES[number].values())
    here = os.environ | {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, kind, str(folder), str(number)]
    ranks = [
        subprocess.Popen(command, env=here | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]
    if any([rank.wait() for rank in ranks]):
        sys.exit(f"{label(MESHES[number])}: a rank failed")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
