"""Which layers of a network stay on the device, and which are copied to it each time they are used.

A piece is what one layer of a stack of equal ones reads alone: block 7 of the transformer. Of a
piece only the large matrices move; tables, norms, biases and adapters stay. Streaming changes no
number.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import product

from ltx2rt.graph.ir import Graph, Type, Value
from ltx2rt.passes.adapters import MARK

LEAST_BYTES = 2**20  # smaller tensors stay: a block has about 2 MB of them
SLOTS = 2  # pieces on the device at once: one is computed with while the next one arrives

Piece = tuple[str, int]  # the stack, which is its parameters' name before the `*`, and the layer


def moves(name: str, type: Type) -> bool:
    """Whether a parameter, by its declared name, can be streamed."""
    matrix = "*" in name and MARK not in name and len(type.shape) == 2
    return matrix and type.nbytes >= LEAST_BYTES


def stack_of(name: str) -> str:
    """The stack that a parameter belongs to. A body of several layers, `6*+0` to `6*+5`, has
    several."""
    match = re.match(r"[^*]*(\*\+\d+)?", name)
    return match[0] if match else name


def pieces(graph: Graph) -> dict[Piece, int]:
    """Bytes of every piece of a placed graph on one device, in the order in which a run reads
    them."""
    bodies: dict[str, dict[str, list[tuple[Value, int]]]] = {}  # stacks by what they begin with
    for name, param in graph.all_params().items():
        if moves(name, param[0].type):
            stacks = bodies.setdefault(name.partition("*")[0], {})
            stacks.setdefault(stack_of(name), []).append(param)
    found: dict[Piece, int] = {}
    for stacks in bodies.values():
        layers = max(count for own in stacks.values() for _, count in own)
        for layer, (stack, own) in product(range(layers), stacks.items()):
            found[stack, layer] = sum(value.type.nbytes for value, count in own if layer < count)
    return found


def streamed(sizes: Mapping[Piece, int], number: int) -> frozenset[Piece]:
    """So many of the pieces, evenly spaced: the link has then as long for each, and is never idle.

    The first and the last stay as long as others can move.
    """
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
