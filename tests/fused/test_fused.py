"""A fused op is one file of the core and one function of a backend."""

import ltx2rt_cuda.ops
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ltx2rt.backend import get_backend
from ltx2rt.fused.pattern import PATTERNS, node_of, pattern
from ltx2rt.graph import trace
from ltx2rt.graph.interpret import interpret
from ltx2rt.graph.network_ops import linear_flops
from ltx2rt.graph.ops import OPS, op
from ltx2rt.passes.fuse import fuse
from ltx2rt.placement.cost import flops
from ltx2rt.placement.devices import device_kind
from ltx2rt.placement.timeline import Timeline
from tests.parity import ArraySource, random_params, relative_l2

TOY = "linear_tanh"


@pytest.fixture
def toy(monkeypatch):
    """A linear layer with bias, then tanh: what a file of `ltx2rt/fused/` would hold, and the
    function of the PyTorch backend, whose calls are counted."""
    for table in (OPS, ltx2rt_cuda.ops.OPS):
        monkeypatch.setitem(table, TOY, None)  # so that the op leaves the tables again

    def numpy(*operands, **args):
        return np.tanh(OPS["linear"].numpy(*operands, **args))

    @op(numpy, flops=linear_flops, linear="plain")
    def linear_tanh(x, weight, bias, *, contract, out):
        return OPS["linear"].rule(x, weight, bias, contract=contract, out=out)

    @pattern
    def match(graph, uses, node):
        linear = uses.only(node.inputs[0], "linear") if node.op == "tanh" else None
        if linear is None or len(linear.inputs) < 3:
            return None
        return [linear, node], [node_of(TOY, linear.inputs, node.outputs, **linear.attrs)]

    calls = []

    def run(x, weight, bias, *, num_contracted, out_shape):
        assert num_contracted == 1
        calls.append(out_shape)
        return torch.tanh(F.linear(x, weight, bias))

    ltx2rt_cuda.ops.OPS[TOY] = run
    yield calls
    PATTERNS.remove(match)


def network(o):
    x = o.input("x", B=2, tokens=3, D=8)
    return {"y": o.tanh(o.linear(x, "layer", {"E": 6}))}


def test_a_fused_op_is_found_counted_interpreted_and_run(toy):
    graph = trace("toy", network, "float32")
    fused = fuse(graph)
    assert [node.op for node in fused.nodes] == [TOY]
    assert flops(fused) == flops(graph) == 2 * 2 * 3 * 8 * 6
    kind = device_kind("h100")
    timelines = [Timeline(kind).of(g) for g in (graph, fused)]
    assert [t.clock_s for t in timelines] == [flops(graph) / kind.flops_per_s] * 2
    assert [event.kind for event in timelines[1].events] == ["product"]

    params = random_params(graph)
    inputs = {"x": np.random.default_rng(1).standard_normal((2, 3, 8)).astype(np.float32)}
    expected = interpret(graph, params, inputs)["y"]
    np.testing.assert_array_equal(interpret(fused, params, inputs)["y"], expected)

    backend = get_backend("cuda", "cpu")
    program = backend.lower(graph)
    found = program(backend.load([graph], ArraySource(params)), inputs)["y"]
    assert toy == [(6,)]  # once, and not the plain ops
    assert relative_l2(backend.to_host(found), expected) <= 1e-6  # float32: sums in another order


def test_without_the_file_the_plain_ops_run():
    assert [node.op for node in fuse(trace("toy", network, "float32")).nodes] == ["linear", "tanh"]
