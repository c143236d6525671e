"""Norms with what scales and shifts them, after a gated residual or not.

`rows` are modulation rows, (scale, shift) pairs, one result for each pair; rows per level instead
of per token (as when an image's tokens have another timestep) are followed by an int32
index, the level of every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ltx2rt.errors import GraphError
from ltx2rt.fused.pattern import Found, Uses, grouped, node_of, one_or_many, pattern
from ltx2rt.graph.ir import Graph, Node, Type, Value
from ltx2rt.graph.ops import OPS, _same_dtype, _view, op


def pairs(rows: Sequence[Any]) -> list[tuple[Any, ...]]:
    """[(scale, shift), ...] of scale, shift, scale, shift, ..."""
    return grouped(rows, 2)


def _row_args(x: Type, rows: Sequence[Type]) -> tuple[tuple[tuple[int, ...], ...], dict[str, Any]]:
    """Views of the rows, and the arguments for the index if one follows them: its view as (B,
    tokens)."""
    *rows, index = (*rows, None) if not rows or rows[-1].dtype != "int32" else rows
    axes, args = x.axes, {}
    if index is not None:
        if len(x.axes) != 3:
            raise GraphError(f"rows by level: {x} is not (B, tokens, D)")
        axes = x.axes[0], "levels", x.axes[2]
        args = {"index_view": _view(index, x.axes[:2], "index")}
    _same_dtype(x, *rows)
    for row in rows:
        if row.axes[-1:] != x.axes[-1:]:
            raise GraphError(f"row {row} does not hold the last axis of {x}")
    return tuple(_view(row, axes, "row") for row in rows), args


def rows_per_token(
    rows: Sequence[Any], views: Sequence[tuple[int, ...]], index_view, take_along: Callable
) -> list[Any]:
    """Modulation rows, arrays of any framework, as they broadcast to x: (B or 1, tokens or 1, D)
    each.

    index_view: of the index behind the rows, if there is one. take_along: the framework's
    take_along_axis.
    """
    shaped = [row.reshape(view) for row, view in zip(rows, views, strict=index_view is None)]
    if index_view is None:
        return shaped
    index = rows[-1].reshape(*index_view, 1)
    return [row if row.shape[1] == 1 else take_along(row, index, 1) for row in shaped]


def _normed(x, rows, eps):
    y = OPS["rms_norm"].numpy(x, dims=(x.ndim - 1,), weight_view=None, eps=eps)
    return [y * (1 + scale) + shift for scale, shift in pairs(rows)]


def _numpy_norm_modulate(x, *rows, views, eps, index_view=None):
    return one_or_many(_normed(x, rows_per_token(rows, views, index_view, np.take_along_axis), eps))


@op(_numpy_norm_modulate)
def norm_modulate(x: Type, *rows: Type, eps: float):
    """RMSNorm without weight over the last axis, then x * (1 + scale) + shift for every pair of
    rows."""
    views, args = _row_args(x, rows)
    if not views or len(views) % 2:
        raise GraphError(f"norm_modulate: {len(views)} rows are no pairs of scale and shift")
    return one_or_many((x,) * (len(views) // 2)), {"views": views, "eps": eps} | args


def _numpy_norm_scale(x, scale, *, views, eps):
    return OPS["rms_norm"].numpy(x, 1 + scale, dims=(x.ndim - 1,), weight_view=views[0], eps=eps)


@op(_numpy_norm_scale)
def norm_scale(x: Type, scale: Type, *, eps: float):
    """RMSNorm over the last axis, times 1 + scale (D), which may be float32 for any x."""
    result, args = OPS["rms_norm"].rule(x, scale, over=x.axes[-1:], eps=eps)
    return result, {"views": (args["weight_view"],), "eps": eps}


def _numpy_residual(x, y, *rows, views, index_view=None, biased=False):
    """x + y * gate, and the rows behind the gate."""
    rows = rows_per_token(rows, views, index_view, np.take_along_axis)
    bias, gate, *rows = rows if biased else (0, *rows)
    y = np.pad(y + bias, [(0, x.shape[0] - y.shape[0]), *[(0, 0)] * (x.ndim - 1)])
    return x + y * gate, rows


def _residual_args(op: str, x: Type, y: Type, rows: Sequence[Type], biased: bool):
    """Checked operands of a residual: the number of rows behind bias and gate, and the
    arguments."""
    if not (x.axes == y.axes and x.dtype == y.dtype and x.shape[1:] == y.shape[1:]):
        raise GraphError(f"{op}: {x} and {y} differ")
    if x.shape[0] < y.shape[0]:
        raise GraphError(f"{op}: {y} has more samples than {x}")
    views, args = _row_args(x, rows)
    args = {"views": views} | args | ({"biased": True} if biased else {})
    return len(views) - 1 - biased, args


@op(lambda *operands, **plan: _numpy_residual(*operands, **plan)[0])
def gated_residual(x: Type, y: Type, *rows: Type, biased: bool = False):
    """x + y * gate; biased: x + (y + bias) * gate. Samples at the end that y lacks are x's.

    rows: the bias if there is one, the gate, and the index if it is by level.
    """
    others, args = _residual_args("gated_residual", x, y, rows, biased)
    if others:
        raise GraphError(f"gated_residual: {others + 1} gates, expected 1")
    return x, args


def _numpy_residual_norm_modulate(*operands, eps, **plan):
    x, rows = _numpy_residual(*operands, **plan)
    return [x, *_normed(x, rows or (0, 0), eps)]


@op(_numpy_residual_norm_modulate)
def residual_norm_modulate(x: Type, y: Type, *rows: Type, eps: float, biased: bool = False):
    """gated_residual, and its RMSNorm modulated by every pair of rows; without pairs, the RMSNorm
    itself.

    rows: the bias if there is one, the gate, the pairs, and the index if some of them are by level.
    """
    others, args = _residual_args("residual_norm_modulate", x, y, rows, biased)
    if others < 0 or others % 2:
        raise GraphError(f"residual_norm_modulate: {others} rows are no pairs of scale and shift")
    return (x,) * (1 + max(1, others // 2)), args | {"eps": eps}


@pattern
def _norm_modulate(graph: Graph, uses: Uses, node: Node) -> Found | None:
    """rms_norm -> modulate (one or several), after a gated residual if there is one."""
    if node.op != "rms_norm" or len(node.inputs) != 1:
        return None
    x, normed, eps = node.inputs[0], node.outputs[0], node.attrs["eps"]
    if node.attrs["over"] != x.type.axes[-1:]:
        return None
    readers = uses.readers.get(normed, [])
    if not readers and normed not in uses.kept:
        return None
    modulated = normed not in uses.kept and all(
        n.op == "modulate" and n.inputs[0] is normed and all(_is_row(v, x) for v in n.inputs[1:])
        for n in readers
    )
    rows = [v for n in readers for v in n.inputs[1:]] if modulated else []
    results = [n.outputs[0] for n in readers] if modulated else [normed]
    gone = [node, *readers] if modulated else [node]
    residual = uses.makers.get(x)
    found = _gated(graph, uses, residual) if residual is not None else None
    if found is not None:
        more, new, (carried, y, *gate) = found
        takes, rows = _by_level(uses, x, [*gate, *rows])
        fused = node_of(
            "residual_norm_modulate", [carried, y, *rows], [x, *results], eps=eps, **_biased(gate)
        )
        return [*more, *gone, *takes], [*new, fused]
    if not rows:
        return None
    takes, rows = _by_level(uses, x, rows)
    return [*gone, *takes], [node_of("norm_modulate", [x, *rows], results, eps=eps)]


@pattern
def _norm_scale(graph: Graph, uses: Uses, node: Node) -> Found | None:
    """rms_norm over the last axis with the weight 1 + scale, as Gemma 3 has it."""
    if node.op != "rms_norm" or len(node.inputs) < 2:
        return None
    x, weight = node.inputs
    plus, eps = uses.only(weight, "affine"), node.attrs["eps"]
    if plus is None or plus.args != {"scale": 1.0, "offset": 1.0}:
        return None
    if node.attrs["over"] != x.type.axes[-1:]:
        return None
    return [plus, node], [node_of("norm_scale", [x, *plus.inputs], node.outputs, eps=eps)]


@pattern
def _gated_residual(graph: Graph, uses: Uses, node: Node) -> Found | None:
    found = _gated(graph, uses, node)
    if found is None:
        return None
    gone, new, (x, y, *gate) = found
    takes, rows = _by_level(uses, x, gate)
    fused = node_of("gated_residual", [x, y, *rows], node.outputs, **_biased(gate))
    return [*gone, *takes], [*new, fused]


def _gated(
    graph: Graph, uses: Uses, node: Node
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
            new.append(node_of("expand", (keep,), (wide,), axis=gate.type.axes[0], size=size))
            keep = wide
        if set(keep.type.axes) <= set(gate.type.axes) or keep is not inner.inputs[1]:
            product = graph.fresh(max(keep.type, gate.type, key=lambda type: len(type.axes)))
            new.append(node_of("mul", (keep, gate), (product,)))
            gone, gate = [*gone, inner], product
    if y.type != x.type or not _is_row(gate, x):
        return None
    if (padded := uses.only(y, "pad")) is not None and _pads_samples(padded):
        gone, y = [*gone, padded], padded.inputs[0]
    bias: list[Value] = []
    if (sum_ := uses.only(y, "add")) is not None and sum_.inputs[0].type == y.type:
        total, row = sum_.inputs
        summed = uses.makers.get(total)
        if (summed is None or summed.op == "all_reduce") and row.type.axes == y.type.axes[
            -1:
        ]:  # None: `rotate`'s
            gone, y, bias = [*gone, sum_], total, [row]
    return gone, new, [x, y, *bias, gate]


def _pads_samples(node: Node) -> bool:
    """Whether a `pad` adds zeros behind the last sample of (B, tokens, D), and nothing else."""
    (before, _), *others = node.args["widths"]
    return node.args["mode"] == "zeros" and not before and others == [(0, 0)] * 2


def _by_level(uses: Uses, x: Value, rows: Sequence[Value]) -> tuple[list[Node], list[Value]]:
    """The nodes that spread `rows` to x's tokens by one index, which a kernel does itself, and
    [rows..., index] before.

    Nothing goes if the rows have several indices or some are per token without one.
    """
    if len(x.type.axes) != 3:
        return [], list(rows)
    by_level = (x.type.axes[0], "levels", x.type.axes[-1])
    takes = {}
    for v in rows:
        take = uses.only(v, "take")
        if take is not None and take.attrs["axis"] == "levels":
            takes |= {v: take} if set(take.inputs[0].type.axes) <= set(by_level) else {}
    per_token = [v for v in rows if x.type.axes[1] in v.type.axes and v not in takes]
    indices = {index for take in takes.values() for index in take.inputs[1:]}
    if len(indices) != 1 or per_token:
        return [], list(rows)
    before = [takes[v].inputs[0] if v in takes else v for v in rows]
    return list(takes.values()), [*before, *indices]


def _is_row(row: Value, x: Value) -> bool:
    """Whether `row` holds the whole last axis of x for some or all of its leading axes."""
    leading = iter(x.type.axes)
    return row.type.axes[-1:] == x.type.axes[-1:] and all(a in leading for a in row.type.axes)


def _biased(gate: Sequence[Value]) -> dict[str, bool]:
    return {"biased": True} if len(gate) == 2 else {}
