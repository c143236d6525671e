"""Sizes that a replica is warm for: `WIDTHxHEIGHTxFRAMES[:PIPELINE]`."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.pipelines import FIRST


@dataclass(frozen=True)
class Shape:
    width: int
    height: int
    num_frames: int
    pipeline: str = FIRST

    @property
    def clip(self) -> dict[str, Any]:
        return {name: n for name, n in asdict(self).items() if name != "pipeline"}

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.num_frames}:{self.pipeline}"


def parse_shape(text: str | Shape) -> Shape:
    """Raises InputError."""
    if isinstance(text, Shape):
        return text
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})x(\d{1,5})(?::([\w-]+))?", text)
    if match is None:
        raise InputError(
            f"--warm: {text[:80]!r}, expected WIDTHxHEIGHTxFRAMES[:PIPELINE] such as 768x512x121"
        )
    width, height, frames = map(int, match.groups()[:3])
    return Shape(width, height, frames, match[4] or FIRST)
