"""place: from named axes and a profile's rules to the graph of one device, every collective a node.

Requires a legal graph without collectives. Ensures a legal graph with the same inputs and outputs (whole on every
device), local shapes in between, and no communication but its `all_reduce` nodes.

A linear whose first output axis is split is column-parallel and gathers nothing. One whose contracted axis is split
leaves a partial sum: `all_reduce`, then the bias, once. An RMSNorm over split axes adds up one float32 per token. What
no rule reaches stays replicated, and so does a size that does not divide, unless `strict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ltx2rt.errors import GraphError, InputError
from ltx2rt.graph.ir import Graph, Layout, Node, Repeat, Type, Value
from ltx2rt.graph.verify import verify
from ltx2rt.passes.rewrite import emit, parameter

# Ops that treat every axis alike: a split axis passes through, operands that hold it whole are cut first.
POINTWISE = {
    "exp", "log", "sqrt", "square", "sin", "tanh", "sigmoid", "silu", "gelu", "add", "sub", "mul", "div", "affine",
    "clamp", "leaky_relu", "cast", "select", "modulate", "attention", "rope", "transpose", "stack",
}  # fmt: skip


@dataclass(frozen=True)
class Placed:
    """A value of the new graph, and which of its axes is split (at most one, over one mesh axis)."""

    value: Value
    split: str | None = None


def place(graph: Graph, rules: Mapping[str, str], mesh: Mapping[str, int], strict: bool = False) -> Graph:
    """rules: axis -> mesh axis. strict: an axis of the rules that does not divide is an InputError, not replicated."""
    used = {axis: mesh[axis] for axis in dict.fromkeys(rules.values()) if mesh.get(axis, 1) > 1}
    if len(used) > 1:
        raise InputError(f"placement over {', '.join(used)} at once is not supported; use one of these mesh axes")
    if not used:
        return graph
    result = Graph(graph.name, dict(graph.inputs), mesh=used)
    placer = _Placer(result, rules, used, strict)
    env = {id(v): Placed(v) for v in graph.inputs.values()}
    placer.nodes(graph, env)
    result.outputs = {name: placer.whole(env[id(v)], f"output {name}") for name, v in graph.outputs.items()}
    verify(result)
    return result


class _Placer:
    def __init__(self, out: Graph, rules: Mapping[str, str], mesh: Mapping[str, int], strict: bool):
        self.out, self.rules, self.mesh, self.strict = out, rules, mesh, strict
        self.blocked: set[str] = set()

    def nodes(self, graph: Graph, env: dict[int, Placed]) -> None:
        """Rewrite the nodes of one graph in order; `env` maps its values to placed ones."""
        self.blocked = self._undividable(graph)
        for name, v in graph.params.items():
            env[id(v)] = Placed(Value(name, v.type))  # declared in the result when a node decides its layout
        for node in graph.nodes:
            operands = [env[id(v)] for v in node.inputs]
            handler = getattr(self, f"_{node.op}", None)
            if handler is not None:
                results = handler(node, operands)
            elif node.op in POINTWISE:
                results = [self._pointwise(node, operands)]
            else:
                results = [self._other(node, operands)]
            for v, placed in zip(node.outputs, results, strict=True):
                env[id(v)] = placed

    def _undividable(self, graph: Graph) -> set[str]:
        """Axes of the rules that some linear of this graph has in a size that does not divide.

        Query heads need their key heads on the same device, so if one of the two kinds stays whole, both do.
        """
        found: set[str] = set()
        for node in graph.nodes:
            if node.op != "linear":
                continue
            for axis, size in node.attrs["out"].items():
                parts = self._parts(axis)
                if size % parts:
                    if self.strict:
                        raise InputError(
                            f"{graph.name}: {axis}={size} does not divide over {self.rules[axis]}={parts}; "
                            f"choose a divisor of {size}"
                        )
                    found.add(axis)
        return found | ({"heads", "kv_heads"} if found & {"heads", "kv_heads"} else set())

    def _parts(self, axis: str) -> int:
        return self.mesh.get(self.rules.get(axis, ""), 1)

    def splits(self, axis: str, size: int) -> bool:
        return self._parts(axis) > 1 and axis not in self.blocked and size % self._parts(axis) == 0

    # --- moving between layouts ---------------------------------------------------------------------------------

    def whole(self, placed: Placed, what: str) -> Value:
        if placed.split is not None:
            raise GraphError(f"{self.out.name}: {what} is split over {placed.split}, and nothing gathers it")
        return self._declared(placed)

    def cut(self, placed: Placed, axis: str) -> Placed:
        """`placed` with `axis` split; a device takes its slice of what it already holds."""
        if placed.split == axis or axis not in placed.value.type.axes:
            return placed
        mesh_axis = self.rules[axis]
        value = emit(
            self.out, "shard", self._declared(placed), axis=axis, mesh_axis=mesh_axis, parts=self.mesh[mesh_axis]
        )
        return Placed(value, axis)

    def _declared(self, placed: Placed) -> Value:
        """The value itself; a parameter is declared whole on first use."""
        v = placed.value
        if not v.name.startswith("%") and v.name not in self.out.inputs:
            return parameter(self.out, v.name, v.type)
        return v

    def _param(self, v: Value, dim: int, parts: int, mesh_axis: str) -> Value:
        """A parameter of which each device holds one slice along `dim`."""
        shape = tuple(n // parts if i == dim else n for i, n in enumerate(v.type.shape))
        self.out.layouts[v.name] = Layout(((v.name, v.type.shape),), (dim, mesh_axis, parts))
        return parameter(self.out, v.name, Type(v.type.axes, shape, v.type.dtype))

    # --- ops ----------------------------------------------------------------------------------------------------

    def _linear(self, node: Node, operands: list[Placed]) -> list[Placed]:
        x, weight, *bias = operands
        contract, out = node.attrs["contract"], dict(node.attrs["out"])
        first = next(iter(out))
        if x.split in contract:
            if x.split != contract[0]:
                raise GraphError(
                    f"{weight.value.name}: contracts {contract}, split over {x.split}, which is not the first"
                )
            parts, mesh_axis = self._parts(x.split), self.rules[x.split]
            w = self._param(weight.value, 1, parts, mesh_axis)
            partial = emit(self.out, "linear", x.value, w, contract=contract, out=out)
            (y,) = emit(self.out, "all_reduce", partial, mesh_axis=mesh_axis)
            if bias:
                if len(out) > 1:
                    raise GraphError(f"{weight.value.name}: a row-parallel linear with a bias over {tuple(out)}")
                y = emit(self.out, "add", y, self._declared(bias[0]))
            return [Placed(y)]
        if x.split is None and self.splits(first, out[first]):
            parts, mesh_axis = self._parts(first), self.rules[first]
            w, *b = (self._param(p.value, 0, parts, mesh_axis) for p in (weight, *bias))
            y = emit(
                self.out, "linear", self._declared(x), w, *b, contract=contract, out=out | {first: out[first] // parts}
            )
            return [Placed(y, first)]
        params = [self._declared(p) for p in (weight, *bias)]
        return [Placed(emit(self.out, "linear", self._declared(x), *params, **node.attrs), x.split)]

    def _rms_norm(self, node: Node, operands: list[Placed]) -> list[Placed]:
        x, *weight = operands
        over, eps = node.attrs["over"], node.attrs["eps"]
        if x.split not in over:
            return [self._other(node, operands)]
        parts, mesh_axis = self._parts(x.split), self.rules[x.split]
        count = parts
        for axis in over:
            count *= x.value.type.size(axis)
        local = emit(self.out, "sum_squares", x.value, over=over)
        (total,) = emit(self.out, "all_reduce", local, mesh_axis=mesh_axis)
        w = [self._param(p.value, 0, parts, mesh_axis) for p in weight]
        return [Placed(emit(self.out, "rms_scale", x.value, total, *w, over=over, count=count, eps=eps), x.split)]

    def _pointwise(self, node: Node, operands: list[Placed]) -> Placed:
        split = {p.split for p in operands} - {None}
        if node.op == "attention" and split:  # q is split over heads, k and v over heads or kv_heads
            axes = [p.value.type.axes[2] for p in operands[:3]]
            operands = [self.cut(p, a) for p, a in zip(operands, axes, strict=False)] + operands[3:]
            split = {axes[0]}
        if len(split) > 1:
            raise GraphError(f"{self.out.name}: {node.op} of values split over {', '.join(sorted(map(str, split)))}")
        axis = next(iter(split), None)
        if axis is not None and node.op != "attention":
            operands = [self.cut(p, axis) for p in operands]
        inputs = [self._declared(p) for p in operands]
        return Placed(emit(self.out, node.op, *inputs, **node.attrs), axis)

    def _other(self, node: Node, operands: list[Placed]) -> Placed:
        """Ops whose attributes name axes or sizes: legal while they leave the split axis alone."""
        split = {p.split for p in operands} - {None}
        named = set()
        for value in node.attrs.values():
            named |= set(value) if isinstance(value, (tuple, dict)) else {value}
        if split & named or len(split) > 1:
            raise GraphError(f"{self.out.name}: {node.op} ({dict(node.attrs)}) of a value split over {split}")
        inputs = [self._declared(p) for p in operands]
        return Placed(emit(self.out, node.op, *inputs, **node.attrs), next(iter(split), None))

    def _repeat(self, node: Node, operands: list[Placed]) -> list[Placed]:
        """The body is placed on its own; what enters it and has a split axis enters cut, so no iteration cuts it."""
        plan: Repeat = node.plan["repeat"]
        body = Graph(plan.body.name, mesh=self.mesh)
        inner = _Placer(body, self.rules, self.mesh, self.strict)
        inner.blocked = inner._undividable(plan.body)
        env, inputs = {}, []
        fixed = plan.num_carries + plan.num_invariants
        for i, (name, v) in enumerate(plan.body.inputs.items()):
            placed = operands[i]
            if plan.num_carries <= i < fixed:
                axis = next((a for a, n in v.type.sizes.items() if inner.splits(a, n)), None)
                placed = self.cut(placed, axis) if axis and placed.split is None else placed
                local = Value(name, placed.value.type)
            else:
                self.whole(placed, f"{name} of repeat")
                local = Value(name, v.type)
            body.inputs[name] = local
            env[id(v)] = Placed(local, placed.split)
            inputs.append(self._declared(placed))
        inner.nodes(plan.body, env)
        body.outputs = {name: inner.whole(env[id(v)], f"{name} of repeat") for name, v in plan.body.outputs.items()}
        results = tuple(Value(f"%{next(self.out.serial)}", v.type) for v in node.outputs)
        placed_plan = {"repeat": replace(plan, body=body)}
        self.out.nodes.append(Node("repeat", tuple(inputs), results, node.attrs, placed_plan))
        return [Placed(v) for v in results]
