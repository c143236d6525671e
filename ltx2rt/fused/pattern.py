"""The patterns of fused ops, in the order in which `passes.fuse` looks for them, and their
means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ltx2rt.graph.ir import Graph, Node, Value
from ltx2rt.graph.ops import OPS


class Uses:
    """Who makes and who reads each value of one graph."""

    def __init__(self, graph: Graph):
        self.nodes: set[Node] = set()
        self.makers: dict[Value, Node] = {}
        self.readers: dict[Value, list[Node]] = {}
        self.kept = set(graph.outputs.values())
        # a reader's number is never less than a maker's
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            self._add(node)

    def _add(self, node: Node) -> None:
        self.nodes.add(node)
        self.makers |= dict.fromkeys(node.outputs, node)
        for v in node.inputs:
            self.readers.setdefault(v, []).append(node)

    def substitute(self, gone: Sequence[Node], new: Sequence[Node], late: Sequence[Node]) -> None:
        """`new` for `gone`, with `late` behind them."""
        last = max(self.order[node] for node in gone)
        self.order |= dict.fromkeys((*new, *late), last)
        for node in gone:
            self.nodes.remove(node)
            for v in node.outputs:
                del self.makers[v]
            for v in node.inputs:
                self.readers[v].remove(node)
        for node in new:
            self._add(node)

    def maker(self, value: Value, op: str) -> Node | None:
        """The node that makes `value`, if it is an `op`."""
        node = self.makers.get(value)
        return node if node is not None and node.op == op else None

    def only(self, value: Value, op: str) -> Node | None:
        """The node that makes `value`, if it is an `op` and one operand of one node reads it."""
        single = len(self.readers.get(value, ())) == 1 and value not in self.kept
        return self.maker(value, op) if single else None

    def depends(self, value: Value, on: set[Node]) -> bool:
        """Whether a result of the nodes `on` goes into `value`."""
        stack, seen = [value], set()
        first = min(self.order[node] for node in on)
        while stack:
            node = self.makers.get(stack.pop())
            if node is None or node in seen or self.order[node] < first:
                continue
            if node in on:
                return True
            seen.add(node)
            stack += node.inputs
        return False


Found = tuple[Sequence[Node], Sequence[Node]]  # the nodes that go, and those that take their place
Match = Callable[[Graph, Uses, Node], Found | None]
PATTERNS: list[Match] = []


def pattern(match: Match) -> Match:
    """Enter a pattern behind the others. It gets a graph and one node, the last that it needs to
    see or the one in the middle."""
    PATTERNS.append(match)
    return match


def node_of(op: str, inputs: Sequence[Value], outputs: Sequence[Value], **attrs) -> Node:
    _, args = OPS[op].rule(*(v.type for v in inputs), **attrs)
    return Node(op, tuple(inputs), tuple(outputs), attrs, args)


def grouped(operands: Sequence[Any], size: int) -> list[tuple[Any, ...]]:
    """Operands that follow one another, `size` at a time."""
    return list(zip(*[iter(operands)] * size, strict=True))


def one_or_many(results: Sequence[Any]):
    return results[0] if len(results) == 1 else results
