"""inpaint: a region of a given clip made anew, or a border around it, or both; its sound is kept.

What is outside stays as latents beside what is made, and is the file's own pixels in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of
from ltx2rt.pipelines.build import Loras, decoded, denoise_once, text
from ltx2rt.pipelines.clip import Clip
from ltx2rt.pipelines.groups import GIVEN_CLIP
from ltx2rt.pipelines.groups.mask import Mask
from ltx2rt.pipelines.groups.segments import Segments
from ltx2rt.pipelines.groups.sound import NewSound
from ltx2rt.pipelines.groups.source_clip import SourceClip
from ltx2rt.pipelines.groups.text import PromptsByTime
from ltx2rt.pipelines.request import Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.region import FILLS, Compose, Region, RegionVideo
from ltx2rt.stages.stage import Stage

flag = flags_of("conditioning")


class Inpaint(Request):
    name = "inpaint"
    summary = "regenerate a region of a given clip, or add a border"
    task = "Replace a region"
    example = "--video-path clip.mp4 --mask mask.png"
    distilled = "optional"
    cuts = False
    groups = (*GIVEN_CLIP, PromptsByTime(), Mask(), NewSound(), Segments())
    about: ClassVar = {
        "video_path": "clip to change; its length and rate are kept (required)",
    }

    mask_fill: str = flag(
        "mean",
        "view of the pixels to make: the mean of the frame, green, or none to see the clip itself",
        choices=FILLS,
    )

    @property
    def border(self) -> tuple[int, int]:
        left, top, right, bottom = self.pad
        return left + right, top + bottom

    def region(self, clip: Clip) -> Region:
        taken, whole = clip.given.taken, replace(clip.given, window=None)
        region = self[Mask].region(clip.given, taken.stop, taken.start)
        return replace(region, span=whole.span(self.start_time, self.end_time))

    # --- checks -----------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        if not self[Mask].asked:
            raise InputError(
                "--mask: none, and no --mask-box or --pad; draw the region that is to change, in white "
                "or as a box, or say how many pixels to add"
            )

    def completed(self, clip: Clip, model: ModelConfig) -> Clip:
        region = self.region(clip)
        region.check()
        if clip.segments:
            cells, some = None, any(mask.any() for mask in region.masks())
        else:
            some = (cells := region.cells(clip.geometry(model))).any()
        if not some:
            raise self[Mask].black()
        return replace(clip, cells=cells)

    # --- what is made -----------------------------------------------------------------------------

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        yield from super().remarks(clip, model)
        if clip.cells is None:
            return
        made, step, unit = int(clip.cells.sum()), model.video_vae.time_factor, 32
        yield (
            f"white is made anew: {made} of {clip.cells.size} cells of {unit}x{unit} pixels "
            f"and {step} frames"
        )
        if made == clip.cells.size:
            yield "nothing of the clip is kept but its sound; --pipeline v2v keeps a share of it"

    def stages(
        self, clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> list[Stage]:
        full, given, has_sound = clip.geometry(model), self[SourceClip], clip.keeps_sound
        region = self.region(clip)
        cells = region.cells(full) if clip.cells is None else clip.cells
        how = {"region": region, "fill": self.mask_fill}
        video = given.video(clip, model, options, RegionVideo, **how)
        sound = given.sound(clip, model, sound=clip.audio)
        kept = {"masks": {"video": cells.ravel()}, "frozen": ("audio",) * has_sound}
        return [
            video,
            *([sound] if has_sound else []),
            *text(clip),
            *denoise_once(clip, full, options, loras, **kept, sound=not has_sound),
            *decoded(clip, full, model, options, sound=self.sound == "new"),
            Compose(video, region),
        ]


PIPELINE = Inpaint
