"""Which host of a launch this process is, by its environment; JAX is not imported."""

from __future__ import annotations

from collections.abc import Mapping

from ltx2rt.errors import InputError

HOST_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
SLURM_VARIABLES = tuple(  # which srun sets
    f"SLURM_{name}" for name in ("JOB_ID", "STEP_NODELIST", "LOCALID", "NTASKS", "PROCID")
)


def hosts(environment: Mapping[str, str]) -> tuple[int, int]:
    """(this process, how many there are): by HOST_VARIABLES, or where JAX itself finds the others,
    in a SLURM step or on a TPU slice. Raises InputError if HOST_VARIABLES are not complete."""
    workers = environment.get("TPU_WORKER_HOSTNAMES", "").split(",")
    if given := [name for name in HOST_VARIABLES if name in environment]:
        if missing := [name for name in HOST_VARIABLES if name not in environment]:
            raise InputError(
                f"{', '.join(given)} without {', '.join(missing)}; set all three, or none"
            )
        rank, size = environment["JAX_PROCESS_ID"], environment["JAX_NUM_PROCESSES"]
    elif all(name in environment for name in SLURM_VARIABLES):
        rank, size = environment["SLURM_PROCID"], environment["SLURM_NTASKS"]
    elif len(workers) > 1:
        rank, size = environment.get("TPU_WORKER_ID", ""), str(len(workers))
    else:
        return 0, 1
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise InputError(
            f"process {rank!r} of {size!r}: expected numbers, the first below the second"
        )
    return int(rank), int(size)
