"""Run a graph with numpy: the oracle that every lowering is compared with. Clear before fast.

A placed graph runs on all devices of one mesh axis in step; anything else is the same with one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ltx2rt.graph.ir import Graph, Layout, Node
from ltx2rt.graph.ops import OPS

NUMPY_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "int32": np.dtype(np.int32)}
GROUP_OPS = {"shard", "all_reduce"}  # defined over all devices at once
Group = list[np.ndarray]  # one array per device


def interpret(graph: Graph, params: Mapping[str, np.ndarray], inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Outputs of `graph` by name, of the first device. params: the checkpoint's tensors; inputs: shaped as typed."""
    if len(graph.mesh) > 1:
        raise ValueError(f"{graph.name}: the interpreter runs one mesh axis, not {dict(graph.mesh)}")
    (size,) = graph.mesh.values() or (1,)
    values = []
    for name, v in graph.inputs.items():
        array = np.asarray(inputs[name]).astype(NUMPY_DTYPES[v.type.dtype])
        if array.shape != v.type.shape:
            raise ValueError(f"{graph.name}: input {name} has shape {array.shape}, expected {v.type}")
        values.append([array] * size)
    return {name: group[0] for name, group in zip(graph.outputs, _run(graph, params, values, None, size), strict=True)}


def _parameter(params: Mapping[str, np.ndarray], layout: Layout, coordinate: int, layer: int | None) -> np.ndarray:
    """A device's parameter; coordinate: on the mesh axis of the layout's split."""
    parts = []
    for name, part in layout.pieces(coordinate, layer or 0):
        array = np.asarray(params[name])
        if part is not None:
            dim, start, stop = part
            array = array.take(range(start, stop), axis=dim)
        parts.append(array)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _run(
    graph: Graph, params: Mapping[str, np.ndarray], inputs: list[Group], layer: int | None, size: int
) -> list[Group]:
    env = {id(v): group for v, group in zip(graph.inputs.values(), inputs, strict=True)}
    layouts = graph.all_layouts()
    for name, v in graph.params.items():
        group = [_parameter(params, layouts[name], i, layer) for i in range(size)]
        env[id(v)] = [array.astype(NUMPY_DTYPES[v.type.dtype]) for array in group]
    for node in graph.nodes:
        operands = [env[id(v)] for v in node.inputs]
        results = _repeat(node, params, operands, size) if node.op == "repeat" else _apply(node, operands, size)
        for v, group in zip(node.outputs, results, strict=True):
            assert all(a.shape == v.type.shape for a in group), (
                f"{graph.name}: {node.op} gave {group[0].shape}: {v.type}"
            )
            env[id(v)] = group
    return [env[id(v)] for v in graph.outputs.values()]


def _apply(node: Node, operands: list[Group], size: int) -> list[Group]:
    wide = [[a.astype(np.float32) if a.dtype == ml_dtypes.bfloat16 else a for a in group] for group in operands]
    function = OPS[node.op].numpy
    if node.op in GROUP_OPS:
        found = function(*wide, **node.plan)
        results = found if node.op == "all_reduce" else [found]
    else:
        found = [function(*(group[i] for group in wide), **node.plan) for i in range(size)]
        columns = zip(*found, strict=True) if len(node.outputs) > 1 else [found]
        results = [[np.asarray(array) for array in column] for column in columns]
    return [
        [array.astype(NUMPY_DTYPES[v.type.dtype]) for array in group]
        for v, group in zip(node.outputs, results, strict=True)
    ]


def _repeat(node: Node, params: Mapping[str, np.ndarray], operands: list[Group], size: int) -> list[Group]:
    repeat = node.plan["repeat"]
    carry = operands[: repeat.num_carries]
    invariant = operands[repeat.num_carries : repeat.num_carries + repeat.num_invariants]
    data = operands[repeat.num_carries + repeat.num_invariants :]
    stacked: list[list[Group]] = []
    for i in range(repeat.count):
        now = [*carry, *invariant, *([d[i] for d in group] for group in data)]
        results = _run(repeat.body, params, now, i, size)
        carry, outputs = results[: repeat.num_carries], results[repeat.num_carries :]
        stacked.append(outputs)
    columns = zip(*stacked, strict=True)
    return [*carry, *([np.stack([g[d] for g in column]) for d in range(size)] for column in columns)]
