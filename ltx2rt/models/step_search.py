"""The search for a step plan in recorded exact runs: no evaluation of the model, all in float64.

The error of a jump from i to j after an evaluation at h is how far its latents are from the
recorded ones, |x_j - x^_j| / |x_N|, by stream. A jump costs the largest of these over prompts and
streams,
each stream's in units of its own error over the last two steps; a path costs the sum of the
squares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ltx2rt.models.step_plan import MAX_GAIN, StepPlan, gain

LEAST = 1e-12  # unit of a stream that the last steps do not change


@dataclass(frozen=True)
class Recorded:
    """An exact run by stream: latents f32[steps + 1, T, C], x0 f32[steps, T, C]."""

    latents: Mapping[str, np.ndarray]
    x0: Mapping[str, np.ndarray]


def jump_errors(x: np.ndarray, x0: np.ndarray, sigmas: np.ndarray) -> np.ndarray:
    """f64[steps + 1, steps, steps + 1] by (h + 1, i, j); h + 1 = 0 is order 1. Infinite: no such
    jump. x [steps + 1, n], x0 [steps, n], sigmas [steps + 1]."""
    s, steps = sigmas.astype(np.float64), len(x0)
    x, x0 = x.astype(np.float64), x0.astype(np.float64)
    errors = np.full((steps + 1, steps, steps + 1), np.inf)
    scale = max(float(np.linalg.norm(x[-1])), LEAST)
    for i in range(steps):
        change = x0[i] - x0[:i]
        squares = (change**2).sum(1)
        for j in range(i + 1, steps + 1):
            r = s[j] / s[i]
            rest = x[j] - r * x[i] - (1 - r) * x0[i]
            errors[0, i, j] = np.linalg.norm(rest) / scale
            gains = np.array([gain(s, h, i, j) for h in range(i)])
            square = (rest**2).sum() - 2 * gains * (change @ rest) + gains**2 * squares
            line = np.sqrt(np.maximum(square, 0)) / scale
            line[np.abs(gains) > MAX_GAIN * (1 - r) + LEAST] = np.inf
            errors[1 : i + 1, i, j] = line
    return errors


def jump_costs(
    runs: Sequence[Recorded], sigmas: np.ndarray, weights: Mapping[str, float] | None = None
) -> np.ndarray:
    """Costs as `jump_errors` has errors, jointly of all streams and prompts. weights: by stream, of
    its error (default: 1)."""
    costs = []
    for stream in runs[0].x0:
        flat = [
            [one[stream].reshape(len(one[stream]), -1) for one in (run.latents, run.x0)]
            for run in runs
        ]
        errors = np.stack([jump_errors(x, x0, sigmas) for x, x0 in flat])
        unit = float(np.median(errors[:, 0, max(len(sigmas) - 3, 0), -1]))
        costs.append(errors.max(0) / max(unit, LEAST) * (weights or {}).get(stream, 1.0))
    return np.max(costs, axis=0)


def best_plan(costs: np.ndarray, evaluations: int, order: int) -> StepPlan:
    """The cheapest plan of `evaluations` evaluations, the last step among them; ties: earlier
    steps. Dynamic programming over the last two evaluations. costs: of `jump_costs`."""
    steps = costs.shape[1]
    squares = costs**2
    best = np.full((steps + 1, steps), np.inf)  # by h + 1 and i, of paths that end with i
    best[0, 0] = 0
    befores: list[np.ndarray] = []
    for _ in range(evaluations - 1):
        jump = squares if order == 2 else np.broadcast_to(squares[:1], squares.shape)
        reached = best[:, :, None] + jump[:, :, :steps]
        befores.append(reached.argmin(0))  # by (i, j): the h that led to i
        best = np.full((steps + 1, steps), np.inf)
        best[1:] = reached.min(0)
    i, h = steps - 1, int(best[:, -1].argmin())
    path = [i]
    for before in reversed(befores):
        path.append(h - 1)
        h, i = int(before[h - 1, i]), h - 1
    return StepPlan.of(path[::-1], order)
