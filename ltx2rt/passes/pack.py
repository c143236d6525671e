"""pack: linears of one input become one GEMM.

Requires a legal graph, placed or not. Ensures the same values: linears that read the same value,
contract the same axes and hold their weights alike are computed as one linear over joined rows,
then cut apart. q, k, v and the head gate of a self-attention are four launches turned into one.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import groupby

from ltx2rt.graph.encodings import QUANTISED
from ltx2rt.graph.ir import Graph, Layout, Node, Replaced, Value, rewrite
from ltx2rt.graph.trace import emit
from ltx2rt.graph.verify import verify
from ltx2rt.passes.adapters import MARK


def pack(graph: Graph) -> Graph:
    """`graph` with fewer linears, also in repeats; packed parameters are called "one | other"."""
    result = Graph(graph.name, dict(graph.inputs), mesh=graph.mesh, serial=graph.serial)
    layouts = graph.all_layouts()
    groups = _groups(graph, layouts)
    first = {nodes[0]: nodes for nodes in groups}
    later = {node for nodes in groups for node in nodes[1:]}
    packed = {v for nodes in groups for node in nodes for v in node.inputs[1:]}
    result.params = {name: v for name, v in graph.params.items() if v not in packed}
    result.layouts = {name: x for name, x in graph.layouts.items() if name in result.params}
    env = Replaced()
    for node in graph.nodes:
        if node in later:
            continue
        if node in first:
            _emit(result, first[node], env, layouts)
        else:
            result.nodes.append(rewrite(env.node(node), pack))
    result.outputs = env.outputs(graph)
    return verify(result)


def _joined(out: Graph, values: list[Value], layouts: dict[str, Layout]) -> Value:
    """One parameter in place of several of one encoding, joined along their rows."""
    name = " | ".join(v.name for v in values)
    rows = sum(v.type.shape[0] for v in values)
    parts = tuple(part for v in values for part in layouts[v.name].parts)
    out.layouts[name] = replace(layouts[values[0].name], parts=parts)
    return out.parameter(name, values[0].type.replaced(0, 1, {"packed": rows}))


def _groups(graph: Graph, layouts: dict[str, Layout]) -> list[list[Node]]:
    """Linears to pack, in execution order. A parameter that two nodes read is not packed."""
    readers = Counter(v for node in graph.nodes for v in node.inputs)
    found: dict[tuple, list[Node]] = {}
    for node in graph.nodes:
        if node.op not in ("linear", "quantised_linear"):
            continue
        x, weight, *others = node.inputs
        if any(readers[v] > 1 for v in node.inputs[1:]):
            continue
        if weight.name not in layouts or MARK in weight.name:
            # computed, such as some rows of a parameter; an adapter's is not joined with frozen
            # rows
            continue
        layout = layouts[weight.name]
        if any(dim != 0 for dim, _, _ in layout.splits):
            continue  # contracted slices: partial sums, each with its own communication
        alike = layout.splits, weight.type.dtype, _quantised(layout), "*" in weight.name
        key = x, node.op, node.attrs["contract"], len(others), *alike
        found.setdefault(key, []).append(node)
    return [nodes for nodes in found.values() if len(nodes) > 1]


def _quantised(layout: Layout) -> str | None:
    """Return the encoding by which linears are grouped. Weights that are kept as stored count as
    decoded: their product equals one of decoded weights, bit for bit."""
    return layout.encoding if layout.encoding in QUANTISED else None


def _emit(out: Graph, nodes: list[Node], env: Replaced, layouts: dict[str, Layout]) -> None:
    """One linear for all of `nodes`; their results become slices of its result."""
    x = env[nodes[0].inputs[0]]
    params = []
    for position in range(1, len(nodes[0].inputs)):
        values = [node.inputs[position] for node in nodes]
        runs = groupby(values, lambda v: layouts[v.name].encoding)
        first, *more = [_joined(out, list(run), layouts) for _, run in runs]
        params.append(emit(out, "concat", first, *more, axis="packed") if more else first)
    sizes = [math.prod(node.attrs["out"].values()) for node in nodes]
    attrs = {"contract": nodes[0].attrs["contract"], "out": {"packed": sum(sizes)}}
    y = emit(out, nodes[0].op, x, *params, **attrs)
    start = 0
    for node, size in zip(nodes, sizes, strict=True):
        piece = emit(out, "slice", y, axis="packed", start=start, stop=start + size)
        into = dict(node.attrs["out"])
        env[node.outputs[0]] = emit(out, "split", piece, axis="packed", into=into)
        start += size
