"""Weights cut along their model axis and gathered layer by layer give the values of one device."""

from collections import Counter

import pytest

from ltx2rt.passes.fsdp import gather_weights
from ltx2rt.passes.unroll import unroll
from ltx2rt.placement.cost import weight_bytes
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import EMBED, PROFILES
from tests.conftest import refused
from tests.placed_cases import case

CLOSE = 1e-5  # float32: another order of summation
MESHES = (
    {"fsdp": 2}, {"fsdp": 3}, {"fsdp": 2, "tensor": 3}, {"guidance": 2, "fsdp": 2},
    {"sequence": 2, "fsdp": 3, "tensor": 2},
)  # fmt: skip


def on(mesh, graph):
    return Placement(PROFILES["trillium"], mesh).local(graph, "transformer")


def body(graph):
    """A block: of a step that is divided where branches part, the last."""
    return graph.repeats[-1].body


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", [pytest.param("guided-2.0", marks=pytest.mark.long), "guided-2.3"])
def test_gathered_weights_give_the_values_of_one_device(name, mesh):
    one = case(name)
    local = on(mesh, one.graph)
    assert local.mesh == mesh and local.parameters() == one.graph.parameters()
    one.agrees(local, CLOSE)


@pytest.mark.parametrize("mesh", ({"fsdp": 2}, {"fsdp": 2, "tensor": 3}), ids=str)
def test_every_matrix_of_the_blocks_is_gathered_once_at_its_use(mesh):
    local = on(mesh, case("guided-2.3").graph)
    nodes = body(local).nodes
    gathers = {node.outputs[0]: i for i, node in enumerate(nodes) if node.op == "all_gather"}
    linears = [i for i, node in enumerate(nodes) if node.op == "linear"]
    assert len(gathers) == len(linears) == 20
    assert [gathers[nodes[i].inputs[1]] for i in linears] == [i - 1 for i in linears]
    assert {node.attrs["mesh_axis"] for node in nodes if node.op == "all_gather"} == {"fsdp"}
    assert not [node for node in local.nodes if node.op == "all_gather"], "one is outside"


def test_a_weight_is_cut_both_ways():
    """Column-parallel weights along what they contract, row-parallel ones along rows."""
    layouts = body(on({"fsdp": 2, "tensor": 3}, case("guided-2.3").graph)).layouts
    ways = Counter(x.splits for x in layouts.values() if "fsdp" in str(x.splits))
    assert ways == {((0, "tensor", 3), (1, "fsdp", 2)): 12, ((1, "tensor", 3), (0, "fsdp", 2)): 8}


def test_devices_hold_their_share_of_the_blocks():
    meshes = {"tensor": 3}, {"fsdp": 2, "tensor": 3}
    one, two = (body(on(mesh, case("guided-2.3").graph)) for mesh in meshes)
    found = [v for v in one.params.values() if len(v.type.axes) == 2 and "table" not in v.name]
    matrices = sum(v.type.nbytes for v in found)
    assert weight_bytes([one]) - weight_bytes([two]) == matrices // 2


def test_a_graph_with_gathers_can_be_unrolled():
    one = case("guided-2.3")
    one.agrees(unroll(on({"fsdp": 2, "tensor": 2}, one.graph)), CLOSE)


def test_a_size_that_does_not_divide_is_refused_or_stays_whole():
    graph = case("guided-2.3").graph
    with refused("D=96 does not divide over fsdp=5; choose a divisor of 96"):
        on({"fsdp": 5}, graph)
    kept = gather_weights(graph, EMBED, {"fsdp": 5}).all_layouts()
    assert not any(layout.splits for layout in kept.values())


def test_one_device_leaves_the_graph_alone():
    graph = case("guided-2.3").graph
    assert gather_weights(graph, EMBED, {"fsdp": 1, "tensor": 2}) is graph
