"""Each piece of scheduling can be left out: other graphs or modules, the same values."""

import gc
import weakref

import ltx2rt_cuda.ops.table as table
import pytest
import torch
from ltx2rt_cuda.backend import CudaBackend
from ltx2rt_cuda.factory import FACTORY
from ltx2rt_cuda.lower import Sums
from ltx2rt_cuda.ops.stored import unpack
from ltx2rt_tpu.factory import FACTORY as TPU

from ltx2rt.graph.interpret import interpret
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from ltx2rt.scheduling import SWITCHES, VARIABLE
from tests.parity import ArraySource, relative_l2
from tests.placed_cases import case

CLOSE = 1e-6  # float32: other kernels round elsewhere


@pytest.fixture
def without(monkeypatch):
    return lambda *names: monkeypatch.setenv(VARIABLE, ",".join(names))


def ops(graph) -> list[str]:
    return [node.op for node, _ in graph.walk()]


def test_a_graph_without_rotation_has_the_same_values(without):
    one = case("guided-2.3")
    usual = FACTORY.as_run(one.graph, "cuda", steps=True)
    without("rotate")
    plain = FACTORY.as_run(one.graph, "cuda", steps=True)
    assert ops(plain) != ops(usual)
    found = interpret(plain, one.params, one.inputs)
    assert max(relative_l2(found[k], x) for k, x in one.expected.items()) < CLOSE


def test_what_runs_is_made_once_of_a_graph_and_does_not_hold_it():
    graph = Placement(PROFILES["hopper"]).local(case("guided-2.3").graph, "transformer")
    made = FACTORY.as_run(graph, "cuda", steps=True)
    assert FACTORY.as_run(graph, "cuda", steps=True, compile=False) is made is not graph
    placed = weakref.ref(graph)
    del graph
    gc.collect()
    assert placed() is None and made.nodes


@pytest.mark.parametrize("factory,network", [(FACTORY, "guided"), (TPU, "forward")])
def test_tokens_and_samples_stay_whole(without, monkeypatch, factory, network):
    monkeypatch.setattr("ltx2rt_cuda.as_run.HALF_ROWS", 0)
    monkeypatch.setattr("ltx2rt_tpu.as_run.LEAST_BYTES", 0)
    profile = PROFILES["hopper" if factory is FACTORY else "trillium"]
    graph = Placement(profile, {"tensor": 2}).local(case(f"{network}-2.3").graph, "transformer")
    kind = factory.name  # also that of its devices
    halved = ops(factory.as_run(graph, kind, steps=True)).count("all_reduce")
    without("halves")
    assert ops(factory.as_run(graph, kind, steps=True)).count("all_reduce") < halved


def test_sums_are_made_in_their_blocks(without):
    one, backend = case("guided-2.3"), CudaBackend("cpu")
    weights = backend.load([one.graph], ArraySource(one.params))
    found, made = [], []
    for names in ((), ("sums",)):
        without(*names)
        program = backend.lower(one.graph)
        found.append({k: backend.to_host(x) for k, x in program(weights, one.inputs).items()})
        modules = program.module.modules()
        made.append(sum(len(m.shapes) for m in modules if isinstance(m, Sums)))
    assert made[0] > 0 == made[1]
    assert max(relative_l2(found[1][k], x) for k, x in found[0].items()) < CLOSE


def test_a_kernel_decodes_unless_it_is_left_out(without, monkeypatch):
    monkeypatch.setattr(table, "why_not", lambda *fields, **plan: None)
    monkeypatch.setattr(table, "kernel", lambda name: lambda *fields, **plan: f"kernel {name}")
    fields = torch.tensor([[3, -4]], dtype=torch.int8), torch.tensor([[0.5]])
    plan = {"encoding": "int8", "dtype": "float32"}
    assert unpack(*fields, **plan) == "kernel unpack"
    without("unpack")
    assert unpack(*fields, **plan).tolist() == [[1.5, -2.0]]


def test_an_unknown_name_is_refused_and_known_ones_are_listed(without, command):
    without("rotat")
    status, _, err = command("devices")
    assert status == 2 and "did you mean rotate?" in err
    assert all(name in err for name in SWITCHES)
    without("sums", "rotate")
    status, out, _ = command("devices")
    assert status == 0 and "left out by LTX2RT_WITHOUT: rotate, sums" in out
