"""Dropout in front of adapters: a share of the numbers that an adapter reads is 0.

Which ones follows from keys: one for each sample, block and token, an input of the graph that is cut
as the tokens are, mixed with the number's column and the module's name. So both backends drop the
same numbers on any mesh, and a backward pass that computes a block again drops them again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ltx2rt.graph.ir import Graph, Layout, Node, Type, Value
from ltx2rt.graph.trace import emit

RATE, COLUMNS, KEYS = "dropout", "dropout_columns", "dropout_keys_of_"  # inputs of the graph


def dropout_feeds(
    graph: Graph, rate: float, draw: Callable[[str, int], np.ndarray]
) -> dict[str, np.ndarray]:
    """The inputs for dropout of one sample, without the axis B, and the columns' numbers; none for
    a graph without dropout. rate: share of the numbers that are dropped, at least 0 and below 1.
    draw(name, count): f64[count] in [0, 1), which become the keys of the input `name`."""
    found: dict[str, np.ndarray] = {}
    for name, v in graph.inputs.items():
        if name == RATE:
            found[name] = np.array(rate, np.float32)
        elif name == COLUMNS:
            found[name] = np.arange(v.type.num_elements, dtype=np.int32)
        elif name.startswith(KEYS):
            keys = draw(name, math.prod(v.type.shape[1:])) * 2.0**32
            found[name] = keys.astype(np.uint32).view(np.int32).reshape(v.type.shape[1:])
    return found


@dataclass
class Dropout:
    """Adds the inputs for dropout to a repeat. out: the graph that gets them, with the nodes in
    front of `node`, the repeat."""

    out: Graph
    node: Node
    # By name in the body: the value there, the operand that it is, and whether each block has its own
    inner: dict[str, tuple[Value, Value, bool]] = field(default_factory=dict)

    def __call__(self, body: Graph, x: Value, module: str, layout: Layout) -> Value:
        """`x` (B, tokens, *features) with dropped numbers. layout: of the module's weight."""
        samples, tokens, *_ = x.type.shape
        first, *_ = features = x.type.axes[2:]
        sizes = dict(zip(features, x.type.shape[2:], strict=True))
        cuts = [split for split in layout.splits if split[0] == 1]
        whole = sizes | {first: sizes[first] * math.prod(parts for _, _, parts in cuts)}
        width = math.prod(whole.values())
        columns = emit(body, "slice", self._columns(), axis="columns", stop=width)
        columns = emit(body, "split", columns, axis="columns", into=whole)
        for _, mesh_axis, parts in cuts:
            columns = emit(body, "shard", columns, axis=first, mesh_axis=mesh_axis, parts=parts)
        salt = int.from_bytes(hashlib.sha256(module.encode()).digest()[:4], "little", signed=True)
        keys = self._keys(samples, x.type.axes[1], tokens)
        rate = self._given(RATE, "float32", B=samples)
        return emit(body, "dropout", x, keys, columns, rate, salt=salt)

    def repeat(self, body: Graph) -> Node:
        """The repeat with this body, which reads the inputs."""
        repeat, added = self.node.repeat, self.inner.values()
        operands = list(zip(body.inputs.values(), self.node.inputs, strict=True))
        carried, invariants, data = repeat.divide(operands)
        invariants += [(v, operand) for v, operand, own in added if not own]
        data += [(v, operand) for v, operand, own in added if own]
        operands = [*carried, *invariants, *data]
        body.inputs = {v.name: v for v, _ in operands}
        changed = replace(repeat, body=body, num_invariants=len(invariants))
        inputs = tuple(operand for _, operand in operands)
        return replace(self.node, inputs=inputs, args={"repeat": changed})

    def _given(self, name: str, dtype: str, **sizes: int) -> Value:
        """A value of the body that is an input of the graph."""
        if name not in self.inner:
            v = Value(name, Type(tuple(sizes), tuple(sizes.values()), dtype))
            self.inner[name] = v, self.out.inputs.setdefault(name, Value(name, v.type)), False
        return self.inner[name][0]

    def _columns(self) -> Value:
        """Return the columns' numbers, as many as the widest linear reads."""
        layouts = self.node.repeat.body.all_layouts().values()
        shapes = [shape for layout in layouts for _, shape in layout.parts if len(shape) == 2]
        return self._given(COLUMNS, "int32", columns=max(width for _, width in shapes))

    def _keys(self, samples: int, axis: str, size: int) -> Value:
        """The keys of a token axis, cut as the tokens are that the body has."""
        if (name := f"{KEYS}{axis}") in self.inner:
            return self.inner[name][0]
        sizes = [v.type.size(axis) for v in self.out.inputs.values() if axis in v.type.axes]
        shape = (samples, self.node.repeat.count, sizes[0])
        keys = self.out.inputs[name] = Value(name, Type(("B", "layers", axis), shape, "int32"))
        keys = emit(self.out, "transpose", keys, axes=("layers", "B", axis))
        if size != sizes[0]:
            shards = [n.attrs for n in self.out.nodes if n.op == "shard"]
            cut = next(attrs for attrs in shards if attrs["axis"] == axis)
            if missing := -sizes[0] % cut["parts"]:
                keys = emit(self.out, "pad", keys, mode="zeros", **{axis: (0, missing)})
            keys = emit(self.out, "shard", keys, **cut)
        v = Value(name, keys.type.unstacked())
        self.inner[name] = v, keys, True
        return v
