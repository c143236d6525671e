"""rotate: the last addition of a block to a stream moves into the next iteration (loop rotation).

Requires a graph, placed or not. Ensures the same values. Instead of x + y * gate a repeat carries
x, y and the rows, and adds them up in front of the block, and once more behind the last: there the
sum meets the block's first norm, with which `fuse` makes it one kernel, and an all-reduce that
makes y is not read before the other stream, or the other half (`interleave`), has had its turn. The
first iteration adds zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ltx2rt.graph.ir import Graph, Node, Repeat, Value, replace_repeats
from ltx2rt.graph.trace import emit
from ltx2rt.graph.verify import verify


def rotate(graph: Graph) -> Graph:
    """`graph` with its repeats rotated; itself if no block ends in a gated sum."""
    return verify(replace_repeats(graph, _append_rotated))


@dataclass(frozen=True)
class _Sum:
    """The nodes that make a block's result of the values it carries: the stream first."""

    nodes: Sequence[Node]
    carried: Sequence[Value]

    def again(
        self, graph: Graph, values: Sequence[Value], result: Value, fixed: Callable[[Value], Value]
    ) -> None:
        """Append the nodes, of `values` and of `fixed` invariants; the last one is `result`."""
        known = dict(zip(self.carried, values, strict=True))
        for node in self.nodes:
            last = node is self.nodes[-1]
            (made,) = (result,) if last else (graph.fresh(v.type) for v in node.outputs)
            inputs = tuple(known[v] if v in known else fixed(v) for v in node.inputs)
            graph.nodes.append(replace(node, inputs=inputs, outputs=(made,)))
            known[node.outputs[0]] = made


def _sums(repeat: Repeat) -> dict[str, _Sum]:
    """The sums by the name of the carried value: add(x, mul(y, gate)), with y's bias if it follows
    an all-reduce, and the choice of the gate's rows by an invariant index."""
    body = repeat.body
    if len(body.outputs) != repeat.num_carries:
        return {}
    makers, readers = body.makers(), Counter(body.read())
    entering, invariants, _ = repeat.divide(list(body.inputs.items()))
    fixed = {v for _, v in invariants}

    def only(v: Value, op: str) -> Node | None:
        node = makers.get(v)
        return node if node is not None and node.op == op and readers[v] == 1 else None

    found = {}
    for (name, _), result in zip(entering, body.outputs.values(), strict=True):
        total = only(result, "add")
        scaled = only(total.inputs[1], "mul") if total is not None else None
        if total is None or scaled is None or total.inputs[0].type != scaled.outputs[0].type:
            continue
        y, gate = scaled.inputs
        nodes = [scaled, total]
        carried = [total.inputs[0]]
        biased = only(y, "add")
        summed = makers.get(biased.inputs[0]) if biased is not None else None
        if biased is not None and summed is not None and summed.op == "all_reduce":
            nodes, carried = [biased, *nodes], [*carried, *biased.inputs]
        else:
            carried.append(y)
        chosen = only(gate, "take")
        if chosen is not None and chosen.inputs[1] in fixed:
            nodes, carried = [chosen, *nodes], [*carried, chosen.inputs[0]]
        else:
            carried.append(gate)
        if len(set(carried)) == len(carried):
            found[name] = _Sum(nodes, carried)
    return found


def _append_rotated(result: Graph, node: Node) -> bool:
    repeat, old = node.repeat, node.repeat.body
    sums = _sums(repeat)
    if not sums:
        return False
    carry, *others = repeat.divide(list(zip(old.inputs.items(), node.inputs, strict=True)))
    outer = {v: operand for group in others for (_, v), operand in group}
    gone = {n for one in sums.values() for n in one.nodes}
    body = replace(old, nodes=[], inputs={}, outputs={})
    operands: list[Value] = []
    results: list[Value] = []
    behind: list[tuple[_Sum, list[Value], Value]] = []
    ends = zip(carry, old.outputs.values(), node.outputs, strict=True)
    for ((name, v), operand), left, made in ends:
        one = sums.get(name)
        if one is None:
            body.inputs[name], body.outputs[name] = v, left
            operands.append(operand)
            results.append(made)
            continue
        names = [name, *(f"{name}_{i}" for i in range(1, len(one.carried)))]
        entering = [Value(n, x.type) for n, x in zip(names, one.carried, strict=True)]
        body.inputs |= zip(names, entering, strict=True)
        body.outputs |= zip(names, one.carried, strict=True)
        operands.append(operand)
        operands += (
            emit(result, "full", value=0.0, dtype=x.type.dtype, **x.type.sizes)
            for x in one.carried[1:]
        )
        one.again(body, entering, v, lambda invariant: invariant)
        parts = [result.fresh(x.type) for x in one.carried]
        results += parts
        behind.append((one, parts, made))
    for group in others:
        body.inputs |= dict(item for item, _ in group)
        operands += [operand for _, operand in group]
    body.nodes += [n for n in old.nodes if n not in gone]
    args = {"repeat": replace(repeat, body=body, num_carries=len(results))}
    result.nodes.append(Node("repeat", tuple(operands), tuple(results), node.attrs, args))
    for one, parts, made in behind:
        one.again(result, parts, made, outer.__getitem__)
    return True
