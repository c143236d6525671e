"""Time and progress of a run: what a person sees on stderr, the closing line, and what `--report` writes.

Decides how time is charged: a stage ends when the device has finished it; loading and warm-up are kept apart from the
stages they happen in.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ltx2rt.atomic_file import replacing


@dataclass
class StageTime:
    """Wall-clock seconds of one stage and of each of its steps, loading and warm-up left out."""

    name: str
    time_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)


class Stopwatch:
    """Times stages and shows those with steps as a progress bar on `stream`.

    synchronize: waits for the device. clock: seconds.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] = lambda: None,
    ):
        self.stream, self.clock, self.synchronize = stream or sys.stderr, clock, synchronize
        self.stages: list[StageTime] = []
        self.apart_s: dict[str, float] = {}
        self._start = clock()

    @property
    def total_s(self) -> float:
        return self.clock() - self._start

    @contextmanager
    def apart(self, account: str) -> Iterator[None]:
        """Charge the body to `account` ("load", "warmup") and to no stage."""
        self.synchronize()
        start = self.clock()
        try:
            yield
        finally:
            self.synchronize()
            self.apart_s[account] = self.apart_s.get(account, 0.0) + self.clock() - start

    @contextmanager
    def stage(self, name: str, steps: int = 0) -> Iterator[Callable[[], None]]:
        """Time the body as stage `name`; yields the function to call after each of its `steps`."""
        from tqdm import tqdm

        stage = StageTime(name)
        self.synchronize()
        begin = last = self._charged()
        with tqdm(total=steps, desc=name, file=self.stream, disable=steps == 0, leave=False) as bar:

            def step() -> None:
                nonlocal last
                now = self._charged()
                stage.steps_s.append(now - last)
                last = now
                bar.update()

            yield step
        self.synchronize()
        stage.time_s = self._charged() - begin
        self.stages.append(stage)
        count = f" ({len(stage.steps_s)} steps)" if stage.steps_s else ""
        print(f"{name}: {stage.time_s:.2f} s{count}", file=self.stream, flush=True)

    def _charged(self) -> float:
        """The clock without what was charged apart."""
        return self.clock() - sum(self.apart_s.values())

    def closing_line(self, output: Path, seed: int) -> str:
        times = [f"{stage.name} {stage.time_s:.1f}" for stage in self.stages]
        times += [f"{name} {seconds:.1f}" for name, seconds in self.apart_s.items()]
        size = output.stat().st_size / 1e6
        return f"{output}: {size:.2f} MB, seed {seed}, {self.total_s:.1f} s ({', '.join(times)})"

    def report(self, **facts: Any) -> dict[str, Any]:
        """What `--report` holds: stage times, warm-up and load apart, and the given facts."""
        return {
            "stages": [{"name": s.name, "time_s": s.time_s, "steps_s": s.steps_s} for s in self.stages],
            "warmup_s": self.apart_s.get("warmup", 0.0),
            "load_s": self.apart_s.get("load", 0.0),
            "total_s": self.total_s,
            **facts,
        }


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write the report as JSON, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(report, indent=1) + "\n")
