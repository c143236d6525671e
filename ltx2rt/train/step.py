"""The training step of a session: its graph with adapters, their first values, and what it
costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ltx2rt.backend import AdamW, Trainer
from ltx2rt.errors import InputError
from ltx2rt.graph.ir import Graph
from ltx2rt.models import train_step, transformer
from ltx2rt.models.catalog import PROMPT_TOKENS
from ltx2rt.models.geometry import Geometry, audio_positions, video_positions
from ltx2rt.passes.adapters import MARK, Adapters, modules
from ltx2rt.placement.devices import host_memory
from ltx2rt.placement.plan import StageCost, Work, cost
from ltx2rt.placement.stream import pieces, saved_bytes, streamed
from ltx2rt.placement.training import TrainingMemory, gradient_sums, runs_of, training_memory
from ltx2rt.session.beside import WithAdapters
from ltx2rt.session.call import Call
from ltx2rt.session.session import Session
from ltx2rt.train.recipe import group_of, initial, targeted
from ltx2rt.weights.audit import audit


@dataclass(frozen=True)
class Step:
    """batch: samples of one device of the mesh axis `data`. streams: the present ones; targets:
    groups of linears. scale: of the adapters, alpha / rank. remat: of `backend.REMAT`. audio_rank:
    of the sound's linears, None: rank. ema: an average is kept. reference: its geometry, how much
    smaller it is and how many times fewer frames it has; its tokens follow the clip's. heard:
    latents of a sound that is a reference as well, from the clip's start on. dropout: its rate is
    an input."""

    session: Session
    geometry: Geometry
    streams: tuple[str, ...]
    batch: int
    targets: tuple[str, ...]
    rank: int
    scale: float = 1.0
    remat: str = "block"
    audio_rank: int | None = None
    ema: bool = False
    reference: tuple[Geometry, int, int] | None = None
    heard: int = 0
    dropout: bool = False

    def __post_init__(self) -> None:
        if self.session.backend.mesh.get("guidance", 1) > 1:
            raise InputError(
                "--mesh: a training step has no guidance branches; use data, tensor, sequence "
                "or fsdp"
            )

    @cached_property
    def tables(self) -> dict[str, np.ndarray]:
        g = self.geometry
        video = video_positions(g) if "video" in self.streams else None
        if video is not None and self.reference:
            video = np.concatenate([video, video_positions(*self.reference)], axis=1)
        audio = audio_positions(g) if "audio" in self.streams else None
        if audio is not None and self.heard:
            heard = audio_positions(replace(g, audio_latents=self.heard))
            audio = np.concatenate([audio, heard], axis=1)
        return transformer.position_feeds(self.session.config.transformer, video, audio)

    def tokens(self, stream: str) -> int:
        """Tokens of the clip itself."""
        g = self.geometry
        return g.num_video_tokens if stream == "video" else g.audio_latents

    @property
    def spanned(self) -> int:
        """Latents in time that a prefix or suffix counts: of the picture, or of sound alone."""
        return self.geometry.frames if "video" in self.streams else self.geometry.audio_latents

    @cached_property
    def shape(self) -> transformer.ForwardShape:
        more = self.reference[0].num_video_tokens if self.reference else 0
        return transformer.ForwardShape(
            self.batch,
            self.tokens("video") + more if "video" in self.streams else 0,
            self.tokens("audio") + self.heard if "audio" in self.streams else 0,
            PROMPT_TOKENS,
            transformer.coordinate_counts(self.tables),
            streams=self.streams,
            rule=self.session.options.cross_timestep_rule,
        )

    @cached_property
    def plain(self) -> Graph:
        """The step of one device before placement, without adapters."""
        with self.session.checkpoint.tracing():
            return train_step.trace(self.session.config.transformer, self.shape, self.session.dtype)

    @cached_property
    def adapters(self) -> Adapters:
        """Raises InputError for targets that the step lacks."""
        layers = self.session.config.transformer.num_layers
        names = frozenset(targeted(self.targets, modules(self.plain), layers))
        return Adapters(names, self.rank, self.scale, self.audio_rank, dropout=self.dropout)

    @cached_property
    def graph(self) -> Graph:
        """The forward graph of a device. Matrices stored in few bits stay so, as in QLoRA."""
        stored = self.session.weights.stored(Call("train-step", None))
        placement = replace(self.session.placement, adapters=self.adapters, stored=stored)
        return placement.local(self.plain, "transformer")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the trained tensors on all devices together, by name in the checkpoint."""
        return {n: spec.shape for n, spec in self.graph.parameters().items() if MARK in n}

    def groups(self) -> dict[str, int]:
        """How many numbers of each group are trained."""
        found: Counter[str] = Counter()
        for name, (rows, columns) in self.shapes().items():
            found[group_of(name)] += rows * columns
        return dict(found)

    def cost(self) -> StageCost:
        """One batch and the step of the optimiser behind it, on one device."""
        session, memory = self.session, self.memory
        graph = session.factory.as_run(self.graph, session.backend.device_kind, train=True)
        runs = runs_of(graph, self.remat)
        calls = ((graph, 1), (gradient_sums(graph, session.backend.mesh), 1))
        found = cost(Work("train-step", calls, {"": memory.frozen + memory.state}), runs)
        passes = 2 if self.remat == "none" else 3  # through the weights
        read = passes * (memory.frozen + memory.streamed)
        alive, copied = memory.kept + memory.block, 2 * memory.streamed  # forward, and back
        return replace(found, activation_bytes=alive, read_bytes=read, streamed_bytes=copied)

    @cached_property
    def memory(self) -> TrainingMemory:
        """With as few of the blocks in the host's memory as it fits with, if any are to be."""
        return self._memory(self.streams_blocks)

    def _memory(self, moved: int) -> TrainingMemory:
        """moved: blocks whose weights the host keeps."""
        whole, sizes = training_memory(self.graph, self.remat, self.ema), pieces(self.graph)
        host = sum(sizes[piece] for piece in streamed(sizes, moved)) if moved else 0
        saved = saved_bytes(sizes, moved) if moved else 0
        return replace(whole, frozen=whole.frozen - saved, streamed=host)

    @cached_property
    def streams_blocks(self) -> int:
        """Number of blocks whose weights the host keeps: as few as fit, all if none is enough."""
        session = self.session
        may = session.options.memory == "auto" and "transformer" in session.factory.streams
        count = len(pieces(self.graph)) if may and self.remat != "none" else 0
        fitting = (n for n in range(count + 1) if self._memory(n).total <= self._free)
        return next(fitting, count)

    @cached_property
    def _free(self) -> int:
        """Bytes of the device that a step may take."""
        return self.session.backend.device().room_bytes(self.session.options.max_memory)

    def require_memory(self) -> None:
        """Raises InputError if the step has no room on any process's device."""
        self.session.backend.limit(self.session.options.max_memory)
        m, free, backend = self.memory, self._free, self.session.backend
        host = host_memory()[1] - (m.total if backend.device_kind == "cpu" else 0)  # the same there
        if backend.agree(m.streamed > host):
            raise InputError(
                f"no room in the host's memory: streamed blocks need {m.streamed / 1e9:.3g} GB, "
                f"{host / 1e9:.3g} GB are free; close other programs, or try --weights-dtype int8"
            )
        if backend.agree(m.total > free):
            ways = ["a smaller bucket"]
            ways += ["--remat block"] * (self.remat != "block") + ["--batch 1"] * (self.batch > 1)
            ways += ["--weights-dtype int8"] * (not self.session.options.weights_dtype)
            raise InputError(
                f"no room: a training step needs {m.total / 1e9:.3g} GB ({in_words(m)}), "
                f"{free / 1e9:.3g} GB are free; try {', '.join(ways)}, or more devices that share "
                "the weights: --mesh tensor=N"
            )

    def trainer(
        self,
        seed: int,
        optimiser: AdamW,
        others: Sequence[Step] = (),
        begin: Mapping[str, np.ndarray] | None = None,
        deterministic: bool = False,
    ) -> Trainer:
        """others: smaller steps, whose batches it also takes. begin: first values of adapters that
        are not drawn. Raises InputError if model and graph do not fit, or memory is short."""
        source = self.session.checkpoint.source("transformer")
        frozen = {name: spec for name, spec in self.graph.parameters().items() if MARK not in name}
        audit(frozen, source, source.where, partial=len(self.streams) < 2)
        for step in (self, *others):
            step.require_memory()
        arrays = {name: initial(name, shape, seed) for name, shape in self.shapes().items()}
        graphs = {step.shape: step.graph for step in (self, *others)}
        for name, x in (begin or {}).items():
            arrays[name][: len(x)] = x
        backend, moved, more = self.session.backend, self.streams_blocks, dict[str, Any]()
        if moved:
            more["streamed"] = streamed(pieces(self.graph), moved)
        weights = backend.load([self.graph], WithAdapters(source, arrays), **more)
        first, *rest = graphs.values()
        how = {"deterministic": deterministic}
        return backend.trainer(first, weights, optimiser, self.remat, rest, **how)


def in_words(m: TrainingMemory) -> str:
    moved = f" and {m.streamed / 1e9:.3g} in the host's memory" if m.streamed else ""
    return (
        f"weights {m.frozen / 1e9:.3g}{moved}, LoRA with gradients and moments "
        f"{m.state / 1e9:.3g}, kept for the backward pass {m.kept / 1e9:.3g}, one block "
        f"{m.block / 1e9:.3g}"
    )
