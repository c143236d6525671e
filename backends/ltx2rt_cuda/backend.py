"""Weights, programs and the denoise loop on one PyTorch device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist

from ltx2rt.backend import DeviceInfo, TensorSource
from ltx2rt.errors import InputError
from ltx2rt.graph.ir import Graph, Layout, Type
from ltx2rt.passes.fuse import fuse
from ltx2rt_cuda.distributed import Arriving, Position, join, rendezvous
from ltx2rt_cuda.lower import lower
from ltx2rt_cuda.ops import DTYPES

Weights = dict[str, torch.Tensor]


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor over the array's memory, bfloat16 included; never written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.asarray(array, order="C"))  # ascontiguousarray gives a scalar an axis


class Program:
    """One lowered graph; `weights` maps declared parameter names, `*` replaced by the layer, to tensors."""

    def __init__(self, graph: Graph, device: torch.device, compile: bool, position: Position):
        self.graph, self.device = graph, device
        self.module = lower(graph, device, compile, position)

    def _upload(self, name: str, value: Any) -> torch.Tensor:
        spec = self.graph.inputs[name].type
        tensor = value if isinstance(value, torch.Tensor) else to_torch(np.asarray(value))
        if tuple(tensor.shape) != spec.shape:
            raise ValueError(f"{self.graph.name}: input {name} has shape {tuple(tensor.shape)}, expected {spec}")
        return tensor.to(self.device, DTYPES[spec.dtype])

    def _arguments(self, weights: Weights) -> list:
        return [
            [weights[name.replace("*", str(i))] for i in range(count)] if "*" in name else weights[name]
            for name, (_, count) in self.graph.all_params().items()
        ]

    @torch.inference_mode()
    def __call__(self, weights: Weights, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        uploaded = [self._upload(name, inputs[name]) for name in self.graph.inputs]
        return dict(zip(self.graph.outputs, self.module(*uploaded, *self._arguments(weights)), strict=True))

    def denoise(
        self, weights: Weights, constants: Mapping[str, Any], sigmas: np.ndarray, state: Mapping[str, Any]
    ) -> Iterator[dict[str, torch.Tensor]]:
        with torch.inference_mode():
            constants = {name: self._upload(name, value) for name, value in constants.items()}
            state = {name: self._upload(name, value) for name, value in state.items()}
            levels = torch.from_numpy(np.array(sigmas, np.float32)).to(self.device)
        pending: list[tuple[Any, dict[str, torch.Tensor]]] = []
        for i in range(len(sigmas) - 1):
            outputs = self(weights, {**constants, **state, "sigmas": levels[i : i + 2]})
            state = {name: outputs[name] for name in state}
            event = None
            if self.device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
            pending.append((event, outputs))
            while pending and (pending[0][0] is None or pending[0][0].query()):
                yield pending.pop(0)[1]
        for event, outputs in pending:
            event.synchronize()
            yield outputs


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
        for graph in graphs:
            layouts = graph.all_layouts()
            for declared, (value, count) in graph.all_params().items():
                for layer in range(count):
                    name = declared.replace("*", str(layer))
                    if name not in weights:
                        pieces = self._pieces(layouts[declared], layer)
                        if base is not None and name in base and changed.isdisjoint(piece for piece, _ in pieces):
                            weights[name] = base[name]
                        else:
                            weights[name] = self._tensor(source, pieces, value.type)
        return weights

    def _pieces(self, layout: Layout, layer: int) -> list[tuple[str, Any]]:
        coordinate = self.position.coordinates[layout.split[1]] if layout.split else 0
        return list(layout.pieces(coordinate, layer))

    def _tensor(self, source: TensorSource, pieces: list[tuple[str, Any]], type: Type) -> torch.Tensor:
        """One parameter on the device, cast once on the way; several pieces are joined in place."""
        dtype = DTYPES[type.dtype]
        if len(pieces) == 1:
            tensor = to_torch(source.read(*pieces[0]))
            copied = tensor.to(self.torch_device, dtype, memory_format=torch.contiguous_format)
            return copied.clone() if copied.data_ptr() == tensor.data_ptr() else copied
        joined = torch.empty(type.shape, dtype=dtype, device=self.torch_device)
        row = 0
        for piece in pieces:
            tensor = to_torch(source.read(*piece))
            joined[row : row + len(tensor)] = tensor
            row += len(tensor)
        return joined

    def lower(self, graph: Graph, layers: str = "scan", compile: bool = False, fused: bool | None = None) -> Program:
        """fused: write the ops that have kernels; by default on a GPU, where the kernels run."""
        if self.device_kind == "cuda" if fused is None else fused:
            graph = fuse(graph)
        if layers == "unrolled":
            from ltx2rt.passes.unroll import unroll

            graph = unroll(graph)
        return Program(graph, self.torch_device, compile, self.position)

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        product = to_torch(a).to(self.torch_device, torch.float32) @ to_torch(b).to(self.torch_device, torch.float32)
        return product.cpu().numpy().astype(a.dtype, copy=False)

    def on(self, rank: int, work: Callable[[], torch.Tensor], type: Type) -> torch.Tensor | Arriving | None:
        here = self.position.rank
        if rank == here:
            result = work()
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
            return DeviceInfo("cuda", torch.cuda.get_device_name(), total, free)
        from ltx2rt.placement.devices import host_memory

        total, free = host_memory()
        return DeviceInfo("cpu", "CPU", total, free)

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self.device_kind == "cuda" else None
