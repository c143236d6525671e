"""loop: the graph of one step becomes the graph of all steps, and comes apart for a backend that
runs step by step.

Decides nothing about what leaves the loop: that is `hoist`, which runs in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ltx2rt.errors import GraphError
from ltx2rt.graph.ir import Graph, Node, Repeat, Type, Value
from ltx2rt.graph.verify import verify

STEPS = "steps"
STEP_SLOTS = 8  # modulation rows of a slot that stays empty cost next to nothing


def step_slots(num_steps: int) -> int:
    """The slots of a loop for `num_steps` steps; fewer steps in them are the same graph."""
    return -(-num_steps // STEP_SLOTS) * STEP_SLOTS


def looped(step: Graph, name: str, count: int, per_step: Sequence[str]) -> Graph:
    """`count` runs of `step`; outputs replace the inputs of the same names from one to the next:
    the state. per_step: inputs of which every step has its own, if there; they have the leading
    axis "steps" in the result's inputs. Outputs: the last state, and of everything else all steps'
    results."""
    state = [n for n in step.outputs if n in step.inputs]
    data = [n for n in per_step if n in step.inputs]
    rest = [n for n in step.inputs if n not in state and n not in data]
    results = [*state, *(n for n in step.outputs if n not in state)]
    body = replace(
        step,
        inputs={n: step.inputs[n] for n in (*state, *rest, *data)},
        outputs={n: step.outputs[n] for n in results},
    )

    def typed(v: Value, stacked: bool) -> Type:
        return v.type.stacked(STEPS, count) if stacked else v.type

    graph = Graph(name, mesh=step.mesh)
    graph.inputs = {n: Value(n, typed(v, n in data)) for n, v in body.inputs.items()}
    values = tuple(graph.fresh(typed(v, n not in state)) for n, v in body.outputs.items())
    args = {"repeat": Repeat(body, count, len(state), len(rest), STEPS)}
    graph.nodes = [Node("repeat", tuple(graph.inputs.values()), values, {"count": count}, args)]
    graph.outputs = dict(zip(results, values, strict=True))
    return verify(graph)


@dataclass(frozen=True)
class LoopParts:
    """A loop taken apart. `before` runs once; its outputs are inputs of `body`, by the body's
    names. Every other input of the body is the graph's input of the same name. state, data: the
    body's inputs that change from step to step; of the data, `body` takes one step's slice."""

    before: Graph
    body: Graph
    count: int
    state: tuple[str, ...]
    data: tuple[str, ...]


def taken_apart(graph: Graph) -> LoopParts:
    """Split a graph that ends in its loop and outputs the loop's results. Raises GraphError."""
    *before, last = graph.nodes
    if last.op != "repeat" or last.repeat.axis != STEPS:
        raise GraphError(f"{graph.name}: does not end in a loop over steps")
    names = list(last.repeat.body.inputs)
    computed = {v for node in before for v in node.outputs}
    first = replace(graph, name=f"{graph.name}.before", nodes=before)
    first.outputs = {n: v for n, v in zip(names, last.inputs, strict=True) if v in computed}
    read = {v for node in before for v in node.inputs}
    first.inputs = {n: v for n, v in graph.inputs.items() if v in read}
    for n, v in zip(names, last.inputs, strict=True):
        if v not in computed and n != v.name:
            raise GraphError(f"{graph.name}: the loop's input {n} is the graph's {v.name}")
    verify(first)
    state, _, data = last.repeat.divide(names)
    return LoopParts(first, last.repeat.body, last.repeat.count, tuple(state), tuple(data))
