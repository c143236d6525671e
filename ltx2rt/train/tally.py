"""Numbers of a run over its steps: losses and norms of a step, running means, and health."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ltx2rt.errors import InputError, few
from ltx2rt.train.recipe import STREAM_OF, group_of

NO_GRADIENT, NOT_FINITE = 20, 10  # steps after which a run ends
BALANCE = 0.99  # decay of the running means of the losses


@dataclass
class StepLosses:
    """Losses and noise levels by stream; each sample's name, and whether it has finite ones."""

    losses: dict[str, np.ndarray]
    levels: dict[str, np.ndarray]
    samples: list[tuple[str, bool]]


@dataclass
class Tally:
    """Counts of a run over its steps. updates: of the optimiser; running: mean losses by stream;
    silent, broken: steps in a row without a gradient, by group, and without a finite one; finite:
    whether any loss of a sample was finite."""

    updates: int
    running: dict[str, float]
    silent: Counter[str] = field(default_factory=Counter)
    broken: int = 0
    finite: dict[str, bool] = field(default_factory=dict)
    drawn: int = 0

    def add(self, found: StepLosses, norms: Mapping[str, float]) -> None:
        """norms: squares, by group."""
        for name, loss in found.losses.items():
            if loss.size and np.isfinite(loss).all():
                mean = float(loss.mean())
                self.running[name] = BALANCE * self.running.get(name, mean) + (1 - BALANCE) * mean
        fine = math.isfinite(sum(norms.values()))
        self.updates += fine
        self.broken = 0 if fine else self.broken + 1
        for group, norm in norms.items():
            stream = STREAM_OF[group]
            had = stream == "cross" or (stream in found.losses and found.losses[stream].size)
            self.silent[group] = self.silent[group] + 1 if norm == 0 and had else 0
        for name, finite in found.samples:
            self.finite[name] = finite or self.finite.get(name, False)
        self.drawn += len(found.samples)

    def name_useless(self, epoch: int, say: Callable[[str], None]) -> None:
        """After an epoch of so many samples, name those whose loss was never finite."""
        if self.drawn >= epoch:
            if bad := sorted(name for name, finite in self.finite.items() if not finite):
                say(
                    f"the loss of {few(bad, 5)} is never "
                    "finite, so nothing is learnt from it; look at its clip, and leave it out"
                )
            self.drawn, self.finite = 0, {}

    def require_health(self, row: Mapping[str, Any]) -> None:
        """Raises InputError where no gradient was finite for long, or a group has had none although
        its stream had data. row: the metrics of the latest step."""
        if self.broken == NOT_FINITE:
            raise InputError(
                f"step {row['step']}: {self.broken} steps without a finite gradient, last of "
                f"{row['samples']}; lower --lr"
            )
        if group := next((g for g, steps in self.silent.items() if steps == NO_GRADIENT), None):
            others = " ".join(name for name in self.silent if name != group)
            raise InputError(
                f"--targets: no gradient has reached {group} for {NO_GRADIENT} steps: the model "
                f"does not use it here; pass --targets {others or 'with other groups'}"
            )


def by_group(squares: Mapping[str, float]) -> dict[str, float]:
    """Sums of squared norms by group, from those by parameter."""
    found: Counter[str] = Counter()
    for name, square in squares.items():
        found[group_of(name)] += square  # pyrefly: ignore
    return dict(found)


def norms_row(squares: Mapping[str, float], most: float) -> dict[str, Any]:
    """Gradient norms of a step, of all and by group, from their squares."""
    total = math.sqrt(sum(squares.values()))
    groups = {f"grad_norm_{group}": math.sqrt(x) for group, x in squares.items()}
    return {"grad_norm": total, **groups, "clipped": total > most}


def losses_row(found: StepLosses) -> dict[str, float | None]:
    """Mean losses by stream, each also by quarter of the noise level."""
    row: dict[str, float | None] = {}
    for name, loss in found.losses.items():
        row[f"{name}_loss"] = float(loss.mean()) if loss.size else None
        quarters = np.minimum((found.levels[name] * 4).astype(int), 3)
        for q in sorted(set(quarters.tolist())):
            row[f"{name}_loss_q{q}"] = float(loss[quarters == q].mean())
    return row


def finite(value: Any) -> Any:
    """The value, or None for a number that JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
