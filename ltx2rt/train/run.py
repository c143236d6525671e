"""`train run`: a LoRA from a cache, by steps that are a function of the seed and their number.
Decides when state and LoRA are written, and when clips are measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.atomic_file import remove_left, replacing
from ltx2rt.backend import EMA, AdamW, Trainer
from ltx2rt.errors import InputError
from ltx2rt.models.geometry import Geometry
from ltx2rt.notes import note
from ltx2rt.session.session import Session
from ltx2rt.train.board import EventFiles
from ltx2rt.train.data import parse_bucket
from ltx2rt.train.feeds import Batch, Feeder
from ltx2rt.train.gradients import read_init
from ltx2rt.train.picture import PICTURE, draw_losses
from ltx2rt.train.recipe import rate
from ltx2rt.train.request import TrainRequest
from ltx2rt.train.resume import check_folder, check_resumed, described, facts, flags_text
from ltx2rt.train.samples import Kind, Samples
from ltx2rt.train.state import (
    CONFIGURATION,
    METRICS,
    Arrays,
    kept_metrics,
    locked,
    lora_path,
    make_folders,
    new_state,
    read_state,
    remove_halves,
    require_shapes,
    states,
    write_lora,
)
from ltx2rt.train.step import Step
from ltx2rt.train.tally import StepLosses, Tally, by_group, finite, losses_row, norms_row
from ltx2rt.weights.distilled import sign
from ltx2rt.weights.trained import model_digest

LEVELS = (0.2, 0.5, 0.8)  # noise levels at which clips are measured that are not trained on
Row = dict[str, Any]


class TrainingRun:
    """One run on a session: what is trained of what, by which graphs.

    validate: writes clips with a LoRA file at a step and returns their paths."""

    def __init__(self, session: Session, request: TrainRequest):
        self.session = session
        r = request.resolved()
        if session.options.loras:
            raise InputError(
                "--lora: a LoRA beside the one that is trained is not taken yet; leave the "
                "flag out, or begin with it by --init"
            )
        known = sign(session.checkpoint, session.options.assume)
        if known and known.kind == "distilled" and not r.allow_distilled:
            raise InputError(
                f"--model: {session.checkpoint.path.name} is distilled ({known.how}); train on "
                "the model it was made from, or pass --assume dev, or --allow-distilled"
            )
        self.base = model_digest(session.checkpoint)
        say = note if session.backend.is_main else lambda text: None
        devices = session.backend.mesh.get("data", 1)
        self.samples = Samples(r, self.base, devices, say)
        self.request = replace(r, targets=self.samples.targets)
        self.validate: Callable[[Path, int], list[Path]] | None = None

    @cached_property
    def steps(self) -> dict[Kind, Step]:
        """The training step of every kind of batch, the largest first."""
        items = (*self.samples.items, *self.samples.held_out)
        kinds = set().union(*(self._seen(self.samples.kind(item)) for item in items))
        found = {kind: self._step(kind) for kind in sorted(kinds, key=str)}
        return dict(sorted(found.items(), key=lambda pair: -pair[1].geometry.num_video_tokens))

    def _seen(self, kind: Kind) -> set[Kind]:
        """The kinds of batches with and without references, as they are drawn."""
        p = self.request.reference or 0
        return ({kind.plain} if p < 1 else set()) | ({kind} if p else set())

    def _step(self, kind: Kind) -> Step:
        r, size = self.request, parse_bucket(kind.bucket)
        geometry = Geometry.of(
            self.session.config, size.width, size.height, size.frames, Fraction(kind.fps)
        )
        assert r.alpha is not None
        reference = None
        if kind.reference:
            frames, rows, columns = kind.reference
            own = replace(geometry, frames=frames, rows=rows, columns=columns)
            reference = (own, *self.samples.reference_scales)
        return Step(
            self.session, geometry, self.samples.streams, r.batch, r.targets, r.rank,
            r.alpha / r.rank, r.remat, r.audio_rank, r.ema is not None, reference, kind.heard,
            r.lora_dropout > 0,
        )  # fmt: skip

    @property
    def step(self) -> Step:
        """The largest one."""
        return next(iter(self.steps.values()))

    @cached_property
    def feeder(self) -> Feeder:
        return Feeder(self.request, self.samples, self.steps)

    @property
    def facts(self) -> dict[str, Any]:
        return facts(self.session, self.request, self.samples, self.base)

    def trainer(self) -> Trainer:
        """Raises InputError if the model does not fit the graph, or the step the memory."""
        r = self.request
        optimiser = AdamW(r.betas, 1e-8, r.weight_decay, r.max_grad_norm, r.ema)
        others = list(self.steps.values())[1:]
        return self.step.trainer(r.seed, optimiser, others, self.begin, r.deterministic)

    @property
    def begin(self) -> dict[str, np.ndarray]:
        """First values of adapters from `--init`. Raises InputError."""
        path, step = self.request.init, self.step
        return read_init(path, self.session, step.shapes(), step.scale) if path else {}

    def held_out_losses(self, trainer: Trainer) -> dict[str, float]:
        """Mean losses of held-out clips, at LEVELS and with the same noise each time."""
        samples, batch = self.samples, self.samples.batch
        losses: dict[str, list[float]] = {name: [] for name in samples.trained}
        for kind in sorted({samples.kind(i) for i in samples.held_out}, key=str):
            own = [i for i in samples.held_out if samples.kind(i) == kind]
            rows = [(i, f"train.held_out.{i.sample.sample}", x) for i, x in product(own, LEVELS)]
            for start in range(0, len(rows), batch):
                part = rows[start : start + batch]
                feeds = self.feeder.stacked(kind, [part[i % len(part)] for i in range(batch)])
                found = trainer.losses(feeds)
                for name in samples.trained:
                    there = np.any(feeds[f"{name}_noised"], axis=1)[: len(part)]
                    losses[name] += list(found[f"{name}_loss"][: len(part)][there])
        return {f"held_out_{n}_loss": float(np.mean(x)) for n, x in losses.items() if x}

    def train(
        self,
        say: Callable[[str], None],
        on_step: Callable[[Row], None] = lambda row: None,
        stopped: Sequence[Any] = (),
    ) -> Path:
        """Train to the last step, or to the one in which `stopped` is no longer empty on any
        process, and return the LoRA's file. on_step: gets the metrics of every step, with
        `validation`, the files of clips, if there are any.

        Raises InputError, and NotWritten if a disk is full."""
        output, main = self.request.output, self.session.backend.is_main
        if main:
            make_folders(output)
        with locked(output) if main else nullcontext():
            return self._train(say, on_step, stopped)

    def _train(
        self, say: Callable[[str], None], on_step: Callable[[Row], None], stopped: Sequence[Any]
    ) -> Path:
        r, backend = self.request, self.session.backend
        assert r.steps is not None
        trainer, tally, first, rows = self._begun(say)
        board = EventFiles(r.tensorboard) if backend.is_main and r.tensorboard else None
        batches = self.feeder.batches(first)
        path = r.output / METRICS
        with closing(batches), path.open("a") if backend.is_main else nullcontext() as metrics:
            if not first:
                self._validated(trainer, 0)
            for step in range(first, r.steps):
                row, done = self._stepped(trainer, step, tally, batches), step + 1
                ending = done % r.save_every == 0 or done == r.steps
                measured = done % r.validate_every == 0
                if self.samples.held_out and (ending or measured):
                    row |= {n: finite(x) for n, x in self.held_out_losses(trainer).items()}
                rows.append(row)
                if metrics:
                    metrics.write(json.dumps(row) + "\n")
                    metrics.flush()
                if board:
                    board.write(row)
                last = backend.agree(bool(stopped))
                if ending or last:
                    self._save(trainer, done, tally, rows)
                clips = self._validated(trainer, done) if measured or done == r.steps else []
                on_step(row | ({"validation": clips} if clips else {}))
                tally.name_useless(len(self.samples.items), say)
                tally.require_health(row)
                if last:
                    say(f"stopped after step {done} of {r.steps}; the same command continues")
                    return lora_path(r.output, done)
        return lora_path(r.output, max(first, r.steps))

    def _begun(self, say: Callable[[str], None]) -> tuple[Trainer, Tally, int, list[Row]]:
        """The trainer, the counts, the first step's number, and the metrics before it."""
        r, main = self.request, self.session.backend.is_main
        about: dict[str, Any] = {}
        arrays: dict[str, dict[str, np.ndarray]] = {}
        if begun := states(r.output):
            about, arrays = read_state(begun[-1])
            check_resumed(self.facts, about, r)
            require_shapes(begun[-1], arrays, self.step.shapes())
            if (r.ema is not None) != (EMA in arrays):
                say("its average of the LoRA begins here" if r.ema else "its average ends here")
                arrays.pop(EMA, None)
                arrays |= {EMA: arrays["parameters"]} if r.ema else {}
        first = about.get("step", 0)
        rows = kept_metrics(r.output, first) if main else []
        trainer = self.trainer()
        if begun:
            trainer.restore(arrays, about["updates"])
            say(f"continues at step {first} of {r.steps}" if first <= r.steps else
                f"{r.steps} steps are done already ({first}); give more of them to go on")  # fmt: skip
        if main:
            remove_left(r.output)
            remove_halves(r.output)
            texts = {METRICS: "".join(json.dumps(row) + "\n" for row in rows)}
            if first <= r.steps:
                texts[CONFIGURATION] = flags_text(self.session, r)
            for name, text in texts.items():
                with replacing(r.output / name) as partial:
                    partial.write_text(text)
            if begun and not lora_path(r.output, first).exists():
                self._write_loras(arrays, first, rows)
        return trainer, Tally(about.get("updates", 0), dict(about.get("running", {}))), first, rows

    def _stepped(self, trainer: Trainer, step: int, tally: Tally, batches: Iterator[Batch]) -> Row:
        """One step of the optimiser: its line of metrics, without later measurements."""
        r, began = self.request, time.perf_counter()
        assert r.steps is not None and r.lr is not None
        weights = self._weights(tally.running)
        found = self._accumulated(trainer, batches, weights)
        waited = time.perf_counter()
        now = rate(r.lr, step, r.steps, r.schedule, r.warmup)
        norms = by_group(trainer.update(now))
        tally.add(found, norms)
        row = {"step": step, "lr": now, **losses_row(found), **norms_row(norms, r.max_grad_norm)}
        row["samples"] = [name for name, _ in found.samples]
        row["seconds"] = time.perf_counter() - began
        row["update_seconds"] = time.perf_counter() - waited
        if r.audio_balance is not None:
            row["audio_weight"] = weights.get("audio_loss", 0.0)
        return {name: finite(value) for name, value in row.items()}

    def _weights(self, running: Mapping[str, float]) -> dict[str, float]:
        """Weights of the losses; with `--audio-balance` the sound's follows the running means."""
        r = self.request
        found = {f"{name}_loss": getattr(r, f"{name}_loss") for name in self.samples.streams}
        if r.audio_balance is not None and running.keys() >= {"video", "audio"}:
            found["audio_loss"] *= r.audio_balance * running["video"] / max(running["audio"], 1e-12)
        return found

    def _accumulated(
        self, trainer: Trainer, batches: Iterator[Batch], weights: Mapping[str, float]
    ) -> StepLosses:
        """The losses of a step, of the samples that have each stream."""
        parts, made = self.request.accumulate, StepLosses({}, {}, [])
        for drawn, feeds in islice(batches, parts):
            found = trainer.accumulate(feeds, {n: w / parts for n, w in weights.items()})
            fine = np.ones(len(drawn), bool)
            for name in self.samples.trained:
                there, loss = feeds[f"{name}_noised"].any(1), found[f"{name}_loss"]
                fine &= np.isfinite(loss)
                for to, new in ((made.losses, loss), (made.levels, feeds[f"{name}_sigma"])):
                    to[name] = np.append(to.get(name, new[:0]), new[there])
            named = zip(drawn, fine, strict=True)
            made.samples += [(item.sample.name, bool(x)) for (item, _), x in named]
        return made

    def _validated(self, trainer: Trainer, step: int) -> list[Path]:
        """Clips with the LoRA as it is now, which `validate` takes as a file."""
        if self.validate is None:
            return []
        path = self.request.output / "validation" / ".lora.safetensors"
        path.parent.mkdir(exist_ok=True)
        try:
            self._write_lora(path, trainer.state()["parameters"], step)
            return self.validate(path, step)
        finally:
            path.unlink(missing_ok=True)

    def _save(self, trainer: Trainer, step: int, tally: Tally, rows: list[Row]) -> None:
        """Write state, LoRA and its average, and picture."""
        r, arrays = self.request, trainer.state()
        if self.session.backend.is_main:
            about = {**self.facts, "updates": tally.updates, "running": tally.running}
            with new_state(r.output, step, arrays, about, r.keep, r.keep_every):
                self._write_loras(arrays, step, rows)

    def _write_loras(self, arrays: Mapping[str, Arrays], step: int, rows: list[Row]) -> None:
        path = lora_path(self.request.output, step)
        if EMA in arrays:
            self._write_lora(path.with_stem(f"{path.stem}-ema"), arrays[EMA], step)
        self._write_lora(path, arrays["parameters"], step)
        draw_losses(self.request.output / PICTURE, rows)

    def _write_lora(self, path: Path, parameters: Arrays, step: int) -> None:
        write_lora(path, parameters, self.step.scale, described(self.facts, step))


def start(session: Session, request: TrainRequest) -> TrainingRun:
    """A run whose flags fit data and model. Raises InputError before a weight is read."""
    run = TrainingRun(session, request)
    _ = run.step.adapters
    r, main = run.request, session.backend.is_main
    frames = min(step.spanned for step in run.steps.values())
    for name, span in {"prefix": r.prefix, "suffix": r.suffix}.items():
        if span and getattr(request, name) and span[0] >= frames:
            raise InputError(
                f"--{name}: {span[0]} latent frames, the clips have {frames}; give fewer, so "
                "that some are generated"
            )
    _ = run.begin
    if r.tensorboard:
        EventFiles.check()
    if not r.dry_run and main and r.output.is_dir():
        check_folder(session, r)
    return run
