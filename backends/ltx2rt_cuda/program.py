"""Lowered graphs on one PyTorch device: one network, and the denoise loop."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import ml_dtypes
import numpy as np
import torch

from ltx2rt.backend import overlapped
from ltx2rt.graph.encodings import E4M3
from ltx2rt.graph.ir import Graph, numbered
from ltx2rt.passes.loop import LoopParts
from ltx2rt_cuda.device.torch_device import DeviceEvent, Recorder, TorchDevice
from ltx2rt_cuda.distributed import Position
from ltx2rt_cuda.lower import lower
from ltx2rt_cuda.ops.table import DTYPES
from ltx2rt_cuda.stream import is_streamed

Tensors = dict[str, torch.Tensor]
Weights = Tensors


def to_torch(array: np.ndarray | torch.Tensor, order: Literal["C", "K"] = "C") -> torch.Tensor:
    """A tensor over the array's memory, bfloat16 included; never written to. A tensor passes. order:
    "C" copies a part of an array, "K" leaves it in the whole."""
    if isinstance(array, torch.Tensor):
        return array
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == E4M3:
            return torch.from_numpy(array.view(np.uint8)).view(DTYPES[E4M3])
        # ascontiguousarray gives a scalar an axis
        return torch.from_numpy(np.asarray(array, order=order))


def upload(graph: Graph, name: str, value: Any, device: TorchDevice) -> torch.Tensor:
    """The input `name` of `graph` on the device; a wrong shape is a ValueError."""
    tensor = to_torch(value, "K" if device.pins else "C")
    dtype = DTYPES[graph.input_type(name, tensor.shape).dtype]
    return device.upload(tensor, dtype).contiguous()  # a part of what is on the device is not


class Program:
    """One lowered graph; `weights` maps declared names, `*` replaced by the layer, to tensors."""

    def __init__(
        self, graph: Graph, device: TorchDevice, compile: bool, position: Position, built: Counter
    ):
        """built: counts the programs that are built."""
        self.graph, self.device, self.built = graph, device, built
        self.compile, self.position = compile, position
        _ = self.module

    @cached_property
    def module(self) -> torch.fx.GraphModule:
        self.built["lowered"] += 1
        return lower(self.graph, self.device.torch, self.compile, self.position)

    def release(self) -> None:
        self.__dict__.pop("module", None)

    def arguments(self, weights: Weights) -> list:
        return [
            [weights[numbered(name, i)] for i in range(count)] if "*" in name else weights[name]
            for name, (_, count) in self.graph.all_params().items()
        ]

    @torch.inference_mode()
    def __call__(self, weights: Weights, inputs: Mapping[str, Any]) -> Tensors:
        graph = self.graph
        uploaded = [upload(graph, name, inputs[name], self.device) for name in graph.inputs]
        found = self.module(*uploaded, *self.arguments(weights))
        return dict(zip(graph.outputs, found, strict=True))


class Captured:
    """A recorded program: a replay reads and writes fixed buffers and runs every kernel."""

    def __init__(
        self,
        program: Program,
        arguments: list,
        pool: Recorder,
        copied: Tensors,
        fixed: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ):
        """copied: inputs that are copied to fixed buffers; fixed: inputs that are read in place."""
        self.program = program
        self.inputs = {name: value.clone() for name, value in copied.items()}
        values = {**self.inputs, **fixed}
        ordered = [values[name] for name in program.graph.inputs]
        self.recorded, self.outputs = pool.record(lambda: program.module(*ordered, *arguments))

    def __call__(self, changed: Tensors) -> Tensors:
        """Outputs by name, in their buffers."""
        for name, value in changed.items():
            self.inputs[name].copy_(value)
        self.recorded.replay()
        return dict(zip(self.program.graph.outputs, self.outputs, strict=True))


class RecordedLoop:
    """A recorded loop: the part before its steps, and one step that reads its results in place."""

    def __init__(self, loop: Loop, pool: Recorder, arguments: Sequence[list], given: Tensors):
        """arguments: weights of either program. given: inputs of the loop."""
        self.key = _key(pool, arguments)
        before, parts = {name: given[name] for name in loop.before.graph.inputs}, loop.parts
        self.before = Captured(loop.before, arguments[0], pool, before)
        self.prepared = self.before(before)
        changing = {*parts.data, *parts.state}
        fixed = {name: x for name, x in self.prepared.items() if name not in changing}
        copied = {
            name: x[0] if name in parts.data else x
            for name, x in loop.values(given, self.prepared).items()
            if name not in fixed
        }
        self.constants = copied.keys() - changing
        self.step = Captured(loop.body, arguments[1], pool, copied, fixed)

    def serve(self, given: Tensors) -> None:
        """Prepare the steps of a loop with these inputs."""
        self.before({name: given[name] for name in self.before.inputs})
        for name in self.constants:
            self.step.inputs[name].copy_(given[name])

    def __call__(self, changing: Tensors) -> Tensors:
        return {name: x.clone() for name, x in self.step(changing).items()}

    def reset(self) -> None:
        self.before.recorded.reset()
        self.step.recorded.reset()


def _key(pool: Recorder, arguments: Sequence[list]) -> tuple:
    """A recording stays valid while its memory is kept and the weights do not move."""
    weights = (w for each in arguments for x in each for w in (x if isinstance(x, list) else [x]))
    return pool.id, *(w.data_ptr() for w in weights)


class Loop:
    """The denoise loop: what leaves it runs once, then one step after the other, recorded where
    the device can do so, but with streamed weights, which take seconds.

    A step is recorded again only for other weights. NCCL's collectives are recorded with the rest;
    ranks agree before the first step, so that none records while another replays. The two runs
    before the recording make the communicators, which a recording cannot.
    """

    def __init__(
        self,
        graph: Graph,
        before: Program,
        body: Program,
        parts: LoopParts,
        pool: Recorder | None,
        position: Position,
    ):
        self.graph, self.before, self.body, self.parts = graph, before, body, parts
        self.pool, self.position = pool, position
        self.captured: RecordedLoop | None = None

    def release(self) -> None:
        if self.captured is not None:
            self.captured.reset()
            self.captured = None
        self.before.release()
        self.body.release()

    def __call__(
        self, weights: Weights, inputs: Mapping[str, Any], num_steps: int, start: int = 0
    ) -> Iterator[Tensors]:
        with torch.inference_mode():
            graph, device = self.graph, self.body.device
            given = {name: upload(graph, name, inputs[name], device) for name in graph.inputs}
            step, values = self._step(weights, given)
            rows = {name: values[name] for name in self.parts.data}
            state = {name: values[name] for name in self.parts.state}

        def started(state: Tensors) -> Iterator[tuple[Tensors, DeviceEvent]]:
            for i in range(start, num_steps):
                with torch.inference_mode():
                    outputs = step(state | {name: x[i] for name, x in rows.items()})
                state = {name: outputs[name] for name in state}
                yield outputs, device.recorded_event()

        # without a queue a step has run once it is called
        for outputs, finished in overlapped(started(state), int(device.queues)):
            finished.synchronize()
            yield outputs

    def values(self, given: Tensors, prepared: Tensors) -> Tensors:
        """Inputs of the body; inputs that differ by step are stacked for all steps."""
        values = given | prepared
        return {name: values[name] for name in self.body.graph.inputs}

    def _step(
        self, weights: Weights, given: Tensors
    ) -> tuple[Callable[[Tensors], Tensors], Tensors]:
        """One step as a function of what changes from step to step, and the body's inputs."""
        arguments = [program.arguments(weights) for program in (self.before, self.body)]
        if self.pool is None or any(map(is_streamed, arguments)):
            return self._launched(weights, given, arguments[1])
        mark = object()
        moved = self.captured is None or self.captured.key != _key(self.pool, arguments)
        if self.position.agree(moved) or self.captured is None:
            self.captured = None  # the next one takes its memory
            self.body.built["recorded"] += 1
            self.captured = RecordedLoop(self, self.pool, arguments, given)
            self.pool.serves = mark
        captured, pool = self.captured, self.pool

        def replay(changing: Tensors) -> Tensors:
            if pool.serves is not mark:  # another loop may have used the memory since
                captured.serve(given)
                pool.serves = mark
            return captured(changing)

        return replay, self.values(given, captured.prepared)

    def _launched(
        self, weights: Weights, given: Tensors, arguments: list
    ) -> tuple[Callable[[Tensors], Tensors], Tensors]:
        """`_step`, launched each time."""
        prepared = self.before(weights, given)
        values, module, graph = self.values(given, prepared), self.body.module, self.body.graph

        def step(changing: Tensors) -> Tensors:
            ordered = [changing.get(name, values[name]) for name in graph.inputs]
            return dict(zip(graph.outputs, module(*ordered, *arguments), strict=True))

        return step, values
