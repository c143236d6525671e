"""Encodings of weights that a device keeps as stored: the stored fields and the numbers that they
mean.

A matrix [rows, n] of an encoding is stored as one or more fields, each with one row for each of its
rows: a cut of the matrix's rows is a cut of theirs. Definitions are written once, over a namespace
`o` of the few functions in which numpy, torch and jax.numpy differ (`NUMPY`; each backend has its
own). They agree bit for bit: every product but the last is exact in float32, whatever its order, so
that no number is rounded twice, or never, if a compiler fuses a product and a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from ltx2rt.graph.ir import Graph

E4M3, E5M2, E8M0 = "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"  # dtypes
E4M3_FORMAT = "float8"  # the encoding of e4m3 rows, and what stored matrices of it are called
ADVISED = E4M3_FORMAT  # the fastest of QUANTISED
# 448 is the largest e4m3 number; compilers make division a product anyway
E4M3_STEP = float(np.float32(1 / 448))
E4M3_TINY = 1e-30  # the largest number of a row is taken to be no smaller
HADAMARD = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float32)
# What four bits of nvfp4 stand for; the highest is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT8_STEP = float(np.float32(1 / 127))
DECODED = 2**23  # numbers of a matrix that plain ops decode at once, some rows at a time
PASSING_BYTES = 12  # for each of these meanwhile: float32 twice, and parts of 8 bits


@dataclass(frozen=True)
class Field:
    """An array that is stored for a matrix. suffix: what its name adds to the matrix's. `size` of
    its numbers are for `weights` numbers of a row, for all of them if `weights` is 0."""

    suffix: str
    dtype: str
    size: int = 1
    weights: int = 1

    def columns(self, n: int) -> int:
        return n // self.weights * self.size if self.weights else self.size


@dataclass(frozen=True)
class Encoding:
    """decode(o, *fields): the matrix, float32 [rows, n]. encode(o, matrix): its fields; None for an
    encoding that is only read from files. group: numbers of a row that are decoded together. product: the op that
    multiplies by the fields as they are; without one they are decoded where a `linear` reads them.
    format: what stored matrices that have these fields are called; the name, if nothing else.
    halves: the bytes of a block of GGUF at which its float16 scales begin.
    """

    name: str
    fields: tuple[Field, ...]
    decode: Callable[..., Any]
    encode: Callable[..., tuple[Any, ...]] | None = None
    group: int = 1
    product: str = ""
    format: str = ""
    halves: tuple[int, ...] = ()

    def numbers(self, columns: int) -> int:
        """Numbers in a row if its first field stores `columns`."""
        return columns // self.fields[0].size * self.fields[0].weights


def quantise_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [rows, n] as e4m3 times a float32 scale [rows, 1]; a row's largest number becomes 448."""
    x = x.astype(np.float32)
    largest = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(E4M3_TINY))
    scale = largest * np.float32(E4M3_STEP)
    return (x / scale).astype(ml_dtypes.float8_e4m3fn), scale


@cache
def rotation(size: int) -> np.ndarray:
    """The regular Hadamard matrix of a power of 4, f32[size, size]: symmetric, its own inverse."""
    power = next(power for power in range(1, 7) if 4**power == size)
    factors: list[np.ndarray] = [HADAMARD / 2] * power
    return reduce(np.kron, factors)


@cache
def _e4m3_numbers() -> np.ndarray:
    """f32[256]: the number of each byte."""
    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _cast(x: np.ndarray, dtype: str) -> np.ndarray:
    if x.dtype == ml_dtypes.float8_e4m3fn:  # numpy's own cast is several times slower
        return _e4m3_numbers()[x.view(np.uint8)]
    return x.astype(dtype)


# The namespace of the definitions, in numpy. bits: bytes as numbers of another dtype, along the
# last axis; lookup: the float32 at each place of a table of 16; rotate: float32 [n, size] times
# `rotation(size)`; largest: of each row, [rows, 1]; rint: of two whole numbers the even one.
NUMPY = SimpleNamespace(
    quantise_rows=quantise_rows,
    cast=_cast,
    bits=lambda x, dtype: x.view(dtype),
    stack=np.stack,
    lookup=lambda table, index: np.array(table, np.float32)[index],
    where=np.where,
    rotate=lambda x, size: x @ rotation(size),
    largest=lambda x: x.max(axis=1, keepdims=True),
    rint=np.rint,
)


def _scaled_rows(o: Any, values: Any, scale: Any) -> Any:
    return o.cast(values, "float32") * scale


def _int8_rows(o: Any, x: Any) -> tuple[Any, Any]:
    """Each row as whole numbers times a float32; its largest number becomes 127."""
    x = o.cast(x, "float32")
    largest = o.largest(abs(x))
    # a row of zeros is over 1 / 127
    scale = (largest + o.cast(largest == 0, "float32")) * INT8_STEP
    return o.cast(o.rint(x / scale), "int8"), scale


# ---- GGUF's block types. A block holds consecutive weights of one row and their scales. Each
# function takes uint8[n, bytes] and gives float32[n, groups, weights of a group]: scales are float16
# widened to float32, products are taken in the order of ggml's `dequantize_row_*`, and each is
# rounded once. Source: ggml-quants.c.

# What four bits of IQ4_NL and IQ4_XS stand for.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _half(o: Any, b: Any, at: int) -> Any:
    """The float16 at a byte of each block, as float32[n, 1]."""
    return o.cast(o.bits(b[:, at : at + 2], "float16"), "float32")


def _nibbles(o: Any, x: Any, width: int = 16) -> Any:
    """uint8[n, m] -> uint8[n, m / width, 2, width]: low halves of `width` bytes, then high ones."""
    x = x.reshape(x.shape[0], x.shape[1] // width, width)
    return o.stack([x & 15, x >> 4], 2)


def _parts(o: Any, x: Any, bits: int, axis: int) -> Any:
    """Numbers of `bits` bits out of each byte, the lowest first, along a new axis."""
    return o.stack([x >> at for at in range(0, 8, bits)], axis) & (1 << bits) - 1


def _signed(o: Any, q: Any, zero: int) -> Any:
    return o.cast(q, "int8") - zero


def _scaled(o: Any, q: Any, scale: Any) -> Any:
    """scale * q as float32[n, groups, size]. q: numbers [n, ...]; scale: float32[n, groups]."""
    n, groups = scale.shape
    size = math.prod(q.shape[1:])
    return o.cast(q.reshape(n, groups, size // groups), "float32") * scale[:, :, None]


def _q4_0(o: Any, b: Any) -> Any:
    return _scaled(o, _signed(o, _nibbles(o, b[:, 2:]), 8), _half(o, b, 0))


def _q4_1(o: Any, b: Any) -> Any:
    return _scaled(o, _nibbles(o, b[:, 4:]), _half(o, b, 0)) + _half(o, b, 2)[:, :, None]


def _five_bits(o: Any, high: Any, low: Any) -> Any:
    """uint8[n, 32] of uint8[n, 4], the fifth bits, and uint8[n, 16]."""
    n = low.shape[0]
    return _nibbles(o, low).reshape(n, 32) | _parts(o, high, 1, 2).reshape(n, 32) << 4


def _q5_0(o: Any, b: Any) -> Any:
    return _scaled(o, _signed(o, _five_bits(o, b[:, 2:6], b[:, 6:]), 16), _half(o, b, 0))


def _q5_1(o: Any, b: Any) -> Any:
    q = _five_bits(o, b[:, 4:8], b[:, 8:])
    return _scaled(o, q, _half(o, b, 0)) + _half(o, b, 2)[:, :, None]


def _k(o: Any, b: Any, q: Any) -> Any:
    """(d * scale) * q - (dmin * minimum), both of 6 bits: Q4_K and Q5_K."""
    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = o.stack([first & 63, (third & 15) | (first >> 6) << 4], 1)
    minima = o.stack([second & 63, third >> 4 | (second >> 6) << 4], 1)
    scales, minima = (o.cast(x.reshape(b.shape[0], 8), "float32") for x in (scales, minima))
    return _scaled(o, q, _half(o, b, 0) * scales) - (_half(o, b, 2) * minima)[:, :, None]


def _q5_k(o: Any, b: Any) -> Any:
    low = _nibbles(o, b[:, 48:], 32).reshape(b.shape[0], 8, 32)
    return _k(o, b, low | _parts(o, b[:, 16:48], 1, 1) << 4)


def _q6_k(o: Any, b: Any) -> Any:
    n = b.shape[0]
    low = _nibbles(o, b[:, :128], 64).reshape(n, 2, 4, 32)
    q = low | _parts(o, b[:, 128:192].reshape(n, 2, 32), 2, 2) << 4
    scales = o.cast(o.bits(b[:, 192:208], "int8"), "float32")
    return _scaled(o, _signed(o, q, 32), _half(o, b, 208) * scales)


def _q3_k(o: Any, b: Any) -> Any:
    n = b.shape[0]
    high = _parts(o, b[:, :32], 1, 1).reshape(n, 2, 4, 32)
    q = _parts(o, b[:, 32:96].reshape(n, 2, 32), 2, 2) | high << 2
    low = _nibbles(o, b[:, 96:104], 8).reshape(n, 16)
    scales = _signed(o, low | _parts(o, b[:, 104:108], 2, 1).reshape(n, 16) << 4, 32)
    return _scaled(o, _signed(o, q, 4), _half(o, b, 108) * o.cast(scales, "float32"))


def _q2_k(o: Any, b: Any) -> Any:
    q = _parts(o, b[:, 16:80].reshape(b.shape[0], 2, 32), 2, 2)
    scales, minima = (o.cast(x, "float32") for x in (b[:, :16] & 15, b[:, :16] >> 4))
    return _scaled(o, q, _half(o, b, 80) * scales) - (_half(o, b, 82) * minima)[:, :, None]


def _iq4_nl(o: Any, b: Any) -> Any:
    return _scaled(o, o.lookup(IQ4, _nibbles(o, b[:, 2:])), _half(o, b, 0))


def _iq4_xs(o: Any, b: Any) -> Any:
    n = b.shape[0]
    low, high = _parts(o, b[:, 4:8], 4, 2), _parts(o, b[:, 2:4], 2, 2)
    scales = _signed(o, low.reshape(n, 8) | high.reshape(n, 8) << 4, 32)
    q = o.lookup(IQ4, _nibbles(o, b[:, 8:]))
    return _scaled(o, q, _half(o, b, 0) * o.cast(scales, "float32"))


def _gguf(name: str, weights: int, size: int, blocks: Callable[..., Any], *halves: int) -> Encoding:
    def decode(o: Any, stored: Any) -> Any:
        rows, width = stored.shape
        count = width // size
        return blocks(o, stored.reshape(rows * count, size)).reshape(rows, count * weights)

    fields = (Field("", "uint8", size, weights),)
    return Encoding(name, fields, decode, group=weights, halves=halves)


def _rotated(size: int) -> Encoding:
    """Whole numbers that were rotated `size` at a time. They are turned back before they are
    scaled: their sums are exact, so that one rounding is all."""

    def decode(o: Any, values: Any, scale: Any) -> Any:
        rows, n = values.shape
        turned = o.rotate(o.cast(values, "float32").reshape(rows * n // size, size), size)
        return turned.reshape(rows, n) * scale

    return Encoding(f"int8 rotated by {size}", _INT8_ROWS, decode, group=size)


def _nvfp4(o: Any, halves: Any, scales: Any, scale: Any) -> Any:
    """Two e2m1 numbers a byte, the high half first, an e4m3 scale for 16, and a float32 for all."""
    rows, half = halves.shape
    numbers = o.lookup(E2M1, o.stack([halves >> 4, halves & 15], 2))
    numbers = numbers.reshape(rows, half // 8, 16) * o.cast(scales, "float32")[:, :, None]
    return numbers.reshape(rows, 2 * half) * scale


def _mxfp8(o: Any, values: Any, scales: Any) -> Any:
    """e4m3 numbers times 2 ** (scale - 127) for each 32, 0 for 0: a bfloat16's exponent."""
    rows, n = values.shape
    powers = o.cast(o.bits(o.stack([(scales & 1) << 7, scales >> 1], 2), "bfloat16"), "float32")
    return (o.cast(values, "float32").reshape(rows, n // 32, 32) * powers).reshape(rows, n)


ROW_SCALE = Field(" scale", "float32", weights=0)
_E4M3_ROWS = (Field("", E4M3), ROW_SCALE)
_NVFP4 = (Field("", "uint8", 1, 2), Field(" scales", E4M3, 1, 16), ROW_SCALE)
_MXFP8 = (Field("", E4M3), Field(" scales", "uint8", 1, 32))
_INT8_ROWS = (Field("", "int8"), ROW_SCALE)


def _any_of(*rows: Encoding) -> Encoding:
    """The encoding of layers of several types: rows of bytes as long as the longest type's, and one
    that says the type. All types are decoded, one is taken."""
    group = max(row.group for row in rows)
    size = max(row.fields[0].columns(group) for row in rows)

    def decode(o: Any, stored: Any, types: Any) -> Any:
        n = stored.shape[1] // size * group
        matrix, *others = (row.decode(o, stored[:, : row.fields[0].columns(n)]) for row in rows)
        for number, other in enumerate(others, 1):
            matrix = o.where(types == number, other, matrix)
        return matrix

    fields = (Field("", "uint8", size, group), Field(" type", "uint8", weights=0))
    return Encoding(EITHER.join(row.name for row in rows), fields, decode, group=group)


class _Encodings(dict[str, Encoding]):
    """Rows by name; rows of several types are made on demand."""

    def __missing__(self, name: str) -> Encoding:
        first, *more = name.split(EITHER)
        if not more:
            raise KeyError(name)
        self[name] = _any_of(*(self[one] for one in (first, *more)))
        return self[name]


EITHER = " or "
ENCODINGS = _Encodings(
    (row.name, row)
    for row in (
        Encoding(
            E4M3_FORMAT, _E4M3_ROWS, _scaled_rows, lambda o, x: o.quantise_rows(x),
            product="quantised_linear",
        ),
        Encoding("int8", _INT8_ROWS, _scaled_rows, _int8_rows),
        Encoding("stored float8", _E4M3_ROWS, _scaled_rows, format=E4M3_FORMAT),
        Encoding("stored int8", _INT8_ROWS, _scaled_rows, format="int8"),
        *(_rotated(4**power) for power in range(1, 7)),
        Encoding("nvfp4", _NVFP4, _nvfp4, group=16),
        Encoding("mxfp8", _MXFP8, _mxfp8, group=32),
        _gguf("Q4_0", 32, 18, _q4_0, 0),
        _gguf("Q4_1", 32, 20, _q4_1, 0, 2),
        _gguf("Q5_0", 32, 22, _q5_0, 0),
        _gguf("Q5_1", 32, 24, _q5_1, 0, 2),
        _gguf("Q8_0", 32, 34, lambda o, b: _scaled(o, o.bits(b[:, 2:], "int8"), _half(o, b, 0)), 0),
        _gguf("Q2_K", 256, 84, _q2_k, 80, 82),
        _gguf("Q3_K", 256, 110, _q3_k, 108),
        _gguf("Q4_K", 256, 144, lambda o, b: _k(o, b, _nibbles(o, b[:, 16:], 32)), 0, 2),
        _gguf("Q5_K", 256, 176, _q5_k, 0, 2),
        _gguf("Q6_K", 256, 210, _q6_k, 208),
        _gguf("IQ4_NL", 32, 18, _iq4_nl, 0),
        _gguf("IQ4_XS", 256, 136, _iq4_xs, 0),
    )
)  # fmt: skip
QUANTISED = tuple(name for name, row in ENCODINGS.items() if row.encode)  # `--weights-dtype`
# Encodings in which files are kept, by what stored matrices are called.
KEPT = {row.format or row.name: row.name for row in ENCODINGS.values() if not row.encode}


def common(names: Iterable[str | None]) -> str | None:
    """The encoding of matrices of one stack that are stored in these, None if there is none."""
    found = sorted({name or "" for name in names})
    if len(found) == 1:
        return found[0] or None
    return EITHER.join(found) if all(x and ENCODINGS[x].halves for x in found) else None


def passing_bytes(encoding: str, size: int) -> int:
    """Bytes that plain ops take at most while they decode a matrix of `size` numbers, without the
    matrix. A kernel takes none. Of several types all are decoded in float32."""
    return min(size, DECODED) * (PASSING_BYTES + 4 * encoding.count(EITHER))


def has_products(graph: Graph) -> bool:
    """Whether a graph multiplies by fields as they are."""
    products = {row.product for row in ENCODINGS.values() if row.product}
    return any(node.op in products for node, _ in graph.walk())


def decoded(encoding: str, fields: Sequence[np.ndarray]) -> np.ndarray:
    """The matrix, float32 [rows, n]."""
    # numbers of another type than the row's are not used
    with np.errstate(invalid="ignore", over="ignore"):
        return ENCODINGS[encoding].decode(NUMPY, *fields)


def encoded(encoding: str, x: Any, o: Any = NUMPY) -> tuple[Any, ...]:
    """The fields of a matrix [rows, n]. o: the namespace of its framework."""
    encode = ENCODINGS[encoding].encode
    assert encode is not None, f"{encoding} is only read from files"
    return encode(o, x)
