"""Weights, programs and the denoise loop on one JAX device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array, lax

from ltx2rt.backend import DeviceInfo, TensorSource
from ltx2rt.errors import InputError
from ltx2rt.graph.interpret import NUMPY_DTYPES
from ltx2rt.graph.ir import Graph
from ltx2rt_tpu.lower import run

Weights = dict[str, Array]
SIGMA_SLOTS = 64  # the loop's sigma array is padded to a multiple: another number of steps compiles nothing


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory that XLA's CPU client takes over without a copy (64-byte aligned)."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def _copy(out: np.ndarray, array: np.ndarray) -> None:
    """out[...] = array in out's dtype; bfloat16 is widened by its bits, which numpy's own cast does 10x slower."""
    if array.dtype == ml_dtypes.bfloat16 and out.dtype == np.float32:
        np.left_shift(array.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[...] = array


class Program:
    """One lowered graph under one jit; `weights` maps declared names to arrays, `*` names stacked over layers."""

    def __init__(self, graph: Graph, device: Any, unrolled: bool):
        self.graph, self.jax_device, self.unrolled = graph, device, unrolled
        self.names = list(graph.all_params())
        self.function = jax.jit(self._run)
        self.loop = jax.jit(self._loop)

    def _run(self, weights: Weights, inputs: dict[str, Array]) -> dict[str, Array]:
        ordered = [inputs[name] for name in self.graph.inputs]
        return dict(zip(self.graph.outputs, run(self.graph, weights, ordered, self.unrolled), strict=True))

    def _loop(self, weights, constants, sigmas, outputs, first, last):
        """Steps first..last-1: one executable, traced bounds, no host callback (those are never cached on disk)."""

        def step(i, outputs):
            state = {name: outputs[name] for name in self.graph.inputs if name in outputs}
            pair = lax.dynamic_slice(sigmas, (i,), (2,))
            return self._run(weights, {**constants, **state, "sigmas": pair})

        return lax.fori_loop(first, last, step, outputs)

    def _upload(self, name: str, value: Any) -> Array:
        spec = self.graph.inputs[name].type
        if tuple(value.shape) != spec.shape:
            raise ValueError(f"{self.graph.name}: input {name} has shape {tuple(value.shape)}, expected {spec}")
        # device_put also commits: jit compiles once more for an argument that is not committed to its device.
        typed = value.astype(spec.dtype) if isinstance(value, Array) else np.asarray(value, NUMPY_DTYPES[spec.dtype])
        return jax.device_put(typed, self.jax_device)

    def _weights(self, weights: Weights) -> Weights:
        return {name: weights[name] for name in self.names}

    def __call__(self, weights: Weights, inputs: Mapping[str, Any]) -> dict[str, Array]:
        uploaded = {name: self._upload(name, np.asarray(v) if np.isscalar(v) else v) for name, v in inputs.items()}
        return self.function(self._weights(weights), uploaded)

    def denoise(
        self, weights: Weights, constants: Mapping[str, Any], sigmas: np.ndarray, state: Mapping[str, Any]
    ) -> Iterator[dict[str, Array]]:
        own = self._weights(weights)
        constants = {name: self._upload(name, value) for name, value in constants.items()}
        outputs = {
            name: self._upload(name, state[name])
            if name in state
            else jax.device_put(np.zeros(v.type.shape, NUMPY_DTYPES[v.type.dtype]), self.jax_device)
            for name, v in self.graph.outputs.items()
        }
        num_steps = len(sigmas) - 1
        padded = np.zeros(-(-len(sigmas) // SIGMA_SLOTS) * SIGMA_SLOTS, np.float32)
        padded[: len(sigmas)] = sigmas
        levels = jax.device_put(padded, self.jax_device)
        queued = []
        for i in range(num_steps):
            outputs = self.loop(own, constants, levels, outputs, np.int32(i), np.int32(i + 1))
            queued.append(outputs)
        for outputs in queued:
            jax.block_until_ready(outputs)
            yield outputs


class TpuBackend:
    """device: "auto" (the TPU if there is one, else the CPU), "tpu" or "cpu"."""

    name = "tpu"

    def __init__(self, device: str = "auto"):
        if device not in ("auto", "cpu", "tpu"):
            raise InputError(f"backend tpu runs on auto, tpu or cpu, not on {device}")
        self.jax_device = self._find(device)
        self.device_kind = "tpu" if self.jax_device.platform == "tpu" else "cpu"
        self.versions = {"jax": jax.__version__}

    @staticmethod
    def _find(device: str) -> Any:
        if device != "cpu":
            try:
                return jax.devices("tpu")[0]
            except RuntimeError as error:
                if device == "tpu":
                    raise InputError(
                        "no TPU was found; use --device cpu, or --device auto to fall back by itself"
                    ) from error
        return jax.devices("cpu")[0]

    def load(
        self,
        graphs: Iterable[Graph],
        source: TensorSource,
        base: Weights | None = None,
        changed: Set[str] = frozenset(),
    ) -> Weights:
        weights: Weights = {}
        for name, (value, count) in {k: v for graph in graphs for k, v in graph.all_params().items()}.items():
            concrete = [name.replace("*", str(i)) for i in range(count)]
            if base is not None and name in base and changed.isdisjoint(concrete):
                weights[name] = base[name]
                continue
            stacked = "*" in name
            shape = (count, *value.type.shape) if stacked else value.type.shape
            host = _aligned_empty(shape, NUMPY_DTYPES[value.type.dtype])
            for i, tensor in enumerate(concrete):
                _copy(host[i] if stacked else host, source.read(tensor))
            weights[name] = jax.device_put(host, self.jax_device, may_alias=True)
        return weights

    def lower(self, graph: Graph, layers: str = "scan", compile: bool = False) -> Program:
        return Program(graph, self.jax_device, layers == "unrolled")

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        wide = (jax.device_put(np.asarray(x, np.float32), self.jax_device) for x in (a, b))
        return np.asarray(jnp.matmul(*wide, precision=lax.Precision.HIGHEST)).astype(a.dtype)

    def to_host(self, array: Array) -> np.ndarray:
        host = np.asarray(array)
        return host if host.dtype == np.int32 else host.astype(np.float32)

    def synchronize(self) -> None:
        jax.effects_barrier()

    def device(self) -> DeviceInfo:
        if self.device_kind == "tpu":
            stats = self.jax_device.memory_stats() or {}
            total = stats.get("bytes_limit", 0)
            return DeviceInfo("tpu", self.jax_device.device_kind, total, total - stats.get("bytes_in_use", 0))
        from ltx2rt.placement.devices import host_memory

        total, free = host_memory()
        return DeviceInfo("cpu", "CPU", total, free)

    def peak_bytes(self) -> int | None:
        return (self.jax_device.memory_stats() or {}).get("peak_bytes_in_use") if self.device_kind == "tpu" else None
