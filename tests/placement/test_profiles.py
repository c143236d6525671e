"""Profiles are found by name or by device; an unknown name never becomes a default."""

import pytest
from placed_cases import case

from ltx2rt.errors import InputError
from ltx2rt.graph.ops import COLLECTIVES
from ltx2rt.placement.profiles import PROFILES, placed, profile_of

MESH = {"tensor": 2}


def test_unknown_profile_lists_the_known_ones():
    with pytest.raises(InputError, match=r"unknown profile 'hoper'; known profiles: ") as error:
        profile_of("hoper", "cuda", MESH)
    assert all(name in str(error.value) for name in PROFILES)


@pytest.mark.parametrize("kind,mesh,expected", [("cuda", MESH, "hopper"), ("cpu", MESH, "cpu"), ("cuda", {}, "single"),
                                                ("cpu", {"tensor": 1}, "single")])  # fmt: skip
def test_device_kind_decides_the_profile(kind, mesh, expected):
    assert profile_of(None, kind, mesh).name == expected


def test_device_kind_without_a_profile_is_refused():
    with pytest.raises(InputError, match="unknown profile 'abacus'; known profiles: "):
        profile_of(None, "abacus", MESH)


@pytest.mark.parametrize("name", PROFILES)
def test_name_decides_over_the_device(name):
    assert profile_of(name, "cpu", {}) is PROFILES[name]
    assert PROFILES[name].name == name


@pytest.mark.parametrize("name", ("hopper", "cpu"))
def test_profile_splits_the_transformer_and_the_encoder(name):
    for one in (case("guided-2.3"), case("text-2.3")):
        local = placed(one.graph, one.network, PROFILES[name], MESH)
        assert any(layout.split for layout in local.all_layouts().values())
        assert local.mesh == MESH


def whole(graph) -> bool:
    """Nothing is cut and nothing communicates."""
    splits = [layout.split for layout in graph.all_layouts().values()]
    return not graph.mesh and not any(splits) and not any(node.op in COLLECTIVES for node, _ in graph.walk())


@pytest.mark.parametrize("network", ("video-decoder", "video-encoder", "audio-decoder", "upsampler"))
def test_network_that_a_profile_does_not_name_is_replicated(network):
    assert whole(placed(case("text-2.3").graph, network, PROFILES["hopper"], MESH))


def test_single_splits_nothing():
    one = case("guided-2.3")
    assert whole(placed(one.graph, one.network, PROFILES["single"], MESH))
