"""Two nodes of one kernel that do not need each other, such as those of video and of sound."""

from __future__ import annotations

from itertools import islice
from typing import Any

from ltx2rt.fused.pattern import Found, Uses, node_of, pattern
from ltx2rt.graph.ir import Graph, Node, Type
from ltx2rt.graph.ops import COLLECTIVES, OPS, op


def apart(node: Node) -> list[Node]:
    """The nodes that a `together` does at once; of another one, itself."""
    if node.op != "together":
        return [node]
    found, inputs, outputs = [], iter(node.inputs), iter(node.outputs)
    for (name, read, attrs), (_, _, made, args) in zip(
        node.attrs["parts"], node.args["parts"], strict=True
    ):
        found.append(
            Node(name, tuple(islice(inputs, read)), tuple(islice(outputs, made)), attrs, args)
        )
    return found


def _numpy_together(*operands, parts):
    found, values = [], iter(operands)
    for name, read, made, args in parts:
        results = OPS[name].numpy(*islice(values, read), **args)
        found += results if made > 1 else [results]
    return found


@op(_numpy_together)
def together(*operands: Type, parts: tuple[tuple[str, int, dict[str, Any]], ...]):
    """Several nodes of which none reads what another makes. parts: of each the op, how many
    operands it has, and its attributes; results one's after another's."""
    types, args, values = [], [], iter(operands)
    for name, read, attrs in parts:
        made, plan = OPS[name].rule(*islice(values, read), **attrs)
        made = made if isinstance(made, tuple) else (made,)
        types += made
        args.append((name, read, len(made), plan))
    return tuple(types), {"parts": tuple(args)}


@pattern
def joined_pair(graph: Graph, uses: Uses, node: Node) -> Found | None:
    """The next node of the same kernel that does not need this one: mostly the other stream's. None
    from behind an exchange, which would not leave, or not travel unseen, while this one waits for
    the other's operands."""
    kernel = OPS[node.op].launch if node.op in OPS else ""
    if not kernel:
        return None
    own = {id(node)}
    for other in graph.nodes[graph.nodes.index(node) + 1 :]:
        if other.op in COLLECTIVES:
            return None
        same = other.op in OPS and OPS[other.op].launch == kernel
        if same and not any(uses.depends(v, own) for v in other.inputs):
            parts = tuple((n.op, len(n.inputs), n.attrs) for n in (node, other))
            inputs, outputs = (*node.inputs, *other.inputs), (*node.outputs, *other.outputs)
            return [node, other], [node_of("together", inputs, outputs, parts=parts)]
    return None
