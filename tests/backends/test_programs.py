"""Programs of both backends: the denoise loop, what compiles, scan against unrolled, isolation."""

import functools
import json
import subprocess
import sys
import threading
from concurrent.futures import wait
from dataclasses import replace
from itertools import pairwise, zip_longest
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ltx2rt_tpu.program
import ml_dtypes
import numpy as np
import pytest
import torch
from ltx2rt_cuda.program import to_torch
from ltx2rt_tpu.ops import ON_TPU, OPS
from ltx2rt_tpu.ops.products import ONCE_ON_V6E, linear_once, modulate_once
from ltx2rt_tpu.program import LEVEL, ON_CPU, Assembled, compilations

from ltx2rt.backend import get_backend
from ltx2rt.graph import trace
from ltx2rt.graph.ir import Type
from tests import virtual
from tests.backends.loops import (
    BACKENDS,
    GUIDANCE,
    LAYERS,
    SIGMAS,
    assert_bitwise,
    denoise,
    double,
    fresh,
    job,
    loop_graph,
    one_number,
    run,
    shared,
    step_graph,
)
from tests.parity import ArraySource, random_params, relative_l2, run_graph


@pytest.fixture
def xla_compilations():
    """The number of XLA compilations so far, as a function."""
    seen = compilations()
    return lambda: len(seen)


@pytest.mark.parametrize("name", BACKENDS)
def test_denoise_equals_the_interpreter_to_the_last_step(name):
    work, graph = job(2), step_graph()
    params, state = random_params(graph), dict(work["state"])
    for outputs, pair in zip(denoise(shared(name), SIGMAS, **work), pairwise(SIGMAS), strict=True):
        inputs = work["constants"] | state | {"sigmas": np.array(pair)}
        expected = run_graph("numpy", graph, params, inputs)
        for key in expected:
            # Contract: 1e-3 on a trajectory; float32 rounding through guidance reaches 1e-5.
            assert relative_l2(outputs[key], expected[key]) <= 1e-4, key
        state = {key: expected[key] for key in state}
    assert relative_l2(outputs["video_latent"], work["state"]["video_latent"]) > 0.1


@pytest.mark.parametrize("name", BACKENDS)
def test_a_loop_stopped_by_its_reader_queues_one_more_step_and_leaves_no_trace(name, monkeypatch):
    handle = _, loop, _ = fresh(name)
    work, other, queued = job(24), job(25), []
    owner, attribute = (loop.body, "module") if name == "cuda" else (loop, "steps")
    step = getattr(owner, attribute)
    monkeypatch.setattr(owner, attribute, lambda *operands: queued.append(1) or step(*operands))
    sigmas = np.linspace(1, 0, 9, dtype=np.float32)
    for stop in (1, 3):
        queued.clear()
        steps = run(handle, sigmas, **other)
        for _ in range(stop):
            next(steps)
        assert len(queued) <= stop + 1
        steps.close()
        assert len(queued) <= stop + 1
    queued.clear()
    assert_bitwise(denoise(handle, sigmas, **work), denoise(shared(name), sigmas, **work))
    assert len(queued) == 8


@pytest.mark.parametrize("name", ["cuda", pytest.param("tpu", marks=pytest.mark.long)])
def test_what_is_built_is_built_once_and_again_when_it_was_released(name):
    work = job(26)
    expected = denoise(shared(name), SIGMAS[:3], **work)
    handle = backend, loop, weights = fresh(name)
    first, built = denoise(handle, SIGMAS, **work), backend.num_built
    assert built >= 2
    assert_bitwise(denoise(handle, SIGMAS[:3], **work), expected)
    assert backend.num_built == built
    live = num_executables()
    loop.release()
    assert name == "cuda" or num_executables() == live - 2
    backend.trim()
    assert_bitwise(denoise(handle, SIGMAS, **work), first)
    assert backend.num_built == built + 2, "what runs before the loop, and its step"
    denoise((backend, backend.lower_loop(loop.graph), weights), SIGMAS[:2], **work)
    assert backend.num_built == built + 4

    program, before = backend.lower(double()), built + 4
    for release, expected in ((False, 1), (False, 1), (True, 2)):
        if release:
            program.release()
        assert backend.to_host(program({}, one_number(1))["y"]) == [2]
        assert backend.num_built == before + expected


def num_executables() -> int:
    return len(jax.devices("cpu")[0].client.live_executables())


def test_loop_over_all_steps_equals_the_loop_step_by_step():
    backend, loop, weights = shared("tpu")
    work, seen = job(3), []
    steps = loop.steps
    loop.steps = lambda *operands: seen.append(operands) or steps(*operands)
    last = denoise((backend, loop, weights), SIGMAS, **work)[-1]
    loop.steps = steps
    *operands, first, _ = seen[0]
    whole = steps(*operands, first, np.int32(len(SIGMAS) - 1))
    assert_bitwise([{k: backend.to_host(v) for k, v in whole.items()}], [last])


def test_guidance_sigmas_and_number_of_steps_compile_nothing_in_jax(xla_compilations):
    handle = fresh("tpu")
    _, loop, _ = handle
    work, before = job(4), xla_compilations()
    denoise(handle, SIGMAS, **work)
    assert xla_compilations() == before + 2, "what is hoisted, and the loop"
    before = xla_compilations()
    for seed, num_steps in ((5, 2), (6, 7), (7, 8)):
        other = job(seed, GUIDANCE * np.float32(0.9 + 0.1 * seed))
        sigmas = np.linspace(0.95, 0.1, num_steps + 1, dtype=np.float32)
        denoise(handle, sigmas, **other)
    assert xla_compilations() == before
    assert loop.steps._cache_size() == 1 and loop.before._cache_size() == 1


@pytest.fixture
def ahead():
    """A backend; a loop, and an assembled and a plain program without weights, with their inputs."""
    backend, loop, weights = fresh("tpu")
    assembled = functools.partial(Assembled, place=backend.place)
    calls = {
        "loop": (loop, lambda: denoise((backend, loop, weights), SIGMAS, **job(4))),
        "plain": (program := backend.lower(double()), lambda: program({}, one_number(1))),
        "assembled": (parts := assembled(double()), lambda: parts({}, one_number(1))),
    }
    yield backend, calls
    backend.compilers.shutdown()


@pytest.mark.parametrize("kind,count", [("loop", 2), ("plain", 1), ("assembled", 1)])
def test_a_program_is_compiled_ahead_or_by_its_call(
    ahead, xla_compilations, monkeypatch, kind, count
):
    """A failure ahead is that of the call, and the next one tries again; a call compiles what still
    waits for a thread."""
    backend, calls = ahead
    program, call = calls[kind]
    with monkeypatch.context() as patch:
        patch.setattr(program, "compile_now", lambda each: 1 / 0)
        (started,) = backend.compile_ahead([(program, False)])
        wait([started])
        with pytest.raises(ZeroDivisionError):
            call()
    before, free = xla_compilations(), threading.Event()
    for _ in range(2):
        (started,) = backend.compile_ahead([(program, False)])
        started.result()
        assert xla_compilations() == before + count
        call()
    assert xla_compilations() == before + count
    program.release()
    for _ in range(backend.compilers._max_workers):
        backend.compilers.submit(free.wait)
    try:
        (started,) = backend.compile_ahead([(program, False)])
        call()
        assert started.cancelled()
    finally:
        free.set()
    (again,) = backend.compile_ahead([(program, False)])
    again.result()


@pytest.mark.long
def test_compile_option_compiles_the_repeated_block_once(monkeypatch):
    """Three layers, several steps, other scales and weights: one graph."""
    compiled, runs = [], []

    def counting(module, _):
        compiled.append(module)
        return lambda *args: runs.append(1) or module(*args)

    torch._dynamo.reset()
    compile = functools.partial(torch.compile, backend=counting, fullgraph=True)
    monkeypatch.setattr(torch, "compile", compile)
    handle = fresh("cuda", compile=True)
    monkeypatch.undo()
    for seed in (10, 11):
        work = job(seed, GUIDANCE * np.float32(0.1 * seed))
        steps = denoise(handle, SIGMAS[:3], **work)
        assert_bitwise(steps, denoise(shared("cuda"), SIGMAS[:3], **work))
    backend, loop, _ = handle
    other = backend.load([loop.graph], ArraySource(random_params(loop.graph, seed=1)))
    denoise((backend, loop, other), SIGMAS[:2], **job(12))
    assert len(compiled) == len(loop.body.graph.repeats) == 1
    assert len(runs) == LAYERS * 5


@pytest.mark.slow
# Torch's own import of inductor.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_inductor_runs_a_compiled_block():
    torch._dynamo.reset()
    handles = fresh("cuda", compile=True), shared("cuda")
    found, expected = (denoise(handle, SIGMAS[:2], **job(12))[0] for handle in handles)
    for key, value in expected.items():
        assert relative_l2(found[key], value) <= 1e-5, key  # fused otherwise


KNOWN = {LEVEL: 1, "xla_llvm_disable_expensive_passes": True}  # to every XLA


@pytest.mark.parametrize("known,flags,left", [
    (KNOWN, "", KNOWN),
    (KNOWN, "--xla_backend_optimization_level=0", {"xla_llvm_disable_expensive_passes": True}),
    (KNOWN | {"xla_cpu_of_another_version": True}, "", KNOWN),
])  # fmt: skip
def test_a_cpu_takes_options_that_are_known_and_not_given(monkeypatch, known, flags, left):
    program = ltx2rt_tpu.program
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(program, "ON_CPU", known)
    monkeypatch.setattr(program, "_options_on_cpu", program._options_on_cpu.__wrapped__)
    assert program.compiler_options(products(10**6), here()) == left


def here() -> jax.sharding.SingleDeviceSharding:
    return jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])


def products(rows: int):
    """2e6 FLOP for each row."""

    def model(o):
        return {"y": o.linear(o.input("x", rows=rows, D=1000), "w", {"D": 1000})}

    return trace("products", model, "float32")


def test_little_work_is_compiled_quickly(monkeypatch):
    options = ltx2rt_tpu.program.compiler_options
    monkeypatch.setattr(ltx2rt_tpu.program, "_options_on_cpu", lambda: ON_CPU)
    assert [options(products(rows), here())[LEVEL] for rows in (10**4, 10**5)] == [0, 1]


@pytest.mark.parametrize("name", BACKENDS)
def test_unrolled_layers_agree_with_the_loop_over_layers(name):
    work = job(13)
    unrolled = denoise(fresh(name, layers="unrolled"), SIGMAS[:2], **work)
    for key, value in denoise(shared(name), SIGMAS[:2], **work)[0].items():
        # XLA fuses across layers once they are written out.
        assert relative_l2(unrolled[0][key], value) <= 1e-5, key


@pytest.mark.parametrize("name", BACKENDS)
def test_two_jobs_in_one_process_equal_each_alone_bitwise(name):
    """Interleaved on one program with other weights and lengths, then each by itself."""
    backend, loop, weights = shared(name)
    source = ArraySource(random_params(loop.graph, seed=1))
    first, second = job(14), job(15, GUIDANCE * np.float32(1.3))
    other = backend.load([loop.graph], source)
    runs = [run((backend, loop, weights), SIGMAS, **first)]
    runs.append(run((backend, loop, other), SIGMAS[1:], **second))
    together = [[], []]
    for pair in zip_longest(*runs):
        for outputs, found in zip(pair, together, strict=True):
            if outputs is not None:
                found.append({key: backend.to_host(x) for key, x in outputs.items()})
    own, alone, weights = fresh(name)
    assert_bitwise(together[0], denoise((own, alone, weights), SIGMAS, **first))
    weights = own.load([alone.graph], source)
    assert_bitwise(together[1], denoise((own, alone, weights), SIGMAS[1:], **second))


@pytest.mark.parametrize("kind", ["TPU v6 lite", "TPU7x", "cpu"])
def test_a_tpu_runs_its_own_form_of_an_op(kind):
    """In every kind of program; decided by the devices for which it is lowered."""
    platform = kind[:3].lower()
    place = SimpleNamespace(device_set=[SimpleNamespace(platform=platform, device_kind=kind)])
    graph = loop_graph()
    programs = [ltx2rt_tpu.program.Loop(graph, place, False)]
    programs += [ltx2rt_tpu.program.Program(graph, place, False), Assembled(graph, place)]
    for program in programs:
        for name, function in ON_TPU.items():
            assert program.ops[name] is (function if platform == "tpu" else OPS[name]), name
    ops = programs[0].ops
    assert (ops | ONCE_ON_V6E == ops) == (kind == "TPU v6 lite")


@pytest.mark.parametrize("tokens,barriers", [(4096, 1), (4095, 0), (2**16, 1), (2**16 + 1, 0)])
def test_v6e_computes_what_a_large_product_reads_once(tokens, barriers):
    """Bit for bit the same, and with the same slope."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, tokens, 2, 64)), jnp.bfloat16)
    weight, bias = (jnp.asarray(rng.normal(size=n), jnp.bfloat16) for n in ((8, 128), (8,)))
    plan = {"num_contracted": 2, "out_shape": (8,)}
    ours, plain = (functools.partial(f, **plan) for f in (linear_once, OPS["linear"]))
    found = str(jax.make_jaxpr(ours)(x, weight, bias))
    assert found.count("optimization_barrier") == barriers
    found, expected = (jax.vjp(f, x, weight, bias) for f in (ours, plain))
    assert np.array_equal(found[0], expected[0])
    for slope, other in zip(found[1](found[0]), expected[1](expected[0]), strict=True):
        assert np.array_equal(slope, other)


@pytest.mark.parametrize("tokens,barriers", [(2**16, 0), (2**16 + 1, 1)])
def test_v6e_modulates_a_large_norm_once(tokens, barriers):
    """Bit for bit the same."""
    rng = np.random.default_rng(0)
    x, *rows = (jnp.asarray(rng.normal(size=(n, 128)), jnp.bfloat16) for n in (tokens, 1, 1))
    ours, plain = (
        functools.partial(f, views=[(1, 128)] * 2) for f in (modulate_once, OPS["modulate"])
    )
    assert str(jax.make_jaxpr(ours)(x, *rows)).count("optimization_barrier") == barriers
    assert np.array_equal(ours(x, *rows), plain(x, *rows))


def on_devices(*words) -> dict:
    script = Path(__file__).with_name("halves_on_devices.py")
    return json.loads(virtual.on_devices(4, script, *words).splitlines()[-1])


def test_jax_exchanges_by_permutations_what_it_exchanges_at_once_bit_for_bit():
    found = on_devices()
    assert len(found) == 8 and all(found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("branches,after", [(2, 4), (1, 2)])
def test_jax_denoises_in_halves_as_it_does_whole(tiny, branches, after):
    """On the CPU bit for bit. Of both halves: sums of a pair become permutations, exchanges stay;
    the tokens of one branch meet for them. With one head on a device there are no groups."""
    found = on_devices(tiny("tiny-2.0", "official"), branches)
    assert max(found["distances"].values()) <= 1e-6, found["distances"]
    assert found["before"] == {"psum": 11, "all_to_all": 2}
    assert found["after"]["all_to_all"] == after and found["after"]["ppermute"] > 14


@pytest.mark.parametrize("name", BACKENDS)
def test_calls_stopped_by_their_reader_leave_one_under_way(name):
    backend, taken = get_backend(name, "cpu"), []
    program = backend.lower(double())
    for stop in (1, 3):
        taken.clear()
        inputs = (one_number(taken.append(x) or x) for x in range(10))
        results = backend.each(((program, {}, one) for one in inputs), "y")
        found = [float(backend.to_host(next(results))[0]) for _ in range(stop)]
        assert found == [2 * x for x in range(stop)]
        results.close()
        assert len(taken) == stop + 1


def test_a_part_of_an_array_is_cut_only_where_it_is_asked_for():
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    cut, in_place = (to_torch(whole[:, 1:4], order) for order in ("C", "K"))
    assert cut.is_contiguous() and not np.shares_memory(cut.numpy(), whole)
    assert np.shares_memory(in_place.numpy(), whole) and torch.equal(cut, in_place)


@pytest.mark.parametrize("name", BACKENDS)
def test_loading_shares_no_memory_with_its_source(name):
    """A source may be a file map that is closed, or an array that its owner changes."""

    def model(o):
        return {"y": o.mul(o.input("x", D=4096), o.param("gain.weight", D=4096))}

    graph, gain = trace("scale", model, "float32"), np.ones(4096, np.float32)
    backend = get_backend(name, "cpu")
    weights = backend.load([graph], ArraySource({"gain.weight": gain}))
    gain[:] = 7
    y = backend.to_host(backend.lower(graph)(weights, {"x": np.ones(4096, np.float32)})["y"])
    assert np.array_equal(y, np.ones(4096))


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_large_weight_is_copied_whole_in_parts(name, dtype, stored):
    rows, width = 1031, 1024  # more than 1 MB either way; an odd number of rows

    def model(o):
        x = o.cast(o.input("x", "float32", B=1, D=width), dtype=o.dtype)
        return {"y": o.linear(x, "w", {"ff": rows}, bias=False)}

    weight = np.random.default_rng(0).standard_normal((rows, width), np.float32).astype(stored)
    graph, backend = trace("large", model, dtype), get_backend(name, "cpu")
    loaded = backend.load([graph], ArraySource({"w.weight": weight}))["w.weight"]
    expected = weight.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    np.testing.assert_array_equal(backend.to_host(loaded), expected.astype(np.float32))


@pytest.mark.parametrize("name", BACKENDS)
def test_misshapen_input_is_refused_by_name(name):
    _, loop, weights = shared(name)
    work = job(16)
    inputs = work["constants"] | work["state"] | {"sigmas": SIGMAS[:3]}
    said = r"denoise: input sigmas has shape \(3,\), expected f32\[steps=8, ends=2\]"
    with pytest.raises(ValueError, match=said):
        next(loop(weights, inputs, 2))


def test_only_whole_stacked_matrices_of_a_v7x_lie_in_other_tiles():
    """The compiler fails on less than sixteen rows of bfloat16."""
    from jax.sharding import PartitionSpec as P
    from ltx2rt_tpu.weights import weight_layout

    matrix, table = (Type(("out", "in"), (n, 256), "bfloat16") for n in (64, 6))
    norm = Type(("in",), (64,), "bfloat16")
    assert weight_layout("blocks.*.to_q.weight", matrix, P(), "TPU7x").tiling == ((16, 128), (2, 1))
    assert weight_layout("blocks.*.to_q.weight", matrix, P(), "TPU v6 lite") is None
    for name, type, spec in (
        ("blocks.*.to_q.weight", matrix, P(None, "tensor")),
        ("proj_in.weight", matrix, P()),
        ("blocks.*.scale_shift_table", table, P()),
        ("blocks.*.norm.weight", norm, P()),
        ("blocks.*.to_q.weight", replace(matrix, dtype="float32"), P()),
    ):
        assert weight_layout(name, type, spec, "TPU7x") is None


@pytest.mark.long
def test_the_backend_starts_without_torchs_compiler_which_leaves_neighbourhoods_as_they_are():
    """Importing it takes as long as importing all else of torch. What is left out of a graph parts
    it into two."""
    code = """
import sys, torch
from ltx2rt_cuda.backend import CudaBackend
from ltx2rt_cuda.neighbourhood import neighbourhood_attention

def attend(x):
    return neighbourhood_attention(x * 2, x, x, (3, 3, 3), (0, 0, 0), 0.25) + 1

CudaBackend("cpu")
assert "torch._dynamo" not in sys.modules
x = torch.randn(1, 3, 4, 5, 2, 8)
assert torch.equal(torch.compile(attend, backend="eager")(x), attend(x))
assert sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"] == 2
"""
    subprocess.run([sys.executable, "-c", code], check=True)
