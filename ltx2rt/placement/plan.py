"""What a run is estimated to cost: per stage and device, the memory, the work, the traffic and the time.

Decides how these follow from placed graphs and a device's figures. Which graphs a stage runs, and which weights lie on
the device meanwhile, is the pipeline's knowledge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ltx2rt.graph.ir import Graph, Node
from ltx2rt.graph.ops import COLLECTIVES
from ltx2rt.placement.cost import (
    RECEIVED,
    Traffic,
    activation_bytes,
    by_kind,
    exchanges,
    float8_flops,
    flops,
    node_flops,
    traffic,
    weight_bytes,
)
from ltx2rt.placement.devices import DeviceKind

Calls = tuple[tuple[Graph, int], ...]


@dataclass(frozen=True)
class Work:
    """One stage as one device runs it.

    calls: placed graphs of one step (of a stage without steps: of all of it), as a device runs them, each with its
    number of runs.
    before: what runs once before the steps; its results stay until the last one, beside what a step reads of them.
    resident: sets of weights that are on the device meanwhile, with their bytes.
    """

    name: str
    calls: Calls
    resident: Mapping[str, int]
    steps: int = 1
    before: Graph | None = None


@dataclass(frozen=True)
class StageCost:
    """What a stage costs one device.

    weights_bytes: all that it holds meanwhile, whatever uses them; activation_bytes: the most alive at once. For each
    step, without what runs before them all: flops (float8_flops of them in float8), read_bytes, the weights that it
    uses, streamed_bytes of them copied from the host, what is exchanged, by kind of collective and number of devices,
    and its calls.
    """

    name: str
    steps: int
    weights_bytes: int
    activation_bytes: int
    read_bytes: int
    flops: int
    exchanged: Mapping[tuple[str, int], Traffic]
    float8_flops: int = 0
    streamed_bytes: int = 0
    loops: bool = False
    calls: Calls = field(default=(), compare=False, repr=False)

    @property
    def peak_bytes(self) -> int:
        return self.weights_bytes + self.activation_bytes

    @property
    def collectives(self) -> dict[str, Traffic]:
        return by_kind(self.exchanged)

    def time_s(self, kind: DeviceKind) -> float:
        """The time of one step, at least: arithmetic and reading the weights at once, and what no work hides of the
        exchanges and of the copies from the host, each at its full rate."""
        return self._computed_s(kind) + self.waits_s(kind)

    def _computed_s(self, kind: DeviceKind) -> float:
        arithmetic = (self.flops - self.float8_flops) / kind.flops_per_s + self.float8_flops / kind.float8_flops_per_s
        return max(arithmetic, self.read_bytes / kind.memory_bytes_per_s) + self.exchange_s(kind)

    def waits_s(self, kind: DeviceKind) -> float:
        """What one step waits for weights from the host, beyond its work."""
        return max(0.0, self.copy_s(kind) - self._computed_s(kind))

    def copy_s(self, kind: DeviceKind) -> float:
        """How long the link to the host's memory takes for what one step streams."""
        return self.streamed_bytes / kind.host_bytes_per_s

    def exchange_s(self, kind: DeviceKind) -> float:
        """What one step waits for exchanges."""
        whole = sum(kind.exchange_s(*by, t.count, t.received_bytes) for by, t in self.exchanged.items())
        return whole - self.hidden_s(kind)

    def hidden_s(self, kind: DeviceKind) -> float:
        """What of the exchanges of one step passes while the device computes."""
        return sum(_hidden_s(graph, kind, self.float8_flops > 0) * times for graph, times in self.calls)


def cost(work: Work) -> StageCost:
    """The cost of a stage on one device, read off its graphs."""
    exchanged: dict[tuple[str, int], Traffic] = {}
    for graph, times in work.calls:
        for by, found in exchanges(graph).items():
            exchanged[by] = exchanged.get(by, Traffic()) + found * times
    alive = max((activation_bytes(graph) for graph, _ in work.calls), default=0)
    if work.before is not None:
        kept = sum(v.type.nbytes for v in work.before.outputs.values())
        alive = max(activation_bytes(work.before), kept + alive)
    return StageCost(
        work.name,
        work.steps,
        weights_bytes=sum(work.resident.values()),
        activation_bytes=alive,
        read_bytes=sum(weight_bytes([graph]) * times for graph, times in work.calls),
        flops=sum(flops(graph) * times for graph, times in work.calls),
        exchanged=exchanged,
        float8_flops=sum(float8_flops(graph) * times for graph, times in work.calls),
        loops=work.before is not None,
        calls=tuple(call for call in work.calls if traffic(call[0])),
    )


def peak(costs: Iterable[StageCost]) -> StageCost:
    """The stage that needs the most memory: a run fits where this one does."""
    return max(costs, key=lambda c: c.peak_bytes)


def beside_recorded(costs: Iterable[StageCost], recorded_bytes: int) -> list[StageCost]:
    """The costs beside `recorded_bytes`, which recorded steps keep already: a loop runs in those, and keeps for the
    stages behind it what it takes more."""
    kept, found = 0, []
    for c in costs:
        recorded = c.loops and not c.streamed_bytes
        own = max(0, c.activation_bytes - recorded_bytes) if recorded else c.activation_bytes
        found.append(replace(c, activation_bytes=max(kept, own) if recorded else kept + own))
        kept = max(kept, own) if recorded else kept
    return found


def _hidden_s(graph: Graph, kind: DeviceKind, float8: bool) -> float:
    """What of the time of a graph's exchanges passes while the device computes: on GPUs, which run nodes in order.
    float8: whether linears are, whatever they are called."""
    if kind.framework_kind != "cuda":
        return 0.0
    stream = _Stream(kind, float8)
    stream.run(graph)
    for v in list(stream.arrivals):
        stream.read(v)
    return stream.travelled_s - stream.waited_s


class _Stream:
    """A device and its link. An all-reduce leaves when the one before it has arrived, and is waited for by the first
    node that reads what it brings; every other exchange at once."""

    def __init__(self, kind: DeviceKind, float8: bool):
        self.kind, self.float8 = kind, float8
        self.clock_s = self.link_s = self.travelled_s = self.waited_s = 0.0
        self.arrivals: dict[int, float] = {}  # of values that nothing has read yet

    def run(self, graph: Graph) -> None:
        weights = set(graph.params.values())
        for node in graph.nodes:
            for v in node.inputs:
                self.read(id(v))
            if node.op == "repeat":
                self.repeat(node)
            elif node.op in COLLECTIVES:
                self.exchange(node, graph.mesh[node.attrs["mesh_axis"]])
            else:
                float8 = node.op.endswith("linear_float8") or (self.float8 and node.op == "linear")
                rate = self.kind.float8_flops_per_s if float8 else self.kind.flops_per_s
                read_bytes = sum(v.type.nbytes for v in node.inputs if v in weights)
                self.clock_s += max(node_flops(node) / rate, read_bytes / self.kind.memory_bytes_per_s)

    def read(self, value: int) -> None:
        missing_s = max(0.0, self.arrivals.pop(value, 0.0) - self.clock_s)
        self.clock_s += missing_s
        self.waited_s += missing_s

    def exchange(self, node: Node, devices: int) -> None:
        received = sum(v.type.nbytes for v in node.inputs) * RECEIVED[node.op](devices)
        time_s = self.kind.exchange_s(node.op, devices, 1, round(received))
        self.travelled_s += time_s
        self.link_s = max(self.link_s, self.clock_s) + time_s
        for v in node.outputs:
            self.arrivals[id(v)] = self.link_s
            if node.op != "all_reduce":
                self.read(id(v))

    def repeat(self, node: Node) -> None:
        """The first iteration, and the second as often as there are others: it waits for what the one before sent."""
        repeat, carries = node.repeat, node.repeat.num_carries
        made = [id(v) for v in repeat.body.outputs.values()]
        entering, leaving = [id(v) for v in repeat.body.inputs.values()], [id(v) for v in node.outputs]
        for first, others in ((True, 0), (False, repeat.count - 2))[: repeat.count]:
            if not first:
                self.move(made[:carries], entering[:carries])
            clock_s, travelled_s, waited_s = self.clock_s, self.travelled_s, self.waited_s
            self.run(repeat.body)
            for v in made[carries:]:
                self.read(v)
            later_s = others * (self.clock_s - clock_s)
            self.clock_s += later_s
            self.link_s += later_s
            self.travelled_s += others * (self.travelled_s - travelled_s)
            self.waited_s += others * (self.waited_s - waited_s)
            self.arrivals |= {v: self.arrivals[v] + later_s for v in made if v in self.arrivals}
        self.move(made[:carries], leaving[:carries])

    def move(self, values: Sequence[int], to: Sequence[int]) -> None:
        """What is on its way has another name from here on."""
        self.arrivals |= {new: self.arrivals.pop(v) for v, new in zip(values, to, strict=True) if v in self.arrivals}
