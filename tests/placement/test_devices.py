"""Names of devices, and the memory of a host."""

import pytest

from ltx2rt.errors import InputError
from ltx2rt.placement import devices
from ltx2rt.placement.devices import device_kind, device_kinds, slice_chips, topology
from ltx2rt.run.estimate import Devices
from tests.conftest import refused

GB = 10**9


@pytest.mark.parametrize(
    "names, limit, left",
    [
        (("memory.max", "memory.current", "inactive_file"), 2 * GB, 1.5 * GB),
        (("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), 2 * GB,
         1.5 * GB),
        (("memory.max", "memory.current", "inactive_file"), "max", None),
        (("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), 2**63 - 4096,
         None),
    ],
)  # fmt: skip
def test_a_container_has_its_share_of_the_host(names, limit, left, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "CGROUPS", ())
    total, free = devices.host_memory()
    assert 0 < free <= total
    for name, value in zip(names, (limit, GB), strict=False):
        (tmp_path / name).write_text(f"{value}\n")
    (tmp_path / "memory.stat").write_text(f"anon {GB // 2}\n{names[2]} {GB // 2}\n")
    monkeypatch.setattr(devices, "CGROUPS", ((tmp_path / "absent", *names), (tmp_path, *names)))
    found = devices.host_memory()
    if left is None:
        assert found[0] == total and found[1] == pytest.approx(free, rel=0.2)
    else:
        assert found == (limit, left)


@pytest.mark.parametrize("names, kind", [
    (("h100", "H100", "h100-80gb", "NVIDIA H100 80GB HBM3", "H100 SXM"), "h100-80gb"),
    (("H200", "NVIDIA H200", "h200 141 GB"), "h200-141gb"),
    (("NVIDIA A100-SXM4-80GB", "a100_80gb", "A100 80G"), "a100-80gb"),
    (("4090", "rtx4090", "rtx-4090", "RTX 4090", "NVIDIA GeForce RTX 4090"), "rtx4090-24gb"),
    (("L40S", "NVIDIA L40S"), "l40s-48gb"),
    (("v6e", "TPU v6e", "tpu-v6e", "TPU v6 lite", "trillium", "TPU Trillium"), "v6e"),
    (("v7x", "tpu7x", "TPU7x", "Ironwood", "tpu-ironwood"), "v7x"),
])  # fmt: skip
def test_a_device_has_its_name_in_every_spelling(names, kind):
    assert {device_kind(name).name for name in names} == {kind}


def test_every_kind_is_found_by_its_name_and_its_model():
    for name in device_kinds():
        assert device_kind(name).name == name
        if not name.startswith("a100"):
            assert device_kind(name.partition("-")[0]).name == name


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("v6e-8", "v6e", 8), ("v5p-8", "v5p", 4), ("8xH100", "h100-80gb", 8),
        ("v7x-8", "v7x", 8), ("tpu7x-8", "v7x", 8),
        ("Trillium-4", "v6e", 4), ("ironwood-8", "v7x", 8), ("4xironwood", "v7x", 4),
        ("2 x 4090", "rtx4090-24gb", 2), ("h200", "h200-141gb", 1),
    ],
)  # fmt: skip
def test_a_name_may_state_the_number_of_devices(name, kind, count):
    found, number = Devices(name).found
    assert (found.name, number) == (kind, count)
    with refused(r"--devices: 3, but --device-kind .* is .* x "):
        _ = Devices(name if count > 1 else f"2x{name}", 3).found


@pytest.mark.parametrize("name, chips, devices", [
    ("v6e-8", "v6e:2x4", 8), ("v6e:2x4", "v6e:2x4", 8), ("v5e-1", "v5e:1x1", 1),
    ("v7x-8", "tpu7x:2x2x1", 8), ("tpu7x-2", "tpu7x:1x1x1", 2), ("v5p-16", "v5p:2x2x2", 8),
    ("trillium-8", "v6e:2x4", 8), ("ironwood-8", "tpu7x:2x2x1", 8), ("Ironwood:2x2x1", "tpu7x:2x2x1", 8),
    ("v7x:2x2x2", "tpu7x:2x2x2", 16), ("trillium:2x2", "v6e:2x2", 4),
    ("v6e", "v6e:1x1", 1), ("ironwood", "tpu7x:1x1x1", 2),
])  # fmt: skip
def test_a_slice_is_compiled_for_by_its_name(name, chips, devices):
    assert slice_chips(name) == chips and topology(name)[1] == devices


@pytest.mark.parametrize("name", ["v6e-7", "v9-8", "8xH100", "v6e-0", "", "v7x-8-8", "h100:2x2"])
def test_no_slice_is_guessed(name):
    assert slice_chips(name) == name
    with refused("--device-kind: "):
        topology(name)


@pytest.mark.parametrize("name, message", [
    ("a100", "may be a100-40gb or a100-80gb; choose one"),
    ("h1000", "did you mean h100-80gb?"),
    ("h100-96gb", "did you mean h100-80gb?"),
    ("RTX 409", "did you mean rtx4090-24gb?"),
    *((name, "AMD GPUs are not supported") for name in ("mi300x", "8xMI325X", "Radeon RX 7900 XTX", "gfx942")),
    *((name, "known: h100-80gb, ") for name in ("x", "", "gpu", "cuda", "e", "0", "b" * 9999)),
])  # fmt: skip
def test_another_name_is_refused_with_what_was_meant(name, message):
    with pytest.raises(InputError) as error:
        device_kind(name)
    assert str(error.value).startswith("--device-kind: ") and message in str(error.value)
    assert len(str(error.value)) < 500
