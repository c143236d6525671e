"""Several ranks on this host: what they agree on, who speaks and writes, how they end, and what they leave behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

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
        self.process = subprocess.Popen([sys.executable, *words], env=env, start_new_session=True, **pipes)
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

    torch.set_num_threads(1)
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
    script, report = tmp_path / "compiled.py", tmp_path / "report.json"
    script.write_text(COMPILED)
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


BROKEN = """
import os, sys, time
from ltx2rt.cli import main
from ltx2rt.graph import trace
from ltx2rt.pipeline.networks import Networks
rank, how = int(os.environ["RANK"]), sys.argv.pop(1)
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
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    ended = [run.end() for run in by_hand([str(script), "raise", *flags("--num-frames", 161)])]
    assert [status for status, _, _ in ended] == [1, 1] and list(tmp_path.iterdir()) == [script]
    assert [line for _, _, lines in ended for line in lines] == ["ltx2rt: error: rank 1: RuntimeError: a bad day"]


def test_the_survivor_of_rank_0_removes_its_unfinished_file(flags, tmp_path):
    """Killed before its last tile, without a launcher that could clean up or keep the store."""
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
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
from ltx2rt.graph import trace
from ltx2rt.pipeline.networks import Networks
weights = Networks.weights
def slow(self, *args):
    if os.environ["RANK"] == "1":
        print("loading", flush=True)
        time.sleep(600)
    return weights(self, *args)
Networks.weights = slow
sys.exit(main())
"""


def test_a_death_while_loading_ends_all(flags, tmp_path):
    """Rank 0 has its weights and waits for rank 1 in the first collective."""
    script = tmp_path / "loading.py"
    script.write_text(LOADING)
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
