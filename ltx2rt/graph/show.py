"""Print a graph: as text for people and golden files, as dot for a picture, as JSON for scripts."""

from __future__ import annotations

import json
from typing import Any

from ltx2rt.graph.ir import Graph, Node, Type, Value
from ltx2rt.graph.ops import COLLECTIVES

FORMATS = ("text", "dot", "json")


def show(graph: Graph, format: str = "text") -> str:
    return {"text": _text, "dot": _dot, "json": _json}[format](graph)


def _attrs(node: Node) -> str:
    def word(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k}={v}" for k, v in value.items()) + "}"
        if isinstance(value, tuple):
            return "(" + " ".join(map(str, value)) + ")"
        return f"{value:g}" if isinstance(value, float) else str(value)

    return ", ".join(f"{k}={word(v)}" for k, v in node.attrs.items())


def _text(graph: Graph) -> str:
    lines = [f"graph {graph.name}"]
    lines += [f"  in   {name}: {v.type}" for name, v in graph.inputs.items()]
    _body(graph, lines, "  ")
    lines += [f"  out  {name} = {v.name}: {v.type}" for name, v in graph.outputs.items()]
    return "\n".join(lines) + "\n"


def _body(graph: Graph, lines: list[str], indent: str) -> None:
    prefix = _common_prefix(graph)
    for node in graph.nodes:
        results = ", ".join(v.name for v in node.outputs)
        if node.op == "repeat":
            body = node.repeat.body
            operands = list(zip(body.inputs, node.inputs, strict=True))
            carry, invariant, data = node.repeat.divide(operands)
            start = f" from {node.repeat.first}" if node.repeat.first else ""
            lines.append(f"{indent}{results} = repeat {node.repeat.count}{start}")
            for kind, pairs in (("carry", carry), ("data", data)):
                for name, v in pairs:
                    lines.append(f"{indent}  {kind} {name} = {v.name}: {body.inputs[name].type}")
            read = ", ".join(f"{name} = {v.name}" for name, v in invariant)
            lines.append(f"{indent}  reads {read}")
            _body(body, lines, indent + "  ")
            for name, v in body.outputs.items():
                lines.append(f"{indent}  yield {name} = {v.name}: {v.type}")
            continue
        operands = ", ".join(v.name.replace(prefix, "") for v in node.inputs)
        words = "; ".join(filter(None, (operands, _attrs(node))))
        lines.append(f"{indent}{results} = {node.op}({words}): {node.outputs[0].type}")


def _common_prefix(graph: Graph) -> str:
    """The parameters' common prefix with its last `*.`: a block's names are shown without it."""
    names = list(graph.params)
    if not names or any("*." not in name for name in names):
        return ""
    prefix = names[0][: names[0].rindex("*.") + 2]
    return prefix if all(name.startswith(prefix) for name in names) else ""


def _dot(graph: Graph) -> str:
    lines = ["digraph {", "  node [shape=box, fontname=monospace];"]
    serial = 0

    def emit(graph: Graph, indent: str, env: dict[Value, str]) -> None:
        nonlocal serial
        for node in graph.nodes:
            serial += 1
            me = f"n{serial}"
            lines.append(f'{indent}{me} [label="{node.op}\\n{node.outputs[0].type}"];')
            lines.extend(f"{indent}{env[v]} -> {me};" for v in node.inputs if v in env)
            if node.op == "repeat":
                body = node.repeat.body
                lines.append(f'{indent}subgraph cluster_{me} {{ label="x{node.repeat.count}";')
                emit(body, indent + "  ", dict.fromkeys(body.inputs.values(), me))
                lines.append(f"{indent}}}")
            env |= dict.fromkeys(node.outputs, me)

    env = {}
    for name, v in graph.inputs.items():
        serial += 1
        env[v] = f"n{serial}"
        lines.append(f'  n{serial} [label="{name}\\n{v.type}", style=dashed];')
    emit(graph, "  ", env)
    return "\n".join([*lines, "}"]) + "\n"


def _json(graph: Graph) -> str:
    def typed(type: Type) -> dict[str, Any]:
        return {"axes": list(type.axes), "shape": list(type.shape), "dtype": type.dtype}

    def nodes(graph: Graph) -> list[dict[str, Any]]:
        found = []
        for node in graph.nodes:
            row: dict[str, Any] = {
                "op": node.op,
                "inputs": [v.name for v in node.inputs],
                "outputs": [v.name for v in node.outputs],
                **typed(node.outputs[0].type),
                "collective": node.op if node.op in COLLECTIVES else None,
            }
            if node.op == "repeat":
                row |= {"count": node.repeat.count, "body": nodes(node.repeat.body)}
                row |= {"first": node.repeat.first} if node.repeat.first else {}
            else:
                attrs = node.attrs.items()
                row["attrs"] = {k: list(v) if isinstance(v, tuple) else v for k, v in attrs}
            found.append(row)
        return found

    params = {
        name: {"shape": list(v.type.shape), "dtype": v.type.dtype, "count": count}
        for name, (v, count) in graph.all_params().items()
    }
    whole = {
        "name": graph.name,
        "inputs": [{"name": v.name, **typed(v.type)} for v in graph.inputs.values()],
        "params": params,
        "nodes": nodes(graph),
        "outputs": {name: v.name for name, v in graph.outputs.items()},
    }
    return json.dumps(whole, indent=1) + "\n"
