"""The rules of a legal graph: operands are defined before use, in the same graph, and every type
follows its rule."""

from __future__ import annotations

from ltx2rt.errors import GraphError
from ltx2rt.graph.ir import Graph, Node, Repeat, Type
from ltx2rt.graph.ops import OPS


def verify(graph: Graph) -> Graph:
    """`graph`. Raises GraphError unless it is legal: if a body uses a value of an outer graph."""
    known = {*graph.inputs.values(), *graph.params.values()}
    if unmade := [name for name in graph.params if name.startswith("%")]:
        raise GraphError(
            f"{graph.name}: {unmade[0]} is declared as a parameter, but is the name of a node's "
            "result"
        )
    for node in graph.nodes:
        for value in node.inputs:
            if value not in known:
                raise GraphError(
                    f"{graph.name}: {node.op} reads {value.name}: {value.type}, which this graph "
                    "does not define; pass it to repeat as carry, invariant or data"
                )
        if node.op == "repeat":
            verify(node.repeat.body)
            _verify_repeat(graph.name, node, node.repeat)
        elif not node.typed:
            types, args = OPS[node.op].rule(*(v.type for v in node.inputs), **node.attrs)
            types = types if isinstance(types, tuple) else (types,)
            typed = tuple(v.type for v in node.outputs)
            if types != typed or args.keys() != node.args.keys():
                raise GraphError(
                    f"{graph.name}: {node.op} is typed {_list(typed)}, its rule says {_list(types)}"
                )
            node.mark_typed()
        known.update(node.outputs)
    for name, value in graph.outputs.items():
        if value not in known:
            raise GraphError(f"{graph.name}: output {name} is not defined in this graph")
    return graph


def _list(types: tuple[Type, ...]) -> str:
    return ", ".join(map(str, types))


def _verify_repeat(where: str, node: Node, repeat: Repeat) -> None:
    """Operands fit the body's inputs, results its outputs; data lead with the repeat's axis."""
    inputs, outputs = repeat.body.inputs, repeat.body.outputs
    given, made = len(node.inputs), len(node.outputs)
    if len(inputs) != given:
        raise GraphError(f"{where}: repeat passes {given} operands to {len(inputs)} inputs")
    if len(outputs) != made:
        raise GraphError(f"{where}: repeat has {made} results of {len(outputs)} outputs")
    for verb, to, values, inner, alike in (
        ("passes", "to", node.inputs, inputs, repeat.num_carries + repeat.num_invariants),
        ("gives", "for", node.outputs, outputs, repeat.num_carries),
    ):
        for i, (value, (name, v)) in enumerate(zip(values, inner.items(), strict=True)):
            expected = v.type if i < alike else v.type.stacked(repeat.axis, repeat.count)
            if value.type != expected:
                raise GraphError(
                    f"{where}: repeat {verb} {value.name}: {value.type} {to} {name}: {expected}"
                )
