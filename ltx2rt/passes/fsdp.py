"""fsdp: weights lie cut along one more axis and are gathered, layer by layer, where they are used.

Requires the graph of one device, placed or not, and packed. Ensures the same values: a matrix of a
repeat that has an axis of the rules is held cut along it, in addition to the cuts of `place`, and
an `all_gather` in front of its linear restores the matrix that the device held before. Activations,
biases, norms and tables stay as they are, and so does everything outside a repeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ltx2rt.errors import InputError
from ltx2rt.graph.ir import Graph, Layout, Value, rewrite
from ltx2rt.graph.trace import emit
from ltx2rt.graph.verify import verify


def gather_weights(
    graph: Graph, rules: Mapping[str, str], mesh: Mapping[str, int], strict: bool = False
) -> Graph:
    """rules: weight axis -> mesh axis. strict: InputError for a size that does not divide."""
    mesh = {axis: size for axis, size in mesh.items() if size > 1}
    rules = {axis: mesh_axis for axis, mesh_axis in rules.items() if mesh_axis in mesh}
    if not rules:
        return graph

    def gather(out: Graph, weight: Value, layout: Layout, axis: str) -> Value:
        """The weight as it was, from its slices; as it is where its size does not divide."""
        dim, size, mesh_axis = weight.type.axes.index(axis), weight.type.size(axis), rules[axis]
        parts = mesh[mesh_axis]
        if size % parts and strict:
            raise InputError(
                f"{out.name}: {axis}={size} does not divide over {mesh_axis}={parts}; choose a "
                f"divisor of {size}"
            )
        if size % parts:
            return weight
        held = Value(weight.name, weight.type.resized(axis, size // parts))
        out.params[weight.name] = held
        out.layouts[weight.name] = replace(layout, splits=(*layout.splits, (dim, mesh_axis, parts)))
        return emit(out, "all_gather", held, axis=axis, mesh_axis=mesh_axis, parts=parts)

    def gathered(body: Graph) -> Graph:
        out = replace(body, params=dict(body.params), nodes=[], layouts=dict(body.layouts))
        out.mesh, layouts = mesh, body.all_layouts()
        elsewhere = {v for node in body.nodes if node.op != "linear" for v in node.inputs}
        whole: dict[Value, Value] = {}
        for node in body.nodes:
            node = rewrite(node, gathered)
            if node.op == "linear":
                x, weight, *bias = node.inputs
                axis = next((axis for axis in weight.type.axes if axis in rules), None)
                if axis is not None and "*" in weight.name and weight not in elsewhere:
                    if weight not in whole:
                        whole[weight] = gather(out, weight, layouts[weight.name], axis)
                    node = replace(node, inputs=(x, whole[weight], *bias))
            out.nodes.append(node)
        return out

    nodes = [rewrite(node, gathered) for node in graph.nodes]
    return verify(replace(graph, nodes=nodes, mesh=mesh))
