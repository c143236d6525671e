"""Lower a graph to one FX function of (inputs, weights). A repeat's body becomes one GraphModule,
called with each iteration's tensors: it is compiled once whatever the number of layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import getitem
from typing import Any

import numpy as np
import torch
from torch import fx

from ltx2rt.graph.ir import Graph, Node, Value
from ltx2rt.graph.ir import Repeat as RepeatPlan
from ltx2rt.graph.ops import COLLECTIVES
from ltx2rt.placement.stream import layers
from ltx2rt.scheduling import in_use
from ltx2rt_cuda.distributed import ALONE, Position
from ltx2rt_cuda.ops import OPS
from ltx2rt_cuda.ops.exchanges import arrived
from ltx2rt_cuda.ops.products import rows_linear, with_rows
from ltx2rt_cuda.quantised import QuantisedRows
from ltx2rt_cuda.stream import HostTensor

SEVERAL = (
    "repeat",
    "all_reduce",
    "all_to_all",
    "swap_edges",
)  # ops that return a tuple even if it is of one


class Constant(torch.nn.Module):
    """An array of a node's plan: it moves with its module, and belongs to no checkpoint."""

    def __init__(self, value: torch.Tensor):
        super().__init__()
        self.register_buffer("value", value, persistent=False)

    def forward(self):
        return self.value


class RepeatModule(torch.nn.Module):
    """Runs the block `count` times. Operands: carries, invariants, data [layers, ...], a list per
    weight. sums: data made of invariants and weights, for all iterations at once."""

    def __init__(self, plan: RepeatPlan, block: Callable, sums: Sums, compiled: bool):
        super().__init__()
        self.plan, self.block, self.sums, self.compiled = plan, block, sums, compiled

    def iterations(self, operands: Sequence) -> tuple[list, list, list]:
        """The block's operands: carries, invariants, and the operands of each iteration."""
        carry, invariant, per_layer = self.plan.divide(operands)
        num_data = len(self.plan.body.inputs) - len(carry) - len(invariant)
        data, stacks = per_layer[:num_data], per_layer[num_data:]
        lists = dict(zip(self.plan.body.all_params(), stacks, strict=True))
        return carry, invariant, [*data, *self.sums(invariant, lists), *lists.values()]

    def forward(self, *operands):
        plan = self.plan
        carry, invariant, per_layer = self.iterations(operands)
        # as the block leaves them: it is not compiled once more for the branches' common start
        if self.compiled:
            carry = [x.contiguous() for x in carry]
        # filled as they come: a list and its stack would be twice the memory
        stacked: list[torch.Tensor] = []
        for i in range(plan.count):
            results = self.block(*carry, *invariant, *(p[i] for p in per_layer))
            carry = results[: plan.num_carries]
            for number, result in enumerate(results[plan.num_carries :]):
                if i == 0:
                    stacked.append(result.new_empty((plan.count, *result.shape)))
                stacked[number][i] = result
        return *carry, *stacked


class BlockModule(torch.nn.Module):
    """The body of a repeat: for each layer in it a module, called with that layer's weights on the
    device. Operands: body.inputs, then a weight for each of body.all_params()."""

    def __init__(self, body: Graph, parts: Sequence[Graph], modules: Sequence[torch.nn.Module]):
        super().__init__()
        self.operands, self.results = _operands(body), _results(body)
        self.given, self.made = [*map(_operands, parts)], [*map(_results, parts)]
        self.layers = torch.nn.ModuleList(modules)

    def forward(self, *operands):
        values = dict(zip(self.operands, operands, strict=True))
        for given, layer, made in zip(self.given, self.layers, self.made, strict=True):
            arguments = [values[key] for key in given]
            kept = next((x for x in arguments if isinstance(x, HostTensor)), None)
            if kept is not None:
                arguments = kept.ring.brought(arguments)
            try:
                values |= zip(made, layer(*arguments), strict=True)
            finally:  # a recomputed block may be left before its end
                if kept is not None:
                    kept.ring.used(kept.piece)
        return tuple(values[key] for key in self.results)


def _operands(graph: Graph) -> list[int]:
    """Keys of the values that a module of the graph is called with."""
    return [id(v) for v in (*graph.inputs.values(), *(v for v, _ in graph.all_params().values()))]


def _results(graph: Graph) -> list[int]:
    return [id(v) for v in graph.outputs.values()]


VIEWS = ("at", "slice", "rename")
OWN = ("linear", "quantised_linear", "gelu_quantised_linear", "sum_squares")
ROWS = 2**20  # numbers of a layer's sum at most


class Sums(torch.nn.Module):
    """Sums of a view of an invariant and a view of the layer's weight, such as AdaLN's rows of this
    step and the layer's table: for all layers in two launches instead of one for each."""

    def __init__(
        self, plan: RepeatPlan, nodes: Sequence[Node], kinds: dict[int, str], device: torch.device
    ):
        """nodes: the sums; kinds: of the body's values, "row" of invariants, "table" of weights."""
        super().__init__()
        self.count, self.names, self.shapes = plan.count, [], []
        operands: dict[str, list[Value]] = {"row": [], "table": []}
        for node in nodes:
            shapes = {}
            for v, shape in zip(node.inputs, node.args["views"], strict=True):
                operands[kinds[id(v)]].append(v)
                shapes[kinds[id(v)]] = shape
            self.shapes.append((shapes["row"], shapes["table"]))
        if not nodes:
            return
        rows, tables = (_views(plan.body, operands[kind]) for kind in ("row", "table"))
        rows.inputs = dict(plan.divide(list(plan.body.inputs.items()))[1])
        tables.params = {name: v for name, v in plan.body.params.items() if id(v) in _read(tables)}
        self.names = list(tables.params)
        self.rows, self.tables = lower(rows, device), lower(tables, device)

    def forward(self, invariant: Sequence, lists: Mapping[str, Sequence]) -> list[torch.Tensor]:
        if not self.shapes:
            return []
        tables = [self.tables(*(lists[name][i] for name in self.names)) for i in range(self.count)]
        columns, rows = zip(*tables, strict=True), self.rows(*invariant)
        return [
            row.reshape(1, *row_shape) + torch.stack(column).reshape(self.count, *shape)
            for row, column, (row_shape, shape) in zip(rows, columns, self.shapes, strict=True)
        ]


def _views(body: Graph, values: Sequence[Value]) -> Graph:
    """The nodes that make `values`, without the inputs and parameters that it reads."""
    graph = Graph(body.name, outputs={str(i): v for i, v in enumerate(values)})
    for node in reversed(body.nodes):
        if _read(graph) & set(map(id, node.outputs)):
            graph.nodes.insert(0, node)
    return graph


def _read(graph: Graph) -> set[int]:
    return {id(v) for v in graph.read()}


def _summed(plan: RepeatPlan, device: torch.device) -> tuple[Graph, Sums]:
    """The body of a repeat without its sums of rows, which it then reads as data, and these."""
    body = plan.body
    if not in_use("sums"):
        return body, Sums(plan, [], {}, device)
    kinds = {id(v): "table" for name, v in body.params.items() if "*" in name}
    _, invariant, _ = plan.divide(list(body.inputs.values()))
    kinds |= {id(v): "row" for v in invariant}
    sums: list[Node] = []
    for node in body.nodes:
        found = [kinds.get(id(v)) for v in node.inputs]
        if node.op in VIEWS and found[0]:
            kinds[id(node.outputs[0])] = found[0]
        elif node.op == "add" and set(found) == {"row", "table"}:
            sums += [node] if node.outputs[0].type.num_elements <= ROWS else []
    data = {f"sum_{i}": node.outputs[0] for i, node in enumerate(sums)}
    left = [node for node in body.nodes if node not in sums]
    return replace(body, nodes=left, inputs=body.inputs | data), Sums(plan, sums, kinds, device)


def lower(
    graph: Graph,
    device: torch.device,
    compile: bool = False,
    position: Position = ALONE,
    carries: int = 0,
) -> fx.GraphModule:
    """A module of (*inputs, *weights) in the order of graph.inputs and graph.all_params(). carries:
    first results that are the next call's inputs, perhaps still in flight."""
    lowering = _Lowering(graph, device, compile, position, carries)
    for number, node in enumerate(graph.nodes):
        (lowering.repeat if node.op == "repeat" else lowering.call)(number, node)
    return lowering.finished()


class _Lowering:
    """A graph, on its way to an FX function."""

    def __init__(
        self, graph: Graph, device: torch.device, compile: bool, position: Position, carries: int
    ):
        self.graph, self.device, self.compile = graph, device, compile
        self.position, self.own = position, _own(graph)
        self.rows = QuantisedRows.of(graph)
        self.quantised: dict[int, list[fx.Node]] = {}  # numbers and scales by the value
        self.built = fx.Graph()
        self.modules: dict[str, torch.nn.Module] = {}
        self.env = {id(v): self.built.placeholder(f"in_{name}") for name, v in graph.inputs.items()}
        self.weights = {
            name: self.built.placeholder(f"w_{i}") for i, name in enumerate(graph.all_params())
        }
        self.env |= {id(v): self.weights[name] for name, v in graph.params.items()}
        self.on_the_way = _on_the_way(graph, carries)
        # mesh axes by the values that are on their way
        inputs = list(graph.inputs.values())
        self.travelling = {id(inputs[i]): axis for i, axis in self.on_the_way.items()}

    def read(self, v: Value) -> fx.Node:
        """The first reader of an exchange's result waits for it."""
        if id(v) in self.travelling:
            self.arrive(id(v))
        return self.env[id(v)]

    def arrive(self, key: int) -> None:
        del self.travelling[key]
        self.env[key] = self.built.call_function(arrived, (self.env[key],))

    def keep(self, values: Sequence[Value], result: fx.Node) -> None:
        """`values` are the items of a result."""
        for i, v in enumerate(values):
            self.env[id(v)] = self.built.call_function(getitem, (result, i))

    def repeat(self, number: int, node: Node) -> None:
        operands, plan = tuple(map(self.read, node.inputs)), node.repeat
        body, sums = _summed(plan, self.device)
        parts = layers(body)
        carries = 0 if self.compile or len(parts) > 1 else plan.num_carries
        how = {"position": self.position, "carries": carries}
        blocks: list[Any] = [lower(part, self.device, **how) for part in parts]
        if self.compile:
            blocks = [torch.compile(block, dynamic=False) for block in blocks]
        block = BlockModule(body, parts, blocks)
        self.modules[f"repeat_{number}"] = RepeatModule(plan, block, sums, self.compile)
        lists = []
        for name in plan.body.all_params():
            own = "*" in name and name in plan.body.params
            bounds = (plan.first, plan.stop) if own else (plan.count,)
            function = _iterations if own else _shared
            lists.append(self.built.call_function(function, (self.weights[name], *bounds)))
        result = self.built.call_module(f"repeat_{number}", (*operands, *lists))
        if not self.compile:
            found = _on_the_way(plan.body, plan.num_carries)
            self.travelling |= {id(node.outputs[i]): axis for i, axis in found.items()}
        self.keep(node.outputs, result)

    def call(self, number: int, node: Node) -> None:
        if node.op == "slice" and id(node.outputs[0]) in self.rows.unread:
            return
        if id(node) in self.rows.reads:
            return self.multiply(node)
        operands, kwargs = tuple(map(self.read, node.inputs)), {}
        for name, value in node.args.items():
            if isinstance(value, np.ndarray):
                constant = f"constant_{number}_{name}"
                self.modules[constant] = Constant(torch.from_numpy(value).to(self.device))
                value = self.built.call_module(constant)
            kwargs[name] = value
        if node.op == "shard":
            kwargs["index"] = self.position.coordinates[kwargs.pop("mesh_axis")]
        elif node.op in COLLECTIVES:
            self.exchange(node, kwargs)
        elif id(node) in self.rows.numbers:
            return self.quantise(node, operands, kwargs)
        result = self.built.call_function(OPS[node.op], operands, kwargs)
        if len(node.outputs) == 1 and node.op not in SEVERAL:
            self.env[id(node.outputs[0])] = result
        else:
            self.keep(node.outputs, result)

    def quantise(self, node: Node, operands: tuple[fx.Node, ...], kwargs: dict[str, Any]) -> None:
        """A norm, and the rows of its results for products."""
        numbers = tuple(self.rows.numbers[id(node)])
        unread = tuple(i for i, v in enumerate(node.outputs) if id(v) in self.rows.unread)
        kwargs |= {"op": node.op, "quantised": numbers, "unread": unread}
        result = self.built.call_function(with_rows, operands, kwargs)
        self.keep(node.outputs, result)
        for place, i in enumerate(numbers):
            first = len(node.outputs) + 2 * place
            items = [self.built.call_function(getitem, (result, first + n)) for n in (0, 1)]
            self.quantised[id(node.outputs[i])] = items

    def multiply(self, node: Node) -> None:
        """A quantised linear of rows that a norm has quantised."""
        x, cut = self.rows.reads[id(node)]
        rows = self.quantised[id(x)]
        if cut is not None:
            cut_off = partial(self.built.call_function, OPS["slice"], kwargs=dict(cut.args))
            rows = [cut_off((part,)) for part in rows]
        operands = (*rows, *map(self.read, node.inputs[1:]))
        kwargs = {**node.args, "dtype": x.type.dtype}
        self.env[id(node.outputs[0])] = self.built.call_function(rows_linear, operands, kwargs)

    def exchange(self, node: Node, kwargs: dict[str, Any]) -> None:
        """Name the group of a collective (FX can write a string into its code, but no process
        group), and let what travels over other axes arrive: NCCL wants an order among exchanges of
        several communicators, or devices may wait for each other."""
        axis = kwargs.pop("mesh_axis")
        if node.op == "swap_edges":
            kwargs["index"] = self.position.coordinates[axis]
        kwargs["group"] = self.position.groups[axis]
        for key in [key for key, other in self.travelling.items() if other != axis]:
            self.arrive(key)
        if node.op == "all_reduce":
            kwargs["in_place"] = all(id(v) in self.own for v in node.inputs)
            self.travelling |= {id(v): axis for v in node.outputs}

    def finished(self) -> fx.GraphModule:
        results = list(self.graph.outputs.values())
        left = {id(v) for i, v in enumerate(results) if i in self.on_the_way}
        # Also what nothing reads: a recording ends when all that it has begun has arrived.
        for key in self.travelling.keys() - left:
            self.arrive(key)
        self.built.output(tuple(self.env[id(v)] for v in results))
        root = torch.nn.Module()
        for name, module in self.modules.items():
            root.add_module(name, module)
        return fx.GraphModule(root, self.built)


def _on_the_way(body: Graph, carries: int) -> dict[int, str]:
    """Which of the values that a repeat carries are results of an all-reduce as it is, which the
    next iteration is the first to read, and over which mesh axis."""
    made = [node for node in body.nodes if node.op == "all_reduce"]
    sums = {id(v): node.attrs["mesh_axis"] for node in made for v in node.outputs}
    read = {id(v) for node in body.nodes for v in node.inputs}
    carried = list(body.outputs.values())[:carries]
    return {i: sums[id(v)] for i, v in enumerate(carried) if id(v) in sums and id(v) not in read}


def _own(graph: Graph) -> set[int]:
    """Values that own their memory and are read once, by one node."""
    readers = Counter(map(id, graph.read()))
    made = (v for node in graph.nodes if node.op in OWN for v in node.outputs)
    return {id(v) for v in made if readers[id(v)] == 1}


def _iterations(weights: list, first: int, stop: int) -> list:
    """A `*` weight's tensors that the iterations of a repeat read."""
    return weights[first:stop]


def _shared(weight, count: int) -> list:
    """A weight that all iterations share, as the list that a `*` weight already is."""
    return [weight] * count
