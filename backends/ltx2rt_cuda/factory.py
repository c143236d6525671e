"""Facts of the backend `cuda` before it exists; torch is imported by what needs it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltx2rt.backend import BackendFactory
from ltx2rt.ranks.environment import SLEEPING, rank_and_size

if TYPE_CHECKING:
    from torch.distributed import PrefixStore

    from ltx2rt.graph.ir import Graph
    from ltx2rt.placement.devices import DeviceKind

CPU_PROCESSES = 8  # on a machine with fewer cores: enough to try any mesh


class CudaFactory(BackendFactory):
    name, accelerator, process_per_device = "cuda", "GPU", True
    packages = ("torch",)
    streams = ("text-encoder", "transformer")
    recorded, hides = ("cuda",), True

    def device_kinds(self) -> Sequence[DeviceKind]:
        from ltx2rt_cuda.devices import KINDS

        return KINDS

    def as_run(self, graph: Graph, device_kind: str, **how: bool) -> Graph:
        from ltx2rt_cuda.as_run import as_run

        return as_run(graph, device_kind, **how)

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

    def why_not_attend(self, name: str) -> str | None:
        absent = name == "sage" and find_spec("sageattention") is None
        return "sageattention is not installed; pip install sageattention" if absent else None

    def open(self, device: str, mesh: Mapping[str, int]) -> Any:
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
