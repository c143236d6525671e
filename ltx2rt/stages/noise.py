"""Gaussian noise that is the same on every backend and any number of devices.

Decides the generator: Philox counters (numpy fixes the raw stream of its bit generators, not of
`normal()`) and our own Box-Muller in float64. Each use has a named stream, so adding a draw never
moves another one.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

CHUNK = 2**16  # pairs of numbers at once, so that temporaries stay in a processor's cache


def standard_normal(seed: int, stream: str, shape: tuple[int, ...]) -> np.ndarray:
    """f32[shape] of N(0, 1), a function only of (seed, stream, position).

    seed: 0 <= seed < 2**64. stream: the noise's use, such as "stage1.video"; streams are
    independent. A longer draw starts with the shorter one. ValueError if the seed is out of range.
    """
    size = math.prod(shape)
    generator, pairs = _generator(seed, stream), np.empty((-(-size // 2), 2), np.float32)
    for start in range(0, len(pairs), CHUNK):
        part = pairs[start : start + CHUNK]
        drawn = _uniform(generator, part.size).reshape(-1, 2)
        radius = np.negative(drawn[:, 0])
        np.log1p(radius, out=radius)  # 1 - u in (0, 1]: never log(0)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        angle = 2.0 * np.pi * drawn[:, 1]
        part[:, 0] = radius * np.cos(angle)
        part[:, 1] = radius * np.sin(angle)
    return pairs.reshape(-1)[:size].reshape(shape)


def uniform(seed: int, stream: str, count: int) -> np.ndarray:
    """f64[count] in [0, 1), of the generator, the streams and the bounds of `standard_normal`."""
    return _uniform(_generator(seed, stream), count)


def _generator(seed: int, stream: str) -> np.random.Philox:
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: {seed}, expected 0 <= seed < 2**64")
    key = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little")
    return np.random.Philox(key=seed | key << 64)


def _uniform(generator: np.random.Philox, count: int) -> np.ndarray:
    raw = generator.random_raw(count)
    raw >>= np.uint64(11)
    found = raw.astype(np.float64)
    found *= 2.0**-53
    return found
