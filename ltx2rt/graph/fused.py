"""Ops that are several ops at once: written by the pass `fuse`, never by model text.

Each is defined by the ops it stands for, computed in float32 and rounded once. A backend may have one kernel for it;
otherwise it runs the plain ops. `rows` are modulation rows, (scale, shift) pairs, one result per pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ltx2rt.graph.ir import Type
from ltx2rt.graph.ops import OPS, _expect, _same_dtype, _view, op


def pairs(rows: Sequence[Any]) -> list[tuple[Any, Any]]:
    """[(scale, shift), ...] of scale, shift, scale, shift, ..."""
    return list(zip(rows[::2], rows[1::2], strict=True))


def _row_view(row: Type, x: Type) -> tuple[int, ...]:
    _expect(row.axes[-1:] == x.axes[-1:], f"row {row} does not hold the last axis of {x}")
    return _view(row, x.axes, "row")


def _one_or_many(types: tuple[Type, ...]):
    return types[0] if len(types) == 1 else types


def _normed(x, rows, views, eps):
    y = OPS["rms_norm"].numpy(x, dims=(x.ndim - 1,), weight_view=None, eps=eps)
    return [OPS["modulate"].numpy(y, *row, view) for row, view in zip(pairs(rows), pairs(views), strict=True)]


def _numpy_norm_modulate(x, *rows, views, eps):
    results = _normed(x, rows, views, eps)
    return results[0] if len(results) == 1 else results


@op(_numpy_norm_modulate)
def norm_modulate(x: Type, *rows: Type, eps: float):
    """RMSNorm without weight over the last axis, then x * (1 + scale) + shift for every pair of rows."""
    _same_dtype(x, *rows)
    _expect(len(rows) > 0 and len(rows) % 2 == 0, f"norm_modulate: {len(rows)} rows are no pairs of scale and shift")
    return _one_or_many((x,) * (len(rows) // 2)), {"views": tuple(_row_view(r, x) for r in rows), "eps": eps}


def _numpy_gated_residual(x, y, gate, *, gate_view):
    return x + y * gate.reshape(gate_view)


@op(_numpy_gated_residual)
def gated_residual(x: Type, y: Type, gate: Type):
    """x + y * gate."""
    _same_dtype(x, y, gate)
    _expect(x == y, f"gated_residual: {x} and {y} differ")
    return x, {"gate_view": _row_view(gate, x)}


def _numpy_residual_norm_modulate(x, y, gate, *rows, gate_view, views, eps):
    x = _numpy_gated_residual(x, y, gate, gate_view=gate_view)
    return [
        x,
        *(_normed(x, rows, views, eps) or [OPS["rms_norm"].numpy(x, dims=(x.ndim - 1,), weight_view=None, eps=eps)]),
    ]


@op(_numpy_residual_norm_modulate)
def residual_norm_modulate(x: Type, y: Type, gate: Type, *rows: Type, eps: float):
    """x + y * gate, and its RMSNorm modulated by every pair of rows; without rows, the RMSNorm itself."""
    _, plan = gated_residual(x, y, gate)
    _same_dtype(x, *rows)
    _expect(len(rows) % 2 == 0, f"residual_norm_modulate: {len(rows)} rows are no pairs of scale and shift")
    views = tuple(_row_view(r, x) for r in rows)
    return (x,) * (1 + max(1, len(rows) // 2)), plan | {"views": views, "eps": eps}


def _numpy_qk_norm_rope(x, weight, cos, sin, *, weight_view, table_view, eps):
    y = OPS["rms_norm"].numpy(x, weight, dims=(x.ndim - 2, x.ndim - 1), weight_view=weight_view, eps=eps)
    return OPS["rope"].numpy(y, cos, sin, view=table_view)


@op(_numpy_qk_norm_rope)
def qk_norm_rope(x: Type, weight: Type, cos: Type, sin: Type, *, eps: float):
    """RMSNorm over the last two axes (all heads together) with its weight, then RoPE."""
    over = x.axes[-2:]
    _, norm = OPS["rms_norm"].rule(x, weight, over=over, eps=eps)
    _, rope = OPS["rope"].rule(x, cos, sin)
    return x, {"weight_view": norm["weight_view"], "table_view": rope["view"], "eps": eps}


def _numpy_qk_scale_rope(x, sum_squares, weight, cos, sin, *, weight_view, table_view, count, eps):
    dims = (x.ndim - 2, x.ndim - 1)
    y = OPS["rms_scale"].numpy(x, sum_squares, weight, dims=dims, weight_view=weight_view, count=count, eps=eps)
    return OPS["rope"].numpy(y, cos, sin, view=table_view)


@op(_numpy_qk_scale_rope)
def qk_scale_rope(x: Type, sum_squares: Type, weight: Type, cos: Type, sin: Type, *, count: int, eps: float):
    """qk_norm_rope of some of the heads, given the sum of squares over all of them, `count` numbers."""
    _, norm = OPS["rms_scale"].rule(x, sum_squares, weight, over=x.axes[-2:], count=count, eps=eps)
    _, rope = OPS["rope"].rule(x, cos, sin)
    return x, {"weight_view": norm["weight_view"], "table_view": rope["view"], "count": count, "eps": eps}


@op(lambda y, logits: y * (2 * OPS["sigmoid"].numpy(logits))[..., None])
def head_gate(y: Type, logits: Type):
    """y * 2 sigmoid(logits), one logit per head: y (..., heads, head_dim), logits (..., heads)."""
    _same_dtype(y, logits)
    _expect(logits.axes == y.axes[:-1] and logits.shape == y.shape[:-1], f"head_gate: {logits} does not fit {y}")
    return y, {}


def _numpy_pixel_norm_silu(x, *, dim, eps):
    return OPS["silu"].numpy(OPS["rms_norm"].numpy(x, dims=(dim,), weight_view=None, eps=eps))


@op(_numpy_pixel_norm_silu)
def pixel_norm_silu(x: Type, *, over: str, eps: float):
    """RMSNorm without weight over one axis, then SiLU."""
    _expect(over in x.axes, f"pixel_norm_silu over {over}: {x} lacks it")
    return x, {"dim": x.axes.index(over), "eps": eps}


def snake_windows(taps: int) -> tuple[int, int, tuple[int, int]]:
    """Of two filters of `taps` (even) around twice the rate: edge samples added before going up, where the kept part
    then starts, and edge samples added (before, after) going down."""
    pad = -(-(taps // 2) // 2)
    return pad, 2 * pad + (taps - 1) // 2, (taps // 2 - 1, taps // 2)


def _numpy_snake_beta(x, up, down, alpha, beta, *, eps):
    b, c, t = x.shape
    pad, start, edges = snake_windows(up.shape[-1])
    y = np.pad(x.reshape(b * c, 1, t), ((0, 0), (0, 0), (pad, pad)), mode="edge")
    y = 2 * OPS["conv_transpose"].numpy(y, up, stride=2)[..., start : start + 2 * t].reshape(b, c, 2 * t)
    y = y + np.square(np.sin(y * np.exp(alpha)[:, None])) / (np.exp(beta)[:, None] + np.float32(eps))
    y = np.pad(y.reshape(b * c, 1, 2 * t), ((0, 0), (0, 0), edges), mode="edge")
    return OPS["conv"].numpy(y, down, stride=(2,), dilation=(1,)).reshape(b, c, t)


@op(_numpy_snake_beta)
def snake_beta(x: Type, up: Type, down: Type, alpha: Type, beta: Type, *, eps: float):
    """x + sin(e^alpha x)^2 / (e^beta + eps) per channel at twice the rate, between the filters `up` and `down` (1, 1,
    taps): x (B, channels, time), edges repeated."""
    _same_dtype(x, up, down, alpha, beta)
    _expect(
        len(x.axes) == 3 and up.shape == down.shape and up.shape[-1] % 2 == 0, f"snake_beta: {x}, filters {up}, {down}"
    )
    _expect(alpha.shape == beta.shape == x.shape[1:2], f"snake_beta: {x} does not fit {alpha}, {beta}")
    return x, {"eps": eps}
