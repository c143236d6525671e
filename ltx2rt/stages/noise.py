"""Gaussian noise that is the same on every backend and any number of devices.

Decides the generator: Philox counters (numpy fixes the raw stream of its bit generators, not of
`normal()`) and our own Box-Muller in float64. Each use has a named stream, so adding a draw never
moves another one.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np


def standard_normal(seed: int, stream: str, shape: tuple[int, ...]) -> np.ndarray:
    """f32[shape] of N(0, 1), a function only of (seed, stream, position).

    seed: 0 <= seed < 2**64. stream: the noise's use, such as "stage1.video"; streams are
    independent. A longer draw starts with the shorter one. ValueError if the seed is out of range.
    """
    size = math.prod(shape)
    drawn = uniform(seed, stream, 2 * -(-size // 2)).reshape(-1, 2)
    radius = np.sqrt(-2.0 * np.log1p(-drawn[:, 0]))  # 1 - u in (0, 1]: never log(0)
    angle = 2.0 * np.pi * drawn[:, 1]
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    return pairs.reshape(-1)[:size].reshape(shape).astype(np.float32)


def uniform(seed: int, stream: str, count: int) -> np.ndarray:
    """f64[count] in [0, 1), of the generator, the streams and the bounds of `standard_normal`."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: {seed}, expected 0 <= seed < 2**64")
    key = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little")
    raw = np.random.Philox(key=seed | key << 64).random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
