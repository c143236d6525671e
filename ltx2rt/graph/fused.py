"""Ops that are several ops at once: written by the pass `fuse`, never by model text.

Each is defined by the ops it stands for, computed in float32 and rounded once. A backend may have
one kernel for it; otherwise it runs the plain ops. `rows` are modulation rows, (scale, shift)
pairs, one result per pair; rows per level instead of per token (as when an image's tokens have a
timestep of their own) are followed by an int32 index, the level of every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from ltx2rt.errors import GraphError
from ltx2rt.graph.ir import Node, Type
from ltx2rt.graph.ops import OPS, _same_dtype, _view, op


def grouped(operands: Sequence[Any], size: int) -> list[tuple[Any, ...]]:
    """Operands that follow one another, `size` at a time."""
    return list(zip(*[iter(operands)] * size, strict=True))


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
        axes, args = (
            (x.axes[0], "levels", x.axes[2]),
            {"index_view": _view(index, x.axes[:2], "index")},
        )
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


def _one_or_many(results: Sequence[Any]):
    return results[0] if len(results) == 1 else results


def _normed(x, rows, eps):
    y = OPS["rms_norm"].numpy(x, dims=(x.ndim - 1,), weight_view=None, eps=eps)
    return [y * (1 + scale) + shift for scale, shift in pairs(rows)]


def _numpy_norm_modulate(x, *rows, views, eps, index_view=None):
    return _one_or_many(
        _normed(x, rows_per_token(rows, views, index_view, np.take_along_axis), eps)
    )


@op(_numpy_norm_modulate)
def norm_modulate(x: Type, *rows: Type, eps: float):
    """RMSNorm without weight over the last axis, then x * (1 + scale) + shift for every pair of
    rows."""
    views, args = _row_args(x, rows)
    if not views or len(views) % 2:
        raise GraphError(f"norm_modulate: {len(views)} rows are no pairs of scale and shift")
    return _one_or_many((x,) * (len(views) // 2)), {"views": views, "eps": eps} | args


def _numpy_norm_scale(x, scale, *, views, eps):
    return OPS["rms_norm"].numpy(x, 1 + scale, dims=(x.ndim - 1,), weight_view=views[0], eps=eps)


@op(_numpy_norm_scale)
def norm_scale(x: Type, scale: Type, *, eps: float):
    """RMSNorm over the last axis, times 1 + scale (D), which may be float32 beside any x."""
    result, args = OPS["rms_norm"].rule(x, scale, over=x.axes[-1:], eps=eps)
    return result, {"views": (args["weight_view"],), "eps": eps}


def _numpy_residual(x, y, rows, views, index_view, biased):
    """x + y * gate, and the rows behind the gate."""
    bias, gate, *rows = [
        *(() if biased else (0,)),
        *rows_per_token(rows, views, index_view, np.take_along_axis),
    ]
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


@op(
    lambda x, y, *rows, views, index_view=None, biased=False: _numpy_residual(
        x, y, rows, views, index_view, biased
    )[0]
)
def gated_residual(x: Type, y: Type, *rows: Type, biased: bool = False):
    """x + y * gate; biased: x + (y + bias) * gate. Samples at the end that y lacks are x's.

    rows: the bias if there is one, the gate, and the index if it is by level.
    """
    others, args = _residual_args("gated_residual", x, y, rows, biased)
    if others:
        raise GraphError(f"gated_residual: {others + 1} gates, expected 1")
    return x, args


def _numpy_residual_norm_modulate(x, y, *rows, views, eps, index_view=None, biased=False):
    x, rows = _numpy_residual(x, y, rows, views, index_view, biased)
    return [
        x,
        *(
            _normed(x, rows, eps)
            or [OPS["rms_norm"].numpy(x, dims=(x.ndim - 1,), weight_view=None, eps=eps)]
        ),
    ]


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


def _numpy_rotated(norm, size, *operands, weight_views, table_views, **args):
    results = []
    for (x, *others, cos, sin), weight_view, view in zip(
        grouped(operands, size), weight_views, table_views, strict=True
    ):
        y = OPS[norm].numpy(
            x, *others, dims=(x.ndim - 2, x.ndim - 1), weight_view=weight_view, **args
        )
        results.append(OPS["rope"].numpy(y, cos, sin, view=view))
    return _one_or_many(tuple(results))


def _rotated(norm: str, size: int, operands: Sequence[Type], **attrs: Any):
    """The op `norm` over the last two axes, then RoPE: of x, what else the norm reads, cos, sin,
    `size` at a time."""
    weights, tables = [], []
    for x, *others, cos, sin in grouped(operands, size):
        weights.append(OPS[norm].rule(x, *others, over=x.axes[-2:], **attrs)[1]["weight_view"])
        tables.append(OPS["rope"].rule(x, cos, sin)[1]["view"])
    args = {"weight_views": tuple(weights), "table_views": tuple(tables), **attrs}
    return _one_or_many(tuple(operands[::size])), args


@op(partial(_numpy_rotated, "rms_norm", 4))
def qk_norm_rope(*operands: Type, eps: float):
    """RMSNorm over the last two axes (all heads together) with its weight, then RoPE.

    operands: x, weight, cos, sin; once, or for q and then for k. One result for each x.
    """
    return _rotated("rms_norm", 4, operands, eps=eps)


@op(partial(_numpy_rotated, "rms_scale", 5))
def qk_scale_rope(*operands: Type, count: int, eps: float):
    """qk_norm_rope of some of the heads, given the sum of squares over all of them, `count`
    numbers.

    operands: x, sum of squares, weight, cos, sin; once, or for q and then for k. One result for
    each x.
    """
    return _rotated("rms_scale", 5, operands, count=count, eps=eps)


def _numpy_normed(norm, size, *operands, weight_views, spread=(), **args):
    found = [
        OPS[norm].numpy(x, *others, dims=(x.ndim - 2, x.ndim - 1), weight_view=view, **args)
        for (x, *others), view in zip(
            grouped(operands[:-1] if spread else operands, size), weight_views, strict=True
        )
    ]
    if spread:
        found[1:] = (x[list(spread)] for x in (found[1], operands[-1]))
    return _one_or_many(tuple(found))


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
    return _one_or_many(tuple(operands[::size])), {"weight_views": views, **attrs}


@op(partial(_numpy_normed, "rms_norm", 2))
def qk_norm(*operands: Type, eps: float, spread: tuple[int, ...] = ()):
    """qk_norm_rope of an attention without RoPE. operands: x, weight; once, or for q and then for
    k.

    spread: whose keys and values each sample of the result has; v is then the last operand, and a
    result.
    """
    return _only_normed("rms_norm", 2, operands, spread, eps=eps)


@op(partial(_numpy_normed, "rms_scale", 3))
def qk_scale(*operands: Type, count: int, eps: float, spread: tuple[int, ...] = ()):
    """qk_scale_rope of an attention without RoPE. operands: x, sum of squares, weight; once, or for
    q, then for k. spread: as in qk_norm."""
    return _only_normed("rms_scale", 3, operands, spread, count=count, eps=eps)


@op(lambda *operands, **args: OPS["gelu"].numpy(OPS["linear"].numpy(*operands, **args)))
def linear_gelu(
    x: Type, weight: Type, bias: Type, *, contract: tuple[str, ...], out: dict[str, int]
):
    """A linear layer with bias, then GELU."""
    return OPS["linear"].rule(x, weight, bias, contract=contract, out=out)


@op(lambda x, *others, **args: OPS["linear_float8"].numpy(OPS["gelu"].numpy(x), *others, **args))
def gelu_linear_float8(x: Type, *others: Type, contract: tuple[str, ...], out: dict[str, int]):
    """GELU, then a linear layer of float8 weights."""
    return OPS["linear_float8"].rule(x, *others, contract=contract, out=out)


def _numpy_head_gate(y, logits, *choice):
    if choice:
        keep, v = choice
        y = np.where(keep.reshape(-1, *[1] * (y.ndim - 1)) != 0, y, v)
    return y * (2 * OPS["sigmoid"].numpy(logits))[..., None]


@op(_numpy_head_gate)
def head_gate(y: Type, logits: Type, *choice: Type):
    """y * 2 sigmoid(logits), one logit per head: y (B, ..., heads, head_dim), logits (B, ...,
    heads).

    choice: keep (B) and v like y: samples whose keep is 0 are v's instead of y's.
    """
    _same_dtype(y, logits, *choice[1:])
    if choice:
        keep, v = choice
        if not (keep.axes == y.axes[:1] and keep.shape == y.shape[:1] and v == y):
            raise GraphError(f"head_gate: {keep} or {v} of {y}")
    if not (logits.axes == y.axes[:-1] and logits.shape == y.shape[:-1]):
        raise GraphError(f"head_gate: {logits} does not fit {y}")
    return y, {}


def divided(operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Operands of head_gate_linear_float8: the gate's, and weight, scale and bias, if there is
    one."""
    at = 4 if len(operands) > 5 else 2
    return operands[:at], operands[at:]


def _numpy_head_gate_linear_float8(*operands, **args):
    gate, others = divided(operands)
    return OPS["linear_float8"].numpy(_numpy_head_gate(*gate), *others, **args)


@op(_numpy_head_gate_linear_float8)
def head_gate_linear_float8(*operands: Type, contract: tuple[str, ...], out: dict[str, int]):
    """The per-head gate, then a linear layer of float8 weights, whose operand each token's heads
    are together."""
    gate, others = divided(operands)
    y = gate[0]
    OPS["head_gate"].rule(*gate)
    if tuple(contract) != y.axes[-2:]:
        raise GraphError(f"head_gate_linear_float8: {contract} of {y} are not the heads of a token")
    return OPS["linear_float8"].rule(y, *others, contract=contract, out=out)


def _numpy_pixel_norm_silu(x, *, dim, eps):
    return OPS["silu"].numpy(OPS["rms_norm"].numpy(x, dims=(dim,), weight_view=None, eps=eps))


@op(_numpy_pixel_norm_silu)
def pixel_norm_silu(x: Type, *, over: str, eps: float):
    """RMSNorm without weight over one axis, then SiLU."""
    if over not in x.axes:
        raise GraphError(f"pixel_norm_silu over {over}: {x} lacks it")
    return x, {"dim": x.axes.index(over), "eps": eps}


def _numpy_padded_conv(x, *weights, padding, stride, dilation):
    x = np.pad(x, ((0, 0), (0, 0), *((n, n) for n in padding)))
    return OPS["conv"].numpy(x, *weights, stride=stride, dilation=dilation)


@op(_numpy_padded_conv)
def padded_conv(
    x: Type,
    *weights: Type,
    padding: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
):
    """`conv` with `padding` zeros on either side of each spatial axis."""
    shape = (*x.shape[:2], *(size + 2 * n for size, n in zip(x.shape[2:], padding, strict=True)))
    result, args = OPS["conv"].rule(
        Type(x.axes, shape, x.dtype), *weights, stride=stride, dilation=dilation
    )
    return result, args | {"padding": padding}


def snake_windows(taps: int) -> tuple[int, int, tuple[int, int]]:
    """How a signal is padded and cropped around two filters of `taps` (even), one to twice its rate
    and one back.

    Returns the edge samples added on either side before going up, the position at which the kept
    part then starts, and the edge samples added (before, after) before going down.
    """
    pad = -(-(taps // 2) // 2)
    return pad, 2 * pad + (taps - 1) // 2, (taps // 2 - 1, taps // 2)


def _numpy_snake_beta(x, up, down, alpha, beta, *, eps):
    b, c, t = x.shape
    pad, start, edges = snake_windows(up.shape[-1])
    y = np.pad(x.reshape(b * c, 1, t), ((0, 0), (0, 0), (pad, pad)), mode="edge")
    y = 2 * OPS["conv_transpose"].numpy(y, up, stride=2)[..., start : start + 2 * t].reshape(
        b, c, 2 * t
    )
    y = y + np.square(np.sin(y * np.exp(alpha)[:, None])) / (
        np.exp(beta)[:, None] + np.float32(eps)
    )
    y = np.pad(y.reshape(b * c, 1, 2 * t), ((0, 0), (0, 0), edges), mode="edge")
    return OPS["conv"].numpy(y, down, stride=(2,), dilation=(1,)).reshape(b, c, t)


@op(_numpy_snake_beta)
def snake_beta(x: Type, up: Type, down: Type, alpha: Type, beta: Type, *, eps: float):
    """x + sin(e^alpha x)^2 / (e^beta + eps) per channel at twice the rate, between the filters `up`
    and `down` (1, 1, taps): x (B, channels, time), edges repeated."""
    _same_dtype(x, up, down, alpha, beta)
    if not (len(x.axes) == 3 and up.shape == down.shape and up.shape[-1] % 2 == 0):
        raise GraphError(f"snake_beta: {x}, filters {up}, {down}")
    if not (alpha.shape == beta.shape == x.shape[1:2]):
        raise GraphError(f"snake_beta: {x} does not fit {alpha}, {beta}")
    return x, {"eps": eps}


def apart(node: Node) -> list[Node]:
    """The nodes that a `together` does at once; of another one, itself."""
    if node.op != "together":
        return [node]
    found, inputs, outputs = [], iter(node.inputs), iter(node.outputs)
    for (name, read, attrs), (_, _, made, args) in zip(
        node.attrs["parts"], node.args["parts"], strict=True
    ):
        found.append(
            Node(name, tuple(islice(inputs, read)), tuple(islice(outputs, made)), attrs, args)
        )
    return found


def _numpy_together(*operands, parts):
    found, values = [], iter(operands)
    for name, read, made, args in parts:
        results = OPS[name].numpy(*islice(values, read), **args)
        found += results if made > 1 else [results]
    return found


@op(_numpy_together)
def together(*operands: Type, parts: tuple[tuple[str, int, dict[str, Any]], ...]):
    """Several nodes of which none reads what another makes. parts: of each the op, how many
    operands it has, and its attributes; results one's after another's."""
    types, args, values = [], [], iter(operands)
    for name, read, attrs in parts:
        made, plan = OPS[name].rule(*islice(values, read), **attrs)
        made = made if isinstance(made, tuple) else (made,)
        types += made
        args.append((name, read, len(made), plan))
    return tuple(types), {"parts": tuple(args)}
