"""fuse: neighbouring ops that one kernel can do become one node.

Requires a legal graph, placed or not. Ensures the same inputs, outputs, parameters and
communication, and the same values but for fewer roundings: norm and modulation (after a gated
residual or not, with rows per sample, per token or per level), norm and a weight 1 + w, norm and
RoPE of q and k together, of those first that turn by the same tables (also the placed form, given
the reduced sums of squares; without RoPE with the copies of what several samples attend to), a
linear layer and its GELU, the per-head gate and what it chooses from, GELU or that gate and the
float8 linear behind it, the VAE's norm and SiLU, a convolution and the zeros around it, the
vocoder's SnakeBeta. Then two nodes of one kernel that do not need each other, such as those of
video and of sound, become one launch. Which values meet is decided here; whether a kernel or the
plain ops run them, by the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from ltx2rt.graph.ir import Graph, Node, Type, Value, rewrite
from ltx2rt.graph.ops import COLLECTIVES, OPS
from ltx2rt.graph.trace import trace
from ltx2rt.graph.verify import verify
from ltx2rt.models.vocoder import SNAKE_EPS, snake_beta


def fuse(graph: Graph, matches: Sequence[Match] = ()) -> Graph:
    """`graph` with fused ops, bodies of repeats included. matches: those of MATCHES to look for;
    none: all."""
    result = replace(
        graph, nodes=[rewrite(node, lambda body: fuse(body, matches)) for node in graph.nodes]
    )
    uses = _Uses(result)
    for match in matches or MATCHES:
        for node in list(result.nodes):
            found = match(result, uses, node) if id(node) in uses.nodes else None
            if found is not None and _is_convex(uses, *found):
                late = _substitute(result.nodes, *found)
                uses.substitute(*found, late)
    verify(result)
    return result


class _Uses:
    """Who makes and who reads each value of one graph."""

    def __init__(self, graph: Graph):
        self.nodes: set[int] = set()
        self.makers: dict[int, Node] = {}
        self.readers: dict[int, list[Node]] = {}
        self.kept = {id(v) for v in graph.outputs.values()}
        self.order = {
            id(node): i for i, node in enumerate(graph.nodes)
        }  # a reader's number is never less than a maker's
        for node in graph.nodes:
            self._add(node)

    def _add(self, node: Node) -> None:
        self.nodes.add(id(node))
        self.makers |= {id(v): node for v in node.outputs}
        for v in node.inputs:
            self.readers.setdefault(id(v), []).append(node)

    def substitute(self, gone: Sequence[Node], new: Sequence[Node], late: Sequence[Node]) -> None:
        """`new` for `gone`, with `late` behind them."""
        last = max(self.order[id(node)] for node in gone)
        self.order |= {id(node): last for node in (*new, *late)}
        for node in gone:
            self.nodes.remove(id(node))
            for v in node.outputs:
                del self.makers[id(v)]
            for v in node.inputs:
                self.readers[id(v)].remove(node)
        for node in new:
            self._add(node)

    def maker(self, value: Value, op: str) -> Node | None:
        """The node that makes `value`, if it is an `op`."""
        node = self.makers.get(id(value))
        return node if node is not None and node.op == op else None

    def only(self, value: Value, op: str) -> Node | None:
        """The node that makes `value`, if it is an `op` and only one operand of one node reads the
        value."""
        single = len(self.readers.get(id(value), ())) == 1 and id(value) not in self.kept
        return self.maker(value, op) if single else None

    def depends(self, value: Value, on: set[int]) -> bool:
        """Whether a result of the nodes `on` goes into `value`."""
        stack, seen = [value], set()
        first = min(self.order[node] for node in on)
        while stack:
            node = self.makers.get(id(stack.pop()))
            if node is None or id(node) in seen or self.order[id(node)] < first:
                continue
            if id(node) in on:
                return True
            seen.add(id(node))
            stack += node.inputs
        return False


Found = tuple[Sequence[Node], Sequence[Node]]  # the nodes that go, and those that take their place
Match = Callable[[Graph, _Uses, Node], Found | None]


def _node(op: str, inputs: Sequence[Value], outputs: Sequence[Value], **attrs) -> Node:
    _, args = OPS[op].rule(*(v.type for v in inputs), **attrs)
    return Node(op, tuple(inputs), tuple(outputs), attrs, args)


# --- what is recognised: each function gets the last node it needs to see, or the one in the middle


def _gated(
    graph: Graph, uses: _Uses, node: Node
) -> tuple[list[Node], list[Node], list[Value]] | None:
    """add(x, mul(y, gate)): the nodes that go, those the gate needs, and x, y, the bias if there is
    one, gate.

    mul(mul(y, keep), gate) is y times keep * gate: both are small, and a keep of 0 or 1 makes no
    rounding. Samples that pad y are left out, and the bias that follows an all-reduce is added with
    the rest.
    """
    if node.op != "add":
        return None
    x, delta = node.inputs
    scaled = uses.only(delta, "mul")
    if scaled is None or x.type != delta.type:
        return None
    y, gate = scaled.inputs
    gone, new = [node, scaled], []
    inner = uses.only(y, "mul")
    if inner is not None and inner.inputs[1].type.axes == x.type.axes[:1] and _is_row(gate, x):
        y, keep = inner.inputs
        if gate.type.axes == x.type.axes[-1:]:
            size = gate.type.shape[0]
            wide = graph.fresh(
                Type((*keep.type.axes, *gate.type.axes), (*keep.type.shape, size), gate.type.dtype)
            )
            new.append(_node("expand", (keep,), (wide,), axis=gate.type.axes[0], size=size))
            keep = wide
        if set(keep.type.axes) <= set(gate.type.axes) or keep is not inner.inputs[1]:
            product = graph.fresh(max(keep.type, gate.type, key=lambda type: len(type.axes)))
            new.append(_node("mul", (keep, gate), (product,)))
            gone, gate = [*gone, inner], product
    if y.type != x.type or not _is_row(gate, x):
        return None
    if (padded := uses.only(y, "pad")) is not None and _pads_samples(padded):
        gone, y = [*gone, padded], padded.inputs[0]
    bias: list[Value] = []
    if (sum_ := uses.only(y, "add")) is not None and sum_.inputs[0].type == y.type:
        total, row = sum_.inputs
        summed = uses.makers.get(id(total))
        if (summed is None or summed.op == "all_reduce") and row.type.axes == y.type.axes[
            -1:
        ]:  # None: `rotate`'s
            gone, y, bias = [*gone, sum_], total, [row]
    return gone, new, [x, y, *bias, gate]


def _pads_samples(node: Node) -> bool:
    """Whether a `pad` adds zeros behind the last sample of (B, tokens, D), and nothing else."""
    (first, *others) = node.args["widths"]
    return (
        node.args["mode"] == "zeros"
        and first[0] == 0
        and len(others) == 2
        and not any(map(any, others))
    )


def _by_level(uses: _Uses, x: Value, rows: Sequence[Value]) -> tuple[list[Node], list[Value]]:
    """The nodes that spread `rows` to x's tokens by one index, which a kernel does itself, and
    [rows..., index] before.

    Nothing goes if the rows have several indices or some are per token without one.
    """
    if len(x.type.axes) != 3:
        return [], list(rows)
    by_level = (x.type.axes[0], "levels", x.type.axes[-1])
    takes = {
        id(v): take
        for v in rows
        if (take := uses.only(v, "take")) is not None
        and take.attrs["axis"] == "levels"
        and set(take.inputs[0].type.axes) <= set(by_level)
    }
    per_token = [v for v in rows if x.type.axes[1] in v.type.axes and id(v) not in takes]
    indices = {id(index): index for take in takes.values() for index in take.inputs[1:]}
    if len(indices) != 1 or per_token:
        return [], list(rows)
    return list(takes.values()), [
        *(takes[id(v)].inputs[0] if id(v) in takes else v for v in rows),
        *indices.values(),
    ]


def _is_row(row: Value, x: Value) -> bool:
    """Whether `row` holds the whole last axis of x for some or all of its leading axes."""
    leading = iter(x.type.axes)
    return row.type.axes[-1:] == x.type.axes[-1:] and all(a in leading for a in row.type.axes)


def _norm_modulate(graph: Graph, uses: _Uses, node: Node) -> Found | None:
    """rms_norm -> modulate (one or several), after a gated residual if there is one."""
    if node.op != "rms_norm" or len(node.inputs) != 1:
        return None
    x, normed, eps = node.inputs[0], node.outputs[0], node.attrs["eps"]
    if node.attrs["over"] != x.type.axes[-1:]:
        return None
    readers = uses.readers.get(id(normed), [])
    if not readers and id(normed) not in uses.kept:
        return None
    modulated = id(normed) not in uses.kept and all(
        n.op == "modulate" and n.inputs[0] is normed and all(_is_row(v, x) for v in n.inputs[1:])
        for n in readers
    )
    rows = [v for n in readers for v in n.inputs[1:]] if modulated else []
    results = [n.outputs[0] for n in readers] if modulated else [normed]
    gone = [node, *readers] if modulated else [node]
    residual = uses.makers.get(id(x))
    found = _gated(graph, uses, residual) if residual is not None else None
    if found is not None:
        more, new, (carried, y, *gate) = found
        takes, rows = _by_level(uses, x, [*gate, *rows])
        fused = _node(
            "residual_norm_modulate", [carried, y, *rows], [x, *results], eps=eps, **_biased(gate)
        )
        return [*more, *gone, *takes], [*new, fused]
    takes, rows = _by_level(uses, x, rows)
    return (
        ([*gone, *takes], [_node("norm_modulate", [x, *rows], results, eps=eps)]) if rows else None
    )


def _norm_scale(graph: Graph, uses: _Uses, node: Node) -> Found | None:
    """rms_norm over the last axis with the weight 1 + scale, as Gemma 3 has it."""
    if (
        node.op != "rms_norm"
        or len(node.inputs) < 2
        or node.attrs["over"] != node.inputs[0].type.axes[-1:]
    ):
        return None
    x, weight = node.inputs
    plus = uses.only(weight, "affine")
    if plus is None or plus.args != {"scale": 1.0, "offset": 1.0}:
        return None
    return [plus, node], [
        _node("norm_scale", [x, *plus.inputs], node.outputs, eps=node.attrs["eps"])
    ]


def _gated_residual(graph: Graph, uses: _Uses, node: Node) -> Found | None:
    found = _gated(graph, uses, node)
    if found is None:
        return None
    gone, new, (x, y, *gate) = found
    takes, rows = _by_level(uses, x, gate)
    return [*gone, *takes], [
        *new,
        _node("gated_residual", [x, y, *rows], node.outputs, **_biased(gate)),
    ]


def _biased(gate: Sequence[Value]) -> dict[str, bool]:
    return {"biased": True} if len(gate) == 2 else {}


def _qk_norm_rope(graph: Graph, uses: _Uses, node: Node) -> Found | None:
    """rope of rms_norm or rms_scale over all heads, with a weight."""
    if node.op != "rope":
        return None
    x, *tables = node.inputs
    for op, fused, operands in (("rms_norm", "qk_norm_rope", 2), ("rms_scale", "qk_scale_rope", 3)):
        norm = uses.only(x, op)
        if (
            norm is not None
            and len(norm.inputs) == operands
            and tuple(norm.attrs["over"]) == x.type.axes[-2:]
        ):
            attrs = {key: value for key, value in norm.attrs.items() if key != "over"}
            return [norm, node], [_node(fused, [*norm.inputs, *tables], node.outputs, **attrs)]
    return None


def _qk_norm(graph: Graph, uses: _Uses, node: Node) -> Found | None:
    """rms_norm or rms_scale over all heads, with a weight, where no RoPE follows."""
    fused, operands = {"rms_norm": ("qk_norm", 2), "rms_scale": ("qk_scale", 3)}.get(
        node.op, ("", 0)
    )
    if len(node.inputs) != operands or not fused:
        return None
    x, *_ = node.inputs
    if len(x.type.axes) != 4 or tuple(node.attrs["over"]) != x.type.axes[-2:]:
        return None
    attrs = {key: value for key, value in node.attrs.items() if key != "over"}
    return [node], [_node(fused, node.inputs, node.outputs, **attrs)]


def _same_tables(graph: Graph, uses: _Uses, node: Node) -> Found | None:
    """Two of the same tokens that turn by the same tables: q and k of a self-attention; of two
    attentions between streams, the one's q and the other's k."""
    if not _turns_alone(node):
        return None
    for other in graph.nodes[graph.nodes.index(node) + 1 :]:
        if _turns_alone(other) and other.op == node.op and other.attrs == node.attrs:
            tables = zip(node.inputs[-2:], other.inputs[-2:], strict=True)
            if other.outputs[0].type == node.outputs[0].type and all(a is b for a, b in tables):
                inputs, outputs = (*node.inputs, *other.inputs), (*node.outputs, *other.outputs)
                return [node, other], [_node(node.op, inputs, outputs, **node.attrs)]
    return None


def _turns_alone(node: Node) -> bool:
    return node.op in ("qk_norm_rope", "qk_scale_rope") and len(node.outputs) == 1


def _qk_pair(graph: Graph, uses: _Uses, node: Node) -> Found | None:
    """q and k of one attention, or of the exchange in front of it: one launch for both."""
    if node.op not in ("attention", "attention_part", "all_to_all"):
        return None
    found = []
    for v in node.inputs:
        maker = uses.makers.get(id(v))
        while maker is not None and maker.op in ("rename", "at", "expand", "slice", "concat"):
            maker = uses.makers.get(id(maker.inputs[0]))
        if maker is not None and maker.op in NORMED and len(maker.outputs) == 1:
            found.append(maker)
    if (
        len(found) != 2
        or found[0] is found[1]
        or found[0].op != found[1].op
        or found[0].attrs != found[1].attrs
    ):
        return None
    q, k = found
    if len({x.outputs[0].type.shape[2:] for x in found}) > 1:
        return None
    return found, [_node(q.op, [*q.inputs, *k.inputs], [*q.outputs, *k.outputs], **q.attrs)]


def _spread(graph: Graph, uses: _Uses, node: Node) -> Found | None:
    """Keys and values of a few contexts, copied for every sample that reads them: the keys' norm
    writes them so."""
    if node.op not in ("attention", "attention_part"):
        return None
    keys, values = (_gathered(uses, v) for v in node.inputs[1:3])
    if keys is None or values is None or keys[1] != values[1]:
        return None
    (k, where, gone), (v, _, others) = keys, values
    norm = uses.makers.get(id(k))
    if (
        norm is None
        or norm.op not in ("qk_norm", "qk_scale")
        or len(norm.outputs) < 2
        or norm.outputs[1] is not k
    ):
        return None
    if (
        v.type != k.type
        or len(where) > SPREAD
        or {id(reader) for reader in uses.readers[id(k)]} - set(map(id, gone))
    ):
        return None
    outputs = (norm.outputs[0], *node.inputs[1:3])
    return [*gone, *others, norm], [
        _node(norm.op, [*norm.inputs, v], outputs, **norm.attrs, spread=where)
    ]


SPREAD = 8  # samples at most; the kernel gets theirs in 4 bits each


def _gathered(uses: _Uses, value: Value) -> tuple[Value, tuple[int, ...], list[Node]] | None:
    """The value that `value` is samples of, which ones, and the nodes that pick and join them."""
    joined = uses.only(value, "concat")
    if joined is None or joined.args["dim"] != 0:
        return None
    slices = [uses.only(v, "slice") for v in joined.inputs]
    if any(s is None or s.args["dim"] != 0 or s.args["step"] != 1 for s in slices):
        return None
    found = [s for s in slices if s is not None]
    if len({id(s.inputs[0]) for s in found}) > 1:
        return None
    where = tuple(i for s in found for i in range(s.args["start"], s.args["stop"]))
    return found[0].inputs[0], where, [joined, *found]


NORMED = ("qk_norm_rope", "qk_scale_rope", "qk_norm", "qk_scale")


def _linear_gelu(graph: Graph, uses: _Uses, node: Node) -> Found | None:
    linear = uses.only(node.inputs[0], "linear") if node.op == "gelu" else None
    if linear is None or len(linear.inputs) < 3:
        return None
    return [linear, node], [_node("linear_gelu", linear.inputs, node.outputs, **linear.attrs)]


def _gelu_float8(graph: Graph, uses: _Uses, node: Node) -> Found | None:
    """The GELU in front of a float8 linear, which reads its operand row by row anyway."""
    gelu = uses.only(node.inputs[0], "gelu") if node.op == "linear_float8" else None
    if gelu is None:
        return None
    inputs = (*gelu.inputs, *node.inputs[1:])
    return [gelu, node], [_node("gelu_linear_float8", inputs, node.outputs, **node.attrs)]


def _head_gate(graph: Graph, uses: _Uses, node: Node) -> Found | None:
    """y * 2 sigmoid(logits), y of some samples chosen from other values or not."""
    if node.op != "mul":
        return None
    y, gate = node.inputs
    doubled = uses.only(gate, "affine")
    if (
        doubled is None
        or doubled.args != {"scale": 2.0, "offset": 0.0}
        or gate.type.axes != y.type.axes[:-1]
    ):
        return None
    sigmoid = uses.only(doubled.inputs[0], "sigmoid")
    if sigmoid is None or gate.type.shape != y.type.shape[:-1]:
        return None
    gone, inputs = [sigmoid, doubled, node], [y, *sigmoid.inputs]
    if (chosen := uses.only(y, "select")) is not None:
        keep, kept, other = chosen.inputs
        if keep.type.axes == y.type.axes[:1] and kept.type == other.type == y.type:
            gone, inputs = [chosen, *gone], [kept, *sigmoid.inputs, keep, other]
    return gone, [_node("head_gate", inputs, node.outputs)]


def _head_gate_float8(graph: Graph, uses: _Uses, node: Node) -> Found | None:
    """The gate in front of a float8 linear that reads all heads of a token."""
    gate = uses.only(node.inputs[0], "head_gate") if node.op == "linear_float8" else None
    if gate is None or tuple(node.attrs["contract"]) != gate.outputs[0].type.axes[-2:]:
        return None
    inputs = (*gate.inputs, *node.inputs[1:])
    return [gate, node], [_node("head_gate_linear_float8", inputs, node.outputs, **node.attrs)]


def _pixel_norm_silu(graph: Graph, uses: _Uses, node: Node) -> Found | None:
    norm = uses.only(node.inputs[0], "rms_norm") if node.op == "silu" else None
    if norm is None or len(norm.inputs) > 1 or len(norm.attrs["over"]) > 1:
        return None
    attrs = {"over": norm.attrs["over"][0], "eps": norm.attrs["eps"]}
    return [norm, node], [_node("pixel_norm_silu", norm.inputs, node.outputs, **attrs)]


def _padded_conv(graph: Graph, uses: _Uses, node: Node) -> Found | None:
    """A convolution and the zeros around what it reads, as many on either side."""
    pad = uses.only(node.inputs[0], "pad") if node.op == "conv" else None
    if pad is None or pad.args["mode"] != "zeros":
        return None
    batch, channels, *spatial = pad.args["widths"]
    if any(batch + channels) or any(before != behind for before, behind in spatial):
        return None
    inputs, padding = (*pad.inputs, *node.inputs[1:]), tuple(before for before, _ in spatial)
    return [pad, node], [_node("padded_conv", inputs, node.outputs, padding=padding, **node.attrs)]


def joined_pair(graph: Graph, uses: _Uses, node: Node) -> Found | None:
    """The next node of the same kernel that does not need this one: mostly the other stream's. None
    from behind an exchange, which would not leave, or not travel unseen, while this one waits for
    the other's operands."""
    if node.op not in JOINED:
        return None
    own = {id(node)}
    for other in graph.nodes[graph.nodes.index(node) + 1 :]:
        if other.op in COLLECTIVES:
            return None
        if JOINED.get(other.op) == JOINED[node.op] and not any(
            uses.depends(v, own) for v in other.inputs
        ):
            parts = tuple((n.op, len(n.inputs), n.attrs) for n in (node, other))
            inputs, outputs = (*node.inputs, *other.inputs), (*node.outputs, *other.outputs)
            return [node, other], [_node("together", inputs, outputs, parts=parts)]
    return None


ROWS = ("modulate", "norm_modulate", "norm_scale", "gated_residual", "residual_norm_modulate")
JOINED = dict.fromkeys(ROWS, "rows") | {
    "head_gate": "head_gate"
}  # op -> the kernel that does two in one launch


@cache
def _snake_pattern(x: Type) -> Graph:
    return trace("snake", lambda o: {"y": snake_beta(o, o.input("x", **x.sizes))}, x.dtype)


def snakes(graph: Graph, uses: _Uses, node: Node) -> Found | None:
    """The SnakeBeta that the model text itself writes for a value of this type."""
    result = node.outputs[0]
    if node.op != "merge" or result.type.axes != ("B", "channels", "time"):
        return None
    pattern = _snake_pattern(result.type)
    found = _unified(uses, pattern, result)
    if found is None:
        return None
    gone, bound = found
    names = ("upsample.filter", "downsample.lowpass.filter", "act.alpha", "act.beta")
    operands = [
        bound[id(v)] for v in (pattern.inputs["x"], *(pattern.params[name] for name in names))
    ]
    return gone, [_node("snake_beta", operands, node.outputs, eps=SNAKE_EPS)]


def _unified(
    uses: _Uses, pattern: Graph, result: Value
) -> tuple[list[Node], dict[int, Value]] | None:
    """The nodes that make `result` as `pattern` makes its one output, and the value that each of
    its values is here.

    None if they do not, or if something else reads a value in between.
    """
    makers = {id(v): node for node in pattern.nodes for v in node.outputs}
    (output,) = pattern.outputs.values()
    bound: dict[int, Value] = {}
    nodes: list[Node] = []
    waiting = [(output, result)]
    while waiting:
        wanted, value = waiting.pop()
        if bound.setdefault(id(wanted), value) is not value or wanted.type != value.type:
            return None
        maker, node = makers.get(id(wanted)), uses.makers.get(id(value))
        if maker is None or any(node is n for n in nodes):
            continue
        if (
            node is None
            or node.op != maker.op
            or node.attrs != maker.attrs
            or len(node.inputs) != len(maker.inputs)
        ):
            return None
        nodes.append(node)
        waiting += zip(maker.inputs, node.inputs, strict=True)
    inside = {id(node) for node in nodes}
    between = [v for node in nodes for v in node.outputs if v is not result]
    if any(
        id(v) in uses.kept or any(id(n) not in inside for n in uses.readers[id(v)]) for v in between
    ):
        return None
    return nodes, bound


MATCHES: tuple[Match, ...] = (
    _norm_modulate, _norm_scale, _gated_residual, _qk_norm_rope, _qk_norm, _same_tables, _qk_pair, _spread,
    _linear_gelu, _gelu_float8, _head_gate, _head_gate_float8, _pixel_norm_silu, _padded_conv, snakes, joined_pair,
)  # fmt: skip


# --- putting it in --------------------------------------------------------------------------------


def _is_convex(uses: _Uses, gone: Sequence[Node], new: Sequence[Node]) -> bool:
    """Whether no operand of the new nodes is made from a result of those that go."""
    made = {id(v) for node in new for v in node.outputs}
    old = {id(node) for node in gone}
    return not any(uses.depends(v, old) for node in new for v in node.inputs if id(v) not in made)


def _substitute(nodes: list[Node], gone: Sequence[Node], new: Sequence[Node]) -> list[Node]:
    """`new` where the last of `gone` stood; what stands before it and reads one of them moves down,
    behind it: which nodes these are."""
    old = set(map(id, gone))
    places = sorted(map(nodes.index, gone))
    before: list[Node] = []
    behind: list[Node] = []
    late = {id(v) for node in gone for v in node.outputs}
    for node in nodes[places[0] : places[-1]]:
        if id(node) in old:
            continue
        if late.isdisjoint(map(id, node.inputs)):
            before.append(node)
        else:
            behind.append(node)
            late.update(map(id, node.outputs))
    nodes[places[0] : places[-1] + 1] = [*before, *new, *behind]
    return behind
