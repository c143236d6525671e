"""A clip as it is made: a request with every default of its model, and the facts of its files.

`resolve` checks a request against the model and fills the draft of a clip, group after group, once.
All that comes later, stages, plans and files, reads the clip. Another length or prompt is a
`replace` of it, or of what was asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.media.footage import Footage
from ltx2rt.media.hdr import HighRange
from ltx2rt.models.geometry import Geometry
from ltx2rt.models.step_plan import StepPlan
from ltx2rt.pipelines.groups.group import Group
from ltx2rt.pipelines.groups.guidance import Scales
from ltx2rt.pipelines.groups.segments import SegmentPlan, Segments
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.conditioning import ImageSpec
from ltx2rt.stages.denoise import Noise
from ltx2rt.stages.inset import Inset
from ltx2rt.stages.relay import Relay
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, shifted_sigmas
from ltx2rt.stages.segments import SegmentFile
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.stage import Stage

if TYPE_CHECKING:
    from ltx2rt.pipelines.build import Loras
    from ltx2rt.pipelines.request import Request

G = TypeVar("G", bound=Group)


@dataclass(frozen=True)
class Guiding:
    """How the first stage is guided. guidance, levels: as of `Scales`."""

    guidance: np.ndarray = field(compare=False)
    stg_blocks: tuple[int | str, ...]
    plan: StepPlan | None
    interval: tuple[float, float] | None
    levels: tuple[float, ...]


@dataclass(frozen=True)
class Clip:
    """asked: the request before any default is filled; request: with every default, as settings
    state it. Its pipeline and its groups make the stages.

    width, height: of the pictures that the model makes, 0 without; size_px: height and width of
    the written ones. prompt: the text to follow, without those by time. source: the given
    clip, with the frames that the model sees; other: the one to join to it; sound:
    "new", or the file's. cells: f32[f, h, w], the
    latents of a region that are made, 1, or kept, 0. hdr: how the files are in high dynamic range.
    guiding: None for distilled steps. prefix: of the names of a segment's noise.
    """

    asked: Request
    request: Request
    num_frames: int  # as settings state: the whole clip's; of `extend`, the new segment's
    clip_frames: int  # in the file that is written
    fps: Fraction
    clip_fps: Fraction
    width: int
    height: int
    size_px: tuple[int, int]
    seeds: range
    prompt: str
    images: tuple[ImageSpec, ...]
    source: Footage | None
    other: Footage | None
    sound: str | None
    segments: SegmentPlan | None
    hdr: HighRange | None
    guiding: Guiding | None
    motion_speed: float
    cells: np.ndarray | None = field(default=None, compare=False)
    prefix: str = ""

    def __getitem__(self, kind: type[G]) -> G:
        """The group of that kind, with the values of the clip."""
        return self.request[kind]

    # --- counts of frames -------------------------------------------------------------------------

    @property
    def seen_frames(self) -> int:
        """Number of frames that the model makes at once, of a longer clip or of all of it."""
        if self.source and self.source.window:
            return len(self.source.window)
        return self.segments.frames if self.segments else self.num_frames

    @property
    def image_frames(self) -> int:
        """Number of frames that an image can be given for: those of all segments."""
        return self.segments.spans[-1].stop if self.segments else self.num_frames

    @property
    def parts(self) -> list[SegmentFile]:
        """The files of its segments, each with the frames that it has."""
        return self.segments.files(self.fps, self.heard, bool(self.hdr)) if self.segments else []

    # --- facts that follow ------------------------------------------------------------------------

    @property
    def given(self) -> Footage:
        """The given clip, of a pipeline that starts from one."""
        assert self.source, "the pipeline starts from no clip"
        return self.source

    @property
    def audio(self) -> bool:
        return self.request.audio

    @property
    def heard(self) -> bool:
        """Whether the clip has sound: of silent files, only if it is new."""
        given = [footage for footage in (self.source, self.other) if footage]
        sounds = not given or any(footage.info.has_sound for footage in given)
        return self.audio and (sounds or self.sound == "new")

    @property
    def keeps_sound(self) -> bool:
        """Whether the clip keeps sound of the given file; without sound of its own it reads none."""
        kept = self.sound in (None, "keep")
        return bool(self.audio and kept and self.source and self.source.info.has_sound)

    @property
    def relay(self) -> Relay | None:
        """The prompts by time, if there are any."""
        spans, softness = self.request.prompt_at, self.request.prompt_softness
        return Relay(self.prompt, spans, softness) if spans else None

    @property
    def prompts(self) -> tuple[str, ...]:
        """The texts for the text encoder, in one batch: the prompt, then the negative one if a
        branch uses it."""
        positive = relay.text if (relay := self.relay) else self.prompt
        negative = [self.request.negative_prompt or ""] if self.request.negated else []
        return (positive, *negative)

    @property
    def noise(self) -> Noise:
        return Noise(tuple(self.seeds), self.request.noise_in, self.prefix)

    @property
    def schedule(self) -> np.ndarray:
        """f32[steps + 1], the noise levels of the first stage."""
        return shifted_sigmas(self.request.steps) if self.guiding else DISTILLED_SIGMAS

    def geometry(self, model: ModelConfig, scale: Fraction | int = 1) -> Geometry:
        """The latent grid of the clip at 1/scale of its width and height, rounded up."""
        unit = model.video_vae.space_factor * self.request.factor(model).numerator
        sides = self.width, self.height
        width, height = (int(-(-side // unit) * unit / Fraction(scale)) for side in sides)
        step, frames = model.video_vae.time_factor, self.seen_frames
        if self.source:
            frames = -(-(frames - 1) // step) * step + 1
        return Geometry.of(model, width, height, frames, self.fps, self.motion_speed)

    def first(self, model: ModelConfig) -> Geometry:
        """The latent grid of the first of two stages."""
        return self.geometry(model, self.request.factor(model))

    def inset(self, model: ModelConfig, geometry: Geometry | None = None) -> Inset | None:
        """Place of the clip's pictures in those of the model, or of a stage at the size that is
        written; None if they have one size."""
        whole = (geometry or self.geometry(model)).size_px
        size = self.size_px if geometry else (self.height, self.width)
        given = self.source is not None
        return Inset(size, whole, not given, self.request.mirrored) if size != whole else None

    # --- the run ----------------------------------------------------------------------------------

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        """The stages of the run: of a clip in segments, those of each segment that is not there."""
        if self.segments:
            return self[Segments].all_stages(self, model, options, loras)
        return self.request.stages(self, model, options, loras)

    def whole_sound(self, model: ModelConfig) -> SourceSound | None:
        """The sound of a file that all of the clip is made for."""
        found = (group.whole_sound(self, model) for group in self.request)
        return next(filter(None, found), None)

    def remarks(self, model: ModelConfig) -> Iterator[str]:
        """Sentences for its user before it is made."""
        yield from self.request.remarks(self, model)

    def rewritten(self, text: str) -> Clip:
        """The clip with another text for its prompt."""
        request = replace(self.request, enhanced_prompt=text)
        return replace(self, request=request, prompt=text)

    def lasting(self, num_frames: int, model: ModelConfig) -> Clip:
        """The clip with the length that its prompt asks for. Raises InputError."""
        length = {"num_frames": num_frames, "auto_duration": None}
        text = self.request.enhanced_prompt
        asked = replace(self.asked, seed=self.seeds[0], enhanced_prompt=text, **length)
        return resolve(asked, model)


@dataclass
class Draft:
    """A clip while groups fill it. request: with the flags that are filled so far. The other fields
    are those of the clip; None as usual."""

    asked: Request
    request: Request
    source: Footage | None = None
    other: Footage | None = None
    sound: str | None = None
    segments: SegmentPlan | None = None
    hdr: HighRange | None = None
    plan: StepPlan | None = None

    def fill(self, **flags: Any) -> None:
        """Set values of flags."""
        self.request = replace(self.request, **flags)

    @property
    def given(self) -> Footage:
        """The given clip, of a pipeline that starts from one."""
        assert self.source, "the pipeline starts from no clip"
        return self.source

    @property
    def image_frames(self) -> int:
        return self.segments.spans[-1].stop if self.segments else self.request.num_frames

    def clip(self) -> Clip:
        """The clip, once all is filled."""
        r, guiding = self.request, None
        if r.is_guided:
            own = r[Scales]
            guiding = Guiding(own.scales, r.stg_blocks, self.plan, r.guidance_interval, own.levels)
        return Clip(
            asked=self.asked,
            request=r,
            num_frames=r.num_frames,
            clip_frames=self.image_frames,
            fps=r.fps,
            clip_fps=r.fps,
            width=r.width,
            height=r.height,
            size_px=(r.height, r.width),
            seeds=r.seeds,
            prompt=r.enhanced_prompt or r.prompt,
            images=r.images,
            source=self.source,
            other=self.other,
            sound=self.sound,
            segments=self.segments,
            hdr=self.hdr,
            guiding=guiding,
            motion_speed=r.motion_speed,
        )


def fill(request: Request, model: ModelConfig) -> Draft:
    """Fill the draft of a clip: size and length first, then the rest. Raises InputError."""
    request.check_model(model)
    request.check()
    draft = Draft(request, request)
    for group in (group for group in request.groups if group.shapes):
        draft.request.valued(group).into(draft, model)
    draft.request.into(draft, model)
    for group in (group for group in request.groups if not group.shapes):
        draft.request.valued(group).into(draft, model)
    return draft


def resolve(request: Request, model: ModelConfig) -> Clip:
    """Check the request against the model, and make a clip of it. Raises InputError."""
    clip = fill(request, model).clip()
    for group in clip.request:
        group.fits(clip, model)
    return clip.request.completed(clip, model)
