"""JAX: one process for each host."""

import json
import os
import signal
import socket
from dataclasses import dataclass

import pytest
from ltx2rt_tpu.hosts import hosts
from safetensors.numpy import load_file

from tests.conftest import assert_near, refused
from tests.ranks.launches import BROKEN, LOADING, hosts_by_hand, said_once, written

ON_HOSTS = (*"--backend tpu --profile trillium --pipeline one-stage --no-audio --seed 7".split(),)


@pytest.mark.long
def test_two_hosts_give_the_clip_of_one_torch_device_once(flags, command, tmp_path):
    """On the mesh that the profile means for all their devices."""

    latents, report = tmp_path / "latents.safetensors", tmp_path / "report.json"
    words = flags(*ON_HOSTS, "--latents-out", latents, "--report", report)
    (main, other) = (run.end() for run in hosts_by_hand(*[["-m", "ltx2rt", *words]] * 2))
    assert (main[0], other[0]) == (0, 0) and (main[2], other[2]) == ([], [])
    assert main[1].startswith(str(tmp_path / "clip.mp4")) and main[1].count("\n") == 1
    assert other[1] == ""
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == ["clip.mp4", "latents.safetensors", "report.json"]
    assert json.loads(report.read_text())["mesh"] == {"sequence": 2, "tensor": 2}
    several = load_file(latents)
    status, _, errors = command(*words, *"--backend cuda --profile single --mesh tensor=1".split())
    assert status == 0, errors
    one = load_file(latents)
    assert "stage1.video.steps" in one
    assert_near(several, one, 1e-5)  # float32, sums in another order; reached: 1.1e-6


@pytest.mark.long
def test_hosts_that_cannot_work_together_are_told_once(flags, tmp_path):
    unlike = "ranks 0 and 1 have different arguments: --seed is 7 on rank 0, 8 on rank 1"
    few = "is of 2 devices, the 2 processes have 4; give a --mesh of all of them"
    mesh, single = ("--mesh", "tensor=2"), ("--profile", "single")
    for first, second, message in (
        ((), ("--seed", 8), unlike),
        (mesh, mesh, few),
        (single, single, "profile single has no mesh of 4 devices"),
    ):
        words = [["-m", "ltx2rt", *flags(*ON_HOSTS, *more)] for more in (first, second)]
        assert message in said_once(hosts_by_hand(*words)) and not list(tmp_path.iterdir())


AGREEING = """
import os
from ltx2rt.backend import get_backend
backend, rank = get_backend("tpu", "cpu", {"tensor": 4}), int(os.environ["JAX_PROCESS_ID"])
port = f":{int(os.environ['JAX_COORDINATOR_ADDRESS'].rpartition(':')[2]):04X}"
sockets = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
(listening,) = [words[1] for words in sockets if words[3] == "0A" and words[1].endswith(port)]
assert listening.endswith("0100007F" + port), listening
print(backend.agree(rank == 1), backend.agree(False), get_backend("tpu", "cpu", {"tensor": 4}).agree(rank == 0))
"""


def test_hosts_meet_on_one_interface_and_agree_on_what_one_of_them_says():
    ended = [run.end() for run in hosts_by_hand(*[["-c", AGREEING]] * 2)]
    assert ended == [(0, "True False True\n", [])] * 2


@pytest.mark.slow
def test_an_exception_on_one_host_ends_all(flags, tmp_path):
    script = written(tmp_path, BROKEN)
    words = [str(script), "raise", *flags(*ON_HOSTS)]
    line = said_once(hosts_by_hand(words, words), status=1)
    assert line == "ltx2rt: error: rank 1: RuntimeError: a bad day"
    assert {path.name for path in tmp_path.iterdir()} == {"clip.mp4.part", script.name}  # its steps


@pytest.mark.long
@pytest.mark.parametrize("dies", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_host_process_that_dies_ends_all(flags, tmp_path, dies):
    """Process 0 holds the store; JAX aborts the others as soon as it is gone."""
    script = written(tmp_path, LOADING)
    launches = hosts_by_hand(*[[str(script), *flags(*ON_HOSTS)]] * 2)
    assert launches[1].process.stdout.readline() == "loading\n"
    os.kill(launches[dies].pid, signal.SIGKILL)
    assert launches[dies].end()[0] == -9
    status, _, lines = launches[1 - dies].end()
    assert status == 1 and lines == [f"ltx2rt: error: rank {dies} died: killed, or out of memory"]
    assert list(tmp_path.iterdir()) == [script]


EXPLICIT = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
STEP = {"SLURM_JOB_ID": "9", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_LOCALID": "0"}
STEP |= {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
SLICE = {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "2"}


@pytest.mark.parametrize("environment,expected", [
    ({}, (0, 1)),
    (EXPLICIT, (3, 4)),
    (STEP, (1, 2)),
    ({k: v for k, v in STEP.items() if k != "SLURM_PROCID"}, (0, 1)),  # salloc, not srun
    (SLICE, (2, 4)),
    (SLICE | EXPLICIT, (3, 4)),
    ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, (0, 1)),
])  # fmt: skip
def test_environment_tells_which_host_this_is(environment, expected):
    assert hosts(environment) == expected


@pytest.mark.parametrize("environment,message", [
    ({"JAX_NUM_PROCESSES": "4"}, "PROCESSES without JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID"),
    (EXPLICIT | {"JAX_PROCESS_ID": "4"}, "process '4' of '4'"),
    ({"TPU_WORKER_HOSTNAMES": "a,b"}, "process '' of '2'"),
])  # fmt: skip
def test_environment_that_names_no_host_is_refused(environment, message):
    with refused(message):
        hosts(environment)


def test_a_meeting_place_that_cannot_be_is_named(monkeypatch):
    from ltx2rt_tpu.distributed import join

    with socket.create_server(("", 0)) as taken:
        monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
        monkeypatch.setenv("JAX_PROCESS_ID", "0")
        for address, message in (
            (f"127.0.0.1:{taken.getsockname()[1]}", "cannot listen there"),
            ("127.0.0.1", "expected HOST:PORT"),
        ):
            monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
            with refused(f"JAX_COORDINATOR_ADDRESS {address}: {message}"):
                join()


def test_tensor_neighbours_are_on_one_host():
    """Whatever the order in which the devices and the axes are named."""
    from ltx2rt_tpu.distributed import device_mesh

    @dataclass(frozen=True)
    class Device:
        id: int
        process_index: int

    devices = [Device(i, i // 2 % 2) for i in range(8)]  # hosts 0 0 1 1 0 0 1 1
    mesh = device_mesh(devices[::-1], {"tensor": 2, "sequence": 4})
    assert dict(mesh.shape) == {"sequence": 4, "tensor": 2} and mesh.axis_names[-1] == "tensor"
    assert [[d.id for d in pair] for pair in mesh.devices] == [[0, 1], [4, 5], [2, 3], [6, 7]]
