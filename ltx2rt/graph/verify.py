"""What a legal graph is: operands are defined before use, in the same graph, and every type follows its rule."""

from __future__ import annotations

from ltx2rt.errors import GraphError
from ltx2rt.graph.ir import Graph
from ltx2rt.graph.ops import OPS


def verify(graph: Graph) -> None:
    """Raise GraphError if `graph` is not legal. A value of an outer graph used inside a repeat body is not."""
    known = {id(v) for v in (*graph.inputs.values(), *graph.params.values())}
    for node in graph.nodes:
        for value in node.inputs:
            if id(value) not in known:
                raise GraphError(
                    f"{graph.name}: {node.op} reads {value.name}: {value.type}, which this graph does not define; "
                    "pass it to repeat as carry, invariant or data"
                )
        if node.op == "repeat":
            repeat = node.plan["repeat"]
            verify(repeat.body)
            if len(repeat.body.inputs) != len(node.inputs):
                raise GraphError(
                    f"{graph.name}: repeat passes {len(node.inputs)} operands to {len(repeat.body.inputs)} inputs"
                )
        else:
            type, plan = OPS[node.op].rule(*(v.type for v in node.inputs), **node.attrs)
            if type != node.outputs[0].type or plan.keys() != node.plan.keys():
                raise GraphError(f"{graph.name}: {node.op} is typed {node.outputs[0].type}, its rule says {type}")
        known.update(id(v) for v in node.outputs)
    for name, value in graph.outputs.items():
        if id(value) not in known:
            raise GraphError(f"{graph.name}: output {name} is not defined in this graph")
