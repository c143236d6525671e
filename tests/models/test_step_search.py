"""The search for step plans: its errors against replayed jumps, its plans against all plans."""

from itertools import combinations, product

import numpy as np
import pytest

from ltx2rt.models.step_plan import StepPlan
from ltx2rt.models.step_search import Recorded, best_plan, jump_costs, jump_errors
from ltx2rt.stages.schedule import shifted_sigmas

STEPS, TOKENS, CHANNELS = 7, 5, 3


def recorded(seed):
    """Euler along x0s that drift, as a model's do."""
    draw, sigmas = np.random.default_rng(seed), shifted_sigmas(STEPS).astype(np.float64)
    latents, x0s = {}, {}
    for stream in ("video", "audio"):
        x = [draw.standard_normal((TOKENS, CHANNELS))]
        x0, drift = (draw.standard_normal((n, TOKENS, CHANNELS)) for n in (1, STEPS))
        x0 = x0 + np.cumsum(drift * 0.2, axis=0)
        for i in range(STEPS):
            x.append(x[i] + (x[i] - x0[i]) / sigmas[i] * (sigmas[i + 1] - sigmas[i]))
        latents[stream], x0s[stream] = np.array(x), x0
    return Recorded(latents, x0s)


def test_an_error_is_how_far_the_replayed_jump_lands():
    """The steps left out are replayed one by one, with x0 on a line over sigma."""
    run, sigmas = recorded(1), shifted_sigmas(STEPS).astype(np.float64)
    x, x0 = (a["video"].reshape(len(a["video"]), -1) for a in (run.latents, run.x0))
    errors = jump_errors(x, x0, sigmas)
    compared = 0
    for h, i, j in product(range(-1, STEPS), range(STEPS), range(STEPS + 1)):
        if not np.isfinite(errors[h + 1, i, j]):  # also where h < i < j does not hold
            continue
        y = x[i]
        for step in range(i, j):
            line = 0 if h < 0 else (sigmas[i] - sigmas[step]) / (sigmas[h] - sigmas[i])
            guess = x0[i] + line * (x0[i] - x0[max(h, 0)])
            y = y + (y - guess) / sigmas[step] * (sigmas[step + 1] - sigmas[step])
        far = np.linalg.norm(x[j] - y) / np.linalg.norm(x[-1])
        assert errors[h + 1, i, j] == pytest.approx(far, abs=1e-7)  # a square root of 1e-16 squares
        compared += 1
    assert compared > 50


@pytest.mark.parametrize("order", (1, 2))
@pytest.mark.parametrize("evaluations", (2, 3, 5))
def test_no_plan_costs_less(order, evaluations):
    costs = jump_costs([recorded(n) for n in range(3)], shifted_sigmas(STEPS))

    def cost(evaluate):
        path = [*evaluate, STEPS]
        before = [-1, *path] if order == 2 else [-1] * len(path)
        return sum(costs[h + 1, i, j] ** 2 for h, i, j in zip(before, path, path[1:], strict=False))

    plans = [(0, *rest, STEPS - 1) for rest in combinations(range(1, STEPS - 1), evaluations - 2)]
    best = min(plans, key=cost)
    found = best_plan(costs, evaluations, order)
    assert (found.order, cost(found.evaluate)) == (order, pytest.approx(cost(best)))


def test_a_stream_that_weighs_more_is_kept_closer():
    """With all of the weight on sound the plan is the best for sound alone."""
    runs, sigmas = [recorded(5)], shifted_sigmas(STEPS)
    alone = [Recorded({"audio": r.latents["audio"]}, {"audio": r.x0["audio"]}) for r in runs]
    heavy = best_plan(jump_costs(runs, sigmas, {"audio": 1e6}), 4, 2)
    assert heavy == best_plan(jump_costs(alone, sigmas), 4, 2)
    assert heavy != StepPlan.of((0, 1, 2, STEPS - 1), 2)
