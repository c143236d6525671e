"""fuse: neighbouring ops that one kernel can do become one node.

Requires a legal graph, placed or not. Ensures the same inputs, outputs, parameters and
communication, and the same values but for fewer roundings. The files of `ltx2rt/fused/` list the
fused ops; whether a kernel or the plain ops run it, the backend decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ltx2rt.fused  # noqa: F401  enters the patterns
from ltx2rt.fused.pattern import PATTERNS, Match, Uses
from ltx2rt.graph.ir import Graph, Node, rewrite
from ltx2rt.graph.verify import verify


def fuse(graph: Graph, matches: Sequence[Match] = ()) -> Graph:
    """`graph` with fused ops, bodies of repeats included. matches: of PATTERNS (default: all)."""
    result = replace(
        graph, nodes=[rewrite(node, lambda body: fuse(body, matches)) for node in graph.nodes]
    )
    uses = Uses(result)
    for match in matches or PATTERNS:
        for node in list(result.nodes):
            found = match(result, uses, node) if node in uses.nodes else None
            if found is not None and _is_convex(uses, *found):
                late = _substitute(result.nodes, *found)
                uses.substitute(*found, late)
    return verify(result)


def _is_convex(uses: Uses, gone: Sequence[Node], new: Sequence[Node]) -> bool:
    """Whether no operand of the new nodes is made from a result of those that go."""
    made = {v for node in new for v in node.outputs}
    return not any(uses.depends(v, set(gone)) for node in new for v in node.inputs if v not in made)


def _substitute(nodes: list[Node], gone: Sequence[Node], new: Sequence[Node]) -> list[Node]:
    """Put `new` at the place of the last of `gone`. Nodes before it that read a result of these
    move behind it; return them."""
    old = set(gone)
    places = sorted(map(nodes.index, gone))
    before: list[Node] = []
    behind: list[Node] = []
    late = {v for node in gone for v in node.outputs}
    for node in nodes[places[0] : places[-1]]:
        if node in old:
            continue
        if late.isdisjoint(node.inputs):
            before.append(node)
        else:
            behind.append(node)
            late.update(node.outputs)
    nodes[places[0] : places[-1] + 1] = [*before, *new, *behind]
    return behind
