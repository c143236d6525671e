"""interleave: halves of an axis go through the blocks side by side, so that what one half waits for
from other devices travels while the other computes.

Requires a placed graph. Ensures the same inputs, outputs and parameters and, but for products of
other shapes, the same values; every exchange of that axis inside a block becomes two of half the
size. Of the samples, neither half needs the other: a repeat with nodes that pick or join samples
stays as it is. Tokens meet again where each attends to all of them, and only there: keys and values
are joined, queries stay halves. Where weights are gathered as they are used, turns would gather
those of a whole block at once, and tokens stay whole. A repeat in which nothing of the axis is
exchanged, or whose axis cannot be halved, stays as it is.

For a stream that runs nodes in their order, `TOKENS` alternate the halves: each as far as it gets,
then its exchange, then the other. XLA orders nodes itself, and takes both halves as far as they get
before it waits for both: `tied` makes them alternate by a `barrier` at every big exchange. A repeat
with barriers alternates already, and stays as it is.

Weights are read twice; whether that costs less than the exchanges is for the backend to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ltx2rt.graph.ir import Graph, Node, Repeat, Replaced, Type, Value, replace_repeats
from ltx2rt.graph.ops import COLLECTIVES, OPS
from ltx2rt.graph.trace import emit
from ltx2rt.graph.verify import verify
from ltx2rt.passes.coalesce import apart, together

SAMPLES, TOKENS, HALVES = "B", "tokens", 2
# Samples times tokens of a half at the least. Not measured: below, a half's narrow products leave
# most of a GPU's multiprocessors without a tile, and there is less to hide an exchange under than
# more launches cost.
HALF_ROWS = 1024
Parts = Sequence[Value]  # a value's replacement: itself, or its halves
# operands of an attention that each query has a part of: q, and the bias behind k and v
QUERIES = (0, 3)


def interleave(graph: Graph, axis: str = SAMPLES, rows: int = 0, tied: int | None = None) -> Graph:
    """`graph` with its repeats in halves of `axis`; itself if there are none to halve.

    rows: samples times tokens that a half has at the least. tied: bytes from which on exchanges
    take turns; None: nothing but the order of the nodes keeps them.
    """

    def append(result: Graph, node: Node) -> bool:
        if can := _can_halve(node.repeat, axis, rows):
            _append_halved(result, node, axis, tied)
        return can

    result = replace_repeats(graph, append)
    return verify(result)


def _can_halve(repeat: Repeat, axis: str, rows: int) -> bool:
    body, outputs = repeat.body, [v.type for v in repeat.body.outputs.values()]
    weights = set(body.params.values())
    carried = {type.size(axis) for type in outputs if axis in type.axes}
    if any(node.op in ("repeat", "barrier") for node in body.nodes):
        return False
    if len(outputs) != repeat.num_carries or len(carried) != 1:
        return False
    if axis == SAMPLES:
        made = [v for node in body.nodes for v in node.outputs]
        sizes = {v.type.size(axis) for v in (*body.inputs.values(), *made) if axis in v.type.axes}
        if sizes != carried or not all(axis in type.axes for type in outputs):
            return False
        if any(_names(node.attrs, axis) for node in body.nodes):
            return False
    elif any(node.op == "all_gather" and node.inputs[0] in weights for node in body.nodes):
        return False
    (size,) = carried
    exchanged = [v.type for node in body.nodes if _exchanges(node, axis) for v in node.inputs]
    large = (HALVES * rows <= _rows(type) for type in exchanged if axis in type.axes)
    return not size % HALVES and any(large)


def _rows(type: Type) -> int:
    return type.sizes.get(SAMPLES, 1) * type.sizes.get(TOKENS, 1)


def _exchanges(node: Node, axis: str) -> bool:
    """True if the node exchanges activations along `axis`; for tokens only all-reduces can be
    split."""
    read = any(axis in v.type.axes for v in node.inputs)
    return read and (node.op in COLLECTIVES if axis == SAMPLES else node.op == "all_reduce")


def _names(attrs: object, axis: str) -> bool:
    """Whether a node's attributes name the axis, other than to put one before it."""
    if isinstance(attrs, dict):
        attrs = [x for item in attrs.items() if item[0] != "before" for x in item]
    if isinstance(attrs, (tuple, list)):
        return any(_names(x, axis) for x in attrs)
    return attrs == axis


def _append_halved(result: Graph, node: Node, axis: str, tied: int | None) -> None:
    """Append the repeat in halves; cut its carries before it and join them after it."""
    repeat, old = node.repeat, node.repeat.body
    carry, invariant, data = repeat.divide(list(zip(old.inputs, node.inputs, strict=True)))
    (size,) = {v.type.size(axis) for _, v in carry if axis in v.type.axes}
    halves = _Halves(old, axis, size)
    operands = []
    for name, v in carry:
        parts = _cut(result, v, axis, size)
        halves.enter(name, parts)
        operands += parts
    for name, v in (*invariant, *data):
        halves.enter(name, [v])
    for one in old.nodes:
        halves.add(one)
    kept = {name: halves.halves(v) for name, v in old.outputs.items()}
    body = halves.body
    for name, parts in kept.items():
        body.outputs |= zip(_numbered(name, parts), parts, strict=True)
    if axis == TOKENS:
        body.nodes = halves.in_turns(tied or 0)
    if tied is not None:
        later = [] if axis == TOKENS else [old.inputs[name] for name, _ in carry]
        halves.tie([halves.halves(v)[1] for v in later], tied)
    values: list[Value] = []
    joins = []
    for v, parts in zip(node.outputs, kept.values(), strict=True):
        found = [v] if len(parts) == 1 else [result.fresh(part.type) for part in parts]
        values += found
        if len(parts) > 1:
            _, plan = OPS["concat"].rule(*(part.type for part in parts), axis=axis)
            joins.append(Node("concat", tuple(found), (v,), {"axis": axis}, plan))
    args = {"repeat": replace(repeat, body=body, num_carries=len(operands))}
    others = (v for _, v in (*invariant, *data))
    result.nodes += [Node("repeat", (*operands, *others), tuple(values), node.attrs, args), *joins]


def _numbered(name: str, parts: Parts) -> list[str]:
    return [name] if len(parts) == 1 else [f"{name}_{i}" for i in range(len(parts))]


def _cut(graph: Graph, v: Value, axis: str, size: int) -> Parts:
    if v.type.sizes.get(axis) != size:
        return [v]
    half = size // HALVES
    starts = (i * half for i in range(HALVES))
    return [emit(graph, "slice", v, axis=axis, start=n, stop=n + half) for n in starts]


class _Halves:
    """A body that is rewritten, node by node, in halves of an axis where that is possible."""

    def __init__(self, old: Graph, axis: str, size: int):
        """size: of the halved axis; longer ones (other devices' tokens) stay whole."""
        self.old, self.axis, self.size = old, axis, size
        self.body = Graph(
            old.name, params=old.params, layouts=old.layouts, mesh=old.mesh, serial=old.serial
        )
        # by the old body's values
        self.parts: dict[Value, Parts] = {v: [v] for v in old.params.values()}
        self.joined: dict[Value, Value] = {}
        self.second: set[Node] = set()  # nodes of the second half; whole nodes go with the first

    def enter(self, name: str, parts: Parts) -> None:
        v, names = self.old.inputs[name], _numbered(name, parts)
        halves = [Value(n, x.type) for n, x in zip(names, parts, strict=True)]
        self.parts[v] = [v] if len(parts) == 1 else halves
        self.body.inputs |= zip(names, self.parts[v], strict=True)

    def halves(self, v: Value) -> Parts:
        if len(self.parts[v]) == 1:
            (self.joined[v],) = self.parts[v]
            self.parts[v] = _cut(self.body, self.joined[v], self.axis, self.size)
        return self.parts[v]

    def whole(self, v: Value) -> Value:
        parts = self.parts[v]
        if len(parts) == 1:
            return parts[0]
        if v not in self.joined:
            self.joined[v] = emit(self.body, "concat", *parts, axis=self.axis)
        return self.joined[v]

    def _takes_halves(self, node: Node, operand: int) -> bool:
        if self.axis == SAMPLES:
            return True
        if node.op in ("attention", "attention_part"):
            return operand in QUERIES
        return node.op not in ("all_to_all", "all_gather") and not _names(node.attrs, self.axis)

    def add(self, node: Node) -> None:
        if self.axis == TOKENS and node.op == "all_reduce" and len(node.inputs) > 1:
            for one in apart(node):  # `in_turns` finds out what leaves together
                self.add(one)
            return
        found = [
            self.halves(v) if self._takes_halves(node, i) else [self.whole(v)]
            for i, v in enumerate(node.inputs)
        ]
        made = []
        for i in range(max(map(len, found), default=1)):
            operands = (parts[i % len(parts)] for parts in found)
            results = emit(self.body, node.op, *operands, **node.attrs)
            made.append(results if isinstance(results, tuple) else (results,))
            if i:
                self.second.add(self.body.nodes[-1])
        self.parts |= zip(node.outputs, zip(*made, strict=True), strict=True)

    def in_turns(self, least: int) -> list[Node]:
        """The body's nodes: each half as far as it gets, then its exchanges, then the other half.

        Exchanges are all-reduces of `least` bytes or more; other exchanges' results are read at
        once. Whole nodes leave with a half, by themselves only behind the last, or if nothing else
        is left to do.
        """
        ready = {*self.body.inputs.values(), *self.body.params.values()}
        arriving: list[set[Value]] = [set(), set()]
        ordered: list[Node] = []
        waiting, turn, stuck = self.body.nodes, 0, 0
        while waiting:
            ready |= arriving[turn]
            arriving[turn] = set()
            leaving: list[Node] = []
            left: list[Node] = []
            for node in waiting:
                other = (node in self.second) != bool(turn)
                if other or not ready.issuperset(node.inputs):
                    left.append(node)
                elif node.op == "all_reduce" and sum(v.type.nbytes for v in node.inputs) >= least:
                    leaving.append(node)
                else:
                    ordered.append(node)
                    ready.update(node.outputs)
            sums, later = (any(map(self._sums_a_half, nodes)) for nodes in (leaving, left))
            if stuck < HALVES and later and not sums:
                left, leaving = [*left, *leaving], []
            arriving[turn] = {v for node in leaving for v in node.outputs}
            ordered += together(leaving)
            stuck = stuck + 1 if len(left) == len(waiting) else 0
            waiting, turn = left, 1 - turn
        return ordered

    def _sums_a_half(self, node: Node) -> bool:
        return node.op == "all_reduce" and any(self.axis in v.type.axes for v in node.inputs)

    def tie(self, second: Sequence[Value], least: int) -> None:
        """Order the nodes: each half up to its next exchange of `least` bytes or more, then the
        other half. second: the carries' half that has the second turn.

        When a big exchange leaves, the other half first reads its arrived results, and the other
        way round: not an all_to_all's, which XLA would then make synchronous. Gathered values
        arrive a turn later. Halves of the tokens are in order already.
        """

        def big(values: Sequence[Value]) -> list[Value]:
            return [v for v in values if v.type.nbytes >= least]

        stages: dict[Node | Value, int] = {}  # by node and value: how many big exchanges lead to it
        received: set[Value] = set()
        for node in self.body.nodes:
            came = (stages.get(v, 0) + (v in received) for v in node.inputs)
            stage = max(came, default=0)
            stages |= dict.fromkeys((node, *node.outputs), stage)
            if _exchanges(node, self.axis) and big(node.inputs):
                received.update(big(node.outputs))
        nodes, self.body.nodes = self.body.nodes, []
        tied = Replaced()
        gathered: list[Value] = []
        arrived, begun = big(second), False
        if self.axis == SAMPLES:
            nodes = sorted(nodes, key=lambda node: (stages[node], node in self.second))
        for node in nodes:
            if _exchanges(node, self.axis) and (leaving := big(node.inputs)):
                ripe = [v for v in gathered if stages[v] < stages[node]]
                gathered = [v for v in gathered if v not in ripe]
                one_way = begun and node.op == "all_to_all"
                if len(together := [*arrived, *ripe, *leaving]) > 1:
                    found = emit(self.body, "barrier", *(tied[v] for v in together))
                    pairs = zip(together, found, strict=True)
                    tied |= {v: x for v, x in pairs if not one_way or v in arrived}
                arrived, begun = big(node.outputs), True
            elif node.op == "all_gather" and _exchanges(node, self.axis):
                gathered += node.outputs
            self.body.nodes.append(tied.node(node))
        self.body.outputs = tied.outputs(self.body)
