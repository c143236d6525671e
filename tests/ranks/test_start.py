"""Several ranks on this host, however they are launched: one clip, one line, and nothing left
behind."""

import json
from fractions import Fraction

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ltx2rt.backend import get_backend
from ltx2rt.media.mp4 import write_mp4
from ltx2rt.models.geometry import Geometry
from ltx2rt.ranks import start as launcher
from ltx2rt.session.call import Call
from ltx2rt.session.options import ModelOptions
from ltx2rt.session.session import Session
from ltx2rt.stages.tiling import blend_tiles, plan_tiles, tile_latents
from ltx2rt.weights.checkpoint import open_checkpoint
from tests.ranks.launches import Launch, alive, by_hand, written


@pytest.mark.long
def test_two_ranks_give_one_clip_and_tiles_decode_as_on_one_device(flags, model, tmp_path):
    """Three tiles: ranks 0, 1, 0. The frames are one device's bit by bit, given the same latent."""
    latents, report = tmp_path / "latents.safetensors", tmp_path / "report.json"
    more = "--num-frames 161 --no-audio --no-metadata --no-provenance --seed 7 --num-gpus 2"
    words = flags(*more.split(), "--latents-out", latents, "--report", report)
    status, out, errors = Launch(["-m", "ltx2rt", *words]).end()
    assert (status, errors) == (0, []) and out.count("\n") == 1
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == ["clip.mp4", "latents.safetensors", "report.json"]
    assert json.loads(report.read_text())["mesh"] == {"tensor": 2}

    backend = get_backend("cuda", "cpu")
    session = Session(open_checkpoint(model), backend, ModelOptions("cuda", model), "float32")
    latent = load_file(latents)["video_latent"]
    rows, columns = (32 * n for n in latent.shape[3:])
    size = Geometry.of(session.config, columns, rows, 161, Fraction(48))
    tiling = plan_tiles("auto", size)
    assert len(tiling.frames) == 3
    tiles = tile_latents(latent, tiling)
    calls = ((Call("video-decoder", tile.shape), {"latent": tile}) for tile in tiles)
    frames = blend_tiles(session.each(calls, "frames"), tiling, backend.to_host)
    how = {
        "num_frames": 161,
        "fps": Fraction(48),
        "sample_rate": session.config.vocoder.sample_rate,
    }
    write_mp4(tmp_path / "one.mp4", frames, **how)
    assert (tmp_path / "one.mp4").read_bytes() == (tmp_path / "clip.mp4").read_bytes()


@pytest.mark.slow
def test_torchrun_does_the_same_as_num_gpus(flags, tmp_path):
    words = flags("--no-metadata", "--no-provenance", "--seed", 7)
    torchrun, clips = ["-m", "torch.distributed.run", "--nproc-per-node", "2"], []
    for command in (
        [*torchrun, "-m", "ltx2rt", *words],
        ["-m", "ltx2rt", *words, "--tp-size", "2"],
    ):
        status, out, errors = Launch(command).end()
        assert (status, errors) == (0, []) and out.count("\n") == 1
        clips.append((tmp_path / "clip.mp4").read_bytes())
    assert clips[0] == clips[1]


@pytest.mark.long
def test_probe_under_ranks_writes_once(model, tmp_path):
    save_file({"steps": np.array([4], np.int32)}, tmp_path / "in.safetensors")
    words = "-m ltx2rt probe --backend cuda --device cpu --num-gpus 2 --component schedule".split()
    words += ["--model", str(model), "--inputs", str(tmp_path / "in.safetensors")]
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


@pytest.mark.slow
def test_compiled_blocks_hold_their_collectives(flags, tmp_path):
    """The block is one graph with collectives, also after a warm-up; loads count once."""
    script, report = written(tmp_path, COMPILED), tmp_path / "report.json"
    one_stage = "--pipeline one-stage --no-audio --seed 7 --compile --warmup --report".split()
    for run in by_hand([str(script), *flags(*one_stage, report)]):
        assert run.end()[::2] == (0, [])
    assert json.loads(report.read_text())["warmup_s"] > 0


@pytest.mark.long
def test_input_that_every_rank_refuses_is_refused_once(flags, tmp_path):
    for more, message in (("--width 62 --num-gpus 2", "even number"), ("--tp-size 3", "tensor=3")):
        status, out, (line,) = Launch(["-m", "ltx2rt", *flags(*more.split())]).end()
        assert (status, out) == (2, "") and message in line and not list(tmp_path.iterdir())


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
def test_the_launcher_ends_ranks_that_hang_and_removes_what_they_left(
    tmp_path, monkeypatch, capfd, status
):
    """A rank's exit status is the launcher's; the rank has said why itself."""
    monkeypatch.setattr(launcher, "GRACE_S", 0.5)
    package = tmp_path / "fake" / "ltx2rt"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(FAKE)
    monkeypatch.chdir(package.parent)  # where `python -m` looks first
    words = [str(tmp_path), str(status)]
    assert launcher.start(words, 3, [tmp_path / "clip.mp4"], most=3) == status
    assert not any(alive(int((tmp_path / f"pid{i}").read_text())) for i in range(3))
    assert not list(tmp_path.glob(".clip*")) and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("more", [("--num-gpus", 100000), ("--mesh", "tensor=99999999")])
def test_more_ranks_than_can_work_here_are_not_started(flags, command, monkeypatch, more):
    monkeypatch.setattr(launcher.subprocess, "Popen", lambda *_, **__: 1 / 0)
    status, _, error = command(*flags(*more))
    assert status == 2 and error.count("\n") == 1
    assert "processes are asked for, this host has devices for" in error
