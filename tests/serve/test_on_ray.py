"""A worker on Ray asks for the devices of its backend."""

from pathlib import Path

import pytest

from ltx2rt.commands import serve
from ltx2rt.serve.on_ray import lacking, resources
from ltx2rt.session.options import ModelOptions


@pytest.mark.parametrize(("backend", "device", "mesh", "asked"), [
    ("cuda", "auto", {}, {"num_gpus": 1}),
    ("cuda", "auto", {"tensor": 2}, {"num_gpus": 2}),
    ("tpu", "auto", {"tensor": 4}, {"resources": {"TPU": 4}}),
    ("tpu", "cpu", {"tensor": 4}, {}),
])  # fmt: skip
def test_a_worker_asks_for_the_devices_of_its_backend(backend, device, mesh, asked, monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: name)  # Ray is not needed to ask
    options = ModelOptions(backend=backend, model=Path("m"), device=device, mesh=mesh)
    kind, count = serve.bridge("ray", options)[-2:]
    assert resources(kind, int(count)) == {"num_cpus": 1, **asked}


def test_a_cluster_without_the_devices_is_named_as_such():
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}},
        {"Alive": False, "Resources": {"GPU": 8.0}},
    ]
    assert lacking(nodes, "GPU", 2) is None and lacking(nodes, "TPU", 0) is None
    said = "no node of the Ray cluster has 4 GPUs, at most 2; waiting for one"
    assert lacking(nodes, "GPU", 4) == said
    assert "has 1 TPUs, at most 0" in str(lacking(nodes, "TPU", 1))
