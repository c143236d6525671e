"""Which layers of a network stay on the device, and which are copied to it each time they are used.

A piece is what one layer of a stack of equal ones reads alone: block 7 of the transformer. Of a
piece only the large matrices move; tables, norms, biases and adapters stay. Streaming changes no
number.

A piece takes one of three roads to the device: from pinned memory of the host, which the device
reads by itself; staged, from other memory of the host by way of small pinned buffers, where the
system pins little; from the file by way of the same buffers, where the host's memory has no room.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from itertools import product

from ltx2rt.graph.ir import Graph, Node, Type, Value, subgraphs
from ltx2rt.passes.adapters import MARK

LEAST_BYTES = 2**20  # smaller tensors stay: a block has about 2 MB of them
SLOTS = 2  # pieces on the device at once: one is computed with while the next one arrives

PINNED, STAGED, FILE = ROADS = ("pinned", "staged", "file")
LEFT_BYTES, LEFT_SHARE = 8e9, 0.1  # host memory that streamed weights leave to all else
# Bytes per second that a road gives at most: one thread's copies within the host's memory, the
# sequential reads of a common NVMe disk.
ROAD_BYTES_PER_S = {PINNED: math.inf, STAGED: 10e9, FILE: 3e9}

Piece = tuple[str, int]  # the stack, which is its parameters' name before the `*`, and the layer


def moves(name: str, type: Type) -> bool:
    """Whether a parameter, by its declared name, can be streamed."""
    matrix = "*" in name and MARK not in name and len(type.shape) == 2
    return matrix and type.nbytes >= LEAST_BYTES


def stack_of(name: str) -> str:
    """A parameter's stack. A body of several layers, `6*+0` to `6*+5`, has several."""
    match = re.match(r"[^*]*(\*\+\d+)?", name)
    return match[0] if match else name


def layers(body: Graph) -> list[Graph]:
    """The body in parts that run one after the other, each with the weights of one stack."""
    params = {name: v for name, (v, _) in body.all_params().items()}
    stacks = list(
        dict.fromkeys(stack_of(name) for name, v in params.items() if moves(name, v.type))
    )
    if len(stacks) < 2:
        return [body]
    at = {v: stacks.index(s) for name, v in params.items() if (s := stack_of(name)) in stacks}
    nodes: list[list[Node]] = [[] for _ in stacks]
    for node in body.nodes:
        own = [v for v, _ in node.repeat.body.all_params().values()] if node.op == "repeat" else []
        number = max((at.get(v, 0) for v in (*node.inputs, *own)), default=0)
        at |= dict.fromkeys(node.outputs, number)
        nodes[number].append(node)
    return subgraphs(body, nodes)


def pieces(graph: Graph) -> dict[Piece, int]:
    """Bytes of each piece of a placed graph on one device, in the order of reading."""
    bodies: dict[str, dict[str, list[tuple[Value, int]]]] = {}  # stacks by what they begin with
    for name, param in graph.all_params().items():
        if moves(name, param[0].type):
            stacks = bodies.setdefault(name.partition("*")[0], {})
            stacks.setdefault(stack_of(name), []).append(param)
    found: dict[Piece, int] = {}
    for stacks in bodies.values():
        most = max(count for own in stacks.values() for _, count in own)
        for layer, (stack, own) in product(range(most), stacks.items()):
            found[stack, layer] = sum(value.type.nbytes for value, count in own if layer < count)
    return found


def streamed(sizes: Mapping[Piece, int], number: int) -> frozenset[Piece]:
    """So many of the pieces, evenly spaced: the link has then as long for each, and is never idle.
    The first and the last stay as long as others can move."""
    found = list(sizes)
    inner = found[1:-1] if number <= len(found) - 2 else found
    count = len(inner)
    return frozenset(
        p for i, p in enumerate(inner) if (i + 1) * number // count > i * number // count
    )


def saved_bytes(sizes: Mapping[Piece, int], number: int) -> int:
    """Device memory that streaming so many pieces saves, with the slots that it takes."""
    moved = [sizes[piece] for piece in streamed(sizes, number)]
    return sum(moved) - slots_bytes(moved)


def slots_bytes(sizes: Collection[int]) -> int:
    """Device memory that pieces of these sizes take turns in."""
    return max(sizes, default=0) * min(SLOTS, len(sizes))


def road(size: int, total: int, free: int, pins: bool) -> str:
    """The road of streamed weights of so many bytes from a host with so many bytes of memory, of
    which some are free. pins: whether its system lets devices read much of it."""
    if size > free - max(LEFT_BYTES, LEFT_SHARE * total):
        return FILE
    return PINNED if pins else STAGED
