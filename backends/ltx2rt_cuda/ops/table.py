"""The table of ops as torch functions of tensors and the op's arguments, and how they enter it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from ltx2rt_kernels.choose import kernel, why_not
from torch import Tensor

from ltx2rt.graph.ir import DTYPE_BYTES
from ltx2rt.scheduling import in_use

DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
Function = TypeVar("Function", bound=Callable[..., Any])
OPS: dict[str, Callable[..., Any]] = {}


def op(function: Function) -> Function:
    OPS[function.__name__.rstrip("_")] = function
    return function


def fused(plain: Function, switch: str = "") -> Function:
    """Enter an op that has a kernel: the kernel runs it unless there is a reason why not, else the
    plain ops do, which stay at hand as `__wrapped__`. switch: the user's name for leaving the
    kernel out."""
    name = plain.__name__

    @wraps(plain)
    def run(*operands: Tensor, **plan) -> Any:
        left_out = switch and not in_use(switch)
        function = plain if left_out or why_not(name, *operands, **plan) else kernel(name)
        return function(*operands, **plan)

    return cast(Function, op(run))
