"""What a run is estimated to cost: per stage and device, the memory, the work, the traffic and the time.

Decides how these follow from placed graphs and a device's figures. Which graphs a stage runs, and which weights lie on
the device meanwhile, is the pipeline's knowledge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ltx2rt.graph.ir import Graph
from ltx2rt.placement.cost import Traffic, activation_bytes, by_kind, exchanges, float8_flops, flops, weight_bytes
from ltx2rt.placement.devices import DeviceKind


@dataclass(frozen=True)
class Work:
    """One stage as one device runs it.

    calls: placed graphs of one step (of a stage without steps: of all of it), each with its number of runs.
    before: what runs once before the steps; its results stay until the last one, beside what a step reads of them.
    resident: sets of weights that are on the device meanwhile, with their bytes.
    """

    name: str
    calls: tuple[tuple[Graph, int], ...]
    resident: Mapping[str, int]
    steps: int = 1
    before: Graph | None = None


@dataclass(frozen=True)
class StageCost:
    """What a stage costs one device. weights_bytes: all that it holds meanwhile, whatever uses them; activation_bytes:
    the most alive at once. For each step, without what runs before them all: flops (float8_flops of them in float8),
    read_bytes, the weights that it uses, and what is exchanged, by kind of collective and number of devices.
    """

    name: str
    steps: int
    weights_bytes: int
    activation_bytes: int
    read_bytes: int
    flops: int
    exchanged: Mapping[tuple[str, int], Traffic]
    float8_flops: int = 0

    @property
    def peak_bytes(self) -> int:
        return self.weights_bytes + self.activation_bytes

    @property
    def collectives(self) -> dict[str, Traffic]:
        return by_kind(self.exchanged)

    def time_s(self, kind: DeviceKind) -> float:
        """The time of one step, at least: arithmetic and reading the weights at once, then the exchanges, none of which
        is hidden, each at its full rate."""
        arithmetic = (self.flops - self.float8_flops) / kind.flops_per_s + self.float8_flops / kind.float8_flops_per_s
        return max(arithmetic, self.read_bytes / kind.memory_bytes_per_s) + self.exchange_s(kind)

    def exchange_s(self, kind: DeviceKind) -> float:
        """Of one step."""
        return sum(kind.exchange_s(*by, t.count, t.received_bytes) for by, t in self.exchanged.items())


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
    )


def peak(costs: Iterable[StageCost]) -> StageCost:
    """The stage that needs the most memory: a run fits where this one does."""
    return max(costs, key=lambda c: c.peak_bytes)
