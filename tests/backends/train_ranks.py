"""Runs training steps on torch ranks over gloo, or on JAX host devices; not a test, started by one
as a process.

    python train_ranks.py cuda FOLDER NUMBER   ranks of that mesh of MESHES, forked from this process
    python train_ranks.py tpu FOLDER NUMBER    needs
    XLA_FLAGS=--xla_force_host_platform_device_count=4

Written to FOLDER: losses, gradients' moments and parameters of the mesh, as
`{kind}-{mesh}-{remat}.npz`.
"""

from __future__ import annotations

import sys
from math import prod
from pathlib import Path

import numpy as np

from ltx2rt.backend import get_backend
from tests.train_cases import parameters, step, trained, trainer
from tests.virtual import forked

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
            text = made.batches[0].lowered().as_text()
            found["all-reduces"] = np.array(text.count("all_reduce"))
        if backend.is_main:
            np.savez(folder / f"{kind}-{label(mesh)}-{remat}.npz", **found)


def main(kind: str, folder: Path, number: int) -> None:
    if kind == "tpu":
        run(kind, number, folder)
        return
    import ltx2rt_cuda.backend  # noqa: F401  torch, once for all ranks

    parameters(GENERATION)
    forked(prod(MESHES[number].values()), lambda rank: run(kind, number, folder))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
