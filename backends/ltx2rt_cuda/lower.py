"""Lower a graph to one FX function of (inputs, weights).

A repeat's body becomes one GraphModule, called once per iteration with that iteration's tensors: compiled, it costs
one compilation whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import fx

from ltx2rt.graph.ir import Graph
from ltx2rt.graph.ir import Repeat as RepeatPlan
from ltx2rt.graph.ops import COLLECTIVES
from ltx2rt_cuda.distributed import ALONE, Position
from ltx2rt_cuda.ops import OPS

SEVERAL = ("repeat", "all_reduce", "all_to_all")  # ops that return a tuple even if it is of one


class Constant(torch.nn.Module):
    """An array of a node's plan: it moves with the module it is in, and belongs to no checkpoint."""

    def __init__(self, value: torch.Tensor):
        super().__init__()
        self.register_buffer("value", value, persistent=False)

    def forward(self):
        return self.value


class Repeat(torch.nn.Module):
    """Runs the block `count` times. Operands: carries, invariants, data [layers, ...], then a list per weight."""

    def __init__(self, plan: RepeatPlan, block: Callable):
        super().__init__()
        self.plan, self.block = plan, block

    def forward(self, *operands):
        plan = self.plan
        carry, invariant, per_layer = plan.divide(operands)
        stacked: list[tuple] = []
        for i in range(plan.count):
            results = self.block(*carry, *invariant, *(p[i] for p in per_layer))
            carry = results[: plan.num_carries]
            stacked.append(results[plan.num_carries :])
        return *carry, *(torch.stack(column) for column in zip(*stacked, strict=True))


def lower(graph: Graph, device: torch.device, compile: bool = False, position: Position = ALONE) -> fx.GraphModule:
    """A module called as module(*inputs, *weights) in the order of graph.inputs and graph.all_params()."""
    built = fx.Graph()
    modules: dict[str, torch.nn.Module] = {}
    env = {id(v): built.placeholder(f"in_{name}") for name, v in graph.inputs.items()}
    weights = {name: built.placeholder(f"w_{i}") for i, name in enumerate(graph.all_params())}
    env |= {id(v): weights[name] for name, v in graph.params.items()}
    for number, node in enumerate(graph.nodes):
        operands = tuple(env[id(v)] for v in node.inputs)
        if node.op == "repeat":
            plan = node.repeat
            block = lower(plan.body, device, position=position)
            modules[f"repeat_{number}"] = Repeat(plan, torch.compile(block, dynamic=False) if compile else block)
            own = {name for name in plan.body.params if "*" in name}
            lists = [
                built.call_function(_iterations, (weights[name], plan.first, plan.stop))
                if name in own
                else built.call_function(_shared, (weights[name], plan.count))
                for name in plan.body.all_params()
            ]
            result = built.call_module(f"repeat_{number}", (*operands, *lists))
        else:
            kwargs = {}
            for name, value in node.args.items():
                if isinstance(value, np.ndarray):
                    modules[f"constant_{number}_{name}"] = Constant(torch.from_numpy(value).to(device))
                    value = built.call_module(f"constant_{number}_{name}")
                kwargs[name] = value
            if node.op == "shard":
                kwargs["index"] = position.coordinates[kwargs.pop("mesh_axis")]
            elif node.op in COLLECTIVES:  # a group's name: FX can write a string into its code, but no process group
                kwargs["group"] = position.groups[kwargs.pop("mesh_axis")]
            result = built.call_function(OPS[node.op], operands, kwargs)
        if len(node.outputs) == 1 and node.op not in SEVERAL:
            env[id(node.outputs[0])] = result
        else:
            for i, v in enumerate(node.outputs):
                env[id(v)] = built.call_function(_item, (result, i))
    built.output(tuple(env[id(v)] for v in graph.outputs.values()))
    root = torch.nn.Module()
    for name, module in modules.items():
        root.add_module(name, module)
    return fx.GraphModule(root, built)


def _item(results, i: int):
    return results[i]


def _iterations(weights: list, first: int, stop: int) -> list:
    """A `*` weight's tensors that the iterations of a repeat read."""
    return weights[first:stop]


def _shared(weight, count: int) -> list:
    """A weight that all iterations share, as the list that a `*` weight already is."""
    return [weight] * count
