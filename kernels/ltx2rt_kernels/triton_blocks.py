"""Parts that the kernels' launches share: block sizes, tensors seen by strides, so that views are
read in place, and one launch for two nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class LaunchPart:
    """The part of a launch for one node. numbers: that a program holds; arguments, constants: of
    the kernel, where those of a second node follow as NAME_2."""

    programs: int
    numbers: int
    arguments: Sequence[Any]
    constants: Mapping[str, Any]
    results: tuple[Tensor, ...]


def launch(kernel: Any, *parts: LaunchPart) -> None:
    """`kernel` for one node or for two, the programs of the second behind those of the first."""
    first, second = parts[0], parts[-1]
    others = second.arguments if len(parts) > 1 else [None] * len(first.arguments)
    kernel[(sum(part.programs for part in parts),)](
        first.programs, *first.arguments, *others, **first.constants, TWO=len(parts) > 1,
        **{f"{name}_2": value for name, value in second.constants.items()},
        num_warps=num_warps(max(part.numbers for part in parts)),
    )  # fmt: skip
