"""Estimated costs of a run: per stage and device, the memory, the work, the traffic and the time.

Decides how these follow from placed graphs and a device's figures. Which graphs a stage runs, and
which weights are on the device meanwhile, is the pipeline's knowledge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ltx2rt.backend import get_factory
from ltx2rt.graph.ir import Graph
from ltx2rt.placement.cost import (
    EACH_ONCE,
    VIEWS,
    CountsByNode,
    Traffic,
    activation_bytes,
    added,
    by_kind,
    exchanges,
    flops,
    quantised_flops,
    weight_bytes,
)
from ltx2rt.placement.devices import DeviceKind
from ltx2rt.placement.timeline import Timeline

FRAMES = "frames"  # a decoder's output
Calls = tuple[tuple[Graph, int], ...]


@dataclass(frozen=True)
class Work:
    """One stage as one device runs it.

    calls: placed graphs of one step (of a stage without steps: of all of it), as a device runs
    them, each with its number of runs.
    before: what runs once before the steps; its results stay until the last one. resident: sets of
    weights that are on the device meanwhile, with their bytes.
    """

    name: str
    calls: Calls
    resident: Mapping[str, int]
    steps: int = 1
    before: Graph | None = None


@dataclass(frozen=True)
class StageCost:
    """Costs of a stage on one device.

    weights_bytes: all that it holds meanwhile, whatever uses them; activation_bytes: the most alive
    at once, prepared_bytes of it for all steps. For each step, without what runs before them all:
    flops (quantised_flops of them in 8 bits), read_bytes, the weights that it uses, streamed_bytes
    of them copied from the host, what is exchanged, by kind of collective and number of devices,
    and its calls. part: of a stage with several loops, which one it is. quantised: linears of the
    calls are estimated as quantised ones. runs: of their nodes.
    """

    name: str
    steps: int
    weights_bytes: int
    activation_bytes: int
    read_bytes: int
    flops: int
    exchanged: Mapping[tuple[str, int], Traffic]
    quantised_flops: int = 0
    streamed_bytes: int = 0
    prepared_bytes: int = 0
    loops: bool = False
    quantised: bool = False
    part: str = ""
    calls: Calls = field(default=(), compare=False, repr=False)
    runs: CountsByNode = field(default_factory=dict, compare=False, repr=False)

    @property
    def label(self) -> str:
        return f"{self.name}, {self.part}" if self.part else self.name

    @property
    def peak_bytes(self) -> int:
        return self.weights_bytes + self.activation_bytes

    @property
    def collectives(self) -> dict[str, Traffic]:
        return by_kind(self.exchanged)

    @property
    def collectives_json(self) -> dict[str, dict[str, int]]:
        return {n: {"count": t.count, "bytes": t.bytes} for n, t in self.collectives.items()}

    @property
    def traffic(self) -> str:
        """The collectives in words."""
        found = self.collectives.items()
        return ", ".join(f"{t.count} {name}, {t.bytes / 1e9:.3g} GB" for name, t in found) or "none"

    def timeline(self, kind: DeviceKind) -> Timeline:
        """One step: arithmetic and reading the weights at once, and what no work hides of the
        exchanges and of the copies from the host, each at its rate."""
        factory, whole = get_factory(kind.backend), Timeline(kind)
        hidden = factory.hides and not self.runs  # training waits
        how = {"quantised": self.quantised, "decodes": factory.decodes, "runs": self.runs}
        for graph, times in self.calls:
            whole.then(Timeline(kind, hidden, **how).of(graph), times)
        read_s = self.read_bytes / kind.memory_bytes_per_s
        whole.beside("memory", "weights", read_s, whole.clock_s - whole.waited_s)
        whole.beside("host link", "weights from the host", self.copy_s(kind), whole.clock_s)
        if kind.under_load and not self.loops:
            whole.wait("the host", self.host_s(kind))
        return whole

    def host_s(self, kind: DeviceKind) -> float:
        """Seconds in which the device waits for launches, and for frames to be fetched."""
        assert kind.sustained is not None, "no sustained rates are known"
        launches = results = 0
        for graph, times in self.calls:
            counts = (count for node, count in graph.walk() if node.op not in VIEWS)
            launches += times * sum(counts)
            if FRAMES in graph.outputs:
                results += times * graph.outputs[FRAMES].type.nbytes
        host = kind.sustained
        return launches * host.launch_s + results / host.result_bytes_per_s

    def time_s(self, kind: DeviceKind) -> float:
        """The time of one step."""
        return self.timeline(kind).clock_s

    def waits_s(self, kind: DeviceKind) -> float:
        """Seconds that one step waits for weights from the host, beyond its work."""
        if not self.streamed_bytes:
            return 0.0
        return self.time_s(kind) - replace(self, streamed_bytes=0).time_s(kind)

    def copy_s(self, kind: DeviceKind) -> float:
        """How long the link to the host's memory takes for what one step streams."""
        return self.streamed_bytes / kind.host_bytes_per_s

    def exchange_s(self, kind: DeviceKind) -> float:
        """Seconds that one step waits for exchanges."""
        return self.timeline(kind).waited_s


def cost(work: Work, runs: CountsByNode = EACH_ONCE) -> StageCost:
    """A stage's cost on one device, read off its graphs. runs: of nodes that run more often."""
    sent = ((exchanges(graph, runs).items(), times) for graph, times in work.calls)
    exchanged = added((by, found * times) for each, times in sent for by, found in each)
    alive, kept = max((activation_bytes(graph) for graph, _ in work.calls), default=0), 0
    if work.before is not None:
        before, made = activation_bytes(work.before), work.before.outputs
        kept = sum(v.type.nbytes for v in made.values())
        read = (x for graph, _ in work.calls for name, x in graph.inputs.items() if name in made)
        alive = max(before, kept + alive - sum(v.type.nbytes for v in read))
    return StageCost(
        work.name,
        work.steps,
        weights_bytes=sum(work.resident.values()),
        activation_bytes=alive,
        prepared_bytes=kept,
        read_bytes=sum(weight_bytes([graph]) * times for graph, times in work.calls),
        flops=sum(flops(graph, runs) * times for graph, times in work.calls),
        exchanged=exchanged,
        quantised_flops=sum(quantised_flops(graph) * times for graph, times in work.calls),
        loops=work.before is not None,
        calls=work.calls,
        runs=runs,
    )


def peak(costs: Iterable[StageCost]) -> StageCost:
    """The stage that needs the most memory; of a run that calls no network, nothing."""
    return max(costs, key=lambda c: c.peak_bytes, default=cost(Work("no network", (), {})))


def beside_recorded(costs: Iterable[StageCost], recorded_bytes: int) -> list[StageCost]:
    """The costs beside `recorded_bytes`, which recorded steps keep already. A loop keeps for the
    stages behind it what it has prepared for its steps, and the steps of all loops share what they
    take more; it is run before it is recorded in memory that no recording keeps."""
    prepared, shared, found = 0, 0, []
    for c in costs:
        kept = max(0, prepared + shared - recorded_bytes)
        found.append(replace(c, activation_bytes=kept + c.activation_bytes))
        if c.loops and not c.streamed_bytes:
            prepared += c.prepared_bytes
            shared = max(shared, c.activation_bytes - c.prepared_bytes)
    return found
