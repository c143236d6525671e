"""inpaint: a region of a given clip made anew, or a border around it, or both; its sound is kept.

What is outside stays as latents beside what is made, and is the file's own pixels in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from typing import Any, ClassVar

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of
from ltx2rt.pipelines.groups import GIVEN_CLIP
from ltx2rt.pipelines.groups.mask import Mask
from ltx2rt.pipelines.groups.segments import Segments
from ltx2rt.pipelines.groups.sound import NewSound
from ltx2rt.pipelines.groups.source_clip import SourceClip
from ltx2rt.pipelines.groups.text import PromptsByTime
from ltx2rt.pipelines.request import Loras, Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.region import FILLS, Compose, Region, RegionVideo
from ltx2rt.stages.stage import Stage

flag = flags_of("conditioning")


class Inpaint(Request):
    """cells: f32[f, h, w], the latents that are made, 1, or kept, 0; a resolved request has it,
    unless it is in segments."""

    name = "inpaint"
    summary = "regenerate a region of a given clip, or add a border"
    task = "Replace a region"
    example = "--video-path clip.mp4 --mask mask.png"
    distilled = "optional"
    groups = (*GIVEN_CLIP, PromptsByTime(), Mask(), NewSound(), Segments())
    about: ClassVar = {"video_path": "clip to change; its length and rate are kept (required)"}

    mask_fill: str = flag(
        "mean",
        "view of the pixels to make: the mean of the frame, green, or none to see the clip itself",
        choices=FILLS,
    )
    cells: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def region(self) -> Region:
        taken = self.source.taken
        return self[Mask].region(self.source, taken.stop, taken.start)

    # --- checks -----------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        if not self[Mask].asked:
            raise InputError(
                "--mask: none, and no --mask-box or --pad; draw the region that is to change, in white "
                "or as a box, or say how many pixels to add"
            )

    def resolved(self, model: ModelConfig) -> Any:
        full = super().resolved(model)
        if full.cells is not None:
            return full
        full.region.check()
        if full.in_segments:
            some = any(mask.any() for mask in full.region.masks())
        else:
            cells = full.region.cells(full.geometry(model))
            full, some = replace(full, cells=cells), cells.any()
        if not some:
            raise full[Mask].black()
        return full

    # --- what is made -----------------------------------------------------------------------------

    def remarks(self, model: ModelConfig) -> Iterator[str]:
        yield from super().remarks(model)
        if self.cells is None:
            return
        made, step, unit = int(self.cells.sum()), model.video_vae.time_factor, 32
        cells = f"{made} of {self.cells.size} cells of {unit}x{unit} pixels and {step} frames"
        yield f"white is made anew: {cells}"
        if made == self.cells.size:
            yield "nothing of the clip is kept but its sound; --pipeline v2v keeps a share of it"

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        full, clip, has_sound = self.geometry(model), self[SourceClip], self.keeps_sound
        cells = self.region.cells(full) if self.cells is None else self.cells
        how = {"region": self.region, "fill": self.mask_fill}
        video = clip.video(self, model, options, RegionVideo, **how)
        sound = clip.sound(self, model, sound=self.audio)
        kept = {"masks": {"video": cells.ravel()}, "frozen": ("audio",) * has_sound}
        return [
            video,
            *([sound] if has_sound else []),
            *self.text,
            *self.denoise_once(full, options, loras, **kept, sound=not has_sound),
            *self.decoded(full, model, options, sound=self.sound == "new"),
            Compose(video, self.region),
        ]


PIPELINE = Inpaint
