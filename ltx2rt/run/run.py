"""Run a request: its plan, its stages in order, watched, up to the frames, which are made when they
are taken, and its files. The commands, Python, workers and validation share `Run`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.media.mp4 import Sound, to_rgb8
from ltx2rt.media.output import FileState, write_clips
from ltx2rt.notes import note
from ltx2rt.pipelines.clip import Clip
from ltx2rt.pipelines.request import Request
from ltx2rt.run.files import Marks
from ltx2rt.run.plan import Plan, make_enhanced_plan, make_plan
from ltx2rt.run.recording import GrowingClip, high_range, recording
from ltx2rt.run.report import comment, labels, report_of
from ltx2rt.run.segments import claimed
from ltx2rt.session.session import Session
from ltx2rt.session.stopwatch import Progress, Stopwatch, in_place
from ltx2rt.stages.stage import LENGTH, State
from ltx2rt.system import hold

MARKED = Marks()


class Run:
    """One clip on a session. Its plan is checked and fits the device; `make` runs it, `save` and
    `pictures` take the frames. warm: it runs with `warmup`. marks: of its files. Raises
    InputError."""

    def __init__(
        self, session: Session, asked: Request | Clip, warm: bool = False, marks: Marks = MARKED
    ):
        self.session, self.plan, self.marks = session, make_enhanced_plan(session, asked), marks
        session.memory.require(self.plan.stages, warm=warm)
        self.recorded: GrowingClip | None = None
        self.folder: Path | None = None
        self.claim: Callable[[], None] = lambda: None
        self.state = State()

    @property
    def clip(self) -> Clip:
        return self.plan.clip

    @property
    def is_main(self) -> bool:
        return self.session.backend.is_main

    @contextmanager
    def kept_in(
        self,
        folder: Path | None,
        output: Path | None = None,
        steps: bool = True,
        own: bool = False,
    ) -> Iterator[None]:
        """Keep finished segments and `steps` in a folder, None: nowhere; if the output is known
        encode segments meanwhile. own: as of `claimed`."""
        with ExitStack() as during:
            self.folder = folder if steps else None
            if folder and self.is_main:
                if (held := hold(folder)) is None:
                    raise InputError(
                        f"--output: another run is writing {output or folder}; wait for it, or "
                        "choose another name"
                    )
                during.enter_context(held)
                claim = claimed(self.session, self.plan, folder, own)
                self.claim = partial(during.enter_context, claim)
                if self.clip.segments or folder.exists():
                    self.claim()
                if output and self.clip.segments:
                    clip = recording(self.session, self.plan, folder, output, self.marks)
                    self.recorded = during.enter_context(clip)
            yield

    def make(self, stream: TextIO | None = None, **how: Any) -> None:
        """Run up to the frames, once the length is known. how: as `produce` takes it."""
        self.plan = timed(self.session, self.plan, stream)
        kept: dict[str, Any] = {"folder": self.folder, "claim": self.claim}
        if self.clip.segments and (origin := self.labels().get("origin")):
            kept["origin"] = replace(origin, signature=None)  # the whole clip is signed
        made = produce(self.session, self.plan, stream=stream, kept=kept, **how)
        self.state, self.watch, self.report = made

    def follow(self) -> None:
        """Take part in decoding on a rank that keeps no frames."""
        for frames in self.state.frames:
            deque(frames, maxlen=0)

    def pictures(self) -> np.ndarray | None:
        """u8[F, H, W, 3] of all videos; None if there is no frame here."""
        chunks = [to_rgb8(chunk) for frames in self.state.frames for chunk in frames]
        return np.concatenate(chunks) if chunks else None

    def waveform(self, number: int = 0) -> np.ndarray | Sound | None:
        """f32[2, N] of a video."""
        return None if self.state.waveforms is None else self.state.waveforms[number]

    @property
    def sample_rate(self) -> int:
        return sample_rate(self.session, self.state)

    def comment(self, number: int = 0) -> dict[str, Any]:
        """The metadata of the file of a video."""
        return comment(self.session, self.clip, number)

    def labels(self, number: int = 0) -> dict[str, Any]:
        """The comment and the origin in the file of a video, as `write_clip` takes them."""
        return labels(self.session, self.clip, number, self.marks)

    def save(
        self, number: int, paths: Sequence[Path], frames: Iterator[np.ndarray] | None = None
    ) -> dict[Path, FileState]:
        """Write a video in the forms of its names; return the files that were made. frames: in place
        of the next ones of the run."""
        return write_clips(
            paths,
            frames if frames is not None else next(self.state.frames, iter(())),
            num_frames=self.clip.clip_frames,
            fps=self.clip.clip_fps,
            waveform=self.waveform(number),
            sample_rate=self.sample_rate,
            **self.labels(number),
            hdr=high_range(self.session, self.clip),
        )


def run_stages(session: Session, plan: Plan, watch: Stopwatch, state: State) -> None:
    """The stages in order. The frames are made when they are taken from `state.frames`."""
    said = "loading the weights of {}"
    session.weights.loading = lambda network: watch.apart("load", said.format(network))
    session.building = watch.building
    try:
        with session.compiling_ahead(plan.stages):
            for stage in plan.stages:
                stage.begin(session.config, state)
            for stage in plan.stages:
                watch.check()
                stage.run(session, state, watch)
                session.leave(stage)
    except BaseException:
        for drawing in state.begun.values():
            drawing.cancel()
        raise


def timed(session: Session, plan: Plan, stream: TextIO | None = None) -> Plan:
    """Plan again for the length that the model predicts for the prompt, if it is to; the first plan
    assumed the longest. The session remembers the encoded prompt."""
    if plan.clip.request.auto_duration is None:
        return plan
    state, watch = State(), Stopwatch(stream, synchronize=session.backend.synchronize)
    last = next(i for i, stage in enumerate(plan.stages) if LENGTH in stage.makes)
    run_stages(session, replace(plan, stages=plan.stages[: last + 1]), watch, state)
    count = state.num_frames
    assert count, "the duration stage says how many"
    if session.backend.is_main:
        clip_s = float(count / plan.clip.fps)
        note(f"the prompt asks for {state.seconds:.2f} s: {count} frames, {clip_s:.2f} s")
    return make_plan(session, plan.clip.lasting(count, session.config))


def warm_up(session: Session, plan: Plan) -> None:
    """Compile and load everything: the same run with one step a stage, its result thrown away."""
    session.weights.again = True
    state, silent = State(max_steps=1), Stopwatch(synchronize=session.backend.synchronize)
    run_stages(session, plan, silent, state)
    for frames in state.frames:
        deque(frames, maxlen=0)


def produce(
    session: Session,
    plan: Plan,
    *,
    keep: bool = False,
    warmup: bool = False,
    stream: TextIO | None = None,
    verbose: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    look: Callable[..., None] | None = None,
    kept: Mapping[str, Any] | None = None,
) -> tuple[State, Stopwatch, Callable[[], dict[str, Any]]]:
    """Run the plan, which fits the device, up to its frames: (state, watch, report). kept: fields
    of the state that say where steps are kept. report() is the dict of `--report`, once the frames
    are taken."""
    work: dict[str, list[float]] = {}
    shown = on_progress or in_place(stream)
    for stage in plan.stages if shown else ():
        if costs := session.memory.costs([stage]):
            work.setdefault(stage.name, []).append(sum(float(c.steps * c.flops) for c in costs))
    built, loaded = session.backend.num_built, session.weights.loaded_bytes
    watch = Stopwatch(
        stream,
        synchronize=session.backend.synchronize,
        observer=on_progress,
        cancelled=cancelled or (lambda: False),
        agree=session.backend.agree,
        work={name: fmean(each) for name, each in work.items()},
        total_work=sum(map(sum, work.values())),
        verbose=verbose,
        brief=plan.clip.segments is not None,
        look=look or (lambda latents, fps: None),
    )
    if warmup:
        with watch.apart("warmup", "warming up"):
            warm_up(session, plan)
    state = State(keep=keep, **(kept or {}))
    run_stages(session, plan, watch, state)

    def report() -> dict[str, Any]:
        num_built = session.backend.num_built - built
        return report_of(session, plan, watch, num_built, session.weights.loaded_bytes - loaded)

    return state, watch, report


def sample_rate(session: Session, state: State) -> int:
    """Rate of the state's waveforms in Hz, or of those that the model would make."""
    return state.sample_rate or session.config.vocoder.sample_rate
