"""Facts of the backend `cuda` before it exists; torch is imported by what needs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltx2rt.errors import InputError
from ltx2rt.ranks.environment import SLEEPING, rank_and_size

if TYPE_CHECKING:
    from torch.distributed import PrefixStore

    from ltx2rt.backend import Compiled, DeviceInfo
    from ltx2rt.graph.ir import Graph
    from ltx2rt.placement.devices import DeviceKind
    from ltx2rt.placement.timeline import Timeline
    from ltx2rt_cuda.backend import CudaBackend

CPU_PROCESSES = 8  # on a machine with fewer cores: enough to try any mesh


class CudaFactory:
    """A `BackendFactory`."""

    name, accelerator, process_per_device = "cuda", "GPU", True
    packages = ("torch",)
    streams = ("text-encoder", "transformer")
    recorded = ("cuda",)

    def device_kinds(self) -> Sequence[DeviceKind]:
        from ltx2rt_cuda.devices import KINDS

        return KINDS

    def as_run(self, graph: Graph, device_kind: str, **how: bool) -> Graph:
        from ltx2rt_cuda.as_run import as_run

        return as_run(graph, device_kind, **how)

    def cost(
        self, graph: Graph, kind: DeviceKind, quantised: bool = False, runs: Any = None
    ) -> Timeline:
        """Nodes run in order, computing while an all-reduce travels; in training they wait."""
        from ltx2rt.placement.timeline import Timeline

        return Timeline(kind, hidden=not runs, quantised=quantised, runs=runs or {}).of(graph)

    def rank_and_size(self, environment: Mapping[str, str]) -> tuple[int, int]:
        return rank_and_size(environment)

    def most_processes(self, device: str) -> int:
        gpus = 0 if device == "cpu" else num_gpus(os.environ)
        return gpus or max(os.cpu_count() or 1, CPU_PROCESSES)

    def one_device(self, number: int, environment: Mapping[str, str]) -> dict[str, str]:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        chosen = visible.split(",") if visible else [str(n) for n in range(number + 1)]
        return {"CUDA_VISIBLE_DEVICES": chosen[number].strip() if number < len(chosen) else ""}

    def rendezvous(self) -> PrefixStore:
        let_threads_sleep("auto")
        from ltx2rt_cuda.distributed import rendezvous

        return rendezvous()

    def keep_compiled(self, root: Path) -> None:
        """Nothing to do: Inductor has its own cache."""

    def ahead_compiler(
        self, topology: str, mesh: Mapping[str, int], timed: bool = False
    ) -> Callable[[Graph, str | None], Compiled]:
        raise InputError(
            "backend cuda compiles on the device that runs, not for one that is absent"
        )

    def profile_key(self, device: DeviceInfo) -> str:
        return device.kind

    def takes_all(self, device: DeviceInfo) -> bool:
        return False

    def open(self, device: str, mesh: Mapping[str, int]) -> CudaBackend:
        let_threads_sleep(device)
        from ltx2rt_cuda.backend import CudaBackend

        return CudaBackend(device, mesh)


def let_threads_sleep(device: str) -> None:
    """Before torch is imported to compute on a CPU: idle threads of OpenMP sleep, unless the user
    has decided it. By default they spin, and where other programs use the cores, they wait for the
    thread that they keep from running."""
    if device == "cpu" or not num_gpus(os.environ):
        os.environ.setdefault(*SLEEPING)


def num_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """The GPUs that a process would see, by device files and CUDA_VISIBLE_DEVICES."""
    found = len(list(devices.glob("nvidia[0-9]*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not found:
        return found
    chosen = [name.strip() for name in visible.split(",")]
    return len([name for name in chosen if name and not name.startswith("-")])


FACTORY = CudaFactory()
