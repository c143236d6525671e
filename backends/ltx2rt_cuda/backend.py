"""Weights, programs and the denoise loop on one PyTorch device."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import partial
from itertools import cycle
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist

from ltx2rt.backend import DeviceInfo, TensorSource
from ltx2rt.errors import InputError
from ltx2rt.graph.ir import Graph, Type
from ltx2rt.passes.fuse import fuse
from ltx2rt.passes.loop import Parts, taken_apart
from ltx2rt.weights.encode import EncodedSource, Piece
from ltx2rt_cuda.distributed import Arriving, Position, join, rendezvous
from ltx2rt_cuda.lower import lower
from ltx2rt_cuda.ops import DTYPES, quantise_rows

Tensors = dict[str, torch.Tensor]
Weights = Tensors
CAPTURE_WARMUPS = 2  # runs before a step is recorded: libraries pick kernels and take workspaces in the first


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor over the array's memory, bfloat16 included; never written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.asarray(array, order="C"))  # ascontiguousarray gives a scalar an axis


def upload(graph: Graph, name: str, value: Any, device: torch.device) -> torch.Tensor:
    """The input `name` of `graph` on the device; a wrong shape is a ValueError."""
    spec = graph.inputs[name].type
    tensor = value if isinstance(value, torch.Tensor) else to_torch(np.asarray(value))
    if tuple(tensor.shape) != spec.shape:
        raise ValueError(f"{graph.name}: input {name} has shape {tuple(tensor.shape)}, expected {spec}")
    return tensor.to(device, DTYPES[spec.dtype])


class Program:
    """One lowered graph; `weights` maps declared parameter names, `*` replaced by the layer, to tensors."""

    def __init__(self, graph: Graph, device: torch.device, compile: bool, position: Position):
        self.graph, self.device = graph, device
        self.module = lower(graph, device, compile, position)

    def arguments(self, weights: Weights) -> list:
        return [
            [weights[name.replace("*", str(i))] for i in range(count)] if "*" in name else weights[name]
            for name, (_, count) in self.graph.all_params().items()
        ]

    @torch.inference_mode()
    def __call__(self, weights: Weights, inputs: Mapping[str, Any]) -> Tensors:
        uploaded = [upload(self.graph, name, inputs[name], self.device) for name in self.graph.inputs]
        return dict(zip(self.graph.outputs, self.module(*uploaded, *self.arguments(weights)), strict=True))


class Captured:
    """One step recorded as a CUDA graph: a replay reads fixed buffers, runs every kernel, and writes fixed buffers."""

    def __init__(self, program: Program, arguments: list, values: Mapping[str, torch.Tensor], pool: Any):
        self.program, self.key = program, _addresses(arguments)
        self.serves: Mapping[str, torch.Tensor] | None = None  # the request whose constants lie in the buffers
        self.inputs = {name: value.clone() for name, value in values.items()}
        ordered = [self.inputs[name] for name in program.graph.inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(CAPTURE_WARMUPS):
                program.module(*ordered, *arguments)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.outputs = program.module(*ordered, *arguments)

    def put(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            self.inputs[name].copy_(value)

    def __call__(self) -> Tensors:
        self.graph.replay()
        return {name: x.clone() for name, x in zip(self.program.graph.outputs, self.outputs, strict=True)}


def _addresses(arguments: list) -> tuple:
    """Where the weights lie: a recorded step stays valid as long as they do."""
    return tuple(
        tuple(w.data_ptr() for w in argument) if isinstance(argument, list) else argument.data_ptr()
        for argument in arguments
    )


class Loop:
    """The denoise loop: what leaves it runs once, then one step after the other, on one GPU as a recorded CUDA graph.

    Recorded anew only for other weights: the shapes and branches are the loop's own. With process groups the steps are
    launched one by one: a recorded collective has not been tried.
    """

    def __init__(self, graph: Graph, before: Program, body: Program, parts: Parts, pool: Any):
        self.graph, self.before, self.body, self.parts, self.pool = graph, before, body, parts, pool
        self.captured: Captured | None = None

    def __call__(self, weights: Weights, inputs: Mapping[str, Any], num_steps: int) -> Iterator[Tensors]:
        names, parts = self.body.graph.inputs, self.parts
        with torch.inference_mode():
            given = {name: upload(self.graph, name, inputs[name], self.body.device) for name in self.graph.inputs}
            prepared = self.before(weights, {name: given[name] for name in self.before.graph.inputs})
            values = {name: prepared[name] if name in prepared else given[name] for name in names}
            rows = {name: values[name] for name in parts.data}
            state = {name: values[name] for name in parts.state}
            constants = {name: x for name, x in values.items() if name not in rows and name not in state}
            step = self._step(weights, constants, state | {name: x[0] for name, x in rows.items()})
        pending: list[tuple[Any, Tensors]] = []
        for i in range(num_steps):
            with torch.inference_mode():
                outputs = step(state | {name: x[i] for name, x in rows.items()})
            state = {name: outputs[name] for name in state}
            event = None
            if self.body.device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
            pending.append((event, outputs))
            while pending and (pending[0][0] is None or pending[0][0].query()):
                yield pending.pop(0)[1]
        for event, outputs in pending:
            event.synchronize()
            yield outputs

    def _step(self, weights: Weights, constants: Tensors, changing: Tensors) -> Callable[[Tensors], Tensors]:
        """One step as a function of what changes from step to step."""
        arguments = self.body.arguments(weights)
        if self.pool is None:
            module, graph = self.body.module, self.body.graph

            def step(changing: Tensors) -> Tensors:
                ordered = [changing[name] if name in changing else constants[name] for name in graph.inputs]
                return dict(zip(graph.outputs, module(*ordered, *arguments), strict=True))

            return step
        if self.captured is None or self.captured.key != _addresses(arguments):
            self.captured = None  # its memory goes before the next one takes any
            self.captured = Captured(self.body, arguments, constants | changing, self.pool)
        captured = self.captured

        def replay(changing: Tensors) -> Tensors:
            if captured.serves is not constants:
                captured.put(constants)
                captured.serves = constants
            captured.put(changing)
            return captured()

        return replay


class CudaBackend:
    """device: "auto" (the GPU if there is one, else the CPU), "cuda" or "cpu"."""

    name = "cuda"
    rendezvous = staticmethod(rendezvous)

    def __init__(self, device: str = "auto", mesh: Mapping[str, int] = MappingProxyType({})):
        if device not in ("auto", "cpu", "cuda"):
            raise InputError(f"backend cuda runs on auto, cuda or cpu, not on {device}")
        if device == "cuda" and not torch.cuda.is_available():
            raise InputError("no CUDA device was found; use --device cpu, or --device auto to fall back by itself")
        self.device_kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
        self.position = join(mesh, self.device_kind)
        self.mesh, self.is_main = self.position.mesh, self.position.rank == 0
        self.num_processes = self.position.size
        self._pool: Any = None  # the memory that recorded steps share: only one of them runs at a time
        self._sent: tuple[Any, ...] = ()  # what is on its way to the main process, and its memory
        self.torch_device = torch.device(self.device_kind)
        # float32 means float32: TF32 keeps 10 mantissa bits.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        self.versions = {"torch": torch.__version__}

    def load(
        self,
        graphs: Iterable[Graph],
        source: TensorSource,
        base: Weights | None = None,
        changed: Set[str] = frozenset(),
    ) -> Weights:
        weights: Weights = {}
        encoded = EncodedSource(source, lambda array: quantise_rows(to_torch(array).to(self.torch_device)))
        for graph in graphs:
            layouts, position = graph.all_layouts(), self.position.on(graph.mesh)
            for declared, (value, count) in graph.all_params().items():
                for layer in range(count):
                    name = declared.replace("*", str(layer))
                    if name not in weights:
                        pieces = list(layouts[declared].pieces(position.coordinates, layer))
                        if base is not None and name in base and changed.isdisjoint(piece for piece, *_ in pieces):
                            weights[name] = base[name]
                        else:
                            weights[name] = self._tensor(encoded, pieces, layouts[declared].encoding, value.type)
        return weights

    def _tensor(self, source: EncodedSource, pieces: list[Piece], encoding: str | None, type: Type) -> torch.Tensor:
        """One parameter on the device, cast once on the way; several pieces are joined in place."""
        dtype = DTYPES[type.dtype]
        if len(pieces) == 1:
            tensor = self._piece(source, pieces[0], encoding)
            copied = tensor.to(self.torch_device, dtype, memory_format=self.memory_format(tensor.ndim))
            return copied.clone() if copied.data_ptr() == tensor.data_ptr() else copied
        joined = torch.empty(type.shape, dtype=dtype, device=self.torch_device)
        row = 0
        for piece in pieces:
            tensor = self._piece(source, piece, encoding)
            joined[row : row + len(tensor)] = tensor
            row += len(tensor)
        return joined

    @staticmethod
    def _piece(source: EncodedSource, piece: Piece, encoding: str | None) -> torch.Tensor:
        """Over the file's memory, or, if there is an encoding, on the device."""
        read = source.read(piece, encoding)
        return read if encoding else to_torch(read)

    def memory_format(self, ndim: int) -> torch.memory_format:
        """How a weight lies on the device: that of a 3-D convolution as `ops.conv` wants it."""
        convolution = ndim == 5 and self.device_kind == "cuda"
        return torch.channels_last_3d if convolution else torch.contiguous_format

    def lower(self, graph: Graph, layers: str = "scan", compile: bool = False, fused: bool | None = None) -> Program:
        """fused: write the ops that have kernels; by default on a GPU, where the kernels run."""
        if self.device_kind == "cuda" if fused is None else fused:
            graph = fuse(graph)
        if layers == "unrolled":
            from ltx2rt.passes.unroll import unroll

            graph = unroll(graph)
        return Program(graph, self.torch_device, compile, self.position.on(graph.mesh))

    def lower_loop(self, graph: Graph, layers: str = "scan", compile: bool = False) -> Loop:
        parts = taken_apart(graph)
        before, body = (self.lower(part, layers, compile) for part in (parts.before, parts.body))
        if self.device_kind == "cuda" and not self.mesh and self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return Loop(graph, before, body, parts, self._pool)

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        product = to_torch(a).to(self.torch_device, torch.float32) @ to_torch(b).to(self.torch_device, torch.float32)
        return product.cpu().numpy().astype(a.dtype, copy=False)

    def each(self, calls: Iterable[tuple[Program, Weights, Mapping[str, Any]]], output: str) -> Iterator[Any]:
        """Processes take calls in turn; the main one gets the results sent."""
        queue: deque[Any] = deque()
        for turn, (program, weights, inputs) in zip(cycle(range(self.num_processes)), calls, strict=False):
            queue.append(self._on(turn, partial(program, weights, inputs), output, program.graph.outputs[output].type))
            if len(queue) >= max(2, self.num_processes):
                yield queue.popleft()
        yield from queue

    def _on(self, rank: int, work: Callable[[], Tensors], output: str, type: Type) -> torch.Tensor | Arriving | None:
        here = self.position.rank
        if rank == here:
            result = work()[output]
            if self.is_main:
                return result
            self._await_sent()
            result = result.contiguous()
            self._sent = (dist.isend(result, 0), result)
        elif self.is_main:
            tensor = torch.empty(type.shape, dtype=DTYPES[type.dtype], device=self.torch_device)
            work_ = dist.irecv(tensor, rank)
            assert work_ is not None
            return Arriving(tensor, work_)
        return None

    def _await_sent(self) -> None:
        for work in self._sent[:1]:
            work.wait()
        self._sent = ()

    def to_host(self, array: torch.Tensor | Arriving) -> np.ndarray:
        array = array.wait() if isinstance(array, Arriving) else array
        array = array.float() if array.is_floating_point() else array
        return array.cpu().numpy()

    def synchronize(self) -> None:
        self._await_sent()
        if self.device_kind == "cuda":
            torch.cuda.synchronize()

    def device(self) -> DeviceInfo:
        if self.device_kind == "cuda":
            free, total = torch.cuda.mem_get_info()
            return DeviceInfo("cuda", torch.cuda.get_device_name(), total, free, torch.cuda.device_count())
        from ltx2rt.placement.devices import host_memory

        total, free = host_memory()
        return DeviceInfo("cpu", "CPU", total, free)

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self.device_kind == "cuda" else None
