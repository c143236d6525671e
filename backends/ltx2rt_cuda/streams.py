"""Work that runs at once on two streams of a device: parts of a graph that need nothing of each other.

Decides which parts these are: between two kernels that take from both, such as the norms of video
and of sound in one launch, the products and the attention of the one stream and those of the other.
The costlier part stays on the stream that runs everything else. A product of the sound has tiles
for a fraction of the multiprocessors and lasts as long as its latency; beside one of the video it
fills what a last wave leaves empty. How much that is no GPU has shown yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ltx2rt.graph.ir import Graph, Node, subgraphs
from ltx2rt.graph.ops import COLLECTIVES
from ltx2rt.placement.cost import VIEWS, node_flops
from ltx2rt_cuda.device.torch_device import Side
from ltx2rt_cuda.devices import H100

# What takes less by the data sheet is no part of its own where something reads it together with
# another part's result: to part and to meet again is assumed to cost as much.
SHORT_S = 1e-6
ALONE = ("together", "repeat")  # these read from all parts


class TwoStreams(torch.nn.Module):
    """Calls own(*operands[:n]) here and beside(*operands[n:]) on the stream `side`, at once; the
    results of both.

    What a stream frees is its own to take again at once, even if another stream still reads it.
    `operands` holds what both parts read until they have met; what `beside` makes is freed behind
    that, and taken again behind the next parting."""

    def __init__(self, own: torch.nn.Module, beside: torch.nn.Module, num_own: int, side: Side):
        super().__init__()
        self.own, self.beside, self.num_own, self.side = own, beside, num_own, side

    def forward(self, *operands):
        device, stream = self.side.device, self.side.stream
        here = device.current_stream()
        stream.wait_stream(here)
        try:
            with device.on(stream):
                beside = self.beside(*operands[self.num_own :])
            own = self.own(*operands[: self.num_own])
        finally:  # a recording whose streams have not met does not end
            here.wait_stream(stream)
        return *own, *beside


@dataclass
class Chain:
    """Nodes that run one after the other, and what they take by the data sheet."""

    nodes: list[Node] = field(default_factory=list)
    time_s: float = 0.0

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        if node.op not in VIEWS:
            moved = sum(v.type.nbytes for v in (*node.inputs, *node.outputs))
            self.time_s += node_flops(node) / H100.flops_per_s + moved / H100.memory_bytes_per_s


def in_parts(graph: Graph) -> list[Node | tuple[Graph, Graph]]:
    """`graph.nodes` in an order of their own; in the place of nodes that may run at once two
    graphs, the costlier one first, whose inputs and outputs are values of `graph`. Where devices
    exchange something, nodes are in the order in which that travels unseen, and stay there."""
    if any(node.op in COLLECTIVES for node in graph.nodes):
        return list(graph.nodes)
    result: list[Node | tuple[Graph, Graph]] = []
    waiting = graph.nodes
    while waiting:
        ready, parts, waiting = _next(waiting)
        result += ready
        if len(parts) > 1:
            own = max(parts, key=lambda part: part.time_s)
            others = [node for part in parts if part is not own for node in part.nodes]
            here, beside = subgraphs(graph, [own.nodes, others])
            result.append((here, beside))
        else:
            result += [node for part in parts for node in part.nodes]
    return result


def _next(nodes: Sequence[Node]) -> tuple[list[Node], list[Chain], list[Node]]:
    """Splits nodes, given in an order in which they may run: those that may run first and stand
    alone, the parts that may run at once then, and the rest, of which each needs two parts or
    stands alone behind one."""
    ready: list[Node] = []
    later: list[Node] = []
    of: dict[int, Chain] = {}  # value -> the part that makes it
    late: set[int] = set()  # values that the rest makes
    for node in nodes:
        found = list({id(part): part for v in node.inputs if (part := of.get(id(v)))}.values())
        long = [part for part in found if part.time_s >= SHORT_S]
        if any(id(v) in late for v in node.inputs) or len(long) > 1 or (found and node.op in ALONE):
            later.append(node)
            late.update(id(v) for v in node.outputs)
            continue
        if not found and (node.op in ALONE or node.op in VIEWS):
            ready.append(node)
            continue
        part = Chain()
        for other in (
            found
        ):  # in the order in which they were begun, so that they stay in an order that may run
            part.nodes += other.nodes
            part.time_s += other.time_s
        part.add(node)
        of |= {id(v): part for node in part.nodes for v in node.outputs}
    return ready, list({id(part): part for part in of.values()}.values()), later
