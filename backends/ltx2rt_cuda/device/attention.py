"""Which attention kernel runs, and why not the others.

On a GPU FlashAttention-3, if it is installed and takes the operands; else torch's own: cuDNN's where
it surely has a plan, then FlashAttention-2, then those that take any operands. On a CPU, torch's
choice. A run may ask for one of them, or for SageAttention; operands that this one does not take go
where they would go unasked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ltx2rt.errors import InputError
from ltx2rt_cuda.collectives import differentiated

TORCH = {  # in order of preference
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# torch itself prefers none before it (check_prefer_cudnn_attention in its sdp_utils.cpp)
CUDNN = 91501
CUDNN_HERE = torch.backends.cudnn.version()  # torch.compile breaks a graph that asks for it
# that the fused kernels fetch at once; a TMA descriptor takes no other strides either
LOAD_BYTES = 16
# the largest heads that the installed kernels take
FLASH_HEAD, SAGE_HEAD = 256, 128


@cache
def _flash3() -> Any:
    return import_module("flash_attn_interface").flash_attn_func


@cache
def _flash3_is_installed() -> bool:
    return find_spec("flash_attn_interface") is not None


@cache
def _sage() -> Any:
    return import_module("sageattention").sageattn


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def why_not_installed(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, most: int
) -> str | None:
    """Why a kernel that is installed beside torch cannot take q, k, v (B, tokens, heads, head_dim)
    and a mask, or None. most: the largest head that it takes."""
    if mask is not None:
        return "it takes no mask"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"the operands are {q.dtype}, it takes bfloat16 and float16"
    if q.shape[3] > most or q.shape[3] % 8:
        return f"heads of {q.shape[3]}, it takes multiples of 8 up to {most}"
    if any(x.stride(3) != 1 for x in (q, k, v)):
        return "an operand's last axis is strided"
    if torch.compiler.is_compiling():
        return "torch.compile does not see into it"
    if q.device.type != "cuda":
        return f"the operands are on {q.device.type}, the kernel runs on cuda"
    return None


def why_not_flash3(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    """Why FlashAttention-3 cannot take the operands, or None."""
    if reason := why_not_installed(q, k, v, mask, FLASH_HEAD):
        return reason
    if not _flash3_is_installed():
        return "flash_attn_interface is not installed"
    if (capability := _capability(q.device))[0] != 9:
        return f"it is for Hopper, compute capability 9, this device has {capability[0]}.{capability[1]}"
    return None


refused_by_cudnn: set[tuple] = set()  # operands with a mask for which it found no plan


def why_not_cudnn(q: Tensor, mask: Tensor | None) -> str | None:
    """Why cuDNN cannot take q and a mask, as far as torch does not ask; None if it can."""
    if mask is not None and (
        torch.compiler.is_compiling() or _operands(q, mask) in refused_by_cudnn
    ):
        return "it has no plan for this mask, or none was tried"
    if q.shape[3] > 128:
        return f"heads of {q.shape[3]}, all its releases have plans up to 128"
    if CUDNN_HERE is not None and CUDNN_HERE < CUDNN:
        return f"it is cuDNN {CUDNN_HERE}, sequences that are no multiples of 128 want {CUDNN}"
    return None


def preference(q: Tensor, mask: Tensor | None, by: str = "auto") -> list[str]:
    """Names of TORCH, in the order of preference for these operands."""
    names = [name for name in TORCH if name != "cudnn" or why_not_cudnn(q, mask) is None]
    return sorted(names, key="flash2".__ne__) if by == "flash" else names


def refuse(by: str, dtype: str, capability: tuple[int, int]) -> None:
    """Raises InputError if the kernel `by` takes no operands of this dtype, or none on a GPU of this
    compute capability."""
    reason = None
    if by in ("auto", "torch"):
        return
    if dtype not in ("bfloat16", "float16"):
        reason = f"it takes bfloat16, and this run computes in {dtype}"
    elif capability < (8, 0):
        reason = f"it needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    elif by == "cudnn":
        head = torch.empty(1, 1, 1, SAGE_HEAD)
        reason = why_not_cudnn(head, None) if CUDNN_HERE else "this PyTorch has no cuDNN"
    elif by == "sage":
        try:
            _sage()
        except (ImportError, OSError) as error:  # built for another release of torch
            reason = f"sageattention does not load here ({error})"
    if reason:
        raise InputError(f"--attention {by}: {reason}; leave it out")


def aligned(x: Tensor) -> Tensor:
    """x, or a copy if it begins, or an axis but the last steps, at no multiple of LOAD_BYTES.

    Heads that are no multiple themselves stay as they are, no copy helps them; compiled operands
    Inductor aligns.
    """
    if torch.compiler.is_compiling() or x.shape[-1] * x.element_size() % LOAD_BYTES:
        return x
    starts = (x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1]))
    off = any(n % LOAD_BYTES for n in starts)
    return x.clone(memory_format=torch.contiguous_format) if off else x


def torch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(
        q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.transpose(1, 2)


def preferred_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, by: str = "auto"
) -> Tensor:
    """torch_attention by the first of `preference` that takes the operands; by torch's own choice
    if `by` says so."""
    if mask is not None:  # the fused kernels that take masks take no shared keys
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    if by == "torch":
        return torch_attention(q, k, v, mask, scale)
    names = preference(q, mask, by)
    with sdpa_kernel([TORCH[name] for name in names], set_priority=True):
        try:
            return torch_attention(q, k, v, mask, scale)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # cuDNN's plans for a mask differ from release to release
            if mask is None or names[0] != "cudnn":
                raise
    refused_by_cudnn.add(_operands(q, mask))
    return preferred_attention(q, k, v, mask, scale, by)


def _operands(q: Tensor, mask: Tensor) -> tuple:
    return q.shape, q.dtype, mask.shape, mask.stride()


def gpu_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, by: str = "auto"
) -> Tensor:
    """Run the kernel `by` (`session.options.ATTENTION`) if it takes the operands; else, and unasked,
    FlashAttention-3 if that does; else the first of `preference`."""
    q, k, v = aligned(q), aligned(k), aligned(v)
    if by == "sage" and why_not_installed(q, k, v, mask, SAGE_HEAD) is None:
        return _sage()(q, k, v, tensor_layout="NHD", sm_scale=scale)
    if by not in ("cudnn", "torch") and why_not_flash3(q, k, v, mask) is None:
        found = _flash3()(q, k, v, softmax_scale=scale)
        # its first releases return the log-sums too
        return found[0] if isinstance(found, tuple) else found
    return preferred_attention(q, k, v, mask, scale, by)


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]


def cpu_part(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, attn_mask=mask, scale=scale)


def gpu_part(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Run FlashAttention-2 if nothing is masked: it splits the keys of a head, queries are few. Else
    the memory-efficient kernel."""
    q, k, v = aligned(q), aligned(k), aligned(v)
    fits = q.shape[3] % 8 == 0 and q.shape[3] <= 256
    if mask is not None or q.dtype not in (torch.bfloat16, torch.float16) or not fits:
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        y, log_sum, *_ = kernel(q, k, v, mask, compute_log_sumexp=True, scale=scale)
    else:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        y, log_sum, *_ = kernel(q, k, v, scale=scale)
    return y, log_sum


def attention_part(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """`attention` and the logarithm of its denominator, f32 (B, heads, tokens). kernel: one of
    torch's own, the only ones that return the logarithm; operands (B, heads, tokens, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if differentiated((q, k, v)):  # the kernels have no derivative of the logarithm
        scores = (q @ k.mT).float() * scale
        scores = scores if mask is None else scores + mask
        log_sum = scores.logsumexp(-1)
        return ((scores - log_sum.unsqueeze(-1)).exp().to(v.dtype) @ v).transpose(1, 2), log_sum
    # Copied, since a device's part of it begins anywhere, and the kernel reads 16 bytes at once.
    mask = None if mask is None else mask.to(q.dtype, copy=True).expand(*q.shape[:3], k.shape[2])
    y, log_sum = kernel(q, k, v, mask, scale)
    return y.transpose(1, 2), log_sum[..., : q.shape[2]].float()  # some releases pad the logarithms
