"""keep, unpack: matrices that a device holds as they are stored, decoded where a product reads
them.

Two passes, because all that lies between them is the same for every encoding.

keep requires the graph of one device, placed or not. Weights of linears that are stored in one
encoding, or on each layer in a type of GGUF, are marked with it, if a slice of the rows of a device
ends where numbers are decoded together; all others are decoded while they are loaded. Nothing else
changes. kept_as marks the large linears of all blocks with one encoding, whatever they are stored
in: for training adapters, where every product needs the numbers and none their gradient.

unpack ends what marks: a marked parameter becomes the parameters of its fields, and an `unpack` in
front of its first reader makes the matrix of them. So one matrix at a time takes the memory of its
decoded numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ltx2rt.graph.encodings import ENCODINGS, common
from ltx2rt.graph.ir import Graph, Layout, Replaced, Type, Value, rewrite
from ltx2rt.graph.trace import emit
from ltx2rt.graph.verify import verify

GATE = ("heads",)  # the result axes of a head gate, a linear of one number a head


def keep(graph: Graph, stored: Mapping[str, str]) -> Graph:
    """stored: encodings by the names of tensors."""
    if not stored:
        return graph
    layouts, params = graph.all_layouts(), graph.all_params()
    found = {name: _common(layouts[name], params[name][1], stored) for name in _weights(graph)}
    marked = {name: replace(layouts[name], encoding=x) for name, x in found.items() if x}
    return _marked(graph, marked)


def kept_as(graph: Graph, encoding: str) -> Graph:
    """encoding: of `encodings.QUANTISED`."""
    layouts = graph.all_layouts()
    blocks = {name for repeat in graph.repeats for name in repeat.body.params if "*" in name}
    linears = (node for node, _ in graph.walk() if node.op == "linear")
    small = {node.inputs[1].name for node in linears if tuple(node.attrs["out"]) == GATE}
    chosen = (_weights(graph) & blocks) - small
    return _marked(graph, {name: replace(layouts[name], encoding=encoding) for name in chosen})


def _weights(graph: Graph) -> set[str]:
    """Parameters that only linears read, as their weights."""
    read: set[str] = set()
    other: set[str] = set()
    for node, _ in graph.walk():
        for i, v in enumerate(node.inputs):
            (read if node.op == "linear" and i == 1 else other).add(v.name)
    return (read - other) & graph.all_params().keys()


def _common(layout: Layout, count: int, stored: Mapping[str, str]) -> str | None:
    """The encoding of all tensors of a parameter, None if they have none in common or a device's
    slices cut a block of the encoding."""
    encoding = common(stored.get(n) for layer in range(count) for n in layout.names(layer))
    if encoding is None:
        return None
    parts = [count for dim, _, count in layout.splits if dim == 1]
    whole = all(
        shape[1] % (n * ENCODINGS[encoding].group) == 0 for _, shape in layout.parts for n in parts
    )
    return encoding if whole else None


def _marked(graph: Graph, marked: Mapping[str, Layout]) -> Graph:
    own = {name: marked[name] for name in graph.params if name in marked}
    nodes = [rewrite(node, lambda body: _marked(body, marked)) for node in graph.nodes]
    return replace(graph, nodes=nodes, layouts=graph.layouts | own)


def unpack(graph: Graph) -> Graph:
    """`graph` itself if nothing is marked."""
    marks = (x.encoding and x.field is None for x in graph.all_layouts().values())
    if not any(marks):
        return graph
    return verify(_unpacked(graph))


def _unpacked(graph: Graph) -> Graph:
    result = replace(graph, params={}, nodes=[], layouts={})
    fields: dict[Value, tuple[Value, ...]] = {}
    for name, v in graph.params.items():
        layout = graph.layouts.get(name)
        if layout is not None and layout.encoding and layout.field is None:
            fields[v] = declared_fields(result, v, name, layout)
            continue
        result.params[name] = v
        if layout is not None:
            result.layouts[name] = layout
    matrices = Replaced()
    for node in graph.nodes:
        for v in node.inputs:
            if v in fields and v not in matrices:
                plan = {"encoding": graph.layouts[v.name].encoding, "axis": v.type.axes[1]}
                plan |= {"size": v.type.shape[1], "dtype": v.type.dtype}
                matrices[v] = emit(result, "unpack", *fields[v], **plan)
        result.nodes.append(rewrite(matrices.node(node), _unpacked))
    return result


def declared_fields(out: Graph, v: Value, name: str, layout: Layout) -> tuple[Value, ...]:
    """The parameters of `out` with the fields of matrix `v`; `name` is the first one's."""
    (rows, axis), (height, width) = v.type.axes, v.type.shape
    found = []
    for number, field in enumerate(ENCODINGS[layout.encoding or ""].fields):
        type = Type(
            (rows, "scales" if number else axis), (height, field.columns(width)), field.dtype
        )
        out.layouts[name + field.suffix] = replace(layout, field=number)
        found.append(out.parameter(name + field.suffix, type))
    return tuple(found)
