"""Which entries of a guided step's batch are equal, and which are needed: what `share` goes by.

Entries are equal as long as they are made alike from the same. Each has a number, of all those that
are equal the same one, so that two are compared by comparing numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ltx2rt.graph.ir import Graph, Node, Type, Value

BATCH = "B"
# axes along which entries are known to be equal
TRACKED = ("layers", "contexts", "branches", "videos", BATCH)
# ops that are worth a separate repeat
HEAVY = {"linear", "quantised_linear", "attention", "attention_part"}
# a label for each entry of a value, equal for equal entries: a number, ("=", x) for all x
Pattern = tuple[Any, ...]


def num_entries(v: Value) -> int:
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


@dataclass(frozen=True)
class Segment:
    """Iterations [first, first + count) of a repeat, in all of which the same entries are equal."""

    first: int
    count: int
    found: Analysis


class Analysis:
    """Which entries of a graph's values are equal, and which are needed.

    numbers: by value, its entries' along TRACKED axes; two of one number are equal.
    constants: by number. by_entry: the nodes that make every entry of a result from the same
    entry of their operands. same: by node, its operand that is the result; kept: by a node
    that leaves the first entries of its first operand as they are and makes the others 0, how
    many these are. segments: by repeat. needed, computed: by value, its entries
    along the batch that are read, and that there will be.
    """

    def __init__(self, graph: Graph, patterns: Sequence[Pattern] | None = None):
        """patterns: of the inputs, if they have equal entries."""
        self.graph, self.is_body = graph, patterns is not None
        self.numbers: dict[Value, np.ndarray] = {}
        self.constants: dict[int, float] = {}
        self.by_entry: set[Node] = set()
        self.same: dict[Node, int] = {}
        self.kept: dict[Node, int] = {}
        self.segments: dict[Node, list[Segment]] = {}
        self._known: dict[Hashable, int] = {}
        self._leaders: dict[Value, list[int]] = {}
        for i, v in enumerate(graph.inputs.values()):
            shape = tuple(_tracked(v.type).values())
            labels = range(math.prod(shape)) if patterns is None else patterns[i]
            found = [
                self._constant(x[1]) if isinstance(x, tuple) else self._number(v, x) for x in labels
            ]
            self.numbers[v] = np.array(found).reshape(shape)
        self.numbers |= {v: np.array(self._number(v)) for v in graph.params.values()}
        for node in graph.nodes:
            self._repeat(node) if node.op == "repeat" else self._node(node)
        self.needed = self._needed()
        self.computed = self._computed()

    @property
    def saves(self) -> bool:
        """Whether some matrix product or attention is needed for less than the whole batch."""
        heavy = (n.outputs[0] for n in self.graph.nodes if n.op in HEAVY and n in self.by_entry)
        inner = (s.found.saves for segments in self.segments.values() for s in segments)
        return any(len(self.leaders(v)) < num_entries(v) for v in heavy) or any(inner)

    def leaders(self, v: Value) -> list[int]:
        """The first computed entry of each class of equal ones; none without a batch."""
        return sorted(set(self.leader(v)))

    def leader(self, v: Value) -> list[int]:
        """For each entry the first equal one; for an entry that is not computed, any."""
        if BATCH not in v.type.axes:
            return []
        if v not in self._leaders:
            self._leaders[v] = self._leader(v)
        return self._leaders[v]

    def _leader(self, v: Value) -> list[int]:
        numbers = np.moveaxis(self.numbers[v], list(_tracked(v.type)).index(BATCH), 0)
        keys = [tuple(n) for n in numbers.reshape(len(numbers), -1).tolist()]
        first = {keys[b]: b for b in sorted(self.computed[v], reverse=True)}
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
                self.numbers[v] = self._fresh(node, i) if found is None else found
                continue
            entries = zip(*(view.ravel().tolist() for view in views), strict=True)
            found = [self._entry(node, i, entry) for entry in entries]
            self.numbers[v] = np.array(found).reshape(tuple(axes.values()))
            self.by_entry |= {node} if BATCH in axes else set()
        if node.op in ("mul", "select"):
            self._shorten(node)

    def _view(self, v: Value, axes: dict[str, int]) -> np.ndarray | None:
        """The numbers of `v` for each entry of a result with these axes, or None."""
        own, order = _tracked(v.type), iter(axes.items())
        if not all(item in order for item in own.items()):
            return None
        numbers = self.numbers[v].reshape([own.get(a, 1) for a in axes])
        return np.broadcast_to(numbers, tuple(axes.values()))

    def _entry(self, node: Node, i: int, operands: tuple[int, ...]) -> int:
        """The number of an entry of result i, from the numbers of the operands' entries."""
        known = [self.constants.get(n) for n in operands]
        if node.op == "cast" and known[0] in (0, 1):
            return operands[0]
        if node.op == "select" and known[0] is not None:
            return operands[1 if known[0] else 2]
        if node.op == "mul" and known[1] in (0, 1):
            return operands[0 if known[1] else 1]
        return self._number(node, i, operands)

    def _moved(self, node: Node, axes: dict[str, int]) -> np.ndarray | None:
        """Numbers of a result that only moves entries along TRACKED axes, else None."""
        shape, axis = tuple(axes.values()), node.attrs.get("axis")
        if node.op == "full":
            return np.full(shape, self._constant(float(node.attrs["value"])))
        given = [self.numbers[v] for v in node.inputs]
        if node.op in ("split", "merge", "rename") and _named(node) <= {*node.attrs, *TRACKED}:
            return given[0].reshape(shape)
        if axis not in TRACKED:
            return None
        dim = list(axes if axis in axes else _tracked(node.inputs[0].type)).index(axis)
        match node.op:
            case "expand":
                return np.broadcast_to(np.expand_dims(given[0], dim), shape)
            case "slice":
                start, stop, step = (node.args[name] for name in ("start", "stop", "step"))
                return given[0].take(range(start, stop, step), dim)
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
        found = [self._number(node, i, "entry", n) for n in range(math.prod(shape))]
        return np.array(found).reshape(shape)

    def _shorten(self, node: Node) -> None:
        """Find that the result is an operand, or begins as the first one and ends in zeros."""
        result, by = node.outputs[0], node.inputs[0 if node.op == "select" else 1]
        known = [self.constants.get(n, math.nan) for n in self.numbers[by].ravel().tolist()]
        if node.op == "select":
            same = 1 if all(n == 1 for n in known) else 2 if not any(known) else None
        else:
            same = 0 if all(n == 1 for n in known) else None
        if same is not None and node.inputs[same].type == result.type:
            self.same[node] = same
        elif by.type.axes == (BATCH,) and node.inputs[0].type == result.type:
            ones = known.count(1)
            if node.op == "mul" and ones and known == [1.0] * ones + [0.0] * (len(known) - ones):
                self.kept[node] = ones

    def _repeat(self, node: Node) -> None:
        """Number each iteration; consecutive ones with the same equal entries are a segment."""
        repeat = node.repeat
        if repeat.axis not in TRACKED or len(node.outputs) > repeat.num_carries:
            self.numbers |= {v: self._fresh(node, i) for i, v in enumerate(node.outputs)}
            return
        carry, invariant, data = repeat.divide([self.numbers[v] for v in node.inputs])
        made: dict[tuple[Pattern, ...], Analysis] = {}

        def body(carry: Sequence[np.ndarray], data: Iterable[np.ndarray]) -> Analysis:
            patterns = tuple(map(self._pattern, (*carry, *invariant, *data)))
            if patterns not in made:
                made[patterns] = Analysis(repeat.body, patterns)
            return made[patterns]

        # first iteration, its carries, its signature
        runs: list[tuple[int, Sequence[np.ndarray], Hashable]] = []
        carry = [self._renumbered((node, j), x) for j, x in enumerate(carry)]
        for i in range(repeat.count):
            while True:  # until entries differ wherever exits do
                found = body(carry, (n[i] for n in data))
                results = (found.numbers[v] for v in repeat.body.outputs.values())
                pairs = zip(carry, results, strict=True)
                finer = [self._renumbered(node, x, y) for x, y in pairs]
                if [len(np.unique(x)) for x in carry] == [len(np.unique(x)) for x in finer]:
                    break
                carry = finer
            signature = found._signature(repeat.num_carries)
            if not runs or runs[-1][2] != signature:
                runs.append((i, carry, signature))
        self.numbers |= {
            v: self._renumbered(v, x) for v, x in zip(node.outputs, carry, strict=True)
        }
        stops = [*(first for first, *_ in runs[1:]), repeat.count]
        self.segments[node] = [
            Segment(first, stop - first, body(entering, (self._over(n[first:stop]) for n in data)))
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
        found = [x[0] if len(set(x)) == 1 else self._number(*x) for x in columns]
        return np.array(found).reshape(numbers.shape[1:])

    def _signature(self, num_carries: int) -> Hashable:
        """Key of a segment's iterations: equal entries of carried and heavy values."""
        carries = list(self.graph.inputs.values())[:num_carries]
        heavy = (v for node in self.graph.nodes if node.op in HEAVY for v in node.outputs)
        return tuple(self.where(v) for v in (*carries, *heavy))

    def _needed(self) -> dict[Value, set[int]]:
        needed: defaultdict[Value, set[int]] = defaultdict(set)

        def read(v: Value, entries: Iterable[int]) -> None:
            needed[v].update(entries if BATCH in v.type.axes else {0})

        for v in self.graph.outputs.values():
            read(v, range(num_entries(v)))
        for node in reversed(self.graph.nodes):
            entries = set().union(*(needed.get(v, ()) for v in node.outputs))
            if not entries:
                continue
            if node in self.same:
                read(node.inputs[self.same[node]], entries)
            elif node in self.kept:
                read(node.inputs[0], entries & set(range(self.kept[node])))
            else:
                for v in node.inputs:
                    read(v, entries if node in self.by_entry else range(num_entries(v)))
        return needed

    def _computed(self) -> dict[Value, set[int]]:
        """Light work is computed wherever its operands are, so that it reads them as they lie."""
        given = (*self.graph.inputs.values(), *self.graph.params.values())
        found = {v: set(range(num_entries(v))) for v in given}
        for node in self.graph.nodes:
            operands = [found[v] for v in node.inputs if BATCH in v.type.axes]
            for v in node.outputs:
                found[v] = set(range(num_entries(v)))
                if node in self.by_entry:
                    light = set() if node.op in HEAVY else found[v].intersection(*operands)
                    found[v] = light | self.needed.get(v, set())
        return found
