"""coalesce: all-reduces that are ready together become one.

Requires a placed graph. Ensures the same values with no more communications: collectives wait
until nothing else can run, then all of one mesh axis and dtype leave as one node. So the
statistics of q and k travel together, and so do the partial sums of the video and the audio stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ltx2rt.graph.ir import Graph, Node, rewrite
from ltx2rt.graph.ops import OPS
from ltx2rt.graph.verify import verify


def coalesce(graph: Graph) -> Graph:
    return verify(replace(graph, nodes=_schedule(graph)))


def _schedule(graph: Graph) -> list[Node]:
    """List scheduling in the original order, collectives held back until they block everything."""
    ready = {*graph.inputs.values(), *graph.params.values()}
    waiting = [rewrite(node, coalesce) for node in graph.nodes]
    ordered: list[Node] = []
    while waiting:
        held: list[Node] = []
        left: list[Node] = []
        for node in waiting:
            if not ready.issuperset(node.inputs):
                left.append(node)
            elif node.op == "all_reduce":
                held.append(node)
            else:
                ordered.append(node)
                ready.update(node.outputs)
        merged = together(held)
        ordered += merged
        ready.update(v for node in merged for v in node.outputs)
        assert held or len(left) < len(waiting), (
            f"{graph.name}: nodes depend on each other in a circle"
        )
        waiting = left
    return ordered


def together(nodes: Sequence[Node]) -> list[Node]:
    """Collectives that leave at once; of all-reduces one for each mesh axis and dtype."""
    groups: dict[tuple, list[Node]] = {}
    for node in nodes:
        reduces = node.op == "all_reduce"
        key = (node.attrs["mesh_axis"], node.inputs[0].type.dtype) if reduces else (node,)
        groups.setdefault(key, []).append(node)
    return [found[0] if len(found) == 1 else _all_reduce(found) for found in groups.values()]


def apart(node: Node) -> list[Node]:
    """An all-reduce of each operand."""
    pairs = zip(node.inputs, node.outputs, strict=True)
    return [_all_reduce([replace(node, inputs=(v,), outputs=(result,))]) for v, result in pairs]


def _all_reduce(nodes: Sequence[Node]) -> Node:
    inputs = tuple(v for node in nodes for v in node.inputs)
    outputs = tuple(v for node in nodes for v in node.outputs)
    _, args = OPS["all_reduce"].rule(*(v.type for v in inputs), **nodes[0].attrs)
    return replace(nodes[0], inputs=inputs, outputs=outputs, args=args)
