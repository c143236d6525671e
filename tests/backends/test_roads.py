"""Streamed weights beyond the host's memory are read from files, changes of which are noticed."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from ltx2rt_cuda.host import FileWeight, SpillFile
from ltx2rt_cuda.stream import BUFFER_BYTES

from ltx2rt.backend import get_backend
from ltx2rt.graph import trace
from ltx2rt.placement import stream
from ltx2rt.weights.files import TensorFile, write_arrays
from tests.backends.loops import SIGMAS, assert_bitwise, denoise, job, loop_graph
from tests.conftest import refused
from tests.parity import random_params


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The weights of a small loop, in bfloat16."""
    monkeypatch.setattr(stream, "LEAST_BYTES", 1000)  # no table
    params = random_params(loop_graph(dtype="bfloat16"))
    path = tmp_path / "weights.safetensors"
    write_arrays(path, {name: x.astype(ml_dtypes.bfloat16) for name, x in params.items()})
    return path


def opened(path: Path, road: str, dtype: str = "bfloat16"):
    """Backend, loop and weights with every layer streamed."""
    backend, graph = get_backend("cuda", "cpu"), loop_graph(dtype=dtype)
    pieces = frozenset(stream.pieces(graph))
    weights = backend.load([graph], TensorFile(path), streamed=pieces, road=road)
    return backend, backend.lower_loop(graph), weights


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
def test_weights_that_the_file_has_are_read_from_it(file, dtype):
    """Others, here of another dtype, from a file for the time being. Bytes are those of the plan:
    each layer once a step, and the first one for the next."""
    expected = denoise(opened(file, "pinned", dtype), SIGMAS, **job(3))
    handle = opened(file, "file", dtype)
    assert_bitwise(denoise(handle, SIGMAS, **job(3)), expected)
    ring = handle[2].ring
    kept = [x for piece in ring.pieces.values() for x in piece.values()]
    homes = {type(home) for x in kept for home, *_ in x.parts}
    assert homes == {TensorFile if dtype == "bfloat16" else SpillFile}
    sizes = stream.pieces(handle[1].graph)
    assert ring.copied_bytes == (len(SIGMAS) - 1) * sum(sizes.values()) + next(iter(sizes.values()))


def test_bytes_of_several_parts_are_read_from_any_of_them_on(tmp_path):
    """As a thread asks for them that fills small buffers; a joined matrix ends in rows of zeros."""
    whole = np.random.default_rng(0).integers(1, 255, 1000, np.uint8)
    path = tmp_path / "bytes.safetensors"
    write_arrays(path, {"x": whole})
    home, (_, begin) = TensorFile(path), TensorFile(path)._tensors["x"]
    parts = [(home, begin + at, n) for at, n in ((500, 300), (0, 7), (100, 250))]
    weight = FileWeight((40, 15), torch.uint8, parts)
    expected = np.concatenate([whole[500:800], whole[:7], whole[100:350], np.zeros(43, np.uint8)])
    for size in (1, 13, 299, 600):
        found = []
        for first in range(0, weight.nbytes, size):
            place = torch.full((min(size, weight.nbytes - first),), 9, dtype=torch.uint8)
            weight.read_into(place, first)
            found.append(place.numpy())
        np.testing.assert_array_equal(np.concatenate(found), expected)


@pytest.mark.parametrize("how", ["truncated", "rewritten"])
def test_a_file_that_changes_during_a_run_stops_it(file, how):
    """And no later run takes what has come of it."""
    handle = opened(file, "file")
    denoise(handle, SIGMAS, **job(3))
    with open(file, "r+b") as changed:
        changed.seek(-8, os.SEEK_END)
        changed.write(b"changed!")
        changed.truncate(None if how == "rewritten" else file.stat().st_size // 2)
    for _ in range(2):
        with refused("changed since it was opened"):
            denoise(handle, SIGMAS, **job(3))


def test_a_file_that_is_replaced_is_read_on(file, tmp_path):
    expected = denoise(opened(file, "pinned"), SIGMAS, **job(3))
    handle = opened(file, "file")
    other = tmp_path / "other"
    other.write_bytes(b"another model")
    other.replace(file)
    assert_bitwise(denoise(handle, SIGMAS, **job(3)), expected)


def test_a_disk_without_room_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with refused(r"set TMPDIR .* GB are free"):
        SpillFile(2**60)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    with refused("No such file"):
        SpillFile(1)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    spilled, before = SpillFile(1), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))  # the disk is full sooner
    try:
        spilled.kept(torch.zeros(2000))
        with refused("set TMPDIR"):
            spilled.kept(torch.zeros(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


LAYERS, WIDTH = 24, 4096


def main(path: str, road: str, more: str) -> None:
    """Run LAYERS matrices of WIDTH x WIDTH twice, one behind the other, in a process that may take
    so many bytes more than it has."""

    def status(name):
        with open("/proc/self/status") as file:
            return next(int(x.split()[1]) * 1024 for x in file if x.startswith(name))

    def model(o):
        def block(o, carry, invariant, data):
            return {"x": o.linear(carry["x"], "w", {"D": WIDTH}, bias=False)}, {}

        x = o.input("x", B=1, D=WIDTH)
        return {"y": o.repeat(block, LAYERS, {"x": x}, prefix="blocks.*.")[0]["x"]}

    graph, backend = trace("stack", model, "bfloat16"), get_backend("cuda", "cpu")
    program, x = backend.lower(graph), {"x": np.ones((1, WIDTH), np.float32)}
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + int(more),) * 2)
    before, pieces = status("VmHWM"), frozenset(stream.pieces(graph))
    weights = backend.load([graph], TensorFile(path), streamed=pieces, road=road)
    for _ in range(2):
        made = program(weights, x)["y"].float()
    print(weights.ring.copied_bytes, status("VmHWM") - before, made.sum().item())


def in_limit(*words: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *map(str, words)]
    return subprocess.run(command, env=environment, text=True, capture_output=True)


@pytest.mark.long
def test_weights_larger_than_the_memory_come_from_the_file(tmp_path):
    """0.8 GB of weights through a process that is allowed 0.5 GB, two layers and the buffers among
    them: what it has in memory grows by no more. In memory of the host they do not fit."""
    layer, path = 2 * WIDTH**2, tmp_path / "weights.safetensors"
    rng = np.random.default_rng(0)
    noise = (rng.standard_normal((WIDTH, WIDTH), np.float32) / 64).astype(ml_dtypes.bfloat16)
    write_arrays(path, {f"blocks.{i}.w.weight": noise for i in range(LAYERS)})
    room = 2 * layer + 3 * BUFFER_BYTES + 2**28
    assert room < 0.7 * LAYERS * layer
    found = in_limit(path, "file", room)
    assert found.returncode == 0, found.stderr[-2000:]
    copied, grown, made = map(float, found.stdout.split())
    assert copied == (2 * LAYERS + 1) * layer and grown < room and made
    refused = in_limit(path, "staged", room)
    assert refused.returncode and "can't allocate memory" in refused.stderr


if __name__ == "__main__":
    main(*sys.argv[1:])
