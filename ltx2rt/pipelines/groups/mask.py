"""A mask, and a border around a clip: where it is made, and not kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING

from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of
from ltx2rt.media.footage import Footage
from ltx2rt.pipelines.groups.group import Group, refuse_beside
from ltx2rt.stages.region import Region

if TYPE_CHECKING:
    from ltx2rt.pipelines.request import Request

flag = flags_of("conditioning")

Pad = tuple[int, int, int, int]
NONE: Pad = (0, 0, 0, 0)


def parse_four(text: str | Sequence[int]) -> Pad:
    """Four numbers, or text with commas. Raises TypeError or ValueError."""
    parts = map(int, text.split(",")) if isinstance(text, str) else map(index, text)
    left, top, right, bottom = parts
    return left, top, right, bottom


@dataclass(frozen=True)
class Mask(Group):
    mask: Path | None = flag(
        None,
        "image or video of the clip's size, white where the clip is made anew",
        asks="inpaint",
        file="mask",
        common="prompt and inputs",
    )
    mask_box: Pad | None = flag(
        None,
        "rectangle of the file to regenerate, in place of a mask",
        parse_four,
        asks="inpaint",
        metavar="LEFT,TOP,WIDTH,HEIGHT",
        expects="LEFT,TOP,WIDTH,HEIGHT in pixels, such as 40,20,128,64",
        json="array",
    )
    mask_grow: int = flag(5, "pixels by which the white of the mask is grown", least=0, most=512)
    pad: Pad = flag(
        NONE,
        "pixels to add around the clip",
        parse_four,
        asks="inpaint",
        metavar="LEFT,TOP,RIGHT,BOTTOM",
        expects="LEFT,TOP,RIGHT,BOTTOM in pixels, such as 128,0,128,0",
        json="array",
    )

    @property
    def asked(self) -> str:
        """The flag by which only a part of the clip is made; empty without."""
        if self.mask_box:
            return "--mask-box"
        return "--mask" if self.mask else "--pad" if self.pad != NONE else ""

    def check(self, request: Request) -> None:
        if min(self.pad) < 0:
            raise InputError(f"--pad: {min(self.pad)} pixels, expected 0 or more")
        refuse_beside(mask=self.mask, mask_box=self.mask_box)
        if self.mask_box and (min(self.mask_box[:2]) < 0 or min(self.mask_box[2:]) < 1):
            raise InputError(
                f"--mask-box: {','.join(map(str, self.mask_box))}, expected a rectangle of one "
                "pixel or more within the clip"
            )

    def padded(self, source: Footage) -> tuple[int, int]:
        """Width and height of a clip with the border."""
        (width, height), (left, top, right, bottom) = source.size, self.pad
        return width + left + right, height + top + bottom

    def region(self, source: Footage, num_frames: int, start: int = 0) -> Region:
        if self.mask_box:
            left, top, width, height = self.mask_box
            columns, rows = source.info.width, source.info.height
            if left + width > columns or top + height > rows:
                raise InputError(
                    f"--mask-box: {left},{top},{width},{height} reaches beyond the clip, which is "
                    f"{columns}x{rows}"
                )
        return Region(
            self.mask, source.size[::-1], num_frames, self.mask_grow, self.pad, self.mask_box,
            source.resize, start, source.speed,
        )  # fmt: skip

    def black(self) -> InputError:
        lies = f"{self.mask} is black" if self.mask else "--fit crop cuts it off"
        return InputError(
            f"{self.asked}: {lies}, and nothing would be made; paint white what is made anew"
        )
