"""One checkpoint on one backend, for any number of requests.

Decides what outlives a request: graphs and programs by network and sizes (the least recently used
go first), weights by network and LoRAs, the contexts of the latest prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from operator import methodcaller
from typing import Any, TypeVar

import numpy as np

from ltx2rt.backend import Backend, Loop, Program, get_factory
from ltx2rt.config import ModelConfig
from ltx2rt.graph import Graph
from ltx2rt.models.catalog import network
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import profile_of
from ltx2rt.session.call import Call, WeightsKey
from ltx2rt.session.memory import Memory, Needing, kept
from ltx2rt.session.options import LoraSpec, ModelOptions
from ltx2rt.session.weights import WeightStore
from ltx2rt.weights.checkpoint import Checkpoint
from ltx2rt.weights.lora.file import Merge

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
MAX_PROGRAMS = 64  # a request of two stages with images and tiles of eight shapes has fewer than 20
MAX_SHARED = 128  # graphs that the sessions of a process share
MAX_CONTEXTS = 8  # contexts of prompts, 50 MB each at full size


@lru_cache(MAX_SHARED)
def traced(name: str, config: ModelConfig, sizes: Any, dtype: str) -> Graph:
    """The graph of a network of the catalog; sessions of one process share it."""
    return network(name).trace(config, sizes, dtype)


@lru_cache(MAX_SHARED)
def placed(graph: Graph, placement: Placement, rules: str, slots: int | None) -> Graph:
    """`graph` as one device runs it; with slots, the loop over so many steps."""
    if slots is None:
        return placement.local(graph, rules)
    return placement.loop(graph, slots)


class Session:
    """dtype: of everything but networks with one of their own, and but the weights that the option
    `weights_dtype` quantises."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        options: ModelOptions,
        dtype: str | None = None,
    ):
        self.checkpoint, self.backend, self.options = checkpoint, backend, options
        self.factory = get_factory(backend.name)
        self.asked = options  # before `Memory.require` changes how weights are kept
        self.config = checkpoint.config
        self.dtype = dtype or options.compute_dtype(
            "float32" if backend.device_kind == "cpu" else "bfloat16"
        )
        kind = self.factory.profile_key(backend.device())
        profile = profile_of(options.profile, kind, backend.mesh)
        self.placement = Placement(profile, backend.mesh, options.weights_dtype)
        self.weights = WeightStore(checkpoint, backend, options, self.dtype)
        # told of every program that is made
        self.building: Callable[[str], None] = lambda network: None
        self._graphs: OrderedDict[tuple[Any, ...], Graph] = OrderedDict()
        self._audited: OrderedDict[Hashable, list[Merge]] = OrderedDict()
        self._programs: OrderedDict[Hashable, Program | Loop] = OrderedDict()
        self._contexts: OrderedDict[Hashable, Any] = OrderedDict()
        self.memory = Memory(self)

    def adopt(self, planned: Session) -> None:
        """Share the graphs, costs and audits of a session with the same checkpoint and options, on
        any mesh."""
        self._graphs, self._audited = planned._graphs, planned._audited
        self.memory.known = planned.memory.known
        self.weights.adopt(planned.weights)

    def use_loras(self, loras: Sequence[LoraSpec]) -> None:
        """The user's LoRAs of the requests to come."""
        self.use(replace(self.asked, loras=tuple(loras)))

    def use(self, options: ModelOptions) -> None:
        """The options of the requests to come."""
        self.asked = self.options = self.weights.options = options

    def key(self, call: Call) -> tuple[Any, ...]:
        """Return the key of the call's graph and program. Calls with different LoRAs share one
        unless these change stored weights, or stay apart with other targets; so do sessions on
        different meshes if the network is not cut."""
        kept = self.weights.residence.keep_bytes if call.steps is not None else None
        stored = frozenset(self.weights.stored(call).items())
        cuts = self._placement(call).cuts(call.row.rules)
        return *call.program, stored, kept, self.weights.adapters(call), cuts

    def _placement(self, call: Call) -> Placement:
        placement = self.placement
        return placement.of(call.branches) if call.row.branches else placement.text

    def traced(self, call: Call, sizes: Any) -> Graph:
        """The graph of the call's network before it is placed."""
        with self.checkpoint.tracing():
            return traced(call.network, self.config, sizes, call.row.dtype or self.dtype)

    def graph(self, call: Call) -> Graph:
        """The call's graph as one device runs it; with steps, the loop over them."""
        return kept(self._graphs, self.key(call), lambda: self._graph(call), 2 * MAX_PROGRAMS)

    def _graph(self, call: Call) -> Graph:
        for part in call.row.parts:
            self.checkpoint.source(part)  # raises if it is absent, naming the flag that gives it
        placement = replace(
            self._placement(call),
            stored=self.weights.stored(call),
            keep_bytes=self.weights.residence.keep_bytes,
            adapters=self.weights.adapters(call),
        )
        sizes = call.row.shared(call.sizes, placement.sharing(call.row.rules))
        if call.steps is not None:
            sizes = replace(sizes, videos=sizes.videos // placement.mesh.get("data", 1))
        return placed(self.traced(call, sizes), placement, call.row.rules, call.slots)

    def program(self, call: Call) -> Any:
        """Return the call's program or loop, evicting the least recently used."""
        lower = self.backend.lower if call.steps is None else self.backend.lower_loop

        def make() -> Program | Loop:
            self.building(call.network)
            return lower(self.graph(call), self.options.layers, self.options.compile)

        release = methodcaller("release")
        return kept(self._programs, self.key(call), make, MAX_PROGRAMS, release)

    @contextmanager
    def compiling_ahead(self, stages: Sequence[Needing]) -> Iterator[None]:
        """Compile programs while earlier ones run; begin no more after an exception."""
        calls = {
            (self.key(call), call.each): call
            for stage in stages
            for call in stage.needs(self.config)
            if not self.weights.residence.number(call.weights)  # layers are separate programs
        }
        started = self.backend.compile_ahead(
            (self.program(call), call.each) for call in calls.values()
        )
        try:
            yield
        except BaseException:
            for one in started:
                one.cancel()
            raise

    def load(self, call: Call) -> Any:
        """The call's weights on the device."""
        return self.weights.of(call, self.graph(call))

    def run(self, call: Call, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs by name as device arrays."""
        weights = self.load(call)
        return self.program(call)(weights, feeds)

    def each(self, calls: Iterable[tuple[Call, Mapping[str, Any]]], output: str) -> Generator[Any]:
        """`output` of every call in order, on a device; all devices share the calls. On a process
        that is not the main one, None for each."""
        return self.backend.each(
            ((self.program(call), self.load(call), feeds) for call, feeds in calls), output
        )

    def denoise(
        self,
        call: Call,
        feeds: Mapping[str, Any],
        per_step: Mapping[str, np.ndarray],
        num_steps: int | None = None,
        start: int = 0,
    ) -> Iterator[dict[str, Any]]:
        """The step's outputs (videos, tokens, C) as device arrays after every step that the device
        has finished. feeds: the inputs that all steps share; per_step: the others, [steps, ...]
        each. num_steps: how many of the steps run, None: all; start: the first of them."""
        steps = len(per_step["sigmas"])
        loop, weights = self.program(call), self.load(call)
        slots = loop.graph.inputs["sigmas"].type.shape[0]
        filled = {
            n: np.pad(x, ((0, slots - steps), *[(0, 0)] * (x.ndim - 1)), mode="edge")
            for n, x in per_step.items()
        }
        return loop(weights, {**feeds, **filled}, min(steps, num_steps or steps), start)

    def remember(self, prompts: Hashable, encode: Callable[[], T]) -> T:
        """The result of `encode` for these prompts, encoded once."""
        return kept(self._contexts, prompts, encode, MAX_CONTEXTS)

    def leave(self, stage: Needing) -> None:
        """Free weights that the options keep on the device only while a stage needs them."""
        self.weights.free(*self.left(stage))

    def left(self, stage: Needing) -> list[WeightsKey]:
        """Weights that leave the device after the stage."""
        kept = self.weights.residence
        calls = stage.needs(self.config) if kept.offload else ()
        encoder = [call.weights for call in calls if call.network == "text-encoder"]
        return list(dict.fromkeys([*encoder, *kept.leave.get(stage.name, ())]))

    def close(self) -> None:
        """Free everything that is on the device."""
        self.release_programs()
        for held in (self._programs, self._graphs, self.memory.known, self._contexts):
            held.clear()
        self.weights.close()

    def audit(self, stages: Sequence[Needing]) -> dict[str, list[Merge]]:
        """Compare every network that the stages call with the checkpoint, and every LoRA with both.
        Returns what LoRAs will merge, by stage and in their order. Raises InputError."""
        found = {}
        for stage in stages:
            for call in stage.needs(self.config):
                key, graph = (self.key(call), call.weights), self.graph(call)
                audit = partial(self.weights.audit, call, graph)
                merges = kept(self._audited, key, audit, 2 * MAX_PROGRAMS)
                if call.loras:
                    found[stage.name] = merges
        return found

    def as_run(self, graph: Graph, steps: bool = False) -> Graph:
        """`BackendFactory.as_run` of a placed graph on the session's devices."""
        how = {"steps": steps, "compile": self.options.compile}
        return self.factory.as_run(graph, self.backend.device_kind, **how)

    def release_programs(self) -> None:
        """Release programs; they are lowered and recorded again at their next use."""
        for program in self._programs.values():
            program.release()
        self.backend.trim(recorded=True)
