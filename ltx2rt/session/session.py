"""One checkpoint on one backend, for any number of requests.

Decides what outlives a request: graphs and programs by network and sizes (the least recently used
go first), weights by network and LoRAs, the contexts of the latest prompts. What is called in which
order is the stages' business, what stages there are the pipelines'.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any, Protocol, TypeVar

import numpy as np

from ltx2rt.backend import Backend, Loop, Program, get_factory
from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.graph import Graph
from ltx2rt.graph.encodings import ADVISED
from ltx2rt.models.catalog import network
from ltx2rt.passes.loop import taken_apart
from ltx2rt.placement.cost import touched_bytes, weight_bytes
from ltx2rt.placement.devices import DeviceKind, host_memory, pins_memory
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.plan import StageCost, Work, beside_recorded, cost, peak
from ltx2rt.placement.profiles import profile_of
from ltx2rt.placement.stream import FILE, PINNED, STAGED, pieces, road, saved_bytes, streamed
from ltx2rt.session.call import Call, WeightsKey, network_of
from ltx2rt.session.options import LoraSpec, ModelOptions
from ltx2rt.session.weights import Residence, WeightStore
from ltx2rt.weights.checkpoint import Checkpoint
from ltx2rt.weights.lora import Merge

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
MAX_PROGRAMS = 64  # a request of two stages with images and tiles of eight shapes has fewer than 20
MAX_CONTEXTS = 8  # contexts of prompts, 50 MB each at full size


FROM = {  # where streamed layers are, by their road
    PINNED: "host memory",
    STAGED: "host memory, staged: this system pins little",
    FILE: "the disk: memory has no room",
}
Way = tuple[ModelOptions, Residence]  # how weights are kept


class Needing(Protocol):
    """The part of a stage that a session needs to say what it costs."""

    name: str

    def needs(self, model: ModelConfig) -> Iterator[Call]: ...


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
        self.asked = options  # before `require_memory` changes how weights are kept
        self.config = checkpoint.config
        self.dtype = dtype or options.compute_dtype(
            "float32" if backend.device_kind == "cpu" else "bfloat16"
        )
        kind = self.factory.profile_key(backend.device())
        profile = profile_of(options.profile, kind, backend.mesh)
        self.placement = Placement(profile, backend.mesh, options.weights_dtype)
        self.weights = WeightStore(checkpoint, backend, options, self.dtype)
        self.building: Callable[[str], None] = lambda network: (
            None
        )  # told of every program that is made
        self._graphs: OrderedDict[tuple[Any, ...], Graph] = OrderedDict()
        self._costs: OrderedDict[Hashable, StageCost] = OrderedDict()
        self._programs: OrderedDict[Hashable, Program | Loop] = OrderedDict()
        self._contexts: OrderedDict[Hashable, Any] = OrderedDict()
        self._sets: dict[WeightsKey, Graph] = {}  # a graph that reads each set

    def adopt(self, planned: Session) -> None:
        """Take over the graphs and costs of a session of the same checkpoint and options on as many
        devices, of another mesh those graphs that do not depend on it."""
        if planned.backend.mesh == self.backend.mesh:
            self._graphs, self._costs = planned._graphs, planned._costs
        else:
            alike = {
                key: graph for key, graph in planned._graphs.items() if not network(key[0]).branches
            }
            self._graphs.update(alike)

    def use_loras(self, loras: Sequence[LoraSpec]) -> None:
        """The user's LoRAs of the requests to come."""
        self.use(replace(self.asked, loras=tuple(loras)))

    def use(self, options: ModelOptions) -> None:
        """The options of the requests to come."""
        self.asked = self.options = self.weights.options = options

    # --- graphs, programs, weights ----------------------------------------------------------------

    def key(self, call: Call) -> tuple[Any, ...]:
        """The key of the call's graph and program: calls that differ in times or who makes them
        share one, and those that differ in LoRAs unless these change what is kept as it is
        stored, or stay apart from the weights with other targets."""
        kept = self.weights.residence.keep_bytes if call.steps is not None else None
        stored = frozenset(self.weights.stored(call))
        return *call.program, stored, kept, self.weights.adapters(call)

    def graph(self, call: Call) -> Graph:
        """The call's graph as one device runs it; with steps, the loop over them."""
        return _kept(self._graphs, self.key(call), lambda: self._graph(call), 2 * MAX_PROGRAMS)

    def _graph(self, call: Call) -> Graph:
        row, sizes = call.row, call.sizes
        for part in row.parts:
            self.checkpoint.source(part)  # raises if it is absent, naming the flag that gives it
        placement = self.placement.of(row.branches(sizes)) if row.branches else self.placement.text
        kept = self.weights.residence.keep_bytes
        placement = replace(placement, stored=self.weights.stored(call), keep_bytes=kept)
        placement = replace(placement, adapters=self.weights.adapters(call))
        if call.steps is not None:
            sizes = replace(sizes, videos=sizes.videos // placement.mesh.get("data", 1))
        with self.checkpoint.tracing():
            graph = row.trace(self.config, sizes, row.dtype or self.dtype)
        if call.slots is None:
            return placement.local(graph, row.rules)
        return placement.loop(graph, call.slots)

    def program(self, call: Call) -> Any:
        """The call's program, or its loop; what was not used for long is let go."""
        lower = self.backend.lower if call.steps is None else self.backend.lower_loop

        def make() -> Program | Loop:
            self.building(call.network)
            return lower(self.graph(call), self.options.layers, self.options.compile)

        return _kept(
            self._programs, self.key(call), make, MAX_PROGRAMS, lambda program: program.release()
        )

    @contextmanager
    def compiling_ahead(self, stages: Sequence[Needing]) -> Iterator[None]:
        """Programs that the stages call are compiled while earlier ones run; no more are begun
        after an exception."""
        calls = {
            (self.key(call), call.each): call
            for stage in stages
            for call in stage.needs(self.config)
            if not self.weights.residence.number(call.weights)  # layers are programs of their own
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

    def each(self, calls: Iterable[tuple[Call, Mapping[str, Any]]], output: str) -> Iterator[Any]:
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
    ) -> Iterator[dict[str, Any]]:
        """The step's outputs (videos, tokens, C) as device arrays after every step that the device
        has finished.

        feeds: the step's inputs but those of which every step has its own; per_step: these, [steps,
        ...] each. num_steps: how many of the steps run, None: all.
        """
        steps = len(per_step["sigmas"])
        loop, weights = self.program(call), self.load(call)
        slots = loop.graph.inputs["sigmas"].type.shape[0]
        filled = {
            n: np.pad(x, ((0, slots - steps), *[(0, 0)] * (x.ndim - 1)), mode="edge")
            for n, x in per_step.items()
        }
        return loop(weights, {**feeds, **filled}, min(steps, num_steps or steps))

    def remember(self, prompts: Hashable, encode: Callable[[], T]) -> T:
        """The result of `encode` for these prompts, encoded once."""
        return _kept(self._contexts, prompts, encode, MAX_CONTEXTS)

    def leave(self, stage: Needing) -> None:
        """Free what the options keep on the device only while a stage needs it."""
        self.weights.free(*self._left(stage))

    def _left(self, stage: Needing) -> list[WeightsKey]:
        kept = self.weights.residence
        calls = stage.needs(self.config) if kept.offload else ()
        encoder = [call.weights for call in calls if call.network == "text-encoder"]
        return list(dict.fromkeys([*encoder, *kept.leave.get(stage.name, ())]))

    def close(self) -> None:
        """Let go of everything that is on the device."""
        self._release()
        for kept in (self._programs, self._graphs, self._costs, self._contexts):
            kept.clear()
        self.weights.close()

    # --- before a run: headers and sizes alone ----------------------------------------------------

    def audit(self, stages: Sequence[Needing]) -> dict[str, list[Merge]]:
        """Compare every network that the stages call with the checkpoint, and every LoRA with both.

        Returns what LoRAs will merge, by stage and in their order. Raises InputError.
        """
        audited: dict[WeightsKey, list[Merge]] = {}
        found = {}
        for stage in stages:
            for call in stage.needs(self.config):
                if call.weights not in audited:
                    audited[call.weights] = self.weights.audit(call, self.graph(call))
                if call.loras:
                    found[stage.name] = audited[call.weights]
        return found

    def costs(
        self,
        stages: Sequence[Needing],
        held: Mapping[WeightsKey, int] | None = None,
        recorded_bytes: int = 0,
    ) -> list[StageCost]:
        """Costs of each stage that calls networks on the busiest device. held: sets of weights that
        are there before, with their bytes; recorded_bytes: what recorded steps keep there, which is
        not counted."""
        found, here = [], dict(held or {})
        for stage, part, calls in self._rows(stages):
            spread = [
                call for call in calls if call.each
            ]  # as if one device had the largest, and no fewer than others
            spread.sort(key=lambda c: -sum(v.type.nbytes for v in self.graph(c).outputs.values()))
            calls = [c for c in calls if not c.each] + spread[:: prod(self.backend.mesh.values())]
            for call in calls:
                self._hold(here, call)
            copied = sum(self._streamed_bytes(call) * call.times for call in calls)
            key = (stage.name, tuple((self.key(call), call.times, call.steps) for call in calls))
            made = _kept(
                self._costs, key, lambda s=stage, c=calls: self._cost(s.name, c), 2 * MAX_PROGRAMS
            )
            made = replace(made, part=part, streamed_bytes=copied)
            found.append(replace(made, weights_bytes=sum(here.values())))
            for left in self._left(stage):
                here.pop(left, None)
        recorded = self.backend.device_kind in self.factory.recorded
        return beside_recorded(found, recorded_bytes) if recorded else found

    def _rows(self, stages: Sequence[Needing]) -> Iterator[tuple[Needing, str, list[Call]]]:
        """Stages that call networks, each with its calls; of a stage with several loops each loop,
        named by its branches."""
        for stage in stages:
            calls = list(stage.needs(self.config))
            if len([call for call in calls if call.steps is not None]) < 2:
                yield from [(stage, "", calls)] if calls else []
                continue
            for call in calls:
                count = call.row.branches(call.sizes) if call.row.branches else 1
                yield stage, f"{count} branches" if count > 1 else "one branch", [call]

    def _hold(self, here: dict[WeightsKey, int], call: Call) -> None:
        """Enter the call's set: whole, or what it does not share with another set of its
        network."""
        siblings = [key for key in here if network_of(key) == network_of(call.weights)]
        if call.weights in here:
            return
        if self.weights.residence.reload:
            for key in siblings:
                del here[key]
            siblings = []
        graph = self.graph(call)
        if number := self.weights.residence.number(call.weights):
            here[call.weights] = weight_bytes([graph]) - saved_bytes(pieces(graph), number)
            return
        siblings = [key for key in siblings if self.weights.comparable(key, call.weights)]
        changed = {key: self.weights.changed(call, key[1]) for key in siblings}
        near = min(siblings, key=lambda key: len(changed[key]), default=None)
        here[call.weights] = (
            weight_bytes([graph])
            if near is None
            else touched_bytes(graph, changed[near], self._sets.get(near))
        )
        self._sets[call.weights] = graph

    def _streamed_bytes(self, call: Call) -> int:
        """Bytes that one run of the call, or one of its steps, copies to the device."""
        number = self.weights.residence.number(call.weights)
        sizes = pieces(self.graph(call)) if number else {}
        return sum(sizes[piece] for piece in streamed(sizes, number))

    def _cost(self, name: str, calls: Sequence[Call]) -> StageCost:
        loops = [
            taken_apart(self.as_run(self.graph(c), steps=True))
            for c in calls
            if c.steps is not None
        ]
        runs: dict[Hashable, tuple[Graph, int]] = {}
        for call in calls:
            graph, times = (
                self.as_run(self.graph(call)) if call.steps is None else loops[0].body,
                call.times,
            )
            runs[self.key(call)] = (graph, runs.get(self.key(call), (graph, 0))[1] + times)
        steps = max((call.steps or 1 for call in calls), default=1)
        return cost(Work(name, tuple(runs.values()), {}, steps, loops[0].before if loops else None))

    def as_run(self, graph: Graph, steps: bool = False) -> Graph:
        """`BackendFactory.as_run` of a placed graph on the session's devices."""
        return self.factory.as_run(graph, self.backend.device_kind, steps, self.options.compile)

    def require_memory(self, stages: Sequence[Needing], warm: bool = False) -> None:
        """Make room for a run: first what recorded steps keep, then sets of earlier requests are
        let go, the least recently used first, until it fits. Under `--memory auto` weights are kept
        less and less on the device until it does.

        warm: every set that the run loads is there from its start on. Raises InputError if it does
        not fit an empty device either.
        """
        self.backend.limit(self.options.max_memory)
        tried: dict[str, Any] = {}

        def fits(way: Way) -> bool:
            tried["worst"], tried["budget"], tried["held"] = self._tried(way, stages, warm)
            full = tried["worst"].peak_bytes > tried["budget"]
            several = self.backend.num_processes > 1 and self.backend.runs
            return not (
                self.backend.agree(full) if several else full
            )  # all processes keep weights alike

        if not self._choose(stages, fits):
            raise self._no_room(stages, warm, tried["worst"], tried["budget"])
        self.weights.free(*(key for key in self.weights.held if key not in tried["held"]))
        self.choose_road(stages)

    def fit(self, stages: Sequence[Needing], budget: int, warm: bool = False) -> bool:
        """Keep weights in the fastest way in which an empty device with so much memory runs the
        stages, else in the one that needs the least. Whether it fits."""

        def fits(way: Way) -> bool:
            self._keep(way)
            return peak((self.warm_costs if warm else self.costs)(stages)).peak_bytes <= budget

        return self._choose(stages, fits)

    def _choose(self, stages: Sequence[Needing], fits: Callable[[Way], bool]) -> bool:
        """Try the ways in their order; of those that stream the transformer, by halving. Whether
        one fits."""
        for streams, group in groupby(list(self._ways(stages)), lambda way: _streams(way[1])):
            ways = list(group)
            if not streams and any(map(fits, ways)):
                return True
            if streams and fits(ways[min(bisect_left(ways, True, key=fits), len(ways) - 1)]):
                return True
        return False

    def reload_s(self, stages: Sequence[Needing], kind: DeviceKind) -> float:
        """Seconds of a request in which its steps wait for weights that are streamed, and sets are
        loaded that do not stay on the device, at the rate of the link to the host."""
        return sum(c.steps * c.waits_s(kind) for c in self.costs(stages)) + self.load_s(
            stages, kind
        )

    def load_s(self, stages: Sequence[Needing], kind: DeviceKind) -> float:
        """Seconds in which a request loads the parts of sets that do not stay on the device."""
        calls = {call.weights: call for stage in stages for call in stage.needs(self.config)}
        if not self.weights.residence.reload:
            calls = {left: calls[left] for stage in stages for left in self._left(stage)}
        loaded = sum(
            weight_bytes([self.graph(call)]) - self._streamed_bytes(call) for call in calls.values()
        )
        return loaded / kind.host_bytes_per_s

    @property
    def memory_mode(self) -> str:
        """How weights are kept: resident, reloaded for each stage, or streamed."""
        if self.weights.residence.streams:
            return "streamed"
        return "reload" if self.weights.residence.reload else "resident"

    def memory_line(self, stages: Sequence[Needing]) -> str:
        """One line about weights that do not stay on the device; empty if all do."""
        said = []
        if self.weights.residence.reload:
            said.append("weights are freed once they are used")
        networks = {network_of(c.weights): c for stage in stages for c in stage.needs(self.config)}
        if any(map(self.weights.packed, networks.values())):
            when = {None: "in every step", "bfloat16": "once, while they are loaded"}
            if when := when.get(self.options.weights_dtype):
                said.append(f"weights that are stored in fewer bits are decoded {when}")
        if self.weights.residence.keep_bytes is not None:
            said.append("keys and values of prompts are computed in every step")
        for name, number in self.weights.residence.streams.items():
            sizes = pieces(self.graph(networks[name]))
            moved = streamed(sizes, number)
            size = sum(sizes[piece] for piece in moved) / 1e9
            said.append(
                f"{len(moved)} of {len(sizes)} layers of the {name} ({size:.3g} GB) come from "
                f"{FROM[self.weights.residence.road]}"
            )
        return "memory: " + "; ".join(said) if said else ""

    def _keep(self, way: Way) -> None:
        self.options, self.weights.residence = way
        self.weights.options = self.options

    def choose_road(self, stages: Sequence[Needing]) -> None:
        """Decide how the streamed weights that a run loads reach the device, by what the host's
        memory has room for. Of a host that is not here it is taken for granted."""
        store, most = self.weights, self.options.host_memory
        calls = {call.weights: call for stage in stages for call in stage.needs(self.config)}
        here = {key for key, call in calls.items() if store.has(key, self.graph(call))}
        sizes = [self._streamed_bytes(call) for key, call in calls.items() if key not in here]
        size = max(sizes, default=0) * prod(self.backend.mesh.values())
        size //= self.backend.device().hosts
        if not size:
            found = next((store.roads[key] for key in here & store.roads.keys()), PINNED)
        elif most is not None and size > most * 1e9:
            found = FILE
        elif self.backend.runs and self.backend.device_kind != "cpu":
            found = road(size, *host_memory(), pins_memory())
        elif self.backend.runs and most is None:
            found = FILE  # a CPU's memory is the host's, and streamed layers had no room in it
        else:
            found = PINNED
        self.weights.residence = replace(self.weights.residence, road=found)

    def _ways(self, stages: Sequence[Needing]) -> Iterator[Way]:
        """How weights can be kept, from the fastest way to the one that needs the least memory.

        As the options say, decoded where they are stored in few bits: decoding them in every step
        costs time (docs/gpus.md has an H200's). Then as they are stored; then freed once they are
        used; then with the text encoder streamed, and with more and more of the transformer; then
        all of that with nothing that blocks compute once for all steps kept.
        """
        self._keep((self.asked, Residence()))
        calls = [(stage.name, call) for stage in stages for call in stage.needs(self.config)]
        undecided = self.asked.weights_dtype is None and self.backend.device_kind != "cpu"
        if undecided and any(self.weights.packed(call) for _, call in calls):
            yield replace(self.asked, weights_dtype="bfloat16"), Residence()
        yield self.asked, Residence()
        if self.asked.memory == "resident":
            return
        last = {call.weights: name for name, call in calls}
        leave = {
            name: tuple(key for key in last if last[key] == name) for name in set(last.values())
        }
        yield self.asked, Residence(offload=True)
        streams, number = {}, 0  # number: the transformer's layers, at most
        if self.asked.layers != "unrolled":
            networks = {network_of(c.weights): c for _, c in calls}
            sizes = {
                n: len(pieces(self.graph(networks[n])))
                for n in self.factory.streams
                if n in networks
            }
            streams = {name: sizes[name] for name in ("text-encoder",) if sizes.get(name)}
            number = sizes.get("transformer", 0)
        keeps = any(self._keeps(call) for _, call in calls)
        for keep_bytes in (None, 0) if keeps else (None,):
            tight = Residence({}, leave, keep_bytes, offload=True, reload=True)
            yield self.asked, tight
            if streams:
                yield self.asked, replace(tight, streams=streams)
            for moved in range(1, number + 1):
                yield self.asked, replace(tight, streams={**streams, "transformer": moved})

    def _keeps(self, call: Call) -> bool:
        """Whether blocks compute something of the call once for all steps."""
        return call.steps is not None and bool(taken_apart(self.graph(call)).before.repeats)

    def _tried(
        self, way: Way, stages: Sequence[Needing], warm: bool
    ) -> tuple[StageCost, int, Mapping[WeightsKey, int]]:
        """The stage that needs the most memory, what there is for it, and which sets can stay."""
        self._keep(way)
        held = self._held()
        worst, budget = self._worst(stages, held, warm)
        if worst.peak_bytes > budget and self.backend.device().recorded_bytes:
            self._release()
            worst, budget = self._worst(stages, held, warm)
        used = {call.weights for stage in stages for call in stage.needs(self.config)}
        for key in [*(k for k in held if k not in used), *(k for k in held if k in used)]:
            if worst.peak_bytes <= budget:
                break
            del held[key]
            worst, budget = self._worst(stages, held, warm)
        return worst, budget, held

    def _worst(
        self, stages: Sequence[Needing], held: Mapping[WeightsKey, int], warm: bool
    ) -> tuple[StageCost, int]:
        """The stage that needs the most memory, with the sets `held` there, and what there is for
        it."""
        device = self.backend.device()
        costs = (self.warm_costs if warm else self.costs)(stages, held, device.recorded_bytes)
        return peak(costs), device.room_bytes(self.options.max_memory, self.weights.held_bytes)

    def _release(self) -> None:
        """Programs are lowered, and recorded, anew at their next use."""
        for program in self._programs.values():
            program.release()
        self.backend.trim(recorded=True)

    def _held(self) -> dict[WeightsKey, int]:
        """Bytes by set on one device, what an earlier set has too not counted again."""
        seen, found = set(), {}
        for key, held in self.weights.held.items():
            tensors = held.tensors()
            found[key] = sum(size for tensor, size in tensors.items() if tensor not in seen)
            seen |= tensors.keys()
        return found

    def warm_costs(
        self,
        stages: Sequence[Needing],
        held: Mapping[WeightsKey, int] | None = None,
        recorded_bytes: int = 0,
    ) -> list[StageCost]:
        """For a second run in a row: what the first has left on the device is there from the start
        on."""
        after = dict(held or {})
        for stage in stages:
            for call in stage.needs(self.config):
                self._hold(after, call)
            for left in self._left(stage):
                after.pop(left, None)
        return self.costs(stages, after, recorded_bytes)

    def advice(
        self, stages: Sequence[Needing], budget: int, worst: StageCost, warm: bool = False
    ) -> str:
        """Advice where a run needs more than `budget` bytes; flags are named if they make it fit.

        worst: the stage that needs the most.
        """
        tries: list[tuple[str, dict[str, Any]]] = []
        if self.asked.memory == "resident":
            tries += [("--memory auto", {"memory": "auto"})]
        if self.asked.weights_dtype != ADVISED:
            tries += [(f"--weights-dtype {ADVISED}", {"weights_dtype": ADVISED})]
        advice = (
            ["more devices"]
            if worst.name == "text"
            else ["more devices", "fewer frames or a smaller size"]
        )
        for words, changed in tries:
            smaller = Session(
                self.checkpoint, self.backend, replace(self.asked, **changed), self.dtype
            )
            if smaller.fit(stages, budget, warm):
                advice.insert(0, words)
                break
        return " or ".join(advice)

    def _no_room(
        self, stages: Sequence[Needing], warm: bool, worst: StageCost, budget: int
    ) -> InputError:
        return InputError(
            f"no room on {self.backend.device().name}: {worst.name} needs "
            f"{worst.peak_bytes / 1e9:.3g} GB ({worst.weights_bytes / 1e9:.3g} weights, "
            f"{worst.activation_bytes / 1e9:.3g} activations), {budget / 1e9:.3g} GB are free; "
            f"try {self.advice(stages, budget, worst, warm)}"
        )


def _streams(residence: Residence) -> bool:
    """Whether a part of the transformer is streamed."""
    return bool(residence.streams.get("transformer"))


def _kept(
    kept: OrderedDict[K, T],
    key: K,
    make: Callable[[], T],
    most: int,
    release: Callable[[T], None] = lambda _: None,
) -> T:
    """kept[key], made on first use; of more than `most` the least recently used are released."""
    if key not in kept:
        kept[key] = make()
        while len(kept) > most:
            release(kept.popitem(last=False)[1])
    kept.move_to_end(key)
    return kept[key]
