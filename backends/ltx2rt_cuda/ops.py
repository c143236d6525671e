"""Each op of the table as a torch function of tensors and the op's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial, wraps
from math import prod
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from ltx2rt_kernels.choose import kernel, why_not
from torch import Tensor

from ltx2rt.fused.head_gate import divided
from ltx2rt.fused.norm_modulate import pairs, rows_per_token
from ltx2rt.fused.pattern import grouped
from ltx2rt.fused.snake_beta import snake_windows
from ltx2rt.graph.encodings import DECODED, E4M3, E4M3_STEP, E4M3_TINY, ENCODINGS, rotation
from ltx2rt.graph.ir import DTYPE_BYTES
from ltx2rt.graph.ops import drawn_bits
from ltx2rt.scheduling import in_use
from ltx2rt_cuda.collectives import differentiated, with_transpose
from ltx2rt_cuda.device import device_of
from ltx2rt_cuda.neighbourhood import neighbourhood_attention

DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
# cuBLASLt has no product of float8 rows of M <= 256 and K = 9216, of M = 257, or of K = 3072 it has
# (pytorch/ao#4582): shorter ones are filled up with rows of zeros. LTX-2's sound has 126 tokens and
# a feed-forward of K = 8192.
FEW_ROWS, LONG_ROWS = 272, 4096
# numbers of a row: of what Triton tells 16-byte loads by; of a product's tile
ROW_GRID, ROW_TILE = (16, 64)
Function = TypeVar("Function", bound=Callable[..., Any])


def _binary(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, y, views: function(x.reshape(views[0]), y.reshape(views[1]))


OPS: dict[str, Callable[..., Any]] = {
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "sin": torch.sin,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sub": _binary(torch.sub),
    "mul": _binary(torch.mul),
    "div": _binary(torch.div),
    "clamp": lambda x, low, high: x.clamp(low, high),
    "leaky_relu": lambda x, slope: F.leaky_relu(x, slope),
    "cast": lambda x, dtype: x.to(DTYPES[dtype]),
    "sum": lambda x, dims: x.sum(dims),
    "mean": lambda x, dims: x.mean(dims),
    "max": lambda x, dims: x.amax(dims),
    "min": lambda x, dims: x.amin(dims),
    "split": lambda x, shape: x.reshape(shape),
    "merge": lambda x, shape: x.reshape(shape),
    "transpose": lambda x, perm: x.permute(perm),
    "rename": lambda x: x,
    "at": lambda x, dim, index: x.select(dim, index),
    "concat": lambda *xs, dim: torch.cat(xs, dim),
    "stack": lambda *xs, dim: torch.stack(xs, dim),
    "expand": lambda x, shape, dim: x.unsqueeze(dim).expand(shape),
}
for _name, _function in OPS.items():
    if _function.__name__ == "<lambda>":  # FX prints call targets by their qualified name
        _function.__name__ = _function.__qualname__ = f"{_name}_"
        globals()[f"{_name}_"] = _function


def op(function):
    OPS[function.__name__.rstrip("_")] = function
    return function


@op
def full(value: Tensor, shape, dtype) -> Tensor:
    return value.to(DTYPES[dtype]).expand(shape).contiguous()


@op
def add(x: Tensor, y: Tensor, views) -> Tensor:
    x, y = x.reshape(views[0]), y.reshape(views[1])
    if x.ndim != 5 or not lies_channels_last(y):
        return x + y
    # A sum lies as its first operand does: in a residual that is a convolution's result, not what
    # it is added to. Of one sample it may have a first stride by which torch takes it for channels
    # first, and pads it into that.
    total = y + x
    return total.movedim(1, -1).flatten(0, 1).unflatten(0, total.shape[0:3:2]).movedim(-1, 1)


@op
def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@op
def affine(x: Tensor, scale: float, offset: float) -> Tensor:
    x = x * scale if scale != 1.0 else x
    return x + offset if offset != 0.0 else x


@op
def select(condition: Tensor, x: Tensor, y: Tensor, views) -> Tensor:
    return torch.where(condition.reshape(views[0]) != 0, x.reshape(views[1]), y.reshape(views[2]))


@op
def slice_(x: Tensor, dim: int, start: int, stop: int, step: int) -> Tensor:
    x = x.narrow(dim, start, stop - start)
    return x if step == 1 else x[(slice(None),) * dim + (slice(None, None, step),)]


@op
def pad(x: Tensor, widths, mode: str) -> Tensor:
    if mode == "zeros":
        return F.pad(x, [n for pair in reversed(widths) for n in pair])
    for dim, (before, after) in enumerate(widths):
        n = x.shape[dim]
        if mode == "edge":
            head, tail = x.narrow(dim, 0, 1), x.narrow(dim, n - 1, 1)
            parts = [head] * before + [x] + [tail] * after
        else:
            parts = [x.narrow(dim, 1, before).flip(dim)] if before else []
            parts += [x] + ([x.narrow(dim, n - 1 - after, after).flip(dim)] if after else [])
        x = torch.cat(parts, dim) if before or after else x
    return x


@op
def take(x: Tensor, index: Tensor, dim: int, batch_dims: int) -> Tensor:
    """One look-up, whatever the batch: rows of all samples lie one after the other."""
    if batch_dims == 0:
        found = x.index_select(dim, index.reshape(-1))
        return found.reshape(x.shape[:dim] + index.shape + x.shape[dim + 1 :])
    lead, count, size = x.shape[:batch_dims], prod(x.shape[:batch_dims]), x.shape[dim]
    rows = x.movedim(dim, batch_dims).flatten(0, batch_dims)
    first = torch.arange(0, count * size, size, device=x.device).unsqueeze(1)
    found = rows.index_select(0, (index.reshape(count, -1) + first).flatten())
    found = found.reshape(*lead, *index.shape[batch_dims:], *rows.shape[1:])
    own = range(batch_dims, index.ndim)  # dimensions of a look-up
    return found.movedim(list(own), [i - batch_dims + dim for i in own])


@op
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, num_contracted: int, out_shape
) -> Tensor:
    lead = x.shape[: x.ndim - num_contracted]
    y = F.linear(x.reshape(*lead, weight.shape[1]), weight, bias)
    return y.narrow(-1, 0, prod(out_shape)).reshape(*lead, *out_shape)


def joined_rows(rows: int) -> int:
    """Rows of a packed weight on a GPU: zeros pad the last ones, so that the product's own rows
    begin where kernels load 16 bytes at once."""
    return rows if rows % ROW_GRID == 0 else -(-rows // ROW_TILE) * ROW_TILE


@op
def gelu_quantised_linear(*operands: Tensor, **plan) -> Tensor:
    return quantised_linear(*operands, **plan, gelu=True)


def float8_road(weight: Tensor, dtype: torch.dtype) -> str:
    """The way in which the weight's device multiplies float8 numbers into `dtype`, one of ROADS."""
    if weight.device.type == "cpu" or dtype != torch.bfloat16:
        return "float32"
    road = tried_road(weight.device)
    multiples = weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0
    return road if multiples or road == "float32" else "bfloat16"


@cache
def tried_road(device: torch.device) -> str:
    """The first of ROADS with the defined numbers on this device, tried, since PyTorch's builds
    differ in their kernels. Not while a step is recorded."""
    draw = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(rows, 256, generator=draw, dtype=torch.bfloat16) for rows in (FEW_ROWS, 256)
    )
    (values, row_scale), (weight, scale) = (quantise_rows(x.to(device)) for x in (a, b))
    product = Float8Product(values, row_scale, weight, scale, None, torch.bfloat16)
    expected = _by_float32(product._replace(dtype=torch.float32))
    for road, run in ROADS.items():
        try:
            found = run(product).float()
        except RuntimeError:  # the build or the device lacks the product
            continue
        # A sum is rounded to bfloat16 twice at most, by 2^-9 of it; no sum is above the largest.
        if (found - expected).abs().max() <= 2**-7 * expected.abs().max():
            return road
    return "float32"


class Float8Product(NamedTuple):
    """values [rows, n] with their scales [rows, 1], a weight [out, n] with its own [out, 1], a bias
    [out], and the dtype of the result [rows, out]."""

    values: Tensor
    row_scale: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    dtype: torch.dtype


def _by_rows(p: Float8Product) -> Tensor:
    """Scale each row: from sm_90 on, if the build has it."""
    product = torch._scaled_mm
    scales, how = (p.row_scale, p.scale.t()), {"out_dtype": p.dtype, "use_fast_accum": True}
    return product(p.values, p.weight.t(), *scales, p.bias, **how)


def _by_tensor(p: Float8Product) -> Tensor:
    """Multiply with scales of 1 into float32, then scale: GeForce cards from sm_89 on."""
    product = torch._scaled_mm
    one = torch.ones((), device=p.values.device)
    return _finished(p, product(p.values, p.weight.t(), one, one, out_dtype=torch.float32))


def _by_bfloat16(p: Float8Product) -> Tensor:
    """Multiply in bfloat16, which holds every e4m3 number: for cards without float8 products."""
    return _finished(p, (p.values.to(torch.bfloat16) @ p.weight.to(torch.bfloat16).t()).float())


def _by_float32(p: Float8Product) -> Tensor:
    return _finished(p, p.values.float() @ p.weight.float().t())


def _finished(p: Float8Product, y: Tensor) -> Tensor:
    """y, in float32, is in no other use: without gradients its memory is taken, 0.4 GB for the
    widest product of 6144 rows."""
    if torch.is_inference_mode_enabled():
        y = y.mul_(p.row_scale).mul_(p.scale.t())
        return (y if p.bias is None else y.add_(p.bias)).to(p.dtype)
    y = y * p.row_scale * p.scale.t()
    return (y if p.bias is None else y + p.bias).to(p.dtype)


# How float8 matrices are multiplied, the fastest first. On a CPU it is always the last.
ROADS: dict[str, Callable[[Float8Product], Tensor]] = {
    "rows": _by_rows,
    "tensor": _by_tensor,
    "bfloat16": _by_bfloat16,
    "float32": _by_float32,
}


@op
def quantised_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    num_contracted: int,
    out_shape,
    gelu: bool = False,
) -> Tensor:
    """Multiply by one of ROADS: they differ only in the order of sums and, in bfloat16, by one more
    rounding."""
    lead, rows = x.shape[: x.ndim - num_contracted], x.reshape(-1, weight.shape[1])
    if (
        len(rows) < FEW_ROWS
        and rows.shape[1] > LONG_ROWS
        and float8_road(weight, x.dtype) == "rows"
    ):
        rows = F.pad(rows, (0, 0, 0, FEW_ROWS - len(rows)))
    return _scaled(*quantise_rows(rows, gelu=gelu), weight, scale, bias, x.dtype, lead, out_shape)


def _scaled(
    values: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, lead: Sequence[int], out_shape: Sequence[int],
) -> Tensor:  # fmt: skip
    """The product of quantised rows [lead or more, n], without the packed weight's padding."""
    run = ROADS[float8_road(weight, dtype)]
    y = run(Float8Product(values, row_scale, weight, scale, bias, dtype))
    return y[: prod(lead)].narrow(-1, 0, prod(out_shape)).reshape(*lead, *out_shape)


@op
def head_gate_quantised_linear(*operands: Tensor, num_contracted: int, out_shape) -> Tensor:
    (y, *gate), (weight, scale, *bias) = divided(operands)
    lead, bias = y.shape[: y.ndim - num_contracted], bias[0] if bias else None
    return _scaled(*head_gate_rows(y, *gate), weight, scale, bias, y.dtype, lead, out_shape)


def rows_linear(
    values: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *,
    dtype: str, num_contracted: int, out_shape,
) -> Tensor:  # fmt: skip
    """quantised_linear of rows from `with_rows`: values (..., n), row_scale (..., 1)."""
    lead, values, row_scale = values.shape[:-1], values.flatten(0, -2), row_scale.flatten(0, -2)
    return _scaled(values, row_scale, weight, scale, bias, DTYPES[dtype], lead, out_shape)


def with_rows(
    *operands: Tensor, op: str, quantised: Sequence[int], unread: Sequence[int], **plan
) -> tuple[Tensor | None, ...]:
    """Results of a norm, None for those numbered `unread`, then e4m3 numbers and scales, as
    quantise_rows has them, of those numbered `quantised`."""
    x = operands[0]
    if not why_not(op, *operands, **plan) and not why_not("quantise_rows", x.select(0, 0)):
        return kernel(op)(*operands, **plan, quantised=quantised, unread=unread)
    found = OPS[op](*operands, **plan)
    results = found if isinstance(found, tuple) else (found,)
    rows = (part for i in quantised for part in quantise_rows(results[i].flatten(0, -2)))
    kept = (None if i in unread else result for i, result in enumerate(results))
    return *kept, *(part.unflatten(0, x.shape[:-1]) for part in rows)


@op
def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride, dilation, padding=0
) -> Tensor:
    function = (F.conv1d, F.conv2d, F.conv3d)[weight.ndim - 3]
    if weight.ndim == 5 and device_of(x).channels_last:
        x, weight = channels_last(x), channels_last(weight)
    plan = {"stride": stride, "padding": padding, "dilation": dilation}
    if x.dtype == torch.bfloat16 and x.device.type == "cpu":
        # Rounded once either way; a CPU without products of bfloat16 takes ten to seven hundred
        # times as long for them. One that has them would be faster with them, untried.
        return function(
            x.float(), weight.float(), None if bias is None else bias.float(), **plan
        ).to(x.dtype)
    return function(x, weight, bias, **plan)


@op
def padded_conv(x: Tensor, *weights: Tensor, padding, stride, dilation) -> Tensor:
    return conv(x, *weights, stride=stride, dilation=dilation, padding=padding)


def channels_last(x: Tensor) -> Tensor:
    """The layout in which Hopper's convolutions multiply; norm, SiLU, padding and residuals keep
    it, so that inside the VAE's blocks nothing is copied."""
    return x.contiguous(memory_format=torch.channels_last_3d)


def lies_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last_3d)


@op
def conv_transpose(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: int) -> Tensor:
    return F.conv_transpose1d(x, weight, bias, stride=stride)


@op
def rms_norm(x: Tensor, weight: Tensor | None = None, *, dims, weight_view, eps: float) -> Tensor:
    # where torch's own writes all squares to memory first
    if x.device.type == "cpu" and x.dtype == torch.float32:
        length = torch.linalg.vector_norm(x, dim=dims, keepdim=True)
        y = x * torch.rsqrt(length.square() / (x.numel() // length.numel()) + eps)
        return y if weight is None else y * weight.reshape(weight_view)
    # The fused kernel wants one dtype; Gemma has float32 weights and bfloat16 activations.
    if dims == tuple(range(x.ndim - len(dims), x.ndim)) and (
        weight is None or weight.dtype == x.dtype
    ):
        shape = x.shape[-len(dims) :]
        return F.rms_norm(x, shape, None if weight is None else weight.reshape(shape), eps)
    # no copy in float32: all of Gemma's states are 1 GB
    if x.device.type != "cpu" and weight is None and not torch.is_grad_enabled():
        length = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=torch.float32)
        inverse = torch.rsqrt(length.square() / (x.numel() // length.numel()) + eps)
        return torch.mul(x, inverse, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    return (y if weight is None else y * weight.float().reshape(weight_view)).to(x.dtype)


@op
def dropout(x: Tensor, keys: Tensor, columns: Tensor, rate: Tensor, *, salt: int, views) -> Tensor:
    rate = rate.reshape(views[2])
    kept = drawn_bits(keys, columns, salt, views) * 2.0**-24 >= rate
    return torch.where(kept, x.float() * (1 / (1 - rate)), 0.0).to(x.dtype)


@op
def shard(x: Tensor, dim: int, parts: int, index: int) -> Tensor:
    size = x.shape[dim] // parts
    return x.narrow(dim, index * size, size)


@op
def all_reduce(*xs: Tensor, group: str, in_place: bool = False) -> tuple[Tensor, ...]:
    """One communication for all operands, which `arrived` waits for. in_place: nothing else reads
    them, or memory that they are in."""
    if differentiated(xs):
        summed = partial(_summed, group=group)
        return with_transpose(summed, summed, *xs)
    functional = torch.ops._c10d_functional
    # Inductor finds that out itself
    own = "_" if in_place and not torch.compiler.is_compiling() else ""
    if len(xs) == 1:
        return (getattr(functional, f"all_reduce{own}")(xs[0].contiguous(), "sum", group),)
    return tuple(
        getattr(functional, f"all_reduce_coalesced{own}")(
            [x.contiguous() for x in xs], "sum", group
        )
    )


def _summed(*xs: Tensor, group: str) -> Iterable[Tensor]:
    """Results of `all_reduce` that are there."""
    return map(arrived, all_reduce(*xs, group=group))


@op
def barrier(*xs: Tensor) -> tuple[Tensor, ...]:
    """A stream keeps its order."""
    return xs


def arrived(x: Tensor) -> Tensor:
    """A result of `all_reduce` for those that read it: the stream waits, on a CPU the caller."""
    if differentiated((x,)):
        return x  # it was waited for
    return torch.ops._c10d_functional.wait_tensor(x)


@op
def all_gather(x: Tensor, dim: int, parts: int, group: str) -> Tensor:
    if differentiated((x,)):
        how = {"dim": dim, "parts": parts, "group": group}
        return with_transpose(
            lambda x: [all_gather(x, **how)], lambda g: [_reduce_scatter(g, **how)], x
        )[0]
    functional = torch.ops._c10d_functional
    joined = functional.wait_tensor(functional.all_gather_into_tensor(x.contiguous(), parts, group))
    return joined.unflatten(0, (parts, x.shape[0])).movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scatter(x: Tensor, dim: int, parts: int, group: str) -> Tensor:
    """This rank's part along `dim` of the sum of what all ranks have."""
    functional = torch.ops._c10d_functional
    shares = x.unflatten(dim, (parts, -1)).movedim(dim, 0).flatten(0, 1).contiguous()
    return functional.wait_tensor(functional.reduce_scatter_tensor(shares, "sum", parts, group))


@op
def all_to_all(*xs: Tensor, split: int, concat: int, parts: int, group: str) -> tuple[Tensor, ...]:
    """Operands of one shape travel stacked, in one communication."""
    if differentiated(xs):
        there = partial(all_to_all, split=split, concat=concat, parts=parts, group=group)
        return with_transpose(there, partial(there, split=concat, concat=split), *xs)
    if len({x.shape for x in xs}) > 1:
        return tuple(
            all_to_all(x, split=split, concat=concat, parts=parts, group=group)[0] for x in xs
        )
    functional = torch.ops._c10d_functional
    shares = [x.unflatten(split, (parts, -1)).movedim(split, 0) for x in xs]
    sent = torch.stack(shares, 1) if len(xs) > 1 else shares[0].unsqueeze(1).contiguous()
    sizes = [1] * parts
    received = functional.wait_tensor(functional.all_to_all_single(sent, sizes, sizes, group))
    return received.movedim(0, concat + 1).flatten(concat + 1, concat + 2).unbind(0)


@op
def attention_part(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, scale: float, bias_view
) -> Tensor:
    bias = None if bias is None else bias.reshape(bias_view)
    y, log_sum = device_of(q).attention_part(q, k, v, bias, scale)
    log_sum = log_sum.transpose(1, 2).unsqueeze(-1).contiguous()
    upper = (log_sum.view(torch.int32) & -0x10000).view(torch.float32)
    return torch.cat([y, upper.to(q.dtype), (log_sum - upper).to(q.dtype)], dim=-1)


@op
def attention_join(parts: Tensor) -> Tensor:
    wide = parts.float()
    weights = (wide[..., -2:-1] + wide[..., -1:]).softmax(dim=0)
    return (wide[..., :-2] * weights).sum(dim=0).to(parts.dtype)


@op
def rms_scale(
    x: Tensor,
    sum_squares: Tensor,
    weight: Tensor | None = None,
    *,
    dims,
    weight_view,
    count: int,
    eps: float,
) -> Tensor:
    scale = torch.rsqrt(sum_squares / count + eps)
    for dim in dims:
        scale = scale.unsqueeze(dim)
    y = x.float() * scale
    return (y if weight is None else y * weight.float().reshape(weight_view)).to(x.dtype)


@op
def layer_norm(x: Tensor, dim: int, eps: float) -> Tensor:
    assert dim == x.ndim - 1, f"layer_norm over axis {dim} of {x.ndim}"
    return F.layer_norm(x, x.shape[-1:], None, None, eps)


@op
def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    # F.group_norm refuses groups of one number, a picture of 32 pixels a side; the mean is its own.
    return torch.group_norm(x, groups, weight, bias, eps)


@op
def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, scale: float, bias_view
) -> Tensor:
    return attend(q, k, v, None if bias is None else bias.reshape(bias_view).to(q.dtype), scale)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return device_of(q).attention(q, k, v, mask, scale)


@op
def rope(x: Tensor, cos: Tensor, sin: Tensor, view) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos.reshape(view), sin.reshape(view)
    turned = (torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin))
    return torch.cat(turned, dim=-1).to(x.dtype)


@op
def axial_rope(x: Tensor, frequencies: Tensor, sizes, first) -> Tensor:
    y, start = torch.empty_like(x), 0
    for dim, (size, begin) in enumerate(zip(sizes, first, strict=True), 1):
        positions = torch.arange(begin, begin + x.shape[dim], dtype=torch.float32, device=x.device)
        angles = positions[:, None] * frequencies[start // 2 : (start + size) // 2]
        view = [x.shape[dim] if i == dim else 1 for i in range(x.ndim - 1)]
        cos, sin = angles.cos().reshape(*view, -1), angles.sin().reshape(*view, -1)
        a, b = (
            x[..., start : start + size : 2].float(),
            x[..., start + 1 : start + size : 2].float(),
        )
        y[..., start : start + size : 2] = a * cos - b * sin
        y[..., start + 1 : start + size : 2] = a * sin + b * cos
        start += size
    return y


@op
def sinusoid(t: Tensor, frequencies: Tensor) -> Tensor:
    angles = t.unsqueeze(-1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


# --- ops that have a kernel; most of them the pass `fuse` writes ----------------------------------


def fused(plain: Function, switch: str = "") -> Function:
    """Enter an op that has a kernel: the kernel runs it unless there is a reason why not, else the
    plain ops do, which stay at hand as `__wrapped__`. switch: the user's name for leaving the
    kernel out."""
    name = plain.__name__

    @wraps(plain)
    def run(*operands: Tensor, **plan) -> Any:
        left_out = switch and not in_use(switch)
        function = plain if left_out or why_not(name, *operands, **plan) else kernel(name)
        return function(*operands, **plan)

    return cast(Function, op(run))


fused(neighbourhood_attention)


def _take_along(x: Tensor, index: Tensor, dim: int) -> Tensor:
    return torch.take_along_dim(x, index.long(), dim)


@fused
def modulate(x: Tensor, scale: Tensor, shift: Tensor, *, views) -> Tensor:
    return torch.addcmul(shift.reshape(views[1]), x, 1 + scale.reshape(views[0]))


def _norm_modulated(x: Tensor, rows, eps: float) -> tuple[Tensor, ...]:
    """The norm of x with each scale and shift among `rows`, or as it is."""
    y = rms_norm(x, dims=(x.ndim - 1,), weight_view=None, eps=eps)
    return tuple(torch.addcmul(shift, y, 1 + scale) for scale, shift in pairs(rows)) or (y,)


@fused
def norm_modulate(x: Tensor, *rows: Tensor, views, eps: float, index_view=None):
    results = _norm_modulated(x, rows_per_token(rows, views, index_view, _take_along), eps)
    return results[0] if len(results) == 1 else results


@fused
def norm_scale(x: Tensor, scale: Tensor, *, views, eps: float) -> Tensor:
    return rms_norm(x, 1 + scale, dims=(x.ndim - 1,), weight_view=views[0], eps=eps)


def _residual(
    x: Tensor, y: Tensor, rows, views, index_view, biased: bool
) -> tuple[Tensor, list[Tensor]]:
    """x + y * gate, and the rows behind the gate."""
    shaped = rows_per_token(rows, views, index_view, _take_along)
    y = y + shaped.pop(0) if biased else y
    y = F.pad(y, [0, 0] * (x.ndim - 1) + [0, len(x) - len(y)]) if len(y) < len(x) else y
    gate, *others = shaped
    return torch.addcmul(x, y, gate), others


@fused
def gated_residual(
    x: Tensor, y: Tensor, *rows: Tensor, views, index_view=None, biased=False
) -> Tensor:
    return _residual(x, y, rows, views, index_view, biased)[0]


@fused
def residual_norm_modulate(
    x: Tensor, y: Tensor, *rows: Tensor, views, eps: float, index_view=None, biased=False
):
    x, shaped = _residual(x, y, rows, views, index_view, biased)
    return x, *_norm_modulated(x, shaped, eps)


@fused
def qk_norm(*operands: Tensor, weight_views, eps: float, spread=()):
    return _normed(rms_norm, 2, operands, weight_views, spread, eps=eps)


@fused
def qk_scale(*operands: Tensor, weight_views, count: int, eps: float, spread=()):
    return _normed(rms_scale, 3, operands, weight_views, spread, count=count, eps=eps)


def _normed(norm, size: int, operands, weight_views, spread, **args):
    """`norm` over the last two axes of x, and its other operands, `size` at a time."""
    results = [
        norm(x, *others, dims=(x.ndim - 2, x.ndim - 1), weight_view=view, **args)
        for (x, *others), view in zip(
            grouped(operands[:-1] if spread else operands, size), weight_views, strict=True
        )
    ]
    if spread:
        results[1:] = (
            torch.cat([x[i : i + 1] for i in spread]) for x in (results[1], operands[-1])
        )
    return tuple(results) if len(results) > 1 else results[0]


def _rotated(norm, size: int, operands, weight_views, table_views, **args):
    """`norm` over the last two axes, then RoPE: x, the norm's other operands, cos, sin."""
    results = []
    groups = zip(grouped(operands, size), weight_views, table_views, strict=True)
    for (x, *others, cos, sin), weight_view, view in groups:
        y = norm(x, *others, dims=(x.ndim - 2, x.ndim - 1), weight_view=weight_view, **args)
        results.append(rope(y, cos, sin, view))
    return tuple(results) if len(results) > 1 else results[0]


@fused
def qk_norm_rope(*operands: Tensor, weight_views, table_views, eps: float):
    return _rotated(rms_norm, 4, operands, weight_views, table_views, eps=eps)


@fused
def qk_scale_rope(*operands: Tensor, weight_views, table_views, count: int, eps: float):
    return _rotated(rms_scale, 5, operands, weight_views, table_views, count=count, eps=eps)


@fused
def sum_squares(x: Tensor, *, dims) -> Tensor:
    return x.float().square().sum(dims)


@fused
def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor, *, num_contracted: int, out_shape
) -> Tensor:
    y = linear(x, weight, bias, num_contracted=num_contracted, out_shape=out_shape)
    return torch.ops.aten.gelu_(y, approximate="tanh")


@fused
def head_gate(y: Tensor, logits: Tensor, *choice: Tensor) -> Tensor:
    if choice:
        keep, v = choice
        y = torch.where(keep.reshape(-1, *[1] * (y.ndim - 1)) != 0, y, v)
    return y * (2 * torch.sigmoid(logits)).unsqueeze(-1)


@fused
def head_gate_rows(*operands: Tensor) -> tuple[Tensor, Tensor]:
    """head_gate as quantise_rows has it, each token a row: no op of the table, but part of one."""
    y = head_gate(*operands)
    return quantise_rows(y.reshape(-1, y.shape[-2] * y.shape[-1]))


@fused
def pixel_norm_silu(x: Tensor, *, dim: int, eps: float) -> Tensor:
    return F.silu(rms_norm(x, dims=(dim,), weight_view=None, eps=eps))


@fused
def snake_beta(
    x: Tensor, up: Tensor, down: Tensor, alpha: Tensor, beta: Tensor, *, eps: float
) -> Tensor:
    b, c, t = x.shape
    pad, start, edges = snake_windows(up.shape[-1])

    def snake(y: Tensor) -> Tensor:
        return torch.addcdiv(
            y, (y * alpha.exp()[:, None]).sin().square(), beta.exp()[:, None] + eps
        )

    if x.device.type == "cpu" and x.dtype == torch.float32:
        return _snake_beta_by_phase(x, up.flatten(), down.flatten(), snake, pad, start, edges[0])
    y = F.pad(x.reshape(b * c, 1, t), (pad, pad), mode="replicate")
    y = snake(
        2 * F.conv_transpose1d(y, up, stride=2)[..., start : start + 2 * t].reshape(b, c, 2 * t)
    )
    y = F.pad(y.reshape(b * c, 1, 2 * t), edges, mode="replicate")
    return F.conv1d(y, down, stride=2).reshape(b, c, t)


def _snake_beta_by_phase(
    x: Tensor, up: Tensor, down: Tensor, snake, pad: int, start: int, edge: int
) -> Tensor:
    """`snake_beta` in whole-signal multiply-adds: a CPU runs a convolution of one channel several
    times as slowly. The signal at twice the rate is held as its even and its odd samples."""
    t, taps = x.shape[-1], len(up)
    x = F.pad(x, (pad, pad), mode="replicate")
    y = [
        snake(
            _weighted(
                (2 * up[k], x[..., (p + start - k) // 2 :][..., :t])
                for k in range((p + start) % 2, taps, 2)
            )
        )
        for p in (0, 1)
    ]
    first, last = y[0][..., :1].expand(*x.shape[:2], pad), y[1][..., -1:].expand(*x.shape[:2], pad)
    y = [torch.cat([first, phase, last], -1) for phase in y]
    return _weighted(
        (down[k], y[(k - edge) % 2][..., pad + (k - edge) // 2 :][..., :t]) for k in range(taps)
    )


def _weighted(terms: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of the signals, each times its weight (a scalar)."""
    (weight, signal), *others = terms
    total = signal * weight
    for weight, signal in others:
        total.addcmul_(signal, weight)
    return total


@fused
def quantise_rows(x: Tensor, *, gelu: bool = False) -> tuple[Tensor, Tensor]:
    """x [rows, n], or its GELU, as e4m3, and the float32 scale [rows, 1] of each row: no op of the
    table, but part of one."""
    x = (F.gelu(x, approximate="tanh") if gelu else x).float()
    scale = x.abs().amax(1, keepdim=True).clamp(min=E4M3_TINY) * E4M3_STEP
    return (x / scale).to(DTYPES[E4M3]), scale


# --- encodings of weights -------------------------------------------------------------------------


class TorchOps:
    """The namespace of `graph.encodings`."""

    quantise_rows = staticmethod(quantise_rows)

    @staticmethod
    def cast(x: Tensor, dtype: str) -> Tensor:
        return x.to(DTYPES[dtype])

    @staticmethod
    def bits(x: Tensor, dtype: str) -> Tensor:
        return x.view(torch.float16 if dtype == "float16" else DTYPES[dtype])

    @staticmethod
    def stack(tensors: Sequence[Tensor], axis: int) -> Tensor:
        return torch.stack(list(tensors), axis)

    @staticmethod
    def lookup(table: tuple[float, ...], index: Tensor) -> Tensor:
        return _table(table, index.device)[index.int()]

    @staticmethod
    def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.where(condition, x, y)

    @staticmethod
    def rotate(x: Tensor, size: int) -> Tensor:
        return x @ _rotation(size, x.device)

    @staticmethod
    def largest(x: Tensor) -> Tensor:
        return x.amax(1, keepdim=True)

    @staticmethod
    def rint(x: Tensor) -> Tensor:
        return x.round()


@cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


@cache
def _rotation(size: int, device: torch.device) -> Tensor:
    return torch.from_numpy(rotation(size)).to(device)


def encode(encoding: str, x: Tensor) -> tuple[Tensor, ...]:
    """The fields of a matrix [rows, n]."""
    function = ENCODINGS[encoding].encode
    assert function is not None, f"{encoding} is only read from files"
    return function(TorchOps, x)


@partial(fused, switch="unpack")
def unpack(*fields: Tensor, encoding: str, dtype: str) -> Tensor:
    """Decode some rows at a time, so that the float32 intermediates stay small."""
    row, count = ENCODINGS[encoding], len(fields[0])
    n = row.numbers(fields[0].shape[1])
    matrix = torch.empty((count, n), dtype=DTYPES[dtype], device=fields[0].device)
    rows = max(1, DECODED // n)
    for start in range(0, count, rows):
        part = slice(start, start + rows)
        matrix[part] = row.decode(TorchOps, *(field[part] for field in fields))
    return matrix


WITH_KERNEL = tuple(name for name, run in OPS.items() if hasattr(run, "__wrapped__"))
