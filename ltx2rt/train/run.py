"""`train run`: a LoRA from a cache, by steps that are a function of the seed and their number.

Decides what a step is fed, when state and LoRA are written, and what a run that is continued must
share with the one before. The gradient and the optimiser are the backend's.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.backend import EMA, AdamW, Trainer, overlapped
from ltx2rt.errors import InputError
from ltx2rt.models.geometry import Geometry, pack_audio, pack_video
from ltx2rt.notes import note
from ltx2rt.session.session import Session
from ltx2rt.stages.noise import standard_normal, uniform
from ltx2rt.train.board import EventFiles
from ltx2rt.train.conditions import given_tokens
from ltx2rt.train.data import parse_bucket
from ltx2rt.train.gradients import read_init
from ltx2rt.train.prepare import (
    Sample,
    context_path,
    is_of,
    model_digest,
    read_arrays,
    read_head,
    read_manifest,
    sample_path,
    shared,
)
from ltx2rt.train.recipe import MODES, STREAM_OF, group_of, rate, reached, sigma
from ltx2rt.train.request import TrainRequest, to_text
from ltx2rt.train.state import (
    CONFIGURATION,
    METRICS,
    PICTURE,
    draw_losses,
    kept_metrics,
    locked,
    read_state,
    states,
    write_configuration,
    write_lora,
    write_state,
)
from ltx2rt.train.step import Step
from ltx2rt.weights.distilled import sign
from ltx2rt.weights.lora import FACTORS

NO_GRADIENT, NOT_FINITE = 20, 10  # steps after which a run ends
# Fields that may change when a run goes on: no step differs, but for where a schedule ends. Of the
# samples of a step the number alone is compared, however they are shared out.
LEVELS = (0.2, 0.5, 0.8)  # noise levels at which clips are measured that are not trained on
FREE = (
    "data", "output", "steps", "save_every", "keep", "keep_every", "dry_run", "batch", "accumulate", "init",
    "validate_every", "validation", "validation_seed", "json", "tensorboard", "deterministic", "allow_change",
    "allow_distilled", "allow_partial_sound",
)  # fmt: skip
FIXED = ("mode", "streams", "rank", "audio_rank", "targets")  # what is trained has these shapes
AHEAD = 2  # batches
BALANCE = 0.99  # decay of the running means of the losses


@dataclass(frozen=True)
class Kind:
    """Samples that one graph trains on. reference: latent frames, rows and columns, None: none."""

    bucket: str
    fps: str
    reference: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Item:
    """A sample with the cache that it is in. empty: the context of no caption there."""

    sample: Sample
    cache: Path
    weight: float
    empty: str

    @property
    def kind(self) -> Kind:
        return Kind(self.sample.bucket, self.sample.fps, self.sample.reference)


@dataclass
class Tally:
    """Counts of a run over its steps. updates: those of the optimiser; running: mean losses by
    stream; silent: steps in a row without a gradient, by group; broken: steps in a row whose
    gradient was not finite."""

    updates: int
    running: dict[str, float]
    silent: Counter[str] = field(default_factory=Counter)
    broken: int = 0

    def add(self, losses: Mapping[str, np.ndarray], norms: Mapping[str, float]) -> None:
        """norms: squares, by group."""
        for name, loss in losses.items():
            if loss.size and np.isfinite(loss).all():
                mean = float(loss.mean())
                self.running[name] = BALANCE * self.running.get(name, mean) + (1 - BALANCE) * mean
        fine = math.isfinite(sum(norms.values()))
        self.updates += fine
        self.broken = 0 if fine else self.broken + 1
        for group, norm in norms.items():
            stream = STREAM_OF[group]
            had = stream == "cross" or (stream in losses and losses[stream].size)
            self.silent[group] = self.silent[group] + 1 if norm == 0 and had else 0

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


Batch = tuple[list[tuple[Item, str]], dict[str, np.ndarray]]  # samples, and what a step is fed


class Run:
    """One run on a session: what is trained of what, by which graphs."""

    def __init__(self, session: Session, request: TrainRequest):
        mode = MODES[request.mode]
        self.session, self.mode = session, mode
        self.request = r = request.resolved()
        if session.options.loras:
            raise InputError(
                "--lora: a LoRA beside the one that is trained is not taken yet; leave the flag "
                "out, or begin with it by --init"
            )
        known = sign(session.checkpoint, session.options.assume)
        if known and known.kind == "distilled" and not r.allow_distilled:
            raise InputError(
                f"--model: {session.checkpoint.path.name} is distilled ({known.how}); train on "
                "the model it was made from, or pass --assume dev, or --allow-distilled"
            )
        self.base = model_digest(session.checkpoint)
        read: list[Item] = []
        self.heads = [read_head(data.cache) for data in r.data]
        for data, head in zip(r.data, self.heads, strict=True):
            samples = read_manifest(data.cache, self.base)
            read += [Item(sample, data.cache, data.weight, head["empty"]) for sample in samples]
        usable = self._usable(read)
        if r.held_out is None:
            apart = {i.sample.sample for i in usable if i.sample.held_out}
        else:
            count = math.ceil(r.held_out * len(usable))
            apart = set(sorted(i.sample.sample for i in usable)[:count])
        self.items = [i for i in usable if i.sample.sample not in apart]
        self.held_out = [i for i in usable if i.sample.sample in apart]
        self.batch = r.batch * session.backend.mesh.get("data", 1)
        if len(self.items) < self.batch:
            raise InputError(
                f"--batch: {self.batch} samples at once, the cache has {len(self.items)}; lower it"
            )
        self.validate: Callable[[Path, int], None] | None = None
        self.kinds = sorted({i.kind for i in self.items}, key=str)
        self.shares = self._shares()

    @property
    def samples(self) -> list[Sample]:
        """Those that are trained on."""
        return [i.sample for i in self.items]

    def _usable(self, items: list[Item]) -> list[Item]:
        """Those with all streams of the mode, and the streams that are trained. Raises InputError
        if there are none, and for conditions that samples lack."""
        r = self.request
        sounding = [i for i in items if "audio" in i.sample.streams]
        aims = reached(r.targets)
        self.streams, self.trained = self.mode.streams, self.mode.trained
        if r.streams:
            if strange := sorted(set(r.streams) - set(self.trained)):
                raise InputError(
                    f"--streams: {strange[0]}, --mode {r.mode} trains "
                    f"{' and '.join(self.trained)}; leave it out, or choose another --mode"
                )
            frozen = [name for name in self.streams if name not in self.trained]
            self.trained = tuple(name for name in self.trained if name in r.streams)
            self.streams = tuple(n for n in self.streams if n in (*self.trained, *frozen))
        both = self.mode.trained == ("video", "audio")
        if "audio" in self.streams and not sounding:
            if aims != {"video"} or not both:
                raise InputError(
                    f"--data: none of the {len(items)} clips has sound, and --mode {r.mode} "
                    "trains with it; prepare clips with sound, or train the picture alone by "
                    "--mode t2v --targets video-attn"
                )
            self.streams = self.trained = ("video",)
        if "audio" in self.trained and not aims & {"audio", "cross"}:
            said = f"--targets {' '.join(r.targets)}: none reaches the sound"
            if not both:
                raise InputError(f"{said}, which --mode {r.mode} trains; add audio-attn")
            if self.session.backend.is_main:
                note(f"{said}, so the LoRA will not change it")
        elif "audio" in self.trained and both and len(sounding) < len(items):
            silent = [i.sample.name for i in items if i not in sounding]
            if not r.allow_partial_sound and r.sound_share is None:
                raise InputError(
                    f"--data: {len(silent)} of {len(items)} clips have no sound, such as "
                    f"{silent[0]}, which makes the sound hard to learn; leave them out, say by "
                    "--sound-share how often clips with sound are drawn, or pass "
                    "--allow-partial-sound"
                )
        needed = items if both or "audio" not in self.streams else sounding
        if "video" in self.streams:
            needed = [i for i in needed if "video" in i.sample.streams]
            if not needed:
                raise InputError(
                    f"--data: no clip has a picture, --mode {r.mode} needs it; use --mode t2a"
                )
            self._require_conditions(needed)
        return needed

    def _require_conditions(self, items: list[Item]) -> None:
        """Raises InputError for samples without what a condition reads, and for caches that do not
        agree in it."""
        for name in ("reference", "mask"):
            lacking = [i.sample.name for i in items if name not in i.sample.streams]
            if getattr(self.request, name) and lacking:
                raise InputError(
                    f"--{name}: {len(lacking)} of {len(items)} clips have none, such as "
                    f"{lacking[0]}; put NAME.{name}.mp4 beside each and run `ltx2rt train "
                    "prepare` again"
                )
        for name in ("reference_downscale", "reference_temporal_scale"):
            shared((head.get(name, 1) for head in self.heads), name.replace("_", " "))

    def _shares(self) -> np.ndarray | None:
        """How often each sample is drawn, None: each once in an epoch. Raises InputError for a
        share of sound that the data cannot give."""
        p = self.request.sound_share
        weights = np.array([i.weight for i in self.items])
        if p is None and (weights == weights[0]).all():
            return None
        weights = weights / weights.sum()
        sounding = np.array(["audio" in i.sample.streams for i in self.items])
        if p is not None:
            for share, there, kind in ((p, sounding, "with"), (1 - p, ~sounding, "without")):
                if share and not there.any():
                    raise InputError(
                        f"--sound-share: {p:g}, but no clip is {kind} sound; leave the flag out"
                    )
                weights[there] *= share / max(weights[there].sum(), 1e-30)
        return weights

    @property
    def reference_scales(self) -> tuple[int, int]:
        """How much smaller references are, and how many times fewer frames they have."""
        head = self.heads[0]
        return head.get("reference_downscale", 1), head.get("reference_temporal_scale", 1)

    @cached_property
    def steps(self) -> dict[Kind, Step]:
        """The training step of every kind of batch."""
        p, found = self.request.reference, {}
        for kind in {*self.kinds, *(i.kind for i in self.held_out)}:
            plain = replace(kind, reference=None)
            if not p or p < 1:
                found[plain] = self._step(plain)
            if p:
                found[kind] = self._step(kind)
        return dict(sorted(found.items(), key=lambda pair: -pair[1].geometry.num_video_tokens))

    def _step(self, kind: Kind) -> Step:
        r, config = self.request, self.session.config
        bucket = parse_bucket(kind.bucket)
        geometry = Geometry.of(
            config, bucket.width, bucket.height, bucket.frames, Fraction(kind.fps)
        )
        assert r.alpha is not None
        reference = None
        if kind.reference:
            frames, rows, columns = kind.reference
            own = replace(geometry, frames=frames, rows=rows, columns=columns)
            reference = (own, *self.reference_scales)
        return Step(
            self.session,
            geometry,
            self.streams,
            r.batch,
            r.targets,
            r.rank,
            r.alpha / r.rank,
            r.remat,
            r.audio_rank,
            r.ema is not None,
            reference,
        )

    @property
    def step(self) -> Step:
        """The largest one."""
        return next(iter(self.steps.values()))

    def trainer(self) -> Trainer:
        """Raises InputError if the model does not fit the graph, or the step the memory."""
        r = self.request
        optimiser = AdamW(r.betas, 1e-8, r.weight_decay, r.max_grad_norm, r.ema)
        begin = {}
        if r.init:
            begin = read_init(r.init, self.session, self.step.shapes(), self.step.scale)
        return self.step.trainer(
            r.seed, optimiser, list(self.steps.values())[1:], begin, r.deterministic
        )

    # --- one step ---------------------------------------------------------------------------------

    def drawn(self, step: int, part: int) -> list[tuple[Item, str]]:
        """The samples of a batch, all of one kind, and the stream of random numbers of each."""
        r = self.request
        number = step * r.accumulate + part
        streams = [f"train.{step}.{part * self.batch + i}" for i in range(self.batch)]
        if self.shares is not None:
            return list(zip(self._picked(number), streams, strict=True))
        if len(self.kinds) > 1:
            return list(zip(self._of_one_kind(number), streams, strict=True))
        start, found = number * self.batch, []
        for i in range(start, start + self.batch):
            epoch, place = divmod(i, len(self.items))
            found.append(self.items[self._order(f"train.order.{epoch}", len(self.items))[place]])
        return list(zip(found, streams, strict=True))

    def _order(self, stream: str, count: int) -> np.ndarray:
        return np.argsort(uniform(self.request.seed, stream, count), kind="stable")

    def _picked(self, number: int) -> list[Item]:
        """Samples by their shares, drawn with replacement; the first one decides the kind."""
        found: list[Item] = []
        places = uniform(self.request.seed, f"train.pick.{number}", self.batch)
        assert self.shares is not None
        shares = self.shares
        for place in places:
            bounds = np.cumsum(shares) / shares.sum()
            found.append(
                self.items[min(int(np.searchsorted(bounds, place, "right")), len(shares) - 1)]
            )
            same = [i.kind == found[0].kind for i in self.items]
            shares = self.shares * np.array(same)
        return found

    def _of_one_kind(self, number: int) -> list[Item]:
        """The batch of this number: an epoch has every sample once, and in the last batch of a kind
        its first ones again."""
        groups = [[i for i in self.items if i.kind == kind] for kind in self.kinds]
        counts = [-(-len(group) // self.batch) for group in groups]
        epoch, place = divmod(number, sum(counts))
        chosen = int(self._order(f"train.order.{epoch}", sum(counts))[place])
        for kind, (group, count) in enumerate(zip(groups, counts, strict=True)):
            if chosen < count:
                order = self._order(f"train.order.{epoch}.{kind}", len(group))
                first = chosen * self.batch
                return [group[order[i % len(group)]] for i in range(first, first + self.batch)]
            chosen -= count
        raise AssertionError(f"{chosen} of {counts}")

    def feeds(self, drawn: list[tuple[Item, str]]) -> dict[str, np.ndarray]:
        """The inputs of a batch. Whether it sees references is drawn once."""
        p, kind = self.request.reference or 0, drawn[0][0].kind
        seen = p and uniform(self.request.seed, f"{drawn[0][1]}.reference", 1)[0] < p
        kind = kind if seen else replace(kind, reference=None)
        return self._stacked(kind, [self._feed(kind, item, stream) for item, stream in drawn])

    def _batches(self, first: int) -> Generator[Batch, None, None]:
        """Those of all steps from `first` on, in their order; a thread makes two of them ahead."""

        def made(step: int, part: int) -> Batch:
            drawn = self.drawn(step, part)
            return drawn, self.feeds(drawn)

        steps = range(first, self.request.steps or 0)
        with ThreadPoolExecutor(1) as pool:
            ahead = (
                pool.submit(made, *which)
                for which in product(steps, range(self.request.accumulate))
            )
            for batch in overlapped(ahead, AHEAD):
                yield batch.result()

    def _stacked(self, kind: Kind, rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        step, stacked = self.steps[kind], {n: np.stack([row[n] for row in rows]) for n in rows[0]}
        return {name: (step.tables | stacked)[name] for name in step.graph.inputs}

    def _feed(
        self, kind: Kind, item: Item, stream: str, level: float | None = None
    ) -> dict[str, np.ndarray]:
        """The inputs of one sample, without an axis B. level: of its noise, and its own caption;
        None: drawn."""
        r, step, found = self.request, self.steps[kind], {}
        latents = read_arrays(sample_path(item.cache, item.sample.sample))
        drawn = level is None
        dropped = drawn and uniform(r.seed, f"{stream}.dropout", 1)[0] < r.caption_dropout
        context = item.empty if dropped else item.sample.context
        contexts = read_arrays(context_path(item.cache, context))
        given = given_tokens(r, step.geometry, latents.get("mask"), stream)
        level = level or 0.0
        for name in self.streams:
            pack = pack_video if name == "video" else pack_audio
            there = name in latents
            tokens, channels = step.tokens(name), step.plain.inputs[f"{name}_clean"].type.size("C")
            clean = (
                pack(latents[name][None])[0] if there else np.zeros((tokens, channels), np.float32)
            )
            noised = np.full(tokens, int(there and name in self.trained), np.int32)
            noised[given[name]] = 0
            own = f"{stream}.{name}"
            shared_level = name == "audio" and "video" in self.trained and r.audio_sigma == "shared"
            if drawn and not shared_level:
                level = sigma(tokens, r.seed, own, r.levels)
            noise = standard_normal(r.seed, own, clean.shape)
            if (
                name == "video" and kind.reference
            ):  # tokens that are given, beside those of the clip
                more = pack_video(latents["reference"][None])[0]
                clean, noise = (np.concatenate([x, more]) for x in (clean, noise))
                noised = np.concatenate([noised, np.zeros(len(more), np.int32)])
            found[f"{name}_clean"] = clean
            found[f"{name}_noise"] = noise
            found[f"{name}_noised"] = noised
            found[f"{name}_sigma"] = np.float32(level if noised.any() else 0)
            found[f"{name}_context"] = (
                contexts[f"{name}"] if name in contexts else contexts[f"{name}_context"]
            )
        if "video_keyframes_mask" in step.plain.inputs:
            found["video_keyframes_mask"] = np.zeros(len(found["video_noised"]), np.float32)
        return found

    def held_out_losses(self, trainer: Trainer) -> dict[str, float]:
        """Mean losses of the clips that are not trained on, at LEVELS and with the same noise each
        time."""
        losses: dict[str, list[float]] = {name: [] for name in self.trained}
        for kind in sorted({i.kind for i in self.held_out}, key=str):
            cases = list(product([i for i in self.held_out if i.kind == kind], LEVELS))
            seen = kind if self.request.reference else replace(kind, reference=None)
            for start in range(0, len(cases), self.batch):
                part = cases[start : start + self.batch]
                filled = [part[i % len(part)] for i in range(self.batch)]
                rows = [
                    self._feed(seen, i, f"train.held_out.{i.sample.sample}", level)
                    for i, level in filled
                ]
                feeds = self._stacked(seen, rows)
                found = trainer.losses(feeds)
                for name in self.trained:
                    there = np.any(feeds[f"{name}_noised"], axis=1)[: len(part)]
                    losses[name] += list(found[f"{name}_loss"][: len(part)][there])
        return {f"held_out_{n}_loss": float(np.mean(x)) for n, x in losses.items() if x}

    # --- the run ----------------------------------------------------------------------------------

    @property
    def about(self) -> dict[str, Any]:
        """Facts of a state that a run which continues must agree with."""
        r = {f.name: to_text(getattr(self.request, f.name)) for f in fields(self.request)}
        data = [(s.sample, s.context) for s in self.samples]
        return {
            "base": self.base,
            "data": str(hash_of(data)),
            "dtype": self.session.dtype,
            "weights_dtype": self.session.options.weights_dtype,
            "samples": self.batch * self.request.accumulate,
            "request": r,
            "version": ".".join(map(str, self.session.config.version)),
            "trigger": next((head["trigger"] for head in self.heads if head.get("trigger")), None),
            **(
                dict(zip(FACTORS, self.reference_scales, strict=True))
                if self.request.reference
                else {}
            ),
        }

    def _configuration(self) -> dict[str, Any]:
        """Flags that give this run again, by name."""
        named = (
            "model",
            "text_encoder",
            "video_vae",
            "audio_vae",
            "config_from",
            "weights_dtype",
            "assume",
        )
        found = {name: getattr(self.session.options, name) for name in named}
        found |= {f.name: getattr(self.request, f.name) for f in fields(self.request)}
        found |= {"backend": self.session.backend.name, "dtype": self.session.dtype}
        return {name: to_text(x) for name, x in found.items() if x is not None and x != ()}

    def check_resumed(self, about: Mapping[str, Any]) -> None:
        """Raises InputError where the state is of another model, other data or another
        configuration."""
        path = self.request.output
        if not is_of(about["base"], self.base, path):
            raise InputError(
                f"--output: {path} trains a LoRA of another model; pass that --model, or another "
                "--output"
            )
        ours, theirs = json.loads(json.dumps(self.about["request"])), about["request"]
        changed = [name for name in ours if name not in FREE and ours[name] != theirs.get(name)]
        if changed and self.request.allow_change and not set(changed) & set(FIXED):
            note(f"{path} goes on with other values of {', '.join(changed)}")
        elif changed:
            name = next((name for name in changed if name in FIXED), changed[0])
            raise InputError(
                f"--{name.replace('_', '-')}: {ours[name]}, {path} was begun with "
                f"{theirs.get(name)}; give the same flags to continue it, or another --output"
            )
        if (now := self.about["samples"]) != (begun := about["samples"]):
            raise InputError(
                f"--batch: a step of {now} samples, {path} was begun with {begun}; choose --batch, "
                f"--accumulate and the mesh axis data so that their product is {begun}"
            )
        ours, theirs = (x.get("weights_dtype") or "none" for x in (self.about, about))
        if ours != theirs:
            raise InputError(
                f"--weights-dtype: {ours}, {path} was begun with {theirs}; give the same to "
                "continue it, or another --output"
            )
        ours, theirs = ([x["data"], x["dtype"]] for x in (self.about, about))
        if ours != theirs and not self.request.allow_change:
            raise InputError(
                f"--data: {path} was begun with other clips or --dtype; give another --output, or "
                "--allow-change"
            )

    def train(
        self,
        say: Callable[[str], None],
        on_step: Callable[[dict[str, Any]], None] = lambda row: None,
        stopped: Sequence[Any] = (),
    ) -> Path:
        """Train to the last step, or to the one in which `stopped` is no longer empty on any
        process, and return the LoRA's file. Raises InputError, and NotWritten if a disk is full."""
        output, main = self.request.output, self.session.backend.is_main
        if main:
            try:
                output.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"--output: {output} cannot be created ({error.strerror}); choose another folder"
                ) from None
        with locked(output) if main else nullcontext():
            return self._train(say, on_step, stopped)

    def _train(
        self,
        say: Callable[[str], None],
        on_step: Callable[[dict[str, Any]], None],
        stopped: Sequence[Any],
    ) -> Path:
        r, main, agree = self.request, self.session.backend.is_main, self.session.backend.agree
        assert r.steps is not None
        begun = states(r.output)
        about, arrays = read_state(begun[-1]) if begun else ({}, {})
        if begun:
            self.check_resumed(about)
        trainer, first = self.trainer(), about.get("step", 0)
        if begun:
            trainer.restore(arrays, about["updates"])
            say(f"continues at step {first}")
        tally = Tally(about.get("updates", 0), dict(about.get("running", {})))
        rows = kept_metrics(r.output, first) if main else []
        if main:
            write_configuration(r.output, self._configuration())
        board = EventFiles(r.tensorboard) if main and r.tensorboard else None
        lora = r.output / f"lora-{first:06d}.safetensors"
        batches = self._batches(first)
        with (
            closing(batches),
            (r.output / METRICS).open("a") if main else nullcontext() as metrics,
        ):
            if not first:
                self._validated(trainer, 0)
            for step in range(first, r.steps):
                row = self._stepped(trainer, step, tally, batches)
                ending = (step + 1) % r.save_every == 0 or step + 1 == r.steps
                if self.held_out and (ending or (step + 1) % r.validate_every == 0):
                    row |= {n: _finite(x) for n, x in self.held_out_losses(trainer).items()}
                rows.append(row)
                if metrics:
                    metrics.write(json.dumps(row) + "\n")
                    metrics.flush()
                if board:
                    board.write(row)
                on_step(row)
                tally.require_health(row)
                last = agree(bool(stopped))
                if ending or last:
                    lora = self._save(trainer, step + 1, tally, rows)
                if step + 1 == r.steps or (step + 1) % r.validate_every == 0:
                    self._validated(trainer, step + 1)
                if last:
                    say(f"stopped after step {step}; the same command continues")
                    break
        return lora

    def _stepped(
        self, trainer: Trainer, step: int, tally: Tally, batches: Iterator[Batch]
    ) -> dict[str, Any]:
        """One step of the optimiser: its line of metrics, but for what is measured behind it."""
        r, began = self.request, time.perf_counter()
        assert r.steps is not None and r.lr is not None
        weights = self._weights(tally.running)
        losses, levels, names = self._accumulated(trainer, batches, weights)
        waited = time.perf_counter()
        now = rate(r.lr, step, r.steps, r.schedule, r.warmup)
        norms = _by_group(trainer.update(now))
        tally.add(losses, norms)
        row = {"step": step, "lr": now, **_summary(losses, levels)}
        row |= self._norms_row(norms) | {"samples": names}
        row["seconds"] = time.perf_counter() - began
        row["update_seconds"] = time.perf_counter() - waited
        if r.audio_balance is not None:
            row["audio_weight"] = weights.get("audio_loss", 0.0)
        return {name: _finite(value) for name, value in row.items()}

    def _validated(self, trainer: Trainer, step: int) -> None:
        """Clips with the LoRA as it is now. `validate` takes it as a file, which is then removed."""
        if self.validate is None:
            return
        folder = self.request.output / "validation"
        folder.mkdir(exist_ok=True)
        path, arrays = folder / ".lora.safetensors", trainer.state()["parameters"]
        try:
            write_lora(path, arrays, self.step.scale, described(self.about, step))
            self.validate(path, step)
        finally:
            path.unlink(missing_ok=True)

    def _weights(self, running: Mapping[str, float]) -> dict[str, float]:
        """Weights of the losses. With `--audio-balance` that of the sound follows the running means
        of both."""
        r = self.request
        found = {f"{name}_loss": getattr(r, f"{name}_loss") for name in self.streams}
        if r.audio_balance is not None and running.keys() >= {"video", "audio"}:
            found["audio_loss"] *= r.audio_balance * running["video"] / max(running["audio"], 1e-12)
        return found

    def _norms_row(self, squares: Mapping[str, float]) -> dict[str, Any]:
        """Gradient norms of a step, of all and by group, from their squares."""
        total = math.sqrt(sum(squares.values()))
        by_group = {f"grad_norm_{group}": math.sqrt(x) for group, x in squares.items()}
        return {"grad_norm": total, **by_group, "clipped": total > self.request.max_grad_norm}

    def _accumulated(
        self, trainer: Trainer, batches: Iterator[Batch], weights: Mapping[str, float]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], list[str]]:
        """Losses and noise levels by stream of the samples that have it, and the names of all
        samples."""
        losses: dict[str, list[np.ndarray]] = {name: [] for name in self.trained}
        levels: dict[str, list[np.ndarray]] = {name: [] for name in self.trained}
        names = []
        for drawn, feeds in islice(batches, self.request.accumulate):
            names += [item.sample.name for item, _ in drawn]
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

    def _save(
        self,
        trainer: Trainer,
        step: int,
        tally: Tally,
        rows: list[dict[str, Any]],
    ) -> Path:
        """State, LoRA and its average, and picture."""
        r, arrays = self.request, trainer.state()
        path = r.output / f"lora-{step:06d}.safetensors"
        if self.session.backend.is_main:
            about = {**self.about, "updates": tally.updates, "running": tally.running}
            write_state(r.output, step, arrays, about, r.keep, r.keep_every)
            facts = described(self.about, step)
            write_lora(path, arrays["parameters"], self.step.scale, facts)
            if EMA in arrays:
                write_lora(path.with_stem(f"{path.stem}-ema"), arrays[EMA], self.step.scale, facts)
            draw_losses(r.output / PICTURE, rows)
        return path


def described(about: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Metadata of a LoRA's file."""
    request = about["request"]
    kept = {name: request[name] for name in ("mode", "targets", "rank", "seed")}
    more = {name: about[name] for name in ("trigger", "version", *FACTORS) if about.get(name)}
    return {"base": about["base"], "data": about["data"], "step": step, **kept, **more}


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
    for name in ("prefix", "suffix"):
        span, least = (
            getattr(request, name),
            min(step.geometry.frames for step in run.steps.values()),
        )
        if span and span[0] >= least:
            raise InputError(
                f"--{name}: {span[0]} latent frames, the clips have {least}; give fewer, so that "
                "some are generated"
            )
    if request.init:
        read_init(request.init, session, run.step.shapes(), run.step.scale)
    if request.tensorboard:
        EventFiles.check()
    if not request.dry_run and session.backend.is_main and request.output.is_dir():
        strange = [
            p.name
            for p in request.output.iterdir()
            if not p.name.startswith(
                ("lora-", "state", ".", "loss", METRICS, CONFIGURATION, "validation")
            )
        ]
        if strange and not states(request.output):
            raise InputError(
                f"--output: {request.output} holds other files, such as {strange[0]}; choose a "
                "new folder"
            )
    return run
