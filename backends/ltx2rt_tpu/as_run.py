"""The graph that a device of the backend `tpu` executes."""

from __future__ import annotations

from ltx2rt.fused.snake_beta import snakes
from ltx2rt.graph import Graph
from ltx2rt.passes.fuse import fuse
from ltx2rt.passes.heads import group_heads
from ltx2rt.passes.interleave import TOKENS, interleave
from ltx2rt.scheduling import in_use

# Size in bytes from which halves take turns at an exchange, and a pair of devices adds up their
# parts where only a permutation travels while they compute. Smaller exchanges end before other work
# would have begun.
LEAST_BYTES = 2**20
GROUPS = 2  # groups of heads, one of which travels while the other attends
HALF_ROWS = 512  # samples times tokens of a half, at the least; not raced
ASSEMBLED = ("vocoder",)  # networks that run as `program.Assembled`


def as_run(
    graph: Graph, device_kind: str, steps: bool = False, compile: bool = False, train: bool = False
) -> Graph:
    """Halves of the samples of a step side by side where that is possible, so that exchanges travel
    unseen; elsewhere attention in groups of heads and halves of the tokens; the vocoder's
    activations fused, for XLA fuses the rest itself. Nothing of a training step."""
    if train:
        return graph
    if steps and device_kind == "tpu":
        graph = interleave(graph, tied=LEAST_BYTES) if in_use("halves") else graph
        graph = group_heads(graph, GROUPS) if in_use("heads") else graph
        return interleave(graph, TOKENS, HALF_ROWS, LEAST_BYTES) if in_use("halves") else graph
    if steps:
        return graph
    return fuse(graph, (snakes,)) if device_kind == "tpu" or graph.name in ASSEMBLED else graph
