"""Run a graph with numpy: the oracle that every lowering is compared with. Clear before fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ltx2rt.graph.ir import Graph, Node
from ltx2rt.graph.ops import OPS

NUMPY_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "int32": np.dtype(np.int32)}


def interpret(graph: Graph, params: Mapping[str, np.ndarray], inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Outputs of `graph` by name. params: concrete checkpoint names; inputs: every graph input, shaped as typed."""
    values = [np.asarray(inputs[name]).astype(NUMPY_DTYPES[v.type.dtype]) for name, v in graph.inputs.items()]
    for (name, v), array in zip(graph.inputs.items(), values, strict=True):
        if array.shape != v.type.shape:
            raise ValueError(f"{graph.name}: input {name} has shape {array.shape}, expected {v.type}")
    return dict(zip(graph.outputs, _run(graph, params, values, None), strict=True))


def _run(
    graph: Graph, params: Mapping[str, np.ndarray], inputs: list[np.ndarray], layer: int | None
) -> list[np.ndarray]:
    env = {id(v): array for v, array in zip(graph.inputs.values(), inputs, strict=True)}
    for name, v in graph.params.items():
        array = np.asarray(params[name if layer is None else name.replace("*", str(layer))])
        env[id(v)] = array.astype(NUMPY_DTYPES[v.type.dtype])
    for node in graph.nodes:
        operands = [env[id(v)] for v in node.inputs]
        results = _repeat(node, params, operands) if node.op == "repeat" else [_apply(node, operands)]
        for v, array in zip(node.outputs, results, strict=True):
            assert array.shape == v.type.shape, f"{graph.name}: {node.op} gave {array.shape}, typed {v.type}"
            env[id(v)] = array
    return [env[id(v)] for v in graph.outputs.values()]


def _apply(node: Node, operands: list[np.ndarray]) -> np.ndarray:
    wide = [a.astype(np.float32) if a.dtype == ml_dtypes.bfloat16 else a for a in operands]
    return np.asarray(OPS[node.op].numpy(*wide, **node.plan)).astype(NUMPY_DTYPES[node.outputs[0].type.dtype])


def _repeat(node: Node, params: Mapping[str, np.ndarray], operands: list[np.ndarray]) -> list[np.ndarray]:
    repeat = node.plan["repeat"]
    carry = operands[: repeat.num_carries]
    invariant = operands[repeat.num_carries : repeat.num_carries + repeat.num_invariants]
    data = operands[repeat.num_carries + repeat.num_invariants :]
    stacked: list[list[np.ndarray]] = []
    for i in range(repeat.count):
        results = _run(repeat.body, params, [*carry, *invariant, *(d[i] for d in data)], i)
        carry, outputs = results[: repeat.num_carries], results[repeat.num_carries :]
        stacked.append(outputs)
    return [*carry, *(np.stack(column) for column in zip(*stacked, strict=True))]
