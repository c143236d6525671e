"""A device that is neither a GPU nor this processor, which queues, records and counts its work."""

import re
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from threading import local
from types import SimpleNamespace

import ltx2rt_cuda
import numpy as np
import pytest
import torch
from ltx2rt_cuda.device import DEVICES, unused
from ltx2rt_cuda.device.torch_device import Fetched, TorchDevice

from ltx2rt.backend import DeviceInfo, get_backend
from ltx2rt.passes.fuse import fuse
from ltx2rt.placement import stream
from tests.backends.loops import (
    SIGMAS,
    assert_bitwise,
    denoise,
    double,
    fresh,
    job,
    loop_graph,
    one_number,
)
from tests.conftest import refused
from tests.parity import ArraySource, random_params


class Event:
    def __init__(self, device):
        self.device, self.recorded = device, False

    def record(self):
        self.recorded = True

    def synchronize(self):
        self.device.counts["waits of the host"] += 1


class Stream:
    """done: how often it was the current one."""

    def __init__(self, device):
        self.device, self.done = device, 0

    def wait_stream(self, other): ...

    def wait_event(self, event):
        self.device.counts["waits for a copy"] += event.recorded


class Recorder:
    nbytes, unused_bytes, serves = 96, 32, None

    def __init__(self, device):
        self.device, self.id = device, object()

    def record(self, run):
        self.device.counts["recorded"] += 1
        outputs = run()

        def replay():
            for kept, new in zip(outputs, run(), strict=True):
                kept.copy_(new)

        return SimpleNamespace(replay=replay, reset=lambda: None), outputs

    def empty(self):
        self.id = object()


class Loom(TorchDevice):
    kind = "loom"
    queues = exchanges = True

    def __init__(self):
        self.counts = Counter()
        self.main, self.own = Stream(self), local()

    @property
    def current(self):
        """Every thread has its own."""
        return getattr(self.own, "stream", self.main)

    @property
    def torch(self):
        return torch.device("cpu")

    def stream(self):
        return Stream(self)

    def current_stream(self):
        return self.current

    @contextmanager
    def on(self, stream):
        before, self.own.stream = self.current, stream
        try:
            yield
            stream.done += 1
        finally:
            self.own.stream = before

    def event(self):
        return Event(self)

    def recorder(self):
        return Recorder(self)

    def info(self, recorder):
        recorded_bytes = recorder.nbytes if recorder else 0
        return DeviceInfo("loom", "A loom", 10**10, 10**10, recorded_bytes=recorded_bytes)

    def attention(self, q, k, v, mask, scale):
        self.counts["attentions"] += 1
        return super().attention(q, k, v, mask, scale)


@pytest.fixture
def loom(monkeypatch):
    """The device; tensors of a CPU count as being on it."""
    device = Loom()
    monkeypatch.setitem(DEVICES, "loom", device)
    monkeypatch.setitem(DEVICES, "cpu", device)
    return device


def test_a_denoise_loop_is_recorded_and_replayed_on_any_device(loom, monkeypatch):
    """Bit for bit what a CPU computes; the part before the steps, and a step, are recorded once."""
    handle = fresh("cuda", device="loom")
    backend = handle[0]
    found = [denoise(handle, SIGMAS, **job(seed)) for seed in (1, 2)]
    assert loom.counts["recorded"] == 2 and backend.device().recorded_bytes == 96
    assert loom.counts["waits of the host"] == 2 * (len(SIGMAS) - 1)  # a step in flight
    assert loom.counts["attentions"] > 0
    backend.trim(recorded=True)
    denoise(handle, SIGMAS, **job(1))
    assert loom.counts["recorded"] == 4  # what was recorded had lost its memory
    monkeypatch.setitem(DEVICES, "cpu", TorchDevice())
    expected = fresh("cuda", device="cpu")
    for seed, steps in zip((1, 2), found, strict=True):
        assert_bitwise(steps, denoise(expected, SIGMAS, **job(seed)))


def test_a_clip_is_generated_on_any_device(loom, monkeypatch, generate, tiny):
    flags = "--pipeline one-stage --steps 2 --no-audio --dtype float32 --seed 1".split()
    run = generate("cuda", tiny("tiny-2.3", "official"), *flags, "--device", "loom")
    assert run.status == 0 and loom.counts["recorded"] == 2 and loom.counts["attentions"] > 0
    monkeypatch.setitem(DEVICES, "cpu", TorchDevice())
    expected = generate("cuda", tiny("tiny-2.3", "official"), *flags).latents
    assert run.latents.keys() == expected.keys()
    assert all(np.array_equal(run.latents[name], x) for name, x in expected.items())


@pytest.mark.parametrize("road", stream.ROADS)
def test_layers_are_copied_on_a_stream_of_their_own(loom, monkeypatch, road):
    monkeypatch.setattr(stream, "LEAST_BYTES", 1000)  # no table
    graph = loop_graph()
    backend = get_backend("cuda", "loom")
    source, pieces = ArraySource(random_params(graph)), frozenset(stream.pieces(graph))
    weights = backend.load([graph], source, streamed=pieces, road=road)
    handle = backend, backend.lower_loop(graph), weights
    found = denoise(handle, SIGMAS, **job(3))
    copies = len(pieces) * (len(SIGMAS) - 1)
    assert weights.ring._stream.done >= copies  # type: ignore[attr-defined]
    assert loom.counts["waits for a copy"] >= 2 * copies - 2 and loom.counts["recorded"] == 0
    whole = backend, handle[1], backend.load([graph], source)
    assert_bitwise(found, denoise(whole, SIGMAS, **job(3)))


def test_results_reach_the_host_behind_an_event(loom):
    backend = get_backend("cuda", "loom")
    program = backend.lower(double())
    calls = [(program, {}, one_number(x)) for x in (1, 2)]
    results = list(backend.each(calls, "y"))
    assert all(isinstance(x, Fetched) for x in results)
    assert [backend.to_host(x).item() for x in results] == [2, 4]
    assert loom.counts["waits of the host"] == 2


def test_a_device_is_named_or_refused(loom):
    assert get_backend("cuda", "loom").device() == DeviceInfo("loom", "A loom", 10**10, 10**10)
    with refused("runs on auto, cuda, cpu or loom, not on spindle"):
        get_backend("cuda", "spindle")
    loom.is_here = lambda: False
    with refused("no LOOM device was found; use --device cpu"):
        get_backend("cuda", "loom")


def test_only_the_files_of_devices_call_torch_cuda():
    root = Path(ltx2rt_cuda.__file__ or "").parent
    calls = re.compile(r'torch\.cuda|is_cuda|"nccl"|type == "cuda"')
    files = {str(p.relative_to(root)) for p in root.rglob("*.py") if calls.search(p.read_text())}
    assert "device/cuda.py" in files and {Path(name).parent.name for name in files} == {"device"}


def test_a_graph_of_any_device_has_the_ops_of_a_cpu(loom):
    """The fused ones, and no halves: those are for GPUs."""
    graph = loop_graph()
    loop = get_backend("cuda", "loom").lower_loop(graph)
    ops = [[node.op for node, _ in g.walk()] for g in (loop.graph, fuse(graph))]
    assert ops[0] == ops[1]


def test_a_gpu_beside_pytorch_for_cpus_is_named_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert unused(tmp_path) == ""
    (tmp_path / "nvidia0").touch()
    plain = torch.__version__.partition("+")[0]
    assert f"pip install --force-reinstall torch=={plain})" in unused(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "finds no driver" in unused(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # asked for
    assert unused(tmp_path) == ""
