"""`train run`: a LoRA from a cache, by steps that are a function of the seed and their number.

Decides what a step is fed, when state and LoRA are written, and what a run that is continued must
share with the one before. The gradient and the optimiser are the backend's.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.backend import AdamW, Trainer
from ltx2rt.errors import InputError
from ltx2rt.flags import flag
from ltx2rt.models.geometry import Geometry, pack_audio, pack_video
from ltx2rt.notes import note
from ltx2rt.session.session import Session
from ltx2rt.stages.noise import standard_normal, uniform
from ltx2rt.train.data import parse_bucket
from ltx2rt.train.prepare import (
    Sample,
    context_path,
    model_digest,
    read_arrays,
    read_manifest,
    sample_path,
    shared,
)
from ltx2rt.train.recipe import GROUPS, MODES, STREAM_OF, group_of, rate, sigma
from ltx2rt.train.state import (
    METRICS,
    PICTURE,
    draw_losses,
    kept_metrics,
    locked,
    read_state,
    states,
    write_lora,
    write_state,
)
from ltx2rt.train.step import Step
from ltx2rt.weights.distilled import sign

NO_GRADIENT, NOT_FINITE = 20, 10  # steps after which a run ends
# Fields that may change when a run goes on: no step differs, but for where a schedule ends. Of the
# samples of a step the number alone is compared, however they are shared out.
LEVELS = (0.2, 0.5, 0.8)  # noise levels at which clips are measured that are not trained on
FREE = ("data", "output", "steps", "save_every", "keep", "dry_run", "batch", "accumulate")


@dataclass(frozen=True)
class TrainRequest:
    """A training run. None: the mode's own."""

    data: Path = flag(
        MISSING, "cache that `train prepare` made", Path, group="training", metavar="CACHE"
    )
    output: Path = flag(
        MISSING,
        "folder for the run; the same command again continues it",
        Path,
        group="output",
        metavar="RUN",
    )
    mode: str = flag(
        "i2v",
        "what is learnt: t2v picture and sound; i2v the same, half of the clips with their first frame given; a2v the "
        "picture to a sound; v2a the sound to a picture; t2a sound alone",
        group="training",
        choices=tuple(MODES),
    )
    targets: tuple[str, ...] = flag(
        (),
        f"groups of linears to train, of {', '.join(GROUPS)} (default: by --mode)",
        group="training",
        metavar="GROUP",
        repeat=True,
    )
    rank: int = flag(32, "rank of the LoRA", int, group="training", least=1, most=1024)
    alpha: float | None = flag(
        None,
        "factor of the LoRA, times its rank (default: --rank, a factor of 1)",
        float,
        group="training",
        above=0,
        most=1e4,
    )
    lr: float | None = flag(
        None,
        "learning rate of AdamW (default: 1e-4, for t2a 2e-4)",
        float,
        group="training",
        above=0,
        most=1,
    )
    schedule: str = flag(
        "linear",
        "learning rate over the steps: linear falls to a tenth, cosine to zero",
        group="training",
        choices=("linear", "constant", "cosine"),
    )
    warmup: int = flag(
        0, "steps in which the learning rate rises from zero", int, group="training", least=0
    )
    steps: int | None = flag(
        None,
        "steps of the optimiser (default: 2000, for t2a 3000)",
        int,
        group="training",
        least=1,
        most=10**6,
    )
    batch: int = flag(
        1, "samples of each device of the mesh axis data", int, group="training", least=1, most=1024
    )
    accumulate: int = flag(
        1, "batches whose gradients make one step", int, group="training", least=1, most=1024
    )
    weight_decay: float = flag(
        0.01, "weight decay of AdamW", float, group="training", least=0, most=1
    )
    max_grad_norm: float = flag(
        1.0,
        "largest norm of the gradient; a larger one is scaled down",
        float,
        group="training",
        above=0,
    )
    first_frame: float | None = flag(
        None, "share of the clips whose first frame is given (default: by --mode)", float, group="training", least=0,
        most=1,
    )  # fmt: skip
    audio_sigma: str = flag(
        "independent",
        "noise level of the sound: its own, or the picture's",
        group="training",
        choices=("independent", "shared"),
    )
    video_loss: float = flag(1.0, "weight of the picture's loss", float, group="training", least=0)
    audio_loss: float = flag(1.0, "weight of the sound's loss", float, group="training", least=0)
    caption_dropout: float = flag(
        0.0,
        "share of the captions replaced by the empty one",
        float,
        group="training",
        least=0,
        most=1,
    )
    remat: str = flag(
        "block",
        "block computes each block anew in the backward pass; none keeps all values, for speed",
        group="training",
        choices=("block", "none"),
    )
    held_out: float = flag(
        0.0,
        "share of the clips that are not trained on; their loss is measured with every --save-every",
        float,
        group="training",
        least=0,
        most=0.5,
    )
    save_every: int = flag(
        250, "steps between two LoRAs and states", int, group="training", least=1
    )
    keep: int = flag(2, "number of states to keep", int, group="training", least=1)
    seed: int = flag(
        42,
        "seed of noise, order and initial values",
        int,
        group="training",
        least=0,
        most=2**64 - 1,
    )
    dry_run: bool = flag(False, "print groups and sizes, and train nothing", group="training")


class Run:
    """One run on a session: what is trained of what, by which graph."""

    def __init__(self, session: Session, request: TrainRequest):
        mode = MODES[request.mode]
        self.session, self.mode = session, mode
        self.request = r = replace(
            request,
            steps=request.steps or mode.steps,
            lr=request.lr or mode.rate,
            alpha=request.alpha or float(request.rank),
            targets=request.targets or mode.targets,
            first_frame=mode.first_frame if request.first_frame is None else request.first_frame,
        )
        if session.options.loras:
            raise InputError(
                "--lora: a LoRA beside the one that is trained is not taken yet; leave the flag out"
            )
        known = sign(session.checkpoint, session.options.assume)
        if known and known.kind == "distilled":
            raise InputError(
                f"--model: {session.checkpoint.path.name} is distilled ({known.how}); train on the model it was made "
                "from, or pass --assume dev"
            )
        self.base = model_digest(session.checkpoint)
        usable = self._usable(read_manifest(r.data, self.base))
        count = math.ceil(r.held_out * len(usable))
        apart = {s.sample for s in sorted(usable, key=lambda s: s.sample)[:count]}
        self.samples = [s for s in usable if s.sample not in apart]
        self.held_out = [s for s in usable if s.sample in apart]
        self.batch = r.batch * session.backend.mesh.get("data", 1)
        if len(self.samples) < self.batch:
            raise InputError(
                f"--batch: {self.batch} samples at once, the cache has {len(self.samples)}; lower it"
            )
        self.empty = json.loads((r.data / "manifest.jsonl").read_text().splitlines()[0])["empty"]

    def _usable(self, samples: list[Sample]) -> list[Sample]:
        """Those with all streams of the mode, and the streams that are trained. Raises InputError
        if there are none."""
        r = self.request
        sounding = [s for s in samples if "audio" in s.streams]
        aims = {STREAM_OF[group] for group in r.targets if group in STREAM_OF}
        self.streams, self.trained = self.mode.streams, self.mode.trained
        if "audio" in self.streams and not sounding:
            if aims != {"video"} or r.mode not in ("t2v", "i2v"):
                raise InputError(
                    f"--data: none of the {len(samples)} clips has sound, and --mode {r.mode} trains with it; "
                    "prepare clips with sound, or train the picture alone by --mode t2v --targets video-attn"
                )
            self.streams = self.trained = ("video",)
        if "audio" in self.trained and not aims & {"audio", "cross"}:
            said = f"--targets {' '.join(r.targets)}: none reaches the sound"
            if r.mode not in ("t2v", "i2v"):
                raise InputError(f"{said}, which --mode {r.mode} trains; add audio-attn")
            if self.session.backend.is_main:
                note(f"{said}, so the LoRA will not change it")
        needed = {"t2a": sounding, "a2v": sounding, "v2a": sounding}.get(r.mode, samples)
        if "video" in self.streams:
            needed = [s for s in needed if "video" in s.streams]
            if not needed:
                raise InputError(
                    f"--data: no clip has a picture, --mode {r.mode} needs it; use --mode t2a"
                )
        return needed

    @cached_property
    def step(self) -> Step:
        r, config = self.request, self.session.config
        bucket = parse_bucket(shared((s.bucket for s in self.samples), "bucket"))
        fps = Fraction(shared((s.fps for s in self.samples), "frame rate"))
        geometry = Geometry.of(config, bucket.width, bucket.height, bucket.frames, fps)
        assert r.alpha is not None
        scale, remat = r.alpha / r.rank, r.remat == "block"
        return Step(self.session, geometry, self.streams, r.batch, r.targets, r.rank, scale, remat)

    def trainer(self) -> Trainer:
        """Raises InputError if the model does not fit the graph, or the step the memory."""
        r = self.request
        optimiser = AdamW(weight_decay=r.weight_decay, max_norm=r.max_grad_norm)
        return self.step.trainer(r.seed, optimiser)

    # --- one step ---------------------------------------------------------------------------------

    def drawn(self, step: int, part: int) -> list[tuple[Sample, str]]:
        """The samples of a batch, and the stream of random numbers of each."""
        start = (step * self.request.accumulate + part) * self.batch
        found = []
        for i in range(start, start + self.batch):
            epoch, place = divmod(i, len(self.samples))
            order = np.argsort(
                uniform(self.request.seed, f"train.order.{epoch}", len(self.samples)), kind="stable"
            )
            found.append(
                (
                    self.samples[order[place]],
                    f"train.{step}.{i - step * self.request.accumulate * self.batch}",
                )
            )
        return found

    def feeds(self, drawn: list[tuple[Sample, str]]) -> dict[str, np.ndarray]:
        return self._stacked([self._feed(sample, stream) for sample, stream in drawn])

    def _stacked(self, rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        return {name: (self.step.tables | stacked)[name] for name in self.step.graph.inputs}

    def _feed(
        self, sample: Sample, stream: str, level: float | None = None
    ) -> dict[str, np.ndarray]:
        """The inputs of one sample, without an axis B. level: of its noise, and its own caption;
        None: drawn."""
        r, g, found = self.request, self.step.geometry, {}
        latents = read_arrays(sample_path(r.data, sample.sample))
        drawn = level is None
        dropped = drawn and uniform(r.seed, f"{stream}.dropout", 1)[0] < r.caption_dropout
        contexts = read_arrays(context_path(r.data, self.empty if dropped else sample.context))
        assert r.first_frame is not None
        given = uniform(r.seed, f"{stream}.first_frame", 1)[0] < r.first_frame
        level = level or 0.0
        for name in self.streams:
            pack, tokens = (
                (pack_video, g.num_video_tokens)
                if name == "video"
                else (pack_audio, g.audio_latents)
            )
            channels = self.step.plain.inputs[f"{name}_clean"].type.size("C")
            there = name in latents
            clean = (
                pack(latents[name][None])[0] if there else np.zeros((tokens, channels), np.float32)
            )
            noised = np.full(tokens, int(there and name in self.trained), np.int32)
            if name == "video" and given:
                noised[: g.rows * g.columns] = 0
            own = f"{stream}.{name}"
            shared_level = name == "audio" and "video" in self.trained and r.audio_sigma == "shared"
            if drawn and not shared_level:
                level = sigma(max(1, int(noised.sum())), r.seed, own)
            found[f"{name}_clean"] = clean
            found[f"{name}_noise"] = standard_normal(r.seed, own, clean.shape)
            found[f"{name}_noised"] = noised
            found[f"{name}_sigma"] = np.float32(level if noised.any() else 0)
            found[f"{name}_context"] = (
                contexts[f"{name}"] if name in contexts else contexts[f"{name}_context"]
            )
        if "video_keyframes_mask" in self.step.plain.inputs:
            found["video_keyframes_mask"] = np.zeros(g.num_video_tokens, np.float32)
        return found

    def held_out_losses(self, trainer: Trainer) -> dict[str, float]:
        """Mean losses of the clips that are not trained on, at LEVELS and with the same noise each
        time."""
        cases = list(product(self.held_out, LEVELS))
        losses: dict[str, list[float]] = {name: [] for name in self.trained}
        for start in range(0, len(cases), self.batch):
            part = cases[start : start + self.batch]
            filled = [part[i % len(part)] for i in range(self.batch)]
            rows = [self._feed(s, f"train.held_out.{s.sample}", level) for s, level in filled]
            feeds = self._stacked(rows)
            found = trainer.losses(feeds)
            for name in self.trained:
                there = np.any(feeds[f"{name}_noised"], axis=1)[: len(part)]
                losses[name] += list(found[f"{name}_loss"][: len(part)][there])
        return {f"held_out_{n}_loss": float(np.mean(x)) for n, x in losses.items() if x}

    # --- the run ----------------------------------------------------------------------------------

    @property
    def about(self) -> dict[str, Any]:
        """Facts of a state that a run which continues must agree with."""
        r = {name: str(x) if isinstance(x, Path) else x for name, x in asdict(self.request).items()}
        data = [(s.sample, s.context) for s in self.samples]
        return {
            "base": self.base,
            "data": str(hash_of(data)),
            "dtype": self.session.dtype,
            "weights_dtype": self.session.options.weights_dtype,
            "samples": self.batch * self.request.accumulate,
            "request": r,
        }

    def check_resumed(self, about: Mapping[str, Any]) -> None:
        """Raises InputError where the state is of another model, other data or another
        configuration."""
        path = self.request.output
        if about["base"] != self.base:
            raise InputError(
                f"--output: {path} trains a LoRA of another model; pass that --model, or another --output"
            )
        ours, theirs = json.loads(json.dumps(self.about["request"])), about["request"]
        changed = [name for name in ours if name not in FREE and ours[name] != theirs.get(name)]
        if changed:
            name = changed[0]
            raise InputError(
                f"--{name.replace('_', '-')}: {ours[name]}, {path} was begun with {theirs.get(name)}; give the same "
                "flags to continue it, or another --output"
            )
        if (now := self.about["samples"]) != (begun := about["samples"]):
            raise InputError(
                f"--batch: a step of {now} samples, {path} was begun with {begun}; choose --batch, "
                f"--accumulate and the mesh axis data so that their product is {begun}"
            )
        ours, theirs = (x.get("weights_dtype") or "none" for x in (self.about, about))
        if ours != theirs:
            raise InputError(
                f"--weights-dtype: {ours}, {path} was begun with {theirs}; give the same to continue it, "
                "or another --output"
            )
        if about["data"] != self.about["data"] or about["dtype"] != self.about["dtype"]:
            raise InputError(
                f"--data: {path} was begun with other clips or --dtype; give another --output"
            )

    def train(
        self,
        say: Callable[[str], None],
        on_step: Callable[[dict[str, Any]], None] = lambda row: None,
        stopped: Sequence[Any] = (),
    ) -> Path:
        """Train to the last step, or to the one in which `stopped` is no longer empty on any
        process, and return the LoRA's file. Raises InputError, and NotWritten if a disk is full."""
        with locked(self.request.output) if self.session.backend.is_main else nullcontext():
            return self._train(say, on_step, stopped)

    def _train(
        self,
        say: Callable[[str], None],
        on_step: Callable[[dict[str, Any]], None],
        stopped: Sequence[Any],
    ) -> Path:
        r, main, agree = self.request, self.session.backend.is_main, self.session.backend.agree
        assert r.steps is not None and r.lr is not None
        begun = states(r.output)
        about, arrays = read_state(begun[-1]) if begun else ({}, {})
        if begun:
            self.check_resumed(about)
        trainer, first = self.trainer(), about.get("step", 0)
        if begun:
            trainer.restore(arrays, about["updates"])
            say(f"continues at step {first}")
        updates, silent, broken = about.get("updates", 0), Counter[str](), 0
        rows = kept_metrics(r.output, first) if main else []
        weights = {f"{name}_loss": getattr(r, f"{name}_loss") for name in self.streams}
        lora = r.output / f"lora-{first:06d}.safetensors"
        with (r.output / METRICS).open("a") if main else nullcontext() as metrics:
            for step in range(first, r.steps):
                began = time.perf_counter()
                losses, levels, names = self._accumulated(trainer, step, weights)
                waited = time.perf_counter()
                now = rate(r.lr, step, r.steps, r.schedule, r.warmup)
                norms = _by_group(trainer.update(now))
                row = {"step": step, "lr": now, **_summary(losses, levels)}
                row |= self._norms_row(norms) | {"samples": names}
                row["seconds"] = time.perf_counter() - began
                row["update_seconds"] = time.perf_counter() - waited
                fine = math.isfinite(row["grad_norm"])
                updates += fine
                broken = 0 if fine else broken + 1
                if not fine:
                    row = {name: _finite(value) for name, value in row.items()}
                ending = (step + 1) % r.save_every == 0 or step + 1 == r.steps
                if ending and self.held_out:
                    row |= {n: _finite(x) for n, x in self.held_out_losses(trainer).items()}
                rows.append(row)
                if metrics:
                    metrics.write(json.dumps(row) + "\n")
                    metrics.flush()
                on_step(row)
                if broken == NOT_FINITE:
                    raise InputError(
                        f"step {step}: {broken} steps without a finite gradient, last of {names}; lower --lr"
                    )
                self._require_gradients(norms, losses, silent)
                last = agree(bool(stopped))
                if ending or last:
                    lora = self._save(trainer, step + 1, updates, rows)
                if last:
                    say(f"stopped after step {step}; the same command continues")
                    break
        return lora

    def _norms_row(self, squares: Mapping[str, float]) -> dict[str, Any]:
        """Gradient norms of a step, of all and by group, from their squares."""
        total = math.sqrt(sum(squares.values()))
        by_group = {f"grad_norm_{group}": math.sqrt(x) for group, x in squares.items()}
        return {"grad_norm": total, **by_group, "clipped": total > self.request.max_grad_norm}

    def _accumulated(
        self, trainer: Trainer, step: int, weights: Mapping[str, float]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], list[str]]:
        """Losses and noise levels by stream of the samples that have it, and the names of all
        samples."""
        losses: dict[str, list[np.ndarray]] = {name: [] for name in self.trained}
        levels: dict[str, list[np.ndarray]] = {name: [] for name in self.trained}
        names = []
        for part in range(self.request.accumulate):
            drawn = self.drawn(step, part)
            names += [sample.name for sample, _ in drawn]
            feeds = self.feeds(drawn)
            found = trainer.accumulate(
                feeds, {n: w / self.request.accumulate for n, w in weights.items()}
            )
            for name in self.trained:
                there = feeds[f"{name}_noised"].any(1)
                losses[name].append(found[f"{name}_loss"][there])
                levels[name].append(feeds[f"{name}_sigma"][there])
        joined, sigmas = (
            {n: np.concatenate(x) for n, x in each.items()} for each in (losses, levels)
        )
        return joined, sigmas, names

    def _require_gradients(
        self, norms: Mapping[str, float], losses: Mapping[str, np.ndarray], silent: Counter[str]
    ) -> None:
        """Raise InputError if a group has had no gradient for long, although its stream had
        data."""
        for group, norm in norms.items():
            had = STREAM_OF[group] == "cross" or (
                STREAM_OF[group] in losses and losses[STREAM_OF[group]].size
            )
            silent[group] = silent[group] + 1 if norm == 0 and had else 0
            if silent[group] == NO_GRADIENT:
                others = " ".join(name for name in norms if name != group)
                raise InputError(
                    f"--targets: no gradient has reached {group} for {NO_GRADIENT} steps: the model does not use it "
                    f"here; pass --targets {others or 'with other groups'}"
                )

    def _save(self, trainer: Trainer, step: int, updates: int, rows: list[dict[str, Any]]) -> Path:
        """State, LoRA and picture."""
        r, arrays = self.request, trainer.state()
        path = r.output / f"lora-{step:06d}.safetensors"
        if self.session.backend.is_main:
            about = {**self.about, "updates": updates}
            write_state(r.output, step, arrays, about, r.keep)
            write_lora(path, arrays["parameters"], self.step.scale, described(self.about, step))
            draw_losses(r.output / PICTURE, rows)
        return path


def described(about: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Metadata of a LoRA's file."""
    request = about["request"]
    kept = {name: request[name] for name in ("mode", "targets", "rank", "seed")}
    return {"base": about["base"], "data": about["data"], "step": step, **kept}


def hash_of(data: Any) -> str:
    from hashlib import sha256

    return sha256(json.dumps(data).encode()).hexdigest()[:16]


def _finite(value: Any) -> Any:
    """The value, or None for a number that JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _by_group(squares: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, square in squares.items():
        found[group_of(name)] = found.get(group_of(name), 0.0) + square
    return found


def _summary(
    losses: Mapping[str, np.ndarray], levels: Mapping[str, np.ndarray]
) -> dict[str, float | None]:
    """Mean losses by stream, each also by quarter of the noise level."""
    found: dict[str, float | None] = {}
    for name, loss in losses.items():
        found[f"{name}_loss"] = float(loss.mean()) if loss.size else None
        quarters = np.minimum((levels[name] * 4).astype(int), 3)
        found |= {
            f"{name}_loss_q{q}": float(loss[quarters == q].mean())
            for q in range(4)
            if (quarters == q).any()
        }
    return found


def start(session: Session, request: TrainRequest) -> Run:
    """A run whose flags fit data and model. Raises InputError before a weight is read."""
    run = Run(session, request)
    _ = run.step.adapters
    if not request.dry_run and session.backend.is_main:
        try:
            request.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"--output: {request.output} cannot be created ({error.strerror}); choose another folder"
            ) from None
        strange = [
            p.name
            for p in request.output.iterdir()
            if not p.name.startswith(("lora-", "state", ".", "loss", METRICS))
        ]
        if strange and not states(request.output):
            raise InputError(
                f"--output: {request.output} holds other files, such as {strange[0]}; choose a new folder"
            )
    return run
