"""Networks whose layers stay in the host's memory and come to the devices one by one.

    copies    | layer 1 | layer 2 |
    devices   | layer 0 | layer 1 | layer 2 |

XLA overlaps no copy from the host with the products of a loop, so a network runs as several
programs: one for what is before, behind and between its stacks of layers, one for a layer of each
stack. A layer is copied while the one before it is computed with; the layer after it is not begun
before that has ended, so that no more than two are on the devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, ShapeDtypeStruct, lax
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered

from ltx2rt.graph.ir import Graph
from ltx2rt_tpu.lower import Ops, run
from ltx2rt_tpu.program import abstract, compiler_options, is_tpu, on_mesh, own
from ltx2rt_tpu.weights import abstract_weights, weight_specs


class Layered:
    """The programs of a graph whose weights are in part `HostLayers`; hosted: names of these.

    Between programs every value has a first axis over all devices, as what a loop has prepared.
    """

    def __init__(self, graph: Graph, place: Sharding, hosted: frozenset[str], ops: Ops):
        self.graph, self.place, self.hosted, self.ops = graph, place, hosted, ops
        self.lead, self.specs = own(place), weight_specs(graph)
        self.parts = _parts(graph)
        self.functions = [self._function(part) for part in self.parts]
        self.spread = jax.jit(on_mesh(_led, place, P(), out=self.lead))
        self.whole = jax.jit(on_mesh(_own, place, self.lead, out=P()))

    def __call__(self, weights: Mapping[str, Any], inputs: Mapping[str, Array]) -> dict[str, Array]:
        given = self.spread([inputs[name] for name in self.graph.inputs])
        values = dict(zip(map(id, self.graph.inputs.values()), given, strict=True))
        for part, function in zip(self.parts, self.functions, strict=True):
            read = {name: weights[name] for name in part.all_params()}
            operands = [values[id(v)] for v in part.inputs.values()]
            run_part = self._iterated if part.repeats else _called
            results = run_part(part, function, read, operands)
            values |= zip(map(id, part.outputs.values()), results, strict=True)
        results = self.whole([values[id(v)] for v in self.graph.outputs.values()])
        return dict(zip(self.graph.outputs, results, strict=True))

    def _iterated(
        self, part: Graph, function: Any, weights: Mapping[str, Any], operands: list[Array]
    ) -> list[Array]:
        (plan,) = part.repeats
        still = {name: x for name, x in weights.items() if name not in self.hosted}
        moved = {name: x for name, x in weights.items() if name in self.hosted}
        carry, others = operands[: plan.num_carries], operands[plan.num_carries :]
        made = self._empty(part)()
        arriving = {name: x.brought(plan.first) for name, x in moved.items()}
        for i in range(plan.count):
            here, arriving = arriving, {}
            jax.block_until_ready(carry)  # the memory of the layer before this one is free
            if i + 1 < plan.count:
                arriving = {name: x.brought(plan.first + i + 1) for name, x in moved.items()}
            carry, made = function(here, still, carry, others, made, np.int32(i))
        return [*carry, *made]

    def _empty(self, part: Graph) -> Any:
        """A program that makes room for what the iterations of a repeat make, stacked."""
        stacked = list(part.outputs.values())[part.repeats[0].num_carries :]
        types = [v.type for v in stacked]
        make = on_mesh(
            lambda: [jnp.zeros((1, *t.shape), t.dtype) for t in types], self.place, out=self.lead
        )
        return jax.jit(make)

    def _function(self, part: Graph) -> Any:
        """The program of a part, or of one iteration of its repeat."""
        options, names = compiler_options(part, self.place), part.all_params()
        if not part.repeats:

            def between(weights: Mapping[str, Array], operands: list[Array]) -> list[Array]:
                return _led(run(part, weights, _own(operands), ops=self.ops))

            specs = {name: self.specs[name] for name in names}, self.lead
            function = on_mesh(between, self.place, *specs, out=self.lead)
            return jax.jit(function, compiler_options=options)
        (plan,) = part.repeats

        def layer(
            here: dict[str, Array], still: dict[str, Array], carry: list[Array],
            others: list[Array], made: list[Array], i: Array,
        ) -> tuple[list[Array], list[Array]]:  # fmt: skip
            def of_layer(x: Array, layer: Any = i) -> Array:
                return lax.dynamic_index_in_dim(x, layer, 0, False)

            weights = {name: x[0] for name, x in here.items()} | {
                name: of_layer(x, plan.first + i) if "*" in name else x for name, x in still.items()
            }
            fixed, data = _own(others)[: plan.num_invariants], _own(others)[plan.num_invariants :]
            operands = [*_own(carry), *fixed, *map(of_layer, data)]
            results = run(plan.body, weights, operands, ops=self.ops)
            rows = zip(made, results[plan.num_carries :], strict=True)
            made = [lax.dynamic_update_index_in_dim(m, x[None], i, 1) for m, x in rows]
            return _led(results[: plan.num_carries]), made

        specs = [
            {name: self.specs[name] for name in names if (name in self.hosted) == hosted}
            for hosted in (True, False)
        ]
        function = on_mesh(
            layer, self.place, *specs, self.lead, self.lead, self.lead, P(), out=self.lead
        )
        donated = (4,) if is_tpu(self.place) else ()
        return jax.jit(function, compiler_options=options, donate_argnums=donated)

    def lowered(self) -> Iterator[Lowered]:
        """Every program, for devices that are not here."""
        place = self.place
        parts = NamedSharding(place.mesh, self.lead) if isinstance(place, NamedSharding) else place

        def here(found: Any) -> Any:
            return jax.tree.map(lambda x: ShapeDtypeStruct(x.shape, x.dtype, sharding=parts), found)

        weights = abstract_weights(self.graph, place)
        for name in self.hosted:
            x = weights[name]
            weights[name] = ShapeDtypeStruct((1, *x.shape[1:]), x.dtype, sharding=x.sharding)
        given = here(self.spread.eval_shape(list(abstract(self.graph.inputs, place).values())))
        values = dict(zip(map(id, self.graph.inputs.values()), given, strict=True))
        for part, function in zip(self.parts, self.functions, strict=True):
            read = {name: weights[name] for name in part.all_params()}
            operands = [values[id(v)] for v in part.inputs.values()]
            arguments: tuple[Any, ...] = read, operands
            if part.repeats:
                cut = part.repeats[0].num_carries
                hosted = {name: x for name, x in read.items() if name in self.hosted}
                still = {name: x for name, x in read.items() if name not in self.hosted}
                made = here(self._empty(part).eval_shape())
                layer = ShapeDtypeStruct((), "int32")
                arguments = hosted, still, operands[:cut], operands[cut:], made, layer
            yield function.lower(*arguments)
            found = here(function.eval_shape(*arguments))
            results = [*found[0], *found[1]] if part.repeats else found
            values |= zip(map(id, part.outputs.values()), results, strict=True)


def _called(
    part: Graph, function: Any, weights: Mapping[str, Any], operands: list[Array]
) -> list[Array]:
    return function(weights, operands)


def _own(values: Sequence[Array]) -> list[Array]:
    return [x[0] for x in values]


def _led(values: Sequence[Array]) -> list[Array]:
    return [x[None] for x in values]


def _parts(graph: Graph) -> list[Graph]:
    """Each repeat of a graph alone, and as one graph each what is between two of them."""
    groups = groupby(graph.nodes, key=lambda node: id(node) if node.op == "repeat" else None)
    found, read = [], {id(v) for v in graph.outputs.values()}
    params = {id(v): name for name, v in graph.params.items()}
    for nodes in reversed([list(same) for _, same in groups]):
        made = {id(v) for node in nodes for v in node.outputs}
        taken = [v for node in nodes for v in node.inputs if id(v) not in made]
        if nodes[0].op != "repeat":
            taken = [v for v in {id(v): v for v in taken}.values() if id(v) not in params]
        results = [v for node in nodes for v in node.outputs]
        if nodes[0].op != "repeat":
            results = [v for v in results if id(v) in read]
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
