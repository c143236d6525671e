"""Weights of a placed graph on JAX devices: how each is cut, its layout in memory, how it gets
there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import zip_longest
from operator import mul
from threading import Thread
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array, ShapeDtypeStruct, lax
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as MemoryLayout
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from ltx2rt.graph.interpret import NUMPY_DTYPES
from ltx2rt.graph.ir import Graph, Layout, Type
from ltx2rt.weights.encoded import EncodedSource
from ltx2rt.weights.lora.changes import Factors
from ltx2rt.weights.lora.file import BF16, F32, row_chunks

Weights = dict[str, Any]  # arrays, or `HostLayers`
HALVED_BYTES = 2**20  # a smaller tensor is copied sooner than a thread is started
TILED_KIND = "TPU7x"
# layout of one layer's matrix in the memory of a TPU7x, bfloat16 rows in pairs
TILED_ROWS, TILED_COLUMNS = 16, 128


class HostLayers:
    """The layers of one `*` weight, each [1, ...], in the host's memory."""

    streamed = True  # it takes no memory of the devices

    def __init__(self, read: Sequence[Callable[[], Array]]):
        self.layers = []
        for one in read:
            x = one()
            self.place = x.sharding
            # before the next one takes memory
            self.layers.append(jax.block_until_ready(in_host_memory(x)))

    def brought(self, layer: int) -> Array:
        """The layer on its way to the devices."""
        return jax.device_put(self.layers[layer], self.place)


class FileLayers:
    """The layers of one `*` weight, each [1, ...], read from the file at every use."""

    streamed = True

    def __init__(self, read: Sequence[Callable[[], Array]]):
        self.read = read

    def brought(self, layer: int) -> Array:
        """The layer on its way to the devices. Raises InputError if the file has changed."""
        return self.read[layer]()


def in_host_memory(x: Array) -> Array:
    """The array on its way there."""
    return jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))


def is_streamed(weight: Any) -> bool:
    return isinstance(weight, HostLayers | FileLayers)


def weight_specs(graph: Graph) -> dict[str, P]:
    """Sharding of each weight by declared name; `*` names have a layer axis in front."""
    return {name: _spec(layout, "*" in name) for name, layout in graph.all_layouts().items()}


def weight_layout(name: str, type: Type, spec: P, device_kind: str) -> MemoryLayout | None:
    """Layout of a weight in the memory of a device, None for the default tiling.

    A loop over layers on a TPU7x reads stacked bfloat16 matrices in tiles of 16 rows; in the
    default tiles of 8 the executable would begin with a copy of them all. The compiler fails on
    fewer rows than a tile has, and takes an argument that is cut over devices only in the default
    tiling.
    """
    stacked = "*" in name and len(type.shape) == 2 and type.dtype == "bfloat16"
    if device_kind != TILED_KIND or not stacked or any(spec):
        return None
    if type.shape[0] % TILED_ROWS or type.shape[1] % TILED_COLUMNS:
        return None
    return MemoryLayout((0, 1, 2), ((TILED_ROWS, TILED_COLUMNS), (2, 1)))


def abstract_weights(graph: Graph, place: Sharding) -> dict[str, ShapeDtypeStruct]:
    """Every weight by declared name: the shape of all devices together, `*` ones with their layers
    in front, and the format that an executable for `place` reads without a copy."""
    kind, specs, found = next(iter(place.device_set)).device_kind, weight_specs(graph), {}
    for name, (v, count) in graph.all_params().items():
        shape, sharding = ((count,) if "*" in name else ()) + v.type.shape, place
        if isinstance(place, NamedSharding):
            sizes, sharding = place.mesh.shape, NamedSharding(place.mesh, specs[name])
            shape = tuple(n * sizes.get(axis, 1) for n, axis in zip_longest(shape, specs[name]))
        own = Format(weight_layout(name, v.type, specs[name], kind), sharding)
        found[name] = ShapeDtypeStruct(shape, v.type.dtype, sharding=own)
    return found


def _spec(layout: Layout, lead: int) -> P:
    """lead: axes in front of the parameter's own."""
    axes = {lead + dim: mesh_axis for dim, mesh_axis, _ in layout.splits}
    return P(*(axes.get(i) for i in range(max(axes, default=-1) + 1)))


def weights_on(place: Sharding, graph: Graph, weights: Weights) -> Weights:
    """Weights of `graph` on its mesh; a stage with another mesh has loaded the same slices."""
    names = graph.all_params()
    if not isinstance(place, NamedSharding):
        return {name: weights[name] for name in names}
    specs = weight_specs(graph)
    return {name: _renamed(weights[name], NamedSharding(place.mesh, specs[name])) for name in names}


def _renamed(array: Array, sharding: NamedSharding) -> Array:
    """`array` under the axis names of another mesh, same slices and devices; nothing is copied."""
    if array.sharding == sharding:
        return array
    if not array.sharding.is_equivalent_to(sharding, array.ndim):
        raise ValueError(
            f"a weight {array.shape} lies as {array.sharding}, the graph reads it as {sharding}"
        )
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def assemble(
    shape: tuple[int, ...], place: Sharding, read: Callable[[tuple[slice, ...]], np.ndarray]
) -> Array:
    """An array of the slices read(index), each read once, put on its devices, then freed."""
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


def stacked(
    source: EncodedSource, name: str, layout: Layout, type: Type, count: int, place: Sharding
) -> Array:
    """One parameter on its devices, a `*` one stacked over layers; cast while it is copied."""
    layers = (count,) if "*" in name else ()
    own, whole = (*layers, *type.shape), [*layers, *type.shape]

    def local(coordinates: Mapping[str, int]) -> np.ndarray:
        host = _aligned_empty(own, NUMPY_DTYPES[type.dtype])
        for i in range(count):
            row, target = 0, host[i] if layers else host
            for piece in layout.pieces(coordinates, i):
                array = source.read(piece, layout)
                rows = array.shape[0] if len(layout.parts) > 1 else None
                _copy(target if rows is None else target[row : row + rows], array)
                row += rows or 0
        return host

    if not layout.splits or not isinstance(place, NamedSharding):
        return assemble(own, place, lambda _: local({}))
    for dim, _, parts in layout.splits:
        whole[len(layers) + dim] *= parts
    sharding = NamedSharding(place.mesh, _spec(layout, len(layers)))

    def share(index: Any) -> np.ndarray:
        dims = ((len(layers) + dim, mesh_axis) for dim, mesh_axis, _ in layout.splits)
        return local({mesh_axis: (index[dim].start or 0) // own[dim] for dim, mesh_axis in dims})

    return assemble(tuple(whole), sharding, share)


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory that XLA's CPU client takes over without a copy (64-byte aligned)."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def _copy(out: np.ndarray, array: np.ndarray) -> None:
    """out[...] = array, cast; a large one by two threads: faulting in fresh pages takes time."""
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


def merged(
    weight: np.ndarray, factors: Sequence[Factors], rounded: bool, device: Any
) -> np.ndarray:
    """`weights.lora.merge` on the device, and back."""
    dtype = BF16 if rounded else F32
    result = np.empty(weight.shape, F32 if weight.dtype == F32 else dtype)
    downs = [[jax.device_put(down, device) for _, down in terms] for terms, _ in factors]
    for rows in row_chunks(len(weight)):
        delta = None
        for (terms, scale), below in zip(factors, downs, strict=True):
            ups = [jax.device_put(up[rows], device) for up, _ in terms]
            change = _change(ups, below, np.float32(scale), dtype, delta is None)
            delta = change if delta is None else _sum(delta, change, dtype)
        result[rows] = _sum(delta, jax.device_put(weight[rows], device), result.dtype)
    return result


# Two programs: in one, XLA makes a single instruction of `scale * product` and the sum, which
# rounds once less.
@partial(jax.jit, static_argnames=("dtype", "first"))
def _change(
    ups: Sequence[Array], downs: Sequence[Array], scale: Any, dtype: np.dtype, first: bool
) -> Array:
    """s * (B @ A) in float32; a weight's first is Delta itself, scaled before the product."""
    single = len(ups) == 1
    kept = partial(_floats, dtype=dtype if single else F32)
    pairs = [[*map(kept, pair)] for pair in zip(ups, downs, strict=True)]
    product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    if first and single:
        ((up, down),) = pairs
        return product(_floats(up * scale, dtype), down).astype(dtype)
    change = scale * reduce(mul, (product(up, down) for up, down in pairs))
    return change.astype(dtype) if first else change


@partial(jax.jit, static_argnames="dtype")
def _sum(a: Array, b: Array, dtype: np.dtype) -> Array:
    return (a.astype(F32) + b.astype(F32)).astype(dtype)


def _floats(array: Array, dtype: np.dtype) -> Array:
    """float32 rounded to dtype: XLA may drop a cast to bfloat16 and back, this it keeps."""
    array = array.astype(F32)
    return lax.reduce_precision(array, 8, 7) if dtype == BF16 else array
