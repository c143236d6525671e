"""RoPE tables: the spec's numbers, diffusers' tables, and devices that only copy numpy's."""

import math

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from ltx2rt.graph import trace
from ltx2rt.models.positions import axis_angles, coordinate_table, frequency_grid, gather_tables
from tests.parity import run_graph

THETA = 10000.0
AXES = ("time", "rows", "columns")
MAX_POS = (20, 2048, 2048)


def tables(kind, bounds, dim, heads, float64=True) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin (B, tokens, heads, pairs) of positions (B, axes, tokens, 2)."""
    count = bounds.shape[1]
    grid = frequency_grid(dim, count, THETA, float64)
    feeds = {}
    for i in range(count):
        feeds |= coordinate_table(AXES[i], bounds[:, i], MAX_POS[i], grid)

    def model(o):
        axes, at = [], {"B": len(bounds), "tokens": bounds.shape[2]}
        for name in AXES[:count]:
            unique, n = feeds[f"{name}_cos"].shape
            sizes = {"coordinates": unique, "frequencies": n}
            axes.append({k: o.input(f"{name}_{k}", **sizes) for k in ("cos", "sin")})
            axes[-1]["index"] = o.input(f"{name}_index", "int32", **at)
        return dict(zip(("cos", "sin"), gather_tables(o, axes, heads, dim // heads), strict=True))

    outputs = run_graph(kind, trace("rope", model, "float32"), {}, feeds)
    return outputs["cos"], outputs["sin"]


def reference(modality, dim, heads, float64=True) -> LTX2AudioVideoRotaryPosEmbed:
    return LTX2AudioVideoRotaryPosEmbed(
        dim, modality=modality, double_precision=float64, rope_type="split",
        num_attention_heads=heads, scale_factors=(8, 32, 32) if modality == "video" else (4,),
    )  # fmt: skip


def theirs(module, coordinates: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = module(coordinates)
    return cos.transpose(1, 2).numpy(), sin.transpose(1, 2).numpy()


@pytest.mark.parametrize("num_axes,dim,values", [
    (3, 4096, (1.5707964, 1.5921853, 158.14546, 15707.963)),
    (1, 2048, (1.5707964, 1.5850024, 157.78835, 15707.963)),
    (1, 4096, (1.5707964, 1.5778799, 157.43341, 15707.963)),
    (1, 3840, (1.5707964, 1.5783535, 157.45705, 15707.963)),
])  # fmt: skip
def test_grid_holds_the_released_models_frequencies(num_axes, dim, values):
    grid = frequency_grid(dim, num_axes, THETA)
    assert grid.dtype == np.float32 and len(grid) == dim // (2 * num_axes)
    assert_allclose(grid[[0, 1, len(grid) // 2, -1]], np.float32(values), rtol=1e-7)


@pytest.mark.parametrize("kind", ["numpy", "cuda", "tpu"])
def test_video_and_audio_tables_hold_the_official_values(kind):
    """Video token (t=1, h=2, w=3) at 24 fps, width 4096; audio token 1, width 2048; 32 heads."""
    position = np.array([[[[1 / 24, 9 / 24]], [[64, 96]], [[96, 128]]]], np.float32)
    cos, sin = (x[0, 0] for x in tables(kind, position, 4096, 32))
    near = dict(rtol=0, atol=1e-6)
    assert_allclose(cos[0, :6], [1, 1, 0.03271897, 0.12241063, 0.17096186, 0.01178126], **near)
    assert_allclose(sin[0, :6], [0, 0, -0.99946457, -0.99247956, -0.98527765, -0.99993062], **near)
    # Angles of 1e4: one float32 step is 1e-3 rad; a float32 grid would move these by 5e-4.
    far = dict(rtol=0, atol=1e-4)
    assert_allclose(cos[31, -3:], [0.86594236, -0.38297659, -0.92406642], **far)
    assert_allclose(sin[31, -3:], [0.50014377, 0.92375803, 0.38223195], **far)
    cos, sin = (x[0, 0] for x in tables(kind, np.array([[[[0.01, 0.05]]]], np.float32), 2048, 32))
    assert_allclose(cos[0, :3], [0.00471240, -0.00945093, -0.02374049], **near)
    assert_allclose(sin[0, :3], [-0.99998891, -0.99995536, -0.99971813], **near)
    assert_allclose([cos[31, -1], sin[31, -1]], [-0.99999988, -0.00051096], **far)


def test_connector_angles_hold_the_official_values():
    cos, sin = axis_angles(np.array([5]), 4096, frequency_grid(4096, 1, THETA))
    assert_allclose(cos[0, :3], [0.00383491, -0.00323133, -0.01032935], rtol=0, atol=1e-6)
    assert_allclose(sin[0, :3], [-0.99999267, -0.99999475, -0.99994665], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["cuda", "tpu"])
def test_devices_copy_the_tables_of_61_positions_bit_for_bit(backend):
    """Also past 20 s, where a division inside the angle moves a cosine by 1e-3."""
    grid = reference("video", 4096, 32).prepare_video_coords(2, 61, 1, 2, "cpu", fps=23.976).numpy()
    grid[1] += np.float32(0.37)  # samples at different positions
    expected = tables("numpy", grid, 4096, 32)
    for actual, table in zip(tables(backend, grid, 4096, 32), expected, strict=True):
        assert np.array_equal(actual, table)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["video", "audio"]),
    st.integers(1, 5),
    st.integers(3, 8),
    st.tuples(st.integers(1, 61), st.integers(1, 4), st.integers(1, 4)),
    st.sampled_from([24.0, 25.0, 24000 / 1001, 60.0]),
    st.booleans(),
)
def test_tables_equal_diffusers_at_any_size(modality, heads, pairs, grid, fps, float64):
    dim = 2 * heads * pairs
    module = reference(modality, dim, heads, float64)
    if modality == "video":
        coordinates = module.prepare_video_coords(2, *grid, "cpu", fps=fps)
    else:
        coordinates = module.prepare_audio_coords(2, grid[0], "cpu")
    # The same float32 angles, of which torch's and numpy's cosines differ by a float32 step. A
    # float32 grid takes each library's own linspace and power: exponents one step of 2^-24 apart,
    # which the power multiplies by ln(theta), and two roundings, all relative to the highest
    # frequency.
    apart = THETA * math.pi / 2 * (math.log(THETA) + 2) * 2**-24
    found = tables("numpy", coordinates.numpy(), dim, heads, float64)
    for ours, expected in zip(found, theirs(module, coordinates), strict=True):
        assert_allclose(ours, expected, rtol=0, atol=1e-6 if float64 else apart)
