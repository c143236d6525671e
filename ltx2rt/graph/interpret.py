"""Run a graph with numpy: the oracle that every lowering is compared with. Clear before fast.

A placed graph runs on all devices of its mesh in step; anything else is the same with one device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from ltx2rt.graph.encodings import encoded
from ltx2rt.graph.ir import DTYPE_BYTES, Graph, Layout, Node
from ltx2rt.graph.ops import COLLECTIVES, OPS

NUMPY_DTYPES = {name: np.dtype(name) for name in DTYPE_BYTES}  # some are those of ml_dtypes
GROUP_OPS = {"shard", *COLLECTIVES}  # defined over all devices of a group at once
Arrays = Mapping[str, np.ndarray]  # the checkpoint's tensors by name
Devices = list[np.ndarray]  # one array per device, the last mesh axis fastest


class Grid:
    """The devices of a mesh by number."""

    def __init__(self, mesh: Mapping[str, int]):
        self.axes = tuple(mesh)
        self.numbers = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))

    def __len__(self) -> int:
        return self.numbers.size

    def coordinate(self, device: int, axis: str) -> int:
        return int(np.argwhere(self.numbers == device)[0][self.axes.index(axis)])

    def groups(self, axis: str) -> list[list[int]]:
        """The devices that communicate along `axis`, in the order of their coordinate on it."""
        moved = np.moveaxis(self.numbers, self.axes.index(axis), -1)
        return moved.reshape(-1, moved.shape[-1]).tolist()


def interpret(graph: Graph, params: Arrays, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Outputs by name, of the first device. inputs: as typed."""
    grid = Grid(graph.mesh)
    values = []
    for name, v in graph.inputs.items():
        array = np.asarray(inputs[name]).astype(NUMPY_DTYPES[v.type.dtype])
        graph.input_type(name, array.shape)
        values.append([array] * len(grid))
    results = _run(graph, params, values, None, grid)
    return {name: found[0] for name, found in zip(graph.outputs, results, strict=True)}


def _parameter(
    params: Arrays, layout: Layout, coordinates: Mapping[str, int], layer: int | None
) -> np.ndarray:
    """The parameter of the device at `coordinates`."""
    parts = []
    for name, *cuts in layout.pieces(coordinates, layer or 0):
        array = np.asarray(params[name])
        for dim, start, stop in cuts:
            array = array.take(range(start, stop), axis=dim)
        if layout.encoding is not None:
            assert layout.field is not None, f"{name} was not unpacked"
            array = encoded(layout.encoding, array)[layout.field]
        parts.append(array)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _run(
    graph: Graph, params: Arrays, inputs: list[Devices], layer: int | None, grid: Grid
) -> list[Devices]:
    env = dict(zip(graph.inputs.values(), inputs, strict=True))
    layouts = graph.all_layouts()
    for name, v in graph.params.items():
        axes = [axis for _, axis, _ in layouts[name].splits]
        coordinates = [tuple(grid.coordinate(d, axis) for axis in axes) for d in range(len(grid))]
        found = {
            c: _parameter(params, layouts[name], dict(zip(axes, c, strict=True)), layer)
            for c in set(coordinates)
        }
        env[v] = [found[c].astype(NUMPY_DTYPES[v.type.dtype]) for c in coordinates]
    for node in graph.nodes:
        operands = [env[v] for v in node.inputs]
        run = partial(_repeat, params) if node.op == "repeat" else _apply
        results = run(node, operands, grid)
        for v, devices in zip(node.outputs, results, strict=True):
            for array in devices:
                assert array.shape == v.type.shape, (
                    f"{graph.name}: {node.op} gave {array.shape}, typed {v.type}"
                )
            env[v] = devices
    return [env[v] for v in graph.outputs.values()]


def _apply(node: Node, operands: list[Devices], grid: Grid) -> list[Devices]:
    wide = [
        [a.astype(np.float32) if a.dtype == ml_dtypes.bfloat16 else a for a in devices]
        for devices in operands
    ]
    function = OPS[node.op].numpy
    results: list[list[Any]] = [[None] * len(grid) for _ in node.outputs]
    if node.op in GROUP_OPS:
        for group in grid.groups(node.args["mesh_axis"]):
            found = function(*([devices[d] for d in group] for devices in wide), **node.args)
            found = found if node.op not in ("all_gather", "shard") else [found]
            for result, arrays in zip(results, found, strict=True):
                for device, array in zip(group, arrays, strict=True):
                    result[device] = array
    else:
        found = [function(*(devices[d] for devices in wide), **node.args) for d in range(len(grid))]
        several = len(node.outputs) > 1
        results = [list(column) for column in zip(*found, strict=True)] if several else [found]
    return [
        [np.asarray(array).astype(NUMPY_DTYPES[v.type.dtype]) for array in devices]
        for v, devices in zip(node.outputs, results, strict=True)
    ]


def _repeat(params: Arrays, node: Node, operands: list[Devices], grid: Grid) -> list[Devices]:
    repeat = node.repeat
    carry, invariant, data = repeat.divide(operands)
    stacked: list[list[Devices]] = []
    for i in range(repeat.count):
        now = [*carry, *invariant, *([d[i] for d in devices] for devices in data)]
        results = _run(repeat.body, params, now, repeat.first + i, grid)
        carry, outputs = results[: repeat.num_carries], results[repeat.num_carries :]
        stacked.append(outputs)
    columns = zip(*stacked, strict=True)
    return [
        *carry,
        *([np.stack([g[d] for g in column]) for d in range(len(grid))] for column in columns),
    ]
