"""data_parallel: the devices along one mesh axis each take their share of an outer axis (videos
over `data`).

Requires a graph, placed or not, in which nothing mixes the entries of that axis, made for one
device's share. Ensures a graph with whole inputs and outputs: cut on the way in, gathered on the
way out, no other communication.
"""

from __future__ import annotations

from dataclasses import replace

from ltx2rt.graph.ir import Graph, Replaced, Value
from ltx2rt.graph.trace import emit
from ltx2rt.graph.verify import verify


def data_parallel(graph: Graph, axis: str, mesh_axis: str, parts: int) -> Graph:
    """Make inputs and outputs with `axis` `parts` times as long; of one part `graph` itself."""
    if parts == 1:
        return graph
    result = replace(graph, nodes=[], inputs={}, outputs={}, mesh={mesh_axis: parts, **graph.mesh})
    cut = Replaced()
    for name, v in graph.inputs.items():
        result.inputs[name] = v
        if axis in v.type.axes:
            result.inputs[name] = Value(name, v.type.resized(axis, v.type.size(axis) * parts))
            cut[v] = emit(
                result, "shard", result.inputs[name], axis=axis, mesh_axis=mesh_axis, parts=parts
            )
    result.nodes += map(cut.node, graph.nodes)
    for name, v in graph.outputs.items():
        whole = cut[v]
        if axis in v.type.axes:
            whole = emit(result, "all_gather", whole, axis=axis, mesh_axis=mesh_axis, parts=parts)
        result.outputs[name] = whole
    return verify(result)
