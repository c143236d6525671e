"""One clip as its user asks for it: the values of its pipeline's flags, and a pipeline's duties.

A pipeline is a class derived from `Request`: it lists groups of flags and says what stages make the
clip. `check` validates what needs no file of the model; `resolved` fills the model's defaults and
validates the rest against its configuration. Both come before any weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import assemble, check_bounds, flagged, named_files, spelling
from ltx2rt.media.hdr import HighRange, image_px, is_exr
from ltx2rt.models.geometry import Geometry, pixel_frames
from ltx2rt.pipelines.groups.group import Group
from ltx2rt.pipelines.groups.guidance import NEUTRAL, ByWeights, Scales, guiding
from ltx2rt.pipelines.groups.images import Hdr
from ltx2rt.pipelines.groups.reference import Learnt
from ltx2rt.pipelines.groups.segments import Segments
from ltx2rt.pipelines.groups.size import Pixels
from ltx2rt.pipelines.groups.source_clip import SourceClip
from ltx2rt.pipelines.groups.steps import Skips
from ltx2rt.pipelines.groups.text import PromptsByTime
from ltx2rt.session.options import (
    NO_LORA,
    DistilledWeights,
    LoraSpec,
    ModelOptions,
    existing,
    existing_file,
    plain,
)
from ltx2rt.stages.conditioning import Conditioning, GivenLatents
from ltx2rt.stages.denoise import Denoise, Noise
from ltx2rt.stages.duration import Duration
from ltx2rt.stages.frames import decoding
from ltx2rt.stages.inset import Cut, Inset
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, STAGE2_SIGMAS, from_level, shifted_sigmas
from ltx2rt.stages.segments import SegmentFile
from ltx2rt.stages.sound import Sound
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.stage import Stage
from ltx2rt.stages.text import Text
from ltx2rt.stages.upsample import Upsample
from ltx2rt.text_files import NO_TEXT
from ltx2rt.weights.checkpoint import Checkpoint
from ltx2rt.weights.distilled import sign

R = TypeVar("R", bound="Request")
G = TypeVar("G", bound=Group)
NO_CHANGE: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Loras:
    """user: in the order given; distilled: what the pipeline merges last where it wants it, None if
    it has none; text: LoRAs that change the text encoder or its connectors; idle: distilled ones
    that flags name and that distilled weights do not take."""

    user: tuple[LoraSpec, ...] = ()
    distilled: LoraSpec | None = None
    text: tuple[LoraSpec, ...] = ()
    idle: tuple[LoraSpec, ...] = ()

    @property
    def extra(self) -> tuple[LoraSpec, ...]:
        """The distilled one, if there is any."""
        return (self.distilled,) if self.distilled else ()

    def of(self, stage: str) -> tuple[LoraSpec, ...]:
        return tuple(lora for lora in self.user if lora.stage in (None, stage))


@dataclass(frozen=True)
class Request:
    """One clip. A class derived from this one is a pipeline, a frozen dataclass that has the fields
    of its groups before its own. After `resolved`, no field that shapes the clip is None.

    groups: with the pipeline's defaults. about: help of flags that mean something particular here.
    name: of the pipeline; summary, example: for `--help`, a line and flags that show its use.
    task: the wish of a person who chooses it, on the server's page.
    scale: width and height of the first of two stages are those of the clip divided by it, or by
    that of the upsampler if it has another; 1: there is one stage. distilled: whether a distilled
    LoRA is merged: "needed", "optional" (unless the weights are distilled) or "unused". mirrored: as of `Inset`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    example: ClassVar[str] = ""
    task: ClassVar[str] = "Text to video"
    groups: ClassVar[tuple[Group, ...]] = ()
    about: ClassVar[Mapping[str, str]] = {}
    scale: ClassVar[int] = 1
    distilled: ClassVar[str] = "unused"
    mirrored: ClassVar[bool] = False

    if TYPE_CHECKING:  # the fields come from the groups

        def __init__(self, *texts: Any, **flags: Any): ...
        def __getattr__(self, name: str) -> Any: ...
        def __replace__(self: R, /, **flags: Any) -> R: ...

    def __init_subclass__(cls) -> None:
        assemble(cls, cls.groups, cls.about)

    @classmethod
    def has(cls, kind: type[Group]) -> bool:
        return any(isinstance(group, kind) for group in cls.groups)

    def __getitem__(self, kind: type[G]) -> G:
        """The group of that kind, with the request's values."""
        found = next(group for group in self.groups if isinstance(group, kind))
        return self._with_values(found)

    def _with_values(self, group: G) -> G:
        return replace(group, **{f.name: getattr(self, f.name) for f in fields(group)})

    def __iter__(self) -> Iterator[Group]:
        """Its groups, with the request's values."""
        return map(self._with_values, self.groups)

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        """The stages of the pipeline, in order. The request is resolved."""
        return self.in_two_passes(model, options, loras)

    def all_stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        """The stages of the run: of a clip in segments, those of each segment that is not there."""
        if not self.in_segments:
            return self.stages(model, options, loras)
        return self[Segments].stages(self, model, options, loras)

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

    def resolved(self: R, model: ModelConfig) -> R:
        """Check the request against the model and fill every default. Raises InputError."""
        self.check_model(model)
        self.check()
        for group in self.groups:
            self = replace(self, **self._with_values(group).restated(self, model))
        self = replace(self, **self.restated(model))
        for group in self.groups:
            self = replace(self, **self._with_values(group).resolved(self, model))
        return self

    def restated(self, model: ModelConfig) -> dict[str, Any]:
        """Fields to change like those of a group, after the groups'. Raises InputError."""
        return {}

    def unguided(self) -> Request | None:
        """The request in distilled steps, for distilled weights; None if it has no such form.
        No flag of guidance is given."""
        if not self.is_guided:
            return self
        return replace(self, guided=False) if self.has(ByWeights) else None

    def made_by(self, type_: type[R]) -> R:
        """The request of another pipeline, which reads all flags that are given."""
        names = [f.name for group in type_.groups for f in fields(group)]
        values = {name: getattr(self, name, None) for name in names}
        return type_(**{name: value for name, value in values.items() if value is not None})

    def remarks(self, model: ModelConfig) -> Iterator[str]:
        """Sentences for its user before a resolved request runs."""
        for group in self:
            yield from group.remarks(self, model)

    # --- what stages are made from ----------------------------------------------------------------

    @property
    def is_guided(self) -> bool:
        """Whether it has a guided stage."""
        return self.has(Scales) and getattr(self, "guided", None) is not False

    @property
    def takes_distilled(self) -> str:
        """`distilled` of this request: steps that are guided by choice are for dev weights, and
        unguided ones in place of guided ones for distilled weights."""
        if self.has(ByWeights) and not self.is_guided:
            return "optional"
        return "unused" if self.is_guided and self.distilled == "optional" else self.distilled

    @property
    def seeds(self) -> range:
        """One for each video. Of a resolved request."""
        assert self.seed is not None, "the request is not resolved"
        return range(self.seed, self.seed + self.num_videos)

    @property
    def negated(self) -> bool:
        """Whether the run reads the negative prompt."""
        return any(group.negates(self) for group in self)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The texts for the text encoder, in one batch: the prompt, then the negative one if a
        branch uses it."""
        return (self.positive, *([self.negative_prompt or ""] if self.negated else []))

    @property
    def whole_prompt(self) -> str:
        """The prompt as it is or was rewritten, without those by time."""
        return self.enhanced_prompt or self.prompt

    @property
    def positive(self) -> str:
        """The text that the clip follows."""
        whole = self.whole_prompt
        relay = self[PromptsByTime].relay(whole) if self.has(PromptsByTime) else None
        return relay.text if relay else whole

    @property
    def text(self) -> list[Stage]:
        """The stages that read the prompts, and choose the clip's length where the model is to."""
        return [
            Text(self.prompts),
            *([Duration(self.auto_duration, self.fps)] if self.auto_duration else []),
        ]

    @property
    def noise(self) -> Noise:
        prefix = self[Segments].prefix if self.has(Segments) else ""
        return Noise(tuple(self.seeds), self.noise_in, prefix)

    @property
    def files(self) -> list[Path]:
        """The files that it names."""
        return [path for f, path in named_files(self) if f.metadata["flag"].file != "folder"]

    @property
    def size_px(self) -> tuple[int, int]:
        """Height and width of the clip; 0 of one that has sound alone."""
        return (self.height, self.width) if self.has(Pixels) else (0, 0)

    @property
    def clip_frames(self) -> int:
        """Number of frames of the clip that is written. Of a resolved request."""
        return self[Segments].clip_frames(self) if self.in_segments else self.num_frames

    @property
    def clip_fps(self) -> Fraction:
        return self.fps

    @property
    def image_frames(self) -> int:
        """How many frames there are that an image can be given for."""
        return self.clip_frames if self.has(Segments) else self.num_frames

    @property
    def first_image(self) -> Path | None:
        """The image that prompt enhancement sees, if any."""
        seen = (image.path for image in getattr(self, "images", ()) if not image.latent)
        return next((path for path in seen if not is_exr(path)), None)

    @property
    def first_image_px(self) -> tuple[int, int] | None:
        """Width and height of the first image, from its header; None without one that is there, and
        with latents, which have a size. Raises InputError."""
        images = getattr(self, "images", ())
        if not images or any(image.latent for image in images) or not images[0].path.is_file():
            return None
        return image_px(images[0].path)

    @property
    def high_range(self) -> HighRange | None:
        """How the clip's files are, if it is in high dynamic range."""
        return self[Hdr].high_range if self.has(Hdr) else None

    @property
    def in_segments(self) -> bool:
        """Whether the clip is made in several, which are kept in a folder."""
        return self.has(Segments) and self[Segments].asked(self)

    @property
    def parts(self) -> list[SegmentFile]:
        """The files of its segments. Of a resolved request in segments."""
        return self[Segments].parts(self)

    @property
    def made(self) -> tuple[str, ...]:
        """Beginnings of names of noise that no stage draws any more."""
        return self[Segments].made(self) if self.in_segments else ()

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

    def geometry(self, model: ModelConfig, scale: Fraction | int = 1) -> Geometry:
        """The latent grid of the clip at 1/scale of its width and height, rounded up."""
        sides = (self.width, self.height) if self.has(Pixels) else (0, 0)
        unit = model.video_vae.space_factor * self.factor(model).numerator
        width, height = (int(-(-side // unit) * unit / Fraction(scale)) for side in sides)
        step, frames = model.video_vae.time_factor, self.seen_frames
        if self.has(SourceClip):
            frames = -(-(frames - 1) // step) * step + 1
        return Geometry.of(model, width, height, frames, self.fps)

    @property
    def seen_frames(self) -> int:
        """Number of frames that the model makes at once, of a longer clip or of all of it."""
        source = getattr(self, "source", None)
        if source and source.window:
            return len(source.window)
        return self.segment_frames if self.in_segments else self.num_frames

    @property
    def length_by_sound(self) -> bool:
        """Whether a file's sound, which has not been read, decides the length."""
        return False

    @property
    def heard(self) -> bool:
        """Whether the clip has sound: a silent file's, only if it is new. Of a resolved request."""
        source = getattr(self, "source", None)
        return self.audio and (source is None or source.info.has_sound or self.sound == "new")

    @property
    def keeps_sound(self) -> bool:
        """Whether the clip keeps sound of the given file; without sound of its own it reads none."""
        return self.audio and self.source.info.has_sound and self.sound in (None, "keep")

    def measured(self: R) -> R:
        """The request with a length that a file decides. Raises InputError."""
        for group in self:
            self = replace(self, **group.measured(self))
        return self

    def given_sound(self, model: ModelConfig) -> SourceSound | None:
        """The sound of a file that all of the clip is made for. Of a resolved request."""
        if not (self.has(SourceClip) and self.has(Segments) and self.keeps_sound):
            return None
        return self[SourceClip].sound(self, model, whole=True, sound=self.audio)

    def inset(self, model: ModelConfig, geometry: Geometry | None = None) -> Inset | None:
        """Place of the clip's pictures in those of the model, or of a stage at the size that is
        written; None if they have one size."""
        whole = (geometry or self.geometry(model)).size_px
        size = self.size_px if geometry else (self.height, self.width)
        given = self.has(SourceClip)
        return Inset(size, whole, not given, self.mirrored) if size != whole else None

    @property
    def guidance(self) -> np.ndarray:
        """f32[2, 4]: rows video and audio, columns cfg, stg, modality, rescale."""
        return self[Scales].scales if self.is_guided else NEUTRAL

    @property
    def schedule(self) -> np.ndarray:
        """f32[steps + 1], the noise levels of the first stage. Of a resolved request."""
        return shifted_sigmas(self.steps) if self.is_guided else DISTILLED_SIGMAS

    @property
    def guiding(self) -> dict[str, Any]:
        """Fields of the first stage if it is guided. Of a resolved request."""
        if not self.is_guided:
            return {}
        assert self.steps and self.stg_blocks is not None, "the request is not resolved"
        return {
            "guidance": self.guidance,
            "stg_blocks": self.stg_blocks,
            "plan": self[Skips].plan(self.steps) if self.has(Skips) else None,
            "interval": getattr(self, "guidance_interval", None),
        }

    def freshening(self, model: ModelConfig) -> dict[str, Any]:
        """Fields of the first stage of a new clip in distilled steps, which add fresh noise with
        LTX-2.5. Of a resolved request."""
        if self.is_guided or not self.has(ByWeights):
            return {}
        return {"sampler": model.release.samplers[0]}

    def denoise(
        self, name: str, geometry: Geometry, options: ModelOptions, sigmas: np.ndarray,
        loras: tuple[LoraSpec, ...],
        given: Sequence[Conditioning] = (), kind: type[Denoise] = Denoise, **more: Any,
    ) -> list[Stage]:  # fmt: skip
        """One denoising stage, after the encoding of what its groups and `given` condition it on.
        more: fields of `Denoise` in place of those of the groups; guidance: none by default."""
        fields: dict[str, Any] = {"guidance": NEUTRAL, "rule": options.cross_timestep_rule}
        own: tuple[Conditioning, ...] = ()
        for group in self:
            added = group.added(self, name, geometry)
            own += added.pop("given", ())
            fields |= added
        fields |= {**more, "given": (*own, *given)}
        before: list[Stage] = [GivenLatents(name, fields["given"])] if fields["given"] else []
        return [*before, kind(name, geometry, sigmas, loras, self.noise, **fields)]

    def denoise_once(
        self, geometry: Geometry, options: ModelOptions, loras: Loras,
        given: Sequence[Conditioning] = (), name: str = "stage1", level: float = 1.0, **more: Any,
    ) -> list[Stage]:  # fmt: skip
        """The only denoising stage, which makes the sound as well. level: of noise, from which it
        starts. more: as of `denoise`."""
        merged = (*loras.of("stage1"), *loras.extra)
        how: dict[str, Any] = {"sound": True, **self.guiding, **more}
        sigmas = from_level(self.schedule, level)
        return self.denoise(name, geometry, options, sigmas, merged, given, **how)

    def in_two_passes(
        self, model: ModelConfig, options: ModelOptions, loras: Loras,
        first: Mapping[str, Any] = NO_CHANGE, second: Mapping[str, Any] = NO_CHANGE,
        sound: bool = True, **both: Any,
    ) -> list[Stage]:  # fmt: skip
        """All stages of a clip that is denoised at the first stage's size, upsampled, and denoised
        at full size. User LoRAs are merged in their order, the distilled one last, into dev weights
        in stage 2 alone where they are guided in stage 1. first, second: arguments of `denoise` in
        place of these; both: of both. sound: whether there is any to decode."""
        assert loras.distilled or self.takes_distilled != "needed", "the request is not resolved"
        half, full = self.geometry(model, self.factor(model)), self.geometry(model)
        early = loras.extra if self.takes_distilled == "optional" else ()
        one: Any = {"sigmas": self.schedule, "loras": (*loras.of("stage1"), *early)}
        one |= self.guiding | self.freshening(model)
        two: Any = {"sigmas": STAGE2_SIGMAS, "loras": (*loras.of("stage2"), *loras.extra)}
        return [
            *self.text,
            *self.denoise("stage1", half, options, **{**one, **both, **first}),
            Upsample(half, self.num_videos, self.factor(model)),
            *self.denoise("stage2", full, options, **{**two, **both, **second}),
            *self.decoded(full, model, options, sound),
        ]

    def decoded(
        self, geometry: Geometry, model: ModelConfig, options: ModelOptions, sound: bool = True
    ) -> list[Stage]:
        """The stages that make the clip of the last latents, and of the sound that a stage kept.
        sound: whether there is any to decode."""
        heard = sound and self.audio
        how = model, options.vae_tiling, self.noise
        draft = getattr(self, "quality", None) == "draft" and model.video_vae.decoder
        asked = options.video_decoder or ("conv" if draft else None)
        frames = decoding(asked, geometry, *how)
        inset = self.inset(model, geometry)
        made = pixel_frames(geometry.frames, geometry.time_factor)
        over = made - self.seen_frames if self.has(SourceClip) else 0
        stages: list[Stage] = [Sound(geometry, self.num_videos)] if heard else []
        return [*stages, frames, *([Cut(made - over, inset)] if inset or over else [])]


def samples_dev(type_: type[Request]) -> bool:
    """Whether the pipeline, if its user names it, is for dev weights."""
    return type_.distilled != "optional" and not type_.has(ByWeights)


def wanted_kind(request: Request, named: bool) -> str:
    """The kind of the weights to fetch for a request. named: the user names its pipeline."""
    guided = getattr(request, "guided", None) and not request.has(ByWeights)
    guided = guided or (request.is_guided and (guiding(request) or request.unguided() is None))
    return "dev" if guided or (named and samples_dev(type(request))) else "distilled"


def is_distilled(options: ModelOptions, checkpoint: Checkpoint) -> bool:
    """Whether the weights are known to be distilled."""
    known = sign(checkpoint, options.assume)
    return known is not None and known.kind == "distilled"


def fitted(request: Request, options: ModelOptions, checkpoint: Checkpoint) -> Request:
    """The request resolved for the checkpoint, and in distilled steps where its weights are
    distilled. Raises InputError, also for guidance of such weights."""
    if is_distilled(options, checkpoint):
        request = _unguided(request, options, checkpoint)
    return learnt(request, options, checkpoint).resolved(checkpoint.config)


def learnt(request: Request, options: ModelOptions, checkpoint: Checkpoint) -> Request:
    """The request with the LoRAs that its pipeline cannot do without. Raises InputError."""
    if not request.has(Learnt):
        return request
    return replace(request, **request[Learnt].from_options(request, options, checkpoint))


def _unguided(request: Request, options: ModelOptions, checkpoint: Checkpoint) -> Request:
    """Raises InputError for a request that needs dev weights."""
    flag = "--guided" if getattr(request, "guided", None) else ""
    flag = flag or (guiding(request) if request.is_guided else "")
    found = None if flag else request.unguided()
    if found is None:
        where, dev = checkpoint.source("transformer").where, checkpoint.config.release.dev
        known = sign(checkpoint, options.assume)
        assert known is not None, "the weights are known to be distilled"
        asked = f"{flag}: for guided steps" if flag else f"--pipeline: {request.name} is guided"
        raise InputError(
            f"{asked}, but {where} is distilled ({known.how}), whose steps are fixed and unguided; "
            f"leave it out, or pass dev weights ({dev}; --assume dev says that these are dev)"
        )
    return found


def distilled_lora(
    request: Request, options: ModelOptions, checkpoint: Checkpoint
) -> LoraSpec | None:
    """The distilled LoRA of a request that is `fitted`.

    Pipelines of distilled steps ("optional") merge it into dev weights, and into weights of unknown
    kind if one is near; a distilled transformer near dev weights takes its place, also where one is
    "needed" and none is near. Raises InputError where one is needed and there is none, or several fit.
    """
    asked, known = options.distilled_lora, sign(checkpoint, options.assume)
    takes, kind = request.takes_distilled, known.kind if known else None
    if takes == "unused":
        return None
    other = checkpoint.distilled and DistilledWeights(checkpoint.distilled.where)
    merges = takes == "needed" and asked is None and checkpoint.fitting_loras
    if other and asked in (None, NO_LORA) and not merges:
        return other
    if asked == NO_LORA:
        if takes == "needed":
            raise InputError(
                f"--distilled-lora: none, but the {request.name} pipeline's second stage needs one"
            )
        if known and kind == "dev":
            where = checkpoint.source("transformer").where
            raise InputError(
                f"--distilled-lora: none, but {where} is dev ({known.how}), and the distilled steps "
                f"of {request.name} need one; leave the flag out, or pass --assume distilled"
            )
        return None
    if asked is not None:
        return None if kind == "distilled" else asked
    unknown = kind is None and not checkpoint.fitting_loras
    if takes == "optional" and (kind == "distilled" or unknown):
        return None
    try:
        return LoraSpec(checkpoint.distilled_lora())
    except InputError as error:
        if takes == "optional" and known:
            where = checkpoint.source("transformer").where
            needs = f"{where} is dev ({known.how}), and the distilled steps of {request.name} need"
            raise InputError(f"{error} ({needs} it; --assume distilled overrules that)") from error
        raise
