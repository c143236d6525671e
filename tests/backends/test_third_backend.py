"""A third backend plans, chooses a mesh and runs, without a word about it in the core."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from ltx2rt.backend import DeviceInfo, get_backend, get_factory
from ltx2rt.graph.interpret import interpret
from tests.parity import ArraySource, relative_l2
from tests.placed_cases import case

LOOM = '''
"""A backend whose devices are looms: they compute in numpy, and exchange while they compute."""

from ltx2rt.backend import BackendFactory, DeviceInfo
from ltx2rt.graph.interpret import interpret
from ltx2rt.passes.fuse import fuse
from ltx2rt.placement.devices import DeviceKind

KIND = DeviceKind("loom-64gb", "loom", "loom", "hopper", 64e9, 1e12, 1e12, 1e12, 1e9, 1e-3, ("A loom",))


class Program:
    def __init__(self, graph):
        self.graph = graph

    def __call__(self, weights, inputs):
        return interpret(self.graph, weights, inputs)


class Loom:
    name, device_kind, is_main, runs, num_processes, num_built = "loom", "loom", True, True, 1, 0
    versions = {}

    def __init__(self, mesh):
        self.mesh = mesh

    def device(self):
        return DeviceInfo("loom", "A loom", int(64e9), int(64e9))

    def load(self, graphs, source, base=None, changed=frozenset(), streamed=frozenset()):
        return {name: source.read(name) for graph in graphs for name in graph.parameters()}

    def lower(self, graph, layers="scan", compile=False):
        return Program(FACTORY.as_run(graph, self.device_kind, compile=compile))

    def to_host(self, array):
        return array


class Factory(BackendFactory):
    name, accelerator, process_per_device, packages = "loom", "loom", False, ("numpy",)
    streams, hides = (), True

    def device_kinds(self):
        return [KIND]

    def as_run(self, graph, device_kind, steps=False, compile=False):
        return fuse(graph)

    def profile_key(self, device):
        return device.name

    def open(self, device, mesh):
        return Loom(dict(mesh))


FACTORY = Factory()
'''


@pytest.fixture
def loom(install_backend):
    install_backend("loom", LOOM)


def test_plan_knows_its_devices_and_chooses_their_mesh(loom, command):
    kind = "plan --preset tiny-2.3 --device-kind".split()
    flags = *kind, *"loom --devices 4 --pipeline one-stage".split()
    status, out, err = command(*flags, "--verbose")
    assert (status, err) == (0, "")
    assert "on 4 x loom-64gb (" in out and "denoising takes an estimated" in out
    assert "the next best, --mesh" in out
    assert "exchanges: received / 1 GB/s and 1000 us each" in out
    status, out, _ = command(*flags, "--json")
    stages = {stage["name"]: stage for stage in json.loads(out)["stages"]}
    assert stages["stage1"]["exchange_s"] > 0
    assert stages["stage1"]["time_s"] > stages["stage1"]["flops"] / 1e12
    status, _, err = command(*kind, "nothing")
    assert status == 2 and "loom-64gb" in err and "h100-80gb" in err


def test_it_runs_what_it_plans(loom):
    """The lowered graph is the planned one and computes the plain graph's results."""
    one = case("forward-2.3")
    backend, factory = get_backend("loom"), get_factory("loom")
    program = backend.lower(one.graph)
    ran, planned = program.graph, factory.as_run(one.graph, "loom")
    ops = [[node.op for node, _ in graph.walk()] for graph in (ran, planned, one.graph)]
    assert ops[0] == ops[1] != ops[2]
    found = program(backend.load([one.graph], ArraySource(one.params)), one.inputs)
    for name, expected in interpret(one.graph, one.params, one.inputs).items():
        # Roundings of float32.
        assert relative_l2(np.asarray(found[name], np.float64), expected) < 1e-5, name


def test_a_backend_reports_its_devices_by_its_own_word(loom):
    assert get_factory("loom").profile_key(DeviceInfo("loom", "A loom", 1, 1)) == "A loom"
    core = Path(importlib.import_module("ltx2rt").__file__ or "").parent
    assert not any("loom" in path.read_text() for path in core.rglob("*.py"))
