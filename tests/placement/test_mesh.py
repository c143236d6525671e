"""One mesh per stage: the devices keep their numbers and their weights, whatever their axes are
called."""

import numpy as np
import pytest

from ltx2rt.graph.interpret import Grid, interpret
from ltx2rt.placement.mesh import canonical, stage_mesh, text_mesh
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from ltx2rt.session.options import parse_mesh
from tests.parity import relative_l2
from tests.placed_cases import case


@pytest.mark.parametrize("mesh, branches, expected", [
    ({"guidance": 2, "tensor": 2}, 4, {"guidance": 2, "tensor": 2}),
    ({"guidance": 2, "tensor": 2}, 1, {"sequence": 2, "tensor": 2}),
    ({"guidance": 2, "sequence": 2, "tensor": 2}, 1, {"sequence": 4, "tensor": 2}),
    ({"guidance": 1, "tensor": 2}, 1, {"tensor": 2}),
    ({"data": 2, "guidance": 2, "fsdp": 3}, 1, {"data": 2, "sequence": 2, "fsdp": 3}),
    ({}, 1, {}),
])  # fmt: skip
def test_stage_with_one_branch_splits_tokens_over_the_guidance_devices(mesh, branches, expected):
    found = stage_mesh(mesh, branches)
    assert list(found.items()) == list(expected.items())


def test_devices_keep_their_places_between_stages():
    mesh = {"guidance": 2, "sequence": 3, "tensor": 2}
    one, other = Grid(mesh), Grid(stage_mesh(mesh, 1))
    for device in range(12):
        assert other.coordinate(device, "tensor") == one.coordinate(device, "tensor")
        folded = one.coordinate(device, "guidance") * 3 + one.coordinate(device, "sequence")
        assert other.coordinate(device, "sequence") == folded


def test_weights_keep_their_slices_between_stages():
    mesh, graph = {"guidance": 2, "sequence": 2, "tensor": 3}, case("guided-2.3").graph
    meshes = mesh, {"sequence": 4, "tensor": 3}
    first, second = (Placement(PROFILES["hopper"], one).loop(graph, 8) for one in meshes)
    assert first.all_layouts() == second.all_layouts()
    assert (first.mesh, second.mesh) == (mesh, stage_mesh(mesh, 1))


@pytest.mark.long
def test_videos_branches_and_weights_are_split_at_once():
    """Two videos, half of the branches each, half of the weights each."""
    one, count = case("guided-2.3"), 8
    steps = {"sigmas": np.linspace(1, 0.5, 2 * count, dtype=np.float32).reshape(count, 2)}
    names = ("video_latent", "audio_latent")
    latents = {name: np.concatenate([one.inputs[name], -one.inputs[name]]) for name in names}
    mesh = {"data": 2, "guidance": 2, "fsdp": 2}
    whole = Placement(PROFILES["trillium"], mesh).loop(one.graph, count)
    found = interpret(whole, one.params, {**one.inputs, **steps, **latents})
    alone = Placement(PROFILES["single"], {}).loop(one.graph, count)
    for video in range(2):
        own = {name: x[video : video + 1] for name, x in latents.items()}
        for name, expected in interpret(alone, one.params, {**one.inputs, **steps, **own}).items():
            axis = alone.outputs[name].type.axes.index("videos")
            # Order of summation.
            assert relative_l2(found[name].take([video], axis=axis), expected) <= 1e-5, name


@pytest.mark.parametrize(
    ("mesh", "expected"), [({}, {}), ({"guidance": 2, "sequence": 2, "tensor": 2}, {"tensor": 8})]
)
def test_text_encoder_is_shared_by_all_devices(mesh, expected):
    assert text_mesh(mesh) == expected


def test_a_mesh_is_typed_in_any_order():
    assert list(parse_mesh("tensor=2,guidance=4").items()) == [("guidance", 4), ("tensor", 2)]


@pytest.mark.parametrize("given", ["4", 4, "tensor=4", {"tensor": 4}])
def test_a_plain_number_is_of_the_axis_tensor(given):
    assert parse_mesh(given) == {"tensor": 4}
    assert canonical({"tensor": 1, "sequence": 2}) == {"sequence": 2, "tensor": 1}
