"""The host's memory: weights in it without a GPU, none of which is lost; what a CPU reuses."""

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from ltx2rt_cuda import host

from ltx2rt.backend import get_backend


@pytest.fixture
def weights():
    rng = torch.Generator().manual_seed(0)
    kernel = torch.randn(5, 4, 3, 3, 3, generator=rng).to(memory_format=torch.channels_last_3d)
    return {
        "matrix": torch.randn(33, 17, generator=rng).to(torch.bfloat16),
        "kernel": kernel,
        "float8": torch.randn(8, 16, generator=rng).to(torch.float8_e4m3fn),
        "turned": torch.randn(6, 10, generator=rng).t(),
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 3),
        "large": torch.randn(300, 100, generator=rng),
    }


def same(found, weights):
    assert list(found) == list(weights)
    for name, x in weights.items():
        assert found[name].dtype == x.dtype and found[name].stride() == x.stride(), name
        assert torch.equal(found[name].float(), x.float()), name


def test_what_is_parked_comes_back_as_it_was(weights, monkeypatch):
    monkeypatch.setattr(host, "SLAB", 2**14)
    kept = host.parked(weights)
    same(kept, weights)
    assert all(x.data_ptr() % 4 == 0 for x in kept.values())
    storages = (x.untyped_storage() for x in kept.values() if x.numel())
    slabs = {storage.data_ptr(): storage.nbytes() for storage in storages}
    # one slab, and one of its own for what is larger
    assert sorted(slabs.values()) == [2**14, 300 * 100 * 4]
    expected = {name: x.clone() for name, x in weights.items()}
    for x in weights.values():
        x.zero_()
    same(host.unparked(kept, {}, torch.device("cpu")), expected)


def test_it_takes_the_place_of_what_lies_alike(weights):
    kept = host.parked(weights)
    left = {name: torch.zeros_like(x) for name, x in weights.items()}
    left["matrix"] = torch.zeros(34, 17, dtype=torch.bfloat16)
    left["another"] = torch.zeros(1)
    places = {name: x.data_ptr() for name, x in left.items()}
    found = host.unparked(kept, left, torch.device("cpu"))
    same(found, weights)
    assert not left
    moved = {name for name, x in found.items() if x.data_ptr() != places[name]}
    assert moved == {"matrix"}


def test_jax_keeps_arrays_in_pinned_memory_and_brings_them_back():
    import jax.numpy as jnp

    backend = get_backend("tpu", "cpu")
    weights = {"matrix": jnp.arange(12.0).reshape(3, 4), "half": jnp.ones(5, jnp.bfloat16)}
    kept, left = backend.park(weights), dict(weights)
    assert {x.sharding.memory_kind for x, _ in kept.values()} == {"pinned_host"}
    found = backend.unpark(kept, left)
    assert not left and list(found) == list(weights)
    for name, x in weights.items():
        assert found[name].sharding == x.sharding and found[name].dtype == x.dtype
        np.testing.assert_array_equal(backend.to_host(found[name]), backend.to_host(x))


ALONE = """
import resource
from pathlib import Path
import torch
from ltx2rt.backend import get_backend

size, page = 2**24, resource.getpagesize()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

backend = get_backend("cuda", "cpu")
first, again, kept = faults(), min(faults(), faults(), faults()), resident()
backend.device()
print(first * page / size / 4, again * page / size / 4, (kept - resident()) * page / size / 4)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library is not glibc")
@pytest.mark.parametrize(
    "decided", [{}, pytest.param({"MALLOC_TRIM_THRESHOLD_": "131072"}, marks=pytest.mark.long)]
)
def test_a_cpu_reuses_what_it_frees_until_somebody_asks_what_is_free(decided):
    """In a process of its own: what others have left in the heap decides where a tensor lies."""
    result = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, env=os.environ | decided
    )
    first, again, given_back = map(float, result.stdout.split())
    assert first > 0.9
    assert (again > 0.9 and given_back < 0.1) if decided else (again < 0.1 and given_back > 0.9)
