"""Bytes that a kernel moves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ltx2rt.graph.ir import DTYPE_BYTES


@dataclass(frozen=True)
class Bytes:
    """moved: bytes of the kernel's loads and stores if nothing were cached. minimum: every operand
    read once and every result written once, a bound for any kernel."""

    moved: int
    minimum: int


def size(shapes: Iterable[tuple[int, ...]], dtype: str) -> int:
    return sum(math.prod(shape) for shape in shapes) * DTYPE_BYTES[dtype]
