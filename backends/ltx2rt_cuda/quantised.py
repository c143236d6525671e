"""Norms that quantise the rows of an 8-bit product as they write them: those with a result that
quantised linears read, whole or some samples of it. If nothing else reads it, it is not written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ltx2rt.graph.ir import Graph, Node, Value
from ltx2rt_cuda.ops.products import LONG_ROWS

NORMS = ("norm_modulate", "modulate", "residual_norm_modulate")


@dataclass(frozen=True)
class QuantisedRows:
    """reads: of a linear's id, the result of a norm and the slice of samples between them, if there
    is one. numbers: of a norm's id, its quantised outputs. unread: ids of values that nothing else
    reads."""

    reads: dict[int, tuple[Value, Node | None]] = field(default_factory=dict)
    numbers: dict[int, list[int]] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, graph: Graph) -> QuantisedRows:
        made = {id(v): (node, i) for node in graph.nodes for i, v in enumerate(node.outputs)}
        found = cls()
        for node in graph.nodes:
            if node.op != "quantised_linear" or node.args["num_contracted"] != 1:
                continue
            x, cut = node.inputs[0], None
            maker, number = made.get(id(x), (None, 0))
            if maker is not None and maker.op == "slice" and maker.args["dim"] == 0:
                cut, x = maker, maker.inputs[0]
                maker, number = made.get(id(x), (None, 0))
            if maker is None or maker.op not in NORMS or not _fits(x):
                continue
            found.reads[id(node)] = x, cut
            numbers = found.numbers.setdefault(id(maker), [])
            numbers += [] if number in numbers else [number]
        found.unread.update(found._unread(graph))
        return found

    def _unread(self, graph: Graph) -> Iterator[int]:
        """Also slices of samples: they come behind what they cut."""
        cuts = {id(cut) for _, cut in self.reads.values()}
        kept = {id(v) for v in graph.outputs.values()}
        for node in reversed(graph.nodes):
            if id(node) in self.reads:
                kept.update(map(id, node.inputs[1:]))
            elif id(node) in cuts and id(node.outputs[0]) not in kept:
                yield id(node.outputs[0])
            else:
                kept.update(map(id, node.inputs))
        yield from (id(x) for x, _ in self.reads.values() if id(x) not in kept)


def _fits(x: Value) -> bool:
    """Whether x is (B, tokens, n), and its product takes any number of rows."""
    return len(x.type.axes) == 3 and x.type.shape[-1] <= LONG_ROWS
