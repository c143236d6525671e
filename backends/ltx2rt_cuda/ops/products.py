"""Linear layers, of float8 numbers too: how each device multiplies these, and what quantises them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from ltx2rt_kernels.choose import kernel, why_not
from torch import Tensor

from ltx2rt.fused.head_gate import divided
from ltx2rt.graph.encodings import E4M3, E4M3_STEP, E4M3_TINY
from ltx2rt_cuda.ops.attention import head_gate
from ltx2rt_cuda.ops.table import DTYPES, OPS, fused, op

# cuBLASLt has no product of float8 rows of M <= 256 and K = 9216, of M = 257, or of K = 3072 it has
# (pytorch/ao#4582): shorter ones are filled up with rows of zeros. LTX-2's sound has 126 tokens and
# a feed-forward of K = 8192.
FEW_ROWS, LONG_ROWS = 272, 4096
# numbers of a row: of what Triton tells 16-byte loads by; of a product's tile
ROW_GRID, ROW_TILE = 16, 64


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


@fused
def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor, *, num_contracted: int, out_shape
) -> Tensor:
    y = linear(x, weight, bias, num_contracted=num_contracted, out_shape=out_shape)
    return torch.ops.aten.gelu_(y, approximate="tanh")


@fused
def quantise_rows(x: Tensor, *, gelu: bool = False) -> tuple[Tensor, Tensor]:
    """x [rows, n], or its GELU, as e4m3, and the float32 scale [rows, 1] of each row: no op of the
    table, but part of one."""
    x = (F.gelu(x, approximate="tanh") if gelu else x).float()
    scale = x.abs().amax(1, keepdim=True).clamp(min=E4M3_TINY) * E4M3_STEP
    return (x / scale).to(DTYPES[E4M3]), scale


@fused
def head_gate_rows(*operands: Tensor) -> tuple[Tensor, Tensor]:
    """head_gate as quantise_rows has it, each token a row: no op of the table, but part of one."""
    y = head_gate(*operands)
    return quantise_rows(y.reshape(-1, y.shape[-2] * y.shape[-1]))


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
    how = {"generator": torch.Generator().manual_seed(0), "dtype": torch.bfloat16}
    a, b = (torch.randn(rows, 256, **how) for rows in (FEW_ROWS, 256))
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
    how = {"out_dtype": p.dtype, "use_fast_accum": True}
    return product(p.values, p.weight.t(), p.row_scale, p.scale.t(), p.bias, **how)


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
    "rows": _by_rows, "tensor": _by_tensor, "bfloat16": _by_bfloat16, "float32": _by_float32,
}  # fmt: skip


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
    awkward = len(rows) < FEW_ROWS and rows.shape[1] > LONG_ROWS
    if awkward and float8_road(weight, x.dtype) == "rows":
        rows = F.pad(rows, (0, 0, 0, FEW_ROWS - len(rows)))
    product = Float8Product(*quantise_rows(rows, gelu=gelu), weight, scale, bias, x.dtype)
    return _multiplied(product, lead, out_shape)


def _multiplied(p: Float8Product, lead: Sequence[int], out_shape: Sequence[int]) -> Tensor:
    """The product of rows [lead or more, n], without the packed weight's padding."""
    y = ROADS[float8_road(p.weight, p.dtype)](p)
    return y[: prod(lead)].narrow(-1, 0, prod(out_shape)).reshape(*lead, *out_shape)


@op
def head_gate_quantised_linear(*operands: Tensor, num_contracted: int, out_shape) -> Tensor:
    (y, *gate), (weight, scale, *bias) = divided(operands)
    rows = head_gate_rows(y, *gate)
    product = Float8Product(*rows, weight, scale, bias[0] if bias else None, y.dtype)
    return _multiplied(product, y.shape[: y.ndim - num_contracted], out_shape)


def rows_linear(
    values: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *,
    dtype: str, num_contracted: int, out_shape,
) -> Tensor:  # fmt: skip
    """quantised_linear of rows from `with_rows`: values (..., n), row_scale (..., 1)."""
    rows, row_scale = values.flatten(0, -2), row_scale.flatten(0, -2)
    product = Float8Product(rows, row_scale, weight, scale, bias, DTYPES[dtype])
    return _multiplied(product, values.shape[:-1], out_shape)


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
def gelu_quantised_linear(*operands: Tensor, **plan) -> Tensor:
    return quantised_linear(*operands, **plan, gelu=True)
