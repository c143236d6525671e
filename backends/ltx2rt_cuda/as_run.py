"""The graph that a device of the backend `cuda` executes."""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakKeyDictionary

from ltx2rt.fused import PATTERNS
from ltx2rt.graph import Graph
from ltx2rt.passes.fuse import fuse
from ltx2rt.passes.interleave import HALF_ROWS, TOKENS, interleave
from ltx2rt.passes.rotate import rotate
from ltx2rt.scheduling import in_use, left_out

_made: WeakKeyDictionary[Graph, dict[Hashable, Graph]] = WeakKeyDictionary()


def as_run(
    graph: Graph, device_kind: str, steps: bool = False, compile: bool = False, train: bool = False
) -> Graph:
    """Interleave the halves of the tokens where Inductor does not order a block by itself, and fuse
    ops that have kernels, which saves passes over memory even on a CPU. Training graphs are
    returned unchanged: the kernels have no gradient."""
    if train:
        return graph
    made = _made.setdefault(graph, {})  # its cost is asked for, then its program
    key = device_kind, steps, compile, left_out()
    if key not in made:
        made[key] = _as_run(graph, device_kind, steps, compile)
    return made[key]


def _as_run(graph: Graph, device_kind: str, steps: bool, compile: bool) -> Graph:
    if steps and device_kind == "cuda" and not compile:
        graph = rotate(graph) if in_use("rotate") else graph
        graph = interleave(graph, TOKENS, HALF_ROWS) if in_use("halves") else graph
    return fuse(graph, PATTERNS)
