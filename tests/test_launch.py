"""Several ranks on this host: what they agree on, who speaks and writes, how they end, and what they leave behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from ltx2rt import launch
from ltx2rt.errors import InputError
from ltx2rt.graph import trace
from ltx2rt.media.mp4 import write_mp4
from ltx2rt.partial import partial_path
from ltx2rt.pipeline.networks import Networks
from ltx2rt.pipeline.request import ModelOptions
from ltx2rt.pipeline.tiling import blend_tiles, plan_tiles, tile_latents
from ltx2rt.weights.checkpoint import open_checkpoint

FLAGS = "--backend cuda --device cpu --prompt x --width 64 --height 64 --fps 48 --image-crf 0".split()  # noqa: SIM905
TIME_LIMIT_S = 30  # for all ranks to end after one has


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("tiny-2.3", "official")


@pytest.fixture
def flags(model, tmp_path):
    """flags(*more) -> words of a small `generate` that writes clip.mp4."""
    fixed = ["generate", *FLAGS, "--model", model, "--output", tmp_path / "clip.mp4", "--steps", 2, "--num-frames", 17]
    return lambda *more: [str(word) for word in (*fixed, *more)]


class Launch:
    """A started command and what it said."""

    def __init__(self, words, **environment):
        env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        heard = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job and its children ignore it
        self.process = subprocess.Popen([sys.executable, *words], env=env, start_new_session=True, **pipes)
        signal.signal(signal.SIGINT, heard)
        self.pid = self.process.pid

    def end(self):
        """(exit status, stdout, lines of stderr that start as errors)"""
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, [x for x in err.splitlines() if "ltx2rt: error: " in x]


def by_hand(words, second=None):
    """Two ranks under torchrun's variables, without torchrun; words of rank 1 can differ."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    return [Launch(w, RANK=str(i), LOCAL_RANK=str(i), **where) for i, w in enumerate((words, second or words))]


def hosts_by_hand(*commands, devices=2):
    """A JAX process for each command, each with CPU devices of its own, as a host has some of a slice's TPUs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{probe.getsockname()[1]}"}
    where |= {"JAX_NUM_PROCESSES": str(len(commands)), "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    return [Launch(words, JAX_PROCESS_ID=str(i), **where) for i, words in enumerate(commands)]


def ranks_of(launcher_pid):
    """Process ids by rank of a launcher's children."""
    found = {}
    for child in Path(f"/proc/{launcher_pid}/task/{launcher_pid}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found |= {int(x[5:]): int(child) for x in environment if x.startswith(b"RANK=")}
    return found


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def alive(pid):
    return Path(f"/proc/{pid}").exists()


# ---- the same clip, once ----


def test_two_ranks_give_one_clip_and_tiles_decode_as_on_one_device(flags, model, tmp_path):
    """Three tiles: ranks 0, 1, 0. The frames are one device's bit by bit, given the same latent."""
    latents = tmp_path / "latents.safetensors"
    report = tmp_path / "report.json"
    more = ("--num-frames", 161, "--no-audio", "--no-metadata", "--seed", 7)
    run = Launch(["-m", "ltx2rt", *flags(*more, "--num-gpus", 2, "--latents-out", latents, "--report", report)])
    status, out, errors = run.end()
    assert (status, errors) == (0, []) and out.count("\n") == 1
    assert {p.name for p in tmp_path.iterdir()} == {"clip.mp4", "latents.safetensors", "report.json"}
    assert json.loads(report.read_text())["mesh"] == {"tensor": 2}

    from safetensors.numpy import load_file

    from ltx2rt.backend import get_backend

    backend = get_backend("cuda", "cpu")
    networks = Networks(open_checkpoint(model), backend, ModelOptions("cuda", model), "float32")
    latent = load_file(latents)["video_latent"]
    tiling = plan_tiles("auto", latent.shape[2:], networks.config.video_vae)
    assert len(tiling.frames) == 3
    frames = blend_tiles(networks.decode_tiles(tile_latents(latent, tiling)), tiling, backend.to_host)
    write_mp4(
        tmp_path / "one.mp4", frames, num_frames=161, fps=Fraction(48), sample_rate=networks.config.vocoder.sample_rate
    )
    assert (tmp_path / "one.mp4").read_bytes() == (tmp_path / "clip.mp4").read_bytes()


def test_torchrun_does_the_same_as_num_gpus(flags, tmp_path):
    words = flags("--no-metadata", "--seed", 7)
    run = Launch(["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ltx2rt", *words])
    status, out, errors = run.end()
    assert (status, errors) == (0, []) and out.count("\n") == 1
    first = (tmp_path / "clip.mp4").read_bytes()
    status, out, errors = Launch(["-m", "ltx2rt", *words, "--tp-size", "2"]).end()
    assert (status, errors) == (0, []) and out.count("\n") == 1
    assert (tmp_path / "clip.mp4").read_bytes() == first


def test_probe_under_ranks_writes_once(model, tmp_path):
    from safetensors.numpy import load_file, save_file

    save_file({"steps": np.array([4], np.int32)}, tmp_path / "in.safetensors")
    words = ["-m", "ltx2rt", "probe", "--backend", "cuda", "--device", "cpu", "--model", str(model), "--num-gpus", "2"]
    words += ["--component", "schedule", "--inputs", str(tmp_path / "in.safetensors")]
    status, _, errors = Launch([*words, "--outputs", str(tmp_path / "out.safetensors")]).end()
    assert (status, errors) == (0, [])
    assert load_file(tmp_path / "out.safetensors")["sigmas"].shape == (5,)
    assert len(list(tmp_path.iterdir())) == 2


COMPILED = """
import functools, sys, torch
torch.compile = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)  # Inductor takes two minutes here
from ltx2rt.cli import main
sys.exit(main())
"""


def test_compiled_blocks_hold_their_collectives(flags, tmp_path):
    """The whole block is one graph, collectives included, after a warm-up too; every load is charged once."""
    script, report = written(tmp_path, COMPILED), tmp_path / "report.json"
    one_stage = ("--pipeline", "one-stage", "--no-audio", "--seed", 7, "--compile", "--warmup", "--report", report)
    for run in by_hand([str(script), *flags(*one_stage)]):
        assert run.end()[::2] == (0, [])
    assert json.loads(report.read_text())["warmup_s"] > 0


# ---- disagreement and bad input ----


def test_ranks_with_other_arguments_are_told_apart_before_any_collective(flags, tmp_path):
    words = ["-m", "ltx2rt", *flags("--seed", 7)]
    ended = [run.end() for run in by_hand(words, [*words[:-1], "8"])]
    assert [status for status, _, _ in ended] == [2, 2] and not list(tmp_path.iterdir())
    (line,) = [line for _, _, lines in ended for line in lines]
    assert "ranks 0 and 1 have different arguments: --seed is 7 on rank 0, 8 on rank 1" in line


def test_input_that_every_rank_refuses_is_refused_once(flags, tmp_path):
    for more, message in (("--width", 100), "the nearest are 64 and 128"), (("--tp-size", 3), "tensor=3"):
        words = flags(*more, *([] if "--tp-size" in more else ["--num-gpus", 2]))
        status, out, (line,) = Launch(["-m", "ltx2rt", *words]).end()
        assert (status, out) == (2, "") and message in line and not list(tmp_path.iterdir())


def test_a_port_in_use_is_named(flags):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
        status, _, (line,) = Launch(["-m", "ltx2rt", *flags()], **env).end()
    assert status == 2 and f"port {port} is in use" in line


def test_a_world_without_a_meeting_place_is_refused(flags):
    status, _, (line,) = Launch(["-m", "ltx2rt", *flags()], WORLD_SIZE="2").end()
    assert status == 2 and "WORLD_SIZE is 2 without RANK, MASTER_ADDR, MASTER_PORT" in line


class FakeStore(dict):
    """Of two ranks whose second has said all it has to say."""

    def get(self, key):
        return self[key].encode()

    set = dict.__setitem__


def test_files_are_compared_by_size_and_header(tmp_path, model):
    crew = object.__new__(launch.Crew)
    crew.rank, crew.size = 0, 2
    crew._store = FakeStore()
    file = tmp_path / "w.safetensors"
    original = (model / "tiny-2.3.safetensors").read_bytes()
    file.write_bytes(original)
    mine = launch.digests([tmp_path])
    assert mine == launch.digests([file]) and len(launch.digests([model])) > 3
    file.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))  # data are not read
    assert launch.digests([file]) == mine
    file.write_bytes(original.replace(b"transformer_blocks.0", b"transformer_blocks.9", 1))
    crew._store["files/1"] = json.dumps(launch.digests([file]))
    with pytest.raises(InputError, match=r"ranks 0 and 1 have different files: .*w\.safetensors is .* on rank 0, .*"):
        crew.agree("files", mine)


# ---- ends ----


@pytest.mark.parametrize(
    "victim,number,status,message",
    [
        (1, signal.SIGKILL, 1, "rank 1 was ended by SIGKILL"),
        (0, signal.SIGKILL, 1, "rank 0 was ended by SIGKILL"),
        (None, signal.SIGINT, 130, "interrupted"),
        (None, signal.SIGKILL, -9, None),
    ],
)
def test_a_death_in_a_step_ends_all(flags, tmp_path, victim, number, status, message):
    run = Launch(["-m", "ltx2rt", *flags("--steps", 2000, "--num-gpus", 2)])
    ranks = wait_for(lambda: ranks if len(ranks := ranks_of(run.pid)) == 2 else None)
    for line in iter(run.process.stderr.readline, ""):
        if line.startswith("text:"):
            break
    started = time.monotonic()
    os.kill(run.pid if victim is None else ranks[victim], number)
    found, out, errors = run.end()
    wait_for(lambda: not any(map(alive, ranks.values())))
    assert time.monotonic() - started < TIME_LIMIT_S
    assert (found, out) == (status, "") and not list(tmp_path.iterdir())
    assert len(errors) == (message is not None) and (message is None or message in errors[0])


def written(folder, text):
    script = folder / "script.py"
    script.write_text(text)
    return script


BROKEN = """
import os, sys, time
from ltx2rt.cli import main
from ltx2rt.pipeline.networks import Networks
rank, how = int(os.environ.get("RANK") or os.environ["JAX_PROCESS_ID"]), sys.argv.pop(1)
decode, calls = Networks.decoder_call, []
def broken(self, *args):
    if how == "raise" and rank == 1:
        raise RuntimeError("a bad day")
    calls.append(how)
    if how == "hang" and rank == 0 and len(calls) == 3:
        print("hanging", flush=True)
        time.sleep(600)
    return decode(self, *args)
Networks.decoder_call = broken
sys.exit(main())
"""


def test_an_exception_on_one_rank_is_shown_once_with_its_rank(flags, tmp_path):
    script = written(tmp_path, BROKEN)
    ended = [run.end() for run in by_hand([str(script), "raise", *flags("--num-frames", 161)])]
    assert [status for status, _, _ in ended] == [1, 1] and list(tmp_path.iterdir()) == [script]
    assert [line for _, _, lines in ended for line in lines] == ["ltx2rt: error: rank 1: RuntimeError: a bad day"]


def test_the_survivor_of_rank_0_removes_its_unfinished_file(flags, tmp_path):
    """Killed before its last tile, without a launcher that could clean up or keep the store."""
    script = written(tmp_path, BROKEN)
    main, other = by_hand([str(script), "hang", *flags("--num-frames", 161)])
    assert main.process.stdout.readline() == "hanging\n"
    unfinished = partial_path(tmp_path / "clip.mp4", main.pid)
    wait_for(unfinished.exists)
    os.kill(main.pid, signal.SIGKILL)
    assert main.end()[0] == -9
    status, _, lines = other.end()
    assert status == 1 and lines == ["ltx2rt: error: rank 0 died: killed, or out of memory"]
    assert list(tmp_path.iterdir()) == [script]


LOADING = """
import os, sys, time
from ltx2rt.cli import main
from ltx2rt.pipeline.networks import Networks
weights = Networks.weights
def slow(self, *args):
    if "1" in (os.environ.get("RANK"), os.environ.get("JAX_PROCESS_ID")):
        print("loading", flush=True)
        time.sleep(600)
    return weights(self, *args)
Networks.weights = slow
sys.exit(main())
"""


def test_a_death_while_loading_ends_all(flags, tmp_path):
    """Rank 0 has its weights and waits for rank 1 in the first collective."""
    script = written(tmp_path, LOADING)
    main, other = by_hand([str(script), *flags()])
    assert other.process.stdout.readline() == "loading\n"
    os.kill(other.pid, signal.SIGKILL)
    assert other.end()[0] == -9
    status, _, lines = main.end()
    assert status == 1 and lines == ["ltx2rt: error: rank 1 died: killed, or out of memory"]
    assert list(tmp_path.iterdir()) == [script]


FAKE = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
pathlib.Path(sys.argv[1], f"pid{rank}").write_text(str(os.getpid()))
if rank == "0":
    pathlib.Path(sys.argv[1], f".clip.mp4.{os.getpid()}.partial").touch()
if rank == "1":
    sys.exit(int(sys.argv[2]))
time.sleep(600 if sys.argv[2] != "0" else 0)
"""


@pytest.mark.parametrize("status", [0, 2, 1])
def test_the_launcher_ends_ranks_that_hang_and_removes_what_they_left(tmp_path, monkeypatch, capfd, status):
    """A rank's exit status is the launcher's; the rank has said why itself."""
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    package = tmp_path / "fake" / "ltx2rt"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(FAKE)
    monkeypatch.chdir(package.parent)  # where `python -m` looks first
    assert launch.start([str(tmp_path), str(status)], 3, [tmp_path / "clip.mp4"]) == status
    assert not any(alive(int((tmp_path / f"pid{i}").read_text())) for i in range(3))
    assert not list(tmp_path.glob(".clip*")) and capfd.readouterr() == ("", "")


def test_on_one_device_every_rank_is_this_process():
    from ltx2rt.backend import get_backend

    backend = get_backend("cuda", "cpu")
    assert backend.is_main and backend.num_processes == 1
    graph = trace("double", lambda o: {"y": o.affine(o.input("x", B=1), scale=2.0)}, "float32")
    program = backend.lower(graph)
    calls = [(program, {}, {"x": np.array([i], np.float32)}) for i in range(3)]
    assert [float(backend.to_host(y)[0]) for y in backend.each(calls, "y")] == [0, 2, 4]


# ---- JAX: one process for each host ----

ON_HOSTS = ("--backend", "tpu", "--profile", "trillium", "--pipeline", "one-stage", "--no-audio", "--seed", 7)


def test_two_hosts_give_the_clip_of_one_device_once(flags, command, tmp_path):
    """On the mesh that the profile means for all their devices."""
    from safetensors.numpy import load_file

    from ltx2rt.testing import relative_l2

    latents, report = tmp_path / "latents.safetensors", tmp_path / "report.json"
    words = flags(*ON_HOSTS, "--latents-out", latents, "--report", report)
    (main, other) = (run.end() for run in hosts_by_hand(*[["-m", "ltx2rt", *words]] * 2))
    assert (main[0], other[0]) == (0, 0) and (main[2], other[2]) == ([], [])
    assert main[1].startswith(str(tmp_path / "clip.mp4")) and main[1].count("\n") == 1 and other[1] == ""
    assert {p.name for p in tmp_path.iterdir()} == {"clip.mp4", "latents.safetensors", "report.json"}
    assert json.loads(report.read_text())["mesh"] == {"sequence": 2, "tensor": 2}
    several = load_file(latents)
    status, _, errors = command(*words, "--mesh", "tensor=1")
    assert status == 0, errors
    one = load_file(latents)
    assert one.keys() == several.keys() and "stage1.video.steps" in one
    for name, expected in one.items():
        assert relative_l2(several[name], expected) <= 1e-5, name  # float32, sums in another order; reached: 1.1e-6


def test_hosts_that_cannot_work_together_are_told_once(flags, tmp_path):
    for first, second, message in (
        ((), ("--seed", 8), "ranks 0 and 1 have different arguments: --seed is 7 on rank 0, 8 on rank 1"),
        (mesh := ("--mesh", "tensor=2"), mesh, "is of 2 devices, the 2 processes have 4; give a --mesh of all of them"),
        (single := ("--profile", "single"), single, "profile single has no mesh of 4 devices"),
    ):
        words = [["-m", "ltx2rt", *flags(*ON_HOSTS, *more)] for more in (first, second)]
        ended = [run.end() for run in hosts_by_hand(*words)]
        assert [status for status, _, _ in ended] == [2, 2] and not list(tmp_path.iterdir())
        (line,) = [line for _, _, lines in ended for line in lines]
        assert message in line


AGREEING = """
import os
from ltx2rt.backend import get_backend
backend, rank = get_backend("tpu", "cpu", {"tensor": 4}), int(os.environ["JAX_PROCESS_ID"])
print(backend.agree(rank == 1), backend.agree(False), get_backend("tpu", "cpu", {"tensor": 4}).agree(rank == 0))
"""


def test_hosts_agree_on_what_one_of_them_says():
    for run in hosts_by_hand(*[["-c", AGREEING]] * 2):
        assert run.end() == (0, "True False True\n", [])


def test_an_exception_on_one_host_ends_all(flags, tmp_path):
    script = written(tmp_path, BROKEN)
    ended = [run.end() for run in hosts_by_hand(*[[str(script), "raise", *flags(*ON_HOSTS)]] * 2)]
    assert [status for status, _, _ in ended] == [1, 1] and list(tmp_path.iterdir()) == [script]
    assert [line for _, _, lines in ended for line in lines] == ["ltx2rt: error: rank 1: RuntimeError: a bad day"]


def test_a_host_process_that_dies_ends_all(flags, tmp_path):
    script = written(tmp_path, LOADING)
    main, other = hosts_by_hand(*[[str(script), *flags(*ON_HOSTS)]] * 2)
    assert other.process.stdout.readline() == "loading\n"
    os.kill(other.pid, signal.SIGKILL)
    assert other.end()[0] == -9
    status, _, lines = main.end()
    assert status == 1 and lines == ["ltx2rt: error: rank 1 died: killed, or out of memory"]
    assert list(tmp_path.iterdir()) == [script]


EXPLICIT = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
STEP = {"SLURM_JOB_ID": "9", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
STEP["SLURM_PROCID"] = "1"
SLICE = {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "2"}


@pytest.mark.parametrize(
    "environment,expected",
    [
        ({}, (0, 1)),
        (EXPLICIT, (3, 4)),
        (STEP, (1, 2)),
        ({k: v for k, v in STEP.items() if k != "SLURM_PROCID"}, (0, 1)),  # salloc, not srun
        (SLICE, (2, 4)),
        (SLICE | EXPLICIT, (3, 4)),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, (0, 1)),
    ],
)
def test_environment_tells_which_host_this_is(environment, expected):
    assert launch.hosts(environment) == expected


@pytest.mark.parametrize(
    "environment,message",
    [
        ({"JAX_NUM_PROCESSES": "4"}, "JAX_NUM_PROCESSES without JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID"),
        (EXPLICIT | {"JAX_PROCESS_ID": "4"}, "process '4' of '4'"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "process '' of '2'"),
    ],
)
def test_environment_that_names_no_host_is_refused(environment, message):
    with pytest.raises(InputError, match=message):
        launch.hosts(environment)


def test_a_meeting_place_that_cannot_be_is_named(flags):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for address, message in ((f"127.0.0.1:{port}", "cannot listen there"), ("127.0.0.1", "expected HOST:PORT")):
            environment = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
            status, _, (line,) = Launch(["-m", "ltx2rt", *flags(*ON_HOSTS)], **environment).end()
            assert status == 2 and f"JAX_COORDINATOR_ADDRESS {address}: {message}" in line


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
