"""What a host says of its memory."""

import pytest

from ltx2rt.placement import devices

GB = 10**9


@pytest.mark.parametrize(
    "names, limit, left",
    [
        (("memory.max", "memory.current", "inactive_file"), 2 * GB, 1.5 * GB),
        (("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), 2 * GB, 1.5 * GB),
        (("memory.max", "memory.current", "inactive_file"), "max", None),
        (("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), 2**63 - 4096, None),
    ],
)
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
