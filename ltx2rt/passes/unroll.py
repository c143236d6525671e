"""unroll: write every repeat out, iteration after iteration.

Requires a legal graph; ensures a legal graph without `repeat`, with the same inputs, outputs and
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ltx2rt.graph.ir import Graph, Repeat, Value, numbered
from ltx2rt.graph.trace import emit
from ltx2rt.graph.verify import verify


def unroll(graph: Graph) -> Graph:
    """`graph` written out; iteration i reads the parameters with i for `*`."""
    result = Graph(graph.name, dict(graph.inputs), mesh=graph.mesh)
    env = {v: v for v in graph.inputs.values()}
    write_out(graph, result, env, 0)
    result.outputs = {name: env[v] for name, v in graph.outputs.items()}
    return verify(result)


def write_out(graph: Graph, out: Graph, env: dict[Value, Value], layer: int) -> None:
    """Append iteration `layer` of a repeat of `graph` to `out`; `env` gains its values."""
    for name, v in graph.params.items():
        concrete = numbered(name, layer)
        env[v] = out.params.setdefault(concrete, Value(concrete, v.type))
        if name in graph.layouts:
            layout = graph.layouts[name]
            parts = tuple(
                zip(layout.names(layer), (shape for _, shape in layout.parts), strict=True)
            )
            out.layouts[concrete] = replace(layout, parts=parts, first=0)
    for node in graph.nodes:
        inputs = tuple(env[v] for v in node.inputs)
        if node.op != "repeat":
            results = emit(out, node.op, *inputs, **node.attrs)
            results = results if isinstance(results, tuple) else (results,)
            env.update(zip(node.outputs, results, strict=True))
            continue
        repeat = node.repeat
        carry, invariant, data = repeat.divide(inputs)
        stacked: list[list[Value]] = []
        for i in range(repeat.count):
            results = iteration(repeat, out, [*carry, *invariant], data, i)
            carry = results[: repeat.num_carries]
            stacked.append(results[repeat.num_carries :])
        columns = [
            emit(out, "stack", *column, axis=repeat.axis, dim=0)
            for column in zip(*stacked, strict=True)
        ]
        env |= zip(node.outputs, [*carry, *columns], strict=True)


def iteration(
    repeat: Repeat, out: Graph, fixed: Sequence[Value], data: Sequence[Value], i: int
) -> list[Value]:
    """Append iteration i to `out`; returns its results. fixed: carries and invariants."""
    rows = [emit(out, "at", v, axis=repeat.axis, index=i) for v in data]
    env = dict(zip(repeat.body.inputs.values(), [*fixed, *rows], strict=True))
    write_out(repeat.body, out, env, repeat.first + i)
    return [env[v] for v in repeat.body.outputs.values()]
