"""The work of a training step on its forward graph, and the values it keeps meanwhile; read off the
graph of one device.

Decides how often a node runs: forward, once more where its block is computed anew, and backward, as
often as its operands depend on what is trained. A product has one more for each such operand (a
frozen weight has no gradient), an attention the 2.5 of a flash kernel's backward pass, an exchange
its transpose, which travels the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ltx2rt.graph.ir import Graph, Node, Type, Value
from ltx2rt.graph.ops import COLLECTIVES
from ltx2rt.graph.trace import emit
from ltx2rt.passes.adapters import MARK
from ltx2rt.placement.cost import VIEWS, Counts, activation_bytes, weight_bytes

ATTENTION_BACKWARD = 2.5
STATE_BYTES = 16  # bytes for a trained number: itself, its gradient and both moments, float32


def runs_of(graph: Graph, remat: str) -> dict[Node, Counts]:
    """How often each node of a `train-step` graph with adapters runs in one step.
    remat: of `backend.REMAT`."""
    found: dict[Node, Counts] = {}
    _visit(graph, set(), 0, remat, found)
    return found


def _visit(
    graph: Graph, learnt: set[Value], again: int, remat: str, found: dict[Node, Counts]
) -> None:
    """Enter the runs of the graph's nodes; adds values that depend on `learnt` ones."""
    learnt |= {v for name, v in graph.params.items() if MARK in name}
    for node in graph.nodes:
        if node.op == "repeat":
            body, carries = node.repeat.body, node.repeat.num_carries
            entering, leaving = list(body.inputs.values()), list(body.outputs.values())
            within = {v for v, x in zip(entering, node.inputs, strict=True) if x in learnt}
            for _ in range(carries + 1):  # a carry that one iteration makes the next one reads
                _visit(body, within, int(remat != "none"), remat, found)
                pairs = zip(leaving[:carries], entering[:carries], strict=True)
                within |= {first for last, first in pairs if last in within}
            learnt |= {v for v, x in zip(node.outputs, leaving, strict=True) if x in within}
            continue
        wanted = [v in learnt for v in node.inputs]
        if any(wanted):
            learnt.update(node.outputs)
        backward = ATTENTION_BACKWARD * any(wanted) if node.op == "attention" else sum(wanted[:2])
        kept = remat == "exchanges" and any(wanted)
        found[node] = Counts(1 + again + backward, 1 + again * (not kept) + any(wanted))


def gradient_sums(graph: Graph, mesh: Mapping[str, int]) -> Graph:
    """The exchanges of one step of the optimiser: gradients are added up over every axis of `mesh`
    that does not cut their parameter, those of one axis at once."""
    sums, layouts = Graph("gradient-sums", mesh=mesh), graph.all_layouts()
    for axis in mesh:
        cut = {name for name, x in layouts.items() if axis in {of for _, of, _ in x.splits}}
        whole = {name for name in layouts if MARK in name and name not in cut}
        if count := _numbers(graph, whole):
            v = sums.inputs.setdefault(axis, sums.fresh(Type(("D",), (count,), "float32")))
            (sums.outputs[axis],) = emit(sums, "all_reduce", v, mesh_axis=axis)
    return sums


def _numbers(graph: Graph, names: Collection[str]) -> int:
    """How many numbers a device has of these parameters."""
    params = graph.all_params()
    return sum(params[name][0].type.num_elements * params[name][1] for name in names)


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one device. frozen: the model's weights; state: what is trained, its gradients and
    moments; kept: values of the forward pass, of all blocks; block: the most that is alive while
    one block is gone through. streamed: of the weights, those that the host keeps, which are not
    among `frozen`; the slots that they come through are."""

    frozen: int
    state: int
    kept: int
    block: int
    streamed: int = 0

    @property
    def total(self) -> int:
        return self.frozen + self.state + self.kept + self.block


def training_memory(graph: Graph, remat: str, ema: bool = False) -> TrainingMemory:
    """ema: an average is kept. remat: of `backend.REMAT`; of recomputed blocks carries are kept,
    and one's values and gradients are alive in the backward pass."""
    trained = [name for name in graph.all_params() if MARK in name]
    numbers = _numbers(graph, trained)
    kept, block = sum(v.type.nbytes for v in graph.inputs.values()), 0
    for repeat in graph.repeats:
        carries = list(repeat.body.inputs.values())[: repeat.num_carries]
        values, decoded = _values_bytes(repeat.body)
        if remat == "none":
            kept += repeat.count * (values + decoded)
            block = max(block, activation_bytes(repeat.body))
            continue
        kept += repeat.count * sum(v.type.nbytes for v in carries)
        kept += repeat.count * _exchanged_bytes(repeat.body) * (remat == "exchanges")
        block = max(block, 2 * values + decoded)
    frozen, state = weight_bytes([graph]) - 4 * numbers, (STATE_BYTES + 4 * ema) * numbers
    return TrainingMemory(frozen, state, kept, block)


def _exchanged_bytes(body: Graph) -> int:
    """Bytes of a block's results of exchanges, but for weights that are gathered."""
    params = set(body.params.values())
    made = (node for node in body.nodes if node.op in COLLECTIVES)
    found = [n for n in made if params.isdisjoint(n.inputs)]
    return sum(v.type.nbytes for node in found for v in node.outputs)


def _values_bytes(body: Graph) -> tuple[int, int]:
    """Bytes of all that a block computes, but for views: at least what its backward pass reads.
    Then bytes of the weights that it decodes, which have no gradient."""
    sizes = Counter[bool]()
    for node in body.nodes:
        if node.op not in VIEWS:
            sizes[node.op == "unpack"] += sum(v.type.nbytes for v in node.outputs)
    return sizes[False], sizes[True]
