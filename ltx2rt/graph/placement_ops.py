"""Ops of placement, which passes write and model text never does.

A graph with these runs on every device of a mesh in step. Their numpy definitions take all devices
at once: operands and results are lists over the devices of one group, in the order of their
coordinate on the mesh axis.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ltx2rt.errors import GraphError
from ltx2rt.graph.ir import Axes, Type
from ltx2rt.graph.network_ops import _attend, _attention_flops, attention
from ltx2rt.graph.ops import _positions, _same_dtype, _without, op


def _numpy_shard(group, *, dim, mesh_axis, parts):
    return [np.split(x, parts, axis=dim)[i] for i, x in enumerate(group)]


@op(_numpy_shard)
def shard(x: Type, *, axis: str, mesh_axis: str, parts: int):
    """This device's slice of an axis that all devices of `mesh_axis` hold whole."""
    i = x.axes.index(axis)
    if x.shape[i] % parts:
        raise GraphError(f"shard {axis}={x.shape[i]} over {mesh_axis}={parts}: does not divide")
    return x.resized(axis, x.shape[i] // parts), {"dim": i, "mesh_axis": mesh_axis, "parts": parts}


def _numpy_all_reduce(*groups, mesh_axis):
    return [[np.sum(group, axis=0, dtype=group[0].dtype)] * len(group) for group in groups]


@op(_numpy_all_reduce)
def all_reduce(*xs: Type, mesh_axis: str):
    """The sum of each operand over the devices of `mesh_axis`, in one communication."""
    _same_dtype(*xs)
    return xs, {"mesh_axis": mesh_axis}


def _numpy_all_gather(group, *, dim, mesh_axis, parts):
    return [np.concatenate(group, axis=dim)] * parts


@op(_numpy_all_gather)
def all_gather(x: Type, *, axis: str, mesh_axis: str, parts: int):
    """The slices of an axis that the devices of `mesh_axis` hold, joined on every one of them."""
    i = x.axes.index(axis)
    return x.resized(axis, x.shape[i] * parts), {"dim": i, "mesh_axis": mesh_axis, "parts": parts}


def _numpy_all_to_all(*groups, split, concat, mesh_axis, parts):
    pieces = [[np.split(x, parts, axis=split) for x in group] for group in groups]
    return [
        [np.concatenate([sent[i] for sent in group], axis=concat) for i in range(parts)]
        for group in pieces
    ]


@op(_numpy_all_to_all)
def all_to_all(*xs: Type, split: int, concat: int, mesh_axis: str, parts: int):
    """Each device sends piece i of dimension `split` to device i and joins the received pieces
    along `concat`. Operands travel in one communication; one result per operand."""
    results = []
    for x in xs:
        if x.shape[split] % parts:
            raise GraphError(
                f"all_to_all: {x.axes[split]}={x.shape[split]} does not divide by {parts}"
            )
        sent = x.resized(x.axes[split], x.shape[split] // parts)
        results.append(sent.resized(x.axes[concat], sent.shape[concat] * parts))
    _same_dtype(*xs)
    args = {"split": split, "concat": concat, "mesh_axis": mesh_axis, "parts": parts}
    return tuple(results), args


def _numpy_swap_edges(firsts, lasts, *, dim, mesh_axis, parts):
    size = firsts[0].shape[dim]
    start, end = firsts[0].take([0] * size, axis=dim), lasts[-1].take([-1] * size, axis=dim)
    return [[start, *lasts[:-1]], [*firsts[1:], end]]


@op(_numpy_swap_edges)
def swap_edges(first: Type, last: Type, *, axis: str, mesh_axis: str, parts: int):
    """`last` of the device before, and `first` of the device after; where there is none, copies of
    this device's own border position of `axis`."""
    _same_dtype(first, last)
    if first != last:
        raise GraphError(f"swap_edges: {first} and {last} differ")
    args = {"dim": first.axes.index(axis), "mesh_axis": mesh_axis, "parts": parts}
    return (first, last), args


@op(lambda *xs: xs)
def barrier(*xs: Type):
    """Its operands, once all are there: an order for compilers that choose one."""
    if len(xs) < 2:
        raise GraphError("barrier: nothing to wait for")
    return xs, {}


@op(lambda x, dims: np.sum(np.square(x.astype(np.float32)), axis=dims))
def sum_squares(x: Type, *, over: Axes):
    """The sum of x^2 over the named axes, in float32: an RMSNorm over split heads adds them up."""
    return replace(_without(x, over), dtype="float32"), {"dims": _positions(x, over)}


def _numpy_rms_scale(x, sum_squares, weight=None, *, dims, weight_view, count, eps):
    mean = np.expand_dims(sum_squares, dims) / np.float32(count)
    y = x / np.sqrt(mean + np.float32(eps))
    return y if weight is None else y * weight.reshape(weight_view)


@op(_numpy_rms_scale)
def rms_scale(
    x: Type, sum_squares: Type, weight: Type | None = None, *, over: Axes, count: int, eps: float
):
    """x / sqrt(sum_squares / count + eps), in float32, times this device's part of the weight."""
    if sum_squares.axes != _without(x, over).axes or sum_squares.dtype != "float32":
        raise GraphError(f"rms_scale: {sum_squares} does not fit {x}")
    view = None if weight is None else tuple(n if a in over else 1 for a, n in x.sizes.items())
    return x, {"dims": _positions(x, over), "weight_view": view, "count": count, "eps": eps}


def _numpy_attention_part(*operands, **plan):
    y, log_sum = _attend(*operands, **plan)
    upper = (log_sum.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.concatenate([y, upper[..., None], (log_sum - upper)[..., None]], axis=-1)


@op(_numpy_attention_part, flops=_attention_flops)
def attention_part(q: Type, k: Type, v: Type, bias: Type | None = None, *, scale: float):
    """Attention to this device's share of the keys: (B, tokens, heads, head_dim + 2).

    The last two entries add up to the logarithm of the softmax's denominator, from which
    `attention_join` weighs the shares: the upper 16 bits of the float32, which are a bfloat16, and
    the rest. So a bfloat16 graph sends bfloat16 and knows the weights to 2^-16 of that logarithm,
    and a float32 graph knows them exactly.
    """
    out, args = attention(q, k, v, bias, scale=scale)
    return out.resized(out.axes[3], out.shape[3] + 2), args


def _numpy_attention_join(parts):
    y, log_sum = parts[..., :-2], parts[..., -2:-1] + parts[..., -1:]
    weights = np.exp(log_sum - log_sum.max(axis=0, keepdims=True))
    return (y * weights).sum(axis=0) / weights.sum(axis=0)


@op(_numpy_attention_join)
def attention_join(parts: Type):
    """The attention from its parts (parts, B, tokens, heads, head_dim + 2), weighed in float32."""
    return parts.unstacked().resized(parts.axes[-1], parts.shape[-1] - 2), {}
