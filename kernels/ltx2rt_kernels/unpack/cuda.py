"""One program for some numbers of a row: stored bytes are read, decoded in registers, and rounded
once as they are written. Types of GGUF that a stack mixes take a launch each, in which rows of the
other types end at once. e4m3 numbers are decoded as whole numbers: cards before capability 8.9 have
no e4m3.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltx2rt.graph.encodings import EITHER, ENCODINGS
from ltx2rt_kernels.triton_blocks import jit

TILE, WARPS = 4096, 8  # numbers of a program: 16 for each thread
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@jit
def byte(at):
    return tl.load(at).to(tl.int32)


@jit
def number(at):
    """The float16 at an even address."""
    return tl.load(at.to(tl.pointer_type(tl.float16))).to(tl.float32)


@jit
def e4m3(x):
    """The float32 that a byte stands for: below 8 multiples of 2^-9, 127 is NaN, 128 the sign."""
    magnitude = x & 127
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    return tl.where(magnitude == 127, float("nan"), value) * (1.0 - 2.0 * (x >> 7).to(tl.float32))


@jit
def scaled_rows_kernel(
    values, scale, out, row_values, row_out, N, TILE: tl.constexpr, IS_E4M3: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(values + row * row_values + at, at < N, 0)
    x = e4m3(x.to(tl.int32)) if IS_E4M3 else x.to(tl.float32)
    y = x * tl.load(scale + row)
    tl.store(out + row * row_out + at, y.to(out.dtype.element_ty), at < N)


@jit
def rotated_rows_kernel(
    values, scale, out, row_values, row_out, rows, N, SIZE: tl.constexpr, SHARE: tl.constexpr,
    SPAN: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Rows of whole numbers times the regular Hadamard matrix: an entry is negative where an odd
    number of base-4 digits of its row and column add up to 3. Products and sums are exact."""
    r = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    c = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    start = tl.program_id(1) * SIDE // SPAN * SPAN
    inside = tl.minimum(r, rows - 1).to(tl.int64)
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for first in range(start, start + SPAN, SIDE):
        i = first + tl.arange(0, SIDE)
        x = tl.load(values + inside[:, None] * row_values + i[None, :], i[None, :] < N, 0)
        digits = i[:, None] ^ c[None, :]
        odd = digits & digits >> 1 & 0x5555
        odd ^= odd >> 8
        odd ^= odd >> 4
        odd ^= odd >> 2
        turn = tl.where(digits < SIZE, 1 - 2 * (odd & 1), 0)
        total = tl.dot(x.to(tl.float16), turn.to(tl.float16), total)
    y = total * SHARE * tl.load(scale + inside)[:, None]
    at = out + inside[:, None] * row_out + c[None, :]
    tl.store(at, y.to(out.dtype.element_ty), (r < rows)[:, None] & (c < N)[None, :])


@jit
def nvfp4_kernel(
    halves, scales, scale, out, row_halves, row_scales, row_out, groups, GROUPS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    g = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None]
    e, inside = tl.arange(0, 16)[None, :], tl.minimum(g, groups - 1)
    x = byte(halves + row * row_halves + 8 * inside + e // 2) >> 4 * (1 - e % 2)
    v = x & 7  # twice the number: 0 1 2 3 4 6 8 12
    twice = tl.where(v < 4, v, tl.where(v < 6, 2 * v - 4, 4 * v - 16)).to(tl.float32)
    value = twice * tl.where((x & 8) == 0, 0.5, -0.5)
    y = value * e4m3(byte(scales + row * row_scales + inside)) * tl.load(scale + row)
    tl.store(out + row * row_out + 16 * g + e, y.to(out.dtype.element_ty), g < groups)


# ---- GGUF's block types. b: addresses of blocks; k: which of a block's groups of numbers that have
# a scale in common; e: which number of a group. Each gives the float32 of all groups and numbers.


@jit
def q8_0(b, k, e):
    return number(b) * tl.load((b + 2 + e).to(tl.pointer_type(tl.int8))).to(tl.float32)


@jit
def nibble(s, e):
    """Low halves of 16 bytes, then high ones."""
    return byte(s + e % 16) >> 4 * (e // 16) & 15


@jit
def fifth(h, e):
    return (byte(h + e // 8) >> e % 8 & 1) << 4


@jit
def q4_0(b, k, e):
    return number(b) * (nibble(b + 2, e) - 8).to(tl.float32)


@jit
def q4_1(b, k, e):
    return number(b) * nibble(b + 4, e).to(tl.float32) + number(b + 2)


@jit
def q5_0(b, k, e):
    return number(b) * ((nibble(b + 6, e) | fifth(b + 2, e)) - 16).to(tl.float32)


@jit
def q5_1(b, k, e):
    return number(b) * (nibble(b + 8, e) | fifth(b + 4, e)).to(tl.float32) + number(b + 2)


@jit
def scale_and_minimum(b, k, q):
    """(d * scale) * q - (dmin * minimum), both of 6 bits."""
    first, second, third = byte(b + 4 + k % 4), byte(b + 8 + k % 4), byte(b + 12 + k % 4)
    scale = tl.where(k < 4, first & 63, (third & 15) | (first >> 6) << 4)
    minimum = tl.where(k < 4, second & 63, third >> 4 | (second >> 6) << 4)
    scaled = number(b) * scale.to(tl.float32) * q.to(tl.float32)
    return scaled - number(b + 2) * minimum.to(tl.float32)


@jit
def q4_k(b, k, e):
    return scale_and_minimum(b, k, byte(b + 16 + 32 * (k // 2) + e) >> 4 * (k % 2) & 15)


@jit
def q5_k(b, k, e):
    low = byte(b + 48 + 32 * (k // 2) + e) >> 4 * (k % 2) & 15
    return scale_and_minimum(b, k, low | (byte(b + 16 + e) >> k & 1) << 4)


@jit
def q6_k(b, k, e):
    half, part, at = k // 8, k // 2 % 4, 16 * (k % 2) + e  # which 128 numbers, which 32 of them
    low = byte(b + 64 * half + 32 * (part % 2) + at) >> 4 * (part // 2) & 15
    q = low | (byte(b + 128 + 32 * half + at) >> 2 * part & 3) << 4
    scale = tl.load((b + 192 + k).to(tl.pointer_type(tl.int8))).to(tl.float32)
    return number(b + 208) * scale * (q - 32).to(tl.float32)


@jit
def q3_k(b, k, e):
    half, part, at = k // 8, k // 2 % 4, 16 * (k % 2) + e
    high = byte(b + at) >> 4 * half + part & 1
    q = (byte(b + 32 + 32 * half + at) >> 2 * part & 3) | high << 2
    low = byte(b + 96 + k % 8) >> 4 * (k // 8) & 15
    scale = (low | (byte(b + 104 + k % 4) >> 2 * (k // 4) & 3) << 4) - 32
    return number(b + 108) * scale.to(tl.float32) * (q - 4).to(tl.float32)


@jit
def q2_k(b, k, e):
    half, part, at = k // 8, k // 2 % 4, 16 * (k % 2) + e
    q = byte(b + 16 + 32 * half + at) >> 2 * part & 3
    both = byte(b + k)
    scaled = number(b + 80) * (both & 15).to(tl.float32) * q.to(tl.float32)
    return scaled - number(b + 82) * (both >> 4).to(tl.float32)


# What four bits of IQ4 stand for, 127 more, four in a word.
IQ4_0, IQ4_1, IQ4_2, IQ4_3 = map(tl.constexpr, (1043076864, 1969839182, -1516729216, -254229324))


@jit
def iq4(q):
    first, last = tl.where(q < 4, IQ4_0, IQ4_1), tl.where(q < 12, IQ4_2, IQ4_3)
    return ((tl.where(q < 8, first, last) >> 8 * (q % 4) & 255) - 127).to(tl.float32)


@jit
def iq4_nl(b, k, e):
    return number(b) * iq4(nibble(b + 2, e))


@jit
def iq4_xs(b, k, e):
    low, high = byte(b + 4 + k // 2) >> 4 * (k % 2) & 15, byte(b + 2 + k // 4) >> 2 * (k % 4) & 3
    scale = (low | high << 4) - 32
    return number(b) * scale.to(tl.float32) * iq4(nibble(b + 8 + 16 * k, e))


# By type: its numbers, and how many of them have a scale in common.
BLOCKS: dict[str, tuple[Any, int]] = {
    "Q8_0": (q8_0, 32), "Q4_0": (q4_0, 32), "Q4_1": (q4_1, 32), "Q5_0": (q5_0, 32),
    "Q5_1": (q5_1, 32), "Q2_K": (q2_k, 16), "Q3_K": (q3_k, 16), "Q4_K": (q4_k, 32),
    "Q5_K": (q5_k, 32), "Q6_K": (q6_k, 16), "IQ4_NL": (iq4_nl, 32), "IQ4_XS": (iq4_xs, 32),
}  # fmt: skip
SCALED_ROWS = ("int8", "stored int8", "stored float8")
ROTATED = {f"int8 rotated by {4**power}": power for power in range(1, 7)}
SIDE = 64  # rows, columns, and rotated numbers of a row that a program multiplies at once


@jit
def blocks_kernel(
    stored, types, out, row_stored, row_out, groups, DECODE: tl.constexpr, TYPE: tl.constexpr,
    BYTES: tl.constexpr, PER_BLOCK: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if TYPE is not None:  # noqa: SIM102 - this is decided when the kernel is compiled
        if tl.load(types + row).to(tl.int32) != TYPE:
            return
    g = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None]
    e, inside = tl.arange(0, SIZE)[None, :], tl.minimum(g, groups - 1)
    b = stored + row * row_stored + inside // PER_BLOCK * BYTES
    y = DECODE(b, inside % PER_BLOCK, e)
    tl.store(out + row * row_out + SIZE * g + e, y.to(out.dtype.element_ty), g < groups)


def why_not(*fields: Tensor, encoding: str, dtype: str) -> str | None:
    for name in encoding.split(EITHER):
        if name not in (*BLOCKS, *SCALED_ROWS, *ROTATED, "nvfp4"):
            return f"no kernel decodes {name}"
    if any(x.stride(1) != 1 and x.shape[1] > 1 for x in fields):
        return "an operand's last axis is strided"
    odd = fields[0].stride(0) % 2 or fields[0].data_ptr() % 2
    if odd and encoding.split(EITHER)[0] in BLOCKS:
        return "a row begins at an odd address"
    if dtype not in DTYPES:
        return f"the result is {dtype}, the kernel makes {', '.join(DTYPES)}"
    return None


def unpack(*fields: Tensor, encoding: str, dtype: str) -> Tensor:
    names, stored = encoding.split(EITHER), fields[0]
    n = ENCODINGS[encoding].numbers(stored.shape[1])
    out = torch.empty((len(stored), n), dtype=DTYPES[dtype], device=stored.device)
    grid = (len(stored), triton.cdiv(n, TILE))
    if encoding in SCALED_ROWS:
        is_e4m3 = stored.dtype == torch.float8_e4m3fn
        values = stored.view(torch.uint8) if is_e4m3 else stored
        scaled_rows_kernel[grid](
            values, fields[1], out, stored.stride(0), n, n,
            TILE=TILE, IS_E4M3=is_e4m3, num_warps=WARPS,
        )  # fmt: skip
    elif encoding in ROTATED:
        power, sides = ROTATED[encoding], (triton.cdiv(len(stored), SIDE), triton.cdiv(n, SIDE))
        rotated_rows_kernel[sides](
            stored, fields[1], out, stored.stride(0), n, len(stored), n, SIZE=4**power,
            SHARE=0.5**power, SPAN=max(4**power, SIDE), SIDE=SIDE, num_warps=4,
        )  # fmt: skip
    elif encoding == "nvfp4":
        _, scales, scale = fields
        nvfp4_kernel[grid](
            stored, scales.view(torch.uint8), scale, out, stored.stride(0), scales.stride(0), n,
            n // 16, GROUPS=TILE // 16, num_warps=WARPS,
        )  # fmt: skip
    else:
        for type, name in enumerate(names):
            (decode, size), (block,) = BLOCKS[name], ENCODINGS[name].fields
            blocks_kernel[grid](
                stored, *fields[1:] or (None,), out, stored.stride(0), n, n // size, DECODE=decode,
                TYPE=type if len(names) > 1 else None, BYTES=block.size, SIZE=size,
                PER_BLOCK=block.weights // size, GROUPS=TILE // size, num_warps=WARPS,
            )  # fmt: skip
    return out
