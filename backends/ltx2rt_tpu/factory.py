"""Facts of the backend `tpu` before it exists; JAX is imported by what needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltx2rt.backend import BackendFactory
from ltx2rt_tpu.hosts import hosts

if TYPE_CHECKING:
    from ltx2rt.backend import Compiled, DeviceInfo
    from ltx2rt.graph.ir import Graph
    from ltx2rt.placement.devices import DeviceKind
    from ltx2rt_tpu.distributed import CoordinatorStore


class TpuFactory(BackendFactory):
    name, accelerator, process_per_device = "tpu", "TPU", False
    packages = ("jax", "jaxlib", "libtpu")
    # XLA overlaps no copy from the host with the products of a loop, so networks that run once are
    # streamed by layers.
    streams = ("text-encoder",)
    # XLA orders the nodes, so nothing is assumed to hide an exchange. It decodes inside the product
    # that reads the rows (seen in what libtpu 0.0.51 compiles for v6e).
    decodes = True

    def device_kinds(self) -> Sequence[DeviceKind]:
        from ltx2rt_tpu.devices import KINDS

        return KINDS

    def as_run(self, graph: Graph, device_kind: str, **how: bool) -> Graph:
        from ltx2rt_tpu.as_run import as_run

        return as_run(graph, device_kind, **how)

    def rank_and_size(self, environment: Mapping[str, str]) -> tuple[int, int]:
        return hosts(environment)

    def rendezvous(self) -> CoordinatorStore:
        from ltx2rt_tpu.distributed import rendezvous

        return rendezvous()

    def keep_compiled(self, root: Path) -> None:
        from ltx2rt_tpu.compile_cache import keep_compiled

        keep_compiled(root)

    def ahead_compiler(
        self, topology: str, mesh: Mapping[str, int], timed: bool = False
    ) -> Callable[[Graph, str | None], Compiled]:
        from ltx2rt_tpu.aot import AheadCompiler

        return AheadCompiler(topology, mesh, timed)

    def profile_key(self, device: DeviceInfo) -> str:
        return device.name if device.kind == "tpu" else device.kind

    def takes_all(self, device: DeviceInfo) -> bool:
        return device.kind == "tpu" or device.hosts > 1

    def open(self, device: str, mesh: Mapping[str, int]) -> Any:
        from ltx2rt_tpu.backend import TpuBackend

        return TpuBackend(device, mesh)


FACTORY = TpuFactory()
