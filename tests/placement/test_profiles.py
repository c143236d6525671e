"""Profiles are found by name or by device; an unknown name never becomes a default."""

import pytest

from ltx2rt.backend import DeviceInfo
from ltx2rt.graph.ops import COLLECTIVES
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES, default_mesh, profile_of, resolve
from ltx2rt.session.open import mesh_of_all
from tests.conftest import refused
from tests.placed_cases import case

MESH = {"tensor": 2}


def test_unknown_profile_lists_the_known_ones():
    with refused(r"unknown profile 'hoper'; known profiles: ") as error:
        profile_of("hoper", "cuda", MESH)
    assert all(name in str(error.value) for name in PROFILES)


@pytest.mark.parametrize("kind,mesh,expected", [("cuda", MESH, "hopper"), ("cpu", MESH, "cpu"), ("cuda", {}, "single"),
                                                ("cpu", {"tensor": 1}, "single"), ("TPU v6 lite", MESH, "trillium"),
                                                ("TPU7x", MESH, "ironwood")])  # fmt: skip
def test_device_kind_decides_the_profile(kind, mesh, expected):
    assert profile_of(None, kind, mesh).name == expected


@pytest.mark.parametrize("kind", ("abacus", "TPU v4", "tpu"))
def test_device_kind_without_a_profile_is_refused(kind):
    with refused(f"unknown device kind '{kind}'; known: cpu, .*cuda, .*TPU7x.* --profile") as error:
        profile_of(None, kind, MESH)
    assert all(name in str(error.value) for name in PROFILES)
    assert profile_of("ironwood", kind, MESH).name == "ironwood"
    assert profile_of(None, kind, {}).name == "single"


def test_axis_that_a_profile_does_not_split_is_refused():
    """Its devices would all do the same."""
    with refused("profile ironwood-1d splits nothing over sequence=4; its mesh axes: tensor"):
        profile_of("ironwood-1d", "cpu", {"sequence": 4, "tensor": 2})
    with refused("profile single splits nothing over tensor=2; its mesh axes: none"):
        profile_of("single", "cpu", MESH)
    assert profile_of("single", "cpu", {"tensor": 1}).name == "single"


@pytest.mark.parametrize("name, devices, mesh", [
    ("trillium", 8, "sequence=4,tensor=2"),
    ("trillium", 2, "tensor=2"),
    ("ironwood", 8, "sequence=8"),
    ("trillium-2d", 8, "fsdp=2,tensor=4"),
    ("ironwood-1d", 8, "tensor=8"),
    ("hopper", 3, "tensor=3"),
    ("trillium", 1, ""),
    ("single", 4, ""),
])  # fmt: skip
def test_profile_has_a_mesh_for_every_number_of_devices(name, devices, mesh):
    found = default_mesh(PROFILES[name], devices)
    assert ",".join(f"{axis}={size}" for axis, size in found.items()) == mesh


def test_number_of_devices_that_a_profile_cannot_share_out_is_refused():
    with refused(r"trillium is meant for sequence=N,tensor=2, not for 3 devices; .*--mesh"):
        default_mesh(PROFILES["trillium"], 3)


def test_profile_and_mesh_are_of_all_devices():
    assert resolve(None, "v6e", {}, 8) == (PROFILES["trillium"], {"sequence": 4, "tensor": 2})
    found = resolve(None, "TPU7x", {"tensor": 2, "data": 1}, 2)
    assert found == (PROFILES["ironwood"], {"tensor": 2})
    assert resolve(None, "h100-80gb", {}, 1) == (PROFILES["single"], {})
    with refused(r"--mesh: .* is of 2 devices, there are 8"):
        resolve(None, "v6e", {"tensor": 2}, 8)
    with refused("profile single has no mesh of 8 devices; give a --mesh"):
        resolve("single", "v6e", {}, 8)


@pytest.mark.parametrize("name", [name for name in PROFILES if name != "single"])
def test_profile_splits_the_transformer_and_the_encoder(name):
    for one in (case("guided-2.3"), case("text-2.3")):
        local = one.placed(MESH, name)
        assert any(layout.splits for layout in local.all_layouts().values())
        assert local.mesh == MESH


def whole(graph) -> bool:
    """Nothing is cut and nothing communicates."""
    splits = any(layout.splits for layout in graph.all_layouts().values())
    return not (graph.mesh or splits or any(n.op in COLLECTIVES for n, _ in graph.walk()))


@pytest.mark.parametrize(
    "network", ("video-decoder", "video-encoder", "audio-encoder", "audio-decoder", "upsampler")
)
def test_network_that_a_profile_does_not_name_is_replicated(network):
    assert whole(Placement(PROFILES["hopper"], MESH).local(case("text-2.3").graph, network))
    assert whole(case("guided-2.3").placed(MESH, "single"))


@pytest.mark.parametrize("kind, name, count, hosts, profile, expected", [
    ("tpu", "TPU v6 lite", 8, 1, None, {"sequence": 4, "tensor": 2}),
    ("tpu", "TPU v6 lite", 8, 1, "ironwood-1d", {"tensor": 8}),
    ("tpu", "TPU v6 lite", 16, 2, None, {"sequence": 8, "tensor": 2}),
    ("tpu", "TPU7x", 8, 1, None, {"sequence": 8}),
    ("tpu", "TPU7x", 8, 1, "single", {}),
    ("tpu", "TPU7x", 1, 1, None, {}),
    ("cpu", "CPU", 8, 1, None, {}),
    ("cpu", "CPU", 8, 2, None, {"tensor": 8}),
    ("cuda", "NVIDIA H200", 8, 1, None, {}),
])  # fmt: skip
def test_without_a_mesh_all_tpus_and_all_devices_of_several_hosts_are_used(
    kind, name, count, hosts, profile, expected
):
    """On GPUs the launcher decides: there a process is started for each."""
    backend = "cuda" if kind == "cuda" else "tpu"
    assert mesh_of_all(backend, DeviceInfo(kind, name, 1, 1, count, hosts), profile) == expected
