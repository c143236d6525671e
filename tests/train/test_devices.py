"""`train run` on several processes and devices is a run on one, also where it stops and goes on."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from ltx2rt.backend import MOMENTS
from ltx2rt.train.state import read_state, states
from tests.parity import relative_l2
from tests.ranks.launches import Launch, alive, by_hand, ranks_of, said_once, wait_for
from tests.train_runs import options, rows_of
from tests.virtual import xla_flags

CLOSE = 2e-5  # float32, summed in another order: gradients of the first step reached 8e-7
LR, STEPS = 1e-2, 3


@pytest.fixture(scope="module")
def training(model, cache):
    """training(output, **flags) -> the words of `python` that train."""

    def made(output: Path, data: Path = cache, backend: str = "cuda", **flags: object) -> list[str]:
        more = {"model": model, "steps": STEPS, "save_every": 1, "keep": STEPS, "lr": LR}
        fixed = ("-m", "ltx2rt", "train", "run", "--backend", backend, "--device", "cpu")
        return [str(word) for word in (*fixed, *options(data, output, **more | flags))]

    return made


def ended(launch: Launch) -> str:
    status, out, errors = launch.end()
    assert status == 0, errors
    return out


@pytest.fixture(scope="module")
def alone(training, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("alone") / "run"
    ended(Launch(training(output, batch=2)))
    return output


def agree(found: Path, expected: Path) -> None:
    """Losses of all steps, gradients of the first, by its moments, and where the last has ended."""
    ours, theirs = rows_of(found), rows_of(expected)
    assert [row["samples"] for row in ours] == [row["samples"] for row in theirs]
    for name in ("video_loss", "audio_loss", "grad_norm"):
        assert [x[name] for x in ours] == pytest.approx([x[name] for x in theirs], rel=CLOSE)
    arrays = [[read_state(path)[1] for path in states(run)] for run in (found, expected)]
    for kind in MOMENTS:
        first = [sorted(run[0][kind].items()) for run in arrays]
        whole = [np.concatenate([x.ravel() for _, x in named]) for named in first]
        assert relative_l2(*whole) <= CLOSE, kind
    # AdamW divides a gradient by its size plus 1e-8. Where it is itself 1e-8, once in 26,112
    # numbers, rounding decides where the number goes, by LR at most; two batches of one on one
    # device move it like two devices. A wrong gradient of one matrix moves hundreds by LR.
    last = [run[-1]["parameters"] for run in arrays]
    moved = [np.square(x - last[1][name]).sum() for name, x in last[0].items()]
    assert np.sqrt(sum(moved)) <= LR


@pytest.mark.long
@pytest.mark.parametrize(("flags", "batch"), [
    pytest.param({"num_gpus": 2}, 1, marks=pytest.mark.slow),
    ({"mesh": "tensor=2"}, 2),
    pytest.param({"mesh": "sequence=2"}, 2, marks=pytest.mark.slow),
    pytest.param({"mesh": "fsdp=2,data=2"}, 1, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_processes_of_pytorch_are_one_device(training, alone, tmp_path, flags, batch):
    output = tmp_path / "run"
    out = ended(Launch(training(output, batch=batch, **flags)))
    assert out.split() == [str(output / f"lora-{STEPS:06d}.safetensors")]  # written and said once
    agree(output, alone)


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh", ["data=2", pytest.param("sequence=2,tensor=2", marks=pytest.mark.slow)]
)
def test_devices_of_jax_are_one_device_of_pytorch(training, alone, tmp_path, mesh):
    output, batch = tmp_path / "run", 1 if "data" in mesh else 2
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(4)}
    ended(Launch(training(output, backend="tpu", batch=batch, mesh=mesh), **environment))
    agree(output, alone)


@pytest.mark.slow
def test_a_run_goes_on_with_its_samples_shared_out_otherwise(training, tmp_path):
    """One step by two ranks, started as torchrun does; two on one device in two batches each."""
    output = tmp_path / "run"
    begun = training(output, batch=1, steps=1)
    assert [ended(rank) != "" for rank in by_hand(begun)] == [True, False]
    line = said_once([Launch(training(output, batch=1))])
    assert "was begun with 2; choose --batch, --accumulate" in line
    ended(Launch(training(output, accumulate=2, schedule="linear")))
    assert [int(path.name) for path in states(output)] == [1, 2, STEPS]
    assert [row["step"] for row in rows_of(output)] == list(range(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_processes_that_are_asked_to_end_finish_the_step(training, tmp_path, number):
    output = tmp_path / "run"
    launch = Launch(training(output, num_gpus=2, steps=10_000, save_every=10_000))
    metrics = output / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    launch.process.send_signal(number)
    _, err = launch.process.communicate(timeout=60)
    assert launch.process.returncode == 0, err
    (state,) = states(output)
    assert int(state.name) == len(metrics.read_text().splitlines())
    assert f"stopped after step {int(state.name)} of 10000; the same command continues" in err


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_other_and_the_run_goes_on(training, tmp_path):
    """At any moment, one of two: then the same command, to the files of an undisturbed run."""
    chance, steps = random.Random(5), {"num_gpus": 2, "steps": 8, "save_every": 2, "keep": 8}
    ended(Launch(training(tmp_path / "alone", **steps)))
    words, found = training(tmp_path / "run", **steps), 0
    metrics = tmp_path / "run" / "metrics.jsonl"
    for kill in range(int(os.environ.get("LTX2RT_TEST_KILLS", 4))):
        launch = Launch(words)
        wait_for(lambda least=found: metrics.exists() and len(rows_of(tmp_path / "run")) >= least)
        wait_for(lambda pid=launch.pid: len(ranks_of(pid)) == 2 or not alive(pid))
        time.sleep(chance.uniform(0, 0.2))
        ranks = [*ranks_of(launch.pid).values()]
        if len(ranks) < 2:  # it was quicker
            break
        os.kill(ranks[kill % 2], signal.SIGKILL)
        status, _, said = launch.end()
        assert status not in (0, None) and len(said) <= 1, said
        wait_for(lambda pids=ranks: not any(map(alive, pids)))
        found = min(8, found + 2)
    ended(Launch(words))
    runs = [tmp_path / name for name in ("run", "alone")]
    one, other = (
        [(x["step"], x["video_loss"], x["audio_loss"]) for x in rows_of(run)] for run in runs
    )
    assert one == other
    one, other = ({p.name: p.read_bytes() for p in run.glob("lora-*.safetensors")} for run in runs)
    assert one == other and one


@pytest.mark.long
def test_processes_that_read_other_data_are_refused(training, cache, tmp_path):
    other = shutil.copytree(cache, tmp_path / "cache")
    both = (training(tmp_path / "run", data=data) for data in (cache, other))
    assert "different arguments: --data" in said_once(by_hand(*both))
