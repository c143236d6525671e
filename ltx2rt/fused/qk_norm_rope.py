"""Norm of q and k over all heads, with RoPE or without.

Also of some of the heads, given the reduced sums of squares; of those first that turn by the same
tables; without RoPE with the copies of what several samples attend to.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ltx2rt.errors import GraphError
from ltx2rt.fused.pattern import Found, Uses, grouped, node_of, one_or_many, pattern
from ltx2rt.graph.ir import Graph, Node, Type, Value
from ltx2rt.graph.ops import OPS, op

NORMS = {"rms_norm": ("qk_norm", 2), "rms_scale": ("qk_scale", 3)}  # operands of each
NORMED = ("qk_norm_rope", "qk_scale_rope", "qk_norm", "qk_scale")
SPREAD = 8  # samples at most; the kernel gets theirs in 4 bits each


def rotated(norm, rope, size, *operands, weight_views, table_views, **args):
    """`norm` over the last two axes, then `rope`, functions of any framework: of x, the norm's
    other operands, cos, sin, `size` at a time."""
    results = []
    groups = zip(grouped(operands, size), weight_views, table_views, strict=True)
    for (x, *others, cos, sin), weight_view, view in groups:
        y = norm(x, *others, dims=(x.ndim - 2, x.ndim - 1), weight_view=weight_view, **args)
        results.append(rope(y, cos, sin, view=view))
    return one_or_many(tuple(results))


def _rotated(norm: str, size: int, operands: Sequence[Type], **attrs: Any):
    """The op `norm` over the last two axes, then RoPE: of x, what else the norm reads, cos, sin,
    `size` at a time."""
    weights, tables = [], []
    for x, *others, cos, sin in grouped(operands, size):
        weights.append(OPS[norm].rule(x, *others, over=x.axes[-2:], **attrs)[1]["weight_view"])
        tables.append(OPS["rope"].rule(x, cos, sin)[1]["view"])
    args = {"weight_views": tuple(weights), "table_views": tuple(tables), **attrs}
    return one_or_many(tuple(operands[::size])), args


@op(partial(rotated, OPS["rms_norm"].numpy, OPS["rope"].numpy, 4))
def qk_norm_rope(*operands: Type, eps: float):
    """RMSNorm over the last two axes (all heads together) with its weight, then RoPE.

    operands: x, weight, cos, sin; once, or for q and then for k. One result for each x.
    """
    return _rotated("rms_norm", 4, operands, eps=eps)


@op(partial(rotated, OPS["rms_scale"].numpy, OPS["rope"].numpy, 5))
def qk_scale_rope(*operands: Type, count: int, eps: float):
    """qk_norm_rope of some of the heads, given the sum of squares over all of them, `count`
    numbers.

    operands: x, sum of squares, weight, cos, sin; once, or for q and then for k. One result for
    each x.
    """
    return _rotated("rms_scale", 5, operands, count=count, eps=eps)


def normed(norm, concat, size, *operands, weight_views, spread=(), **args):
    """`norm` over the last two axes of x, and its other operands, `size` at a time. concat: along
    the first axis."""
    groups = grouped(operands[:-1] if spread else operands, size)
    found = [
        norm(x, *others, dims=(x.ndim - 2, x.ndim - 1), weight_view=view, **args)
        for (x, *others), view in zip(groups, weight_views, strict=True)
    ]
    if spread:
        found[1:] = (concat([x[i : i + 1] for i in spread]) for x in (found[1], operands[-1]))
    return one_or_many(tuple(found))


def _only_normed(
    norm: str, size: int, operands: Sequence[Type], spread: tuple[int, ...], **attrs: Any
):
    if spread:
        *operands, v = operands
        (q, k), args = _only_normed(norm, size, operands, (), **attrs)
        if not (v == k and max(spread) < k.shape[0]):
            raise GraphError(f"{norm}: samples {spread} of {k} and of {v}")
        return (q, *(x.resized(x.axes[0], len(spread)) for x in (k, v))), args | {"spread": spread}
    rules = [
        OPS[norm].rule(x, *others, over=x.axes[-2:], **attrs)
        for x, *others in grouped(operands, size)
    ]
    views = tuple(args["weight_view"] for _, args in rules)
    return one_or_many(tuple(operands[::size])), {"weight_views": views, **attrs}


@op(partial(normed, OPS["rms_norm"].numpy, np.concatenate, 2))
def qk_norm(*operands: Type, eps: float, spread: tuple[int, ...] = ()):
    """qk_norm_rope of an attention without RoPE. operands: x, weight; once, or for q and then for
    k.

    spread: whose keys and values each sample of the result has; v is then the last operand, and a
    result.
    """
    return _only_normed("rms_norm", 2, operands, spread, eps=eps)


@op(partial(normed, OPS["rms_scale"].numpy, np.concatenate, 3))
def qk_scale(*operands: Type, count: int, eps: float, spread: tuple[int, ...] = ()):
    """qk_scale_rope of an attention without RoPE. operands: x, sum of squares, weight; once, or for
    q, then for k. spread: as in qk_norm."""
    return _only_normed("rms_scale", 3, operands, spread, count=count, eps=eps)


@pattern
def _qk_norm_rope(graph: Graph, uses: Uses, node: Node) -> Found | None:
    """rope of rms_norm or rms_scale over all heads, with a weight."""
    if node.op != "rope":
        return None
    x, *tables = node.inputs
    for name, (fused, operands) in NORMS.items():
        norm = uses.only(x, name)
        over_heads = norm is not None and tuple(norm.attrs["over"]) == x.type.axes[-2:]
        if norm is not None and over_heads and len(norm.inputs) == operands:
            inputs = [*norm.inputs, *tables]
            return [norm, node], [node_of(f"{fused}_rope", inputs, node.outputs, **_rest(norm))]
    return None


@pattern
def _qk_norm(graph: Graph, uses: Uses, node: Node) -> Found | None:
    """rms_norm or rms_scale over all heads, with a weight, where no RoPE follows."""
    fused, operands = NORMS.get(node.op, ("", 0))
    if len(node.inputs) != operands or not fused:
        return None
    axes = node.inputs[0].type.axes
    if len(axes) != 4 or tuple(node.attrs["over"]) != axes[-2:]:
        return None
    return [node], [node_of(fused, node.inputs, node.outputs, **_rest(node))]


def _rest(norm: Node) -> dict[str, Any]:
    return {key: value for key, value in norm.attrs.items() if key != "over"}


@pattern
def _same_tables(graph: Graph, uses: Uses, node: Node) -> Found | None:
    """Two of the same tokens that turn by the same tables: q and k of a self-attention; of two
    attentions between streams, the one's q and the other's k."""
    if not _turns_alone(node):
        return None
    for other in graph.nodes[graph.nodes.index(node) + 1 :]:
        if _turns_alone(other) and other.op == node.op and other.attrs == node.attrs:
            tables = zip(node.inputs[-2:], other.inputs[-2:], strict=True)
            if other.outputs[0].type == node.outputs[0].type and all(a is b for a, b in tables):
                inputs, outputs = (*node.inputs, *other.inputs), (*node.outputs, *other.outputs)
                return [node, other], [node_of(node.op, inputs, outputs, **node.attrs)]
    return None


def _turns_alone(node: Node) -> bool:
    return node.op in ("qk_norm_rope", "qk_scale_rope") and len(node.outputs) == 1


@pattern
def _qk_pair(graph: Graph, uses: Uses, node: Node) -> Found | None:
    """q and k of one attention, or of the exchange in front of it: one launch for both."""
    if node.op not in ("attention", "attention_part", "all_to_all"):
        return None
    found = []
    for v in node.inputs:
        maker = uses.makers.get(v)
        while maker is not None and maker.op in ("rename", "at", "expand", "slice", "concat"):
            maker = uses.makers.get(maker.inputs[0])
        if maker is not None and maker.op in NORMED and len(maker.outputs) == 1:
            found.append(maker)
    if len(found) != 2 or found[0] is found[1]:
        return None
    q, k = found
    if (q.op, q.attrs, _heads(q)) != (k.op, k.attrs, _heads(k)):
        return None
    return found, [node_of(q.op, [*q.inputs, *k.inputs], [*q.outputs, *k.outputs], **q.attrs)]


def _heads(norm: Node) -> tuple[int, ...]:
    return norm.outputs[0].type.shape[2:]


@pattern
def _spread(graph: Graph, uses: Uses, node: Node) -> Found | None:
    """Keys and values of a few contexts, copied for every sample that reads them: the keys' norm
    writes them so."""
    if node.op not in ("attention", "attention_part"):
        return None
    keys, values = (_gathered(uses, v) for v in node.inputs[1:3])
    if keys is None or values is None or keys[1] != values[1]:
        return None
    (k, where, gone), (v, _, others) = keys, values
    norm = uses.makers.get(k)
    if norm is None or norm.op not in ("qk_norm", "qk_scale") or k not in norm.outputs[1:]:
        return None
    others_read = set(uses.readers[k]) - set(gone)
    if v.type != k.type or len(where) > SPREAD or others_read:
        return None
    outputs = (norm.outputs[0], *node.inputs[1:3])
    spread = node_of(norm.op, [*norm.inputs, v], outputs, **norm.attrs, spread=where)
    return [*gone, *others, norm], [spread]


def _gathered(uses: Uses, value: Value) -> tuple[Value, tuple[int, ...], list[Node]] | None:
    """The value that `value` is samples of, which ones, and the nodes that pick and join them."""
    joined = uses.only(value, "concat")
    if joined is None or joined.args["dim"] != 0:
        return None
    slices = [uses.only(v, "slice") for v in joined.inputs]
    if any(s is None or s.args["dim"] != 0 or s.args["step"] != 1 for s in slices):
        return None
    found = [s for s in slices if s is not None]
    if len({s.inputs[0] for s in found}) > 1:
        return None
    where = tuple(i for s in found for i in range(s.args["start"], s.args["stop"]))
    return found[0].inputs[0], where, [joined, *found]
