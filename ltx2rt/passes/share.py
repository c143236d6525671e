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
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ltx2rt.graph.ir import Graph, Node, Repeat, Type, Value
from ltx2rt.graph.trace import emit
from ltx2rt.graph.verify import verify

BATCH = "B"
# axes along which entries are known to be equal
TRACKED = ("layers", "contexts", "branches", "videos", BATCH)
# ops that are worth a separate repeat
HEAVY = {"linear", "quantised_linear", "attention", "attention_part"}
# Operands, by op, that mean the same for all of the batch if they lack its axis.
BROADCAST = {
    **dict.fromkeys(("add", "sub", "mul", "div"), (0, 1)), "select": (0, 1, 2), "modulate": (1, 2),
    "rope": (1, 2),
    "attention": (3,), "attention_part": (3,),
}  # fmt: skip
# a label for each entry of a value, equal for equal entries: a number, ("=", x) for all x
Pattern = tuple[Any, ...]


def share(graph: Graph) -> Graph:
    """`graph` itself if every matrix product and attention in it is needed for all of the batch."""
    found = _Analysis(graph)
    if not found.saves:
        return graph
    result = replace(graph, nodes=[], params=dict(graph.params), layouts=dict(graph.layouts))
    writer = _Writer(result, found)
    for node in graph.nodes:
        writer.write(node)
    result.outputs = {name: writer.read(v, range(_size(v))) for name, v in graph.outputs.items()}
    verify(result)
    return result


def _size(v: Value) -> int:
    """Its entries along the batch; 1 of a value that has none."""
    return v.type.sizes.get(BATCH, 1)


def _tracked(type: Type) -> dict[str, int]:
    return {axis: n for axis, n in type.sizes.items() if axis in TRACKED}


def _named(node: Node) -> set[str]:
    """Axes in the node's attributes, among other words. On others it acts entry by entry."""
    if node.op == "transpose":
        return set()
    found = set(node.attrs)
    for name, value in node.attrs.items():
        if name != "before":  # where a new axis goes
            found |= set(value) if isinstance(value, (tuple, dict)) else {value}
    if node.op == "rename":
        found |= set(node.attrs["names"].values())
    if node.op == "all_to_all":
        found |= {node.inputs[0].type.axes[node.attrs[dim]] for dim in ("split", "concat")}
    return found


# --- which entries are equal ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Segment:
    """Iterations [first, first + count) of a repeat, in all of which the same entries are equal."""

    first: int
    count: int
    found: _Analysis


class _Analysis:
    """Which entries of a graph's values are equal, and which are needed.

    numbers: by id of a value, its entries' along TRACKED axes; two of one number are equal.
    constants: by number. by_entry: ids of the nodes that make every entry of a result from the same
    entry of their operands. same: by id of a node, its operand that is the result; kept: by id of a
    node that leaves the first entries of its first operand as they are and makes the others 0, how
    many these are. segments: by id of a repeat. needed, computed: by id of a value, its entries
    along the batch that are read, and that there will be.
    """

    def __init__(self, graph: Graph, patterns: Sequence[Pattern] | None = None):
        """patterns: of the inputs, if they have equal entries."""
        self.graph, self.is_body = graph, patterns is not None
        self.numbers: dict[int, np.ndarray] = {}
        self.constants: dict[int, float] = {}
        self.by_entry: set[int] = set()
        self.same: dict[int, int] = {}
        self.kept: dict[int, int] = {}
        self.segments: dict[int, list[_Segment]] = {}
        self._known: dict[Hashable, int] = {}
        self._leaders: dict[int, list[int]] = {}
        for i, v in enumerate(graph.inputs.values()):
            shape = tuple(_tracked(v.type).values())
            labels = range(math.prod(shape)) if patterns is None else patterns[i]
            found = [
                self._constant(x[1]) if isinstance(x, tuple) else self._number(id(v), x)
                for x in labels
            ]
            self.numbers[id(v)] = np.array(found).reshape(shape)
        self.numbers |= {id(v): np.array(self._number(id(v))) for v in graph.params.values()}
        for node in graph.nodes:
            self._repeat(node) if node.op == "repeat" else self._node(node)
        self.needed = self._needed()
        self.computed = self._computed()

    @property
    def saves(self) -> bool:
        """Whether some matrix product or attention is needed for less than the whole batch."""
        heavy = (n.outputs[0] for n in self.graph.nodes if n.op in HEAVY and id(n) in self.by_entry)
        inner = (s.found.saves for segments in self.segments.values() for s in segments)
        return any(len(self.leaders(v)) < _size(v) for v in heavy) or any(inner)

    def leaders(self, v: Value) -> list[int]:
        """The first computed entry of each class of equal ones; none without a batch."""
        return sorted(set(self.leader(v)))

    def leader(self, v: Value) -> list[int]:
        """For each entry the first equal one; for an entry that is not computed, any."""
        if BATCH not in v.type.axes:
            return []
        if id(v) not in self._leaders:
            self._leaders[id(v)] = self._leader(v)
        return self._leaders[id(v)]

    def _leader(self, v: Value) -> list[int]:
        numbers = np.moveaxis(self.numbers[id(v)], list(_tracked(v.type)).index(BATCH), 0)
        keys = [tuple(n) for n in numbers.reshape(len(numbers), -1).tolist()]
        first = {keys[b]: b for b in sorted(self.computed[id(v)], reverse=True)}
        return [first.get(key, min(first.values(), default=0)) for key in keys]

    def where(self, v: Value) -> tuple[int, ...]:
        """For each entry the place of its leader among the leaders."""
        return tuple(map(self.leaders(v).index, self.leader(v)))

    def _number(self, *key: Hashable) -> int:
        return self._known.setdefault(key, len(self._known))

    def _constant(self, value: float) -> int:
        number = self._number("=", value)
        self.constants[number] = value
        return number

    def _node(self, node: Node) -> None:
        named = node.op == "full" or bool(_named(node) & set(TRACKED))
        for i, v in enumerate(node.outputs):
            axes = _tracked(v.type)
            # several: collectives
            operands = node.inputs[i : i + 1] if len(node.outputs) > 1 else node.inputs
            views = [view for u in operands if (view := self._view(u, axes)) is not None]
            if named or len(views) < len(operands):
                found = self._moved(node, axes)
                self.numbers[id(v)] = self._fresh(node, i) if found is None else found
                continue
            entries = zip(*(view.ravel().tolist() for view in views), strict=True)
            found = [self._entry(node, i, entry) for entry in entries]
            self.numbers[id(v)] = np.array(found).reshape(tuple(axes.values()))
            self.by_entry |= {id(node)} if BATCH in axes else set()
        if node.op in ("mul", "select"):
            self._shorten(node)

    def _view(self, v: Value, axes: dict[str, int]) -> np.ndarray | None:
        """The numbers of `v` for each entry of a result with these axes, or None."""
        own, order = _tracked(v.type), iter(axes.items())
        if not all(item in order for item in own.items()):
            return None
        return np.broadcast_to(
            self.numbers[id(v)].reshape([own.get(a, 1) for a in axes]), tuple(axes.values())
        )

    def _entry(self, node: Node, i: int, operands: tuple[int, ...]) -> int:
        """The number of an entry of result i, from the numbers of the operands' entries."""
        known = [self.constants.get(n) for n in operands]
        if node.op == "cast" and known[0] in (0, 1):
            return operands[0]
        if node.op == "select" and known[0] is not None:
            return operands[1 if known[0] else 2]
        if node.op == "mul" and known[1] in (0, 1):
            return operands[0 if known[1] else 1]
        return self._number(id(node), i, operands)

    def _moved(self, node: Node, axes: dict[str, int]) -> np.ndarray | None:
        """Numbers of a result that only moves entries along TRACKED axes, else None."""
        shape, axis = tuple(axes.values()), node.attrs.get("axis")
        if node.op == "full":
            return np.full(shape, self._constant(float(node.attrs["value"])))
        given = [self.numbers[id(v)] for v in node.inputs]
        if node.op in ("split", "merge", "rename") and _named(node) <= {*node.attrs, *TRACKED}:
            return given[0].reshape(shape)
        if axis not in TRACKED:
            return None
        dim = list(axes if axis in axes else _tracked(node.inputs[0].type)).index(axis)
        match node.op:
            case "expand":
                return np.broadcast_to(np.expand_dims(given[0], dim), shape)
            case "slice":
                return given[0].take(
                    range(node.args["start"], node.args["stop"], node.args["step"]), dim
                )
            case "at":
                return given[0].take(node.args["index"], dim)
            case "concat":
                return np.concatenate(given, dim)
            case "stack":
                return np.stack(given, dim)
        return None

    def _fresh(self, node: Node, i: int) -> np.ndarray:
        """Numbers of a result of which no two entries are known to be equal."""
        shape = tuple(_tracked(node.outputs[i].type).values())
        return np.array(
            [self._number(id(node), i, "entry", n) for n in range(math.prod(shape))]
        ).reshape(shape)

    def _shorten(self, node: Node) -> None:
        """Find that the result is an operand, or begins as the first one and ends in zeros."""
        result, by = node.outputs[0], node.inputs[0 if node.op == "select" else 1]
        known = [self.constants.get(n, math.nan) for n in self.numbers[id(by)].ravel().tolist()]
        if node.op == "select":
            same = 1 if all(n == 1 for n in known) else 2 if not any(known) else None
        else:
            same = 0 if all(n == 1 for n in known) else None
        if same is not None and node.inputs[same].type == result.type:
            self.same[id(node)] = same
        elif by.type.axes == (BATCH,) and node.inputs[0].type == result.type:
            ones = known.count(1)
            if node.op == "mul" and ones and known == [1.0] * ones + [0.0] * (len(known) - ones):
                self.kept[id(node)] = ones

    def _repeat(self, node: Node) -> None:
        """Number each iteration; consecutive ones with the same equal entries are a segment."""
        repeat = node.repeat
        if repeat.axis not in TRACKED or len(node.outputs) > repeat.num_carries:
            self.numbers |= {id(v): self._fresh(node, i) for i, v in enumerate(node.outputs)}
            return
        carry, invariant, data = repeat.divide([self.numbers[id(v)] for v in node.inputs])
        made: dict[tuple[Pattern, ...], _Analysis] = {}

        def body(carry: Sequence[np.ndarray], data: Iterable[np.ndarray]) -> _Analysis:
            patterns = tuple(map(self._pattern, (*carry, *invariant, *data)))
            if patterns not in made:
                made[patterns] = _Analysis(repeat.body, patterns)
            return made[patterns]

        # first iteration, its carries, its signature
        runs: list[tuple[int, Sequence[np.ndarray], Hashable]] = []
        carry = [self._renumbered((id(node), j), x) for j, x in enumerate(carry)]
        for i in range(repeat.count):
            while True:  # until entries differ wherever exits do
                found = body(carry, (n[i] for n in data))
                results = (found.numbers[id(v)] for v in repeat.body.outputs.values())
                finer = [
                    self._renumbered(id(node), x, y) for x, y in zip(carry, results, strict=True)
                ]
                if all(
                    len(np.unique(x)) == len(np.unique(y))
                    for x, y in zip(carry, finer, strict=True)
                ):
                    break
                carry = finer
            signature = found._signature(repeat.num_carries)
            if not runs or runs[-1][2] != signature:
                runs.append((i, carry, signature))
        self.numbers |= {
            id(v): self._renumbered(id(v), x) for v, x in zip(node.outputs, carry, strict=True)
        }
        stops = [*(first for first, *_ in runs[1:]), repeat.count]
        self.segments[id(node)] = [
            _Segment(first, stop - first, body(entering, (self._over(n[first:stop]) for n in data)))
            for (first, entering, _), stop in zip(runs, stops, strict=True)
        ]

    def _renumbered(self, key: Hashable, *numbers: np.ndarray) -> np.ndarray:
        """New numbers for entries that differ in any of these, perhaps another analysis's."""
        entries = zip(*(n.ravel().tolist() for n in numbers), strict=True)
        return np.array([self._number(key, entry) for entry in entries]).reshape(numbers[0].shape)

    def _pattern(self, numbers: np.ndarray) -> Pattern:
        order: dict[int, int] = {}
        constants = self.constants
        return tuple(
            ("=", constants[n]) if n in constants else order.setdefault(n, len(order))
            for n in numbers.ravel().tolist()
        )

    def _over(self, numbers: np.ndarray) -> np.ndarray:
        """One number (...) for each column of numbers (iterations, ...)."""
        columns = numbers.reshape(len(numbers), -1).T.tolist()
        found = [
            column[0] if len(set(column)) == 1 else self._number(*column) for column in columns
        ]
        return np.array(found).reshape(numbers.shape[1:])

    def _signature(self, num_carries: int) -> Hashable:
        """Key of a segment's iterations: equal entries of carried and heavy values."""
        carries = list(self.graph.inputs.values())[:num_carries]
        heavy = (v for node in self.graph.nodes if node.op in HEAVY for v in node.outputs)
        return tuple(self.where(v) for v in (*carries, *heavy))

    def _needed(self) -> dict[int, set[int]]:
        needed: dict[int, set[int]] = {}

        def read(v: Value, entries: Iterable[int]) -> None:
            needed.setdefault(id(v), set()).update(entries if BATCH in v.type.axes else {0})

        for v in self.graph.outputs.values():
            read(v, range(_size(v)))
        for node in reversed(self.graph.nodes):
            entries = set().union(*(needed.get(id(v), ()) for v in node.outputs))
            if not entries:
                continue
            if id(node) in self.same:
                read(node.inputs[self.same[id(node)]], entries)
            elif id(node) in self.kept:
                read(node.inputs[0], entries & set(range(self.kept[id(node)])))
            else:
                for v in node.inputs:
                    read(v, entries if id(node) in self.by_entry else range(_size(v)))
        return needed

    def _computed(self) -> dict[int, set[int]]:
        """Light work is computed wherever its operands are, so that it reads them as they lie."""
        found = {
            id(v): set(range(_size(v)))
            for v in (*self.graph.inputs.values(), *self.graph.params.values())
        }
        for node in self.graph.nodes:
            operands = [found[id(v)] for v in node.inputs if BATCH in v.type.axes]
            for v in node.outputs:
                found[id(v)] = set(range(_size(v)))
                if id(node) in self.by_entry:
                    light = set() if node.op in HEAVY else found[id(v)].intersection(*operands)
                    found[id(v)] = light | self.needed.get(id(v), set())
        return found


# --- the graph without what is equal --------------------------------------------------------------


class _Writer:
    """Writes a new graph with one entry for each class of equal ones.

    held: by id of a value of the old graph, the one that holds its entries, and by entry, where.
    same: values that are others. entered: the inputs of a body as it reads them, by value, entries
    and whether they lack the batch.
    """

    def __init__(self, out: Graph, found: _Analysis):
        self.out, self.found = out, found
        self.held: dict[int, tuple[Value, Sequence[int]]] = {}
        self.same: dict[int, Value] = {}
        self.entered: dict[tuple[int, tuple[int, ...], bool], Value] = {}
        self._gathered: dict[tuple[int, tuple[int, ...], bool], Value] = {}

    def write(self, node: Node) -> None:
        found, result = self.found, node.outputs[0]
        if not any(found.needed.get(id(v)) for v in node.outputs):
            return
        if id(node) in found.same:
            self.same[id(result)] = node.inputs[found.same[id(node)]]
        elif id(node) in found.segments:
            sources = node.inputs
            for segment in found.segments[id(node)]:
                self._segment(node, segment, sources)
                sources = node.outputs
        elif id(node) in found.kept:
            leaders = found.leaders(result)
            kept = [b for b in leaders if b < found.kept[id(node)]]
            zeros = {BATCH: (0, len(leaders) - len(kept))}
            padded = emit(self.out, "pad", self.read(node.inputs[0], kept), mode="zeros", **zeros)
            self.held[id(result)] = padded, found.where(result)
        elif id(node) in found.by_entry:
            entries = [found.leaders(v) for v in node.outputs] * (
                len(node.inputs) // len(node.outputs)
            )
            bare = self._bare(node, entries[0])
            operands = [self.read(v, entries[i], i in bare) for i, v in enumerate(node.inputs)]
            self._emit(node, operands, map(found.where, node.outputs))
        else:
            whole = [range(_size(v)) for v in node.outputs]
            self._emit(node, [self.read(v, range(_size(v))) for v in node.inputs], whole)

    def _emit(self, node: Node, operands: Sequence[Value], where: Iterable[Sequence[int]]) -> None:
        if node.op == "repeat":
            results: Any = tuple(self.out.fresh(v.type) for v in node.outputs)
            self.out.nodes.append(replace(node, inputs=tuple(operands), outputs=results))
        else:
            results = emit(self.out, node.op, *operands, **node.attrs)
        results = results if isinstance(results, tuple) else (results,)
        held = zip(node.outputs, results, where, strict=True)
        self.held |= {id(v): (result, at) for v, result, at in held}

    def _bare(self, node: Node, entries: Sequence[int]) -> set[int]:
        """Operands that are one for all these entries and can do without the batch; one that gives
        the result its axes keeps it."""
        if len(entries) == 1:
            return set()
        leaders = [self.found.leader(v) for v in node.inputs]
        may = [i for i in BROADCAST.get(node.op, ()) if i < len(leaders) and leaders[i]]
        found = {i for i in may if len({leaders[i][b] for b in entries}) == 1}
        whole = [
            i
            for i, v in enumerate(node.inputs)
            if len(v.type.axes) == len(node.outputs[0].type.axes)
        ]
        return found - set(whole[:1]) if found.issuperset(whole) else found

    def read(self, v: Value, entries: Sequence[int] = (), bare: bool = False) -> Value:
        """These entries of `v`, in this order; bare: the first of them, without the batch."""
        if id(v) in self.same:
            return self.read(self.same[id(v)], entries, bare)
        if BATCH not in v.type.axes:
            # an input or a parameter is the same value
            return self.held[id(v)][0] if id(v) in self.held else v
        leader = self.found.leader(v)
        wanted = tuple(leader[b] for b in (entries[:1] if bare else entries))
        if id(v) not in self.held and self.found.is_body:
            type = _without_batch(v.type) if bare else v.type.resized(BATCH, len(wanted))
            return self.entered.setdefault((id(v), wanted, bare), Value(v.name, type))
        value, where = self.held.get(id(v), (v, range(_size(v))))
        key = id(value), tuple(where[b] for b in wanted), bare
        if key not in self._gathered:
            self._gathered[key] = self._gather(value, *key[1:])
        return self._gathered[key]

    def _gather(self, value: Value, where: tuple[int, ...], bare: bool) -> Value:
        if bare:
            return emit(self.out, "at", value, axis=BATCH, index=where[0])
        if where == tuple(range(_size(value))):
            return value
        if len(where) > 1 and len(set(where)) == 1:
            after = value.type.axes[value.type.axes.index(BATCH) + 1 :]
            before = after[0] if after else None
            one = self._gather(value, where, True)
            return emit(self.out, "expand", one, axis=BATCH, size=len(where), before=before)
        runs = [
            [n for _, n in run]
            for _, run in itertools.groupby(enumerate(where), lambda pair: pair[1] - pair[0])
        ]
        parts = [
            emit(self.out, "slice", value, axis=BATCH, start=run[0], stop=run[-1] + 1)
            for run in runs
        ]
        return parts[0] if len(parts) == 1 else emit(self.out, "concat", *parts, axis=BATCH)

    def _segment(self, node: Node, segment: _Segment, sources: Sequence[Value]) -> None:
        """One of the repeats that `node` becomes; it carries `sources`."""
        repeat, found = node.repeat, segment.found
        body = replace(
            repeat.body, inputs={}, nodes=[], params=dict(repeat.body.params), outputs={}
        )
        writer = _Writer(body, found)
        carry, invariant, data = repeat.divide(
            list(zip(repeat.body.inputs.values(), node.inputs, strict=True))
        )
        operands: list[Value] = []
        num_invariants = 0

        def enter(v: Value, value: Value) -> None:
            body.inputs[v.name if v.name not in body.inputs else f"{v.name}_{len(body.inputs)}"] = v
            operands.append(value)

        for (v, _), source in zip(carry, sources[: len(carry)], strict=True):
            value = self.read(source, found.leaders(v))
            own = Value(v.name, value.type)
            writer.held[id(v)] = own, found.where(v)
            enter(own, value)
        for inside in repeat.body.nodes:
            writer.write(inside)
        ends = zip(repeat.body.outputs.values(), carry, strict=True)
        results = [writer.read(end, found.leaders(v)) for end, (v, _) in ends]
        body.outputs = dict(zip(repeat.body.outputs, results, strict=True))
        used = {id(v) for inside in body.nodes for v in inside.inputs} | {id(v) for v in results}
        for group in (invariant, data):
            for v, source in group:
                entered = [
                    (own, *key[1:]) for key, own in writer.entered.items() if key[0] == id(v)
                ]
                for own, entries, bare in entered or [(v, (), False)] * (id(v) in used):
                    value = self.read(source, entries, bare)
                    if group is data and segment.count < repeat.count:
                        stop = segment.first + segment.count
                        value = emit(
                            self.out,
                            "slice",
                            value,
                            axis=repeat.axis,
                            start=segment.first,
                            stop=stop,
                        )
                    enter(own, value)
            num_invariants += len(operands) * (group is invariant)
        first = repeat.first + segment.first
        plan = Repeat(
            body, segment.count, len(carry), num_invariants - len(carry), repeat.axis, first
        )
        made = tuple(self.out.fresh(v.type) for v in results)
        self.out.nodes.append(
            Node("repeat", tuple(operands), made, {"count": plan.count}, {"repeat": plan})
        )
        for v, value, (own, _) in zip(node.outputs, made, carry, strict=True):
            self.held[id(v)] = value, found.where(own)


def _without_batch(type: Type) -> Type:
    i = type.axes.index(BATCH)
    return type.replaced(i, i + 1, {})
