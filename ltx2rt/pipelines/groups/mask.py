"""A mask, and a border around a clip: where it is made, and not kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.flags import flag
from ltx2rt.media.video import VideoInfo
from ltx2rt.pipelines.groups.group import Group
from ltx2rt.stages.region import Region

Pad = tuple[int, int, int, int]
NONE: Pad = (0, 0, 0, 0)


def parse_pad(text: str | Sequence[int]) -> Pad:
    """LEFT,TOP,RIGHT,BOTTOM in pixels, or the four numbers. Raises InputError."""
    try:
        if isinstance(text, str):
            left, top, right, bottom = (int(part) for part in text.split(","))
        else:
            left, top, right, bottom = (index(part) for part in text)
    except (TypeError, ValueError):
        raise InputError(
            f"--pad: {str(text)[:80]!r}, expected LEFT,TOP,RIGHT,BOTTOM in pixels, such as "
            "128,0,128,0"
        ) from None
    return left, top, right, bottom


@dataclass(frozen=True)
class Mask(Group):
    mask: Path | None = flag(
        None,
        "image or video of the clip's size, white where the clip is made anew",
        Path,
        asks="inpaint",
        group="conditioning",
        metavar="FILE",
        file="mask",
        common="prompt and inputs",
    )
    mask_grow: int = flag(
        5,
        "pixels by which the white of the mask is grown",
        group="conditioning",
        least=0,
        most=512,
    )
    pad: Pad = flag(
        NONE,
        "pixels to add around the clip, multiples of 32",
        parse_pad,
        asks="inpaint",
        group="conditioning",
        metavar="LEFT,TOP,RIGHT,BOTTOM",
        json="array",
    )

    @property
    def asked(self) -> str:
        """The flag by which only a part of the clip is made; empty without."""
        return "--mask" if self.mask else "--pad" if self.pad != NONE else ""

    def check(self, request: Any) -> None:
        if min(self.pad) < 0:
            raise InputError(f"--pad: {min(self.pad)} pixels, expected 0 or more")

    def padded(self, info: VideoInfo) -> tuple[int, int]:
        """Width and height of a clip with the border."""
        left, top, right, bottom = self.pad
        return info.width + left + right, info.height + top + bottom

    def region(self, info: VideoInfo, num_frames: int) -> Region:
        return Region(self.mask, (info.height, info.width), num_frames, self.mask_grow, self.pad)

    def black(self) -> InputError:
        return InputError(
            f"--mask: {self.mask} is black, and nothing would be made; paint white what is made "
            "anew"
        )
