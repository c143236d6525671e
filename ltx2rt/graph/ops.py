"""The op table: for each op its typing rule and its numpy definition.

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
from ltx2rt.graph.encodings import E4M3, ENCODINGS, decoded, quantise_rows
from ltx2rt.graph.ir import Node, Type


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


def op(numpy: Callable[..., Any], **more: Any):
    """Enter the decorated rule into the table under its name, with its numpy definition. more: of
    the fields of `Op`."""

    def register(rule):
        name = rule.__name__.rstrip("_")
        OPS[name] = Op(name, rule, numpy, **more)
        return rule

    return register


def _same_dtype(*types: Type) -> str:
    if len({t.dtype for t in types}) != 1:
        raise GraphError(f"operands differ in dtype: {', '.join(map(str, types))}; cast first")
    return types[0].dtype


def _view(small: Type, axes: tuple[str, ...], what: str = "operand") -> tuple[int, ...]:
    """Shape of `small` with an axis of 1 for every one of `axes` it lacks."""
    it = iter(axes)
    if not all(a in it for a in small.axes):
        raise GraphError(f"{what} {small} does not fit the axes {axes} in order")
    sizes = small.sizes
    return tuple(sizes.get(a, 1) for a in axes)


def _positions(x: Type, axes: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(x.axes.index(a) for a in axes)


def _without(x: Type, axes: tuple[str, ...]) -> Type:
    kept = {a: n for a, n in x.sizes.items() if a not in axes}
    return Type(tuple(kept), tuple(kept.values()), x.dtype)


# --- constants ------------------------------------------------------------------------------------


@op(lambda value, shape, dtype: np.broadcast_to(value, shape))
def full(*, value: float, dtype: str, **sizes: int):
    """The number `value` everywhere; keyword order is axis order."""
    shape = tuple(sizes.values())
    return Type(tuple(sizes), shape, dtype), {
        "value": np.array(value, np.float32),
        "shape": shape,
        "dtype": dtype,
    }


# --- elementwise ----------------------------------------------------------------------------------


def _unary(name: str, numpy: Callable[..., np.ndarray]) -> None:
    OPS[name] = Op(name, lambda x: (x, {}), numpy)


def _sigmoid(x):
    return (0.5 * (1 + np.tanh(0.5 * x))).astype(x.dtype)


def _gelu(x):
    """The tanh approximation, the only GELU of the family."""
    return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))).astype(x.dtype)


_unary("exp", np.exp)
_unary("log", np.log)
_unary("sqrt", np.sqrt)
_unary("square", np.square)
_unary("sin", np.sin)
_unary("tanh", np.tanh)
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

    def numpy_definition(x, y, views):
        return numpy(x.reshape(views[0]), y.reshape(views[1]))

    OPS[name] = Op(name, rule, numpy_definition)


_binary("add", np.add)
_binary("sub", np.subtract)
_binary("mul", np.multiply)
_binary("div", np.divide)


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


@op(
    lambda c, x, y, views: np.where(
        c.reshape(views[0]) != 0, x.reshape(views[1]), y.reshape(views[2])
    )
)
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
    return x, {
        "salt": salt,
        "views": ((*keys.shape, *[1] * rest), ((*[1] * lead, *columns.shape)), _view(rate, x.axes)),
    }


# --- reductions -----------------------------------------------------------------------------------


def _reduction(name: str, numpy: Callable[..., np.ndarray]) -> None:
    def rule(x: Type, *, over: tuple[str, ...]):
        if not set(over) <= set(x.axes):
            raise GraphError(f"{name} over {over}: {x} lacks some of them")
        return _without(x, over), {"dims": _positions(x, over)}

    OPS[name] = Op(name, rule, lambda x, dims: numpy(x, axis=dims))


_reduction("sum", np.sum)
_reduction("mean", np.mean)
_reduction("max", np.max)
_reduction("min", np.min)


# --- shape ----------------------------------------------------------------------------------------


@op(lambda x, shape: x.reshape(shape))
def split(x: Type, *, axis: str, into: dict[str, int]):
    """One axis into several, the first the slowest: `into={"heads": 32, "head_dim": 128}`."""
    i = x.axes.index(axis)
    fits = math.prod(into.values()) == x.shape[i]
    if not fits:
        raise GraphError(f"split {axis}={x.shape[i]} into {into}: sizes do not multiply to it")
    out = x.replaced(i, i + 1, into)
    return out, {"shape": out.shape}


@op(lambda x, shape: x.reshape(shape))
def merge(x: Type, *, axes: tuple[str, ...], into: str):
    """Adjacent axes into one, the first the slowest."""
    i = x.axes.index(axes[0])
    stop = i + len(axes)
    if x.axes[i:stop] != tuple(axes):
        raise GraphError(f"merge {axes}: they are not adjacent in {x}")
    out = x.replaced(i, stop, {into: math.prod(x.shape[i:stop])})
    return out, {"shape": out.shape}


@op(lambda x, perm: x.transpose(perm))
def transpose(x: Type, *, axes: tuple[str, ...]):
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
    """Every `step`-th position of an axis from start up to stop, which is its end unless given;
    never empty."""
    i, n = x.axes.index(axis), x.size(axis)
    stop = n if stop is None else stop
    if not 0 <= start < stop <= n:
        raise GraphError(f"slice {axis} {start}:{stop} of {x}")
    return x.resized(axis, -(-(stop - start) // step)), {
        "dim": i,
        "start": start,
        "stop": stop,
        "step": step,
    }


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
        fits = x.axes == first.axes and x.resized(axis, 0) == first.resized(axis, 0)
        if not fits:
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
    kind: Any = {"zeros": "constant"}.get(mode, mode)
    return np.pad(x, widths, mode=kind)


@op(_numpy_pad)
def pad(x: Type, *, mode: str = "zeros", **widths: tuple[int, int]):
    """Pad named axes by (before, after) with zeros, the border ("edge") or its mirror less the
    border ("reflect")."""
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
    """x at integer positions along `axis`. Leading axes shared with index match; the rest of it
    replaces `axis`."""
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


# --- networks -------------------------------------------------------------------------------------


def linear_flops(node: Node) -> int:
    return 2 * node.inputs[0].type.num_elements * math.prod(node.args["out_shape"])


def _numpy_linear(x, weight, bias=None, *, num_contracted, out_shape):
    lead = x.shape[: x.ndim - num_contracted]
    y = x.reshape(-1, weight.shape[1]) @ weight.T
    if bias is not None:
        y = y + bias
    return y.reshape(*lead, *out_shape)


@op(_numpy_linear, flops=linear_flops, linear="plain")
def linear(
    x: Type,
    weight: Type,
    bias: Type | None = None,
    *,
    contract: tuple[str, ...],
    out: dict[str, int],
):
    """x (..., *contract) times weight (prod out, prod contract), plus bias (prod out) -> (...,
    *out)."""
    _same_dtype(x, weight, *([bias] if bias else []))
    n = len(contract)
    if not (x.axes[-n:] == tuple(contract) and weight.axes[1] == "*".join(contract)):
        raise GraphError(
            f"linear: input ends in {x.axes[-n:]}, weight contracts "
            f"{tuple(weight.axes[1].split('*'))}"
        )
    if math.prod(x.shape[-n:]) != weight.shape[1]:
        raise GraphError(f"linear: {x} does not fit weight {weight}")
    lead_axes, lead = x.axes[:-n], x.shape[:-n]
    result = Type(lead_axes + tuple(out), lead + tuple(out.values()), x.dtype)
    return result, {"num_contracted": n, "out_shape": tuple(out.values())}


def _numpy_quantised_linear(x, weight, scale, bias=None, *, num_contracted, out_shape):
    lead = x.shape[: x.ndim - num_contracted]
    values, row_scale = quantise_rows(x.reshape(-1, weight.shape[1]))
    y = (values.astype(np.float32) @ weight.astype(np.float32).T) * row_scale * scale.T
    if bias is not None:
        y = y + bias
    return y.reshape(*lead, *out_shape)


@op(_numpy_quantised_linear, flops=linear_flops, linear="quantised")
def quantised_linear(
    x: Type,
    weight: Type,
    scale: Type,
    bias: Type | None = None,
    *,
    contract: tuple[str, ...],
    out: dict[str, int],
):
    """`linear` with an e4m3 weight and a float32 scale for each of its rows; x is quantised row by
    row on the way in.

    A row of x is what one result contracts. Products are summed in float32, scaled, and rounded
    once to x's dtype.
    """
    if weight.dtype != E4M3:
        raise GraphError(f"quantised_linear: weight {weight} must be {E4M3}")
    if scale != Type(scale.axes, (weight.shape[0], 1), "float32"):
        raise GraphError(f"quantised_linear: scale {scale} of {weight}")
    return OPS["linear"].rule(x, replace(weight, dtype=x.dtype), bias, contract=contract, out=out)


@op(lambda *fields, encoding, dtype: decoded(encoding, fields))
def unpack(*fields: Type, encoding: str, axis: str, size: int, dtype: str):
    """The matrix (rows, axis=size) that the fields of an encoding stand for, rounded once to
    dtype."""
    rows, own = fields[0].axes[0], ENCODINGS[encoding].fields
    if len(fields) != len(own):
        raise GraphError(f"unpack: {len(fields)} fields, {encoding} has {len(own)}")
    expected = [
        Type((rows, t.axes[1]), (fields[0].shape[0], field.columns(size)), field.dtype)
        for field, t in zip(own, fields, strict=True)
    ]
    if list(fields) != expected:
        raise GraphError(
            f"unpack: {encoding} of {axis}={size} is not {', '.join(map(str, fields))}"
        )
    result = Type((rows, axis), (fields[0].shape[0], size), dtype)
    return result, {"encoding": encoding, "dtype": dtype}


def _windows(x, kernel, stride, dilation):
    """x (B, C, *spatial) -> (B, C, *out, *kernel), a view."""
    n = len(kernel)
    extent = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))
    view = np.lib.stride_tricks.sliding_window_view(x, extent, axis=tuple(range(2, 2 + n)))
    view = view[(slice(None), slice(None), *(slice(None, None, s) for s in stride))]
    return view[(Ellipsis, *(slice(None, None, d) for d in dilation))]


def conv_flops(node: Node) -> int:
    return 2 * node.outputs[0].type.num_elements * math.prod(node.inputs[1].type.shape[1:])


def _numpy_conv(x, weight, bias=None, *, stride, dilation):
    n = weight.ndim - 2
    w = _windows(x, weight.shape[2:], stride, dilation)
    y = np.tensordot(w, weight, axes=((1, *range(w.ndim - n, w.ndim)), tuple(range(1, 2 + n))))
    y = np.moveaxis(y, -1, 1)
    return y if bias is None else y + bias.reshape(-1, *(1,) * n)


@op(_numpy_conv, flops=conv_flops)
def conv(
    x: Type,
    weight: Type,
    bias: Type | None = None,
    *,
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
):
    """Correlation without padding: x (B, channels, *spatial), weight (out, in, *kernel) as torch
    stores it."""
    _same_dtype(x, weight, *([bias] if bias else []))
    kernel = weight.shape[2:]
    if len(x.axes) != 2 + len(kernel):
        raise GraphError(
            f"conv: {x} has {len(x.axes) - 2} spatial axes, weight {weight} has {len(kernel)}"
        )
    if x.shape[1] != weight.shape[1]:
        raise GraphError(f"conv: {x.axes[1]}={x.shape[1]}, weight {weight} reads {weight.shape[1]}")
    spatial = tuple(
        (n - (k - 1) * d - 1) // s + 1
        for n, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)
    )
    if min(spatial) <= 0:
        raise GraphError(f"conv: {x} is smaller than the kernel {kernel} dilated by {dilation}")
    return Type(x.axes, (x.shape[0], weight.shape[0], *spatial), x.dtype), {
        "stride": stride,
        "dilation": dilation,
    }


def _conv_transpose_flops(node: Node) -> int:
    return 2 * node.inputs[0].type.num_elements * math.prod(node.inputs[1].type.shape[1:])


def _numpy_conv_transpose(x, weight, bias=None, *, stride):
    b, _, t = x.shape
    k = weight.shape[2]
    y = np.zeros((b, weight.shape[1], (t - 1) * stride + k), x.dtype)
    for j in range(k):
        y[:, :, j : j + (t - 1) * stride + 1 : stride] += np.einsum(
            "bit,io->bot", x, weight[:, :, j]
        )
    return y if bias is None else y + bias[:, None]


@op(_numpy_conv_transpose, flops=_conv_transpose_flops)
def conv_transpose(x: Type, weight: Type, bias: Type | None = None, *, stride: int):
    """1-D transposed convolution, uncropped: x (B, channels, time), weight (in, out, kernel) as
    torch stores it."""
    _same_dtype(x, weight, *([bias] if bias else []))
    if x.shape[1] != weight.shape[0]:
        raise GraphError(
            f"conv_transpose: {x.axes[1]}={x.shape[1]}, weight {weight} reads {weight.shape[0]}"
        )
    length = (x.shape[2] - 1) * stride + weight.shape[2]
    return Type(x.axes, (x.shape[0], weight.shape[1], length), x.dtype), {"stride": stride}


def _numpy_rms_norm(x, weight=None, *, dims, weight_view, eps):
    y = x / np.sqrt(np.mean(np.square(x), axis=dims, keepdims=True) + np.float32(eps))
    return y if weight is None else y * weight.reshape(weight_view)


@op(_numpy_rms_norm)
def rms_norm(x: Type, weight: Type | None = None, *, over: tuple[str, ...], eps: float):
    """x / rms(x) over the named axes, in float32, times weight (stored as one axis "a*b") if
    given."""
    if not set(over) <= set(x.axes):
        raise GraphError(f"rms_norm over {over}: {x} lacks some of them")
    view = None
    if weight is not None:
        if weight.axes != ("*".join(over),):
            raise GraphError(f"rms_norm over {over}: weight is {weight}")
        fits = weight.num_elements == math.prod(x.size(a) for a in over)
        if not fits:
            raise GraphError(f"rms_norm: {x} does not fit weight {weight}")
        view = tuple(n if a in over else 1 for a, n in zip(x.axes, x.shape, strict=True))
    return x, {"dims": _positions(x, over), "weight_view": view, "eps": eps}


def _numpy_layer_norm(x, *, dim, eps):
    mean = x.mean(axis=dim, keepdims=True)
    return (x - mean) / np.sqrt(np.square(x - mean).mean(axis=dim, keepdims=True) + np.float32(eps))


@op(_numpy_layer_norm)
def layer_norm(x: Type, *, over: str, eps: float):
    """(x - mean) / sqrt(variance + eps) over one axis, without weight, in float32."""
    return x, {"dim": x.axes.index(over), "eps": eps}


def _numpy_group_norm(x, weight, bias, *, groups, eps):
    y = x.reshape(x.shape[0], groups, -1)
    y = _numpy_layer_norm(y, dim=2, eps=eps).reshape(x.shape)
    view = (-1, *(1,) * (x.ndim - 2))
    return y * weight.reshape(view) + bias.reshape(view)


@op(_numpy_group_norm)
def group_norm(x: Type, weight: Type, bias: Type, *, groups: int, eps: float):
    """Statistics per sample and group of channels over all later axes: x (B, channels,
    *spatial)."""
    if x.shape[1] % groups:
        raise GraphError(
            f"group_norm: {x.axes[1]}={x.shape[1]} does not divide into {groups} groups"
        )
    return x, {"groups": groups, "eps": eps}


def _attend(q, k, v, bias, scale, bias_view):
    """The attention, and the logarithm of its softmax's denominator (B, tokens, heads)."""
    b, t, heads, d = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(b, t, kv_heads, heads // kv_heads, d)
    scores = np.einsum("btngd,bsnd->bngts", q, k) * np.float32(scale)
    if bias is not None:
        scores = scores + bias.reshape(bias_view)[:, None]
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    y = np.einsum("bngts,bsnd->btngd", weights / total, v).reshape(b, t, heads, d)
    return y, (top + np.log(total))[..., 0].reshape(b, heads, t).swapaxes(1, 2)


def _attention_flops(node: Node) -> int:
    return 4 * node.inputs[0].type.num_elements * node.inputs[1].type.shape[1]


def _numpy_attention(q, k, v, bias=None, *, scale, bias_view):
    return _attend(q, k, v, bias, scale, bias_view)[0]


@op(_numpy_attention, flops=_attention_flops)
def attention(q: Type, k: Type, v: Type, bias: Type | None = None, *, scale: float):
    """softmax(q k^T scale + bias) v with q (B, tokens, heads, head_dim), k and v (B, context,
    kv_heads, head_dim).

    heads is a multiple of kv_heads (query head i reads kv head i // (heads / kv_heads)). bias:
    additive, any of (B, tokens, context) in that order, shared by the heads. Softmax in float32.
    """
    _same_dtype(q, k, v)
    if not (len(q.axes) == len(k.axes) == 4 and k == v):
        raise GraphError(f"attention: q {q}, k {k}, v {v}")
    if not (q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and q.shape[2] % k.shape[2] == 0):
        raise GraphError(f"attention: q {q} does not fit k {k}")
    view = None
    if bias is not None:
        if q.axes[1] == k.axes[1]:
            raise GraphError(
                f"attention with bias: {q.axes[1]} names queries and keys; rename the keys"
            )
        b, t, s = _view(bias, (q.axes[0], q.axes[1], k.axes[1]), "attention bias")
        if not (b in (1, q.shape[0]) and t in (1, q.shape[1]) and s in (1, k.shape[1])):
            raise GraphError(f"attention: bias {bias}")
        view = (b, 1, t, s)
    return q, {"scale": float(scale), "bias_view": view}


def _numpy_rope(x, cos, sin, *, view):
    half = x.shape[-1] // 2
    a, b, cos, sin = x[..., :half], x[..., half:], cos.reshape(view), sin.reshape(view)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@op(_numpy_rope)
def rope(x: Type, cos: Type, sin: Type):
    """Rotate pairs (i, i + head_dim/2) of x (..., head_dim), in float32.

    cos, sin: float32, x's axes in order, of which any may be missing, then "pairs" = head_dim / 2.
    """
    if not (cos == sin and cos.axes[-1] == "pairs" and cos.dtype == "float32"):
        raise GraphError(f"rope: cos {cos}, sin {sin}")
    if x.shape[-1] != 2 * cos.shape[-1]:
        raise GraphError(f"rope: {x.axes[-1]}={x.shape[-1]} is not twice pairs={cos.shape[-1]}")
    return x, {"view": _view(cos, (*x.axes[:-1], "pairs"), "rope table")}


def window_starts(queries: int, keys: int, window: int, first: int) -> np.ndarray:
    """int[queries]: where on an axis of `keys` positions the window of each query begins. Query i
    is at first + i; its window is centred on it, and shifted inwards where it would reach over a
    border."""
    return np.clip(first + np.arange(queries) - window // 2, 0, keys - window)


def window_blocks(
    queries: int, keys: int, window: int, first: int, block: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An axis of `neighbourhood_attention` in blocks: where each begins int[n], where the box of
    keys that it sees begins int[n], and which of these each of its queries sees bool[n, block,
    box].

    All blocks have one size, and so have their boxes: the last block begins earlier rather than
    being shorter.
    """
    block = min(block, queries)
    box = min(block + window - 1, keys)
    begins = np.minimum(np.arange(0, queries, block), queries - block)
    boxes = np.clip(first + begins - window // 2, 0, keys - box)
    starts = window_starts(queries, keys, window, first)[begins[:, None] + np.arange(block)]
    behind = boxes[:, None, None] + np.arange(box) - starts[:, :, None]
    return begins, boxes, (behind >= 0) & (behind < window)


def _neighbourhood_flops(node: Node) -> int:
    return 4 * node.inputs[0].type.num_elements * math.prod(node.attrs["window"])


def _numpy_neighbourhood_attention(q, k, v, *, window, first, scale):
    starts = [
        window_starts(*sizes)
        for sizes in zip(q.shape[1:4], k.shape[1:4], window, first, strict=True)
    ]
    columns = starts[2][:, None] + np.arange(window[2])
    y = np.empty_like(q)
    for t, frame in enumerate(starts[0]):
        for r, row in enumerate(starts[1]):
            box = (
                slice(None),
                slice(frame, frame + window[0]),
                slice(row, row + window[1]),
                columns,
            )
            scores = np.einsum("bwnd,bfrwcnd->bwnfrc", q[:, t, r], k[box]) * np.float32(scale)
            weights = np.exp(scores - scores.max(axis=(3, 4, 5), keepdims=True))
            weights /= weights.sum(axis=(3, 4, 5), keepdims=True)
            y[:, t, r] = np.einsum("bwnfrc,bfrwcnd->bwnd", weights, v[box])
    return y


@op(_numpy_neighbourhood_attention, flops=_neighbourhood_flops)
def neighbourhood_attention(
    q: Type,
    k: Type,
    v: Type,
    *,
    window: tuple[int, int, int],
    first: tuple[int, int, int],
    scale: float,
):
    """softmax(q k^T scale) v in which a query sees the window of keys around it, in a grid of three
    axes.

    q, k, v (B, frames, rows, columns, heads, head_dim); k and v may have more positions than q.
    Query i of an axis is at position first + i of the keys; it sees `window` keys, centred on it,
    or shifted inwards at a border, so that the count is constant (`window_starts`). Softmax in
    float32. Source: neighbourhood attention (NATTEN).
    """
    _same_dtype(q, k, v)
    if not (len(q.axes) == 6 and q.axes == k.axes and k == v):
        raise GraphError(f"neighbourhood_attention: q {q}, k {k}, v {v}")
    if not (q.shape[0] == k.shape[0] and q.shape[4:] == k.shape[4:]):
        raise GraphError(f"neighbourhood_attention: q {q} does not fit k {k}")
    for axis, n, m, w, f in zip(
        q.axes[1:4], q.shape[1:4], k.shape[1:4], window, first, strict=True
    ):
        if w > m:
            raise GraphError(f"neighbourhood_attention: a window of {w} {axis}, but there are {m}")
        if not 0 <= f <= m - n:
            raise GraphError(f"neighbourhood_attention: {n} {axis} from {f} on, but there are {m}")
    return q, {"window": tuple(window), "first": tuple(first), "scale": float(scale)}


def axial_frequencies(sizes: tuple[int, ...], theta: float) -> np.ndarray:
    """f32[sum of sizes / 2]: theta^(-2j / size) of every part, computed in float64."""
    return np.concatenate([1.0 / theta ** (np.arange(0, n, 2) / n) for n in sizes]).astype(
        np.float32
    )


def _numpy_axial_rope(x, *, sizes, first, frequencies):
    y, start = np.empty_like(x), 0
    for dim, (size, begin) in enumerate(zip(sizes, first, strict=True), 1):
        positions = np.arange(begin, begin + x.shape[dim], dtype=np.float32)
        angles = positions[:, None] * frequencies[start // 2 : (start + size) // 2]
        view = tuple(x.shape[dim] if i == dim else 1 for i in range(x.ndim - 1))
        cos, sin = np.cos(angles).reshape(*view, -1), np.sin(angles).reshape(*view, -1)
        even, odd = slice(start, start + size, 2), slice(start + 1, start + size, 2)
        a, b = x[..., even], x[..., odd]
        y[..., even], y[..., odd] = a * cos - b * sin, a * sin + b * cos
        start += size
    return y


@op(_numpy_axial_rope)
def axial_rope(x: Type, *, sizes: tuple[int, int, int], first: tuple[int, int, int], theta: float):
    """Rotate pairs (2j, 2j + 1) of x (B, frames, rows, columns, heads, head_dim), in float32.

    The first sizes[0] numbers of head_dim turn with the frame, the next sizes[1] with the row, the
    rest with the column, each counted from `first` on.
    """
    if len(x.axes) != 6:
        raise GraphError(f"axial_rope: {x} has {len(x.axes)} axes, expected 6")
    fits = sum(sizes) == x.shape[-1] and not any(n % 2 for n in sizes)
    if not fits:
        raise GraphError(f"axial_rope: {x.axes[-1]}={x.shape[-1]} in parts of {tuple(sizes)}")
    return x, {
        "sizes": tuple(sizes),
        "first": tuple(first),
        "frequencies": axial_frequencies(sizes, theta),
    }


def sinusoid_frequencies(size: int) -> np.ndarray:
    """exp(-ln(10000) i / (size/2)), i = 0..size/2-1, float32: the timestep embedding of diffusion
    transformers."""
    half = size // 2
    return np.exp(
        np.float32(-math.log(10000.0)) * np.arange(half, dtype=np.float32) / np.float32(half)
    )


def _numpy_sinusoid(t, frequencies):
    angles = t[..., None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)


@op(_numpy_sinusoid)
def sinusoid(t: Type, *, size: int):
    """[cos(t f), sin(t f)] along a new last axis "frequencies", cosine first."""
    if t.dtype != "float32":
        raise GraphError(f"sinusoid: {t} must be float32")
    return Type((*t.axes, "frequencies"), (*t.shape, size), t.dtype), {
        "frequencies": sinusoid_frequencies(size)
    }


# --- placement: written by passes, never by model text --------------------------------------------
# A graph with these runs on every device of a mesh in step. Their numpy definitions take all
# devices at once: operands and results are lists over the devices of one group, in the order of
# their coordinate on the mesh axis.

# ops in which devices exchange bytes; no other op does
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")


def _numpy_shard(group, *, dim, mesh_axis, parts):
    return [np.split(x, parts, axis=dim)[i] for i, x in enumerate(group)]


@op(_numpy_shard)
def shard(x: Type, *, axis: str, mesh_axis: str, parts: int):
    """This device's slice of an axis that all devices of `mesh_axis` hold whole. Moves no byte
    between devices."""
    i = x.axes.index(axis)
    if x.shape[i] % parts:
        raise GraphError(f"shard {axis}={x.shape[i]} over {mesh_axis}={parts}: does not divide")
    return x.resized(axis, x.shape[i] // parts), {"dim": i, "mesh_axis": mesh_axis, "parts": parts}


def _numpy_all_reduce(*groups, mesh_axis):
    return [[np.sum(group, axis=0, dtype=group[0].dtype)] * len(group) for group in groups]


@op(_numpy_all_reduce)
def all_reduce(*xs: Type, mesh_axis: str):
    """The sum of each operand over the devices of `mesh_axis`, all in one communication; one result
    per operand."""
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
    along `concat`.

    Operands travel in one communication; one result per operand.
    """
    results = []
    for x in xs:
        if x.shape[split] % parts:
            raise GraphError(
                f"all_to_all: {x.axes[split]}={x.shape[split]} does not divide by {parts}"
            )
        sent = x.resized(x.axes[split], x.shape[split] // parts)
        results.append(sent.resized(x.axes[concat], sent.shape[concat] * parts))
    _same_dtype(*xs)
    return tuple(results), {
        "split": split,
        "concat": concat,
        "mesh_axis": mesh_axis,
        "parts": parts,
    }


@op(lambda *xs: xs)
def barrier(*xs: Type):
    """Its operands, none of them there before all are: an order for compilers that choose their
    own."""
    if len(xs) < 2:
        raise GraphError("barrier: nothing to wait for")
    return xs, {}


@op(lambda x, dims: np.sum(np.square(x.astype(np.float32)), axis=dims))
def sum_squares(x: Type, *, over: tuple[str, ...]):
    """The sum of x^2 over the named axes, in float32: what devices that hold different heads add up
    for one RMSNorm."""
    return replace(_without(x, over), dtype="float32"), {"dims": _positions(x, over)}


def _numpy_rms_scale(x, sum_squares, weight=None, *, dims, weight_view, count, eps):
    mean = np.expand_dims(sum_squares, dims) / np.float32(count)
    y = x / np.sqrt(mean + np.float32(eps))
    return y if weight is None else y * weight.reshape(weight_view)


@op(_numpy_rms_scale)
def rms_scale(
    x: Type,
    sum_squares: Type,
    weight: Type | None = None,
    *,
    over: tuple[str, ...],
    count: int,
    eps: float,
):
    """x / sqrt(sum_squares / count + eps), in float32, times this device's part of the norm
    weight."""
    fits = sum_squares.axes == _without(x, over).axes and sum_squares.dtype == "float32"
    if not fits:
        raise GraphError(f"rms_scale: {sum_squares} does not fit {x}")
    view = (
        None
        if weight is None
        else tuple(n if a in over else 1 for a, n in zip(x.axes, x.shape, strict=True))
    )
    return x, {"dims": _positions(x, over), "weight_view": view, "count": count, "eps": eps}


def _numpy_attention_part(q, k, v, bias=None, *, scale, bias_view):
    y, log_sum = _attend(q, k, v, bias, scale, bias_view)
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
    """The attention to all keys from its parts (parts, B, tokens, heads, head_dim + 2), weighed in
    float32."""
    return parts.unstacked().resized(parts.axes[-1], parts.shape[-1] - 2), {}
