"""The search for step plans: the best of all plans, by trying every one."""

from itertools import combinations

import numpy as np

from ltx2rt.models.step_plan import StepPlan
from ltx2rt.stages.calibrate import Recorded, best_plan, jump_costs, jump_errors
from ltx2rt.stages.schedule import shifted_sigmas

STEPS = 10


def recorded(seed: int) -> Recorded:
    """Euler over an x0 that bends with sigma."""
    rng, s = np.random.default_rng(seed), shifted_sigmas(STEPS).astype(float)
    latents, x0s = {}, {}
    for stream in ("video", "audio"):
        a, b, x = rng.normal(size=(3, 4, 2))
        x0 = [a + b * np.exp(-3 * level) for level in s[:-1]]
        xs = [x]
        for i in range(STEPS):
            xs.append(xs[-1] + (xs[-1] - x0[i]) / s[i] * (s[i + 1] - s[i]))
        latents[stream], x0s[stream] = np.stack(xs), np.stack(x0)
    return Recorded(latents, x0s)


def test_the_best_plan_is_the_best_of_all():
    costs = jump_costs([recorded(i) for i in range(3)], shifted_sigmas(STEPS))

    def cost(path: tuple[int, ...], order: int) -> float:
        ends, total = (*path, STEPS), 0.0
        for n, i in enumerate(path):
            before = path[n - 1] + 1 if order == 2 and n else 0
            total += costs[before, i, ends[n + 1]] ** 2
        return total

    for order in (1, 2):
        every = [(0, *middle, STEPS - 1) for middle in combinations(range(1, STEPS - 1), 3)]
        found = best_plan(costs, 5, order).evaluate
        assert found in every and cost(found, order) <= min(cost(path, order) for path in every) * (1 + 1e-9)
    assert best_plan(costs, STEPS, 2) == StepPlan.of(range(STEPS), 2)


def test_errors_of_jumps_are_those_of_the_steps_themselves():
    run, s = recorded(0), shifted_sigmas(STEPS)
    x, x0 = run.latents["video"].reshape(STEPS + 1, -1), run.x0["video"].reshape(STEPS, -1)
    errors = jump_errors(x, x0, s)
    assert np.nanmax(errors[0][np.arange(STEPS), np.arange(1, STEPS + 1)]) <= 1e-6, "one step is exact"
    row = StepPlan.of((0, 2, 5, 7, 9), 2).coefficients(s)[2]
    expected = np.linalg.norm(x[7] - row[0] * x[5] - row[1] * x0[5] - row[2] * x0[2]) / np.linalg.norm(x[-1])
    np.testing.assert_allclose(errors[3, 5, 7], expected, rtol=1e-9)
