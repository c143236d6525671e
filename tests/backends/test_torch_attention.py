"""Attention kernels are refused for a reason; torch's compute the same in our order."""

import re

import ltx2rt_cuda.device.attention
import pytest
import torch
from ltx2rt_cuda.device.attention import (
    LOAD_BYTES,
    aligned,
    gpu_attention,
    preference,
    preferred_attention,
    refuse,
    torch_attention,
    why_not_cudnn,
    why_not_flash3,
)

from ltx2rt.errors import InputError
from ltx2rt.graph.ops import OPS
from tests.parity import relative_l2


def operands(dtype=torch.float32, kv_heads=4, dim=16):
    generator = torch.Generator().manual_seed(torch.seed() % 2**63)
    shapes = (2, 7, 4, dim), (2, 9, kv_heads, dim), (2, 9, kv_heads, dim)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("run", [gpu_attention, preferred_attention, torch_attention])
def test_attention_is_the_op_tables(run, masked, kv_heads):
    given, mask = operands(kv_heads=kv_heads), torch.randn(2, 1, 7, 9)
    mask[..., ::4] = -1e30  # what the logarithm of a weight of 0 is
    arrays = [x.numpy() for x in (*given, *[mask] * masked)]
    expected = OPS["attention"].numpy(*arrays, scale=0.3, bias_view=mask.shape)
    found = run(*given, mask if masked else None, 0.3)
    assert relative_l2(found, expected) <= 1e-6  # float32, sums of nine


def test_preference_and_alignment_are_compiled_without_a_break():
    def run(q, k, v):
        return preferred_attention(aligned(q), aligned(k), aligned(v), None, 0.3)

    q, k, _ = operands()
    v = torch.randn(2, 9, 4 * 16 + 5)[..., 1:65].unflatten(2, (4, 16))
    assert torch.equal(torch.compile(run, backend="eager", fullgraph=True)(q, k, v), run(q, k, v))


def test_cudnn_comes_first_only_where_it_surely_has_a_plan():
    heads, mask = [torch.empty(1, 7, 2, dim) for dim in (64, 128, 256)], torch.zeros(1, 1, 7, 9)
    found = [preference(q, m) for m in (None, mask) for q in heads]
    assert [names[0] for names in found] == ["cudnn", "cudnn", "flash2"] * 2
    assert all(names[-3:] == ["flash2", "efficient", "math"] for names in found)
    assert why_not_cudnn(heads[2], None) == "heads of 256, all its releases have plans up to 128"


def test_operands_that_cudnn_refused_with_a_mask_go_to_the_next_kernel(monkeypatch):
    """It raises where it finds no plan; of a GPU that has no memory left the error is passed on."""
    q, k, v = operands()
    mask, asked = torch.randn(2, 1, 7, 9), []
    errors = [torch.OutOfMemoryError("no memory"), RuntimeError("no valid execution plan")]

    def attend(*given):
        asked.append(preference(q, mask)[0])
        if asked[-1] == "cudnn":
            raise errors.pop(0)
        return torch_attention(*given)

    monkeypatch.setattr(ltx2rt_cuda.device.attention, "refused_by_cudnn", set())
    monkeypatch.setattr(ltx2rt_cuda.device.attention, "torch_attention", attend)
    with pytest.raises(torch.OutOfMemoryError):
        preferred_attention(q, k, v, mask, 0.3)
    for _ in range(2):
        found = preferred_attention(q, k, v, mask, 0.3)
        assert torch.equal(found, torch_attention(q, k, v, mask, 0.3))
    assert asked == ["cudnn", "cudnn", "flash2", "flash2"]


def test_cudnn_of_wrong_results_is_not_asked(monkeypatch):
    """Those of CUDA 12's wheels."""
    q = torch.empty(1, 7, 2, 64)
    for version, first in ((91002, "flash2"), (91500, "flash2"), (92000, "cudnn"), (None, "cudnn")):
        monkeypatch.setattr(ltx2rt_cuda.device.attention, "CUDNN_HERE", version)
        assert preference(q, None)[0] == first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("row,start,copied", [
    (3 * 64, 0, False),  # whole
    (3 * 64, 2 * 64, False),  # a slice of a packed row of q, k, v
    (3 * 64 + 4, 2 * 64, True),  # and of a gate for each head
    (3 * 64, 2, True), (3 * 64 + 8, 8, False),
])  # fmt: skip
def test_only_operands_off_the_grid_of_a_load_are_copied(row, start, copied, dtype):
    # the same bytes in both dtypes
    row, start, size = (n * 2 // dtype.itemsize for n in (row, start, 64))
    x = torch.randn(2, 9, row).to(dtype)[..., start : start + size].unflatten(2, (4, -1))
    y = aligned(x)
    assert torch.equal(x, y) and (y is not x) == copied
    assert y.data_ptr() % LOAD_BYTES == 0
    assert all(n * y.element_size() % LOAD_BYTES == 0 for n in y.stride()[:-1])


def test_heads_that_no_copy_aligns_stay_as_they_are():
    x = torch.randn(2, 9, 4 * 6 + 1).to(torch.bfloat16)[..., 1:].unflatten(2, (4, 6))
    assert aligned(x) is x


@pytest.mark.parametrize("change,reason", [
    (lambda q, k, v: (q, k, v, torch.zeros(1, 1, 7, 9)), "takes no mask"),
    (lambda q, k, v: (q.float(), k, v, None), "torch.float32"),
    (lambda q, k, v: (q[..., :12], k, v, None), "heads of 12"),
    (lambda q, k, v: (q, k.mT.contiguous().mT, v, None), "strided"),
])  # fmt: skip
def test_flash3_refuses_what_it_cannot_take(change, reason):
    q, k, v = operands(torch.bfloat16)
    assert why_not_flash3(q, k, v, None) == "the operands are on cpu, the kernel runs on cuda"
    assert reason in why_not_flash3(*change(q, k, v))


def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False):
    """The signature of sageattention 1 and 2; twice the result, so that it is told apart."""
    assert tensor_layout == "NHD" and not is_causal and not return_lse
    return 2 * torch_attention(q, k, v, None, sm_scale)


def test_each_name_goes_to_its_kernel_and_what_that_refuses_elsewhere(monkeypatch):
    here, mask = operands(torch.bfloat16), torch.zeros(1, 1, 7, 9)
    monkeypatch.setattr(ltx2rt_cuda.device.attention, "_sage", lambda: sageattn)
    orders = [preference(here[0], None, by) for by in ("auto", "flash", "cudnn")]
    assert [names[0] for names in orders] == ["cudnn", "flash2", "cudnn"]
    assert all(len(names) == 4 for names in orders)
    expected = torch_attention(*here, None, 0.3)
    for by in ("auto", "flash", "cudnn", "torch", "sage"):  # sage refuses what is on a CPU
        assert torch.equal(gpu_attention(*here, None, 0.3, by), expected)
    refusals = ltx2rt_cuda.device.attention.why_not_installed
    on_gpu = {"the operands are on cpu, the kernel runs on cuda": None}
    monkeypatch.setattr(
        ltx2rt_cuda.device.attention, "why_not_installed",
        lambda *given: on_gpu.get(why := refusals(*given), why),
    )  # fmt: skip
    assert torch.equal(gpu_attention(*here, None, 0.3, "sage"), 2 * expected)
    masked = torch_attention(*here, mask.bfloat16(), 0.3)
    assert torch.equal(gpu_attention(*here, mask.bfloat16(), 0.3, "sage"), masked)
    wide = operands(torch.bfloat16, dim=256)
    alone = gpu_attention(*wide, None, 0.3, "torch")
    assert torch.equal(gpu_attention(*wide, None, 0.3, "sage"), alone)


@pytest.mark.parametrize("by,dtype,capability,reason", [
    ("flash", "float32", (9, 0), "it takes bfloat16, and this run computes in float32"),
    ("cudnn", "bfloat16", (7, 5), "it needs compute capability 8.0, this GPU has 7.5"),
    ("sage", "bfloat16", (8, 9), "sageattention does not load here"),
    ("cudnn", "bfloat16", (9, 0), "this PyTorch has no cuDNN"),
    ("auto", "float32", (6, 1), None), ("torch", "float32", (6, 1), None),
    ("flash", "bfloat16", (12, 0), None),
])  # fmt: skip
def test_a_kernel_that_cannot_run_is_refused_by_name(by, dtype, capability, reason, monkeypatch):
    monkeypatch.setattr(ltx2rt_cuda.device.attention, "CUDNN_HERE", None)
    if reason is None:
        return refuse(by, dtype, capability)
    with pytest.raises(InputError, match=f"--attention {by}: {re.escape(reason)}.*; leave it out"):
        refuse(by, dtype, capability)
