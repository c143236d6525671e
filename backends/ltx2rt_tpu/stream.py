"""Networks with layers in the host's memory, copied to the devices one by one.

    copies    | layer 1 | layer 2 |
    devices   | layer 0 | layer 1 | layer 2 |

XLA overlaps no copy from the host with the products of a loop, so a network runs as several
programs: one for each part before, behind and between its stacks of layers, one for a layer of each
stack. A layer is copied while the one before it is computed with, the next one once that has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding

from ltx2rt.graph.ir import Graph, Value
from ltx2rt.placement.stream import layers
from ltx2rt_tpu.lower import Ops, run
from ltx2rt_tpu.program import compiler_options, is_tpu, on_mesh, own
from ltx2rt_tpu.weights import weight_specs


class Layered:
    """Programs of a graph with some weights in `HostLayers`; hosted: their names. Between programs
    every value has a first axis over all devices, like a loop's prepared values."""

    def __init__(self, graph: Graph, place: Sharding, hosted: frozenset[str], ops: Ops):
        self.graph, self.place, self.hosted, self.ops = graph, place, hosted, ops
        self.lead, self.specs = own(place), weight_specs(graph)
        self.parts = _parts(graph)
        self.functions = [self._function(part) for part in self.parts]
        self.spread = jax.jit(on_mesh(_led, place, P(), out=self.lead))
        self.whole = jax.jit(on_mesh(_own, place, self.lead, out=P()))

    def __call__(self, weights: Mapping[str, Any], inputs: Mapping[str, Array]) -> dict[str, Array]:
        given = self.call(self.spread, [inputs[name] for name in self.graph.inputs])
        values = dict(zip(map(id, self.graph.inputs.values()), given, strict=True))
        for part, function in zip(self.parts, self.functions, strict=True):
            read = {name: weights[name] for name in part.all_params()}
            operands = [values[id(v)] for v in part.inputs.values()]
            if part.repeats:
                results = self._iterated(part, function, read, operands)
            else:
                results = self.call(function, read, operands)
            values |= zip(map(id, part.outputs.values()), results, strict=True)
        results = self.call(self.whole, [values[id(v)] for v in self.graph.outputs.values()])
        return dict(zip(self.graph.outputs, results, strict=True))

    def call(self, program: Any, *operands: Any) -> Any:
        return program(*operands)

    def _iterated(
        self,
        part: Graph,
        layers: Sequence[Layer],
        weights: Mapping[str, Any],
        operands: list[Array],
    ) -> list[Array]:
        (plan,) = part.repeats
        values = dict(zip(map(id, plan.body.inputs.values()), operands, strict=True))
        made, results = self.call(self._empty(part)), list(plan.body.outputs.values())
        order = [(i, layer) for i in range(plan.count) for layer in layers]
        arriving = order[0][1].brought(weights, plan.first)
        latest, carry = operands[: plan.num_carries], []
        for (i, layer), after in zip(order, [*order[1:], None], strict=True):
            here, arriving = arriving, {}
            jax.block_until_ready(latest)  # the memory of the layer before this one is free
            if after is not None:
                arriving = after[1].brought(weights, plan.first + after[0])
            still = {name: weights[name] for name in layer.still}
            given = [values[id(v)] for v in layer.given]
            rows = [made[n] for n in layer.rows]
            latest, rows = self.call(layer.function, here, still, given, rows, np.int32(i))
            values |= zip(map(id, layer.graph.outputs.values()), latest, strict=True)
            for n, x in zip(layer.rows, rows, strict=True):
                made[n] = x
            if layer is layers[-1]:
                carry = [values[id(v)] for v in results[: plan.num_carries]]
                inputs = list(plan.body.inputs.values())[: plan.num_carries]
                values |= zip(map(id, inputs), carry, strict=True)
        return [*carry, *made]

    def _empty(self, part: Graph) -> Any:
        """A program that allocates the stacked results of a repeat's iterations."""
        types = [v.type for v in list(part.outputs.values())[part.repeats[0].num_carries :]]

        def make() -> list[Array]:
            return [jnp.zeros((1, *t.shape), t.dtype) for t in types]

        return jax.jit(on_mesh(make, self.place, out=self.lead))

    def _function(self, part: Graph) -> Any:
        """The program of a part, or of its repeat's layers."""
        options, names = compiler_options(part, self.place), part.all_params()
        if not part.repeats:

            def between(weights: Mapping[str, Array], operands: list[Array]) -> list[Array]:
                return _led(run(part, weights, _own(operands), ops=self.ops))

            weights_lie = {name: self.specs[name] for name in names}
            function = on_mesh(between, self.place, weights_lie, self.lead, out=self.lead)
            return jax.jit(function, compiler_options=options)
        return [self._layer(part, graph, options) for graph in layers(part.repeats[0].body)]

    def _layer(self, part: Graph, graph: Graph, options: Any) -> Layer:
        """graph: what one layer of the body of the part's repeat computes."""
        (plan,) = part.repeats
        names = {id(v): name for name, (v, _) in part.all_params().items()}
        read = {*graph.all_params()}
        read.update(names[k] for k in map(id, graph.inputs.values()) if k in names)
        data = list(map(id, plan.body.inputs.values()))[plan.num_carries + plan.num_invariants :]
        given = [v for v in graph.inputs.values() if id(v) not in names]
        ends = list(map(id, plan.body.outputs.values()))[plan.num_carries :]
        made = list(map(id, graph.outputs.values()))
        rows = [n for n, end in enumerate(ends) if end in made]

        def function(
            here: dict[str, Array], still: dict[str, Array], operands: list[Array],
            stacked: list[Array], i: Array
        ) -> tuple[list[Array], list[Array]]:  # fmt: skip
            def of_layer(x: Array, layer: Any = i) -> Array:
                return lax.dynamic_index_in_dim(x, layer, 0, False)

            weights = {name: x[0] for name, x in here.items()} | {
                name: of_layer(x, plan.first + i) if "*" in name else x for name, x in still.items()
            }
            values = {
                id(v): of_layer(x) if id(v) in data else x
                for v, x in zip(given, _own(operands), strict=True)
            }
            values |= {key: weights[name] for key, name in names.items() if name in weights}
            inputs = [values[id(v)] for v in graph.inputs.values()]
            results = run(graph, weights, inputs, ops=self.ops)
            new = [results[made.index(ends[n])] for n in rows]
            stacked = [
                lax.dynamic_update_index_in_dim(m, x[None], i, 1)
                for m, x in zip(stacked, new, strict=True)
            ]
            return _led(results), stacked

        hosted, still = sorted(read & self.hosted), sorted(read - self.hosted)
        specs = [{name: self.specs[name] for name in each} for each in (hosted, still)]
        placed = on_mesh(function, self.place, *specs, self.lead, self.lead, P(), out=self.lead)
        donated = (3,) if is_tpu(self.place) else ()
        jitted = jax.jit(placed, compiler_options=options, donate_argnums=donated)
        return Layer(graph, jitted, hosted, still, given, rows)


@dataclass(frozen=True)
class Layer:
    """One layer of a repeat's body. hosted, still: weights that it reads, by where they are; given:
    its other operands; rows: which of the results that the repeat stacks it makes."""

    graph: Graph
    function: Any
    hosted: Sequence[str]
    still: Sequence[str]
    given: Sequence[Value]
    rows: Sequence[int]

    def brought(self, weights: Mapping[str, Any], layer: int) -> dict[str, Array]:
        """Its weights of an iteration, on their way to the devices."""
        return {name: weights[name].brought(layer) for name in self.hosted}


def _own(values: Sequence[Array]) -> list[Array]:
    return [x[0] for x in values]


def _led(values: Sequence[Array]) -> list[Array]:
    return [x[None] for x in values]


def _parts(graph: Graph) -> list[Graph]:
    """Split a graph into its repeats and the parts between them."""
    groups = groupby(graph.nodes, key=lambda node: id(node) if node.op == "repeat" else None)
    found, read = [], {id(v) for v in graph.outputs.values()}
    params = {id(v): name for name, v in graph.params.items()}
    for nodes in reversed([list(same) for _, same in groups]):
        made = {id(v) for node in nodes for v in node.outputs}
        taken = [v for node in nodes for v in node.inputs if id(v) not in made]
        if nodes[0].op != "repeat":
            taken = [v for v in dict.fromkeys(taken) if id(v) not in params]
        repeats = nodes[0].op == "repeat"
        results = [v for node in nodes for v in node.outputs if repeats or id(v) in read]
        names = {params[id(v)] for node in nodes for v in node.inputs if id(v) in params}
        part = Graph(f"{graph.name}_{len(found)}", mesh=graph.mesh, nodes=nodes)
        part.inputs = {f"in_{i}": v for i, v in enumerate(taken)}
        part.outputs = {f"out_{i}": v for i, v in enumerate(results)}
        if nodes[0].op != "repeat":
            part.params = {name: graph.params[name] for name in graph.params if name in names}
            part.layouts = {n: graph.layouts[n] for n in part.params if n in graph.layouts}
        read |= {id(v) for v in taken}
        found.append(part)
    return found[::-1]
