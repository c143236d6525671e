"""What passes share: an emitter that types nodes by the op table."""

from __future__ import annotations

from typing import Any

from ltx2rt.graph.ir import Graph, Node, Type, Value
from ltx2rt.graph.ops import OPS


def emit(graph: Graph, op: str, *inputs: Value, **attrs: Any) -> Any:
    """Append a node; its result, or a tuple for an op with several. Raises GraphError as tracing does."""
    types, plan = OPS[op].rule(*(v.type for v in inputs), **attrs)
    many = isinstance(types, tuple)
    results = tuple(Value(f"%{next(graph.serial)}", t) for t in (types if many else (types,)))
    graph.nodes.append(Node(op, inputs, results, attrs, plan))
    return results if many else results[0]


def parameter(graph: Graph, name: str, type: Type) -> Value:
    return graph.params.setdefault(name, Value(name, type))
