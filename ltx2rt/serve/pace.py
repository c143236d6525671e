"""The time that a run takes here, by the runs that are over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

LIKE = 5  # runs of equal work that an estimate is the median of


@dataclass(frozen=True)
class Pace:
    """runs: work and seconds of completed runs, the latest first."""

    runs: Sequence[tuple[float, float]] = ()

    def of(self, work: float, least_s: float | None = None) -> tuple[float | None, str]:
        """Seconds of a run of so much work, None if unknown, and where the figure comes from.
        least_s: a bound from below, from the device's data sheet."""
        if like := [took for done, took in self.runs if done == work][:LIKE]:
            times = " to ".join(f"{took:.3g}" for took in sorted({min(like), max(like)}))
            return median(like), f"{len(like)} like it took {times} s here"
        if rates := [took / done for done, took in self.runs if done > 0]:
            return work * median(rates), f"scaled by work from {len(rates)} other runs here"
        if least_s is not None:
            return least_s, "the device's data sheet; a run takes longer"
        return None, "nothing has run here yet"
