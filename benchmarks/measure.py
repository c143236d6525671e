"""Measuring and recording, for every benchmark here.

Decides statistics and the form of a result. Contestants run interleaved, so that a machine that
slows down slows all of them, and ratios are taken within a round.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and extremes of repeated measurements."""

    median: float
    low: float  # lower quartile
    high: float  # upper quartile
    min: float
    max: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(*(float(np.quantile(values, q)) for q in (0.5, 0.25, 0.75, 0, 1)))

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interleaved(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every run in every round, in turn; each run returns only when its work is done."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(warmup + rounds):
        for name, run in runs.items():
            start = clock()
            run()
            if number >= warmup:
                seconds[name].append(clock() - start)
    return seconds


def ratios(seconds: Mapping[str, list[float]], name: str, reference: str) -> Spread:
    """Ratios of `name` to `reference`, round by round."""
    return Spread.of([a / b for a, b in zip(seconds[name], seconds[reference], strict=True)])


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ", 1)[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine(*packages: str) -> dict[str, Any]:
    """Machine and versions of a measurement; `load` is the number of runnable processes over
    the last minute.

    COMMIT in the environment names the commit where there is no git.
    """
    commit = os.environ.get("COMMIT")
    if commit is None and shutil.which("git"):
        words = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(
            words, capture_output=True, text=True, cwd=RESULTS.parent
        ).stdout.strip()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{processor()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("ltx2rt", "numpy", *packages)},
        "commit": commit or None,
    }


def record(path: Path | None, facts: Mapping[str, Any]) -> None:
    """Write a result as JSON, spreads as their numbers; no path: keep it to the screen."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1, default=asdict) + "\n")
    print(f"written to {path}")
