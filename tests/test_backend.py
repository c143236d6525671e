"""How backends are found, and what they tell before they exist."""

import os
import subprocess
import sys

import pytest
from ltx2rt_cuda.factory import let_threads_sleep, num_gpus

from ltx2rt.backend import DeviceInfo, backend_names, get_ahead_compiler, get_backend, get_factory
from ltx2rt.errors import InputError

TOY = """
class Factory:
    name, accelerator, process_per_device, packages = "toy", "abacus", False, ()
    streams = ()
    def open(self, device, mesh):
        return device, dict(mesh)
    def ahead_compiler(self, topology, mesh, timed):
        import no_such_framework
FACTORY = Factory()
"""
LIGHT = """
import sys
from ltx2rt.backend import DeviceInfo, backend_names, get_factory
for name in backend_names():
    factory = get_factory(name)
    factory.rank_and_size({}), factory.most_processes("auto"), factory.profile_key(DeviceInfo("cpu", "CPU", 1, 1))
print(*[name for name in ("torch", "jax", "flax", "triton") if name in sys.modules])
"""


@pytest.fixture
def toy(install_backend):
    install_backend("toy", TOY)


def test_a_third_backend_takes_one_entry_point(toy, command):
    assert backend_names() == ["cuda", "toy", "tpu"]
    assert get_factory("toy").accelerator == "abacus"
    assert get_backend("toy", "cpu", {"tensor": 2}) == ("cpu", {"tensor": 2})


def test_what_is_not_installed_is_said(toy):
    with pytest.raises(InputError, match=r"unknown backend 'nope'; known backends: cuda, toy, tpu"):
        get_backend("nope")
    with pytest.raises(
        InputError, match=r"backend toy: No module named .* in its clone: pip install '\.\[toy\]'"
    ):
        get_ahead_compiler("toy", "2x2", {})


def test_factories_import_no_framework():
    ran = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def test_factories_tell_what_the_core_asks():
    cuda, tpu = get_factory("cuda"), get_factory("tpu")
    gpu = DeviceInfo("cuda", "NVIDIA H100", 1, 1, 8)
    chips = DeviceInfo("tpu", "TPU v6 lite", 1, 1, 8)
    cpus = DeviceInfo("cpu", "CPU", 1, 1, 8)
    assert (cuda.process_per_device, tpu.process_per_device) == (True, False)
    assert (cuda.profile_key(gpu), tpu.profile_key(chips), tpu.profile_key(cpus)) == (
        "cuda",
        "TPU v6 lite",
        "cpu",
    )
    assert (cuda.takes_all(gpu), tpu.takes_all(chips), tpu.takes_all(cpus)) == (False, True, False)
    with pytest.raises(InputError, match="backend cuda compiles on the device that runs"):
        get_ahead_compiler("cuda", "2x2", {})


def test_gpus_are_counted_without_torch(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert num_gpus({}, tmp_path) == 3
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "0,2"}, tmp_path) == 2
    assert (
        num_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
        == num_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path)
        == 0
    )
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path / "none") == 0
    one_device = get_factory("cuda").one_device
    assert one_device(1, {"CUDA_VISIBLE_DEVICES": "4, 7"}) == {"CUDA_VISIBLE_DEVICES": "7"}
    assert one_device(1, {}) == {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize(
    "device,asked,expected", [("cpu", None, "PASSIVE"), ("cpu", "ACTIVE", "ACTIVE")]
)
def test_idle_threads_sleep_on_a_cpu_unless_the_user_has_decided(
    device, asked, expected, monkeypatch
):
    monkeypatch.setenv("OMP_WAIT_POLICY", asked or "")
    if asked is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    let_threads_sleep(device)
    assert os.environ["OMP_WAIT_POLICY"] == expected


def test_the_policy_is_set_before_torch_is_imported():
    """Its OpenMP runtime reads the environment once."""
    code = (
        "import os, sys; from importlib.abc import MetaPathFinder\n"
        "class Seen(MetaPathFinder):\n"
        "    def find_spec(self, name, *_):\n"
        "        name == 'torch' and sys.exit(os.environ.get('OMP_WAIT_POLICY'))\n"
        "sys.meta_path.insert(0, Seen())\n"
        "from ltx2rt.backend import get_backend; get_backend('cuda', 'cpu')"
    )
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ran.stderr.strip() == "PASSIVE"
