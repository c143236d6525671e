"""Lowered graphs on one PyTorch device: one network, and the denoise loop."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ltx2rt.backend import overlapped
from ltx2rt.graph.encodings import E4M3
from ltx2rt.graph.ir import Graph, numbered
from ltx2rt.passes.loop import LoopParts
from ltx2rt_cuda.device.torch_device import DeviceEvent, Recorder, Side, TorchDevice
from ltx2rt_cuda.distributed import Position
from ltx2rt_cuda.lower import lower
from ltx2rt_cuda.ops import DTYPES
from ltx2rt_cuda.stream import is_streamed

Tensors = dict[str, torch.Tensor]
Weights = Tensors


def to_torch(array: np.ndarray | torch.Tensor) -> torch.Tensor:
    """A tensor over the array's memory, bfloat16 included; never written to. A tensor passes."""
    if isinstance(array, torch.Tensor):
        return array
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == E4M3:
            return torch.from_numpy(array.view(np.uint8)).view(DTYPES[E4M3])
        return torch.from_numpy(
            np.asarray(array, order="C")
        )  # ascontiguousarray gives a scalar an axis


def upload(graph: Graph, name: str, value: Any, device: TorchDevice) -> torch.Tensor:
    """The input `name` of `graph` on the device; a wrong shape is a ValueError."""
    spec = graph.inputs[name].type
    tensor = value if isinstance(value, torch.Tensor) else to_torch(np.asarray(value))
    if tuple(tensor.shape) != spec.shape:
        raise ValueError(
            f"{graph.name}: input {name} has shape {tuple(tensor.shape)}, expected {spec}"
        )
    return device.upload(tensor.to(dtype=DTYPES[spec.dtype]))


class Program:
    """One lowered graph; `weights` maps declared parameter names, `*` replaced by the layer, to
    tensors."""

    def __init__(
        self,
        graph: Graph,
        device: TorchDevice,
        compile: bool,
        position: Position,
        built: Counter[str],
        side: Side | None = None,
    ):
        """built: counts what is built. side: a second stream, for what may run at once."""
        self.graph, self.device, self.built = graph, device, built
        self.compile, self.position, self.side = compile, position, side
        _ = self.module

    @cached_property
    def module(self) -> torch.fx.GraphModule:
        self.built["lowered"] += 1
        return lower(self.graph, self.device.torch, self.compile, self.position, side=self.side)

    def release(self) -> None:
        self.__dict__.pop("module", None)

    def arguments(self, weights: Weights) -> list:
        return [
            [weights[numbered(name, i)] for i in range(count)] if "*" in name else weights[name]
            for name, (_, count) in self.graph.all_params().items()
        ]

    @torch.inference_mode()
    def __call__(self, weights: Weights, inputs: Mapping[str, Any]) -> Tensors:
        uploaded = [
            upload(self.graph, name, inputs[name], self.device) for name in self.graph.inputs
        ]
        return dict(
            zip(self.graph.outputs, self.module(*uploaded, *self.arguments(weights)), strict=True)
        )


class Captured:
    """One recorded step: a replay reads fixed buffers, runs every kernel, and writes fixed
    buffers."""

    def __init__(
        self, program: Program, arguments: list, values: Mapping[str, torch.Tensor], pool: Recorder
    ):
        self.program, self.key = program, _key(pool, arguments)
        self.serves: object = None  # a mark of the request whose constants are in the buffers
        self.inputs = {name: value.clone() for name, value in values.items()}
        ordered = [self.inputs[name] for name in program.graph.inputs]
        self.recorded = pool.record(lambda: program.module(*ordered, *arguments))

    def put(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            self.inputs[name].copy_(value)

    def __call__(self) -> Tensors:
        self.recorded.replay()
        results = zip(self.program.graph.outputs, self.recorded.outputs, strict=True)
        return {name: x.clone() for name, x in results}


def _key(pool: Recorder, arguments: list) -> tuple:
    """A recorded step stays valid as long as its memory is kept, and the weights lie where they
    do."""
    return pool.id, *(
        tuple(w.data_ptr() for w in argument) if isinstance(argument, list) else argument.data_ptr()
        for argument in arguments
    )


class Loop:
    """The denoise loop: what leaves it runs once, then one step after the other, recorded where
    the device can do so.

    Steps whose weights are streamed are not recorded: they take seconds, their launches some
    milliseconds. Recorded anew only for other weights: the shapes and branches are the loop's own.
    NCCL's collectives are recorded with the rest; that no rank records while another replays, they
    agree on before the first step. The two runs before the recording make the communicators, which
    a recording cannot.
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
        self.graph, self.before, self.body, self.parts, self.pool = graph, before, body, parts, pool
        self.position = position
        self.captured: Captured | None = None

    @cached_property
    def alone(self) -> Program:
        """The body on one stream: without a recording, memory that two streams use would be given
        back too early."""
        body = self.body
        if body.side is None:
            return body
        return Program(body.graph, body.device, body.compile, body.position, body.built)

    def release(self) -> None:
        if self.captured is not None:
            self.captured.recorded.reset()
            self.captured = None
        self.before.release()
        self.body.release()
        self.__dict__.pop("alone", None)

    def __call__(
        self, weights: Weights, inputs: Mapping[str, Any], num_steps: int
    ) -> Iterator[Tensors]:
        names, parts = self.body.graph.inputs, self.parts
        with torch.inference_mode():
            given = {
                name: upload(self.graph, name, inputs[name], self.body.device)
                for name in self.graph.inputs
            }
            prepared = self.before(
                weights, {name: given[name] for name in self.before.graph.inputs}
            )
            values = {name: prepared[name] if name in prepared else given[name] for name in names}
            rows = {name: values[name] for name in parts.data}
            state = {name: values[name] for name in parts.state}
            constants = {
                name: x for name, x in values.items() if name not in rows and name not in state
            }
            step = self._step(weights, constants, state | {name: x[0] for name, x in rows.items()})
        device = self.body.device

        def started(state: Tensors) -> Iterator[tuple[Tensors, DeviceEvent]]:
            for i in range(num_steps):
                with torch.inference_mode():
                    outputs = step(state | {name: x[i] for name, x in rows.items()})
                state = {name: outputs[name] for name in state}
                yield outputs, device.recorded_event()

        # without a queue a step has run once it is called
        for outputs, finished in overlapped(started(state), int(device.queues)):
            finished.synchronize()
            yield outputs

    def _step(
        self, weights: Weights, constants: Tensors, changing: Tensors
    ) -> Callable[[Tensors], Tensors]:
        """One step as a function of what changes from step to step."""
        arguments = self.body.arguments(weights)
        streams = is_streamed(arguments)
        if self.pool is None or streams:
            program = self.alone if streams else self.body
            module, graph = program.module, program.graph

            def step(changing: Tensors) -> Tensors:
                ordered = [
                    changing[name] if name in changing else constants[name] for name in graph.inputs
                ]
                return dict(zip(graph.outputs, module(*ordered, *arguments), strict=True))

            return step
        moved = self.captured is None or self.captured.key != _key(self.pool, arguments)
        if self.position.agree(moved) or self.captured is None:
            self.captured = None  # the next one takes its memory
            self.body.built["recorded"] += 1
            self.captured = Captured(self.body, arguments, constants | changing, self.pool)
        captured, mark = self.captured, object()

        def replay(changing: Tensors) -> Tensors:
            if captured.serves is not mark:
                captured.put(constants)
                captured.serves = mark
            captured.put(changing)
            return captured()

        return replay
