"""When one device computes, exchanges and waits: a graph in time, at the figures of a data sheet.

Decides how long a node takes: a product or an attention its FLOP at the full rate, a weight that is
decoded the bytes that it moves. At sustained rates all other kernels take the time of their bytes;
at a data sheet's they take none, so that the whole is a bound from below. Whether exchanges travel
while the device computes is the backend's knowledge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ltx2rt.graph.encodings import ENCODINGS
from ltx2rt.graph.ir import Graph, Node, Value
from ltx2rt.graph.ops import COLLECTIVES
from ltx2rt.placement.cost import (
    ONCE,
    RECEIVED,
    VIEWS,
    CountsByNode,
    is_plain_linear,
    is_quantised,
    node_flops,
)
from ltx2rt.placement.devices import DeviceKind

# the track of what computes and waits; the others are "link AXIS", "memory" and "host link"
DEVICE = "device"


@dataclass(frozen=True)
class Event:
    """kind: "product", "attention", "kernel", "exchange", "copy" or "wait"."""

    track: str
    kind: str
    name: str
    start_s: float
    length_s: float
    flops: int = 0
    received_bytes: int = 0


@dataclass(frozen=True)
class Repeated:
    """Events that happen `count` times, `period_s` apart; their times are relative to `start_s`."""

    events: Sequence[Event | Repeated]
    count: int
    period_s: float
    start_s: float = 0.0


@dataclass
class Timeline:
    """A device and its links. An exchange leaves when the one before it has arrived. An all-reduce
    is waited for by the first node that reads what it brings if exchanges are `hidden`; otherwise,
    and every other exchange, at once.

    quantised: linears are estimated as quantised ones. decodes: whether a product decodes rows of 8
    bits as it reads them, which moves nothing more. runs: of nodes that run more than once; all of
    them are one event. clock_s: the time so far; travelled_s, waited_s: of exchanges.
    """

    kind: DeviceKind
    hidden: bool = False
    quantised: bool = False
    decodes: bool = False
    runs: CountsByNode = field(default_factory=dict)
    clock_s: float = 0.0
    link_s: float = 0.0
    travelled_s: float = 0.0
    waited_s: float = 0.0
    events: list[Event | Repeated] = field(default_factory=list)
    # when values are there that nothing has read yet
    arrivals: dict[Value, float] = field(default_factory=dict)

    def of(self, graph: Graph) -> Timeline:
        """Run the graph until all that was sent has arrived."""
        self.run(graph)
        for v in list(self.arrivals):
            self.read(v)
        return self

    def run(self, graph: Graph) -> None:
        for node in graph.nodes:
            for v in node.inputs:
                self.read(v)
            if node.op == "repeat":
                self.repeat(node)
            elif node.op in COLLECTIVES:
                self.exchange(node, graph.mesh[node.attrs["mesh_axis"]])
            elif node.op not in VIEWS:
                self.compute(node)

    def compute(self, node: Node) -> None:
        flops = round(node_flops(node) * self.runs.get(node, ONCE).work)
        narrow = is_quantised(node) or (self.quantised and is_plain_linear(node))
        kind = "attention" if "attention" in node.op else "product" if flops else "kernel"
        rate = self.kind.quantised_flops_per_s if narrow else self.kind.flops_per_s
        if flops:
            x = node.inputs[0].type
            said = f"{node.op} of {x.dtype} over {x.axes[-1]}"
            rate = next((r for word, r in self.kind.kernels.items() if word in said), rate)
        moved = self.moved_bytes(node)
        length_s = flops / rate + moved / self.kind.memory_bytes_per_s
        self.events.append(Event(DEVICE, kind, node.op, self.clock_s, length_s, flops))
        self.clock_s += length_s

    def moved_bytes(self, node: Node) -> int:
        """Bytes that decoding a weight moves; under load every kernel that multiplies nothing."""
        every = self.kind.under_load and not node_flops(node)
        if node.op != "unpack":
            bytes_ = sum(v.type.nbytes for v in (*node.inputs, *node.outputs)) if every else 0
            return round(self.kind.moved * bytes_)
        if self.decodes and ENCODINGS[node.attrs["encoding"]].group == 1:
            return 0
        return sum(v.type.nbytes for v in (*node.inputs, *node.outputs))

    def read(self, value: Value) -> None:
        missing_s = self.arrivals.pop(value, 0.0) - self.clock_s
        if missing_s > 0:
            self.wait("exchange", missing_s)
            self.waited_s += missing_s

    def wait(self, name: str, length_s: float) -> None:
        self.events.append(Event(DEVICE, "wait", f"wait for {name}", self.clock_s, length_s))
        self.clock_s += length_s

    def exchange(self, node: Node, devices: int) -> None:
        count = self.runs.get(node, ONCE).sends
        sent = sum(v.type.nbytes for v in node.inputs)
        received = count * round(sent * RECEIVED[node.op](devices))
        time_s = self.kind.exchange_s(node.op, devices, count, received)
        start_s = max(self.link_s, self.clock_s)
        track = f"link {node.attrs['mesh_axis']}"
        exposed_s = self.kind.exposed * time_s
        self.events.append(
            Event(track, "exchange", node.op, start_s, exposed_s, received_bytes=received)
        )
        self.travelled_s += time_s
        self.link_s = start_s + exposed_s
        for v in node.outputs:
            self.arrivals[v] = self.link_s
            if node.op != "all_reduce" or not self.hidden:
                self.read(v)

    def repeat(self, node: Node) -> None:
        """The first iteration, and the second for all others: it waits for what came before."""
        repeat, carries = node.repeat, node.repeat.num_carries
        made, entering = list(repeat.body.outputs.values()), list(repeat.body.inputs.values())
        for first, count in ((True, 1), (False, repeat.count - 1))[: repeat.count]:
            if not first:
                self.move(made[:carries], entering[:carries])
            start, before = len(self.events), replace(self)
            self.run(repeat.body)
            for v in made[carries:]:
                self.read(v)
            later_s = self.again(start, before, count)
            self.arrivals |= {v: self.arrivals[v] + later_s for v in made if v in self.arrivals}
        self.move(made[:carries], node.outputs[:carries])

    def again(self, start: int, before: Timeline, count: int) -> float:
        """Let the events since `before`, from `start` on, run `count` times. Returns the time."""
        period_s = self.clock_s - before.clock_s
        later_s = (count - 1) * period_s
        self.clock_s += later_s
        self.link_s += later_s
        self.travelled_s += (count - 1) * (self.travelled_s - before.travelled_s)
        self.waited_s += (count - 1) * (self.waited_s - before.waited_s)
        if count > 1:
            self.events[start:] = [Repeated(self.events[start:], count, period_s)]
        return later_s

    def move(self, values: Sequence[Value], to: Sequence[Value]) -> None:
        """A value on its way has another name from here on."""
        names = zip(values, to, strict=True)
        self.arrivals |= {n: self.arrivals.pop(v) for v, n in names if v in self.arrivals}

    def then(self, other: Timeline, times: int) -> None:
        """Append another timeline, which runs `times` times behind this one."""
        self.events.append(Repeated(other.events, times, other.clock_s, self.clock_s))
        self.clock_s += times * other.clock_s
        self.travelled_s += times * other.travelled_s
        self.waited_s += times * other.waited_s

    def beside(self, track: str, name: str, length_s: float, work_s: float) -> None:
        """Copy `name` on its own track from the start on, while the device works for `work_s`, and
        wait in the end for what takes longer."""
        if length_s:
            self.events.append(Event(track, "copy", name, 0.0, length_s))
        if length_s > work_s:
            self.wait(name, length_s - work_s)

    def flat(self) -> Iterator[Event]:
        """All events, those of repeats once for each iteration."""
        return _flat(self.events, 0.0)


def _flat(events: Sequence[Event | Repeated], offset_s: float) -> Iterator[Event]:
    for event in events:
        if isinstance(event, Event):
            yield replace(event, start_s=event.start_s + offset_s)
        else:
            for i in range(event.count):
                yield from _flat(event.events, offset_s + event.start_s + i * event.period_s)
