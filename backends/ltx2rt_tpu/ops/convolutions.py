"""Convolutions as a CPU and as a TPU runs them, and the vocoder's filters around an activation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ltx2rt.fused.snake_beta import snake_windows
from ltx2rt_tpu.ops.table import like, op, precision

LANES = 128  # lanes of a TPU


@op
def conv(x: Array, weight: Array, bias: Array | None = None, *, stride, dilation) -> Array:
    return biased(_conv(x, weight, stride=stride, dilation=dilation, channels_last=True), bias)


def conv_on_tpu(x: Array, weight: Array, bias: Array | None = None, *, stride, dilation) -> Array:
    n = weight.ndim - 2
    if n == 1 and 1 in (*stride, *dilation):
        return biased(_conv_by_taps(x, weight, stride=stride[0], dilation=dilation[0]), bias)
    by_frames = n == 3 and stride[0] == dilation[0] == 1
    return biased(
        (_conv_by_frames if by_frames else _conv)(x, weight, stride=stride, dilation=dilation), bias
    )


def biased(y: Array, bias: Array | None) -> Array:
    """y (B, channels, ...) + bias (channels)."""
    if bias is None:
        return y
    return lax.add(y, lax.reshape(bias, (1, len(bias), *(1,) * (y.ndim - 2))))


def _conv(x: Array, weight: Array, *, stride, dilation, channels_last=False) -> Array:
    """channels_last: as the fast convolution of a CPU has it; XLA rearranges only outside of loops,
    and inside of them it would take its plain one, ten times slower."""
    how = {"padding": [(0, 0)] * len(stride), "rhs_dilation": dilation, "precision": precision(x)}
    y = partial(lax.conv_general_dilated, window_strides=stride, **how)
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
        frames = lax.dynamic_slice_in_dim(x, i, depth, axis=2)
        return _conv(frames, weight, stride=stride, dilation=dilation)

    # (frames, B, channels, 1, rows, columns)
    y = lax.map(frame, jnp.arange(x.shape[2] - depth + 1))
    return jnp.moveaxis(y[:, :, :, 0], 0, 2)


# a trace for each shape, not for each of a vocoder's 200
@partial(jax.jit, static_argnames=("stride", "dilation"))
def _conv_by_taps(x: Array, weight: Array, *, stride: int, dilation: int) -> Array:
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
        how = {"precision": precision(x), "preferred_element_type": jnp.float32}
        return lax.add(y, lax.dot_general(matrix(tap), window, contract, **how))

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


def conv_transpose_on_tpu(
    x: Array, weight: Array, bias: Array | None = None, *, stride: int
) -> Array:
    one = weight.shape[:2] == (1, 1) and stride <= weight.shape[2]
    return biased((_transposed_filter if one else _transposed)(x, weight, stride=stride), bias)


def _transposed(x: Array, weight: Array, *, stride: int) -> Array:
    k = weight.shape[2]
    kernel = jnp.flip(weight, 2).transpose(1, 0, 2)
    return lax.conv_general_dilated(
        x, kernel, (1,), [(k - 1, k - 1)], lhs_dilation=(stride,), precision=precision(x)
    )


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
    y = jnp.matmul(jnp.concatenate([before, here], axis=3), band, precision=precision(x))
    return y.reshape(b, c, -1)[..., : (time - 1) * stride + taps]


@op
def snake_beta(x: Array, up: Array, down: Array, alpha: Array, beta: Array, *, eps: float) -> Array:
    """Filters as sums of shifted signals, at twice the rate the even samples apart from the odd
    ones: a convolution of one channel leaves a TPU's matrix unit idle and keeps its compiler busy
    for many seconds."""
    t, taps = x.shape[2], up.shape[-1]
    pad, start, (before, _) = snake_windows(taps)
    ups, downs = (
        lax.split(lax.reshape(y, (1, 1, taps)), (1,) * taps, 2)
        for y in (lax.mul(up, like(2, up)), down)
    )
    rate, share = (lax.expand_dims(lax.exp(y), (0, 2)) for y in (alpha, beta))
    share = lax.add(share, like(eps, share))

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
