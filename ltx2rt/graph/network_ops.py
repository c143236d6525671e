"""Ops of networks: products, convolutions, norms, attention and positions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ltx2rt.errors import GraphError
from ltx2rt.graph.encodings import E4M3, ENCODINGS, decoded, quantise_rows
from ltx2rt.graph.ir import Axes, Grid, Node, Sizes, Spatial, Type
from ltx2rt.graph.ops import _positions, _same_dtype, _view, op


def linear_flops(node: Node) -> int:
    return 2 * node.inputs[0].type.num_elements * math.prod(node.args["out_shape"])


def _numpy_linear(x, weight, bias=None, *, num_contracted, out_shape):
    lead = x.shape[: x.ndim - num_contracted]
    y = x.reshape(-1, weight.shape[1]) @ weight.T
    if bias is not None:
        y = y + bias
    return y.reshape(*lead, *out_shape)


@op(_numpy_linear, flops=linear_flops, linear="plain")
def linear(x: Type, weight: Type, bias: Type | None = None, *, contract: Axes, out: Sizes):
    """x (..., *contract) times weight (prod out, prod contract) plus bias -> (..., *out)."""
    _same_dtype(x, weight, bias)
    n = len(contract)
    if not (x.axes[-n:] == tuple(contract) and weight.axes[1] == "*".join(contract)):
        own = tuple(weight.axes[1].split("*"))
        raise GraphError(f"linear: input ends in {x.axes[-n:]}, weight contracts {own}")
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
    x: Type, weight: Type, scale: Type, bias: Type | None = None, *, contract: Axes, out: Sizes
):
    """`linear` with an e4m3 weight and a float32 scale for each of its rows; x is quantised row by
    row on the way in. A row of x is what one result contracts. Products are summed in float32,
    scaled, and rounded once to x's dtype."""
    if weight.dtype != E4M3:
        raise GraphError(f"quantised_linear: weight {weight} must be {E4M3}")
    if scale != Type(scale.axes, (weight.shape[0], 1), "float32"):
        raise GraphError(f"quantised_linear: scale {scale} of {weight}")
    return linear(x, replace(weight, dtype=x.dtype), bias, contract=contract, out=out)


@op(lambda *fields, encoding, dtype: decoded(encoding, fields))
def unpack(*fields: Type, encoding: str, axis: str, size: int, dtype: str):
    """The matrix (rows, axis=size) of an encoding's fields, rounded once to dtype."""
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
    wide = node.inputs[0] if node.op == "conv_transpose" else node.outputs[0]
    return 2 * wide.type.num_elements * math.prod(node.inputs[1].type.shape[1:])


def _numpy_conv(x, weight, bias=None, *, stride, dilation):
    n = weight.ndim - 2
    w = _windows(x, weight.shape[2:], stride, dilation)
    y = np.tensordot(w, weight, axes=((1, *range(w.ndim - n, w.ndim)), tuple(range(1, 2 + n))))
    y = np.moveaxis(y, -1, 1)
    return y if bias is None else y + bias.reshape(-1, *(1,) * n)


@op(_numpy_conv, flops=conv_flops)
def conv(x: Type, weight: Type, bias: Type | None = None, *, stride: Spatial, dilation: Spatial):
    """Unpadded correlation: x (B, channels, *spatial), weight (out, in, *kernel) as in torch."""
    _same_dtype(x, weight, bias)
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
    shape = (x.shape[0], weight.shape[0], *spatial)
    return Type(x.axes, shape, x.dtype), {"stride": stride, "dilation": dilation}


def _numpy_conv_transpose(x, weight, bias=None, *, stride):
    b, _, t = x.shape
    k = weight.shape[2]
    y = np.zeros((b, weight.shape[1], (t - 1) * stride + k), x.dtype)
    for j in range(k):
        part = np.einsum("bit,io->bot", x, weight[:, :, j])
        y[:, :, j : j + (t - 1) * stride + 1 : stride] += part
    return y if bias is None else y + bias[:, None]


@op(_numpy_conv_transpose, flops=conv_flops)
def conv_transpose(x: Type, weight: Type, bias: Type | None = None, *, stride: int):
    """Uncropped 1-D transposed convolution: x (B, channels, time), weight (in, out, kernel)."""
    _same_dtype(x, weight, bias)
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
def rms_norm(x: Type, weight: Type | None = None, *, over: Axes, eps: float):
    """x / rms(x) over named axes, in float32, times weight, stored as one axis "a*b", if given."""
    if not set(over) <= set(x.axes):
        raise GraphError(f"rms_norm over {over}: {x} lacks some of them")
    view = None
    if weight is not None:
        if weight.axes != ("*".join(over),):
            raise GraphError(f"rms_norm over {over}: weight is {weight}")
        if weight.num_elements != math.prod(x.size(a) for a in over):
            raise GraphError(f"rms_norm: {x} does not fit weight {weight}")
        view = tuple(n if a in over else 1 for a, n in x.sizes.items())
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
    """Statistics per sample and group of channels over later axes: x (B, channels, *spatial)."""
    if x.shape[1] % groups:
        raise GraphError(
            f"group_norm: {x.axes[1]}={x.shape[1]} does not divide into {groups} groups"
        )
    return x, {"groups": groups, "eps": eps}


def _attend(q, k, v, bias=None, *, scale, bias_view):
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


@op(lambda *operands, **plan: _attend(*operands, **plan)[0], flops=_attention_flops)
def attention(q: Type, k: Type, v: Type, bias: Type | None = None, *, scale: float):
    """softmax(q k^T scale + bias) v with q (B, tokens, heads, head_dim), k and v (B, context,
    kv_heads, head_dim). heads is a multiple of kv_heads (query head i reads kv head i // (heads /
    kv_heads)). bias: additive, any of (B, tokens, context) in that order, shared by the heads.
    Softmax in float32."""
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
    """Rotate pairs (i, i + head_dim/2) of x (..., head_dim), in float32. cos, sin: float32, x's
    axes in order, of which any may be missing, then "pairs" = head_dim / 2."""
    if not (cos == sin and cos.axes[-1] == "pairs" and cos.dtype == "float32"):
        raise GraphError(f"rope: cos {cos}, sin {sin}")
    if x.shape[-1] != 2 * cos.shape[-1]:
        raise GraphError(f"rope: {x.axes[-1]}={x.shape[-1]} is not twice pairs={cos.shape[-1]}")
    return x, {"view": _view(cos, (*x.axes[:-1], "pairs"), "rope table")}


def window_starts(queries: int, keys: int, window: int, first: int) -> np.ndarray:
    """int[queries]: where on an axis of `keys` positions each window begins. Query i is at first +
    i, its window centred on it, but shifted inwards at a border."""
    return np.clip(first + np.arange(queries) - window // 2, 0, keys - window)


def window_blocks(
    queries: int, keys: int, window: int, first: int, block: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An axis of `neighbourhood_attention` in blocks: where each begins int[n], where the box of
    keys that it sees begins int[n], and which of these each of its queries sees bool[n, block,
    box]. All blocks have one size, and so have their boxes: the last block begins earlier rather
    than being shorter."""
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
    starts = [*map(window_starts, q.shape[1:4], k.shape[1:4], window, first)]
    columns = starts[2][:, None] + np.arange(window[2])
    y = np.empty_like(q)
    for t, frame in enumerate(starts[0]):
        for r, row in enumerate(starts[1]):
            rows = slice(row, row + window[1])
            box = (slice(None), slice(frame, frame + window[0]), rows, columns)
            scores = np.einsum("bwnd,bfrwcnd->bwnfrc", q[:, t, r], k[box]) * np.float32(scale)
            weights = np.exp(scores - scores.max(axis=(3, 4, 5), keepdims=True))
            weights /= weights.sum(axis=(3, 4, 5), keepdims=True)
            y[:, t, r] = np.einsum("bwnfrc,bfrwcnd->bwnd", weights, v[box])
    return y


@op(_numpy_neighbourhood_attention, flops=_neighbourhood_flops)
def neighbourhood_attention(q: Type, k: Type, v: Type, *, window: Grid, first: Grid, scale: float):
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
    grids = zip(q.axes[1:4], q.shape[1:4], k.shape[1:4], window, first, strict=True)
    for axis, n, m, w, f in grids:
        if w > m:
            raise GraphError(f"neighbourhood_attention: a window of {w} {axis}, but there are {m}")
        if not 0 <= f <= m - n:
            raise GraphError(f"neighbourhood_attention: {n} {axis} from {f} on, but there are {m}")
    return q, {"window": tuple(window), "first": tuple(first), "scale": float(scale)}


def _numpy_halo(x, *, dim, size):
    rows = np.moveaxis(x, dim, 1)
    edges = np.repeat(rows[:1, :1], size, axis=1), np.repeat(rows[-1:, -1:], size, axis=1)
    before = np.concatenate([edges[0], rows[:-1, -size:]])
    after = np.concatenate([rows[1:, :size], edges[1]])
    return np.moveaxis(np.concatenate([before, rows, after], axis=1), 1, dim)


@op(_numpy_halo)
def halo(x: Type, *, axis: str, size: int):
    """Slabs, which follow each other along the first axis of x, with `size` more positions at both
    ends of `axis`: of the slab before and after, copies of the border where there is none."""
    if not (x.axes.index(axis) and 0 < size <= x.size(axis)):
        raise GraphError(f"halo of {size} {axis}: {x}")
    return x.resized(axis, x.size(axis) + 2 * size), {"dim": x.axes.index(axis), "size": size}


def axial_frequencies(sizes: tuple[int, ...], theta: float) -> np.ndarray:
    """f32[sum of sizes / 2]: theta^(-2j / size) of every part, computed in float64."""
    parts = [1.0 / theta ** (np.arange(0, n, 2) / n) for n in sizes]
    return np.concatenate(parts).astype(np.float32)


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
def axial_rope(x: Type, *, sizes: Grid, first: Grid, theta: float):
    """Rotate pairs (2j, 2j + 1) of x (B, frames, rows, columns, heads, head_dim), in float32.

    The first sizes[0] numbers of head_dim turn with the frame, the next sizes[1] with the row, the
    rest with the column, each counted from `first` on.
    """
    if len(x.axes) != 6:
        raise GraphError(f"axial_rope: {x} has {len(x.axes)} axes, expected 6")
    if sum(sizes) != x.shape[-1] or any(n % 2 for n in sizes):
        raise GraphError(f"axial_rope: {x.axes[-1]}={x.shape[-1]} in parts of {tuple(sizes)}")
    frequencies = axial_frequencies(sizes, theta)
    return x, {"sizes": tuple(sizes), "first": tuple(first), "frequencies": frequencies}


def sinusoid_frequencies(size: int) -> np.ndarray:
    """exp(-ln(10000) i / (size/2)), i = 0..size/2-1, float32, as in diffusion transformers."""
    half = size // 2
    steps = np.arange(half, dtype=np.float32)
    return np.exp(np.float32(-math.log(10000.0)) * steps / np.float32(half))


def _numpy_sinusoid(t, frequencies):
    angles = t[..., None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)


@op(_numpy_sinusoid)
def sinusoid(t: Type, *, size: int):
    """[cos(t f), sin(t f)] along a new last axis "frequencies", cosine first."""
    if t.dtype != "float32":
        raise GraphError(f"sinusoid: {t} must be float32")
    result = Type((*t.axes, "frequencies"), (*t.shape, size), t.dtype)
    return result, {"frequencies": sinusoid_frequencies(size)}
