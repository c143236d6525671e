"""The inputs of a training step: latents of its samples, noise, levels and given tokens."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import numpy as np

from ltx2rt.backend import overlapped
from ltx2rt.models.geometry import pack_audio, pack_video
from ltx2rt.passes.dropout import COLUMNS, dropout_feeds
from ltx2rt.stages.noise import standard_normal, uniform
from ltx2rt.train.conditions import given_tokens
from ltx2rt.train.manifest import context_path, read_arrays, sample_path
from ltx2rt.train.recipe import sigma
from ltx2rt.train.request import TrainRequest
from ltx2rt.train.samples import Item, Kind, Samples
from ltx2rt.train.step import Step

AHEAD = 2  # batches
PACK = {"video": pack_video, "audio": pack_audio}
REFERENCE = {"video": "reference", "audio": "audio_reference"}
Feeds = dict[str, np.ndarray]
Batch = tuple[list[tuple[Item, str]], Feeds]  # samples, and the inputs of the step


@dataclass(frozen=True)
class Feeder:
    """steps: the training step of every kind of batch."""

    request: TrainRequest
    samples: Samples
    steps: Mapping[Kind, Step]

    def batches(self, first: int) -> Generator[Batch, None, None]:
        """Batches of all steps from `first` on, in order; a thread makes two of them ahead."""

        def made(step: int, part: int) -> Batch:
            drawn = self.samples.drawn(step, part)
            return drawn, self.feeds(drawn)

        r = self.request
        numbers = product(range(first, r.steps or 0), range(r.accumulate))
        with ThreadPoolExecutor(1) as pool:
            for batch in overlapped((pool.submit(made, *each) for each in numbers), AHEAD):
                yield batch.result()

    def feeds(self, drawn: list[tuple[Item, str]]) -> Feeds:
        """The inputs of a batch. Whether it sees references is drawn once."""
        p, kind = self.request.reference or 0, self.samples.kind(drawn[0][0])
        seen = p and uniform(self.request.seed, f"{drawn[0][1]}.reference", 1)[0] < p
        return self.stacked(kind if seen else kind.plain, [(*each, None) for each in drawn])

    def stacked(self, kind: Kind, rows: Sequence[tuple[Item, str, float | None]]) -> Feeds:
        """The inputs of samples, with the stream and the noise level of each, None: drawn."""
        step, found = self.steps[kind], [self._feed(kind, *row) for row in rows]
        stacked = {name: np.stack([row[name] for row in found]) for name in found[0]}
        known = step.tables | stacked | {n: x for n, x in found[0].items() if n == COLUMNS}
        return {name: known[name] for name in step.graph.inputs}

    def _feed(self, kind: Kind, item: Item, stream: str, level: float | None) -> Feeds:
        """The inputs of one sample, without an axis B. level: of its noise; None: drawn."""
        r, step = self.request, self.steps[kind]
        latents = read_arrays(sample_path(item.cache, item.sample.sample))
        drawn, found = level is None, Feeds()
        dropped = drawn and uniform(r.seed, f"{stream}.dropout", 1)[0] < r.caption_dropout
        context = item.empty if dropped else item.sample.context
        contexts = read_arrays(context_path(item.cache, context))
        given = given_tokens(r, step.geometry, latents, stream, self.samples.streams)
        level = level or 0.0
        for name in self.samples.streams:
            there, trained = name in latents, name in self.samples.trained
            tokens, channels = step.tokens(name), step.plain.inputs[f"{name}_clean"].type.size("C")
            clean = np.zeros((tokens, channels), np.float32)
            if there:
                clean = PACK[name](latents[name][None])[0]
            noised = np.full(tokens, int(there and trained), np.int32)
            noised[given[name]] = 0
            own = f"{stream}.{name}"
            follows = "video" in self.samples.trained and r.audio_sigma == "shared"
            if drawn and not (name == "audio" and follows):
                level = sigma(tokens, r.seed, own, r.levels)
            noise = standard_normal(r.seed, own, clean.shape)
            if kind.reference if name == "video" else kind.heard:  # given tokens behind the clip's
                more = PACK[name](latents[REFERENCE[name]][None])[0]
                clean, noise = (np.concatenate([x, more]) for x in (clean, noise))
                noised = np.concatenate([noised, np.zeros(len(more), np.int32)])
            found |= {f"{name}_clean": clean, f"{name}_noise": noise, f"{name}_noised": noised}
            found[f"{name}_sigma"] = np.array(level if noised.any() else 0, np.float32)
            found[f"{name}_context"] = contexts[name if name in contexts else f"{name}_context"]
        if "video_keyframes_mask" in step.plain.inputs:
            found["video_keyframes_mask"] = np.zeros(len(found["video_noised"]), np.float32)
        return found | dropout_feeds(
            step.graph,
            r.lora_dropout if drawn else 0.0,
            lambda name, count: uniform(r.seed, f"{stream}.{name}", count),
        )
