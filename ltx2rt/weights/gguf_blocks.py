"""GGUF's block types: how many bytes hold how many weights, and the numbers that they stand for.

A block holds consecutive weights of one row and their scales. Each decoder takes
uint8[n, bytes] and gives float32[n, groups, weights of a group], bit for bit as
`gguf.quants.dequantize`: scales are float16 widened to float32, products are taken in the order of
ggml's `dequantize_row_*`, and each is rounded once. Source: ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

F32 = np.dtype(np.float32)
# What four bits of IQ4_NL and IQ4_XS stand for.
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], F32)
BITS = np.arange(8, dtype=np.uint8)[:, None]  # shifts that give each bit of a byte
PAIRS = 2 * BITS[:4]  # shifts that give each two bits of a byte


@dataclass(frozen=True)
class Block:
    """weights: in a block. size: its bytes. decode: None for a type that is not read."""

    name: str
    weights: int
    size: int
    decode: Callable[[np.ndarray], np.ndarray] | None = None


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte of each block, as float32[n, 1]."""
    return blocks[:, at : at + 2].view(np.float16).astype(F32)


def _nibbles(bytes_: np.ndarray, width: int = 16) -> np.ndarray:
    """uint8[n, m] -> uint8[n, m / width, 2, width]: low halves of `width` bytes, then high ones."""
    bytes_ = bytes_.reshape(len(bytes_), -1, width)
    found = np.empty((*bytes_.shape[:2], 2, width), np.uint8)
    np.bitwise_and(bytes_, 15, out=found[:, :, 0])
    np.right_shift(bytes_, 4, out=found[:, :, 1])
    return found


def _scaled(q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """scale * q as float32[n, groups, size]. q: numbers [n, ...]; scale: float32[n, groups]."""
    x = q.reshape(*scale.shape, -1).astype(F32)
    x *= scale[:, :, None]
    return x


def _above(q: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """d * q + m: Q4_1 and Q5_1."""
    x = _scaled(q, _half(blocks, 0))
    x += _half(blocks, 2)[:, :, None]
    return x


def _below(q: np.ndarray, scale: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """scale * q - minimum: Q2_K, Q4_K and Q5_K. scale, minima: float32[n, groups]."""
    x = _scaled(q, scale)
    x -= minima[:, :, None]
    return x


def q8_0(b: np.ndarray) -> np.ndarray:
    return _scaled(b[:, 2:].view(np.int8), _half(b, 0))


def q4_0(b: np.ndarray) -> np.ndarray:
    return _scaled(_nibbles(b[:, 2:]).view(np.int8) - np.int8(8), _half(b, 0))


def q4_1(b: np.ndarray) -> np.ndarray:
    return _above(_nibbles(b[:, 4:]), b)


def _five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """uint8[n, 32] of uint8[n, 4], the fifth bits, and uint8[n, 16]."""
    q = _nibbles(low).reshape(-1, 32)
    q |= np.unpackbits(high, axis=1, bitorder="little") << 4
    return q


def q5_0(b: np.ndarray) -> np.ndarray:
    return _scaled(_five_bits(b[:, 2:6], b[:, 6:]).view(np.int8) - np.int8(16), _half(b, 0))


def q5_1(b: np.ndarray) -> np.ndarray:
    return _above(_five_bits(b[:, 4:8], b[:, 8:]), b)


def _six_bits(c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima uint8[n, 8] of Q4_K and Q5_K, from uint8[n, 12]."""
    first, second, third = c[:, :4], c[:, 4:8], c[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    return scales, np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], axis=1)


def _k(b: np.ndarray, q: np.ndarray) -> np.ndarray:
    """(d * scale) * q - (dmin * minimum): Q4_K and Q5_K."""
    scales, minima = _six_bits(b[:, 4:16])
    return _below(q, _half(b, 0) * scales, _half(b, 2) * minima)


def q4_k(b: np.ndarray) -> np.ndarray:
    return _k(b, _nibbles(b[:, 16:], 32))


def q5_k(b: np.ndarray) -> np.ndarray:
    q = _nibbles(b[:, 48:], 32).reshape(-1, 8, 32)
    q |= (b[:, None, 16:48] >> BITS & 1) << 4
    return _k(b, q)


def q6_k(b: np.ndarray) -> np.ndarray:
    q = _nibbles(b[:, :128], 64).reshape(-1, 2, 4, 32)
    q |= (b[:, 128:192].reshape(-1, 2, 1, 32) >> PAIRS & 3) << 4
    return _scaled(q.view(np.int8) - np.int8(32), _half(b, 208) * b[:, 192:208].view(np.int8))


def q3_k(b: np.ndarray) -> np.ndarray:
    q = b[:, 32:96].reshape(-1, 2, 1, 32) >> PAIRS & 3
    q |= ((b[:, None, :32] >> BITS & 1) << 2).reshape(q.shape)
    c = b[:, 96:108]
    low = _nibbles(c[:, :8], 8).reshape(-1, 16)
    high = (c[:, None, 8:] >> PAIRS & 3).reshape(-1, 16)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    return _scaled(q.view(np.int8) - np.int8(4), _half(b, 108) * scales)


def q2_k(b: np.ndarray) -> np.ndarray:
    q = b[:, 16:80].reshape(-1, 2, 1, 32) >> PAIRS & 3
    return _below(q, _half(b, 80) * (b[:, :16] & 15), _half(b, 82) * (b[:, :16] >> 4))


def iq4_nl(b: np.ndarray) -> np.ndarray:
    return _scaled(IQ4[_nibbles(b[:, 2:])], _half(b, 0))


def iq4_xs(b: np.ndarray) -> np.ndarray:
    low = (b[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    high = (b[:, 2:4, None] >> PAIRS[:, 0] & 3).reshape(-1, 8)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    return _scaled(IQ4[_nibbles(b[:, 8:])], _half(b, 0) * scales)


BLOCKS = {  # by ggml's number of the type
    2: Block("Q4_0", 32, 18, q4_0),
    3: Block("Q4_1", 32, 20, q4_1),
    6: Block("Q5_0", 32, 22, q5_0),
    7: Block("Q5_1", 32, 24, q5_1),
    8: Block("Q8_0", 32, 34, q8_0),
    9: Block("Q8_1", 32, 40),
    10: Block("Q2_K", 256, 84, q2_k),
    11: Block("Q3_K", 256, 110, q3_k),
    12: Block("Q4_K", 256, 144, q4_k),
    13: Block("Q5_K", 256, 176, q5_k),
    14: Block("Q6_K", 256, 210, q6_k),
    15: Block("Q8_K", 256, 292),
    16: Block("IQ2_XXS", 256, 66),
    17: Block("IQ2_XS", 256, 74),
    18: Block("IQ3_XXS", 256, 98),
    19: Block("IQ1_S", 256, 50),
    20: Block("IQ4_NL", 32, 18, iq4_nl),
    21: Block("IQ3_S", 256, 110),
    22: Block("IQ2_S", 256, 82),
    23: Block("IQ4_XS", 256, 136, iq4_xs),
    29: Block("IQ1_M", 256, 56),
    34: Block("TQ1_0", 256, 54),
    35: Block("TQ2_0", 256, 66),
    39: Block("MXFP4", 32, 17),
    40: Block("NVFP4", 64, 36),
    41: Block("Q1_0", 128, 18),
}
PLAIN = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
