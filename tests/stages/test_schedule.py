"""The noise schedules equal the published tables."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltx2rt.stages.schedule import DISTILLED_SIGMAS, STAGE2_SIGMAS, shifted_sigmas

PUBLISHED = {  # (steps, tokens): five decimals
    (
        30,
        4096,
    ): "1.0 .99496 .9896 .98391 .97784 .97136 .96442 .95698 .94897 .94034 .93099 .92085 .90981 .89774 .88448 "
    ".86986 .85365 .83558 .81532 .79243 .76636 .73642 .70166 .66081 .61214 .55315 .48016 .38754 "
    ".26612 .1 0",
    (
        15,
        4096,
    ): "1.0 .98725 .97282 .95637 .93742 .91537 .88939 .85833 .82052 .77351 .71348 .63412 .52435 .36249 .1 0",
    (
        15,
        8160,
    ): "1.0 .99349 .98601 .97734 .96715 .95501 .94031 .92214 .8991 .86892 .82771 .76803 .6739 .50338 .1 0",
    (1, 4096): ".1 0",
}


@pytest.mark.parametrize("steps,tokens", PUBLISHED)
def test_shifted_sigmas_equal_the_published_values(steps, tokens):
    expected = np.array(PUBLISHED[steps, tokens].split(), np.float64)
    # half a unit of the fifth printed decimal, plus float32 rounding
    np.testing.assert_allclose(shifted_sigmas(steps, tokens), expected, atol=5.2e-6, rtol=0)


def test_shifted_sigmas_equal_diffusers():
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096,
        shift_terminal=0.1, time_shift_type="exponential",
    )  # fmt: skip
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / 40, 40), mu=2.05)
    # diffusers computes in float64 and rounds once: a few float32 units apart
    np.testing.assert_allclose(shifted_sigmas(40), scheduler.sigmas.numpy(), atol=5e-7, rtol=0)


@given(st.integers(2, 200), st.integers(256, 40_000))
def test_sigmas_fall_from_one_through_a_tenth_to_zero(steps, tokens):
    sigmas = shifted_sigmas(steps, tokens)
    assert sigmas.dtype == np.float32 and sigmas.shape == (steps + 1,)
    assert sigmas[0] == 1 and sigmas[-2] == np.float32(0.1) and sigmas[-1] == 0
    assert np.all(np.diff(sigmas) <= 0)


def test_stage_two_is_the_tail_of_the_distilled_table():
    assert DISTILLED_SIGMAS.dtype == np.float32
    np.testing.assert_array_equal(STAGE2_SIGMAS, DISTILLED_SIGMAS[5:])


def test_no_steps_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        shifted_sigmas(0)
