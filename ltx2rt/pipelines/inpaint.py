"""inpaint: a region of a given clip made anew, or a border around it, or both; its sound is kept.

What is outside stays as latents beside what is made, and is the file's own pixels in the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flag, flag_like
from ltx2rt.pipelines.given_clip import FLAG, GivenClip, read_clip
from ltx2rt.pipelines.request import Loras
from ltx2rt.session.options import ModelOptions, existing_file
from ltx2rt.stages.region import FILLS, Compose, Region, RegionVideo
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.stage import Stage
from ltx2rt.stages.tiling import plan_encoder_tiles

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
class Inpaint(GivenClip):
    """cells: f32[f, h, w], the latents that are made, 1, or kept, 0; a resolved request has it."""

    name: ClassVar[str] = "inpaint"
    summary: ClassVar[str] = "make a region of a given clip anew, or a border around it"
    example: ClassVar[str] = "--video-path clip.mp4 --mask mask.png"

    video_path: Path | None = flag_like(
        GivenClip, "video_path", help="clip to change; its length and rate are kept (required)"
    )
    mask: Path | None = flag(
        None,
        "image or video of the clip's size, white where the clip is made anew",
        Path,
        group="conditioning",
        metavar="FILE",
    )
    mask_grow: int = flag(
        5,
        "pixels by which the white of the mask is grown",
        group="conditioning",
        least=0,
        most=512,
    )
    mask_fill: str = flag(
        "mean",
        "view of the pixels to make: the mean of the frame, green, or none to see the clip itself",
        group="conditioning",
        choices=FILLS,
    )
    pad: Pad = flag(
        NONE,
        "pixels to add around the clip, multiples of 32",
        parse_pad,
        group="conditioning",
        metavar="LEFT,TOP,RIGHT,BOTTOM",
    )
    cells: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def region(self) -> Region:
        info = self.source
        return Region(
            self.mask, (info.height, info.width), info.num_frames, self.mask_grow, self.pad
        )

    @property
    def files(self) -> list[Path]:
        return [*super().files, *([self.mask] if self.mask else [])]

    def settings(self, path: Any = str) -> dict[str, Any]:
        return {name: value for name, value in super().settings(path).items() if name != "cells"}

    # --- checks -----------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        if self.mask is None and self.pad == NONE:
            raise InputError(
                "--mask: none, and no --pad; give a mask that is white where the clip is made "
                "anew, or the pixels to add around it"
            )
        if self.pad != NONE and min(self.pad) < 0:
            raise InputError(f"--pad: {min(self.pad)} pixels, expected 0 or more")

    def check_files(self) -> None:
        super().check_files()
        if self.mask:
            existing_file("--mask", self.mask)

    def resolved(self, model: ModelConfig) -> Any:
        """Reads the files whole, once."""
        self.check()
        unit = model.video_vae.space_factor
        for px in self.pad:
            if px % unit:
                near = f"{px // unit * unit} and {px // unit * unit + unit}"
                raise InputError(
                    f"--pad: {px}, expected multiples of {unit}; the nearest are {near} pixels"
                )
        info = self.info or read_clip(self.source_path, FLAG, model, whole=True)
        left, top, right, bottom = self.pad
        self = replace(
            self,
            info=info,
            width=info.width + left + right,
            height=info.height + top + bottom,
            num_frames=info.num_frames,
            fps=info.fps,
        )
        full = self.with_defaults(model)
        if full.cells is None:
            full.region.check()
            full = replace(full, cells=full.region.cells(full.geometry(model)))
        if not full.cells.any():
            raise InputError(
                f"--mask: {full.mask} is black, and nothing would be made; paint white what is "
                "made anew"
            )
        return full

    # --- what is made -----------------------------------------------------------------------------

    def remarks(self, model: ModelConfig) -> Iterator[str]:
        assert self.cells is not None, "the request is not resolved"
        made, step, unit = int(self.cells.sum()), model.video_vae.time_factor, 32
        cells = f"{made} of {self.cells.size} cells of {unit}x{unit} pixels and {step} frames"
        yield f"white is made anew: {cells}"
        if made == self.cells.size:
            yield "nothing of the clip is kept but its sound; --pipeline v2v keeps a share of it"

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        assert self.cells is not None, "the request is not resolved"
        full, has_sound, times = self.geometry(model), self.source.has_sound, self.source.times_s
        assert times, "a file without timestamps is refused"
        shape = (full.frames, full.rows, full.columns)
        tiles = plan_encoder_tiles(options.vae_tiling, shape, model.video_vae)
        video = RegionVideo(self.source_path, full, tiles, region=self.region, fill=self.mask_fill)
        sound = SourceSound(
            self.source_path, full, float(times[0]), fit="zeros", num_videos=self.num_videos,
            sound=self.audio, record="source.audio",
        )  # fmt: skip
        kept = {"masks": {"video": self.cells.ravel()}, "frozen": ("audio",) * has_sound}
        heard = replace(self, audio=self.audio and not has_sound)
        return [
            video,
            *([sound] if has_sound else []),
            *self.text,
            *self.denoise_once(full, options, loras, **kept, sound=not has_sound),
            *heard.decoded(full, model, options),
            Compose(video, self.region),
        ]


PIPELINE = Inpaint
