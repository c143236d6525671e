"""share: what several entries of the batch have in common is computed once.

Requires a legal graph of one device, placed or not, which does not cut the batch `B` over devices.
Ensures the same inputs, outputs, parameters and communications, and the same values but for the
rounding of smaller matrix products.

The batch of a guided step is branches x videos, and its entries are equal as long as they are made
alike from the same: latents until a text is read, keys and values of one text in every branch, the
perturbed branch and the conditional one up to the first perturbed block. A value is computed for
one entry of each class of equal ones, and spread where classes part. What nothing reads is not
computed: attention that a branch multiplies by 0.

A repeat in which classes part between iterations becomes several, each over its own iterations of
the same stacked parameters (`Repeat.first`). Its carried values are spread before the iteration in
which classes part; the start of that iteration is computed more than once, because a loop of one
iteration costs a compiler as much as one of many.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ltx2rt.graph.ir import Graph, Node, Type, Value
from ltx2rt.graph.trace import emit
from ltx2rt.graph.verify import verify
from ltx2rt.passes.equal import BATCH, Analysis, Segment, num_entries

# Operands, by op, that mean the same for all of the batch if they lack its axis.
BROADCAST = {
    **dict.fromkeys(("add", "sub", "mul", "div"), (0, 1)), "select": (0, 1, 2), "modulate": (1, 2),
    "rope": (1, 2),
    "attention": (3,), "attention_part": (3,),
}  # fmt: skip


def share(graph: Graph) -> Graph:
    """`graph` itself if every matrix product and attention in it is needed for all of the batch."""
    found = Analysis(graph)
    if not found.saves:
        return graph
    result = replace(graph, nodes=[], params=dict(graph.params), layouts=dict(graph.layouts))
    writer = _Writer(result, found)
    for node in graph.nodes:
        writer.write(node)
    result.outputs = {
        name: writer.read(v, range(num_entries(v))) for name, v in graph.outputs.items()
    }
    return verify(result)


class _Writer:
    """Writes a new graph with one entry for each class of equal ones.

    held: by value of the old graph, the one that holds its entries, and by entry, where.
    same: values that are others. entered: the inputs of a body as it reads them, by value, entries
    and whether they lack the batch.
    """

    def __init__(self, out: Graph, found: Analysis):
        self.out, self.found = out, found
        self.held: dict[Value, tuple[Value, Sequence[int]]] = {}
        self.same: dict[Value, Value] = {}
        self.entered: dict[tuple[Value, tuple[int, ...], bool], Value] = {}
        self._gathered: dict[tuple[Value, tuple[int, ...], bool], Value] = {}

    def write(self, node: Node) -> None:
        found, result = self.found, node.outputs[0]
        if not any(found.needed.get(v) for v in node.outputs):
            return
        if node in found.same:
            self.same[result] = node.inputs[found.same[node]]
        elif node in found.segments:
            sources = node.inputs[: len(node.outputs)]
            for segment in found.segments[node]:
                self._segment(node, segment, sources)
                sources = node.outputs
        elif node in found.kept:
            leaders = found.leaders(result)
            kept = [b for b in leaders if b < found.kept[node]]
            zeros = {BATCH: (0, len(leaders) - len(kept))}
            padded = emit(self.out, "pad", self.read(node.inputs[0], kept), mode="zeros", **zeros)
            self.held[result] = padded, found.where(result)
        elif node in found.by_entry:
            each = len(node.inputs) // len(node.outputs)
            entries = [found.leaders(v) for v in node.outputs] * each
            bare = self._bare(node, entries[0])
            operands = [self.read(v, entries[i], i in bare) for i, v in enumerate(node.inputs)]
            self._emit(node, operands, map(found.where, node.outputs))
        else:
            whole = [range(num_entries(v)) for v in node.outputs]
            self._emit(node, [self.read(v, range(num_entries(v))) for v in node.inputs], whole)

    def _emit(self, node: Node, operands: Sequence[Value], where: Iterable[Sequence[int]]) -> None:
        if node.op == "repeat":
            results: Any = tuple(self.out.fresh(v.type) for v in node.outputs)
            self.out.nodes.append(replace(node, inputs=tuple(operands), outputs=results))
        else:
            results = emit(self.out, node.op, *operands, **node.attrs)
        results = results if isinstance(results, tuple) else (results,)
        held = zip(node.outputs, results, where, strict=True)
        self.held |= {v: (result, at) for v, result, at in held}

    def _bare(self, node: Node, entries: Sequence[int]) -> set[int]:
        """Operands that are one for all these entries and can do without the batch; one that gives
        the result its axes keeps it."""
        if len(entries) == 1:
            return set()
        leaders = [self.found.leader(v) for v in node.inputs]
        may = [i for i in BROADCAST.get(node.op, ()) if i < len(leaders) and leaders[i]]
        found = {i for i in may if len({leaders[i][b] for b in entries}) == 1}
        rank = len(node.outputs[0].type.axes)
        whole = [i for i, v in enumerate(node.inputs) if len(v.type.axes) == rank]
        return found - set(whole[:1]) if found.issuperset(whole) else found

    def read(self, v: Value, entries: Sequence[int] = (), bare: bool = False) -> Value:
        """These entries of `v`, in this order; bare: the first of them, without the batch."""
        if v in self.same:
            return self.read(self.same[v], entries, bare)
        if BATCH not in v.type.axes:
            # an input or a parameter is the same value
            return self.held[v][0] if v in self.held else v
        leader = self.found.leader(v)
        wanted = tuple(leader[b] for b in (entries[:1] if bare else entries))
        if v not in self.held and self.found.is_body:
            type = _without_batch(v.type) if bare else v.type.resized(BATCH, len(wanted))
            return self.entered.setdefault((v, wanted, bare), Value(v.name, type))
        value, where = self.held.get(v, (v, range(num_entries(v))))
        key = value, tuple(where[b] for b in wanted), bare
        if key not in self._gathered:
            self._gathered[key] = self._gather(value, *key[1:])
        return self._gathered[key]

    def _gather(self, value: Value, where: tuple[int, ...], bare: bool) -> Value:
        if bare:
            return emit(self.out, "at", value, axis=BATCH, index=where[0])
        if where == tuple(range(num_entries(value))):
            return value
        if len(where) > 1 and len(set(where)) == 1:
            after = value.type.axes[value.type.axes.index(BATCH) + 1 :]
            before = after[0] if after else None
            one = self._gather(value, where, True)
            return emit(self.out, "expand", one, axis=BATCH, size=len(where), before=before)
        parts = []
        for _, run in itertools.groupby(enumerate(where), lambda pair: pair[1] - pair[0]):
            places = [n for _, n in run]
            cut = {"start": places[0], "stop": places[-1] + 1}
            parts.append(emit(self.out, "slice", value, axis=BATCH, **cut))
        return parts[0] if len(parts) == 1 else emit(self.out, "concat", *parts, axis=BATCH)

    def _segment(self, node: Node, segment: Segment, sources: Sequence[Value]) -> None:
        """One of the repeats that `node` becomes; it carries `sources`."""
        repeat, found = node.repeat, segment.found
        params, inputs = dict(repeat.body.params), repeat.body.inputs.values()
        body = replace(repeat.body, inputs={}, nodes=[], params=params, outputs={})
        writer = _Writer(body, found)
        carry, invariant, data = repeat.divide(list(zip(inputs, node.inputs, strict=True)))
        part = {"start": segment.first, "stop": segment.first + segment.count}
        operands: list[Value] = []
        num_invariants = 0

        def enter(v: Value, value: Value) -> None:
            body.inputs[v.name if v.name not in body.inputs else f"{v.name}_{len(body.inputs)}"] = v
            operands.append(value)

        for (v, _), source in zip(carry, sources, strict=True):
            value = self.read(source, found.leaders(v))
            own = Value(v.name, value.type)
            writer.held[v] = own, found.where(v)
            enter(own, value)
        for inside in repeat.body.nodes:
            writer.write(inside)
        ends = zip(repeat.body.outputs.values(), carry, strict=True)
        results = [writer.read(end, found.leaders(v)) for end, (v, _) in ends]
        body.outputs = dict(zip(repeat.body.outputs, results, strict=True))
        used = set(body.read())
        for group in (invariant, data):
            for v, source in group:
                entered = [(own, *key[1:]) for key, own in writer.entered.items() if key[0] == v]
                for own, entries, bare in entered or [(v, (), False)] * (v in used):
                    value = self.read(source, entries, bare)
                    if group is data and segment.count < repeat.count:
                        value = emit(self.out, "slice", value, axis=repeat.axis, **part)
                    enter(own, value)
            if group is invariant:
                num_invariants = len(operands) - len(carry)
        plan = replace(
            repeat, body=body, count=segment.count, num_invariants=num_invariants,
            first=repeat.first + segment.first,
        )  # fmt: skip
        made, attrs = tuple(self.out.fresh(v.type) for v in results), {"count": plan.count}
        self.out.nodes.append(Node("repeat", tuple(operands), made, attrs, {"repeat": plan}))
        for v, value, (own, _) in zip(node.outputs, made, carry, strict=True):
            self.held[v] = value, found.where(own)


def _without_batch(type: Type) -> Type:
    i = type.axes.index(BATCH)
    return type.replaced(i, i + 1, {})
