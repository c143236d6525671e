"""Keep a session's weights when the device is too small for them, and cost its stages: `plan`, the
check before a run, and advice in an error read the same costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import proxy

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.graph import Graph
from ltx2rt.graph.encodings import ADVISED
from ltx2rt.passes.loop import taken_apart
from ltx2rt.placement.cost import touched_bytes, weight_bytes
from ltx2rt.placement.devices import DeviceKind, host_memory, pins_memory
from ltx2rt.placement.plan import StageCost, Work, beside_recorded, cost, peak
from ltx2rt.placement.stream import FILE, PINNED, STAGED, pieces, road, saved_bytes, streamed
from ltx2rt.session.call import Call, WeightsKey, network_of
from ltx2rt.session.options import ModelOptions
from ltx2rt.session.weights import Residence

if TYPE_CHECKING:
    from ltx2rt.session.session import Session

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
MAX_COSTS = 128


FROM = {  # where streamed layers are, by their road
    PINNED: "host memory",
    STAGED: "host memory, staged: this system pins little",
    FILE: "the disk: memory has no room",
}
Way = tuple[ModelOptions, Residence]  # how weights are kept


class Needing(Protocol):
    """The part of a stage that a session needs to cost it."""

    name: str

    def needs(self, model: ModelConfig) -> Iterator[Call]: ...
    def holds(self, model: ModelConfig) -> int: ...
    def within(self, session: Session) -> Needing: ...


class Memory:
    """Plans a session's memory: how weights are kept, and the costs of stages. known: costs that
    were computed before."""

    def __init__(self, session: Session):
        self.session: Session = proxy(session)  # no cycle: an unused session is freed at once
        self.known: OrderedDict[Hashable, StageCost] = OrderedDict()
        self._sets: dict[WeightsKey, Graph] = {}  # a graph that reads each set

    def costs(
        self,
        stages: Sequence[Needing],
        held: Mapping[WeightsKey, int] | None = None,
        recorded_bytes: int = 0,
        warm: bool = False,
    ) -> list[StageCost]:
        """Costs of each stage that calls networks on the busiest device. held: bytes of sets that
        are there before; recorded_bytes: what recorded steps keep, uncounted. warm: of a second run
        in a row."""
        session, found, here = self.session, [], dict(held or {})
        for stage in stages if warm else ():
            for call in stage.needs(session.config):
                self._hold(here, call)
            for left in session.left(stage):
                here.pop(left, None)
        for stage, part, calls in self._rows(stages):
            # as if one device had the largest, and no fewer than others
            spread = [call for call in calls if call.each]
            spread.sort(
                key=lambda c: -sum(v.type.nbytes for v in session.graph(c).outputs.values())
            )
            calls = [c for c in calls if not c.each] + spread[
                :: prod(session.backend.mesh.values())
            ]
            for call in calls:
                self._hold(here, call)
            copied = sum(map(self._streamed_bytes, calls))
            key = stage.name, tuple((session.key(call), call.steps) for call in calls)
            made = kept(self.known, key, lambda s=stage, c=calls: self._cost(s.name, c), MAX_COSTS)
            alive = made.activation_bytes + stage.holds(session.config)
            made = replace(made, part=part, streamed_bytes=copied, activation_bytes=alive)
            found.append(replace(made, weights_bytes=sum(here.values())))
            for left in session.left(stage):
                here.pop(left, None)
        recorded = session.backend.device_kind in session.factory.recorded
        return beside_recorded(found, recorded_bytes) if recorded else found

    def _rows(self, stages: Sequence[Needing]) -> Iterator[tuple[Needing, str, list[Call]]]:
        """Stages and their calls; a stage with several loops has a row for each, by branches."""
        for stage in stages:
            calls = list(stage.needs(self.session.config))
            if len([call for call in calls if call.steps is not None]) < 2:
                yield from [(stage, "", calls)] if calls else []
                continue
            for call in calls:
                count = call.branches
                yield stage, f"{count} branches" if count > 1 else "one branch", [call]

    def _hold(self, here: dict[WeightsKey, int], call: Call) -> None:
        """Enter the call's set: whole, or the tensors that no other set of its network has."""
        weights = self.session.weights
        siblings = [key for key in here if network_of(key) == network_of(call.weights)]
        if call.weights in here:
            return
        if weights.residence.reload:
            for key in siblings:
                del here[key]
            siblings = []
        graph = self.session.graph(call)
        if number := weights.residence.number(call.weights):
            here[call.weights] = weight_bytes([graph]) - saved_bytes(pieces(graph), number)
            return
        siblings = [key for key in siblings if weights.comparable(key, call.weights)]
        changed = {key: weights.changed(call, key[1]) for key in siblings}
        near = min(siblings, key=lambda key: len(changed[key]), default=None)
        here[call.weights] = (
            weight_bytes([graph])
            if near is None
            else touched_bytes(graph, changed[near], self._sets.get(near))
        )
        self._sets[call.weights] = graph

    def _streamed_bytes(self, call: Call) -> int:
        """Bytes that one run of the call, or one of its steps, copies to the device."""
        number = self.session.weights.residence.number(call.weights)
        sizes = pieces(self.session.graph(call)) if number else {}
        return sum(sizes[piece] for piece in streamed(sizes, number))

    def _cost(self, name: str, calls: Sequence[Call]) -> StageCost:
        looped = (self.session.graph(call) for call in calls if call.steps is not None)
        loops = [taken_apart(self.session.as_run(graph, steps=True)) for graph in looped]
        runs: dict[Hashable, tuple[Graph, int]] = {}
        for call in calls:
            graph = (
                self.session.as_run(self.session.graph(call))
                if call.steps is None
                else loops[0].body
            )
            _, before = runs.get(key := self.session.key(call), (graph, 0))
            runs[key] = graph, before + 1
        steps = max((call.steps or 1 for call in calls), default=1)
        return cost(Work(name, tuple(runs.values()), {}, steps, loops[0].before if loops else None))

    def require(self, stages: Sequence[Needing], warm: bool = False) -> None:
        """Make room for a run: free recorded steps' memory, then sets of earlier requests, the
        least recently used first; under `--memory auto` keep weights less and less on the device.
        warm: every set that the run loads is there from its start on. Raises InputError if it does
        not fit an empty device either."""
        self.session.backend.limit(self.session.options.max_memory)
        self.session.backend.attend_by(self.session.options.attention, self.session.dtype)
        tried: dict[str, Any] = {}

        def fits(way: Way) -> bool:
            tried["worst"], tried["budget"], tried["held"] = self._tried(way, stages, warm)
            full = tried["worst"].peak_bytes > tried["budget"]
            several = self.session.backend.num_processes > 1 and self.session.backend.runs
            # all processes keep weights alike
            return not (self.session.backend.agree(full) if several else full)

        if not self._choose(stages, fits):
            worst, budget = tried["worst"], tried["budget"]
            raise InputError(
                f"no room on {self.session.backend.device().name}: {worst.name} needs "
                f"{worst.peak_bytes / 1e9:.3g} GB ({worst.weights_bytes / 1e9:.3g} weights, "
                f"{worst.activation_bytes / 1e9:.3g} activations), {budget / 1e9:.3g} GB are free; "
                f"try {self.advice(stages, budget, worst, warm)}"
            )
        self.session.weights.free(
            *(key for key in self.session.weights.held if key not in tried["held"])
        )
        self.choose_road(stages)

    def fit(self, stages: Sequence[Needing], budget: int, warm: bool = False) -> bool:
        """Keep weights in the fastest way in which an empty device with so much memory runs the
        stages, else in the one that needs the least. Returns whether it fits."""

        def fits(way: Way) -> bool:
            self._keep(way)
            return peak(self.costs(stages, warm=warm)).peak_bytes <= budget

        return self._choose(stages, fits)

    def _choose(self, stages: Sequence[Needing], fits: Callable[[Way], bool]) -> bool:
        """Try each way; return whether one fits. Ways that stream the transformer are bisected."""
        every = list(self._ways(stages))
        for streams, group in groupby(every, lambda way: "transformer" in way[1].streams):
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
        calls = {
            call.weights: call for stage in stages for call in stage.needs(self.session.config)
        }
        if not self.session.weights.residence.reload:
            calls = {left: calls[left] for stage in stages for left in self.session.left(stage)}
        loaded = sum(
            weight_bytes([self.session.graph(call)]) - self._streamed_bytes(call)
            for call in calls.values()
        )
        return loaded / kind.host_bytes_per_s

    def request_s(self, stages: Sequence[Needing], kind: DeviceKind) -> float:
        """Seconds of a whole request."""
        steps_s = sum(c.steps * c.time_s(kind) for c in self.costs(stages))
        return steps_s + self.outside_s(stages, kind)

    def outside_s(self, stages: Sequence[Needing], kind: DeviceKind) -> float:
        """Seconds of a request outside of its stages: loads of sets, and the host's work."""
        found = self.load_s(stages, kind)
        if host := kind.sustained:
            freed = self.session.weights.residence.reload * len(self.costs(stages))
            found += host.request_s + freed * host.reload_s
        return found

    @property
    def mode(self) -> str:
        """The way weights are kept: resident, reloaded for each stage, or streamed."""
        if self.session.weights.residence.streams:
            return "streamed"
        return "reload" if self.session.weights.residence.reload else "resident"

    def line(self, stages: Sequence[Needing]) -> str:
        """One line about weights that do not stay on the device; empty if all do."""
        kept = self.session.weights.residence
        said = []
        if kept.reload:
            said.append("weights are freed once they are used")
        networks = {
            network_of(c.weights): c for stage in stages for c in stage.needs(self.session.config)
        }
        if any(map(self.session.weights.packed, networks.values())):
            when = {None: "in every step", "bfloat16": "once, while they are loaded"}
            if when := when.get(self.session.options.weights_dtype):
                said.append(f"weights that are stored in fewer bits are decoded {when}")
        if kept.keep_bytes is not None:
            said.append("keys and values of prompts are computed in every step")
        for name, number in kept.streams.items():
            sizes = pieces(self.session.graph(networks[name]))
            moved = streamed(sizes, number)
            size = sum(sizes[piece] for piece in moved) / 1e9
            said.append(
                f"{len(moved)} of {len(sizes)} layers of the {name} ({size:.3g} GB) come from "
                f"{FROM[kept.road]}"
            )
        return "memory: " + "; ".join(said) if said else ""

    def _keep(self, way: Way) -> None:
        self.session.options, self.session.weights.residence = way
        self.session.weights.options = self.session.options

    def choose_road(self, stages: Sequence[Needing]) -> None:
        """Decide how the streamed weights that a run loads reach the device, by the room in the
        host's memory. An absent host is assumed to have enough."""
        store, most = self.session.weights, self.session.options.host_memory
        calls = {
            call.weights: call for stage in stages for call in stage.needs(self.session.config)
        }
        here = {key for key, call in calls.items() if store.has(key, self.session.graph(call))}
        sizes = [self._streamed_bytes(call) for key, call in calls.items() if key not in here]
        size = store.everywhere(max(sizes, default=0))
        if not size:
            found = next((store.roads[key] for key in here & store.roads.keys()), PINNED)
        elif most is not None and size > most * 1e9:
            found = FILE
        elif self.session.backend.runs and self.session.backend.device_kind != "cpu":
            found = road(size, *host_memory(), pins_memory())
        elif self.session.backend.runs and most is None:
            found = FILE  # a CPU's memory is the host's, and streamed layers had no room in it
        else:
            found = PINNED
        self.session.weights.residence = replace(self.session.weights.residence, road=found)

    def _ways(self, stages: Sequence[Needing]) -> Iterator[Way]:
        """Ways to keep weights, from the fastest to the one that needs the least memory: decoded
        where they are stored in few bits, which saves the time of every step (docs/gpus.md has an
        H200's); as they are stored; freed once they are used; with the text encoder streamed, and
        more and more of the transformer; all of that without what blocks keep for all steps."""
        asked = self.session.asked
        self._keep((asked, Residence()))
        calls = [
            (stage.name, call) for stage in stages for call in stage.needs(self.session.config)
        ]
        undecided = asked.weights_dtype is None and self.session.backend.device_kind != "cpu"
        if undecided and any(self.session.weights.packed(call) for _, call in calls):
            yield replace(asked, weights_dtype="bfloat16"), Residence()
        yield asked, Residence()
        if asked.memory == "resident":
            return
        last = {call.weights: name for name, call in calls}
        leave = {
            name: tuple(key for key in last if last[key] == name) for name in set(last.values())
        }
        yield asked, Residence(offload=True)
        sizes: dict[str, int] = {}
        if asked.layers != "unrolled":
            networks = {network_of(c.weights): c for _, c in calls}
            names = networks.keys() & set(self.session.factory.streams)
            sizes = {name: len(pieces(self.session.graph(networks[name]))) for name in names}
        streams = {name: sizes[name] for name in ("text-encoder",) if sizes.get(name)}
        number = sizes.get("transformer", 0)  # its layers, at most
        # what blocks compute once for all steps
        keeps = any(
            c.steps is not None and len(self.session.graph(c).repeats) > 1 for _, c in calls
        )
        for keep_bytes in (None, 0) if keeps else (None,):
            tight = Residence({}, leave, keep_bytes, offload=True, reload=True)
            yield asked, tight
            if streams:
                yield asked, replace(tight, streams=streams)
            for moved in range(1, number + 1):
                yield asked, replace(tight, streams={**streams, "transformer": moved})

    def _tried(
        self, way: Way, stages: Sequence[Needing], warm: bool
    ) -> tuple[StageCost, int, Mapping[WeightsKey, int]]:
        """The stage that needs the most memory, what there is for it, and which sets can stay."""
        self._keep(way)
        held = self._held()
        worst, budget = self._worst(stages, held, warm)
        if worst.peak_bytes > budget and self.session.backend.device().recorded_bytes:
            self.session.release_programs()
            worst, budget = self._worst(stages, held, warm)
        used = {call.weights for stage in stages for call in stage.needs(self.session.config)}
        for key in [*(k for k in held if k not in used), *(k for k in held if k in used)]:
            if worst.peak_bytes <= budget:
                break
            del held[key]
            worst, budget = self._worst(stages, held, warm)
        return worst, budget, held

    def _worst(
        self, stages: Sequence[Needing], held: Mapping[WeightsKey, int], warm: bool
    ) -> tuple[StageCost, int]:
        """The stage that needs the most memory next to the sets `held`, and what there is."""
        device = self.session.backend.device()
        costs = self.costs(stages, held, device.recorded_bytes, warm)
        return peak(costs), device.room_bytes(
            self.session.options.max_memory, self.session.weights.held_bytes
        )

    def _held(self) -> dict[WeightsKey, int]:
        """Bytes by set on one device, what an earlier set has too not counted again."""
        seen, found = set(), {}
        for key, held in self.session.weights.held.items():
            tensors = held.tensors()
            found[key] = sum(size for tensor, size in tensors.items() if tensor not in seen)
            seen |= tensors.keys()
        return found

    def advice(
        self, stages: Sequence[Needing], budget: int, worst: StageCost, warm: bool = False
    ) -> str:
        """Advice where a run needs more than `budget` bytes; flags are named if they make it fit.
        worst: the stage that needs the most."""
        tries: list[tuple[str, dict[str, Any]]] = []
        if self.session.asked.memory == "resident":
            tries += [("--memory auto", {"memory": "auto"})]
        if self.session.asked.weights_dtype != ADVISED:
            tries += [(f"--weights-dtype {ADVISED}", {"weights_dtype": ADVISED})]
        advice = ["more devices"]
        advice += ["fewer frames or a smaller size"] if worst.name != "text" else []
        for words, changed in tries:
            options = replace(self.session.asked, **changed)
            smaller = self.session.__class__(
                self.session.checkpoint, self.session.backend, options, self.session.dtype
            )
            if smaller.memory.fit(stages, budget, warm):
                advice.insert(0, words)
                break
        return " or ".join(advice)


def kept(
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
