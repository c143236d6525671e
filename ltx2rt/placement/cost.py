"""Costs of a graph: bytes of weights, bytes alive at once, floating-point operations, traffic. Read
off the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from ltx2rt.graph.encodings import passing_bytes
from ltx2rt.graph.ir import Graph, Node, Value
from ltx2rt.graph.ops import COLLECTIVES, OPS

K = TypeVar("K")
# ops that usually move nothing
VIEWS = {"split", "merge", "rename", "slice", "at", "expand", "transpose"}

# Bytes that a device receives per byte it hands in, among n. An all-reduce is a reduce-scatter and
# an all-gather, in each of which a device receives n - 1 slices of n.
RECEIVED = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "all_to_all": lambda n: (n - 1) / n,
    "swap_edges": lambda n: min(n - 1, 2) / 2,  # both neighbours
}


@dataclass(frozen=True)
class Traffic:
    """Executions of one collective, bytes that a device hands in, and bytes it receives."""

    count: int = 0
    bytes: int = 0
    received_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        received = self.received_bytes + other.received_bytes
        return Traffic(self.count + other.count, self.bytes + other.bytes, received)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.count * times, self.bytes * times, self.received_bytes * times)


@dataclass(frozen=True)
class Counts:
    """Repetitions of a node's products and of its exchange, if not one."""

    work: float = 1.0
    sends: int = 1


ONCE = Counts()
CountsByNode = Mapping[Node, Counts]
EACH_ONCE: CountsByNode = MappingProxyType({})


def added(made: Iterable[tuple[K, Traffic]]) -> dict[K, Traffic]:
    """The sums by key."""
    found: dict[K, Traffic] = {}
    for key, one in made:
        found[key] = found.get(key, Traffic()) + one
    return found


def exchanges(graph: Graph, runs: CountsByNode = EACH_ONCE) -> dict[tuple[str, int], Traffic]:
    """Communication of one run of a placed graph, by kind and number of devices."""
    found = []
    for node, times in graph.walk():
        if node.op in COLLECTIVES:
            devices = graph.mesh[node.attrs["mesh_axis"]]
            size = sum(v.type.nbytes for v in node.inputs)
            made = Traffic(1, size, round(size * RECEIVED[node.op](devices))) * times
            found.append(((node.op, devices), made * runs.get(node, ONCE).sends))
    return added(found)


def by_kind(exchanged: Mapping[tuple[str, int], Traffic]) -> dict[str, Traffic]:
    return added((op, made) for (op, _), made in exchanged.items())


def weight_bytes(graphs: Iterable[Graph]) -> int:
    """Bytes of all distinct parameters on one device, in the dtypes of the graph."""
    params = {name: param for graph in graphs for name, param in graph.all_params().items()}
    return sum(value.type.nbytes * count for value, count in params.values())


def touched_bytes(graph: Graph, changed: Set[str], other: Graph | None = None) -> int:
    """Bytes that one device holds of the parameters made, wholly or in part, from the tensors
    `changed`, or that the graph of the other set does not have, or has in another encoding."""
    layouts, total = graph.all_layouts(), 0
    theirs = (other or graph).all_params()
    for name, (value, count) in graph.all_params().items():
        same = name in theirs and theirs[name][0].type == value.type
        for layer in range(count):
            shared = same and changed.isdisjoint(layouts[name].names(layer))
            total += 0 if shared else value.type.nbytes
    return total


def activation_bytes(graph: Graph) -> int:
    """Largest sum of the bytes of values alive at once, in execution order, views counted as their
    own memory is not. An estimate of what an eager execution holds, with what decoding a weight
    takes in passing: it leaves out kernels' workspaces and the allocator's slack."""
    last = {v: i for i, node in enumerate(graph.nodes) for v in node.inputs}
    last |= dict.fromkeys(graph.outputs.values(), len(graph.nodes))
    given = {*graph.inputs.values(), *graph.params.values()}  # the caller holds these
    owners = {v: v for v in given}  # value -> the value whose memory it looks at
    until: dict[Value, int] = {}
    for i, node in enumerate(graph.nodes):
        for v in node.outputs:
            owners[v] = owners[node.inputs[0]] if node.op in VIEWS else v
            until[owners[v]] = max(until.get(owners[v], i), last.get(v, i))
    dying: dict[int, list[Value]] = {}
    for owner in until.keys() - given:
        dying.setdefault(until[owner], []).append(owner)
    live = peak = sum(v.type.nbytes for v in graph.inputs.values())
    for i, node in enumerate(graph.nodes):
        live += sum(v.type.nbytes for v in node.outputs if owners[v] is v)
        peak = max(peak, live + _inner_bytes(node))
        live -= sum(owner.type.nbytes for owner in dying.get(i, ()))
    return peak


def _inner_bytes(node: Node) -> int:
    """Bytes alive at once while the node runs, apart from its operands and results."""
    if node.op == "unpack":
        return passing_bytes(node.attrs["encoding"], node.outputs[0].type.num_elements)
    if node.op != "repeat":
        return 0
    operands = list(node.repeat.body.inputs.values())
    same = operands[node.repeat.num_carries :]  # an iteration reads these where they are
    return activation_bytes(node.repeat.body) - sum(v.type.nbytes for v in same)


def flops(graph: Graph, runs: CountsByNode = EACH_ONCE) -> int:
    """2 x multiply-adds of linears, convolutions and attention; everything else is bandwidth."""
    return sum(
        round(node_flops(node) * runs.get(node, ONCE).work) * times for node, times in graph.walk()
    )


def quantised_flops(graph: Graph) -> int:
    """The part of `flops` in which numbers of 8 bits are multiplied."""
    return sum(node_flops(node) * times for node, times in graph.walk() if is_quantised(node))


def is_quantised(node: Node) -> bool:
    """Whether the node multiplies quantised weights in their 8 bits."""
    return _linear(node) == "quantised"


def is_plain_linear(node: Node) -> bool:
    """Whether the node multiplies weights in the dtype of its operand."""
    return _linear(node) == "plain"


def _linear(node: Node) -> str:
    return OPS[node.op].linear if node.op in OPS else ""


def node_flops(node: Node) -> int:
    """2 x multiply-adds of one execution of one node; a repeat's body is not counted."""
    return OPS[node.op].flops(node) if node.op in OPS else 0
