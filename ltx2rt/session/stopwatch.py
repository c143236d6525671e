"""Time, progress and cancelling of a run: the lines on stderr, an observer's events, a report's
figures. A stage ends when the device has finished it; loading and warm-up are charged apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from ltx2rt.errors import Cancelled, singular
from ltx2rt.media.output import files_of

T = TypeVar("T")
BAR = 24  # characters
QUIET_S = 30.0  # between two lines of a stage where no bar is shown
CELL = 96  # characters that a line of a notebook's cell covers


def in_notebook(stream: TextIO | None) -> bool:
    """Whether the stream writes into a cell of Jupyter, Colab or an editor's notebook."""
    return type(stream).__module__.startswith("ipykernel")


def in_place(stream: TextIO | None) -> bool:
    """Whether a line of the stream may take the place of the line before."""
    return stream is not None and (stream.isatty() or in_notebook(stream))


@dataclass
class StageTime:
    """Wall-clock seconds of one stage and of each of its steps, loading and warm-up left out."""

    name: str
    time_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Progress:
    """step of `of` steps, of decoding pixel frames, of the stage are done (0 of 0: a stage without
    steps begins). fraction: of the whole run, its stages weighted by their work; eta_s: estimated
    seconds left, None before anything is done."""

    stage: str
    step: int
    of: int
    fraction: float
    eta_s: float | None


@dataclass
class Stopwatch:
    """Times stages and shows them: on a terminal and in a notebook a bar, of the whole run if its
    work is known, and a line for each finished stage; elsewhere, and if `verbose`, also a line when
    each begins. brief: without these lines, for a run that tells of its segments.

    stream: None shows nothing. synchronize: waits for the device. clock: seconds. observer: gets
    each step. cancelled: whether the caller wants the run to end; agree: whether any process says
    so, which all of them ask. work: of each stage, in any unit, for the observer; total_work: of
    the run, if stages run several times. look: gets, after every step, a function that makes the
    step's x0 of the video, a host array, f32[videos, C, frames, rows, columns], and their rate.
    """

    stream: TextIO | None = None
    clock: Callable[[], float] = time.perf_counter
    synchronize: Callable[[], None] = lambda: None
    observer: Callable[[Progress], None] | None = None
    cancelled: Callable[[], bool] = lambda: False
    agree: Callable[[bool], bool] = bool
    work: Mapping[str, float] = field(default_factory=dict)
    verbose: bool = False
    look: Callable[..., None] = lambda latents, fps: None
    total_work: float | None = None
    brief: bool = False
    stages: list[StageTime] = field(default_factory=list)
    apart_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.total_work is None:
            self.total_work = sum(self.work.values())
        self.brief = self.brief and not self.verbose
        self._bars = in_place(self.stream)
        self._start = self.clock()
        self._done = 0.0  # part of `work` that is done, by stages that have ended

    @property
    def total_s(self) -> float:
        return self.clock() - self._start

    def say(self, line: str) -> None:
        if self.stream is not None:
            print(singular(line), file=self.stream, flush=True)

    def check(self) -> None:
        """Raise Cancelled in every process if the run is cancelled; all of them must call it."""
        if self.agree(bool(self.cancelled())):
            raise Cancelled("cancelled")

    def checked(self, item: T) -> T:
        """The item, unless the run is cancelled."""
        self.check()
        return item

    def building(self, network: str) -> None:
        if self.verbose:
            self.say(f"building {network}")

    @contextmanager
    def _under_way(self, text: str) -> Iterator[None]:
        """Show the text until the body ends; where lines stay, it stays."""
        if self.stream is None or not self._bars or self.verbose:
            if not self.brief:
                self.say(f"{text} ...")
            yield
            return
        self._show(f"{singular(text)} ...")
        try:
            yield
        finally:
            self._show("")

    @contextmanager
    def apart(self, account: str, text: str = "") -> Iterator[None]:
        """Charge the body to `account` ("load", "warmup") and to no stage. text: its label."""
        self.synchronize()
        start = self.clock()
        try:
            with self._under_way(text) if text else nullcontext():
                yield
        finally:
            self.synchronize()
            spent_s = self.clock() - start
            self.apart_s[account] = self.apart_s.get(account, 0.0) + spent_s
        if self.verbose and text:
            self.say(f"{text}: {spent_s:.2f} s")

    @contextmanager
    def stage(
        self, name: str, steps: int = 0, unit: str = "steps", done: int = 0
    ) -> Iterator[Callable[..., None]]:
        """Time the body as stage `name` with `steps` steps, or another unit; yields the function to
        call after each, or after several with their number. done: steps that an earlier run made."""
        stage = StageTime(name)
        self._tell(stage, done, steps)
        self.synchronize()
        begin = last = said = self._charged()
        count = done
        with self._under_way(f"{name}: {steps} {unit}" if steps else name):
            self._bar(name, done, steps, unit, 0)

            def step(more: int = 1) -> None:
                nonlocal last, count, said
                now = self._charged()
                stage.steps_s.append(now - last)
                last, count = now, count + more
                self._bar(name, count, steps, unit, last - begin)
                if not self._bars and last - said >= QUIET_S and count < steps:
                    said, left_s = last, (last - begin) / (count - done) * (steps - count)
                    self.say(f"{name}: {count} of {steps} {unit}, {left_s:.0f} s left")
                self._tell(stage, count, steps)

            yield step
        self.synchronize()
        stage.time_s = self._charged() - begin
        self.stages.append(stage)
        self._done += self.work.get(name, 0.0)
        made = f" ({count - done} {unit})" if count > done else ""
        if not self.brief:
            self.say(f"{name}: {stage.time_s:.2f} s{made}")

    def _bar(self, name: str, count: int, steps: int, unit: str, spent_s: float) -> None:
        """Show on a terminal the part of the run that is done, or of the stage if the run's work is
        unknown. spent_s: in the stage."""
        if not (steps and self._bars):
            return
        part, left_s = self._part(name, count, steps)
        if not self.total_work:
            part, left_s = count / steps, spent_s * (steps - count) / count if count else None
        left = "" if left_s is None else f", {left_s:.0f} s left"
        bar = f"{'#' * round(BAR * part):<{BAR}}"
        self._show(f"{name}: {count} of {steps} {unit} |{bar}| {part:.0%}{left}")

    def _show(self, line: str) -> None:
        """Write a line that the next one covers; a notebook knows no command that clears one."""
        covered = line.ljust(CELL) if in_notebook(self.stream) else f"{line}\x1b[K"
        print(covered, end="\r", file=self.stream, flush=True)

    def _part(self, stage: str, count: int, steps: int) -> tuple[float, float | None]:
        """The fraction of the run that is done, and the estimated seconds left."""
        done = self._done + self.work.get(stage, 0.0) * count / max(steps, 1)
        fraction = min(1.0, done / (self.total_work or 1.0))
        spent = self._charged() - self._start
        return fraction, spent * (1 - fraction) / fraction if fraction else None

    def _tell(self, stage: StageTime, count: int, steps: int) -> None:
        if self.observer is not None:
            self.observer(Progress(stage.name, count, steps, *self._part(stage.name, count, steps)))

    def _charged(self) -> float:
        """The clock without the time charged apart."""
        return self.clock() - sum(self.apart_s.values())

    def closing_line(self, output: Path, seed: int) -> str:
        spent: dict[str, float] = {}
        for stage in self.stages:  # each segment has its own
            spent[stage.name] = spent.get(stage.name, 0.0) + stage.time_s
        times = [f"{name} {seconds:.1f}" for name, seconds in (spent | self.apart_s).items()]
        size = sum(path.stat().st_size for path in files_of(output)) / 1e6
        return f"{output}: {size:.2f} MB, seed {seed}, {self.total_s:.1f} s ({', '.join(times)})"

    def report(self, **facts: Any) -> dict[str, Any]:
        """The dict of `--report`: stage times, warm-up and load apart, and the given facts."""
        return {
            "stages": [asdict(stage) for stage in self.stages],
            "warmup_s": self.apart_s.get("warmup", 0.0),
            "load_s": self.apart_s.get("load", 0.0),
            "total_s": self.total_s,
            **facts,
        }
