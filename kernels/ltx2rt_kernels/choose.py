"""Which kernel runs an op of the table, and why not. A kernel's module has `why_not(*operands,
**plan)`, the reason why it cannot take these operands (None if it can), and a function of the op's
name that runs it. Both get the arguments of the op's function in a lowering.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

FOLDERS = {  # ops with a kernel in a folder of another name
    "modulate": "norm_modulate",
    "norm_scale": "norm_modulate",
    "gated_residual": "residual_norm_modulate",
    "sum_squares": "qk_norm_rope",
    "qk_scale_rope": "qk_norm_rope",
    "qk_norm": "qk_norm_rope",
    "qk_scale": "qk_norm_rope",
    "head_gate_rows": "head_gate",
}


def folder(op: str) -> str:
    return FOLDERS.get(op, op)


@cache
def _module(op: str) -> Any:
    return import_module(f"ltx2rt_kernels.{folder(op)}.cuda")


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def why_not(op: str, *operands: Any, **plan: Any) -> str | None:
    """Why plain ops run this op on these operands; None if its kernel does."""
    import torch

    if torch.compiler.is_compiling():
        return "torch.compile fuses the plain ops itself"
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        return "a gradient is wanted, the kernel has none"
    if operands[0].device.type != "cuda":
        return f"the operands are on {operands[0].device.type}, the kernel runs on cuda"
    if not _has_triton():
        return "triton is not installed"
    return _module(op).why_not(*operands, **plan)


def kernel(op: str) -> Callable[..., Any]:
    return getattr(_module(op), op)
