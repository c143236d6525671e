"""The backend `cuda`: PyTorch devices and their process groups, loading, and lowering for them."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from functools import partial, reduce
from operator import mul
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from ltx2rt.backend import DeviceInfo, TensorSource, overlapped
from ltx2rt.graph.encodings import has_products
from ltx2rt.graph.ir import Graph, Layout, Type, numbered
from ltx2rt.passes.loop import taken_apart
from ltx2rt.passes.unroll import unroll
from ltx2rt.placement.stream import FILE, PINNED, Piece, moves, stack_of
from ltx2rt.placement.stream import pieces as pieces_of
from ltx2rt.weights.encoded import EncodedSource
from ltx2rt.weights.encoded import Piece as Cuts
from ltx2rt.weights.files import in_file
from ltx2rt.weights.lora.changes import Factors
from ltx2rt.weights.lora.file import row_chunks
from ltx2rt_cuda.as_run import as_run
from ltx2rt_cuda.device import chosen
from ltx2rt_cuda.device.torch_device import Fetched, Recorder, widened
from ltx2rt_cuda.distributed import ALONE, Arriving, Sending, join
from ltx2rt_cuda.host import FileWeight, parked, pins_no_more, unparked
from ltx2rt_cuda.ops.products import joined_rows, tried_road
from ltx2rt_cuda.ops.stored import encode, unpack
from ltx2rt_cuda.ops.table import DTYPES
from ltx2rt_cuda.program import Loop, Program, Tensors, Weights, to_torch
from ltx2rt_cuda.stream import Ring, StreamedWeights, like

if TYPE_CHECKING:
    from ltx2rt_cuda.train import Trainer


class CudaBackend:
    """device: "auto" (the GPU if there is one, else the CPU), or one of `device.DEVICES`."""

    name = "cuda"
    runs = True

    def __init__(self, device: str = "auto", mesh: Mapping[str, int] = MappingProxyType({})):
        self.hardware = chosen(device)
        self.device_kind, self.torch_device = self.hardware.kind, self.hardware.torch
        self.position = join(mesh, self.hardware)
        self.mesh, self.is_main = self.position.mesh, self.position.rank == 0
        self.num_processes = self.position.size
        self._pool: Recorder | None = None
        self._sending: Sending | None = None
        self._built: Counter[str] = Counter()
        self.hardware.open()
        self.versions = {"torch": torch.__version__}

    @property
    def num_built(self) -> int:
        dynamo = sys.modules.get("torch._dynamo.utils")
        return self._built.total() + (dynamo.counters["stats"]["unique_graphs"] if dynamo else 0)

    def load(
        self,
        graphs: Iterable[Graph],
        source: TensorSource,
        base: Weights | None = None,
        changed: Set[str] = frozenset(),
        streamed: Set[Piece] = frozenset(),
        road: str = PINNED,
    ) -> Weights:
        weights: dict[str, Any] = {}
        graphs = list(graphs)
        sizes = {p: size for graph in graphs for p, size in pieces_of(graph).items()}
        ring = Ring(self.hardware, road, sum(sizes[piece] for piece in streamed & sizes.keys()))
        encoded = EncodedSource(
            source, lambda name, array: encode(name, to_torch(array).to(self.torch_device))
        )
        for graph in graphs:
            if self.hardware.queues and has_products(graph):
                tried_road(self.torch_device)  # before anything is recorded
            layouts, position = graph.all_layouts(), self.position.on(graph.mesh)
            made = partial(
                self._parameter, encoded, layouts, position.coordinates, base or {}, changed
            )
            moved: dict[Piece, dict[str, Type]] = {p: {} for p in pieces_of(graph) if p in streamed}
            for declared, (value, count) in graph.all_params().items():
                for layer in range(count):
                    piece = (stack_of(declared), layer)
                    if piece in moved and moves(declared, value.type):
                        moved[piece][declared] = value.type
                    elif (name := numbered(declared, layer)) not in weights:
                        weights[name] = made(declared, layer, value.type)
            for (stack, layer), types in moved.items():
                tensors = {name: made(name, layer, type, road=road) for name, type in types.items()}
                for declared, kept in ring.add((stack, layer), tensors).items():
                    weights[numbered(declared, layer)] = kept
        return StreamedWeights(weights, ring) if streamed else weights

    def _parameter(
        self,
        source: EncodedSource,
        layouts: Mapping[str, Layout],
        coordinates: Mapping[str, int],
        base: Weights,
        changed: Set[str],
        declared: str,
        layer: int,
        type: Type,
        road: str = PINNED,
    ) -> Any:
        """One parameter on the device: `base`'s parameter unless its tensors changed, else a new
        one. With the road `file` it stays in its file if the file has all of its bytes."""
        layout, name = layouts[declared], numbered(declared, layer)
        pieces = list(layout.pieces(coordinates, layer))
        same = name in base and base[name].dtype == DTYPES[type.dtype]  # both sets keep it
        if same and changed.isdisjoint(piece for piece, *_ in pieces):
            return base[name]
        if road != FILE:
            return self._tensor(source, pieces, layout, type)
        arrays = [self._read(source, piece, layout, type) for piece in pieces]  # most are views
        rows = type.shape[0] if len(arrays) == 1 else self.joined_rows(type.shape[0])
        found = file_weight((rows, *type.shape[1:]), DTYPES[type.dtype], arrays)
        return self._made(arrays, len(pieces), type) if found is None else found

    def _tensor(
        self, source: EncodedSource, pieces: list[Cuts], layout: Layout, type: Type
    ) -> torch.Tensor:
        """One parameter on the device, which benchmarks draw instead; pieces are joined in place."""
        arrays = (self._read(source, piece, layout, type) for piece in pieces)
        return self._made(arrays, len(pieces), type)

    def _made(self, arrays: Iterable[Any], count: int, type: Type) -> torch.Tensor:
        """Build the parameter from `count` arrays, each read when it is needed and cast once."""
        dtype = DTYPES[type.dtype]
        if count == 1:
            (read,) = arrays
            tensor, borrowed = to_torch(read), isinstance(read, np.ndarray)
            layout = self.memory_format(tensor.ndim)
            return tensor.to(self.torch_device, dtype, copy=borrowed, memory_format=layout)
        joined = self.empty_joined(type.shape, dtype)
        row = 0
        for array in arrays:
            tensor = to_torch(array)
            joined[row : row + len(tensor)] = tensor
            row += len(tensor)
        return joined

    def _read(self, source: EncodedSource, piece: Cuts, layout: Layout, type: Type) -> Any:
        """A slice of a tensor. Quantised tensors are copied as stored and decoded on the device."""
        stored = source.stored(piece, layout)
        if stored is None:
            return source.read(piece, layout)
        encoding, fields = stored
        on_device = [to_torch(field).to(self.torch_device) for field in fields]
        return unpack(*on_device, encoding=encoding, dtype=type.dtype)

    def empty_joined(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of a packed weight. It may have more rows, of zeros, than its graph says."""
        rows = self.joined_rows(shape[0])
        joined = torch.empty((rows, *shape[1:]), dtype=dtype, device=self.torch_device)
        joined[shape[0] :].zero_()
        return joined

    def joined_rows(self, rows: int) -> int:
        return joined_rows(rows) if self.hardware.pads_rows else rows

    def memory_format(self, ndim: int) -> torch.memory_format:
        """Layout of a weight; 3-D convolutions get the one that `ops.conv` prefers."""
        convolution = ndim == 5 and self.hardware.channels_last
        return torch.channels_last_3d if convolution else torch.contiguous_format

    @torch.inference_mode()
    def park(self, weights: Weights) -> Weights | None:
        try:
            if isinstance(weights, StreamedWeights):
                weights.ring.release()
            return like(weights, parked(weights, self.hardware.pins))
        except RuntimeError as error:
            if not pins_no_more(error):
                raise
            return None

    @torch.inference_mode()
    def unpark(self, kept: Weights, left: Weights) -> Weights:
        return like(kept, unparked(kept, left, self.torch_device))

    def lower(
        self, graph: Graph, layers: str = "scan", compile: bool = False, fused: bool = True
    ) -> Program:
        """fused: lower what `as_run` makes of the graph, not the graph itself."""
        if fused:
            graph = as_run(graph, self.device_kind, compile=compile)
        graph = unroll(graph) if layers == "unrolled" else graph
        return Program(graph, self.hardware, compile, self.position.on(graph.mesh), self._built)

    def lower_loop(self, graph: Graph, layers: str = "scan", compile: bool = False) -> Loop:
        graph = as_run(graph, self.device_kind, steps=True, compile=compile)
        parts, position = taken_apart(graph), self.position if graph.mesh else ALONE
        pool = None
        if position.records():
            pool = self._pool = self._pool or self.hardware.recorder()
        before, body = (
            self.lower(part, layers, compile, fused=False) for part in (parts.before, parts.body)
        )
        return Loop(graph, before, body, parts, pool, position)

    def trainer(self, *step: Any, **how: Any) -> Trainer:
        from ltx2rt_cuda.train import Trainer

        return Trainer(self, *step, **how)

    def merge(self, weight: np.ndarray, factors: Sequence[Factors], rounded: bool) -> torch.Tensor:
        device, dtype = self.torch_device, torch.bfloat16 if rounded else torch.float32

        def wide(term: Sequence[np.ndarray], terms: Sequence[Any]) -> list[torch.Tensor]:
            kept = dtype if len(terms) == 1 else torch.float32
            return [to_torch(half).to(device, kept).float() for half in term]

        changes = [([wide(term, terms) for term in terms], scale) for terms, scale in factors]
        kept = torch.float32 if weight.dtype == np.float32 else dtype
        merged = torch.empty(weight.shape, dtype=kept, device=device)
        for rows in row_chunks(len(weight)):
            delta = None
            for terms, scale in changes:
                if delta is None and len(terms) == 1:
                    ((up, down),) = terms
                    delta = ((up[rows] * scale).to(dtype).float() @ down).to(dtype)
                    continue
                change = scale * reduce(mul, (up[rows] @ down for up, down in terms))
                delta = (change if delta is None else delta + change).to(dtype)
            assert delta is not None
            # summed in float32, rounded once
            merged[rows] = delta + to_torch(weight[rows]).to(device)
        return merged

    def each(
        self, calls: Iterable[tuple[Program, Weights, Mapping[str, Any]]], output: str
    ) -> Generator[Any]:
        """Processes take calls in turn; the main one gets the results sent."""
        latest: deque[Any] = deque(maxlen=max(2, self.num_processes))

        def started() -> Iterator[Any]:
            for i, (program, weights, inputs) in enumerate(calls):
                work, type = partial(program, weights, inputs), program.graph.outputs[output].type
                latest.append(self._on(i % self.num_processes, work, output, type))
                yield latest[-1]

        try:
            for result in overlapped(started(), max(1, self.num_processes - 1)):
                yield result
                _settle(result)
        finally:  # the next collective finds no sending without a receiver
            for result in latest:
                _settle(result)
            self._await_sent()

    def _on(
        self, rank: int, work: Callable[[], Tensors], output: str, type: Type
    ) -> torch.Tensor | Fetched | Arriving | None:
        if rank == self.position.rank:
            result = work()[output]
            if self.is_main:
                return self.hardware.fetch(result)
            made = self.hardware.recorded_event()
            self._await_sent()
            result = result.contiguous()
            self._sending = Sending(result, dist.isend(result, 0), made)
        elif self.is_main:
            tensor = torch.empty(type.shape, dtype=DTYPES[type.dtype], device=self.torch_device)
            return Arriving(tensor, dist.irecv(tensor, rank))
        return None

    def _await_sent(self) -> None:
        if self._sending is not None:
            self._sending.wait()
            self._sending = None

    def compile_ahead(self, programs: Iterable[tuple[Any, bool]]) -> list[Future[None]]:
        """Nothing takes long enough."""
        return []

    def agree(self, flag: bool) -> bool:
        return self.position.agree(flag)

    def to_host(self, array: torch.Tensor | Fetched | Arriving) -> np.ndarray:
        tensor = array if isinstance(array, torch.Tensor) else array.wait()
        return widened(tensor).cpu().numpy()

    def synchronize(self) -> None:
        self.hardware.synchronize()

    def trim(self, recorded: bool = False) -> None:
        if recorded and self._pool is not None:
            self._pool.empty()
        self.hardware.trim()

    def limit(self, max_memory: float | None) -> None:
        self.hardware.limit(max_memory)

    def attend_by(self, name: str, dtype: str) -> None:
        self.hardware.attend_by(name, dtype)

    def device(self) -> DeviceInfo:
        return self.hardware.info(self._pool)

    def peak_bytes(self) -> int | None:
        return self.hardware.peak_bytes()


def _settle(result: Any) -> None:
    if isinstance(result, Arriving):
        result.wait()


def file_weight(
    shape: tuple[int, ...], dtype: torch.dtype, arrays: Sequence[Any]
) -> FileWeight | None:
    """The weight of these arrays in order; None unless all are views of files in its dtype."""
    views = [x for x in arrays if isinstance(x, np.ndarray) and to_torch(x).dtype == dtype]
    parts = [(*where, x.nbytes) for x in views if (where := in_file(x))]
    if len(parts) < len(arrays):
        return None
    for file, begin, size in parts:
        file.unmap(begin, size)  # it was looked through for NaN
    return FileWeight(shape, dtype, parts)
