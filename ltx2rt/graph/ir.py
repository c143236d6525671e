"""The intermediate representation: values with named axes, nodes in execution order, graphs.

Decides what a graph *is*. The meaning of an op is in `ops`, how model text becomes a graph in
`trace`, which graphs are legal in `verify`.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

from ltx2rt.errors import GraphError
from ltx2rt.graph.encodings import E4M3

T = TypeVar("T")
Axes = tuple[str, ...]  # names
Sizes = dict[str, int]  # by the names of axes, in their order
Spatial = tuple[int, ...]  # a number for each spatial axis
Grid = tuple[int, int, int]  # a number for frames, rows, columns

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "int32": 4, E4M3: 1, "int8": 1, "uint8": 1}
SHORT = dict(zip(DTYPE_BYTES, ("f32", "bf16", "i32", "f8", "i8", "u8"), strict=True))
Cut = tuple[int, int, int]  # (dim, start, stop): a slice of a tensor along one dimension


@lru_cache(2**14)  # a run asks for 2784 names of LTX-2.3's transformer before each stage
def numbered(name: str, iteration: int) -> str:
    """A parameter's name in one iteration of a repeat: `*` is the number, `6*+5` 6 times it + 5."""
    return re.sub(
        r"(\d+)\*\+(\d+)|\*", lambda m: str(int(m[1] or 1) * iteration + int(m[2] or 0)), name
    )


@dataclass(frozen=True)
class Type:
    """Named axes with concrete sizes, and a dtype. "heads*head_dim" is two axes stored as one."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    def size(self, axis: str) -> int:
        return self.shape[self.axes.index(axis)]

    def stacked(self, axis: str, count: int) -> Type:
        """The type of `count` values of this one, stacked along a new first axis."""
        return self.replaced(0, 0, {axis: count})

    def unstacked(self) -> Type:
        """The type without its first axis."""
        return self.replaced(0, 1, {})

    def replaced(self, start: int, stop: int, sizes: Mapping[str, int]) -> Type:
        """The type with the axes of `sizes` in the place of those at positions [start, stop)."""
        axes = (*self.axes[:start], *sizes, *self.axes[stop:])
        return Type(axes, (*self.shape[:start], *sizes.values(), *self.shape[stop:]), self.dtype)

    def resized(self, axis: str, size: int) -> Type:
        """The type with another size of one axis."""
        i = self.axes.index(axis)
        return self.replaced(i, i + 1, {axis: size})

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.axes, self.shape, strict=True))

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        sizes = (f"{a}={n}" for a, n in zip(self.axes, self.shape, strict=True))
        return f"{SHORT[self.dtype]}[{', '.join(sizes)}]"


@dataclass(frozen=True, eq=False)
class Value:
    """One SSA value. Compared by identity; the name serves printing and errors."""

    name: str
    type: Type


@dataclass(frozen=True, eq=False)
class Node:
    """One operation.

    attrs: the model text's attributes, in axis names; passes read and print these.
    args: the same, resolved to positions for these operand types; lowerings and the interpreter
    read only this. typed: the mark of a node that follows its rule; a node is never changed, and
    passes hand on most of them.
    """

    op: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attrs: Mapping[str, Any]
    args: Mapping[str, Any]
    typed: bool = field(default=False, init=False, repr=False)

    def mark_typed(self) -> Node:
        object.__setattr__(self, "typed", True)
        return self

    @property
    def repeat(self) -> Repeat:
        """The body of a `repeat` node, and how often it runs."""
        return self.args["repeat"]


class Replaced(dict[Value, Value]):
    """Values of a new graph by those of an old one; any other value stands for itself."""

    def __missing__(self, v: Value) -> Value:
        return v

    def node(self, node: Node) -> Node:
        """The node on the new values; itself if it reads none."""
        inputs = tuple(self[v] for v in node.inputs)
        return node if inputs == node.inputs else replace(node, inputs=inputs)

    def outputs(self, graph: Graph) -> dict[str, Value]:
        """The graph's outputs."""
        return {name: self[v] for name, v in graph.outputs.items()}


def rewrite(node: Node, change: Callable[[Graph], Graph]) -> Node:
    """`node` itself, or a repeat with its body changed by `change`."""
    if node.op != "repeat":
        return node
    return replace(node, args={"repeat": replace(node.repeat, body=change(node.repeat.body))})


def replace_repeats(graph: Graph, append: Callable[[Graph, Node], bool]) -> Graph:
    """`graph` with other nodes for its repeats, at any depth; itself if all stay. append(result,
    node): append the replacement to `result`, or return False."""
    result = replace(graph, nodes=[])
    for node in graph.nodes:
        if node.op != "repeat":
            result.nodes.append(node)
        elif not append(result, node):
            body = replace_repeats(node.repeat.body, append)
            result.nodes.append(
                node if body is node.repeat.body else rewrite(node, lambda _, new=body: new)
            )
    return graph if result.nodes == graph.nodes else result


@dataclass(frozen=True)
class Repeat:
    """The argument of a `repeat` node: `body` runs `count` times.

    The node's inputs are carries, then invariants, then per-iteration data (the axis `axis` first);
    the body's inputs are the same without that axis. The body's outputs are the carries, then
    per-iteration outputs, which the node stacks along `axis`. A parameter of the body itself with
    `*` in its name has one tensor per iteration, of the name that `numbered` gives; the first
    iteration reads the one with number `first`.
    """

    body: Graph
    count: int
    num_carries: int
    num_invariants: int
    axis: str = "layers"  # or "steps"
    first: int = 0

    @property
    def stop(self) -> int:
        """One more than the number of the last iteration's tensors."""
        return self.first + self.count

    def divide(self, values: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """carry, invariant, data of `values`, one for each operand, or input of the body."""
        carries, fixed = self.num_carries, self.num_carries + self.num_invariants
        return [*values[:carries]], [*values[carries:fixed]], [*values[fixed:]]


def tapped(graph: Graph, name: str) -> Graph:
    """Return `graph` with one more output, under `name`.

    name: of a module, such as `attn1.to_q`, for the output of the op with its weight; or of a value
    as `ltx2rt graph` prints it, such as a block's input `video` or `%38`. Of a repeat, whose body is
    looked through first, the output has the values of all iterations along a new first axis. Raises
    GraphError if there is none.
    """
    if (found := _tapped(graph, name)) is None:
        modules = {"*".join(p.rpartition(".")[0].split("*.")[-1:]) for p in graph.all_params()}
        raise GraphError(
            f"{graph.name}: no module or value is named {name!r}; its modules are "
            f"{', '.join(sorted(modules))[:400]}"
        )
    return found


def _tapped(graph: Graph, name: str) -> Graph | None:
    for i, node in enumerate(graph.nodes):
        if node.op == "repeat" and (body := _tapped(node.repeat.body, name)):
            repeat = node.repeat
            (*_, inner) = body.outputs.values()
            made = graph.fresh(inner.type.stacked(repeat.axis, repeat.count))
            args = {"repeat": replace(repeat, body=body)}
            node = replace(node, outputs=(*node.outputs, made), args=args)
            nodes = [*graph.nodes[:i], node, *graph.nodes[i + 1 :]]
            return replace(graph, nodes=nodes, outputs=_also(graph, name, made))
    params = set(graph.params.values())
    for node in graph.nodes:
        of = {v.name.rpartition(".")[0] for v in node.inputs if v in params}
        named = any(f".{module}".endswith(f".{name}") for module in of)
        for value in node.outputs[:1] if named else (*node.outputs, *node.inputs):
            if named or (value.name == name and value not in params):
                return replace(graph, outputs=_also(graph, name, value))
    return None


def _also(graph: Graph, name: str, value: Value) -> dict[str, Value]:
    """The outputs with this one last; a body's outputs bear the names of its inputs."""
    rest = {f"{n} after" if n == name else n: v for n, v in graph.outputs.items()}
    return rest | {name: value}


@dataclass(frozen=True)
class ParamSpec:
    """A tensor that a graph reads: the checkpoint's shape, the dtype that it computes in."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Layout:
    """Recipe of a parameter on one device from the checkpoint's tensors.

    parts: the tensors, in the file's shapes, joined along their first dimension. splits: (dim, mesh
    axis, its size) for each dimension along which every part is cut into equal slices; a device
    holds the one at its mesh coordinate. first: the layer that iteration 0 of a repeat reads.
    encoding: a row of `encodings.ENCODINGS`, of which the parameter is the field `field` of each
    part (or its slice) [rows, n]; if `field` is None, the matrix, which the pass `unpack` makes of
    the fields. Without an encoding each part is cast.
    """

    parts: tuple[tuple[str, tuple[int, ...]], ...]
    splits: tuple[tuple[int, str, int], ...] = ()
    first: int = 0
    encoding: str | None = None
    field: int | None = None

    def names(self, layer: int) -> Iterator[str]:
        """Concrete names of the tensors that iteration `layer` of a repeat reads."""
        return (numbered(name, self.first + layer) for name, _ in self.parts)

    def pieces(
        self, coordinates: Mapping[str, int], layer: int
    ) -> Iterator[tuple[str, *tuple[Cut, ...]]]:
        """The tensors, with their cuts, that the device at `coordinates` (by mesh axis) reads."""
        for name, (_, shape) in zip(self.names(layer), self.parts, strict=True):
            cuts = []
            for dim, mesh_axis, count in self.splits:
                size, at = shape[dim] // count, coordinates[mesh_axis]
                cuts.append((dim, at * size, (at + 1) * size))
            yield name, *cuts


@dataclass(eq=False)
class Graph:
    """Inputs and parameters by name, nodes in execution order, outputs by name.

    layouts: of the parameters that are not simply one whole tensor of the same name.
    mesh: sizes of the mesh axes of a placed graph; its shapes are then per device.
    """

    name: str
    inputs: dict[str, Value] = field(default_factory=dict)
    params: dict[str, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    outputs: dict[str, Value] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    # Numbers the values; `itertools.count` cannot be copied from Python 3.14 on.
    serial: Iterator[int] = field(default_factory=lambda: iter(range(sys.maxsize)), repr=False)

    def fresh(self, type: Type) -> Value:
        """A value of a name that no other value of the graph has; a node is to make it."""
        return Value(f"%{next(self.serial)}", type)

    def input_type(self, name: str, shape: Sequence[int]) -> Type:
        """The type of the input `name`. Raises ValueError for a value of another shape."""
        type = self.inputs[name].type
        if tuple(shape) != type.shape:
            raise ValueError(f"{self.name}: input {name} has shape {tuple(shape)}, expected {type}")
        return type

    def check_names(self, given: Iterable[str]) -> None:
        """Raise ValueError unless these are the names of the inputs."""
        given, own = set(given), self.inputs.keys()
        if lost_or_strange := given ^ own:
            lost, strange = sorted(lost_or_strange & own), sorted(lost_or_strange - own)
            raise ValueError(f"{self.name}: inputs {lost} are missing, {strange} are unknown")

    def parameter(self, name: str, type: Type) -> Value:
        """The parameter of that name, declared on first use."""
        return self.params.setdefault(name, Value(name, type))

    def walk(self, times: int = 1) -> Iterator[tuple[Node, int]]:
        """Every node with the number of its executions, bodies of repeats included."""
        for node in self.nodes:
            yield node, times
            if node.op == "repeat":
                yield from node.repeat.body.walk(times * node.repeat.count)

    def read(self) -> Iterator[Value]:
        """Every value that a node reads or that is an output, as often as it is."""
        yield from (v for node in self.nodes for v in node.inputs)
        yield from self.outputs.values()

    def makers(self) -> dict[Value, Node]:
        """The node that makes each value."""
        return {v: node for node in self.nodes for v in node.outputs}

    def readers(self) -> dict[Value, list[Node]]:
        """The nodes that read each value, one of them as often as it does."""
        found: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for v in node.inputs:
                found.setdefault(v, []).append(node)
        return found

    @property
    def repeats(self) -> list[Repeat]:
        return [node.repeat for node in self.nodes if node.op == "repeat"]

    def all_params(self, count: int = 1) -> dict[str, tuple[Value, int]]:
        """Every declared parameter, `*` names unexpanded, with its number of tensors."""
        found = {name: (value, count if "*" in name else 1) for name, value in self.params.items()}
        for repeat in self.repeats:
            for name, (value, n) in repeat.body.all_params(repeat.stop).items():
                found[name] = value, max(n, found.get(name, (value, 0))[1])
        return found

    def all_layouts(self) -> dict[str, Layout]:
        """The layout of every parameter of `all_params`, under its declared name."""
        found = {name: Layout(((name, v.type.shape),)) for name, v in self.params.items()}
        found |= {name: x for name, x in self.layouts.items() if name in found}
        for repeat in self.repeats:
            found.update(repeat.body.all_layouts())
        return found

    def parameters(self) -> dict[str, ParamSpec]:
        """Every tensor this graph reads, under its concrete name in the checkpoint."""
        specs, layouts = {}, self.all_layouts()
        for name, (value, count) in self.all_params().items():
            layout = layouts[name]
            for i in range(count):
                for part, (_, shape) in zip(layout.names(i), layout.parts, strict=True):
                    specs[part] = ParamSpec(shape, value.type.dtype)
        return specs


def subgraphs(graph: Graph, groups: Sequence[Sequence[Node]]) -> list[Graph]:
    """A graph for each group of nodes; its inputs and outputs are values of `graph`."""
    readers, kept = graph.readers(), set(graph.outputs.values())

    def numbered(values: Iterable[Value]) -> dict[str, Value]:
        return {str(i): v for i, v in enumerate(values)}

    def subgraph(nodes: Sequence[Node]) -> Graph:
        inside, made = set(nodes), [v for node in nodes for v in node.outputs]
        read = dict.fromkeys(v for node in nodes for v in node.inputs if v not in set(made))
        leaving = (v for v in made if v in kept or not inside.issuperset(readers.get(v, ())))
        return Graph(graph.name, numbered(read), nodes=list(nodes), outputs=numbered(leaving))

    return [subgraph(nodes) for nodes in groups]
