"""What a kernel moves, in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int32": 4, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Bytes:
    """moved: what the kernel's loads and stores ask for, were nothing cached. minimum: every operand read once and
    every result written once, what no kernel can undercut."""

    moved: int
    minimum: int


def size(shapes: Iterable[tuple[int, ...]], dtype: str) -> int:
    return sum(math.prod(shape) for shape in shapes) * ITEM_BYTES[dtype]
