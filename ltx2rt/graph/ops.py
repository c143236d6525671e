"""The op table: for each op its typing rule and its numpy definition. Here are the table and the
ops of any program; `network_ops` and `placement_ops` enter more.

A rule receives operand types and named attributes; it returns the result type and the attributes
resolved to positions, keyword arguments of the numpy definition and of every lowering's function of
the same name. Rules raise GraphError in axis names, and make no message before it is needed: there
are a hundred thousand nodes. The interpreter widens bfloat16 to float32 before an op and rounds
once after it; that is each op's meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ltx2rt.errors import GraphError
from ltx2rt.graph.ir import Axes, Node, Sizes, Type


@dataclass(frozen=True)
class Op:
    name: str
    # a tuple of types: an op with several results
    rule: Callable[..., tuple[Type | tuple[Type, ...], dict[str, Any]]]
    numpy: Callable[..., Any]  # an array, or a sequence of them from an op with several results
    # 2 x multiply-adds of one execution; everything but products is bandwidth
    flops: Callable[[Node], int] = lambda node: 0
    linear: str = ""  # a product with weights: "plain", or "quantised" where it multiplies 8 bits


OPS: dict[str, Op] = {}
# ops in which devices exchange bytes; no other op does
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "swap_edges")


def op(numpy: Callable[..., Any], **more: Any):
    """Enter the decorated rule into the table, with its numpy definition and fields of `Op`."""

    def register(rule):
        name = rule.__name__.rstrip("_")
        OPS[name] = Op(name, rule, numpy, **more)
        return rule

    return register


def _same_dtype(*types: Type | None) -> str:
    """The dtype of all operands that there are."""
    given = [t for t in types if t is not None]
    if any(t.dtype != given[0].dtype for t in given):
        raise GraphError(f"operands differ in dtype: {', '.join(map(str, given))}; cast first")
    return given[0].dtype


def _view(small: Type, axes: Axes, what: str = "operand") -> tuple[int, ...]:
    """Shape of `small` with an axis of 1 for every one of `axes` it lacks."""
    it = iter(axes)
    if not all(a in it for a in small.axes):
        raise GraphError(f"{what} {small} does not fit the axes {axes} in order")
    sizes = small.sizes
    return tuple(sizes.get(a, 1) for a in axes)


def _positions(x: Type, axes: Axes) -> tuple[int, ...]:
    return tuple(x.axes.index(a) for a in axes)


def _without(x: Type, axes: Axes) -> Type:
    kept = {a: n for a, n in x.sizes.items() if a not in axes}
    return Type(tuple(kept), tuple(kept.values()), x.dtype)


# --- constants ------------------------------------------------------------------------------------


@op(lambda value, shape, dtype: np.broadcast_to(value, shape))
def full(*, value: float, dtype: str, **sizes: int):
    """The number `value` everywhere; keyword order is axis order."""
    shape = tuple(sizes.values())
    args = {"value": np.array(value, np.float32), "shape": shape, "dtype": dtype}
    return Type(tuple(sizes), shape, dtype), args


# --- elementwise ----------------------------------------------------------------------------------


def _unary(name: str, numpy: Callable[..., np.ndarray]) -> None:
    OPS[name] = Op(name, lambda x: (x, {}), numpy)


def _sigmoid(x):
    return (0.5 * (1 + np.tanh(0.5 * x))).astype(x.dtype)


def _gelu(x):
    """The tanh approximation, the only GELU of the family."""
    return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))).astype(x.dtype)


# called so by numpy, torch and jax.lax alike
UNARY = ("exp", "log", "sqrt", "square", "sin", "tanh")
for _name in UNARY:
    _unary(_name, getattr(np, _name))
_unary("sigmoid", _sigmoid)
_unary("silu", lambda x: x * _sigmoid(x))
_unary("gelu", _gelu)


def _binary(name: str, numpy: Callable[..., np.ndarray]) -> None:
    def rule(x: Type, y: Type):
        dtype = _same_dtype(x, y)
        axes = x.axes if len(x.axes) >= len(y.axes) else y.axes
        views = (_view(x, axes), _view(y, axes))
        for a, n, m in zip(axes, *views, strict=True):
            if n != m and a in x.axes and a in y.axes:
                raise GraphError(f"{name}: axis {a} is {n} in {x} and {m} in {y}")
        shape = tuple(max(n, m) for n, m in zip(*views, strict=True))
        return Type(axes, shape, dtype), {"views": views}

    OPS[name] = Op(name, rule, lambda x, y, views: numpy(x.reshape(views[0]), y.reshape(views[1])))


BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
for _name, _function in BINARY.items():
    _binary(_name, _function)


@op(lambda x, scale, offset: x * np.float32(scale) + np.float32(offset))
def affine(x: Type, *, scale: float = 1.0, offset: float = 0.0):
    """x * scale + offset with two Python numbers."""
    return x, {"scale": float(scale), "offset": float(offset)}


@op(lambda x, low, high: np.clip(x, low, high))
def clamp(x: Type, *, low: float | None = None, high: float | None = None):
    return x, {"low": low, "high": high}


@op(lambda x, slope: np.where(x >= 0, x, x * np.float32(slope)))
def leaky_relu(x: Type, *, slope: float):
    return x, {"slope": float(slope)}


@op(lambda x, dtype: x)
def cast(x: Type, *, dtype: str):
    return replace(x, dtype=dtype), {"dtype": dtype}


def _numpy_select(condition, x, y, views):
    condition, x, y = (a.reshape(view) for a, view in zip((condition, x, y), views, strict=True))
    return np.where(condition != 0, x, y)


@op(_numpy_select)
def select(condition: Type, x: Type, y: Type):
    """x where condition is not zero, else y; axes by name, the widest operand's order."""
    dtype = _same_dtype(x, y)
    axes = max((condition.axes, x.axes, y.axes), key=len)
    views = tuple(_view(t, axes, "select") for t in (condition, x, y))
    return Type(axes, tuple(map(max, *views)), dtype), {"views": views}


@op(lambda x, scale, shift, views: x * (1 + scale.reshape(views[0])) + shift.reshape(views[1]))
def modulate(x: Type, scale: Type, shift: Type):
    """x * (1 + scale) + shift, the AdaLN modulation."""
    _same_dtype(x, scale, shift)
    return x, {"views": (_view(scale, x.axes, "scale"), _view(shift, x.axes, "shift"))}


def _mixed(x):
    """Integers of 32 bits, each bit of which follows from all bits of `x`. Source: the constants of
    Chris Wellons' lowbias32."""
    x = (x ^ x >> 16 & 0xFFFF) * 0x7FEB352D
    x = (x ^ x >> 15 & 0x1FFFF) * (0x846CA68B - 2**32)
    return x ^ x >> 16 & 0xFFFF


def drawn_bits(keys, columns, salt, views):
    """24 bits for each number of `dropout`, of int32 arrays of numpy, torch or JAX alike."""
    bits = _mixed(keys.reshape(views[0]) ^ _mixed(columns + salt).reshape(views[1]))
    return bits >> 8 & 0xFFFFFF


def _numpy_dropout(x, keys, columns, rate, salt, views):
    rate = rate.reshape(views[2])
    kept = drawn_bits(keys, columns, salt, views) * np.float32(2.0**-24) >= rate
    return np.where(kept, x * (1 / (1 - rate)), np.float32(0))


@op(_numpy_dropout)
def dropout(x: Type, keys: Type, columns: Type, rate: Type, *, salt: int):
    """x / (1 - rate), 0 for a share `rate` of its numbers: where 24 bits, mixed of the key of the
    leading axes, the column of the other ones and `salt` (32 bits with a sign), are below it."""
    lead, rest = len(keys.axes), len(columns.axes)
    if x.axes != keys.axes + columns.axes or {keys.dtype, columns.dtype} != {"int32"}:
        raise GraphError(f"dropout: {keys} and {columns} do not fit {x}")
    views = (*keys.shape, *[1] * rest), (*[1] * lead, *columns.shape), _view(rate, x.axes)
    return x, {"salt": salt, "views": views}


# --- reductions -----------------------------------------------------------------------------------


def _reduction(name: str, numpy: Callable[..., np.ndarray]) -> None:
    def rule(x: Type, *, over: Axes):
        if not set(over) <= set(x.axes):
            raise GraphError(f"{name} over {over}: {x} lacks some of them")
        return _without(x, over), {"dims": _positions(x, over)}

    OPS[name] = Op(name, rule, numpy)


_reduction("sum", lambda x, dims: x.sum(dims))
_reduction("mean", lambda x, dims: x.mean(dims))
_reduction("max", lambda x, dims: x.max(dims))
_reduction("min", lambda x, dims: x.min(dims))


# --- shape ----------------------------------------------------------------------------------------


def _reshaped(x, shape):
    return x.reshape(shape)


@op(_reshaped)
def split(x: Type, *, axis: str, into: Sizes):
    """One axis into several, the first the slowest: `into={"heads": 32, "head_dim": 128}`."""
    i = x.axes.index(axis)
    if math.prod(into.values()) != x.shape[i]:
        raise GraphError(f"split {axis}={x.shape[i]} into {into}: sizes do not multiply to it")
    out = x.replaced(i, i + 1, into)
    return out, {"shape": out.shape}


@op(_reshaped)
def merge(x: Type, *, axes: Axes, into: str):
    """Adjacent axes into one, the first the slowest."""
    i = x.axes.index(axes[0])
    stop = i + len(axes)
    if x.axes[i:stop] != tuple(axes):
        raise GraphError(f"merge {axes}: they are not adjacent in {x}")
    out = x.replaced(i, stop, {into: math.prod(x.shape[i:stop])})
    return out, {"shape": out.shape}


@op(lambda x, perm: x.transpose(perm))
def transpose(x: Type, *, axes: Axes):
    if sorted(axes) != sorted(x.axes):
        raise GraphError(f"transpose to {axes}: not a permutation of {x}")
    perm = _positions(x, axes)
    return Type(tuple(axes), tuple(x.shape[i] for i in perm), x.dtype), {"perm": perm}


@op(lambda x: x)
def rename(x: Type, *, names: dict[str, str]):
    return Type(tuple(names.get(a, a) for a in x.axes), x.shape, x.dtype), {}


def _numpy_slice(x, dim, start, stop, step):
    return x[(slice(None),) * dim + (slice(start, stop, step),)]


@op(_numpy_slice)
def slice_(x: Type, *, axis: str, start: int = 0, stop: int | None = None, step: int = 1):
    """Every `step`-th position of an axis from start up to stop (None: its end); never empty."""
    i, n = x.axes.index(axis), x.size(axis)
    stop = n if stop is None else stop
    if not 0 <= start < stop <= n:
        raise GraphError(f"slice {axis} {start}:{stop} of {x}")
    args = {"dim": i, "start": start, "stop": stop, "step": step}
    return x.resized(axis, -(-(stop - start) // step)), args


@op(lambda x, dim, index: x[(slice(None),) * dim + (index,)])
def at(x: Type, *, axis: str, index: int):
    """One position of an axis, which is dropped."""
    i = x.axes.index(axis)
    if not 0 <= index < x.shape[i]:
        raise GraphError(f"at {axis}={index} of {x}")
    return x.replaced(i, i + 1, {}), {"dim": i, "index": index}


@op(lambda *xs, dim: np.concatenate(xs, axis=dim))
def concat(*xs: Type, axis: str):
    """Values one after another along an axis they all have; all other axes agree."""
    _same_dtype(*xs)
    first, i = xs[0], xs[0].axes.index(axis)
    for x in xs:
        if x.axes != first.axes or x.resized(axis, 0) != first.resized(axis, 0):
            raise GraphError(f"concat along {axis}: {x} does not fit {first}")
    return first.resized(axis, sum(x.shape[i] for x in xs)), {"dim": i}


@op(lambda *xs, dim: np.stack(xs, axis=dim))
def stack(*xs: Type, axis: str, dim: int):
    _same_dtype(*xs)
    if not all(x == xs[0] for x in xs):
        raise GraphError(f"stack along {axis}: {', '.join(map(str, xs))} differ")
    return xs[0].replaced(dim, dim, {axis: len(xs)}), {"dim": dim}


@op(lambda x, shape, dim: np.broadcast_to(np.expand_dims(x, dim), shape))
def expand(x: Type, *, axis: str, size: int, before: str | None = None):
    """A new axis along which x repeats, placed before the named axis (or last)."""
    i = len(x.axes) if before is None else x.axes.index(before)
    out = x.replaced(i, i, {axis: size})
    return out, {"shape": out.shape, "dim": i}


def _numpy_pad(x, widths, mode):
    return np.pad(x, widths, mode="constant" if mode == "zeros" else mode)


@op(_numpy_pad)
def pad(x: Type, *, mode: str = "zeros", **widths: tuple[int, int]):
    """Pad named axes by (before, after): "zeros", "edge", or "reflect" without the border."""
    if mode not in ("zeros", "edge", "reflect"):
        raise GraphError(f"pad mode {mode}")
    if not set(widths) <= set(x.axes):
        raise GraphError(f"pad {tuple(widths)}: {x} lacks some of them")
    full = tuple(widths.get(a, (0, 0)) for a in x.axes)
    if mode == "reflect":
        for a, n, (before, after) in zip(x.axes, x.shape, full, strict=True):
            if max(before, after) >= n:
                raise GraphError(f"pad: cannot reflect {max(before, after)} beyond {a}={n}")
    shape = tuple(n + b + e for n, (b, e) in zip(x.shape, full, strict=True))
    return Type(x.axes, shape, x.dtype), {"widths": full, "mode": mode}


def _numpy_take(x, index, dim, batch_dims):
    if batch_dims == 0:
        return np.take(x, index, axis=dim)
    return np.stack(
        [_numpy_take(a, b, dim - 1, batch_dims - 1) for a, b in zip(x, index, strict=True)]
    )


@op(_numpy_take)
def take(x: Type, index: Type, *, axis: str):
    """x at integer positions along `axis`, which the axes of index that x lacks replace."""
    if index.dtype != "int32":
        raise GraphError(f"take: index is {index}, expected int32")
    batch = 0
    while batch < min(len(x.axes), len(index.axes)) and x.axes[batch] == index.axes[batch] != axis:
        if x.shape[batch] != index.shape[batch]:
            raise GraphError(f"take: {x} and {index} differ in {x.axes[batch]}")
        batch += 1
    i = x.axes.index(axis)
    axes = x.axes[:i] + index.axes[batch:] + x.axes[i + 1 :]
    if len(set(axes)) != len(axes):
        raise GraphError(f"take: result axes {axes} repeat a name; rename first")
    shape = x.shape[:i] + index.shape[batch:] + x.shape[i + 1 :]
    return Type(axes, shape, x.dtype), {"dim": i, "batch_dims": batch}


# definitions that mean the same of an array of numpy, torch or JAX
ALIKE = {name: OPS[name].numpy for name in ("sum", "mean", "split", "merge", "rename")}
