"""Each op of the table as a JAX function of arrays and its arguments (`OPS`), and a TPU's
replacements (`ON_TPU`).

Frequent ops are written in `lax`: jax.numpy traces a separate function for every new shape. float32
operands are multiplied in float32 (precision HIGHEST): a TPU's default rounds them to bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from ltx2rt_kernels.attention import tpu as kernel
from ltx2rt_kernels.neighbourhood_attention import tpu as neighbourhood_kernel

from ltx2rt.fused.snake_beta import snake_windows
from ltx2rt.graph.encodings import E4M3, E4M3_STEP, E4M3_TINY, ENCODINGS, rotation
from ltx2rt.graph.network_ops import window_blocks
from ltx2rt.graph.ops import drawn_bits
from ltx2rt.scheduling import in_use
from ltx2rt_tpu.as_run import LEAST_BYTES

DECODED = 2**21  # bytes of a stored matrix that are decoded at once


def _view(x: Array, shape: tuple[int, ...]) -> Array:
    return x if x.shape == shape else lax.reshape(x, shape)


def _binary(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, y, views: function(_view(x, views[0]), _view(y, views[1]))


def _like(value: float, x: Array) -> np.ndarray:
    """A number of x's dtype, whatever the process takes Python's for."""
    return np.asarray(value, x.dtype)


def zeros_around(x: Array, widths) -> Array:
    return lax.pad(x, _like(0, x), [(before, after, 0) for before, after in widths])


def _mean(x: Array, axes: tuple[int, ...]) -> Array:
    """The result in float32, with axes of size 1 where it was taken."""
    total = lax.reduce_sum(x, axes)
    return lax.expand_dims(lax.div(total, _like(math.prod(x.shape[i] for i in axes), total)), axes)


OPS: dict[str, Callable[..., Any]] = {
    "full": lambda value, shape, dtype: jnp.full(shape, value, dtype),
    "exp": lax.exp,
    "log": lax.log,
    "sqrt": lax.sqrt,
    "square": lax.square,
    "sin": lax.sin,
    "tanh": lax.tanh,
    "sigmoid": lax.logistic,
    "silu": lambda x: lax.mul(x, lax.logistic(x)),
    "gelu": partial(jax.nn.gelu, approximate=True),
    "add": _binary(lax.add),
    "sub": _binary(lax.sub),
    "mul": _binary(lax.mul),
    "div": _binary(lax.div),
    "clamp": lambda x, low, high: jnp.clip(x, low, high),
    "leaky_relu": lambda x, slope: jnp.where(x >= 0, x, x * slope),
    "cast": lambda x, dtype: lax.convert_element_type(x, dtype),
    "sum": lambda x, dims: x.sum(dims),
    "mean": lambda x, dims: x.mean(dims),
    "max": lambda x, dims: x.max(dims),
    "min": lambda x, dims: x.min(dims),
    "split": _view,
    "merge": _view,
    "transpose": lambda x, perm: lax.transpose(x, perm),
    "rename": lambda x: x,
    "at": lambda x, dim, index: lax.index_in_dim(x, index, axis=dim, keepdims=False),
    "concat": lambda *xs, dim: lax.concatenate(xs, dim),
    "stack": lambda *xs, dim: lax.concatenate([lax.expand_dims(x, (dim,)) for x in xs], dim),
    "expand": lambda x, shape, dim: lax.broadcast_in_dim(
        x, shape, [i for i in range(len(shape)) if i != dim]
    ),
}


def op(function):
    OPS[function.__name__.rstrip("_")] = function
    return function


def _precision(x: Array) -> lax.Precision | None:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


@op
def affine(x: Array, scale: float, offset: float) -> Array:
    x = lax.mul(x, _like(scale, x)) if scale != 1.0 else x
    return lax.add(x, _like(offset, x)) if offset != 0.0 else x


@op
def select(condition: Array, x: Array, y: Array, views) -> Array:
    return jnp.where(condition.reshape(views[0]) != 0, x.reshape(views[1]), y.reshape(views[2]))


@op
def modulate(x: Array, scale: Array, shift: Array, views) -> Array:
    return lax.add(lax.mul(x, lax.add(_view(scale, views[0]), _like(1, x))), _view(shift, views[1]))


@op
def slice_(x: Array, dim: int, start: int, stop: int, step: int) -> Array:
    return lax.slice_in_dim(x, start, stop, step, axis=dim)


@op
def pad(x: Array, widths, mode: str) -> Array:
    return zeros_around(x, widths) if mode == "zeros" else jnp.pad(x, widths, mode=mode)


@op
def take(x: Array, index: Array, dim: int, batch_dims: int) -> Array:
    if batch_dims == 0:
        return jnp.take(x, index, axis=dim)
    return jax.vmap(lambda a, b: take(a, b, dim - 1, batch_dims - 1))(x, index)


@op
def linear(
    x: Array, weight: Array, bias: Array | None = None, *, num_contracted: int, out_shape
) -> Array:
    lead = x.shape[: x.ndim - num_contracted]
    x = _view(x, (*lead, weight.shape[1]))
    y = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision=_precision(x))
    y = y if bias is None else lax.add(y, lax.reshape(bias, (*(1,) * len(lead), len(bias))))
    return _view(y, (*lead, *out_shape))


def quantise_rows(x: Array) -> tuple[Array, Array]:
    """x [..., n] as e4m3, and the float32 scale [..., 1] of each row."""
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(x).max(axis=-1, keepdims=True), E4M3_TINY) * E4M3_STEP
    return (x / scale).astype(E4M3), scale


class JaxOps:
    """The namespace of `graph.encodings`."""

    quantise_rows = staticmethod(quantise_rows)

    @staticmethod
    def cast(x: Array, dtype: str) -> Array:
        return lax.convert_element_type(x, dtype)

    @staticmethod
    def bits(x: Array, dtype: str) -> Array:
        array = lax.bitcast_convert_type(x, dtype)
        return array if array.ndim == x.ndim else lax.expand_dims(array, (array.ndim,))

    @staticmethod
    def stack(arrays: Sequence[Array], axis: int) -> Array:
        return jnp.stack(arrays, axis)

    @staticmethod
    def lookup(table: tuple[float, ...], index: Array) -> Array:
        """Look up by comparing: TPUs have no fast gather."""
        found = jnp.full(index.shape, table[0], jnp.float32)
        for i, value in enumerate(table[1:], 1):
            found = jnp.where(index == i, jnp.float32(value), found)
        return found

    @staticmethod
    def where(condition: Array, x: Array, y: Array) -> Array:
        return jnp.where(condition, x, y)

    @staticmethod
    def rotate(x: Array, size: int) -> Array:
        return jnp.matmul(x, rotation(size), precision=lax.Precision.HIGHEST)

    @staticmethod
    def largest(x: Array) -> Array:
        return x.max(axis=1, keepdims=True)

    @staticmethod
    def rint(x: Array) -> Array:
        return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def encode(encoding: str, x: Array) -> tuple[Array, ...]:
    """The fields of a matrix [rows, n]."""
    function = ENCODINGS[encoding].encode
    assert function is not None, f"{encoding} is only read from files"
    return function(JaxOps, x)


@op
def unpack(*fields: Array, encoding: str, dtype: str) -> Array:
    """XLA decodes where the product reads its operand; blocks of GGUF, which it does not, some rows
    at a time. It may drop a cast to bfloat16 and back, this rounding it keeps."""

    def decoded(rows: Sequence[Array]) -> Array:
        matrix = ENCODINGS[encoding].decode(JaxOps, *rows)
        matrix = lax.reduce_precision(matrix, 8, 7) if dtype == "bfloat16" else matrix
        return lax.convert_element_type(matrix, dtype)

    rows, width = fields[0].shape
    least = -(-rows * width // DECODED) if ENCODINGS[encoding].group > 1 else 1
    parts = next(n for n in range(least, rows + 1) if rows % n == 0)
    if parts == 1:
        return decoded(fields)
    matrix = lax.map(decoded, [x.reshape(parts, rows // parts, x.shape[1]) for x in fields])
    return matrix.reshape(rows, matrix.shape[2])


@op
def quantised_linear(
    x: Array,
    weight: Array,
    scale: Array,
    bias: Array | None = None,
    *,
    num_contracted: int,
    out_shape,
) -> Array:
    """e4m3 numbers are bfloat16 numbers: the product is one of bfloat16, summed in float32."""
    lead = x.shape[: x.ndim - num_contracted]
    values, row_scale = quantise_rows(x.reshape(*lead, weight.shape[1]))
    a, b = values.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    y = lax.dot_general(a, b, (((a.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    y = y * row_scale * scale[:, 0]
    y = y if bias is None else y + bias
    return y.astype(x.dtype).reshape(*lead, *out_shape)


@op
def conv(x: Array, weight: Array, bias: Array | None = None, *, stride, dilation) -> Array:
    return biased(_conv(x, weight, stride=stride, dilation=dilation, channels_last=True), bias)


def _conv_on_tpu(x: Array, weight: Array, bias: Array | None = None, *, stride, dilation) -> Array:
    n = weight.ndim - 2
    if n == 1 and 1 in (*stride, *dilation):
        return biased(_conv_by_taps(x, weight, stride=stride[0], dilation=dilation[0]), bias)
    by_frames = n == 3 and stride[0] == dilation[0] == 1
    return biased(
        (_conv_by_frames if by_frames else _conv)(x, weight, stride=stride, dilation=dilation), bias
    )


def biased(y: Array, bias: Array | None) -> Array:
    """y (B, channels, ...) + bias (channels)."""
    return (
        y if bias is None else lax.add(y, lax.reshape(bias, (1, len(bias), *(1,) * (y.ndim - 2))))
    )


def _conv(x: Array, weight: Array, *, stride, dilation, channels_last=False) -> Array:
    """channels_last: as the fast convolution of a CPU has it; XLA rearranges only outside of loops,
    and inside of them it would take its plain one, ten times slower."""
    pads = [(0, 0)] * len(stride)
    y = partial(
        lax.conv_general_dilated, window_strides=stride, padding=pads, rhs_dilation=dilation
    )
    y = partial(y, precision=_precision(x))
    if not channels_last:
        return y(x, weight)
    axes, inner = "DHW"[: len(stride)], range(2, x.ndim)
    x, weight = lax.transpose(x, (0, *inner, 1)), lax.transpose(weight, (*inner, 1, 0))
    found = y(x, weight, dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"))
    return lax.transpose(found, (0, x.ndim - 1, *range(1, x.ndim - 1)))


def _conv_by_frames(x: Array, weight: Array, *, stride, dilation) -> Array:
    """Convolution over (frames, rows, columns) as a loop over the frames of the result: for all
    frames at once the TPU compiler takes several times as long, and twice the memory."""
    depth = weight.shape[2]

    def frame(i):
        return _conv(
            lax.dynamic_slice_in_dim(x, i, depth, axis=2), weight, stride=stride, dilation=dilation
        )

    # (frames, B, channels, 1, rows, columns)
    y = lax.map(frame, jnp.arange(x.shape[2] - depth + 1))
    return jnp.moveaxis(y[:, :, :, 0], 0, 2)


# a trace for each shape, not for each of a vocoder's 200
@partial(jax.jit, static_argnames=("stride", "dilation"))
def _conv_by_taps(x: Array, weight: Array, *, stride: int = 1, dilation: int = 1) -> Array:
    """Convolution over time by a loop of products, with one stride's samples as channels: the TPU
    compiler takes seconds for a float32 convolution, a minute for the STFT's."""
    if stride > 1:
        assert dilation == 1, f"stride {stride} with dilation {dilation}"
        steps = (x.shape[2] - weight.shape[2]) // stride + -(-weight.shape[2] // stride)
        x, weight = (_columns(y, stride) for y in (x[..., : steps * stride], weight))
        x = jnp.pad(x, ((0, 0), (0, 0), (0, steps - x.shape[2])))
    taps = weight.shape[2]
    time = x.shape[2] - (taps - 1) * dilation
    matrices = weight.transpose(2, 0, 1)
    return matrix_taps(lambda tap: matrices[tap], x, lambda tap: tap * dilation, taps, time)


def matrix_taps(matrix: Callable, x: Array, start: Callable, taps: int | Array, time: int) -> Array:
    """The sum over taps of matrix(tap) (out, channels) x samples [start(tap), start(tap) + time) of
    x (B, channels, samples): (B, out, time)."""

    def add(tap, y):
        window = lax.dynamic_slice_in_dim(x, start(tap), time, axis=2, allow_negative_indices=False)
        contract = (((1,), (1,)), ((), ()))
        product = lax.dot_general(
            matrix(tap),
            window,
            contract,
            precision=_precision(x),
            preferred_element_type=jnp.float32,
        )
        return lax.add(y, product)

    out = jax.eval_shape(matrix, 0).shape[0]
    y = lax.fori_loop(0, taps, add, jnp.zeros((out, x.shape[0], time), jnp.float32))
    return y.transpose(1, 0, 2).astype(x.dtype)


def _columns(x: Array, size: int) -> Array:
    """(a, b, time), zeros behind -> (a, b size, time / size)."""
    a, b, time = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -time % size)))
    return x.reshape(a, b, -1, size).swapaxes(2, 3).reshape(a, b * size, -1)


@op
def conv_transpose(x: Array, weight: Array, bias: Array | None = None, *, stride: int) -> Array:
    return biased(_transposed(x, weight, stride=stride), bias)


def _conv_transpose_on_tpu(
    x: Array, weight: Array, bias: Array | None = None, *, stride: int
) -> Array:
    one = weight.shape[:2] == (1, 1) and stride <= weight.shape[2]
    return biased((_transposed_filter if one else _transposed)(x, weight, stride=stride), bias)


def _transposed(x: Array, weight: Array, *, stride: int) -> Array:
    k = weight.shape[2]
    kernel = jnp.flip(weight, 2).transpose(1, 0, 2)
    return lax.conv_general_dilated(
        x, kernel, (1,), [(k - 1, k - 1)], lhs_dilation=(stride,), precision=_precision(x)
    )


LANES = 128  # lanes of a TPU


def _transposed_filter(x: Array, weight: Array, *, stride: int) -> Array:
    """Convolution of one channel: every LANES samples, and earlier ones that count, times a band of
    the filter: as a convolution it compiles for a minute, as shifted sums 20 s."""
    (b, c, time), taps = x.shape, weight.shape[2]
    reads = -(-taps // stride)  # samples that go into one
    rows = -(-(time + reads - 1) // LANES)
    here = jnp.pad(x, ((0, 0), (0, 0), (0, rows * LANES - time))).reshape(b, c, rows, LANES)
    before = jnp.pad(here[:, :, :-1, LANES - reads + 1 :], ((0, 0), (0, 0), (1, 0), (0, 0)))
    read, made = np.arange(LANES + reads - 1)[:, None], np.arange(LANES * stride)
    tap = (made // stride + reads - 1 - read) * stride + made % stride
    inside = (tap >= 0) & (tap < taps)
    band = jnp.where(inside, weight[0, 0][np.where(inside, tap, 0)], 0)
    y = jnp.matmul(jnp.concatenate([before, here], axis=3), band, precision=_precision(x))
    return y.reshape(b, c, -1)[..., : (time - 1) * stride + taps]


@op
def rms_norm(x: Array, weight: Array | None = None, *, dims, weight_view, eps: float) -> Array:
    wide = lax.convert_element_type(x, jnp.float32)
    y = lax.mul(wide, lax.rsqrt(lax.add(_mean(lax.square(wide), dims), _like(eps, wide))))
    return lax.convert_element_type(_weighted(y, weight, weight_view), x.dtype)


def _weighted(y: Array, weight: Array | None, view) -> Array:
    return (
        y
        if weight is None
        else lax.mul(y, _view(lax.convert_element_type(weight, jnp.float32), view))
    )


@op
def dropout(x: Array, keys: Array, columns: Array, rate: Array, *, salt: int, views) -> Array:
    rate = _view(rate, views[2])
    drawn = lax.convert_element_type(drawn_bits(keys, columns, salt, views), jnp.float32)
    y = lax.convert_element_type(x, jnp.float32) * (1 / (1 - rate))
    return jnp.where(drawn * 2.0**-24 >= rate, y, 0).astype(x.dtype)


@op
def shard(x: Array, dim: int, mesh_axis: str, parts: int) -> Array:
    size = x.shape[dim] // parts
    return lax.dynamic_slice_in_dim(x, lax.axis_index(mesh_axis) * size, size, axis=dim)


@op
def all_reduce(*xs: Array, mesh_axis: str) -> tuple[Array, ...]:
    return lax.psum(xs, mesh_axis)


@op
def all_gather(x: Array, dim: int, mesh_axis: str, parts: int) -> Array:
    return lax.all_gather(x, mesh_axis, axis=dim, tiled=True)


def _exchanged(x: Array, mesh_axis: str) -> Array:
    """Piece i of the first axis goes to device i, and what device i sends takes its place."""
    return lax.all_to_all(x, mesh_axis, 0, 0)


@op
def all_to_all(
    *xs: Array, split: int, concat: int, mesh_axis: str, parts: int, exchange=_exchanged
) -> tuple[Array, ...]:
    """Operands (B, tokens, heads, head_dim) of one shape travel stacked, in one communication.

    The devices' pieces lie along a first axis, heads before tokens in each: of the axes as they are
    the TPU compiler makes the one that is split the outermost, and copies tiles of as few rows as a
    device has heads (3 ms of a step of 88 on tpu7x).
    """
    if len({x.shape for x in xs}) > 1:
        return tuple(
            all_to_all(
                x, split=split, concat=concat, mesh_axis=mesh_axis, parts=parts, exchange=exchange
            )[0]
            for x in xs
        )
    split, concat = split + 1, concat + 1
    x = jnp.stack(xs)
    x = x.reshape(*x.shape[:split], parts, -1, *x.shape[split + 1 :])
    y = exchange(jnp.moveaxis(x, split, 0).swapaxes(-3, -2), mesh_axis)
    y = jnp.moveaxis(y.swapaxes(-3, -2), 0, concat)
    return tuple(y.reshape(*y.shape[:concat], -1, *y.shape[concat + 2 :]))


@op
def attention_part(
    q: Array, k: Array, v: Array, bias: Array | None = None, *, scale: float, bias_view
) -> Array:
    b, t, heads, d = q.shape
    scores = _scores(q, k, bias, scale, bias_view)
    log_sum = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - log_sum).astype(v.dtype)
    y = jnp.einsum(
        "bngts,bsnd->btngd", weights, v, precision=_precision(v), preferred_element_type=jnp.float32
    ).reshape(b, t, heads, d)
    return _part(y, log_sum.reshape(b, heads, t).swapaxes(1, 2), q.dtype)


def _part(y: Array, log_sum: Array, dtype: jnp.dtype) -> Array:
    """y and, behind it, log_sum in two halves; by its bits: XLA takes x - bfloat16(x) for zero."""
    bits = lax.bitcast_convert_type(log_sum, jnp.uint32) & jnp.uint32(0xFFFF0000)
    upper = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.concatenate([y, upper[..., None], (log_sum - upper)[..., None]], axis=-1).astype(
        dtype
    )


@op
def attention_join(parts: Array) -> Array:
    wide = parts.astype(jnp.float32)
    weights = jax.nn.softmax(wide[..., -2:-1] + wide[..., -1:], axis=0)
    return (wide[..., :-2] * weights).sum(axis=0).astype(parts.dtype)


@op
def sum_squares(x: Array, dims) -> Array:
    return lax.reduce_sum(lax.square(lax.convert_element_type(x, jnp.float32)), dims)


@op
def rms_scale(
    x: Array,
    sum_squares: Array,
    weight: Array | None = None,
    *,
    dims,
    weight_view,
    count: int,
    eps: float,
) -> Array:
    mean = lax.div(lax.expand_dims(sum_squares, dims), _like(count, sum_squares))
    scale = lax.rsqrt(lax.add(mean, _like(eps, mean)))
    y = lax.mul(lax.convert_element_type(x, jnp.float32), scale)
    return lax.convert_element_type(_weighted(y, weight, weight_view), x.dtype)


def _standardise(x: Array, axis: int, eps: float) -> Array:
    x = lax.sub(x, _mean(x, (axis,)))
    return lax.mul(x, lax.rsqrt(lax.add(_mean(lax.square(x), (axis,)), _like(eps, x))))


@op
def layer_norm(x: Array, dim: int, eps: float) -> Array:
    return _standardise(x.astype(jnp.float32), dim, eps).astype(x.dtype)


@op
def group_norm(x: Array, weight: Array, bias: Array, groups: int, eps: float) -> Array:
    y = _standardise(x.astype(jnp.float32).reshape(x.shape[0], groups, -1), 2, eps).reshape(x.shape)
    y = _weighted(y, weight, (1, len(weight), *(1,) * (x.ndim - 2)))
    return biased(y, bias.astype(jnp.float32)).astype(x.dtype)


def _scores(q: Array, k: Array, bias: Array | None, scale: float, bias_view) -> Array:
    """float32 (B, kv_heads, group, tokens, context)."""
    b, t, heads, d = q.shape
    n = k.shape[2]
    q = q.reshape(b, t, n, heads // n, d)
    scores = jnp.einsum(
        "btngd,bsnd->bngts", q, k, precision=_precision(q), preferred_element_type=jnp.float32
    )
    scores = lax.mul(scores, _like(scale, scores))
    return scores if bias is None else scores + bias.reshape(bias_view)[:, None].astype(jnp.float32)


# rows of weighed attention at once; with the bias of 12288 tokens all would take 19 GB
SCORES_BYTES = 2**28


@op
def attention(
    q: Array, k: Array, v: Array, bias: Array | None = None, *, scale: float, bias_view
) -> Array:
    """Attend, with a bias in blocks of queries that SCORES_BYTES hold, at least a kernel's."""
    tokens = q.shape[1]
    room = SCORES_BYTES // (4 * q.shape[0] * q.shape[2] * k.shape[1])
    size = max(room // kernel.LANES, 1) * kernel.LANES
    if bias is None or tokens <= size:
        return _attend(q, k, v, bias, scale, bias_view)
    bias, per_query = bias.reshape(bias_view), bias_view[2] > 1
    view = (*bias_view[:2], size if per_query else 1, bias_view[3])

    def attend(number, y):
        # the last block may repeat queries of the one before
        start = jnp.minimum(number * size, tokens - size)
        queries = lax.dynamic_slice_in_dim(q, start, size, 1)
        weighed = lax.dynamic_slice_in_dim(bias, start, size, 2) if per_query else bias
        found = _attend(queries, k, v, weighed, scale, view)
        return lax.dynamic_update_slice_in_dim(y, found, start, 1)

    return lax.fori_loop(0, -(-tokens // size), attend, jnp.zeros_like(q))


def _attention_on_tpu(
    q: Array, k: Array, v: Array, bias: Array | None = None, *, scale: float, bias_view
) -> Array:
    """Use the Pallas kernel if it supports these operands."""
    if kernel.why_not(q, k, v, bias, scale=scale, bias_view=bias_view):
        return attention(q, k, v, bias, scale=scale, bias_view=bias_view)
    return kernel.attention(q, k, v, scale=scale)


def _attend(q: Array, k: Array, v: Array, bias: Array | None, scale: float, bias_view) -> Array:
    """Attend by batched products, the only ones that XLA runs fast on a CPU even in a loop."""
    b, t, heads, d = q.shape
    n = k.shape[2]
    weights = jax.nn.softmax(_scores(q, k, bias, scale, bias_view), axis=-1).astype(v.dtype)
    weights = lax.reshape(weights, (b, n, heads // n * t, v.shape[1]))
    y = lax.batch_matmul(weights, lax.transpose(v, (0, 2, 1, 3)), precision=_precision(v))
    y = lax.reshape(y, (b, n, heads // n, t, d))
    return lax.reshape(lax.transpose(y, (0, 3, 1, 2, 4)), q.shape)


@op
def rope(x: Array, cos: Array, sin: Array, view) -> Array:
    half, dim = x.shape[-1] // 2, x.ndim - 1
    a, b = lax.split(lax.convert_element_type(x, jnp.float32), (half, half), dim)
    cos, sin = _view(cos, view), _view(sin, view)
    first = lax.sub(lax.mul(a, cos), lax.mul(b, sin))
    second = lax.add(lax.mul(b, cos), lax.mul(a, sin))
    return lax.convert_element_type(lax.concatenate([first, second], dim), x.dtype)


# Frames, rows and columns of queries that are multiplied with one box of keys. Of those tried on
# both TPUs these take the fewest cycles by the compiler's code: larger blocks see more keys that
# their windows leave out, smaller ones copy more.
NEIGHBOURS = (4, 4, 8)


@op
def neighbourhood_attention(q: Array, k: Array, v: Array, window, first, scale: float) -> Array:
    """A loop over blocks of queries, each with the box of keys that its windows reach: one block's
    scores at once. Heads come first, and queries and keys of a block are one axis each: a TPU pads
    the last two axes to whole tiles."""
    plans = [
        window_blocks(*sizes)
        for sizes in zip(q.shape[1:4], k.shape[1:4], window, first, NEIGHBOURS, strict=True)
    ]
    begins, boxes, masks = zip(*plans, strict=True)
    block, box = ([mask.shape[i] for mask in masks] for i in (1, 2))
    counts = [len(begin) for begin in begins]
    begins, boxes, masks = ([jnp.asarray(x) for x in found] for found in (begins, boxes, masks))
    q, k, v = (jnp.moveaxis(x, 4, 1) for x in (q, k, v))
    lead, dim = q.shape[:2], q.shape[5]

    def attend(number, y):
        place = jnp.unravel_index(number, counts)
        here, there = (
            (0, 0, *(x[i] for x, i in zip(start, place, strict=True)), 0)
            for start in (begins, boxes)
        )
        queries = lax.dynamic_slice(q, here, (*lead, *block, dim)).reshape(*lead, -1, dim)
        keys, values = (
            lax.dynamic_slice(x, there, (*lead, *box, dim)).reshape(*lead, -1, dim) for x in (k, v)
        )
        scores = jnp.einsum(
            "bnqd,bnkd->bnqk",
            queries,
            keys,
            precision=_precision(q),
            preferred_element_type=jnp.float32,
        )
        t, r, c = (mask[i] for mask, i in zip(masks, place, strict=True))
        seen = t[:, None, None, :, None, None] & r[:, None, None, :, None] & c[:, None, None, :]
        scores = jnp.where(seen.reshape(scores.shape[2:]), scores * scale, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        found = jnp.einsum("bnqk,bnkd->bnqd", weights, values, precision=_precision(v))
        return lax.dynamic_update_slice(y, found.astype(y.dtype).reshape(*lead, *block, dim), here)

    return jnp.moveaxis(lax.fori_loop(0, math.prod(counts), attend, jnp.zeros_like(q)), 1, 4)


def _neighbourhood_attention_on_tpu(
    q: Array, k: Array, v: Array, window, first, scale: float
) -> Array:
    """Use the Pallas kernel if it is on and supports these operands."""
    plan = {"window": window, "first": first, "scale": scale}
    if not in_use("neighbourhood") or neighbourhood_kernel.why_not(q, k, v, **plan):
        return neighbourhood_attention(q, k, v, **plan)
    return neighbourhood_kernel.neighbourhood_attention(q, k, v, **plan)


@op
def axial_rope(x: Array, frequencies, sizes, first) -> Array:
    parts, start = [], 0
    for dim, (size, begin) in enumerate(zip(sizes, first, strict=True), 1):
        positions = jnp.arange(begin, begin + x.shape[dim], dtype=jnp.float32)
        angles = positions[:, None] * frequencies[start // 2 : (start + size) // 2]
        view = [x.shape[dim] if i == dim else 1 for i in range(x.ndim - 1)]
        cos, sin = (f(angles).reshape(*view, -1) for f in (jnp.cos, jnp.sin))
        a, b = (x[..., start + i : start + size : 2].astype(jnp.float32) for i in (0, 1))
        parts.append(
            jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(*x.shape[:-1], size)
        )
        start += size
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


@op
def sinusoid(t: Array, frequencies) -> Array:
    angles = t[..., None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


@op
def snake_beta(x: Array, up: Array, down: Array, alpha: Array, beta: Array, *, eps: float) -> Array:
    """Filters as sums of shifted signals, at twice the rate the even samples apart from the odd
    ones: a convolution of one channel leaves a TPU's matrix unit idle and keeps its compiler busy
    for many seconds."""
    t, taps = x.shape[2], up.shape[-1]
    pad, start, (before, _) = snake_windows(taps)
    ups, downs = (
        lax.split(lax.reshape(y, (1, 1, taps)), (1,) * taps, 2)
        for y in (lax.mul(up, _like(2, up)), down)
    )
    rate, share = (lax.expand_dims(lax.exp(y), (0, 2)) for y in (alpha, beta))
    share = lax.add(share, _like(eps, share))

    def window(y: Array, first: int, count: int = t) -> Array:
        return lax.slice_in_dim(y, first, first + count, axis=2)

    def held(y: Array, first: Array, last: Array) -> Array:
        """y, its ends repeated."""
        left, right = (
            lax.broadcast_in_dim(end, (*x.shape[:2], pad), (0, 1, 2)) for end in (first, last)
        )
        return lax.concatenate([left, y, right], 2)

    wide = held(x, window(x, 0, 1), window(x, t - 1, 1))
    halves = []
    for odd in (0, 1):
        reads = range((start + odd) % 2, taps, 2)  # the taps that meet no zero between the samples
        y = reduce(lax.add, (lax.mul(window(wide, (start + odd - k) // 2), ups[k]) for k in reads))
        halves.append(lax.add(y, lax.div(lax.square(lax.sin(lax.mul(y, rate))), share)))
    ends = window(halves[0], 0, 1), window(halves[1], t - 1, 1)
    halves = [held(y, *ends) for y in halves]
    shifted = (
        lax.mul(window(halves[(k - before) % 2], pad + (k - before) // 2), downs[k])
        for k in range(taps)
    )
    return reduce(lax.add, shifted)


@op
def barrier(*xs: Array) -> tuple[Array, ...]:
    return lax.optimization_barrier(xs)


def _all_reduce_by_pairs(*xs: Array, mesh_axis: str) -> tuple[Array, ...]:
    """Small exchanges come first: behind a big one they would keep their readers waiting."""
    if lax.axis_size(mesh_axis) > 2 or sum(x.nbytes for x in xs) < LEAST_BYTES:
        return all_reduce(*xs, mesh_axis=mesh_axis)

    def swapped(x: Array) -> Array:
        return lax.ppermute(x, mesh_axis, [(0, 1), (1, 0)])

    small, big = (
        {i: x for i, x in enumerate(xs) if (x.nbytes < LEAST_BYTES) == less}
        for less in (True, False)
    )
    came = {i: swapped(x) for i, x in small.items()}
    if small and big:
        came, big = lax.optimization_barrier((came, big))
    came |= {i: swapped(x) for i, x in big.items()}
    return tuple(x + came[i] for i, x in enumerate(xs))


def _exchanged_by_pairs(x: Array, mesh_axis: str) -> Array:
    """A permutation for each distance, if much is exchanged."""
    if x.nbytes < LEAST_BYTES:
        return _exchanged(x, mesh_axis)
    parts, own = len(x), lax.axis_index(mesh_axis)
    y = x
    for far in range(1, parts):
        sent = lax.dynamic_index_in_dim(x, lax.rem(own + far, parts), 0)
        came = lax.ppermute(sent, mesh_axis, [(i, (i + far) % parts) for i in range(parts)])
        y = lax.dynamic_update_slice_in_dim(y, came, lax.rem(own + parts - far, parts), 0)
    return y


BY_PAIRS = {"all_reduce": _all_reduce_by_pairs}
HEADS_BY_PAIRS = {"all_to_all": partial(all_to_all, exchange=_exchanged_by_pairs)}
ON_TPU = {
    "conv": _conv_on_tpu,
    "conv_transpose": _conv_transpose_on_tpu,
    "attention": _attention_on_tpu,
    "neighbourhood_attention": _neighbourhood_attention_on_tpu,
}

# A product would recompute the GELU in front of it for every tile of its columns: on tpu7x 0.8 of a
# step's 89 ms, by the compiler's code; on v6e storing the result costs the same.
ONCE = {"gelu": lambda x: lax.optimization_barrier(OPS["gelu"](x))}
