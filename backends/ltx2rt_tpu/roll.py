"""roll: the residual blocks that read one value become one node, which is a loop over all their
convolutions. The vocoder has hundreds of them, which differ only in how many samples they read and
how far apart: XLA compiles one body for each of its rates. Other nodes stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ltx2rt.graph.ir import Graph, Node, Value
from ltx2rt_tpu.ops import OPS
from ltx2rt_tpu.ops.arrays import zeros_around
from ltx2rt_tpu.ops.convolutions import biased, matrix_taps

ACTIVATIONS = ("snake_beta", "leaky_relu")
HALF = ("pad", "conv")  # after an activation; a unit is two halves and the sum with its input


@dataclass(frozen=True)
class Unit:
    """x + conv2(act2(conv1(act1(x)))), zeros outside, as long as x."""

    nodes: Sequence[Node]

    @property
    def halves(self) -> Sequence[tuple[Node, Node]]:
        """Activation and convolution of both."""
        return [(self.nodes[i], self.nodes[i + 2]) for i in (0, 3)]

    @property
    def x(self) -> Value:
        return self.nodes[0].inputs[0]

    @property
    def result(self) -> Value:
        return self.nodes[-1].outputs[0]


def roll(graph: Graph) -> Graph:
    """Loops of equal results, sums in another order. SnakeBeta is one op already (`as_run`)."""
    nodes, blocks, i = [], [], 0
    while i < len(graph.nodes):
        unit = _unit(graph.nodes[i : i + 7])
        if unit is None:
            nodes += [*_rolled(blocks), graph.nodes[i]]
            blocks, i = [], i + 1
            continue
        if blocks and blocks[-1][-1].result is unit.x:
            blocks[-1].append(unit)
        else:
            blocks.append([unit])
        i += 7
    return replace(graph, nodes=[*nodes, *_rolled(blocks)])


def _unit(nodes: Sequence[Node]) -> Unit | None:
    if len(nodes) < 7 or nodes[0].op not in ACTIVATIONS:
        return None
    if tuple(node.op for node in nodes) != (nodes[0].op, *HALF) * 2 + ("add",):
        return None
    x = nodes[0].inputs[0]
    chained = all(b.inputs[0] is a.outputs[0] for a, b in pairwise(nodes[:6]))
    added = nodes[-1].inputs[0] is x and nodes[-1].inputs[1] is nodes[-2].outputs[0]
    alike = all(nodes[i].outputs[0].type == x.type for i in (0, 2, 3, 5, 6))
    even = all(len(set(nodes[i].args["widths"][2])) == 1 for i in (1, 4))
    return Unit(nodes) if chained and added and alike and even else None


def _rolled(blocks: Sequence[Sequence[Unit]]) -> list[Node]:
    """Blocks in a row, of those that read the same value and are as long one node."""
    found = []
    for _, same in groupby(blocks, key=lambda block: (id(block[0].x), len(block))):
        same = list(same)
        halves = [half for block in same for unit in block for half in unit.halves]
        activation, dilations = halves[0][0], [conv.args["dilation"][0] for _, conv in halves]
        args: dict[str, Any] = {
            "activation": activation.op,
            "args": activation.args,
            "blocks": len(same),
        }
        args["dilations"] = tuple(dilations)
        operands = [v for act, conv in halves for v in (*act.inputs[1:], *conv.inputs[1:])]
        inputs = (same[0][0].x, *operands)
        results = tuple(block[-1].result for block in same)
        found.append(Node("res_blocks", inputs, results, {}, args))
    return found


def res_blocks(
    x: Array, *operands: Array, activation: str, args, blocks: int, dilations: tuple[int, ...]
):
    """The result of every block. operands: the activation's, weight and bias of every half."""
    halves = len(dilations)
    each = [operands[i :: len(operands) // halves] for i in range(len(operands) // halves)]
    *of_activation, weights, biases = each
    stacks = [jnp.stack(several) for several in of_activation]
    bias, counts = jnp.stack(biases), [w.shape[2] for w in weights]
    taps = jnp.concatenate(weights, axis=2).transpose(2, 0, 1)
    firsts = jnp.array([sum(counts[:i]) for i in range(halves)])
    sizes, steps = jnp.array(counts), jnp.array(dilations)
    reach = [(n - 1) * d // 2 for n, d in zip(counts, dilations, strict=True)]
    most, reaches, time = max(reach), jnp.array(reach), x.shape[2]

    def at(stack, i):
        return lax.dynamic_index_in_dim(stack, i, keepdims=False, allow_negative_indices=False)

    def half(n, y):
        y = OPS[activation](y, *(at(s, n) for s in stacks), **args)
        y = zeros_around(y, ((0, 0), (0, 0), (most, most)))
        first, start, step = at(firsts, n), lax.sub(most, at(reaches, n)), at(steps, n)

        def matrix(tap):
            return at(taps, lax.add(first, tap))

        def begin(tap):
            return lax.add(start, lax.mul(tap, step))

        return biased(matrix_taps(matrix, y, begin, at(sizes, n), time), at(bias, n))

    def unit(i, y):
        return y + lax.fori_loop(0, 2, lambda h, z: half(2 * i + h, z), y)

    def block(_, i):
        per_block = halves // 2 // blocks
        return None, lax.fori_loop(0, per_block, lambda j, y: unit(i * per_block + j, y), x)

    _, results = lax.scan(block, None, jnp.arange(blocks))
    return tuple(results)


def mean_taps(graph: Graph) -> int | None:
    """Taps of the convolutions of a part that is a loop, on average; None for other parts."""
    node = graph.nodes[0]
    if node.op != "res_blocks":
        return None
    operands, halves = node.inputs[1:], len(node.args["dilations"])
    each = len(operands) // halves
    return round(sum(v.type.shape[2] for v in operands[each - 2 :: each]) / halves)


def parts(graph: Graph) -> list[Graph]:
    """A rolled graph's loops, and one graph for each part between; parameters are inputs."""
    groups = groupby(graph.nodes, key=lambda node: id(node) if node.op == "res_blocks" else None)
    found, read = [], {id(v) for v in graph.outputs.values()}
    for nodes in reversed([list(same) for _, same in groups]):
        inside = {id(v) for node in nodes for v in node.outputs}
        inputs = {v.name: v for node in nodes for v in node.inputs if id(v) not in inside}
        outputs = {v.name: v for node in nodes for v in node.outputs if id(v) in read}
        read |= {id(v) for v in inputs.values()}
        named = {"name": f"{graph.name}_{nodes[0].op}", "inputs": inputs, "outputs": outputs}
        found.append(replace(graph, **named, params={}, nodes=nodes))
    return found[::-1]


OPS["res_blocks"] = res_blocks
