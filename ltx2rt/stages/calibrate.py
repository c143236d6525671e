"""The search for a step plan in recorded exact runs: no evaluation of the model, all in float64.

The error of a jump from i to j after an evaluation at h is how far its latents are from the recorded
ones, |x_j - x^_j| / |x_N|, by stream. A jump costs the largest of these over prompts and streams, each
stream's in units of its own error over the last two steps; a path costs the sum of the squares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ltx2rt.models.step_plan import MAX_GAIN, StepPlan, gain


@dataclass(frozen=True)
class Recorded:
    """An exact run: by stream, latents f32[steps + 1, T, C] from the start on, x0 f32[steps, T, C]."""

    latents: Mapping[str, np.ndarray]
    x0: Mapping[str, np.ndarray]


def jump_errors(x: np.ndarray, x0: np.ndarray, sigmas: np.ndarray) -> np.ndarray:
    """f64[steps + 1, steps, steps + 1] by (h + 1, i, j), h + 1 = 0 for order 1; infinite where there is none.

    x [steps + 1, n], x0 [steps, n], sigmas [steps + 1].
    """
    s, steps = sigmas.astype(np.float64), len(x0)
    x, x0 = x.astype(np.float64), x0.astype(np.float64)
    found = np.full((steps + 1, steps, steps + 1), np.inf)
    scale = np.linalg.norm(x[-1])
    for i in range(steps):
        change = x0[i] - x0[:i]  # of x0 since h
        squares = (change**2).sum(1)
        for j in range(i + 1, steps + 1):
            r = s[j] / s[i]
            rest = x[j] - r * x[i] - (1 - r) * x0[i]
            found[0, i, j] = np.linalg.norm(rest) / scale
            gains = np.array([gain(s, h, i, j) for h in range(i)])
            square = (rest**2).sum() - 2 * gains * (change @ rest) + gains**2 * squares
            errors = np.sqrt(np.maximum(square, 0)) / scale
            errors[np.abs(gains) > MAX_GAIN * (1 - r) + 1e-12] = np.inf
            found[1 : i + 1, i, j] = errors
    return found


def jump_costs(runs: Sequence[Recorded], sigmas: np.ndarray) -> np.ndarray:
    """Costs as `jump_errors` has errors, jointly of all streams and prompts."""
    found = []
    for stream in runs[0].x0:
        flat = [[one[stream].reshape(len(one[stream]), -1) for one in (run.latents, run.x0)] for run in runs]
        errors = np.stack([jump_errors(x, x0, sigmas) for x, x0 in flat])
        unit = np.median(errors[:, 0, max(len(sigmas) - 3, 0), -1])
        found.append(errors.max(0) / max(float(unit), 1e-12))
    return np.max(found, axis=0)


def best_plan(costs: np.ndarray, evaluations: int, order: int) -> StepPlan:
    """The plan of so many evaluations that costs the least and evaluates the last step; of equal ones the earlier
    steps. By dynamic programming over the last two evaluations."""
    steps = costs.shape[1]
    squares = costs**2
    best = np.full((steps + 1, steps), np.inf)  # by h + 1 and i, of paths that end with the evaluation i
    best[0, 0] = 0
    came: list[np.ndarray] = []
    for _ in range(evaluations - 1):
        jump = squares if order == 2 else np.broadcast_to(squares[:1], squares.shape)
        reached = best[:, :, None] + jump[:, :, :steps]
        came.append(reached.argmin(0))  # of (i, j): the h that led to i
        best = np.full((steps + 1, steps), np.inf)
        best[1:] = reached.min(0)
    i, h = steps - 1, int(best[:, -1].argmin())
    path = [i]
    for before in reversed(came):
        path.append(h - 1)
        h, i = int(before[h - 1, i]), h - 1
    return StepPlan.of(path[::-1], order)
