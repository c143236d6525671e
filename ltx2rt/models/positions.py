"""RoPE angles on the host: the float64 frequency grid and the official float32 order of rounding.

Decides the tables' numbers. Leaves which coordinates there are, and how axes combine, to each network.
Angles are numpy's business because XLA rewrites the division inside them and moves cosines by 1e-3.
"""

from __future__ import annotations

import numpy as np


def frequency_grid(dim: int, num_axes: int, theta: float, float64: bool = True) -> np.ndarray:
    """theta^(j/(n-1)) * pi/2 for j = 0..n-1, n = dim // (2 num_axes), as float32[n].

    float64: powers and product in double precision, rounded once at the end (every released model).
    """
    dtype = np.float64 if float64 else np.float32
    exponents = np.linspace(0.0, 1.0, dim // (2 * num_axes), dtype=dtype)
    return (dtype(theta) ** exponents * dtype(np.pi / 2)).astype(np.float32)


def axis_angles(coordinates: np.ndarray, max_pos: float, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin (*coordinates.shape, n) of (2 m / max_pos - 1) * grid, every operation in float32."""
    fraction = np.asarray(coordinates, np.float32) / np.float32(max_pos)
    angles = (fraction * np.float32(2) - np.float32(1))[..., None] * grid
    return np.cos(angles), np.sin(angles)
