"""One clip as its user asks for it: the values of its pipeline's flags, and a pipeline's duties.

A pipeline is a class derived from `Request`: it lists groups of flags and says what stages make the
clip. `check` validates what needs no file of the model; `clip.resolve` makes the clip, with the
model's defaults. Both come before any weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import assemble, check_bounds, flagged, named_files, spelling
from ltx2rt.media.hdr import TRANSFERS, HighRange, is_exr
from ltx2rt.pipelines.build import Loras, in_two_passes
from ltx2rt.pipelines.clip import Clip, Draft
from ltx2rt.pipelines.groups.group import Group
from ltx2rt.pipelines.groups.guidance import ByWeights, Scales
from ltx2rt.pipelines.groups.segments import Segments
from ltx2rt.session.options import LoraSpec, ModelOptions, existing, existing_file, plain
from ltx2rt.stages.conditioning import ImageSpec
from ltx2rt.stages.relay import PromptSpan
from ltx2rt.stages.stage import Stage
from ltx2rt.text_files import NO_TEXT

R = TypeVar("R", bound="Request")
G = TypeVar("G", bound=Group)


class Neutral:
    """Values of flags that a pipeline may lack."""

    width: int = 0
    height: int = 0
    quality: str | None = None
    guided: bool | None = None
    audio: bool = False
    images: tuple[ImageSpec, ...] = ()
    hdr: str | None = None
    hdr_transfer: str = TRANSFERS[0]
    prompt_at: tuple[PromptSpan, ...] = ()
    prompt_softness: float = 0.0
    segment_frames: int | None = None
    motion_speed: float = 1.0
    guidance_interval: tuple[float, float] | None = None
    sigmas: tuple[str, ...] = ()
    learnt: tuple[LoraSpec, ...] = ()


@dataclass(frozen=True)
class Request(Neutral):
    """One clip. A class derived from this one is a pipeline, a frozen dataclass that has the fields
    of its groups before its own. `resolve` makes a `Clip` of it.

    groups: with the pipeline's defaults. about: help of flags that mean something particular here.
    name: of the pipeline; summary, example: for `--help`, a line and flags that show its use.
    task: the wish of a person who chooses it, on the server's page.
    scale: width and height of the first of two stages are those of the clip divided by it, or by
    that of the upsampler if it has another; 1: there is one stage. distilled: whether a distilled
    LoRA is merged: "needed", "optional" (unless the weights are distilled) or "unused". by_weights: whether steps
    are guided unless the weights are distilled. mirrored: as of `Inset`. cuts: --start-time and
    --end-time cut the given clip, and do not name a part that is made.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    example: ClassVar[str] = ""
    task: ClassVar[str] = "Text to video"
    groups: ClassVar[tuple[Group, ...]] = ()
    about: ClassVar[Mapping[str, str]] = {}
    scale: ClassVar[int] = 1
    distilled: ClassVar[str] = "unused"
    by_weights: ClassVar[bool] = False
    mirrored: ClassVar[bool] = False
    cuts: ClassVar[bool] = True

    if TYPE_CHECKING:  # the fields come from the groups

        def __init__(self, *texts: Any, **flags: Any): ...
        def __getattr__(self, name: str) -> Any: ...
        def __replace__(self: R, /, **flags: Any) -> R: ...

    def __init_subclass__(cls) -> None:
        assemble(cls, cls.groups, cls.about)
        cls.by_weights = cls.has(ByWeights)

    @classmethod
    def has(cls, kind: type[Group]) -> bool:
        return any(isinstance(group, kind) for group in cls.groups)

    def __getitem__(self, kind: type[G]) -> G:
        """The group of that kind, with the request's values."""
        return self.valued(next(group for group in self.groups if isinstance(group, kind)))

    def valued(self, group: G) -> G:
        """The group with the request's values."""
        return replace(group, **{f.name: getattr(self, f.name) for f in fields(group)})

    def __iter__(self) -> Iterator[Group]:
        """Its groups, with the request's values."""
        return map(self.valued, self.groups)

    def stages(
        self, clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> list[Stage]:
        """The stages of the pipeline, in order."""
        return in_two_passes(clip, model, options, loras)

    # --- checks -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what is wrong whatever the model is. Raises InputError; reads no file."""
        check_bounds(self)
        for name, f in flagged(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, float) and not abs(value) < 1e6:
                raise InputError(f"{spelling(f)}: {value:g}, expected a finite number below 1e6")
            if isinstance(value, str) and value != value.encode(errors="ignore").decode():
                raise InputError(f"{spelling(f)}: {NO_TEXT}")
        for group in self:
            group.check(self)

    def check_files(self) -> None:
        """Refuse named files that are not there. Raises InputError."""
        for f, path in named_files(self):
            kind = f.metadata["flag"].file
            folder = kind == "folder" or (kind == "video" and path.is_dir())
            (existing if folder else existing_file)(spelling(f), path)

    def check_options(self, options: ModelOptions) -> None:
        """Refuse model flags that do not go with this clip. Raises InputError."""
        for group in self:
            group.check_options(self, options)
        for lora in options.loras:
            if lora.stage == "stage2" and self.scale == 1:
                raise InputError(
                    f"--lora: {lora.path} is for stage 2, and the {self.name} pipeline has none"
                )

    @classmethod
    def check_model(cls, model: ModelConfig) -> None:
        """Refuse a model that no request of the pipeline goes with. Raises InputError."""

    def into(self, draft: Draft, model: ModelConfig) -> None:
        """Fill the draft like a group, after those that decide size and length. Raises
        InputError."""

    def completed(self, clip: Clip, model: ModelConfig) -> Clip:
        """Check the clip, and return it with facts that only this pipeline reads. Raises InputError."""
        return clip

    def unguided(self) -> Request | None:
        """The request in distilled steps, for distilled weights; None if it has no such form.
        No flag of guidance is given."""
        if not self.is_guided:
            return self
        return replace(self, guided=False) if self.by_weights else None

    def made_by(self, type_: type[R]) -> R:
        """The request of another pipeline, which reads all flags that are given."""
        read = {f.name for group in type_.groups for f in fields(group)}
        names = [f.name for f in fields(self) if f.name in read]
        return type_(**{n: value for n in names if (value := getattr(self, n)) is not None})

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        """Sentences for its user before a clip is made."""
        for group in self:
            yield from group.remarks(clip, model)

    # --- facts before a model is known ------------------------------------------------------------

    @property
    def is_guided(self) -> bool:
        """Whether it has a guided stage."""
        return self.has(Scales) and self.guided is not False

    @property
    def takes_distilled(self) -> str:
        """`distilled` of this request: steps that are guided by choice are for dev weights, and
        unguided ones in place of guided ones for distilled weights."""
        if self.by_weights and not self.is_guided:
            return "optional"
        return "unused" if self.is_guided and self.distilled == "optional" else self.distilled

    @property
    def seeds(self) -> range:
        """One for each video, of a request that states the first."""
        first = self.seed or 0
        return range(first, first + self.num_videos)

    @property
    def negated(self) -> bool:
        """Whether the run reads the negative prompt."""
        return any(group.negates(self) for group in self)

    @property
    def joins(self) -> bool:
        """Whether a second clip is brought to the size of the given one."""
        return False

    @property
    def border(self) -> tuple[int, int]:
        """Columns and rows that are added to a given clip."""
        return 0, 0

    @property
    def files(self) -> list[Path]:
        """The files that it names."""
        return [path for f, path in named_files(self) if f.metadata["flag"].file != "folder"]

    @property
    def length(self) -> tuple[int | None, Fraction]:
        """Number of frames, None if the model is to decide it, and rate; by a file that decides
        them, if it is there. Raises InputError."""
        return next(filter(None, (group.length(self) for group in reversed(list(self)))))

    @property
    def first_image(self) -> Path | None:
        """The image that prompt enhancement sees, if any."""
        seen = (i.path for i in self.images if not (i.latent or is_exr(i.path) or i.moves))
        return next(seen, None)

    @property
    def high_range(self) -> HighRange | None:
        """How the clip's files are, if it is in high dynamic range."""
        return HighRange(self.hdr, transfer=self.hdr_transfer) if self.hdr else None

    @property
    def in_segments(self) -> bool:
        """Whether the clip is made in several, which are kept in a folder. Raises InputError."""
        return any(group.splits(self) for group in self)

    def kept_in(self: R, folder: Path) -> R:
        """The request with the folder of its segments, where it has any."""
        return replace(self, parts_folder=folder) if self.has(Segments) else self

    def settings(self, path: Any = str) -> dict[str, Any]:
        """Every setting as JSON-able values: what the MP4's metadata and the report carry."""
        values = {name: plain(getattr(self, name), path) for name in flagged(type(self))}
        return {"pipeline": self.name} | values

    def factor(self, model: ModelConfig) -> Fraction:
        """Ratio of the clip's sides to its first stage's: that of the spatial upsampler."""
        found = model.upsampler
        return (
            found.scale if self.scale > 1 and found and not found.temporal else Fraction(self.scale)
        )
