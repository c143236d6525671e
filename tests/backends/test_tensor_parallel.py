"""Ranks of both backends give what one device gives, communicate what the plan says, and load their
slices only. One fleet per backend, of `tensor_parallel_ranks`, serves every quick test."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from ltx2rt.backend import get_backend
from ltx2rt.session.open import open_session
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages import sound
from tests.backends.tensor_parallel_ranks import (
    CHUNK,
    MEASURED,
    RANKS,
    Run,
    runs_on,
    sound_of,
    source_of,
    write_inputs,
)
from tests.placed_cases import LAYERS, NAMES, case
from tests.virtual import xla_flags

CLOSE = 1e-5  # contract: float32 under tensor parallelism; another order of summation
HERE = Path(__file__).parent
SPLIT = re.compile(
    r"transformer_blocks\.\d+\..*(to_(q|k|v|gate_logits)\.(weight|bias)|[qk]_norm\.weight|"
    r"net\.0\.proj\.(weight|bias)|(to_out\.0|net\.2)\.weight)"
)
KINDS = {"cuda": "torch_ranks", "tpu": "jax_devices"}  # fixtures


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, tiny) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_inputs(folder)
    (folder / "model").symlink_to(tiny("tiny-2.0", "official"))
    return folder


def run_fleet(kind: str, folder: Path, **environment: str) -> Path:
    # the code that is tested here, wherever it lies
    path = os.pathsep.join((str(HERE.parents[1]), *sys.path))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, str(HERE / "tensor_parallel_ranks.py"), kind, str(folder)]
    process = subprocess.Popen(
        command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, errors = process.communicate(timeout=240)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks with it
        raise
    assert process.returncode == 0, errors[-4000:]
    return folder


@pytest.fixture(scope="module")
def torch_ranks(inputs) -> Path:
    return run_fleet("cuda", inputs)


@pytest.fixture(scope="module")
def jax_devices(inputs) -> Path:
    return run_fleet("tpu", inputs, XLA_FLAGS=xla_flags(6))


@cache
def alone(run: Run, folder: Path) -> dict[str, np.ndarray]:
    """The same run of torch on one device."""
    backend, one = get_backend("cuda", "cpu"), case(run.name, run.dtype)
    weights = backend.load([one.graph], source_of(run, folder, backend.merge))
    return {k: backend.to_host(v) for k, v in backend.lower(one.graph)(weights, one.inputs).items()}


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, float]:
    """Relative L2 by output, in float64."""
    assert a.keys() == b.keys()
    wide = {key: (a[key].astype(np.float64), b[key].astype(np.float64)) for key in b}
    return {key: float(np.linalg.norm(x - y) / np.linalg.norm(y)) for key, (x, y) in wide.items()}


def saved(folder: Path, kind: str, devices: int, run: Run) -> dict[str, np.ndarray]:
    return dict(np.load(folder / f"{kind}-{devices}-{run}.npz"))


def did(folder: Path, devices: int, name: str = "cuda-{}") -> list[dict]:
    """What each rank wrote."""
    files = (folder / f"{name.format(devices)}-rank{rank}.json" for rank in range(devices))
    return [json.loads(file.read_text()) for file in files]


def runs(kind: str, *dtypes: str) -> list:
    """(run, devices) of each test."""
    pairs = ((run, devices) for devices in RANKS for run in runs_on(kind, devices))
    return [pytest.param(r, n, id=f"{r}-{n}") for r, n in pairs if r.dtype in dtypes]


@pytest.mark.parametrize(("kind", "run", "devices"), [
    pytest.param(kind, *p.values, id=f"{kind}-{p.id}") for kind in KINDS for p in runs(kind, "float32")
])  # fmt: skip
def test_ranks_equal_one_device(kind, run, devices, request):
    """12 heads on 3 ranks among them, merged LoRAs, heads that stay whole; JAX under `shard_map`."""
    folder = request.getfixturevalue(KINDS[kind])
    actual, expected = saved(folder, kind, devices, run), alone(run, folder)
    assert max(distance(actual, expected).values()) <= CLOSE
    if run.lora:
        changed = distance(actual, alone(Run(run.name), folder))
        assert min(changed.values()) > 0.1, "the LoRA changes nothing"


def test_torch_ranks_in_bfloat16_err_as_one_device_does(torch_ranks):
    """Against float32. Single errors of tiny networks scatter: the contract's factor 2 holds for
    each; their average has one device's own, plus the roundings of partial sums."""
    ratios = []
    for run, devices in (p.values for p in runs("cuda", "bfloat16")):
        exact = alone(Run(run.name, "float32", run.lora), torch_ranks)
        single = distance(alone(run, torch_ranks), exact)
        for key, error in distance(saved(torch_ranks, "cuda", devices, run), exact).items():
            ratios.append(error / single[key])
            assert 0 < ratios[-1] <= 2, f"{run}, {devices} ranks, {key}"
    assert np.exp(np.mean(np.log(ratios))) <= 1.2


@pytest.mark.parametrize(("run", "devices"), runs("cuda", "float32", "bfloat16"))
def test_ranks_execute_the_collectives_of_the_plan_and_no_others(torch_ranks, run, devices):
    """As torch dispatches them, on every rank."""
    planned: Counter = Counter()
    for node, times in run.on(devices).walk():
        if node.op == "all_reduce":
            op = "all_reduce_coalesced" if len(node.inputs) > 1 else "all_reduce"
            planned[f"{op} torch.{node.inputs[0].type.dtype}"] += times
        elif node.op == "all_gather":
            planned[f"all_gather_into_tensor torch.{node.inputs[0].type.dtype}"] += times
        elif node.op == "swap_edges":
            planned[f"all_to_all_single torch.{node.inputs[0].type.dtype}"] += times
    for rank in did(torch_ranks, devices):
        assert rank["executed"][str(run)] == planned


@pytest.mark.parametrize(("run", "devices"), runs("tpu", "float32"))
def test_jax_traces_the_collectives_of_the_plan_and_no_others(jax_devices, run, devices):
    """JAX makes a psum of each operand; a scan's body is there once."""
    names, planned = {"all_reduce": "psum", "all_gather": "all_gather"}, Counter()
    for node, _ in case(run.name, run.dtype).on(devices).walk():
        planned[names.get(node.op)] += len(node.inputs)
    del planned[None]
    traced = json.loads((jax_devices / f"tpu-{devices}.json").read_text())[str(run)]
    assert planned and traced == planned


@pytest.mark.parametrize("generation", ("2.0", "2.3"))
def test_ranks_execute_4_large_and_3_small_all_reduces_a_block(torch_ranks, generation):
    for rank in did(torch_ranks, RANKS[0]):
        executed = rank["executed"][str(Run(f"guided-{generation}", "bfloat16"))]
        for word, count in (("reduce", 7), ("bfloat16", 4), ("float32", 3)):
            assert sum(n for op, n in executed.items() if word in op) == count * LAYERS
        assert all(op.startswith("all_reduce") for op in executed), "no gather"


@pytest.mark.parametrize("devices", RANKS)
def test_ranks_agree_on_what_one_of_them_says(torch_ranks, devices):
    assert [rank["agreed"] for rank in did(torch_ranks, devices)] == [[True, False]] * devices


@pytest.mark.parametrize("devices", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_ranks_request_no_more_than_they_hold(torch_ranks, name, devices):
    """Their slices of the blocks' linears once, and whole tensors each."""
    params = case(name).on(devices).all_params().values()
    held = sum(v.type.nbytes * count for v, count in params)
    assert [rank["requested"][name] for rank in did(torch_ranks, devices)] == [held] * devices
    if not name.startswith("text"):
        sizes = {tensor: array.nbytes for tensor, array in case(name).params.items()}
        split = sum(size for tensor, size in sizes.items() if SPLIT.search(tensor))
        whole = sum(sizes.values()) - split
        assert split > whole and held == split // devices + whole


# A CPU's weights lie in the heap in which LoRAs are merged: some 12 MB of what that frees count
# until malloc_trim. Of the 119 MB here that is a tenth; `benchmarks.load` measures 1.04 to 1.07 on
# 1.3 GB. A GPU's weights lie elsewhere.
@pytest.mark.long  # what ranks ask of the file: test_ranks_request_no_more_than_they_hold
def test_rank_peaks_at_its_own_share_of_memory_while_it_loads_and_merges(inputs):
    """Anonymous memory above that before: mapped pages belong to the page cache."""
    for found in did(run_fleet("cuda-big", inputs), MEASURED, "big"):
        assert found["share"] > 100e6 and found["samples"] > 10
        assert 0.9 * found["share"] < found["peak"] <= 1.15 * found["share"], found


def test_jax_devices_peak_at_what_they_hold_while_they_load(jax_devices):
    """Six devices in one process, each third of a weight on two. A CPU's devices lie in host
    memory, and two that hold the same slice share it: the bound is one copy of all weights, where a
    TPU's host has one slice at a time."""
    found = json.loads((jax_devices / "big-jax.json").read_text())
    assert found["share"] > 300e6 and found["samples"] > 10
    assert 0.9 * found["share"] < found["peak"] <= 1.15 * found["share"], found


@pytest.mark.parametrize("devices", RANKS)
def test_shared_calls_can_be_stopped_and_the_next_ones_are_whole(torch_ranks, devices):
    """Each rank has one more call under way at most; all stop at the same one."""
    found = [rank["shared"] for rank in did(torch_ranks, devices)]
    assert [rank["taken"] for rank in found] == [[devices, 4]] * devices
    assert found[0]["values"] == [2 * i for i in range(10)]
    assert all(rank["values"] == [None] * 10 for rank in found[1:])


def test_ranks_share_the_sound_and_cancel_together(torch_ranks, monkeypatch):
    """Bit by bit what one process makes with as many threads; the main one alone has it."""
    found = [rank["sound"] for rank in did(torch_ranks, RANKS[0])]
    others = {"made": 2, "shape": [1, 2, 0]}
    assert found == [{"made": 2, "shape": [1, 2, 70 * 240]}] + [others] * (RANKS[0] - 1)
    monkeypatch.setattr(sound, "CHUNK", CHUNK)
    model, threads = torch_ranks / "model", torch.get_num_threads()
    session = open_session(ModelOptions("cuda", model, device="cpu"))
    torch.set_num_threads(1)
    try:
        np.testing.assert_array_equal(np.load(torch_ranks / "sound.npy"), sound_of(session))
    finally:
        torch.set_num_threads(threads)
        session.close()
