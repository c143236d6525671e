"""`train run` on several processes and devices is a run on one, also where it stops and goes on."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from ltx2rt.testing import relative_l2
from ltx2rt.train.state import read_state, states
from tests.ranks.launches import Launch, by_hand, wait_for
from tests.virtual import xla_flags

# float32, summed in another order: reached 8e-6. Adam divides by the second moment: one number whose
# gradient is 1e-6 of the largest moves by 4e-4, and the parameters by 6e-5.
CLOSE, MOVED = 2e-5, 2e-4
STEPS = 3


def words(backend: str, *more: object) -> list[str]:
    fixed = ("-m", "ltx2rt", "train", "run", "--backend", backend, "--device", "cpu")
    return [str(word) for word in (*fixed, *more)]


@pytest.fixture(scope="module")
def training(model, cache):
    """training(output, **flags) -> the words behind `train run`."""
    fixed = {"model": model, "data": cache, "rank": 2, "lr": 1e-2, "steps": STEPS}

    def made(output: Path, **flags: object) -> list[object]:
        named = fixed | {"output": output} | flags
        return [
            word for name, value in named.items() for word in (f"--{name.replace('_', '-')}", value)
        ]

    return made


def ended(launch: Launch) -> str:
    status, out, errors = launch.end()
    assert status == 0, errors
    return out


@pytest.fixture(scope="module")
def alone(training, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("alone") / "run"
    ended(Launch(words("cuda", *training(output, batch=2))))
    return output


def agree(found: Path, expected: Path) -> None:
    """Losses of all steps, and parameters and moments after the last."""
    rows = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (found, expected)
    ]
    assert [row["samples"] for row in rows[0]] == [row["samples"] for row in rows[1]]
    for name in ("video_loss", "audio_loss", "grad_norm"):
        ours, theirs = ([row[name] for row in each] for each in rows)
        assert ours == pytest.approx(theirs, rel=CLOSE)
    ours, theirs = (read_state(states(run)[-1])[1] for run in (found, expected))
    for kind, arrays in theirs.items():
        whole = [
            np.concatenate([x[name].ravel() for name in sorted(arrays)])
            for x in (ours[kind], arrays)
        ]
        assert relative_l2(*whole) <= (MOVED if kind == "parameters" else CLOSE), kind


@pytest.mark.long
@pytest.mark.parametrize(("flags", "batch"), [
    pytest.param({"num_gpus": 2}, 1, marks=pytest.mark.slow),
    ({"mesh": "tensor=2"}, 2),
    pytest.param({"mesh": "sequence=2"}, 2, marks=pytest.mark.slow),
    pytest.param({"mesh": "fsdp=2,data=2"}, 1, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_processes_of_pytorch_are_one_device(training, alone, tmp_path, flags, batch):
    output = tmp_path / "run"
    out = ended(Launch(words("cuda", *training(output, batch=batch, **flags))))
    assert out.split() == [str(output / f"lora-{STEPS:06d}.safetensors")]  # written and said once
    assert [path.name for path in states(output)] == [f"{STEPS:06d}"]
    agree(output, alone)


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh", ["data=2", pytest.param("sequence=2,tensor=2", marks=pytest.mark.slow)]
)
def test_devices_of_jax_are_one_device_of_pytorch(training, alone, tmp_path, mesh):
    output, batch = tmp_path / "run", 1 if "data" in mesh else 2
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(4)}
    ended(Launch(words("tpu", *training(output, batch=batch, mesh=mesh)), **environment))
    agree(output, alone)


@pytest.mark.slow
def test_a_run_goes_on_with_its_samples_shared_out_otherwise(training, alone, tmp_path):
    """One step by two ranks that were started by hand, as torchrun does; two on one device in two
    batches each."""
    output = tmp_path / "run"
    begun = words("cuda", *training(output, batch=1, steps=1))
    assert [ended(rank) != "" for rank in by_hand(begun)] == [True, False]
    launch = Launch(words("cuda", *training(output, batch=1)))
    status, _, (line,) = launch.end()
    assert status == 2 and "was begun with 2; choose --batch, --accumulate" in line
    ended(Launch(words("cuda", *training(output, accumulate=2, schedule="linear"))))
    assert [path.name for path in states(output)] == ["000001", f"{STEPS:06d}"]
    lines = (output / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_processes_that_are_asked_to_end_finish_the_step(training, tmp_path, number):
    output = tmp_path / "run"
    launch = Launch(words("cuda", *training(output, num_gpus=2, steps=10_000)))
    metrics = output / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    launch.process.send_signal(number)
    _, err = launch.process.communicate(timeout=60)
    assert launch.process.returncode == 0, err
    (state,) = states(output)
    assert int(state.name) == len(metrics.read_text().splitlines())
    assert f"stopped after step {int(state.name)} of 10000; the same command continues" in err


@pytest.mark.long
def test_processes_that_read_other_data_are_refused(training, cache, tmp_path):
    other = tmp_path / "cache"
    other.mkdir()
    (other / "manifest.jsonl").write_text((cache / "manifest.jsonl").read_text() + "\n")
    first, second = (
        words("cuda", *training(tmp_path / "run", data=data)) for data in (cache, other)
    )
    found = [rank.end() for rank in by_hand(first, second)]
    assert [status for status, *_ in found] == [2, 2]
    (line,) = [line for _, _, lines in found for line in lines]
    assert "different arguments: --data" in line
