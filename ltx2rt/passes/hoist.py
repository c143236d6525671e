"""hoist: move repeated work out of a repeat (loop-invariant code motion).

Requires a legal graph, placed or not, not yet packed. Ensures the same values. Three things leave a
repeat:

- nodes that depend only on its invariants and parameters move in front of it: RoPE tables,
  projected captions;
- inside a repeat within its body, nodes that do not depend on the outer iteration move into another
  repeat in front of the outer one, their results stacked: the keys and values of a prompt that no
  timestep modulates;
- chains that depend only on per-iteration data and end in a linear run once for all iterations,
  with the iterations' axis in front: AdaLN's modulation rows of all known sigmas.

Views and casts of a parameter or a mask cost little and stay, unless what needs them moves; a cast
of prompts moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ltx2rt.graph.ir import Graph, Node, Repeat, Replaced, Value
from ltx2rt.graph.trace import emit
from ltx2rt.graph.verify import verify

# operands of a repeat: the body's name for it, its value there, the operand
Entries = list[tuple[str, Value, Value]]
INVARIANT, DATA, CARRIED = range(3)  # a value's strongest dependency
LIGHT = {"full", "at", "slice", "rename", "expand", "cast", "affine", "split", "merge", "transpose",
         "pad", "stack", "concat", "select"}  # fmt: skip
LARGE = 2**20  # elements of a cast that is not light
# Ops that mean the same with one more axis in front of their operands.
BATCHED = {"at", "slice", "cast", "affine", "expand", "split", "merge", "sinusoid", "silu", "add",
           "sub", "mul", "div", "linear"}  # fmt: skip


def hoist(graph: Graph, keep_bytes: int | None = None) -> Graph:
    """`graph` with lighter repeats at its outermost level; repeats inside them also lose nodes.

    keep_bytes: the most that the results of repeats inside them may take once these have left, None
    for any number: what would take more stays."""
    result = replace(graph, nodes=[], params=dict(graph.params), layouts=dict(graph.layouts))
    for node in graph.nodes:
        if node.op == "repeat":
            _Loop(result, node, keep_bytes).leave()
        else:
            result.nodes.append(node)
    return verify(result)


@dataclass
class _Loop:
    """One repeat of `out`, which moves nodes from its body to `out`."""

    out: Graph
    node: Node
    left_bytes: int | None = None  # for results of repeats
    levels: dict[Value, int] = field(default_factory=dict)
    # a body's value -> the same value in `out`
    outer: dict[Value, Value] = field(default_factory=dict)

    def __post_init__(self):
        self.repeat = self.node.repeat
        self.body = self.repeat.body
        self.inputs = list(self.body.inputs.values())
        self.makers = self.body.makers()
        carry, invariant, data = self.repeat.divide(self.inputs)
        for values, level in ((carry, CARRIED), (invariant, INVARIANT), (data, DATA)):
            self.levels |= dict.fromkeys(values, level)
        self.levels |= {
            v: DATA if "*" in name else INVARIANT for name, v in self.body.params.items()
        }
        fixed = list(zip(self.inputs, self.node.inputs, strict=True))[len(carry) :]
        self.outer, self.data = dict(fixed), set(data)

    def leave(self) -> None:
        """Append to `out` what leaves the repeat, and the repeat without it."""
        _spread(self.levels, self.body.nodes)
        moving = self._moving(self.body.nodes, self.levels)
        rows = self._rows(moving)
        kept: list[Node] = []
        for node in self.body.nodes:
            if node in moving:
                self._move(node)
            elif node in rows:
                self._batch(node)
            elif node.op == "repeat" and max(map(self._level, node.inputs)) > INVARIANT:
                kept.append(self._divide(node))
            else:
                kept.append(node)
        self._finish(kept)

    def _level(self, v: Value) -> int:
        return self.levels[v]

    @staticmethod
    def _moving(nodes: list[Node], levels: dict[Value, int]) -> set[Node]:
        """Invariant nodes worth moving: the heavy ones, their inputs, and nodes that use them."""
        found: set[Node] = set()
        values: set[Value] = set()
        own = [n for n in nodes if levels[n.outputs[0]] == INVARIANT]
        for node in own:
            large = node.op == "cast" and node.outputs[0].type.num_elements >= LARGE
            if large or node.op not in LIGHT or not values.isdisjoint(node.inputs):
                found.add(node)
                values.update(node.outputs)
        needed = {v for node in own if node in found for v in node.inputs}
        for node in reversed(own):
            if node not in found and not needed.isdisjoint(node.outputs):
                found.add(node)
                needed.update(node.inputs)
        return found

    def _rows(self, moving: set[Node]) -> set[Node]:
        """Nodes on per-iteration data that lead to a linear through ops that can be batched."""

        def chain(node: Node) -> list[Node] | None:
            """The node and its makers that depend on data; None if one cannot be batched."""
            if node.op not in BATCHED or self._level(node.outputs[0]) == CARRIED:
                return None
            found = [node]
            for v in node.inputs:
                maker = self.makers.get(v)
                if maker is None:
                    if "*" in v.name and v not in self.data:
                        return None
                elif maker not in moving:
                    more = chain(maker)
                    if more is None:
                        return None
                    found += more
            return found

        linears = (node for node in self.body.nodes if node.op == "linear")
        ends = (node for node in linears if self._level(node.outputs[0]) == DATA)
        return {node for end in ends for node in chain(end) or ()}

    def _outside(self, v: Value) -> Value:
        """The invariant `v` of the body as a value of `out`; a parameter is declared there, a light
        node is repeated there."""
        if v not in self.outer and v in self.makers:
            self._move(self.makers[v])
        if v not in self.outer:
            if v.name in self.body.layouts:
                self.out.layouts[v.name] = self.body.layouts[v.name]
            self.outer[v] = self.out.params.setdefault(v.name, v)
        return self.outer[v]

    def _move(self, node: Node) -> None:
        """The node as it is, on the values outside."""
        results = tuple(self.out.fresh(v.type) for v in node.outputs)
        inputs = tuple(map(self._outside, node.inputs))
        self.out.nodes.append(replace(node, inputs=inputs, outputs=results))
        self.outer.update(zip(node.outputs, results, strict=True))

    def _batch(self, node: Node) -> None:
        """The node for all iterations at once."""
        operands = [self._outside(v) for v in node.inputs]
        weights = len(operands) > 1 and node.op == "linear"
        for i, (v, value) in enumerate(zip(node.inputs, operands, strict=True)):
            if v not in self.data and not (weights and i):
                before = value.type.axes[0] if value.type.axes else None
                new = {"axis": self.repeat.axis, "size": self.repeat.count, "before": before}
                operands[i] = emit(self.out, "expand", value, **new)
        result = emit(self.out, node.op, *operands, **node.attrs)
        self.outer[node.outputs[0]] = result
        self.data.add(node.outputs[0])

    def _divide(self, node: Node) -> Node:
        """Move a repeat's nodes that do not depend on the outer iteration to one outside."""
        repeat, inner = node.repeat, node.repeat.body
        entries = list(zip(inner.inputs, inner.inputs.values(), node.inputs, strict=True))
        carry, invariant, data = repeat.divide(entries)
        levels = {v: self._level(operand) for _, v, operand in (*invariant, *data)}
        levels |= {v: CARRIED for _, v, _ in carry}
        levels |= dict.fromkeys(inner.params.values(), INVARIANT)
        _spread(levels, inner.nodes)
        moving = self._moving(inner.nodes, levels)
        if not moving:
            return node
        gone = [n for n in inner.nodes if n in moving]
        left = [n for n in inner.nodes if n not in moving]
        wanted = set(replace(inner, nodes=left).read())
        results = [v for n in gone for v in n.outputs if v in wanted]
        read = {v for n in gone for v in n.inputs}
        if (entering := self._once(node, gone, results, invariant, data)) is None:
            return node
        fixed = [entry for entry in invariant if entry[1] in wanted]
        keep = carry + fixed + [entry for entry in data if entry[1] in wanted]
        entered = _named(results)
        own = {n: v for n, v in inner.params.items() if v in wanted or v not in read}
        rest = _part(inner, [*map(entered.node, left)], own)
        rest.inputs = {name: v for name, v, _ in keep} | {v.name: v for v in entered.values()}
        rest.outputs = entered.outputs(inner)
        operands = (*(operand for _, _, operand in keep), *entering)
        args = {"repeat": replace(repeat, body=rest, num_invariants=len(fixed))}
        return replace(node, inputs=operands, args=args)

    def _once(
        self, node: Node, gone: list[Node], results: list[Value], invariant: Entries, data: Entries
    ) -> list[Value] | None:
        """Add a repeat of the nodes that leave `node` outside; return its results as they enter the
        outer body, or None where `left_bytes` has no room for them."""
        repeat, inner = node.repeat, node.repeat.body
        stacked = [v.type.stacked(repeat.axis, repeat.count) for v in results]
        if self.left_bytes is not None:
            if (size := sum(type.nbytes for type in stacked)) > self.left_bytes:
                return None
            self.left_bytes -= size
        outside = tuple(self.out.fresh(t) for t in stacked)
        # the same values on their way through the outer body
        entering = [Value(v.name, v.type) for v in outside]
        self.outer.update(zip(entering, outside, strict=True))
        read = {v for n in gone for v in n.inputs}
        fixed = [entry for entry in invariant if entry[1] in read]
        taken = fixed + [entry for entry in data if entry[1] in read]
        apart = _part(inner, gone, {n: v for n, v in inner.params.items() if v in read})
        apart.name = f"{inner.name}.once"
        apart.inputs = {name: v for name, v, _ in taken}
        apart.outputs = {f"once_{i}": v for i, v in enumerate(results)}
        operands = tuple(self._outside(operand) for _, _, operand in taken)
        once = {"repeat": Repeat(apart, repeat.count, 0, len(fixed), repeat.axis, repeat.first)}
        self.out.nodes.append(Node("repeat", operands, outside, node.attrs, once))
        return entering

    def _finish(self, kept: list[Node]) -> None:
        """The repeat without the moved nodes; values that it reads enter as invariants or data."""
        body, num_carries = self.body, self.repeat.num_carries
        made = {v for node in kept for v in node.outputs}
        read = dict.fromkeys(replace(body, nodes=kept).read())
        names = {v: n for n, v in body.inputs.items()}
        carries = self.inputs[:num_carries]
        entering = [v for v in self.inputs[num_carries:] if v in read]
        own = {*made, *names, *body.params.values()}
        hoisted = [v for v in read if v not in own]
        invariants = [v for v in entering + hoisted if v not in self.data]
        data = [v for v in entering + hoisted if v in self.data]
        entered = _named(hoisted)
        # What nothing reads stays: every set of weights of a network has the same tensors.
        params = {n: v for n, v in body.params.items() if v in read or v not in self.outer}
        inner = _part(body, [*map(entered.node, kept)], params)
        inside = [entered[v] for v in (*carries, *invariants, *data)]
        inner.inputs = {names.get(v, v.name): v for v in inside}
        inner.outputs = entered.outputs(body)
        outside = (self.outer[v] for v in (*invariants, *data))
        operands = (*self.node.inputs[:num_carries], *outside)
        rest = replace(self.repeat, body=inner, num_invariants=len(invariants))
        self.out.nodes.append(replace(self.node, inputs=operands, args={"repeat": rest}))


def _part(body: Graph, nodes: list[Node], params: dict[str, Value]) -> Graph:
    """The body with only these nodes and parameters."""
    layouts = {name: body.layouts[name] for name in params if name in body.layouts}
    return replace(body, nodes=nodes, params=params, layouts=layouts)


def _spread(levels: dict[Value, int], nodes: list[Node]) -> None:
    """Enter the levels of the nodes' results."""
    for node in nodes:
        level = max((levels[v] for v in node.inputs), default=INVARIANT)
        levels |= dict.fromkeys(node.outputs, level)


def _named(values: list[Value]) -> Replaced:
    """The inputs as which hoisted values enter a body."""
    return Replaced({v: Value(f"hoisted_{i}", v.type) for i, v in enumerate(values)})
