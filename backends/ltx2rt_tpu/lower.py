"""Lower a graph to one JAX function of (inputs, weights), to be traced under jit. A repeat is a
`lax.scan` over its stacked weights and data: XLA compiles its body once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from ltx2rt.graph.ir import Graph, Node
from ltx2rt.graph.ops import COLLECTIVES
from ltx2rt_tpu.ops import OPS

Ops = Mapping[str, Callable[..., Any]]
Arrays = Mapping[str, Array]
# Values of a block that are kept for its backward pass; weights that are gathered never are.
KEPT = {"block": None, "exchanges": jax.checkpoint_policies.save_only_these_names(*COLLECTIVES)}


def run(
    graph: Graph,
    weights: Arrays,
    inputs: list[Array],
    unrolled: bool = False,
    ops: Ops = OPS,
    remat: str = "none",
) -> list[Array]:
    """The graph's outputs. weights: by declared name; a `*` name holds one array with a leading
    layer axis. remat: of REMAT, for the backward pass of each iteration of a repeat."""
    env = {id(v): x for v, x in zip(graph.inputs.values(), inputs, strict=True)}
    env |= {id(v): weights[name] for name, v in graph.params.items()}
    params = set(map(id, graph.params.values()))
    for node in graph.nodes:
        operands = [env[id(v)] for v in node.inputs]
        if node.op == "repeat":
            results = _repeat(node, weights, operands, unrolled, ops, remat)
        else:
            result = ops[node.op](*operands, **node.args)
            results = result if isinstance(result, tuple) else (result,)
            weighs = not params.isdisjoint(map(id, node.inputs))
            if remat == "exchanges" and node.op in COLLECTIVES and not weighs:
                results = tuple(checkpoint_name(x, node.op) for x in results)
        for v, x in zip(node.outputs, results, strict=True):
            found = x.shape, x.dtype
            assert found == (v.type.shape, v.type.dtype), (
                f"{graph.name}: {node.op} gave {found}, typed {v.type}"
            )
            env[id(v)] = x
    return [env[id(v)] for v in graph.outputs.values()]


def _repeat(
    node: Node, weights: Arrays, operands: list[Array], unrolled: bool, ops: Ops, remat: str
) -> list[Array]:
    plan = node.repeat
    initial, invariant, data = plan.divide(operands)
    stacked = {name: weights[name] for name in plan.body.params if "*" in name}
    shared = {name: weights[name] for name in plan.body.all_params() if name not in stacked}
    # read in place: a slice would be a copy
    part = {name: x for name, x in stacked.items() if len(x) > plan.count}
    whole = {name: x for name, x in stacked.items() if name not in part}

    layers = jnp.arange(plan.first, plan.stop) if part else None

    def body(carry, per_layer):
        data, layer_weights, layer = per_layer
        for name, x in part.items():
            layer_weights[name] = lax.dynamic_index_in_dim(x, layer, keepdims=False)
        values = [*carry, *invariant, *data]
        results = run(plan.body, shared | layer_weights, values, ops=ops, remat=remat)
        return results[: plan.num_carries], results[plan.num_carries :]

    body = body if remat == "none" else jax.checkpoint(body, policy=KEPT[remat])
    how = {"length": plan.count, "unroll": plan.count if unrolled else 1}
    carry, outputs = lax.scan(body, initial, (data, whole, layers), **how)
    return [*carry, *outputs]
