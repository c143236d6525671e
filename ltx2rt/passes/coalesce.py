"""coalesce: all-reduces that are ready together become one.

Requires a placed graph. Ensures the same values with at most as many communications: collectives wait until nothing
else can run, then those of one mesh axis and dtype leave as one node. So the statistics of q and k travel together, and
so do the partial sums of the video and the audio stream.
"""

from __future__ import annotations

from dataclasses import replace

from ltx2rt.graph.ir import Graph, Node, rewrite
from ltx2rt.graph.ops import OPS
from ltx2rt.graph.verify import verify


def coalesce(graph: Graph) -> Graph:
    result = replace(graph, nodes=_schedule(graph))
    verify(result)
    return result


def _schedule(graph: Graph) -> list[Node]:
    """List scheduling in the original order, collectives held back until they block everything."""
    ready = {id(v) for v in (*graph.inputs.values(), *graph.params.values())}
    waiting = [rewrite(node, coalesce) for node in graph.nodes]
    ordered: list[Node] = []
    while waiting:
        held: list[Node] = []
        left: list[Node] = []
        for node in waiting:
            if not all(id(v) in ready for v in node.inputs):
                left.append(node)
            elif node.op == "all_reduce":
                held.append(node)
            else:
                ordered.append(node)
                ready.update(id(v) for v in node.outputs)
        merged = _merge(held)
        ordered += merged
        ready.update(id(v) for node in merged for v in node.outputs)
        assert held or len(left) < len(waiting), f"{graph.name}: nodes depend on each other in a circle"
        waiting = left
    return ordered


def _merge(held: list[Node]) -> list[Node]:
    groups: dict[tuple, list[Node]] = {}
    for node in held:
        groups.setdefault((node.attrs["mesh_axis"], node.inputs[0].type.dtype), []).append(node)
    merged = []
    for nodes in groups.values():
        inputs = tuple(v for node in nodes for v in node.inputs)
        outputs = tuple(v for node in nodes for v in node.outputs)
        _, args = OPS["all_reduce"].rule(*(v.type for v in inputs), **nodes[0].attrs)
        merged.append(Node("all_reduce", inputs, outputs, nodes[0].attrs, args))
    return merged
