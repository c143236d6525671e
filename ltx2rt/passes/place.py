"""place: from named axes and a profile's rules to the graph of one device, every communication a
node.

Requires a legal graph without collectives. Ensures a legal graph with the same inputs and outputs
(whole on every device), local shapes in between, and no communication but its collective nodes.

Weights (`heads`, `ff`): a linear with its first output axis split is column-parallel and gathers
nothing. With its contracted axis split it leaves a partial sum: `all_reduce`, then the bias, once.
An RMSNorm over split axes adds up one float32 per token. Everything that no rule reaches stays
replicated, and so does a size that does not divide, unless `strict`.

Tokens (Ulysses): what a repeat reads that has a split token axis enters cut and every device keeps
its tokens. Around self-attention one `all_to_all` trades tokens for heads and one trades them back;
a stream that is whole attends to the keys of a cut one in parts, a long one gathers the few keys of
another. Tokens that do not divide are padded at the end; where a device has all keys it leaves the
padding out, where it has a part it masks it.

Batch (`B`, the guidance branches): enters a repeat cut as tokens do; no op mixes samples, so
nothing is communicated until the output projection gathers them. Slabs of a decoder stay where they
are, inputs and outputs too; `swap_edges` brings the neighbours' columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ltx2rt.errors import GraphError, InputError
from ltx2rt.graph.ir import Graph, Layout, Node, Repeat, Type, Value
from ltx2rt.graph.trace import emit
from ltx2rt.graph.verify import verify

# Ops that treat every axis alike: a split axis passes through, operands that hold it whole are cut
# first.
POINTWISE = {
    "exp", "log", "sqrt", "square", "sin", "tanh", "sigmoid", "silu", "gelu", "add", "sub", "mul",
    "div", "affine",
    "clamp", "leaky_relu", "cast", "select", "modulate", "rope", "transpose", "stack",
}  # fmt: skip
TOKENS, BATCH, SLABS = ("tokens", "audio_tokens"), "B", "slabs"
MOVED = (*TOKENS, BATCH, SLABS)  # axes that move between devices instead of being a weight's
KEYS = {"keys": "tokens", "audio_keys": "audio_tokens"}  # names of key tokens of a bias
MASKED = -1e30  # added to the score of a padded key


Rules = Mapping[str, str]  # axis -> mesh axis


@dataclass(frozen=True)
class Placed:
    """A value of the new graph, and its split axes with the mesh axis of each."""

    value: Value
    splits: Rules = field(default_factory=dict)


def shared_key_head(axis: str, size: int) -> bool:
    """The one key head of all query heads, which every device holds whole."""
    return axis == "kv_heads" and size == 1


def place(graph: Graph, rules: Rules, mesh: Mapping[str, int], strict: bool = False) -> Graph:
    """rules: axis -> mesh axis; `mesh` is in the order of the devices, the last axis fastest. A
    graph in which no rule meets an axis of several devices is returned as it is. strict: an axis of
    the rules that does not divide is an InputError, not replicated. Branches always are."""
    mesh = {axis: size for axis, size in mesh.items() if size > 1}
    if mesh.keys().isdisjoint(rules.values()):
        return graph
    result = Graph(graph.name, mesh=mesh)
    placer = _Placer(result, rules, mesh, strict, outermost=True)
    env = {v: placer.entered(name, v) for name, v in graph.inputs.items()}
    placer.nodes(graph, env)
    result.outputs = {name: placer.left(env[v]) for name, v in graph.outputs.items()}
    return verify(result)


class _Placer:
    def __init__(
        self, out: Graph, rules: Rules, mesh: Mapping[str, int], strict: bool, outermost: bool
    ):
        self.out, self.rules, self.mesh = out, rules, mesh
        self.strict, self.outermost = strict, outermost
        self.blocked: set[str] = set()
        # by token axis that is padded: its size without the padding
        self.lengths: dict[str, int] = {}
        # by the same (keys): 0, and MASKED where tokens are padding
        self.padding: dict[str, Value] = {}

    def nodes(self, graph: Graph, env: dict[Value, Placed]) -> None:
        """Rewrite the nodes of one graph in order; `env` maps its values to placed ones."""
        self.blocked = self._undividable(graph)
        for name, v in graph.params.items():
            # declared in the result when a node decides its layout
            env[v] = Placed(Value(name, v.type))
        for node in graph.nodes:
            operands = [env[v] for v in node.inputs]
            results = HANDLERS.get(node.op, _Placer._other)(self, node, operands)
            env |= zip(node.outputs, results, strict=True)

    def _undividable(self, graph: Graph) -> set[str]:
        """Axes of the rules that some linear of this graph has in a size that does not divide.

        Query heads need their key heads on the same device, so if one of the two kinds stays whole,
        both do.
        """
        found: set[str] = set()
        for node in graph.nodes:
            if node.op != "linear":
                continue
            for axis, size in node.attrs["out"].items():
                parts = self._parts(axis)
                if size % parts and not shared_key_head(axis, size):
                    if self.strict:
                        raise InputError(
                            f"{graph.name}: {axis}={size} does not divide over "
                            f"{self.rules[axis]}={parts}; choose a divisor of {size}"
                        )
                    found.add(axis)
        return found | ({"heads", "kv_heads"} if found & {"heads", "kv_heads"} else set())

    def _parts(self, axis: str) -> int:
        return self.mesh.get(self.rules.get(axis, ""), 1)

    def divides(self, axis: str, size: int) -> bool:
        """Whether the rules split a weight's axis of this size here."""
        parts, free = self._parts(axis), axis not in MOVED and axis not in self.blocked
        return free and parts > 1 and not size % parts

    def entered(self, name: str, v: Value) -> Placed:
        """A graph's input. Of slabs, which are its first axis, each device is given its own."""
        parts, splits = self._parts(SLABS), {}
        if v.type.axes[0] == SLABS and v.type.shape[0] == parts > 1:
            v, splits = Value(name, v.type.resized(SLABS, 1)), {SLABS: self.rules[SLABS]}
        self.out.inputs[name] = v
        return Placed(v, splits)

    def left(self, placed: Placed) -> Value:
        """A graph's output: whole on every device, or slabs, of which each device has its own."""
        slabs = placed.value.type.axes[0] == SLABS and set(placed.splits) == {SLABS}
        return placed.value if slabs else self.whole(placed)

    # --- moving between layouts -------------------------------------------------------------------

    def whole(self, placed: Placed) -> Value:
        """The value whole on every device: gathers tokens and samples, refuses other axes."""
        for axis in placed.splits:
            if axis not in MOVED:
                v = placed.value
                raise GraphError(
                    f"{self.out.name}: {v.name}: {v.type} is split over {axis} where it must be "
                    "whole"
                )
            placed = self.gathered(placed, axis)
        return self._declared(placed)

    def gathered(self, placed: Placed, axis: str) -> Placed:
        """`placed` with the split `axis` whole on every device."""
        splits = dict(placed.splits)
        mesh_axis = splits.pop(axis)
        over = {"axis": axis, "mesh_axis": mesh_axis, "parts": self.mesh[mesh_axis]}
        return Placed(emit(self.out, "all_gather", placed.value, **over), splits)

    def cut(self, placed: Placed, axis: str, mesh_axis: str | None = None) -> Placed:
        """`placed` with `axis` split; a device takes its slice of the value that it holds."""
        if axis in placed.splits or axis not in placed.value.type.axes:
            return placed
        mesh_axis = mesh_axis or self.rules[axis]
        parts = self.mesh[mesh_axis]
        value = self._declared(placed)
        size = value.type.size(axis)
        missing = -size % parts
        if missing and axis == BATCH:
            raise InputError(
                f"{self.out.name}: {size} branches do not divide over {mesh_axis}={parts}; choose "
                f"a divisor of {size}"
            )
        if missing and axis in TOKENS:
            value = emit(self.out, "pad", value, mode="zeros", **{axis: (0, missing)})
        value = emit(self.out, "shard", value, axis=axis, mesh_axis=mesh_axis, parts=parts)
        return Placed(value, {**placed.splits, axis: mesh_axis})

    def _declared(self, placed: Placed) -> Value:
        """The value itself; a parameter is declared whole on first use."""
        v = placed.value
        if not v.name.startswith("%") and v.name not in self.out.inputs:
            return self.out.parameter(v.name, v.type)
        return v

    def _param(self, v: Value, dim: int, parts: int, mesh_axis: str) -> Value:
        """A parameter of which each device holds one slice along `dim`."""
        self.out.layouts[v.name] = Layout(((v.name, v.type.shape),), ((dim, mesh_axis, parts),))
        own = {v.type.axes[dim]: v.type.shape[dim] // parts}
        return self.out.parameter(v.name, v.type.replaced(dim, dim + 1, own))

    # --- ops --------------------------------------------------------------------------------------

    def _linear(self, node: Node, operands: list[Placed]) -> list[Placed]:
        x, weight, *bias = operands
        contract, out = node.attrs["contract"], dict(node.attrs["out"])
        first = next(iter(out))
        kept = {axis: mesh_axis for axis, mesh_axis in x.splits.items() if axis not in contract}
        contracted = [axis for axis in contract if axis in x.splits]
        if contracted:
            if contracted != [contract[0]]:
                raise GraphError(
                    f"{weight.value.name}: contracts {contract}, split over {contracted}, not the "
                    "first"
                )
            mesh_axis = x.splits[contract[0]]
            w = self._param(weight.value, 1, self.mesh[mesh_axis], mesh_axis)
            partial = emit(self.out, "linear", x.value, w, contract=contract, out=out)
            (y,) = emit(self.out, "all_reduce", partial, mesh_axis=mesh_axis)
            if bias:
                if len(out) > 1:
                    raise GraphError(
                        f"{weight.value.name}: a row-parallel linear with a bias over {tuple(out)}"
                    )
                y = emit(self.out, "add", y, self._declared(bias[0]))
            return [Placed(y, kept)]
        if self.divides(first, out[first]):
            parts, mesh_axis = self._parts(first), self.rules[first]
            w, *b = (self._param(p.value, 0, parts, mesh_axis) for p in (weight, *bias))
            local = out | {first: out[first] // parts}
            y = emit(self.out, "linear", self._declared(x), w, *b, contract=contract, out=local)
            return [Placed(y, {**kept, first: mesh_axis})]
        params = [self._declared(p) for p in (weight, *bias)]
        y = Placed(emit(self.out, "linear", self._declared(x), *params, **node.attrs), kept)
        narrows = math.prod(out.values()) <= weight.value.type.shape[1]
        # Tokens and samples come together where the network is narrow, at its output projection.
        together = self.outermost and narrows and kept.keys() & {*TOKENS, BATCH}
        return [Placed(self.whole(y)) if together else y]

    def _sum(self, node: Node, operands: list[Placed]) -> list[Placed]:
        """Over heads that are split: every device adds up its own, then all of them."""
        (x,), over = operands, node.attrs["over"]
        split = next((axis for axis in over if axis in x.splits and axis not in MOVED), None)
        if split is None:
            return self._other(node, operands)
        local = emit(self.out, "sum", x.value, over=over)
        (total,) = emit(self.out, "all_reduce", local, mesh_axis=x.splits[split])
        return [Placed(total, {axis: m for axis, m in x.splits.items() if axis not in over})]

    def _rms_norm(self, node: Node, operands: list[Placed]) -> list[Placed]:
        x, *weight = operands
        over, eps = node.attrs["over"], node.attrs["eps"]
        split = next((axis for axis in over if axis in x.splits), None)
        if split is None:
            inputs = [self._declared(p) for p in operands]
            return [Placed(emit(self.out, "rms_norm", *inputs, **node.attrs), x.splits)]
        mesh_axis = x.splits[split]
        parts = self.mesh[mesh_axis]
        count = parts * math.prod(map(x.value.type.size, over))
        local = emit(self.out, "sum_squares", x.value, over=over)
        (total,) = emit(self.out, "all_reduce", local, mesh_axis=mesh_axis)
        w = [self._param(p.value, 0, parts, mesh_axis) for p in weight]
        how = {"over": over, "count": count, "eps": eps}
        return [Placed(emit(self.out, "rms_scale", x.value, total, *w, **how), x.splits)]

    def _pointwise(self, node: Node, operands: list[Placed]) -> list[Placed]:
        splits = {axis: mesh_axis for p in operands for axis, mesh_axis in p.splits.items()}
        for axis, mesh_axis in splits.items():
            operands = [self.cut(p, axis, mesh_axis) for p in operands]
        inputs = [self._declared(p) for p in operands]
        return [Placed(emit(self.out, node.op, *inputs, **node.attrs), splits)]

    def _rename(self, node: Node, operands: list[Placed]) -> list[Placed]:
        (x,), names = operands, node.attrs["names"]
        value = emit(self.out, "rename", self._declared(x), names=names)
        return [Placed(value, {names.get(axis, axis): over for axis, over in x.splits.items()})]

    def _split(self, node: Node, operands: list[Placed]) -> list[Placed]:
        """Give each device its slab where an axis becomes slabs."""
        (x,), axis, into = operands, node.attrs["axis"], dict(node.attrs["into"])
        parts = self._parts(SLABS)
        if not (next(iter(into)) == SLABS and into[SLABS] == parts > 1):
            return self._other(node, operands)
        x = self.cut(x, axis, self.rules[SLABS])
        splits = {SLABS if a == axis else a: m for a, m in x.splits.items()}
        return [Placed(emit(self.out, "split", x.value, axis=axis, into=into | {SLABS: 1}), splits)]

    def _halo(self, node: Node, operands: list[Placed]) -> list[Placed]:
        (x,), axis, size = operands, node.attrs["axis"], node.attrs["size"]
        if SLABS not in x.splits:
            return self._other(node, operands)
        ends = {"start": 0, "stop": size}, {"start": x.value.type.size(axis) - size}
        edges = (emit(self.out, "slice", x.value, axis=axis, **end) for end in ends)
        over = {"mesh_axis": x.splits[SLABS], "parts": self.mesh[x.splits[SLABS]]}
        before, after = emit(self.out, "swap_edges", *edges, axis=axis, **over)
        return [Placed(emit(self.out, "concat", before, x.value, after, axis=axis), x.splits)]

    def _attention(self, node: Node, operands: list[Placed]) -> list[Placed]:
        """Each device attends with its heads; split keys are traded for heads, or parts joined."""
        batch = operands[0].value.type.axes[0]
        if any(batch in p.splits for p in operands):
            operands = [self.cut(p, batch) for p in operands]
        q, k, v, *bias = operands
        head_axes = (q.value.type.axes[2], k.value.type.axes[2])
        for p, axis in ((q, head_axes[0]), (k, head_axes[1]), (v, head_axes[1])):
            heads = p.splits.get(axis)
            if heads is not None:
                q, k, v = (
                    t if shared_key_head(a, t.value.type.size(a)) else self.cut(t, a, heads)
                    for t, a in zip((q, k, v), (head_axes[0], *head_axes[1:] * 2), strict=True)
                )
        queries, keys = q.value.type.axes[1], k.value.type.axes[1]
        mesh_axis = k.splits.get(keys)
        if mesh_axis is None:
            inputs = [self._declared(p) for p in (q, k, v, *bias)]
            return [Placed(emit(self.out, node.op, *inputs, **node.attrs), q.splits)]
        tokens = KEYS.get(keys, keys)  # a bias renames its keys
        if queries not in q.splits:
            return [Placed(self._shared(node, [q, k, v], bias, mesh_axis, tokens), q.splits)]
        num_queries, num_keys = q.value.type.shape[1], k.value.type.shape[1]
        # all k and v are fewer bytes than a share of q, k, v and result
        if self.mesh[mesh_axis] * num_keys < num_queries + num_keys:
            there = [self._declared(q), *(self.gathered(p, keys).value for p in (k, v))]
            return [Placed(self._attend(node, there, bias, tokens), q.splits)]
        return [Placed(self._traded(node, [q, k, v], bias, mesh_axis, tokens), q.splits)]

    def _attend(self, node: Node, operands: list[Value], bias: list[Placed], tokens: str) -> Value:
        """Attention to all keys but the padding of the axis `tokens`; with a bias its
        queries are without it too. bias: the operands behind v."""
        q, *kv = operands
        axis, size = q.type.axes[1], q.type.shape[1]
        if tokens in self.lengths:
            stop = self.lengths[tokens]
            kv = [emit(self.out, "slice", x, axis=x.type.axes[1], stop=stop) for x in kv]
            if bias and axis in bias[0].value.type.axes:
                q = emit(self.out, "slice", q, axis=axis, stop=stop)
        y = emit(self.out, node.op, q, *kv, *(self._declared(b) for b in bias), **node.attrs)
        missing = size - y.type.size(axis)
        return emit(self.out, "pad", y, **{axis: (0, missing)}) if missing else y

    def _traded(
        self, node: Node, qkv: list[Placed], bias: list[Placed], mesh_axis: str, tokens: str
    ) -> Value:
        """Queries and keys are split: a device gets all tokens of some heads, and returns them."""
        parts = self.mesh[mesh_axis]
        for p in qkv[:2]:
            axis, size = p.value.type.axes[2], p.value.type.shape[2]
            if size % parts:
                raise InputError(
                    f"--mesh: {mesh_axis}={parts} does not divide the {size} {axis} that a device of "
                    f"{self.out.name} has; choose a divisor of {size}, such as "
                    f"{mesh_axis}={math.gcd(size, parts)}"
                )
        trade = {"mesh_axis": mesh_axis, "parts": parts}
        sent = [p.value for p in qkv]
        there = emit(self.out, "all_to_all", *sent, split=2, concat=1, **trade)
        y = self._attend(node, list(there), bias, tokens)
        (y,) = emit(self.out, "all_to_all", y, split=1, concat=2, **trade)
        return y

    def _shared(
        self, node: Node, qkv: list[Placed], bias: list[Placed], mesh_axis: str, tokens: str
    ) -> Value:
        """Only keys are split: every device attends to its own, and the results are joined."""
        if bias:
            raise GraphError(
                f"{self.out.name}: attention with a bias of whole queries to split keys"
            )
        parts = self.mesh[mesh_axis]
        operands = [self._declared(p) for p in qkv]
        over = {"mesh_axis": mesh_axis, "parts": parts}
        if (padding := self.padding.get(tokens)) is not None:
            for i, x in enumerate(operands[1:], 1):
                operands[i] = emit(self.out, "rename", x, names={x.type.axes[1]: "keys"})
            operands.append(emit(self.out, "shard", padding, axis="keys", **over))
        y = emit(self.out, "attention_part", *operands, **node.attrs)
        y = emit(self.out, "expand", y, axis="parts", size=1, before=y.type.axes[0])
        y = emit(self.out, "all_gather", y, axis="parts", **over)
        return emit(self.out, "attention_join", y)

    def _other(self, node: Node, operands: list[Placed]) -> list[Placed]:
        """Ops whose attributes name axes or sizes: legal while they do not touch the split axes.
        Outside a repeat tokens and samples are gathered for an op that does not."""
        named = set()
        for value in node.attrs.values():
            named |= set(value) if isinstance(value, (tuple, dict)) else {value}
        for axis in MOVED if self.outermost else ():
            if axis in named:
                operands = [self.gathered(p, axis) if axis in p.splits else p for p in operands]
        splits = {axis: mesh_axis for p in operands for axis, mesh_axis in p.splits.items()}
        if splits.keys() & named:
            raise GraphError(
                f"{self.out.name}: {node.op} ({dict(node.attrs)}) of a value split over "
                f"{set(splits)}"
            )
        inputs = [self._declared(p) for p in operands]
        return [Placed(emit(self.out, node.op, *inputs, **node.attrs), splits)]

    def _repeat(self, node: Node, operands: list[Placed]) -> list[Placed]:
        """Place the body separately. Split values enter cut, so that no iteration cuts them."""
        repeat, body = node.repeat, Graph(node.repeat.body.name, mesh=self.mesh)
        inner = _Placer(body, self.rules, self.mesh, self.strict, outermost=False)
        inner.blocked = inner._undividable(repeat.body)
        entering, lengths = self._entering(inner, repeat, operands)
        pairs = list(zip(repeat.body.inputs.items(), entering, strict=True))
        carry, invariant, data = repeat.divide(pairs)
        env, inputs = {}, []

        def enter(name: str, v: Value, placed: Placed, type: Type) -> None:
            body.inputs[name] = local = Value(name, type)
            env[v] = Placed(local, placed.splits)
            inputs.append(self._declared(placed))

        for (name, v), placed in (*carry, *invariant):
            enter(name, v, placed, placed.value.type)
        for axis, size in lengths.items():
            if size % self._parts(axis):
                inputs.append(self._padding_mask(axis, size))
                name = f"{axis}_padding"
                body.inputs[name] = inner.padding[axis] = Value(name, inputs[-1].type)
                inner.lengths[axis] = size
        for (name, v), placed in data:
            enter(name, v, placed, placed.value.type.unstacked())
        inner.nodes(repeat.body, env)
        body.outputs = {}
        results = []
        for i, (name, v) in enumerate(repeat.body.outputs.items()):
            result = env[v]
            if i < repeat.num_carries:
                for axis, mesh_axis in entering[i].splits.items():
                    result = inner.cut(result, axis, mesh_axis)
                body.outputs[name] = inner._declared(result)
                results.append(Placed(self.out.fresh(entering[i].value.type), entering[i].splits))
            else:
                body.outputs[name] = inner.whole(result)
                results.append(Placed(self.out.fresh(node.outputs[i].type)))
        num_invariants = repeat.num_invariants + len(inner.padding)
        args = {"repeat": replace(repeat, body=body, num_invariants=num_invariants)}
        made = tuple(p.value for p in results)
        self.out.nodes.append(Node("repeat", tuple(inputs), made, node.attrs, args))
        return [self._unpadded(p, v.type) for p, v in zip(results, node.outputs, strict=True)]

    def _entering(
        self, inner: _Placer, repeat: Repeat, operands: list[Placed]
    ) -> tuple[list[Placed], dict[str, int]]:
        """The operands as they enter the body, which `inner` places, and the number of tokens along
        each of the axes that are cut because they move."""
        entering = list(operands)
        lengths: dict[str, int] = {}
        for i, v in enumerate(repeat.body.inputs.values()):
            for axis, size in v.type.sizes.items():
                # Self-attention's bias stays whole: where it is added, a device has the queries of
                # all tokens.
                free = axis == BATCH or KEYS.keys().isdisjoint(v.type.axes)
                moves = axis in MOVED and self._parts(axis) > 1 and free
                if moves or (i >= repeat.num_carries and inner.divides(axis, size)):
                    lengths |= {axis: size} if moves and axis in TOKENS else {}
                    entering[i] = self.cut(entering[i], axis)
        return entering, lengths

    def _unpadded(self, placed: Placed, type: Type) -> Placed:
        """A result of a repeat with padded tokens, made whole and without the padding."""
        for axis in TOKENS:
            if axis in placed.splits and type.size(axis) % self._parts(axis):
                placed = self.gathered(placed, axis)
                value = emit(self.out, "slice", placed.value, axis=axis, stop=type.size(axis))
                placed = replace(placed, value=value)
        return placed

    def _padding_mask(self, axis: str, size: int) -> Value:
        """float32 (keys): 0 on the first `size` keys, MASKED on the padding after them."""
        ones = emit(self.out, "full", value=1.0, dtype="float32", keys=size)
        padded = emit(self.out, "pad", ones, mode="zeros", keys=(0, -size % self._parts(axis)))
        return emit(self.out, "affine", padded, scale=-MASKED, offset=MASKED)


HANDLERS = dict.fromkeys(POINTWISE, _Placer._pointwise) | {
    "linear": _Placer._linear,
    "rms_norm": _Placer._rms_norm,
    "sum": _Placer._sum,
    "rename": _Placer._rename,
    "split": _Placer._split,
    "halo": _Placer._halo,
    "attention": _Placer._attention,
    "repeat": _Placer._repeat,
}
