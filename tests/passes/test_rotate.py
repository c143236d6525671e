"""The last sum of a block in the next one: the same values, one kernel with the block's first
norm."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ltx2rt.backend import get_backend
from ltx2rt.graph.ops import OPS
from ltx2rt.passes.fuse import fuse
from ltx2rt.passes.rotate import rotate
from tests.parity import ArraySource, relative_l2
from tests.placed_cases import STEPS, TWO_AXES, case

CLOSE = 1e-6  # float32: products of samples that lie otherwise in memory, and fewer roundings


@pytest.mark.parametrize(
    "mesh",
    [{}, {"tensor": 2}, TWO_AXES],
    ids=str,
)
@pytest.mark.parametrize("name", STEPS)
def test_values_are_the_same(monkeypatch, name, mesh):
    """Bit by bit, expanded samples copied: numpy multiplies views otherwise."""
    expand = OPS["expand"]
    copy = lambda *args, **plan: np.array(expand.numpy(*args, **plan), order="C")  # noqa: E731
    copied = replace(expand, numpy=copy)
    monkeypatch.setitem(OPS, "expand", copied)
    one = case(name)
    graph = one.placed(mesh)
    rotated = rotate(graph)
    assert rotated is not graph and rotated.parameters() == graph.parameters()
    one.agrees(rotated, 0.0, graph)
    one.agrees(fuse(rotated), CLOSE, graph)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_sum_and_the_first_norm_are_one_kernel(devices):
    graph = case("guided-2.3").on(devices)
    fused = (fuse(g).repeats[0].body for g in (graph, rotate(graph)))
    before, after = (Counter(node.op for node in block.nodes) for block in fused)
    assert before["gated_residual"] == before["norm_modulate"] == 2  # of video and sound
    assert after["gated_residual"] == after["norm_modulate"] == 0
    assert after["residual_norm_modulate"] == before["residual_norm_modulate"] + 2


@pytest.mark.parametrize("layers", ["scan", "unrolled"])
def test_torch_runs_it(layers):
    one, backend = case("guided-2.3"), get_backend("cuda", "cpu")
    weights = backend.load([one.graph], ArraySource(one.params))
    expected = backend.lower(one.graph)(weights, one.inputs)
    for key, value in backend.lower(rotate(one.graph), layers)(weights, one.inputs).items():
        assert relative_l2(backend.to_host(value), backend.to_host(expected[key])) <= CLOSE, key


def test_blocks_that_end_otherwise_stay():
    graph = case("text-2.3").graph
    assert rotate(graph) is graph
