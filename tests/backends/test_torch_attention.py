"""Attention kernels are refused for a reason, and torch's ones compute the same in our order of preference."""

import pytest
import torch
from ltx2rt_cuda.attention import KERNELS, attention, preferred_attention, torch_attention, why_not, why_not_flash3

from ltx2rt.graph.ops import OPS
from ltx2rt.testing import relative_l2


def operands(dtype=torch.float32, kv_heads=4, dim=16):
    generator = torch.Generator().manual_seed(torch.seed() % 2**63)
    shapes = (2, 7, 4, dim), (2, 9, kv_heads, dim), (2, 9, kv_heads, dim)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("run", [attention, preferred_attention, torch_attention])
def test_attention_is_the_op_tables(run, masked, kv_heads):
    q, k, v = operands(kv_heads=kv_heads)
    mask = torch.randn(2, 1, 7, 9) if masked else None
    bias = [] if mask is None else [mask.numpy()]
    expected = OPS["attention"].numpy(*(x.numpy() for x in (q, k, v)), *bias, scale=0.3, bias_view=(2, 1, 7, 9))
    assert relative_l2(run(q, k, v, mask, 0.3), expected) <= 1e-6  # float32, sums of nine


def test_preference_is_compiled_without_a_break():
    q, k, v = operands()
    compiled = torch.compile(preferred_attention, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, None, 0.3), preferred_attention(q, k, v, None, 0.3))


@pytest.mark.parametrize(
    "change,reason",
    [
        (lambda q, k, v: (q, k, v, torch.zeros(1, 1, 7, 9)), "takes no mask"),
        (lambda q, k, v: (q.float(), k, v, None), "torch.float32"),
        (lambda q, k, v: (q[..., :12], k, v, None), "heads of 12"),
        (lambda q, k, v: (q, k.mT.contiguous().mT, v, None), "strided"),
    ],
)
def test_flash3_refuses_what_it_cannot_take(change, reason):
    q, k, v = operands(torch.bfloat16)
    assert why_not_flash3(q, k, v, None) is None
    assert reason in why_not_flash3(*change(q, k, v))


def test_on_a_cpu_every_kernel_but_the_plain_one_has_a_reason_why_not():
    q, k, v = operands(torch.bfloat16)
    reasons = {name: why_not(name, q, k, v, None) for name in KERNELS}
    assert [name for name, reason in reasons.items() if reason is None] == ["math"]
    assert reasons["flash3"] == "the operands are on cpu, the kernel runs on cuda"
