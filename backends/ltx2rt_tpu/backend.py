"""The backend `tpu`: JAX devices, loading, and lowering for them."""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ltx2rt.backend import DeviceInfo, TensorSource, overlapped
from ltx2rt.errors import InputError
from ltx2rt.graph.ir import Graph
from ltx2rt.placement.devices import host_memory
from ltx2rt.placement.stream import FILE, PINNED, Piece, moves, stack_of
from ltx2rt.weights.encoded import EncodedSource
from ltx2rt.weights.lora.changes import Factors
from ltx2rt.weights.lora.file import merge
from ltx2rt_tpu.as_run import ASSEMBLED
from ltx2rt_tpu.distributed import agree, device_mesh, join, silence_gloo
from ltx2rt_tpu.hosts import HOST_VARIABLES
from ltx2rt_tpu.ops.stored import encode
from ltx2rt_tpu.program import (
    COMPILERS,
    Assembled,
    Call,
    Loop,
    Program,
    apart,
    compilations,
    together,
)
from ltx2rt_tpu.weights import (
    TILED_KIND,
    FileLayers,
    HostLayers,
    Weights,
    abstract_weights,
    in_host_memory,
    is_streamed,
    merged,
    stacked,
)

if TYPE_CHECKING:
    from ltx2rt_tpu.train import Trainer


class TpuBackend:
    """device: "auto" (the TPU if there is one, else the CPU), "tpu" or "cpu". mesh: sizes of the
    mesh axes over the devices of all processes."""

    name = "tpu"
    runs = True

    def __init__(self, device: str = "auto", mesh: Mapping[str, int] = MappingProxyType({})):
        if device not in ("auto", "cpu", "tpu"):
            raise InputError(f"backend tpu runs on auto, tpu or cpu, not on {device}")
        rank, self.num_hosts = join()
        self.jax_device = self._find(device)
        if self.jax_device.platform == "cpu" and self.num_hosts > 1:
            silence_gloo()
        if (num_found := jax.process_count(self.jax_device.platform)) != self.num_hosts:
            raise InputError(
                f"this host has a part of a TPU slice of {num_found} hosts; start the "
                f"same command on each, with {', '.join(HOST_VARIABLES)} set"
            )
        self.mesh = {axis: size for axis, size in mesh.items() if size > 1}
        self.is_main, self.num_processes = rank == 0, 1
        if self.mesh:
            self._place(self.mesh)  # refuses a mesh that does not fit
        self.device_kind = "tpu" if self.jax_device.platform == "tpu" else "cpu"
        self.encode = jax.jit(encode, static_argnums=0)
        self.versions = {"jax": jax.__version__}
        self._compiled_before = len(compilations())

    @property
    def num_built(self) -> int:
        return len(compilations()) - self._compiled_before

    @cached_property
    def place(self) -> Sharding:
        return self._place(self.mesh)

    def _place(self, mesh: Mapping[str, int]) -> Sharding:
        """Sharding of replicated arrays: the one device, or all devices of the mesh."""
        count, devices = math.prod(mesh.values()), jax.devices(self.jax_device.platform)
        if self.num_hosts > 1 and count != len(devices):
            raise InputError(
                f"mesh {dict(mesh)} is of {count} devices, the {self.num_hosts} processes have "
                f"{len(devices)}; give a --mesh of all of them"
            )
        if count == 1:
            return SingleDeviceSharding(self.jax_device)
        if len(devices) < count:
            raise InputError(f"mesh {dict(mesh)} needs {count} devices, {len(devices)} were found")
        return NamedSharding(device_mesh(devices, mesh), P())

    @staticmethod
    def _find(device: str) -> Any:
        if device != "cpu":
            try:
                return jax.local_devices(backend="tpu")[0]
            except RuntimeError as error:
                if device == "tpu":
                    raise InputError(
                        "no TPU was found; use --device cpu, or --device auto to fall back by "
                        "itself"
                    ) from error
        return jax.local_devices(backend="cpu")[0]

    def load(
        self,
        graphs: Iterable[Graph],
        source: TensorSource,
        base: Weights | None = None,
        changed: Set[str] = frozenset(),
        streamed: Set[Piece] = frozenset(),
        road: str = PINNED,
    ) -> Weights:
        weights: Weights = {}
        encoded = EncodedSource(source, self._encode)
        for graph in graphs:
            layouts, place = graph.all_layouts(), self.place_of(graph)
            abstract = abstract_weights(graph, place)
            for name, (value, count) in graph.all_params().items():
                if name in weights:
                    continue
                layout, layers = layouts[name], range(count)
                if moves(name, value.type) and streamed >= {(stack_of(name), i) for i in layers}:
                    at = (replace(layout, first=layout.first + i) for i in layers)
                    read = [partial(stacked, encoded, name, x, value.type, 1, place) for x in at]
                    weights[name] = (FileLayers if road == FILE else HostLayers)(read)
                    continue
                touched = (part for i in layers for part in layout.names(i))
                other = (base or {}).get(name)
                same = other is not None and other.dtype == value.type.dtype
                if same and changed.isdisjoint(touched):
                    weights[name] = other
                    continue
                weights[name] = stacked(encoded, name, layout, value.type, count, place)
                if abstract[name].format.layout is not None:
                    # which the device changes: JAX sends only the default tiling
                    weights[name] = jax.device_put(weights[name], abstract[name].format)
        return weights

    def park(self, weights: Weights) -> Any:
        """None for arrays that are tiled as the host's memory cannot be."""
        if self.jax_device.device_kind == TILED_KIND:
            return None
        kept = {}
        for name, x in weights.items():
            kept[name] = (x, None) if is_streamed(x) else (in_host_memory(x), x.sharding)
        jax.block_until_ready(kept)  # until then the device's memory is not free
        return kept

    def unpark(self, kept: Mapping[str, tuple[Any, Sharding | None]], left: Weights) -> Weights:
        weights = {}
        for name, (x, sharding) in kept.items():
            left.pop(name, None)  # its memory is free before the next is taken
            weights[name] = jax.device_put(x, sharding) if sharding else x
        left.clear()
        return weights

    def place_of(self, graph: Graph) -> Sharding:
        """Sharding of a graph's replicated arrays: the backend's devices, by the graph's axes."""
        if not graph.mesh:
            return self.place
        if math.prod(graph.mesh.values()) != math.prod(self.mesh.values()):
            raise ValueError(
                f"{graph.name} is placed on {dict(graph.mesh)}, the backend has {self.mesh}"
            )
        return self._place(graph.mesh)

    def _encode(self, encoding: str, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """On the device, and back: numpy casts to 8 bits at a fraction of any disk's speed."""
        fields = self.encode(encoding, jax.device_put(array, self.jax_device))
        return tuple(map(np.asarray, fields))

    def lower(
        self, graph: Graph, layers: str = "scan", compile: bool = False
    ) -> Program | Assembled:
        if graph.name in ASSEMBLED:
            return Assembled(graph, self.place_of(graph))
        return Program(graph, self.place_of(graph), layers == "unrolled")

    def lower_loop(self, graph: Graph, layers: str = "scan", compile: bool = False) -> Loop:
        return Loop(graph, self.place_of(graph), layers == "unrolled")

    def trainer(self, *step: Any, deterministic: bool = False, **how: Any) -> Trainer:
        """deterministic: only steps of GPUs differ."""
        from ltx2rt_tpu.train import Trainer

        return Trainer(self, *step, **how)

    def compile_ahead(
        self, programs: Iterable[tuple[Program | Assembled | Loop, bool]]
    ) -> list[Future[None]]:
        return [program.compile_ahead(self.compilers, each) for program, each in programs]

    @cached_property
    def compilers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(COMPILERS, max(1, (os.cpu_count() or 1) - 1)))

    def merge(self, weight: np.ndarray, factors: Sequence[Factors], rounded: bool) -> np.ndarray:
        """On a CPU the definition itself, which takes half of XLA's time there."""
        if self.device_kind == "cpu":
            return merge(weight, factors, rounded)
        return merged(weight, factors, rounded, self.jax_device)

    def each(self, calls: Iterable[Call], output: str) -> Generator[Any]:
        """Consecutive calls of one program run together, one on each device."""
        devices, _ = apart(self.place)

        def started() -> Iterator[list[Any]]:
            for _, same in groupby(calls, key=lambda call: id(call[0])):
                while batch := list(islice(same, devices)):
                    yield (
                        together(batch, output)
                        if devices > 1
                        else [
                            program(weights, inputs)[output] for program, weights, inputs in batch
                        ]
                    )

        for batch in overlapped(started(), 1):
            yield from batch

    def agree(self, flag: bool) -> bool:
        return agree(flag)

    def to_host(self, array: Array) -> np.ndarray:
        host = np.asarray(array)
        return host if host.dtype == np.int32 else host.astype(np.float32)

    def synchronize(self) -> None:
        jax.effects_barrier()

    def trim(self, recorded: bool = False) -> None:
        """JAX keeps nothing."""

    def limit(self, max_memory: float | None) -> None:
        """Do nothing: a running JAX has no limit to set; the plan keeps within it."""

    def attend_by(self, name: str, dtype: str) -> None:
        """Do nothing: the factory takes no name but "auto"."""

    def device(self) -> DeviceInfo:
        count = jax.device_count(self.jax_device.platform)
        if self.device_kind == "cpu":
            return DeviceInfo("cpu", "CPU", *host_memory(), count, self.num_hosts)
        stats = [device.memory_stats() or {} for device in jax.local_devices(backend="tpu")]
        sizes = [(x.get("bytes_limit", 0), x.get("bytes_in_use", 0)) for x in stats]
        total, free = min(all for all, _ in sizes), min(all - used for all, used in sizes)
        name = self.jax_device.device_kind
        return DeviceInfo("tpu", name, total, free, count, self.num_hosts)

    def peak_bytes(self) -> int | None:
        if self.device_kind == "cpu":
            return None
        stats = (device.memory_stats() or {} for device in jax.local_devices())
        return max(found.get("peak_bytes_in_use", 0) for found in stats) or None
