"""Step plans: which steps of a schedule are evaluated, and how the others are left out.

Between two evaluations x0 stays as it was (order 1), or goes on in a straight line over sigma
(order 2). Both are closed: one step from an evaluation at i to the next at j, with x0' from the
evaluation h before i,

    x_j = r x + (1 - r + g) x0 - g x0'          r = s_j / s_i, g = 0 in order 1
    g   = sum_{l=i}^{j-1} (s_i - s_l) (1 - s_{l+1}/s_l) (s_j / s_{l+1}) / (s_h - s_i)

equals the Euler steps from i to j. Under Euler a kept x0 is therefore a shorter schedule, and needs
no separate graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ltx2rt.errors import InputError

MAX_GAIN = 1.5  # largest |g| / (1 - r): a line through two close evaluations does not reach far
TERMS = 3  # factors of `advance`: r, 1 - r + g, -g


@dataclass(frozen=True)
class StepPlan:
    """evaluate: the steps in which the transformer runs; ascending, the first is 0. order: 1 or 2.
    ORDER:STEP,STEP,... as text."""

    evaluate: tuple[int, ...]
    order: int = 1

    @property
    def sampler(self) -> str:
        """The sampler, a name of `models.samplers`."""
        return "euler" if self.order == 1 else "planned"

    def levels(self, sigmas: np.ndarray) -> np.ndarray:
        """sigmas [steps + 1] of the evaluations, and the last."""
        return sigmas[[*self.evaluate, len(sigmas) - 1]]

    def coefficients(self, sigmas: np.ndarray) -> np.ndarray:
        """f64[evaluations, TERMS] of the schedule f32[steps + 1]."""
        s, evaluate = sigmas.astype(np.float64), self.evaluate
        rows = []
        for n, i in enumerate(evaluate):
            j = [*evaluate, len(s) - 1][n + 1]
            r, g = s[j] / s[i], gain(s, evaluate[n - 1], i, j) if self.order == 2 and n else 0.0
            rows.append((r, 1 - r + g, -g))
        return np.array(rows, np.float64)

    def check(self, steps: int, flag: str, sigmas: np.ndarray) -> None:
        """Raises InputError, naming `flag`, unless it is a plan of `steps` steps."""
        found = self.evaluate
        ascending = all(a < b for a, b in pairwise(found))
        if not found or found[0] != 0 or not ascending or found[-1] >= steps:
            raise InputError(
                f"{flag}: steps {','.join(map(str, found))[:80]}, expected 0 first, then "
                f"ascending ones below {steps}"
            )
        far = self._far(sigmas)
        if far.any():
            step = found[int(far.argmax())]
            raise InputError(
                f"{flag}: the jump from step {step} reaches too far for a line through the two "
                "evaluations before it; evaluate a step in between, or take order 1"
            )

    def _far(self, sigmas: np.ndarray) -> np.ndarray:
        """bool[evaluations]: the jumps that reach too far."""
        rows = self.coefficients(sigmas)
        return np.abs(rows[:, 2]) > MAX_GAIN * (1 - rows[:, 0]) + 1e-12

    def __str__(self) -> str:
        return f"{self.order}:{','.join(map(str, self.evaluate))}"

    @classmethod
    def parse(cls, text: str) -> StepPlan | None:
        """The plan that ORDER:STEP,STEP,... stands for, or STEP,STEP,... (order 2); None for any
        other text. Unchecked."""
        order, colon, rest = text.partition(":")
        if not colon:
            order, rest = "2", text
        try:
            steps = tuple(int(part) for part in rest.split(","))
        except ValueError:
            return None
        return cls(steps, int(order)) if order in ("1", "2") else None


def gain(s: np.ndarray, h: int, i: int, j: int) -> float:
    """g of a jump from i to j after an evaluation at h; in s f64[steps + 1] only the last is 0."""
    # the share of its change that the steps behind l + 1 leave
    left = s[j] / s[i + 1 : j] if j > i + 1 else np.zeros(0)
    after = np.append(left, 1.0)
    inside = s[i:j]
    return float(((s[i] - inside) * (1 - s[i + 1 : j + 1] / inside) * after).sum() / (s[h] - s[i]))
