"""Weights, programs and the denoise loop on JAX devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import cached_property
from itertools import groupby, islice, zip_longest
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array, ShapeDtypeStruct, lax
from jax.experimental import multihost_utils
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as MemoryLayout
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ltx2rt.backend import Compiled, DeviceInfo, TensorSource
from ltx2rt.errors import InputError
from ltx2rt.graph.interpret import NUMPY_DTYPES
from ltx2rt.graph.ir import Graph, Layout, Type
from ltx2rt.launch import HOST_VARIABLES
from ltx2rt.passes.fuse import fuse, snakes
from ltx2rt.passes.loop import taken_apart
from ltx2rt.weights.encode import EncodedSource
from ltx2rt_tpu.distributed import device_mesh, join, rendezvous, silence_gloo
from ltx2rt_tpu.lower import run
from ltx2rt_tpu.ops import quantise_rows

Weights = dict[str, Array]
HALVED_BYTES = 2**20  # a smaller tensor is copied sooner than a thread is started
TILED_ROWS, TILED_COLUMNS = 16, 128  # of one layer's matrix in the memory of a TPU7x, bfloat16 rows in pairs


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory that XLA's CPU client takes over without a copy (64-byte aligned)."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def _copy(out: np.ndarray, array: np.ndarray) -> None:
    """out[...] = array in out's dtype; a large one by two threads: what takes time is faulting in fresh pages."""
    if array.nbytes < HALVED_BYTES or len(array) < 2:
        return _cast(out, array)
    middle = len(array) // 2
    second = Thread(target=_cast, args=(out[middle:], array[middle:]))
    second.start()
    _cast(out[:middle], array[:middle])
    second.join()


def _cast(out: np.ndarray, array: np.ndarray) -> None:
    """bfloat16 is widened by its bits, which numpy's own cast does 10x slower."""
    if array.dtype == ml_dtypes.bfloat16 and out.dtype == np.float32:
        np.left_shift(array.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[...] = array


class Program:
    """One lowered graph under one jit; `weights` maps declared names to arrays, `*` names stacked over layers."""

    def __init__(self, graph: Graph, place: Sharding, unrolled: bool):
        on_tpu = next(iter(place.device_set)).platform == "tpu"
        self.graph = fuse(graph, (snakes,)) if on_tpu else graph  # XLA fuses the rest itself
        self.place, self.unrolled = place, unrolled
        self.function = jax.jit(self._run)
        self.shared = jax.jit(self._each)

    def _run(self, weights: Weights, inputs: dict[str, Array]) -> dict[str, Array]:
        """The graph; on a mesh under shard_map, so that XLA communicates what the graph says and nothing else."""
        if isinstance(self.place, NamedSharding):
            specs = weight_specs(self.graph)
            function = jax.shard_map(
                self._local, mesh=self.place.mesh, in_specs=(specs, P()), out_specs=P(), check_vma=False
            )
            return function(weights, inputs)
        return self._local(weights, inputs)

    def _local(self, weights: Weights, inputs: dict[str, Array]) -> dict[str, Array]:
        ordered = [inputs[name] for name in self.graph.inputs]
        return dict(zip(self.graph.outputs, run(self.graph, weights, ordered, self.unrolled), strict=True))

    def _each(self, weights: Weights, inputs: dict[str, Array]) -> dict[str, Array]:
        """The graph on every device, each with inputs of its own, one after the other along the first axis."""
        assert isinstance(self.place, NamedSharding)
        mesh, axes = self.place.mesh, P(self.place.mesh.axis_names)
        function = jax.shard_map(self._local, mesh=mesh, in_specs=(P(), axes), out_specs=axes, check_vma=False)
        return function(weights, inputs)

    def upload(self, name: str, value: Any) -> Array:
        """An input on all devices, committed; a wrong shape is a ValueError."""
        spec = self.graph.inputs[name].type
        if tuple(value.shape) != spec.shape:
            raise ValueError(f"{self.graph.name}: input {name} has shape {tuple(value.shape)}, expected {spec}")
        # replicate also commits: jit compiles once more for an argument that is not committed to its device.
        typed = value.astype(spec.dtype) if isinstance(value, Array) else np.asarray(value, NUMPY_DTYPES[spec.dtype])
        return replicate(typed, self.place)

    @property
    def each_own(self) -> NamedSharding:
        """An array of which every device of the mesh has its part of the first axis."""
        assert isinstance(self.place, NamedSharding)
        return NamedSharding(self.place.mesh, P(self.place.mesh.axis_names))

    def together(self, weights: Weights, several: list[Mapping[str, Any]], output: str) -> list[Any]:
        """`output` for each of several inputs, at most as many as there are devices; weights are whole on each.

        Nothing communicates, unless a device is another process's: then the results are gathered.
        """
        place = self.place
        if not isinstance(place, NamedSharding):
            return [self(weights, inputs)[output] for inputs in several]
        count = place.mesh.size
        stacked = {}
        for name, v in self.graph.inputs.items():
            rows = [np.asarray(inputs[name], NUMPY_DTYPES[v.type.dtype]) for inputs in several]
            empty = [np.zeros_like(rows[0])] * (count - len(rows))
            whole = np.concatenate([*rows, *empty])
            stacked[name] = jax.make_array_from_callback(whole.shape, self.each_own, whole.__getitem__)
        y = self.shared(self._weights(weights), stacked)[output]
        if not y.is_fully_addressable:
            whole = multihost_utils.process_allgather(y, tiled=True)
            return np.split(whole, count)[: len(several)]
        shards = sorted(y.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        return [shard.data for shard in shards[: len(several)]]

    def _weights(self, weights: Weights) -> Weights:
        return weights_on(self.place, self.graph, weights)

    def __call__(self, weights: Weights, inputs: Mapping[str, Any]) -> dict[str, Array]:
        uploaded = {name: self.upload(name, np.asarray(v) if np.isscalar(v) else v) for name, v in inputs.items()}
        return self.function(self._weights(weights), uploaded)


class Loop:
    """The denoise loop: what leaves it runs once, the steps are one executable with traced bounds.

    On a mesh every device keeps what it has prepared for itself, under a new first axis over all mesh axes.
    """

    def __init__(self, graph: Graph, place: Sharding, unrolled: bool):
        self.graph, self.place, self.unrolled = graph, place, unrolled
        self.parts = taken_apart(graph)
        self.program = Program(graph, place, unrolled)  # of all steps at once; here it checks and uploads inputs
        self.before = jax.jit(self._before)
        self.steps = jax.jit(self._steps)

    def _spread(self, function: Callable, *specs: Any, out: Any) -> Callable:
        if not isinstance(self.place, NamedSharding):
            return function
        return jax.shard_map(function, mesh=self.place.mesh, in_specs=specs, out_specs=out, check_vma=False)

    def own(self) -> P:
        """How the devices' own arrays lie: one after the other along a first axis."""
        return P(self.place.mesh.axis_names if isinstance(self.place, NamedSharding) else None)

    def _before(self, weights: Weights, inputs: dict[str, Array]) -> dict[str, Array]:
        graph = self.parts.before

        def local(weights, inputs):
            results = run(graph, weights, [inputs[name] for name in graph.inputs], self.unrolled)
            return {name: x[None] for name, x in zip(graph.outputs, results, strict=True)}

        return self._spread(local, weight_specs(graph), P(), out=self.own())(weights, inputs)

    def _steps(self, weights, prepared, constants, outputs, first, last):
        """Steps first..last-1 of one loop; no host callback, for those keep an executable off the disk."""
        body, data, state = self.parts.body, set(self.parts.data), self.parts.state

        def local(weights, prepared, constants, outputs, i):
            values = constants | {name: x[0] for name, x in prepared.items()}
            values = {n: lax.dynamic_index_in_dim(x, i, 0, False) if n in data else x for n, x in values.items()}
            values |= {name: outputs[name] for name in state}
            results = run(body, weights, [values[name] for name in body.inputs], self.unrolled)
            return dict(zip(body.outputs, results, strict=True))

        step = self._spread(local, weight_specs(body), self.own(), P(), P(), P(), out=P())
        return lax.fori_loop(first, last, lambda i, outputs: step(weights, prepared, constants, outputs, i), outputs)

    def __call__(self, weights: Weights, inputs: Mapping[str, Any], num_steps: int) -> Iterator[dict[str, Array]]:
        before, body, state = self.parts.before, self.parts.body, self.parts.state
        given = {name: self.program.upload(name, inputs[name]) for name in self.graph.inputs}
        prepared = self.before(weights_on(self.place, before, weights), {name: given[name] for name in before.inputs})
        constants = {name: given[name] for name in body.inputs if name not in prepared and name not in state}
        outputs = {
            name: given[name]
            if name in state
            else replicate(np.zeros(v.type.shape, NUMPY_DTYPES[v.type.dtype]), self.place)
            for name, v in body.outputs.items()
        }
        own = weights_on(self.place, body, weights)
        queued = []
        for i in range(num_steps):
            outputs = self.steps(own, prepared, constants, outputs, np.int32(i), np.int32(i + 1))
            queued.append(outputs)
        for outputs in queued:
            jax.block_until_ready(outputs)
            yield outputs


def replicate(array: np.ndarray | Array, place: Sharding) -> Array:
    """`array` on every device of `place`; each process puts its own, which device_put alone would compare with all."""
    if place.is_fully_addressable or isinstance(array, Array):
        return jax.device_put(array, place)
    return jax.make_array_from_callback(array.shape, place, lambda _: array)


def assemble(shape: tuple[int, ...], place: Sharding, read: Callable[[tuple[slice, ...]], np.ndarray]) -> Array:
    """An array of the slices read(index): each is read once, put on all its devices, and let go before the next."""
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    indices = place.addressable_devices_indices_map(shape)
    for device, index in indices.items():
        assert index is not None
        holders.setdefault(tuple((s.start, s.stop) for s in index), []).append(device)
    shards = []
    for devices in holders.values():
        host = read(indices[devices[0]] or ())
        copies = [jax.device_put(host, device, may_alias=True) for device in devices]
        shards += jax.block_until_ready(copies)
    return jax.make_array_from_single_device_arrays(shape, place, shards)


def weights_on(place: Sharding, graph: Graph, weights: Weights) -> Weights:
    """Those that `graph` reads, on its mesh; a stage with another one has loaded the same slices."""
    names = graph.all_params()
    if not isinstance(place, NamedSharding):
        return {name: weights[name] for name in names}
    specs = weight_specs(graph)
    return {name: _renamed(weights[name], NamedSharding(place.mesh, specs[name])) for name in names}


def _renamed(array: Array, sharding: NamedSharding) -> Array:
    """`array` with the same slices on the same devices under the axis names of another mesh; nothing is copied."""
    if array.sharding == sharding:
        return array
    if not array.sharding.is_equivalent_to(sharding, array.ndim):
        raise ValueError(f"a weight {array.shape} lies as {array.sharding}, the graph reads it as {sharding}")
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def weight_specs(graph: Graph) -> dict[str, P]:
    """How each weight is laid over the mesh, by declared name; `*` names have a layer axis in front."""
    specs = {}
    for name, layout in graph.all_layouts().items():
        specs[name] = _spec(layout, ("*" in name))
    return specs


def weight_layout(name: str, type: Type, spec: P, device_kind: str) -> MemoryLayout | None:
    """How a weight lies in the memory of a device, None for the default tiling.

    A loop over layers on a TPU7x reads stacked bfloat16 matrices in tiles of 16 rows; in the default tiles of 8 the
    executable would begin with a copy of them all. The compiler fails on fewer rows than a tile has, and takes an
    argument that is cut over devices in the default tiling alone.
    """
    if device_kind != "TPU7x" or "*" not in name or type.dtype != "bfloat16" or len(type.shape) != 2 or any(spec):
        return None
    if type.shape[0] % TILED_ROWS or type.shape[1] % TILED_COLUMNS:
        return None
    return MemoryLayout((0, 1, 2), ((TILED_ROWS, TILED_COLUMNS), (2, 1)))


def abstract_weights(graph: Graph, place: Sharding) -> dict[str, ShapeDtypeStruct]:
    """Every weight by declared name: the shape of all devices together, `*` ones with their layers in front, and the
    format that an executable for `place` reads without a copy: how it is cut, how it lies in memory.
    """
    kind, specs, found = next(iter(place.device_set)).device_kind, weight_specs(graph), {}
    for name, (v, count) in graph.all_params().items():
        shape, sharding = ((count,) if "*" in name else ()) + v.type.shape, place
        if isinstance(place, NamedSharding):
            sizes, sharding = place.mesh.shape, NamedSharding(place.mesh, specs[name])
            shape = tuple(n * sizes.get(axis, 1) for n, axis in zip_longest(shape, specs[name]))
        own = Format(weight_layout(name, v.type, specs[name], kind), sharding)
        found[name] = ShapeDtypeStruct(shape, v.type.dtype, sharding=own)
    return found


def laid_out(array: Array, format: Format) -> Array:
    """`array` as `format` says; JAX sends host memory in the default tiling alone, so a device tiles it anew."""
    return array if format.layout is None else jax.device_put(array, format)


def _spec(layout: Layout, lead: int) -> P:
    """lead: axes in front of the parameter's own."""
    axes = {lead + dim: mesh_axis for dim, mesh_axis, _ in layout.splits}
    return P(*(axes.get(i) for i in range(max(axes, default=-1) + 1)))


class TpuBackend:
    """device: "auto" (the TPU if there is one, else the CPU), "tpu" or "cpu".

    mesh: sizes of the mesh axes over the devices of all processes.
    """

    name = "tpu"
    rendezvous = staticmethod(rendezvous)

    @staticmethod
    def keep_executables(root: Path) -> None:
        from ltx2rt_tpu.executables import keep_executables

        keep_executables(root)

    @staticmethod
    def ahead_compiler(topology: str, mesh: Mapping[str, int]) -> Callable[[Graph, str | None], Compiled]:
        from ltx2rt_tpu.ahead import AheadCompiler

        return AheadCompiler(topology, mesh)

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
            self._place(self.mesh)  # refuses what does not fit
        self.device_kind = "tpu" if self.jax_device.platform == "tpu" else "cpu"
        self.quantise = jax.jit(quantise_rows)
        self.versions = {"jax": jax.__version__}

    @cached_property
    def place(self) -> Sharding:
        return self._place(self.mesh)

    def _place(self, mesh: Mapping[str, int]) -> Sharding:
        """Where replicated arrays live: on the one device, or on all devices of the mesh."""
        count, devices = math.prod(mesh.values()), jax.devices(self.jax_device.platform)
        if self.num_hosts > 1 and count != len(devices):
            raise InputError(
                f"mesh {dict(mesh)} is of {count} devices, the {self.num_hosts} processes have {len(devices)}; "
                "give a --mesh of all of them"
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
                        "no TPU was found; use --device cpu, or --device auto to fall back by itself"
                    ) from error
        return jax.local_devices(backend="cpu")[0]

    def load(
        self,
        graphs: Iterable[Graph],
        source: TensorSource,
        base: Weights | None = None,
        changed: Set[str] = frozenset(),
    ) -> Weights:
        weights: Weights = {}
        encoded = EncodedSource(source, self._quantise)
        for graph in graphs:
            layouts, place = graph.all_layouts(), self._place_of(graph)
            abstract = abstract_weights(graph, place)
            for name, (value, count) in graph.all_params().items():
                if name in weights:
                    continue
                touched = (part for i in range(count) for part in layouts[name].names(i))
                if base is not None and name in base and changed.isdisjoint(touched):
                    weights[name] = base[name]
                else:
                    array = self._stack(encoded, name, layouts[name], value.type, count, place)
                    weights[name] = laid_out(array, abstract[name].format)
        return weights

    def _place_of(self, graph: Graph) -> Sharding:
        """Where a graph's replicated arrays live: on the devices of the backend's mesh, in its own axes."""
        if not graph.mesh:
            return self.place
        if math.prod(graph.mesh.values()) != math.prod(self.mesh.values()):
            raise ValueError(f"{graph.name} is placed on {dict(graph.mesh)}, the backend has {self.mesh}")
        return self._place(graph.mesh)

    def _quantise(self, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """On the device, and back: numpy casts to float8 at a fraction of any disk's speed."""
        values, scale = self.quantise(jax.device_put(array, self.jax_device))
        return np.asarray(values), np.asarray(scale)

    def _stack(
        self, source: EncodedSource, name: str, layout: Layout, type: Type, count: int, place: Sharding
    ) -> Array:
        """One parameter on its devices, a `*` one stacked over layers; cast once while it is copied from the file."""
        layers = (count,) if "*" in name else ()

        def local(coordinates: Mapping[str, int]) -> np.ndarray:
            host = _aligned_empty((*layers, *type.shape), NUMPY_DTYPES[type.dtype])
            for i in range(count):
                row, target = 0, host[i] if layers else host
                for piece in layout.pieces(coordinates, i):
                    array = source.read(piece, layout.encoding)
                    rows = array.shape[0] if len(layout.parts) > 1 else None
                    _copy(target if rows is None else target[row : row + rows], array)
                    row += rows or 0
            return host

        if not layout.splits or not isinstance(place, NamedSharding):
            return assemble((*layers, *type.shape), place, lambda _: local({}))
        own, whole = (*layers, *type.shape), [*layers, *type.shape]
        for dim, _, parts in layout.splits:
            whole[len(layers) + dim] *= parts
        sharding = NamedSharding(place.mesh, _spec(layout, len(layers)))

        def share(index: Any) -> np.ndarray:
            dims = ((len(layers) + dim, mesh_axis) for dim, mesh_axis, _ in layout.splits)
            return local({mesh_axis: (index[dim].start or 0) // own[dim] for dim, mesh_axis in dims})

        return assemble(tuple(whole), sharding, share)

    def lower(self, graph: Graph, layers: str = "scan", compile: bool = False) -> Program:
        return Program(graph, self._place_of(graph), layers == "unrolled")

    def lower_loop(self, graph: Graph, layers: str = "scan", compile: bool = False) -> Loop:
        return Loop(graph, self._place_of(graph), layers == "unrolled")

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        wide = (jax.device_put(np.asarray(x, np.float32), self.jax_device) for x in (a, b))
        return np.array(jnp.matmul(*wide, precision=lax.Precision.HIGHEST), a.dtype)  # a copy: JAX's own is read-only

    def each(self, calls: Iterable[tuple[Program, Weights, Mapping[str, Any]]], output: str) -> Iterator[Any]:
        """Consecutive calls of one program run together, one on each device."""
        devices = self.place.mesh.size if isinstance(self.place, NamedSharding) else 1
        before: list[Any] = []
        for _, same in groupby(calls, key=lambda call: id(call[0])):
            same = iter(same)
            while batch := list(islice(same, devices)):
                program, weights, _ = batch[0]
                now = program.together(weights, [inputs for *_, inputs in batch], output)
                yield from before
                before = now
        yield from before

    def to_host(self, array: Array) -> np.ndarray:
        host = np.asarray(array)
        return host if host.dtype == np.int32 else host.astype(np.float32)

    def synchronize(self) -> None:
        jax.effects_barrier()

    def device(self) -> DeviceInfo:
        count = jax.device_count(self.jax_device.platform)
        if self.device_kind == "tpu":
            stats = [device.memory_stats() or {} for device in jax.local_devices(backend="tpu")]
            total = min(found.get("bytes_limit", 0) for found in stats)
            free = min(found.get("bytes_limit", 0) - found.get("bytes_in_use", 0) for found in stats)
            return DeviceInfo("tpu", self.jax_device.device_kind, total, free, count)
        from ltx2rt.placement.devices import host_memory

        return DeviceInfo("cpu", "CPU", *host_memory(), count)

    def peak_bytes(self) -> int | None:
        if self.device_kind == "cpu":
            return None
        return max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()) or None
