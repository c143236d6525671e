"""interleave: halves of the samples go through the blocks side by side, so that what one half waits for from other
devices travels while the other computes.

Requires a placed graph. Ensures the same inputs, outputs and parameters and, but for products of other shapes, the same
values; every exchange inside a block becomes two of half the size, of which neither needs the other. A repeat stays as
it is if nothing in it is exchanged, if its samples cannot be halved, or if a node of it picks or joins samples.

Weights are read twice; whether that costs less than the exchanges is for the backend to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ltx2rt.graph.ir import Graph, Node, Repeat, Value
from ltx2rt.graph.ops import COLLECTIVES, OPS
from ltx2rt.graph.trace import emit
from ltx2rt.graph.verify import verify

SAMPLES, HALVES = "B", 2
Parts = Sequence[Value]  # of a value: itself, or its halves


def interleave(graph: Graph) -> Graph:
    """`graph` with its repeats in halves; itself if there are none to halve."""
    result = replace(graph, nodes=[])
    for node in graph.nodes:
        if node.op == "repeat" and _can_halve(node.repeat):
            _halved(result, node)
        elif node.op == "repeat" and (body := interleave(node.repeat.body)) is not node.repeat.body:
            result.nodes.append(replace(node, args={"repeat": replace(node.repeat, body=body)}))
        else:
            result.nodes.append(node)
    if result.nodes == graph.nodes:
        return graph
    verify(result)
    return result


def _can_halve(repeat: Repeat) -> bool:
    body, outputs = repeat.body, list(repeat.body.outputs.values())
    made = [v for node in body.nodes for v in node.outputs]
    sizes = {v.type.size(SAMPLES) for v in (*body.inputs.values(), *made) if SAMPLES in v.type.axes}
    if any(node.op == "repeat" or _names(node.attrs) for node in body.nodes):
        return False
    carried = len(outputs) == repeat.num_carries and all(SAMPLES in v.type.axes for v in outputs)
    return carried and any(map(_exchanges, body.nodes)) and len(sizes) == 1 and not sizes.pop() % HALVES


def _exchanges(node: Node) -> bool:
    """Something of the samples', that is: not weights."""
    return node.op in COLLECTIVES and any(SAMPLES in v.type.axes for v in node.inputs)


def _names(attrs: object) -> bool:
    """Whether a node's attributes name the axis of samples, other than to put one before it."""
    if isinstance(attrs, dict):
        return any(_names(x) for key, value in attrs.items() if key != "before" for x in (key, value))
    return any(map(_names, attrs)) if isinstance(attrs, (tuple, list)) else attrs == SAMPLES


def _cut(graph: Graph, v: Value) -> Parts:
    if SAMPLES not in v.type.axes:
        return [v]
    half = v.type.size(SAMPLES) // HALVES
    return [emit(graph, "slice", v, axis=SAMPLES, start=i * half, stop=(i + 1) * half) for i in range(HALVES)]


def _halved(result: Graph, node: Node) -> None:
    """Append the repeat of both halves; what it carries is cut before and joined after it."""
    repeat, old = node.repeat, node.repeat.body
    carry, invariant, data = repeat.divide(list(zip(old.inputs, node.inputs, strict=True)))
    body = Graph(old.name, params=old.params, layouts=old.layouts, mesh=old.mesh, serial=old.serial)
    env: dict[int, Parts] = {id(v): [v] for v in old.params.values()}
    operands: list[Value] = []
    for name, v in carry:
        parts = _cut(result, v)
        operands += parts
        env[id(old.inputs[name])] = [Value(f"{name}_{i}", part.type) for i, part in enumerate(parts)]
        body.inputs |= {part.name: part for part in env[id(old.inputs[name])]}
    body.inputs |= {name: old.inputs[name] for name, _ in (*invariant, *data)}
    for name, _ in (*invariant, *data):
        env[id(old.inputs[name])] = _cut(body, old.inputs[name])
    for one in old.nodes:
        found = [env[id(v)] for v in one.inputs]
        made = []
        for i in range(max(map(len, found), default=1)):
            results = emit(body, one.op, *(parts[i % len(parts)] for parts in found), **one.attrs)
            made.append(results if isinstance(results, tuple) else (results,))
        env |= {id(v): parts for v, parts in zip(one.outputs, zip(*made, strict=True), strict=True)}
    body.outputs = {f"{name}_{i}": part for name, v in old.outputs.items() for i, part in enumerate(env[id(v)])}
    values = tuple(result.fresh(v.type) for v in body.outputs.values())
    args = {"repeat": replace(repeat, body=body, num_carries=len(values))}
    others = [v for _, v in (*invariant, *data)]
    result.nodes.append(Node("repeat", (*operands, *others), values, node.attrs, args))
    for i, v in enumerate(node.outputs):
        joined = values[HALVES * i : HALVES * (i + 1)]
        _, plan = OPS["concat"].rule(*(part.type for part in joined), axis=SAMPLES)
        result.nodes.append(Node("concat", joined, (v,), {"axis": SAMPLES}, plan))
