"""The host's noise is a fixed function of seed, stream and position."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltx2rt.stages.noise import CHUNK, standard_normal, uniform


def test_values_never_change():
    golden = [
        -0.5940805077552795, -1.5295398235321045, -1.2761273384094238, 1.2690739631652832,
        0.10751286894083023, -0.6362687945365906,
    ]  # fmt: skip
    # log, cos and sin may differ by a float64 unit between C libraries: at most one float32 unit
    # after rounding
    np.testing.assert_allclose(
        standard_normal(10, "stage1.video", (2, 3)).ravel(), golden, rtol=1.2e-7
    )


def test_a_large_draw_is_box_mullers_in_one_piece():
    """Of Philox's counters: chunks, which spare memory's bandwidth, change no bit."""
    size = 4 * CHUNK + 6
    drawn = uniform(3, "s", size).reshape(-1, 2)
    radius, angle = np.sqrt(-2.0 * np.log1p(-drawn[:, 0])), 2.0 * np.pi * drawn[:, 1]
    whole = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).ravel()
    np.testing.assert_array_equal(standard_normal(3, "s", (size - 1,)), whole[:-1].astype("f"))


def test_noise_is_standard_normal():
    x = standard_normal(1, "stage1.audio", (200_000,)).astype(np.float64)
    # six standard errors at this sample size
    assert abs(x.mean()) < 6 / len(x) ** 0.5
    assert abs(x.var() - 1) < 6 * (2 / len(x)) ** 0.5
    assert abs((x**4).mean() - 3) < 6 * (96 / len(x)) ** 0.5
    assert abs(np.mean(x[::2] * x[1::2])) < 6 / (len(x) / 2) ** 0.5


@given(st.integers(0, 2**63 - 1), st.integers(0, 40), st.integers(0, 40))
def test_a_longer_draw_starts_with_the_shorter(seed, short, more):
    long = standard_normal(seed, "s", (short + more,))
    assert long.dtype == np.float32
    np.testing.assert_array_equal(long[:short], standard_normal(seed, "s", (short,)))


def test_streams_and_seeds_are_independent():
    draws = [
        standard_normal(s, name, (20_000,))
        for s in (0, 1)
        for name in ("stage1.video", "stage2.video")
    ]
    correlation = np.corrcoef(draws) - np.eye(4)
    assert np.abs(correlation).max() < 6 / 20_000**0.5


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match="seed"):
        standard_normal(seed, "s", (1,))
