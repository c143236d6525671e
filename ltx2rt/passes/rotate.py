"""rotate: what a block adds to a stream last moves into the next iteration (loop rotation).

Requires a graph, placed or not. Ensures the same values. Instead of x + y * gate a repeat carries x, y and the rows,
and adds them up in front of the block, and once more behind the last: there the sum meets the block's first norm, with
which `fuse` makes it one kernel, and an all-reduce that makes y is not read before the other stream, or the other half
(`interleave`), has had its turn. The first iteration adds zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ltx2rt.graph.ir import Graph, Node, Repeat, Value
from ltx2rt.graph.trace import emit
from ltx2rt.graph.verify import verify


def rotate(graph: Graph) -> Graph:
    """`graph` with its repeats rotated; itself if no block ends in a gated sum."""
    result = replace(graph, nodes=[])
    for node in graph.nodes:
        if node.op == "repeat" and (sums := _sums(node.repeat)):
            _append_rotated(result, node, sums)
        elif node.op == "repeat" and (body := rotate(node.repeat.body)) is not node.repeat.body:
            result.nodes.append(replace(node, args={"repeat": replace(node.repeat, body=body)}))
        else:
            result.nodes.append(node)
    if result.nodes == graph.nodes:
        return graph
    verify(result)
    return result


@dataclass(frozen=True)
class _Sum:
    """The nodes that make a block's result of the values it carries instead: the stream before it first."""

    nodes: Sequence[Node]
    carried: Sequence[Value]

    def again(self, graph: Graph, values: Sequence[Value], result: Value, fixed: Callable[[Value], Value]) -> None:
        """Append the nodes, of `values` and of what `fixed` says of an invariant; the last one makes `result`."""
        known = dict(zip(map(id, self.carried), values, strict=True))
        for node in self.nodes:
            last = node is self.nodes[-1]
            (made,) = (result,) if last else (graph.fresh(v.type) for v in node.outputs)
            inputs = tuple(known[id(v)] if id(v) in known else fixed(v) for v in node.inputs)
            graph.nodes.append(replace(node, inputs=inputs, outputs=(made,)))
            known[id(node.outputs[0])] = made


def _sums(repeat: Repeat) -> dict[str, _Sum]:
    """By the name of what is carried: add(x, mul(y, gate)), with y's bias if it follows an all-reduce, and the choice
    of the gate's rows by an invariant index."""
    body = repeat.body
    if len(body.outputs) != repeat.num_carries:
        return {}
    makers = {id(v): node for node in body.nodes for v in node.outputs}
    readers: dict[int, int] = {}
    for v in (*(v for node in body.nodes for v in node.inputs), *body.outputs.values()):
        readers[id(v)] = readers.get(id(v), 0) + 1
    _, invariants, _ = repeat.divide(list(body.inputs.values()))
    fixed = set(map(id, invariants))

    def only(v: Value, op: str) -> Node | None:
        node = makers.get(id(v))
        return node if node is not None and node.op == op and readers[id(v)] == 1 else None

    found = {}
    for name, entering, result in zip(body.inputs, body.inputs.values(), body.outputs.values(), strict=False):
        total = only(result, "add")
        scaled = only(total.inputs[1], "mul") if total is not None else None
        if total is None or scaled is None or total.inputs[0].type != scaled.outputs[0].type or result is entering:
            continue
        y, gate = scaled.inputs
        nodes = [scaled, total]
        carried = [total.inputs[0]]
        biased = only(y, "add")
        if biased is not None and _is_summed(makers, biased.inputs[0]):
            nodes, carried = [biased, *nodes], [*carried, *biased.inputs]
        else:
            carried.append(y)
        chosen = only(gate, "take")
        if chosen is not None and id(chosen.inputs[1]) in fixed:
            nodes, carried = [chosen, *nodes], [*carried, chosen.inputs[0]]
        else:
            carried.append(gate)
        if len(set(map(id, carried))) == len(carried):
            found[name] = _Sum(nodes, carried)
    return found


def _is_summed(makers: dict[int, Node], v: Value) -> bool:
    return id(v) in makers and makers[id(v)].op == "all_reduce"


def _append_rotated(result: Graph, node: Node, sums: dict[str, _Sum]) -> None:
    repeat, old = node.repeat, node.repeat.body
    outer = dict(zip(map(id, old.inputs.values()), node.inputs, strict=True))
    gone = {id(n) for one in sums.values() for n in one.nodes}
    body = replace(old, nodes=[], inputs={}, outputs={})
    operands: list[Value] = []
    for name, v, operand, left in zip(old.inputs, old.inputs.values(), node.inputs, old.outputs.values(), strict=False):
        one = sums.get(name)
        carried = [left] if one is None else one.carried
        names = [name, *(f"{name}_{i}" for i in range(1, len(carried)))]
        entering = [v] if one is None else [Value(n, x.type) for n, x in zip(names, carried, strict=True)]
        body.inputs |= zip(names, entering, strict=True)
        body.outputs |= zip(names, carried, strict=True)
        operands += [operand, *(_zeros(result, x) for x in carried[1:])]
        if one is not None:
            one.again(body, entering, v, lambda invariant: invariant)
    _, invariant, data = repeat.divide(list(zip(old.inputs.items(), node.inputs, strict=True)))
    body.inputs |= dict(item for item, _ in (*invariant, *data))
    body.nodes += [n for n in old.nodes if id(n) not in gone]
    values = [result.fresh(v.type) for v in body.outputs.values()]
    args = {"repeat": replace(repeat, body=body, num_carries=len(values))}
    others = [operand for _, operand in (*invariant, *data)]
    made = iter(values)
    behind = []
    outputs = []
    for name, v in zip(old.outputs, node.outputs, strict=True):
        one = sums.get(name)
        parts = [next(made) for _ in (one.carried if one else (v,))]
        outputs += parts if one else [v]
        if one:
            behind.append((one, parts, v))
    result.nodes.append(Node("repeat", (*operands, *others), tuple(outputs), node.attrs, args))
    for one, parts, v in behind:
        one.again(result, parts, v, lambda invariant: outer[id(invariant)])


def _zeros(graph: Graph, like: Value) -> Value:
    return emit(graph, "full", value=0.0, dtype=like.type.dtype, **like.type.sizes)
