"""RoPE tables, made by numpy: devices only gather and combine them.

A token's angles are a frequency grid times its coordinate on each axis. There are few distinct
coordinates (frames, rows, columns), so cos and sin are tabulated over those, in the reference's
order of rounding: grid in float64 rounded once, then float32 throughout. A compiler that rewrote
the division inside the angle would move cosines by 1e-3.
"""

from __future__ import annotations

import math

import numpy as np

from ltx2rt.graph import Ops, Term


def frequency_grid(dim: int, num_axes: int, theta: float, float64: bool = True) -> np.ndarray:
    """theta^(j/(n-1)) * pi/2 for j = 0..n-1, n = dim // (2 num_axes); float32[n]."""
    dtype = np.float64 if float64 else np.float32
    exponents = np.linspace(0.0, 1.0, dim // (2 * num_axes), dtype=dtype)
    return (np.power(dtype(theta), exponents) * dtype(math.pi) / dtype(2)).astype(np.float32)


def axis_angles(
    coordinates: np.ndarray, max_pos: float, grid: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of grid * (2 coordinate / max_pos - 1), float32[coordinates, frequencies]."""
    u = np.asarray(coordinates, np.float32) / np.float32(max_pos) * np.float32(2) - np.float32(1)
    angles = u[:, None] * grid
    return np.cos(angles), np.sin(angles)


def coordinate_table(
    name: str, bounds: np.ndarray, max_pos: float, grid: np.ndarray
) -> dict[str, np.ndarray]:
    """Graph inputs of an axis: `{name}_cos`, `_sin` [coordinates, frequencies], `_index`. bounds:
    float32[..., 2], a token's [start, end), of which the midpoint gives the angle."""
    middle = (bounds[..., 0] + bounds[..., 1]) / np.float32(2)
    unique, index = np.unique(middle, return_inverse=True)
    cos, sin = axis_angles(unique, max_pos, grid)
    return {
        f"{name}_cos": cos,
        f"{name}_sin": sin,
        f"{name}_index": index.reshape(middle.shape).astype(np.int32),
    }


def gather_tables(
    o: Ops, axes: list[dict[str, Term]], heads: int, head_dim: int
) -> tuple[Term, Term]:
    """cos and sin (..., tokens, heads, pairs) from each axis' {"cos", "sin", "index"}. Angles lie
    frequency-major, axis-minor; identity pairs fill the front; heads then own different bands."""
    tables = []
    for kind in ("cos", "sin"):
        gathered = [o.take(axis[kind], axis["index"], axis="coordinates") for axis in axes]
        x = gathered[0]
        if len(gathered) > 1:
            x = o.stack(*gathered, axis="axis", dim=len(x.type.axes))
            x = o.merge(x, axes=("frequencies", "axis"), into="frequencies")
        pairs = head_dim // 2
        missing = heads * pairs - x.type.size("frequencies")
        if missing:
            front = {**x.type.sizes, "frequencies": missing}
            x = o.concat(
                o.full(1.0 if kind == "cos" else 0.0, x.type.dtype, **front), x, axis="frequencies"
            )
        tables.append(o.split(x, axis="frequencies", into={"heads": heads, "pairs": pairs}))
    return tables[0], tables[1]
