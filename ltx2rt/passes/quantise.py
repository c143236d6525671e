"""quantise: the large linears of a stack of blocks in an encoding of 8 bits, all but its first and
last block's.

Requires a legal graph, placed or not, not yet packed, with a repeat of at least three iterations
over stacked parameters (the blocks). Ensures the same inputs, outputs, communication and
checkpoint tensors. The first and the last block are written out before and after the repeat and
stay as they are; in between every linear's weight is encoded, but for the head gates (one number a
head). An encoding with a special product takes the place of `linear`; of any
other the weight is marked, for `unpack`. Norms, attention, modulation and everything outside the
blocks stay in the graph's dtype.

The scales belong to the rows that a device holds: where a placed weight is split along its rows
(row-parallel), each device scales its own slices of the weight and of the activations, and undoes
both before the partial sums are added up. So no device needs another's slice, and a split can only
refine the scales.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ltx2rt.errors import GraphError, InputError
from ltx2rt.graph.encodings import ENCODINGS, has_products
from ltx2rt.graph.ir import Graph, Layout, Node, Replaced, Value
from ltx2rt.graph.trace import emit
from ltx2rt.graph.verify import verify
from ltx2rt.passes.unpack import GATE, declared_fields
from ltx2rt.passes.unroll import iteration


def quantise(graph: Graph, encoding: str) -> Graph:
    """encoding: of `encodings.QUANTISED`. Raises GraphError if there are no blocks, InputError if
    there are fewer than three."""
    result = replace(graph, nodes=[], params=dict(graph.params), layouts=dict(graph.layouts))
    env, found = Replaced(), 0
    for node in map(env.node, graph.nodes):
        if node.op == "repeat" and any("*" in name for name in node.repeat.body.params):
            env.update(zip(node.outputs, _blocks(result, node, encoding), strict=True))
            found += 1
        else:
            result.nodes.append(node)
    if not found:
        raise GraphError(f"{graph.name}: no stack of blocks to quantise")
    result.outputs = env.outputs(graph)
    return verify(result)


def trainable(graph: Graph) -> None:
    """Raise GraphError if the graph is quantised: its parameters have no gradient."""
    if any(layout.encoding for layout in graph.all_layouts().values()):
        raise GraphError(
            f"{graph.name}: its weights are kept in 8 bits or less; pass the graph before "
            "quantisation"
        )


def differentiable(graph: Graph) -> None:
    """Raise GraphError if products have no gradient with respect to their activations."""
    if has_products(graph):
        raise GraphError(
            f"{graph.name}: it multiplies in 8 bits, which has no gradient; decode the weights, "
            "as `kept_as` does"
        )


def _blocks(out: Graph, node: Node, encoding: str) -> list[Value]:
    """The first block, a repeat of the quantised ones, the last one; the results of `node`."""
    repeat = node.repeat
    count, axis, carries = repeat.count, repeat.axis, repeat.num_carries
    if count < 3:
        raise InputError(
            f"--weights-dtype: {encoding} is for blocks between the first and the last one, and "
            f"{out.name} has {count} blocks; leave it out"
        )
    carry, invariant, data = repeat.divide(node.inputs)
    first = iteration(repeat, out, [*carry, *invariant], data, 0)
    rows = [emit(out, "slice", v, axis=axis, start=1, stop=count - 1) for v in data]
    types = [
        v.type if i < carries else v.type.stacked(axis, count - 2) for i, v in enumerate(first)
    ]
    middle = tuple(map(out.fresh, types))
    rest = {"repeat": replace(repeat, body=_encoded(repeat.body, encoding), count=count - 2)}
    operands = (*first[:carries], *invariant, *rows)
    out.nodes.append(Node("repeat", operands, middle, {"count": count - 2}, rest))
    last = iteration(repeat, out, [*middle[:carries], *invariant], data, count - 1)

    def stacked(v: Value) -> Value:
        before = v.type.axes[0] if v.type.axes else None
        return emit(out, "expand", v, axis=axis, size=1, before=before)

    columns = list(zip(first, middle, last, strict=True))[carries:]
    joined = [emit(out, "concat", stacked(a), b, stacked(c), axis=axis) for a, b, c in columns]
    return [*last[:carries], *joined]


def _encoded(body: Graph, encoding: str) -> Graph:
    """The body for the blocks from the second on, the weights of its linears encoded."""
    result = Graph(body.name, dict(body.inputs), mesh=body.mesh, serial=body.serial)
    layouts, product = body.all_layouts(), ENCODINGS[encoding].product
    readers, env = Counter(body.read()), Replaced()

    def placed(v: Value, encoding: str | None = None) -> tuple[str, Layout]:
        # Iteration i reads layer i + 1, and the written-out blocks have the names of layers
        # already.
        first = layouts[v.name].first + 1
        layout = replace(layouts[v.name], first=first, encoding=encoding)
        return v.name.replace("*", "1+*"), layout

    def declare(v: Value, encoding: str | None = None) -> Value:
        name, layout = placed(v, encoding)
        result.layouts[name] = layout
        return result.parameter(name, v.type)

    def operand(v: Value) -> Value:
        if v.name in body.params and v not in env:
            env[v] = declare(v)
        return env[v]

    for node in body.nodes:
        large = node.op == "linear" and tuple(node.attrs["out"]) != GATE
        if large and readers[node.inputs[1]] == 1:
            x, weight, *bias = node.inputs
            if product:
                own = declared_fields(result, weight, *placed(weight, encoding))
            else:
                own = (declare(weight, encoding),)
            env[node.outputs[0]] = emit(
                result, product or "linear", operand(x), *own, *map(operand, bias), **node.attrs
            )
        else:
            result.nodes.append(replace(node, inputs=tuple(map(operand, node.inputs))))
    result.outputs = env.outputs(body)
    return result
