"""Kernels equal their ops' definitions, are chosen for a reason, and compile without spilling."""

import json
import os
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import ltx2rt_kernels
import numpy as np
import pytest
import torch
from ltx2rt_cuda.lower import lower
from ltx2rt_cuda.ops import OPS as TORCH_OPS
from ltx2rt_cuda.ops import WITH_KERNEL
from ltx2rt_cuda.ops.arrays import channels_last
from ltx2rt_kernels.choose import folder, why_not

from ltx2rt.models import video_vae
from ltx2rt.passes.fuse import fuse
from ltx2rt.weights.presets import preset
from tests.kernels.kernel_cases import (
    BFLOAT16_ALONE,
    CASES,
    NEEDS_GPU,
    QUANTISED,
    Operands,
    array,
    defined,
)
from tests.parity import relative_l2

CHANNELS_LAST = torch.channels_last_3d
HERE = Path(__file__).parent
BFLOAT16 = 2**-8  # largest relative error of one rounding of a result, to nearest
FLOAT32 = 1e-6  # sums of a thousand numbers in another order
FLOATS = Operands("cpu", torch.float32)


def run_script(name: str, *arguments: str, **environment: str) -> dict:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    command = [sys.executable, HERE / name, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


RUNS = [
    ("interpreter", "float32"),
    pytest.param(("interpreter", "bfloat16"), marks=pytest.mark.long),
    ("cuda", "float32"),
    ("cuda", "bfloat16"),
]


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def measured(request):
    where, dtype = request.param
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    interpret = {"TRITON_INTERPRET": "1"} if where == "interpreter" else {}
    device = "cuda" if where == "cuda" else "cpu"
    return where, dtype, run_script("kernel_cases.py", device, dtype, **interpret)


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_its_definition(name, measured):
    where, dtype, errors = measured
    if where == "interpreter" and name in NEEDS_GPU:
        pytest.skip(f"no CUDA device, and {NEEDS_GPU[name]}")
    if dtype == "float32" and name in BFLOAT16_ALONE:
        pytest.skip("its kernel takes bfloat16")
    found = errors[name]
    if "quantise" in name or "unpack" in name:
        assert not any(found), "every bit of e4m3 numbers, scales, and decoded ones is defined"
    most = FLOAT32 if dtype == "float32" or name == "sum_squares" else BFLOAT16
    assert found and max(found) <= most, found


@pytest.mark.parametrize("name", QUANTISED)
def test_norm_quantises_its_results_as_quantise_rows_does(name, measured):
    found = measured[2][f"{name} quantised"]
    assert found and not any(found), found


def test_every_op_with_a_kernel_has_a_case():
    assert {build(FLOATS)[0] for build in CASES.values()} == set(WITH_KERNEL)


def test_every_kernel_runs_an_op():
    """One whose op is not `fused` into the table, or lacks a row of `choose`, would never run."""
    written = {path.parent.name for path in Path(ltx2rt_kernels.__file__).parent.glob("*/cuda.py")}
    assert written == set(map(folder, WITH_KERNEL))


@pytest.mark.parametrize("name", CASES)
def test_op_table_means_what_the_kernels_do(name):
    """The numpy definition and the plain torch ops, on the kernels' own cases."""
    op, operands, plan = CASES[name](FLOATS)
    found = TORCH_OPS[op](*operands, **plan)
    found = found if isinstance(found, tuple) else (found,)
    for a, b in zip(defined(op, [*map(array, operands)], plan), found, strict=True):
        assert relative_l2(b.float(), np.asarray(a, np.float32)) <= FLOAT32


def test_linear_gelu_hands_its_operands_over_in_their_order():
    """torch's function has GELU by erf on a CPU; what differs on a GPU is this alone."""
    op, (x, weight, bias), plan = CASES["linear_gelu"](FLOATS)
    found = getattr(import_module(f"ltx2rt_kernels.{folder(op)}.cuda"), op)(x, weight, bias, **plan)
    product = torch.einsum("bthd,nhd->btn", x, weight.unflatten(1, x.shape[2:])) + bias
    assert relative_l2(found.flatten(2), torch.nn.functional.gelu(product)) <= FLOAT32


def test_reason_why_not_is_told():
    op, operands, plan = CASES["norm_modulate"](FLOATS)
    assert why_not(op, *operands, **plan) == "the operands are on cpu, the kernel runs on cuda"
    operands[1].requires_grad_()
    assert why_not(op, *operands, **plan) == "a gradient is wanted, the kernel has none"
    with torch.no_grad():
        assert why_not(op, *operands, **plan) == "the operands are on cpu, the kernel runs on cuda"


@pytest.mark.parametrize("op,change,reason", [
    ("norm_modulate", lambda x: x.half(), "float16"),
    ("norm_modulate", lambda x: x[0], "2 axes"),
    ("norm_modulate", lambda x: x.mT.contiguous().mT, "strided"),
    ("norm_modulate", lambda x: x[..., :1].repeat(1, 1, 20000), "20000 numbers"),
    ("residual_norm_modulate", lambda x: x.double(), "float64"),
    ("qk_norm_rope", lambda x: x.transpose(2, 3), "strided"),
    ("qk_norm_rope", lambda x: x.repeat(1, 1, 2000, 1), "6000 heads"),
    ("head_gate", lambda x: x[0], "3 axes"),
    ("pixel_norm_silu channels first", lambda x: x.transpose(2, 3), "do not follow"),
    ("pixel_norm_silu channels first", lambda x: x[..., 1:], "do not follow"),
    ("snake_beta", lambda x: x[..., ::2], "strided"),
    ("quantise_rows", lambda x: x.half(), "float16"),
    ("quantise_rows", lambda x: x.mT, "strided"),
    ("quantise_rows", lambda x: x[0], "1 axes"),
    ("unpack int8", lambda x: x.mT, "strided"),
    ("unpack Q6_K", lambda x: x[:, 1:], "odd address"),
    ("quantise_rows", lambda x: x.repeat(1, 20), "20600 numbers"),
    ("neighbourhood_attention", lambda x: x.repeat(1, 1, 1, 1, 1, 7), "heads of 70"),
    ("neighbourhood_attention", lambda x: x.half(), "float16"),
    ("pixel_norm_silu channels first", lambda x: x.repeat(1, 200, 1, 1, 1), "2400 channels"),
])  # fmt: skip
def test_kernel_refuses_what_it_cannot_take(op, change, reason):
    name, (x, *others), plan = CASES[op](FLOATS)
    kernels = import_module(f"ltx2rt_kernels.{folder(name)}.cuda")
    assert kernels.why_not(x, *others, **plan) is None
    assert reason in kernels.why_not(change(x), *others, **plan)


def test_plain_ops_decode_what_has_no_kernel():
    _, (x, *_), _ = CASES["unpack Q4_0"](FLOATS)
    kernels = import_module("ltx2rt_kernels.unpack.cuda")
    for name in ("float8", "Q4_0 or float8"):
        reason = kernels.why_not(x, encoding=name, dtype="bfloat16")
        assert reason == f"no kernel decodes {name.rpartition(' or ')[2]}"


def test_a_block_of_the_decoder_keeps_channels_last():
    """A GPU's convolution leaves its layout to the next one: no copy between."""
    rng = torch.Generator().manual_seed(0)
    x = channels_last(torch.randn(1, 16, 3, 6, 8, generator=rng))
    weight = channels_last(torch.randn(16, 16, 3, 3, 3, generator=rng))
    y = x
    for op, plan in (
        ("pixel_norm_silu", {"dim": 1, "eps": 1e-8}),
        ("pad", {"widths": ((0, 0), (0, 0), (1, 1), (0, 0), (0, 0)), "mode": "edge"}),
        ("pad", {"widths": ((0, 0), (0, 0), (0, 0), (1, 1), (1, 1)), "mode": "zeros"}),
    ):
        y = TORCH_OPS[op](y, **plan)
        assert y.is_contiguous(memory_format=CHANNELS_LAST), op
    reflected = TORCH_OPS["pad"](x, widths=((0, 0), (0, 0), (0, 0), (1, 1), (1, 1)), mode="reflect")
    assert reflected.is_contiguous(memory_format=CHANNELS_LAST)
    plan = {"stride": (1, 1, 1), "dilation": (1, 1, 1)}
    found = TORCH_OPS["conv"](y, weight, **plan)
    plain = TORCH_OPS["conv"](y.contiguous(), weight.contiguous(), **plan)
    assert relative_l2(found, plain) <= FLOAT32
    for carried in (x, x.contiguous()):  # as the block before left it, or an upsampling
        total = TORCH_OPS["add"](carried, channels_last(found), (x.shape,) * 2)
        assert total.is_contiguous(memory_format=CHANNELS_LAST)
        assert torch.equal(total, x + found)


@pytest.mark.parametrize("generation", ["2.0", "2.3"])
def test_no_convolution_of_the_decoder_but_the_first_turns_its_input(generation, monkeypatch):
    """One sample, residuals, upsamplings; results lie as on a GPU."""
    turned = []

    def conv(x, weight, bias, padding=(0, 0, 0), **_):
        turned.append(not x.is_contiguous(memory_format=CHANNELS_LAST))
        sizes = zip(x.shape[2:], weight.shape[2:], padding, strict=True)
        size = [n + 2 * p - k + 1 for n, k, p in sizes]
        return torch.empty((1, len(weight), *size), memory_format=CHANNELS_LAST)

    def norm(x, **_):
        return torch.empty_like(x, memory_format=CHANNELS_LAST)

    for op, function in (("conv", conv), ("padded_conv", conv), ("pixel_norm_silu", norm)):
        monkeypatch.setitem(TORCH_OPS, op, function)
    config = preset(f"tiny-{generation}").config.video_vae
    graph = fuse(video_vae.trace_decoder(config, 1, 3, 2, 3, "float32"))
    program = lower(graph, torch.device("cpu"))
    zeros = ((n, torch.zeros(v.type.shape), count) for n, (v, count) in graph.all_params().items())
    weights = [[x] * count if "*" in name else x for name, x, count in zeros]
    with torch.inference_mode():
        program(*(torch.zeros(v.type.shape) for v in graph.inputs.values()), *weights)
    assert turned[0] and len(turned) > 10 and not any(turned[1:])


def test_compiled_graphs_hold_the_plain_ops():
    """torch.compile sees through the choice, without a break in the graph."""
    op, operands, plan = CASES["residual_norm_modulate"](FLOATS)
    run = partial(TORCH_OPS[op], **plan)
    function = torch.compile(run, backend="eager", fullgraph=True)
    for a, b in zip(function(*operands), TORCH_OPS[op](*operands, **plan), strict=True):
        assert relative_l2(a, b) <= FLOAT32


@pytest.mark.long
@pytest.mark.parametrize("launches", [
    pytest.param("(?!.*(2048|32 heads of 64|4 heads of 128))", id="one size of each"),
    pytest.param("", id="all", marks=pytest.mark.slow),
])  # fmt: skip
def test_kernels_compile_for_hopper_without_spills(launches, tmp_path):
    """As launched at full size: 128 registers for each of 512 threads are all 65536 of a processor."""
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    found = run_script("kernel_binaries.py", launches, **environment)
    for name, used in found.items():
        print(f"{name}: {used['registers']} registers, {used['spilled_bytes']} bytes spilled")
    assert {name.split()[0] for name in found} == set(WITH_KERNEL) - set(NEEDS_GPU)
    for name, used in found.items():
        assert used["spilled_bytes"] == 0 and used["registers"] <= 128, (name, used)
    # Of 4 results: 11 inputs each, 12 taps of both filters, 6 inputs at both ends, and the
    # channel's two numbers.
    assert found["snake_beta"]["loads"] <= 4 * 11 + 2 * 12 + 2 * 6 + 2
    others = "head_gate", "snake", "neighbourhood", "pixel", "unpack"
    narrow = [name for name in found if found[name]["narrow_loads"]]
    # rows of every mesh are read 16 bytes at a time
    assert [name for name in narrow if not name.startswith(others)] == []
    # 16 numbers of a row, and its scale
    assert found["unpack int8"]["loads"] == found["unpack stored float8"]["loads"] == 2
