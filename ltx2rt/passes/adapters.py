"""adapters: low-rank matrices added to frozen linears of a stack of blocks.

Requires a legal graph, placed or not, not yet packed. Ensures the same inputs, outputs and
communication, and for every targeted linear y = x W of a repeat's body two parameters more: y +=
x A B, times a factor.

A is cut as W's columns are, B as W's rows: for a column-parallel linear A is whole and B cut;
for a row-parallel one A is cut and B whole, and x A B joins the partial sum that the all-reduce
behind it adds up.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from ltx2rt.graph.ir import Graph, Layout, Node, Replaced, Value, numbered, rewrite
from ltx2rt.graph.trace import emit
from ltx2rt.graph.verify import verify
from ltx2rt.passes.dropout import Dropout

MARK = ".lora_"  # in the name of every parameter that the pass declares


@dataclass(frozen=True)
class Adapters:
    """targets: modules by their names in the checkpoint, `*` for the block. rank: rows of A, and
    audio_rank, of the sound's own modules; scale: alpha / rank. dtype: of the parameters, but
    trained ones are float32. dropout: the graph has its inputs, see `dropout`."""

    targets: frozenset[str]
    rank: int
    scale: float = 1.0
    audio_rank: int | None = None
    dtype: str = "float32"
    dropout: bool = False

    def rank_of(self, module: str) -> int:
        own = module.partition(".*.")[2].startswith(("audio_attn", "audio_ff"))
        return self.audio_rank if own and self.audio_rank else self.rank


def adapted(graph: Graph, adapters: Adapters) -> Graph:
    """`graph` with the adapters of all targets that are linears of its repeats."""
    result = replace(graph, inputs=dict(graph.inputs), nodes=[])
    for node in graph.nodes:
        drop = Dropout(result, node) if adapters.dropout and node.op == "repeat" else None
        changed = rewrite(node, lambda body, drop=drop: _body(body, adapters, drop))
        result.nodes.append(drop.repeat(changed.repeat.body) if drop else changed)
    return verify(result)


def modules(graph: Graph) -> list[str]:
    """Modules that can be targets: linears of the graph's repeats that share their weights with no
    other, `*` for the block."""
    linears = (
        (node.inputs[1].name, repeat.body.params)
        for repeat in graph.repeats
        for node in repeat.body.nodes
        if node.op == "linear"
    )
    return [n.removesuffix(".weight") for n, params in linears if "*" in n and n in params]


def starred(module: str) -> str:
    """The module with `*` for the number of its block."""
    return re.sub(r"(transformer_blocks)\.\d+\.", r"\1.*.", module)


def tensors(targets: Collection[str], blocks: int) -> list[str]:
    """Names of the parameters of all blocks, whatever the order of the targets."""
    each = itertools.product(sorted(targets), range(blocks), "AB")
    return [numbered(f"{name}{MARK}{half}.weight", i) for name, i, half in each]


def _body(body: Graph, adapters: Adapters, drop: Dropout | None) -> Graph:
    result = replace(body, nodes=[], params=dict(body.params), layouts=dict(body.layouts))
    layouts, env = body.all_layouts(), Replaced()
    for node in map(env.node, body.nodes):
        weight = node.inputs[1].name if node.op == "linear" else ""
        if weight.removesuffix(".weight") in adapters.targets:
            env[node.outputs[0]] = _beside(result, node, layouts[weight], adapters, drop)
        else:
            result.nodes.append(node)
    result.outputs = env.outputs(body)
    return result


def _beside(
    out: Graph, node: Node, layout: Layout, adapters: Adapters, drop: Dropout | None
) -> Value:
    """The linear plus its adapter."""
    x, weight, *_ = node.inputs
    name, dtype = weight.name.removesuffix(".weight"), weight.type.dtype
    rank = adapters.rank_of(weight.name)
    ((_, (rows, columns)),) = layout.parts

    def half(letter: str, dim: int, whole: tuple[int, int]) -> Value:
        type = replace(weight.type.replaced(dim, dim + 1, {"rank": rank}), dtype=adapters.dtype)
        declared = f"{name}{MARK}{letter}.weight"
        splits = tuple(split for split in layout.splits if split[0] != dim)
        out.layouts[declared] = Layout(((declared, whole),), splits, layout.first)
        v = out.parameter(declared, type)
        return v if dtype == adapters.dtype else emit(out, "cast", v, dtype=dtype)

    x = drop(out, x, name, layout) if drop else x
    down = {"contract": node.attrs["contract"], "out": {"rank": rank}}
    h = emit(out, "linear", x, half("A", 0, (rank, columns)), **down)
    up = {"contract": ("rank",), "out": node.attrs["out"]}
    d = emit(out, "linear", h, half("B", 1, (rows, rank)), **up)
    if not math.isclose(adapters.scale, 1):
        d = emit(out, "affine", d, scale=adapters.scale)
    y = out.fresh(node.outputs[0].type)
    out.nodes.append(replace(node, outputs=(y,)))
    return emit(out, "add", y, d)
