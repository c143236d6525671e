"""Parts that the kernels' launches share: block sizes, and tensors seen by strides, so that views
are read in place."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

MAX_BLOCK = 16384  # numbers of one token that a program holds in registers at once

jit: Any = triton.jit  # its types know neither num_warps nor plain numbers for constexpr parameters


def block(size: int) -> int:
    """The power of two that holds `size` numbers: the length of a program's ranges."""
    return 1 << (size - 1).bit_length()


def num_warps(size: int) -> int:
    """16 numbers a thread: several 16-byte loads in flight, and no spills with five operands."""
    return min(max(size // 512, 1), 16)


def spread(row: Tensor, view: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """`row` as if it had x's shape: an axis that it lacks has stride 0."""
    return row.reshape(view).expand(shape)


def dtype_reason(*tensors: Tensor) -> str | None:
    for x in tensors:
        if x.dtype not in (torch.bfloat16, torch.float32):
            return f"an operand is {x.dtype}, the kernel takes bfloat16 and float32"
    return None
