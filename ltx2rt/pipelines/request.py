"""One clip as its user asks for it: the flags that every pipeline shares, their legal ranges, and a
pipeline's duties.

A pipeline is a frozen dataclass derived from `Request` (or `Guided`): its fields are its flags with
their defaults, its `stages` are what it does. `check` validates what needs no file of the model;
`resolved` fills the model's defaults and validates the rest against its configuration. Both come
before any weight is read.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from fractions import Fraction
from operator import index
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import check_bounds, flag, spelling
from ltx2rt.media.hdr import SPACES, TRANSFERS, HighRange, is_exr
from ltx2rt.models.geometry import Geometry
from ltx2rt.models.guided_step import Branches
from ltx2rt.models.step_plan import StepPlan
from ltx2rt.pipelines import step_plans
from ltx2rt.pipelines.step_plans import PlanFile, parse_interval, parse_step_plan
from ltx2rt.session.options import (
    NO_LORA,
    LoraSpec,
    ModelOptions,
    as_number,
    existing,
    existing_file,
    from_tuple,
    parse_number,
    plain,
)
from ltx2rt.stages.conditioning import (
    Conditioning,
    Image,
    ImageSpec,
    LatentImage,
    ReferenceSpec,
    Slot,
    slot_frames,
)
from ltx2rt.stages.denoise import Denoise, Noise
from ltx2rt.stages.duration import NO_LENGTH, Duration, chooses_length, longest
from ltx2rt.stages.frames import decoding, video_decoder
from ltx2rt.stages.given import GivenLatents
from ltx2rt.stages.relay import PromptSpan, Relay, parse_span
from ltx2rt.stages.sound import Sound
from ltx2rt.stages.stage import Stage
from ltx2rt.stages.text import Text
from ltx2rt.weights.checkpoint import Checkpoint
from ltx2rt.weights.distilled import sign

SEED_LIMIT = 2**63
MAX_FPS_TERM = 10**7  # FFmpeg counts time in 32-bit fractions
MAX_FPS, MIN_FPS = 240, 1
MAX_SIDE_PX = 16384  # H.264's
MAX_STEPS = 10_000
DEFAULT_FRAMES = 121
MAX_FRAMES = 10**9  # what floats still count; the model has a limit of its own
MAX_KEYFRAMES = 64
MAX_VIDEOS = 128  # in one batch; each takes a plan 0.1 s
NEUTRAL = np.array([[1, 0, 1, 0], [1, 0, 1, 0]], np.float32)  # the conditional branch alone

R = TypeVar("R", bound="Request")


def parse_fps(text: str | float | Fraction) -> Fraction:
    """23.976, 29.97 and 59.94 mean x*1000/1001 of the next integer; anything else is the decimal or
    fraction given."""
    ntsc, text = {"23.976": 24, "29.97": 30, "59.94": 60}, str(text)
    try:
        if len(text) > 80 or "e" in text.lower():  # 1e999999999 has as many digits
            raise ValueError
        fps = Fraction(ntsc[text] * 1000, 1001) if text in ntsc else Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise InputError(
            f"--fps: {text[:80]!r} is no number; give one such as 24, 23.976 or 30000/1001"
        ) from None
    if fps <= 0:
        raise InputError(f"--fps: {text[:80]}, expected {MIN_FPS} to {MAX_FPS}")
    if max(fps.numerator, fps.denominator) >= MAX_FPS_TERM:
        raise InputError(
            f"--fps: {text[:80]} has too many digits for a container; write a fraction such as "
            "24000/1001"
        )
    return fps


def parse_image(text: str | tuple | ImageSpec) -> ImageSpec:
    """FILE:FRAME[:STRENGTH], read from the right, or a tuple of those; FILE may be latent:K."""
    if isinstance(text, ImageSpec):
        return text
    if not isinstance(text, str):
        if len(text) < 2:
            raise ValueError
        return ImageSpec(*from_tuple(text, Path, index, as_number))
    match = re.fullmatch(
        r"(?P<path>latent:\d{1,4}|.+?):(?P<frame>[+-]?\d{1,18})(:(?P<strength>[^:]+))?",
        text,
        re.DOTALL,
    )
    strength = parse_number(match["strength"] or "1") if match else None
    if match is None or strength is None:
        raise InputError(
            f"--image: {text!r}, expected FILE:FRAME or FILE:FRAME:STRENGTH, such as cat.png:0:0.8"
        )
    return ImageSpec(Path(match["path"]), int(match["frame"]), strength)


def parse_reference(text: str | tuple | Path | ReferenceSpec) -> ReferenceSpec:
    """FILE[:STRENGTH], read from the right, or a tuple of those."""
    if isinstance(text, ReferenceSpec):
        return text
    if not isinstance(text, str):
        return ReferenceSpec(
            *from_tuple(text if isinstance(text, (tuple, list)) else (text,), Path, as_number)
        )
    head, _, last = text.rpartition(":")
    strength = parse_number(last) if head else None
    return ReferenceSpec(Path(text)) if strength is None else ReferenceSpec(Path(head), strength)


def check_reference(flag: str, reference: ReferenceSpec) -> None:
    """Raises InputError for a strength out of its bounds."""
    if not 0 <= reference.strength <= 1:
        raise InputError(
            f"{flag}: strength {reference.strength:g} of {reference.path}, expected 0 to 1"
        )


def parse_blocks(text: str | Sequence[int], name: str = "--stg-blocks") -> tuple[int, ...]:
    """A comma-separated list of block numbers, or the numbers. name: of the flag."""
    try:
        if not isinstance(text, str):
            return tuple(index(part) for part in text)
        return tuple(int(part) for part in text.split(",") if part.strip())
    except (TypeError, ValueError):
        raise InputError(
            f"{name}: {str(text)[:80]!r}, expected block numbers such as 28 or 14,19"
        ) from None


@dataclass(frozen=True)
class Loras:
    """user: in the order given; distilled: what the pipeline merges last where it wants it, None if
    it has none; text: LoRAs that change the text encoder or its connectors."""

    user: tuple[LoraSpec, ...] = ()
    distilled: LoraSpec | None = None
    text: tuple[LoraSpec, ...] = ()

    def of(self, stage: str) -> tuple[LoraSpec, ...]:
        return tuple(lora for lora in self.user if lora.stage in (None, stage))


@dataclass(frozen=True)
class Request:
    """The clip flags of every pipeline. After `resolved`, no field that shapes the clip is None.

    name: of the pipeline; summary, example: for `--help`, a line and flags that show its use.
    scale: width and height of the first stage are those of the clip divided by it, or by that of
    the upsampler if it has another. distilled: whether a distilled LoRA is merged: "needed",
    "optional" (unless the weights are distilled) or "unused".
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    example: ClassVar[str] = ""
    scale: ClassVar[int] = 1
    num_stages: ClassVar[int] = 1
    distilled: ClassVar[str] = "unused"

    prompt: str = flag(MISSING, "text that describes the video and its sound", group="clip")
    num_frames: int = flag(
        None,
        "number of frames, 8k+1 and at most 20 s (default: 121; LTX-2.5: chosen by the prompt)",
        int,
        group="clip",
        most=MAX_FRAMES,
    )
    fps: Fraction = flag(
        Fraction(24),
        "frames per second; 23.976, 29.97 and 59.94 mean x*1000/1001",
        parse_fps,
        group="clip",
        metavar="RATE",
        least=MIN_FPS,
        most=MAX_FPS,
    )
    seed: int | None = flag(
        None,
        "random seed (default: a random one, which is reported)",
        int,
        group="sampling",
        least=0,
    )
    num_videos: int = flag(
        1,
        "number of videos, with seeds N, N+1, ..., each in its own FILE-SEED.mp4",
        group="clip",
        least=1,
        most=MAX_VIDEOS,
    )
    noise_in: Path | None = flag(
        None,
        "safetensors file with the noise to use, in place of the seed's",
        Path,
        group="sampling",
        metavar="FILE",
    )
    auto_duration: tuple[float, ...] | None = flag(
        None,
        "range of lengths to choose from without --num-frames, in seconds; LTX-2.5 (default: 1 20)",
        float,
        group="clip",
        metavar=("MIN", "MAX"),
        repeat=True,
    )
    enhance_prompt: bool = flag(
        False,
        "rewrite the prompt with the text encoder's Gemma 3 first, or with --prompt-enhancer",
        group="clip",
    )
    enhance_seed: int | None = flag(
        None,
        "seed for --enhance-prompt (default: same as --seed)",
        int,
        group="clip",
        least=0,
        most=SEED_LIMIT - 1,
    )
    enhanced_prompt: str | None = flag(
        None,
        "text that --enhance-prompt wrote in an earlier run",
        group="clip",
    )

    prompt_enhancer: Path | None = flag(
        None,
        "folder of a Gemma 3 or Gemma 4 that --enhance-prompt takes in place of the text encoder",
        Path,
        group="clip",
        metavar="DIR",
    )

    def stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        """The stages of the pipeline, in order. The request is resolved."""
        raise NotImplementedError(f"pipeline {self.name} has no stages")

    def all_stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        """Those of the run: the stages, or of a clip in segments those of each."""
        return self.stages(model, options, loras)

    @property
    def in_segments(self) -> bool:
        """Whether the clip is made in several, which are kept in a folder."""
        return False

    @property
    def high_range(self) -> HighRange | None:
        """How the clip's files are, if it is in high dynamic range."""
        return None

    @property
    def made(self) -> tuple[str, ...]:
        """Beginnings of names of noise that no stage draws any more."""
        return ()

    def kept_in(self: R, folder: Path) -> R:
        """The request with the folder of its segments, where it has any."""
        return self

    # --- checks -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what is wrong whatever the model is. Raises InputError; reads no file."""
        if not self.prompt.strip():
            raise InputError("--prompt: the prompt is empty; say what the clip shows")
        check_bounds(self)
        if self.seed is not None and self.seed > SEED_LIMIT - self.num_videos:
            raise InputError(f"--seed: {self.seed}, expected below 2^63, --num-videos included")
        if self.prompt_enhancer and not self.enhance_prompt:
            raise InputError("--prompt-enhancer: writes nothing without --enhance-prompt; add it")
        window = self.auto_duration
        if window is not None and not (len(window) == 2 and 0 < window[0] <= window[1]):
            raise InputError(
                f"--auto-duration: {' '.join(f'{s:g}' for s in window)}, expected two numbers of "
                "seconds, MIN MAX"
            )
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and not abs(value) < 1e6:
                raise InputError(f"{spelling(f)}: {value:g}, expected a finite number below 1e6")
            if isinstance(value, str) and value != value.encode(errors="ignore").decode():
                raise InputError(
                    f"{spelling(f)}: holds characters that are no text (lone surrogates); type it "
                    "again"
                )

    def check_files(self) -> None:
        """Refuse named files that are not there. Raises InputError."""
        if self.prompt_enhancer:
            existing("--prompt-enhancer", self.prompt_enhancer)
        if self.noise_in:
            existing_file("--noise-in", self.noise_in)

    def check_options(self, options: ModelOptions) -> None:
        """Refuse model flags that do not go with this clip. Raises InputError."""
        if self.num_videos % (data := options.mesh.get("data", 1)):
            raise InputError(
                f"--num-videos: {self.num_videos} do not divide over data={data}; choose a "
                "multiple of it"
            )
        if self.distilled == "needed" and options.distilled_lora == NO_LORA:
            raise InputError(
                f"--distilled-lora: none, but the {self.name} pipeline's second stage needs one"
            )
        for lora in options.loras:
            if lora.stage == "stage2" and self.num_stages == 1:
                raise InputError(
                    f"--lora: {lora.path} is for stage 2, and the {self.name} pipeline has none"
                )

    @classmethod
    def check_model(cls, model: ModelConfig) -> None:
        """Refuse a model that no request of the pipeline goes with. Raises InputError."""

    def resolved(self: R, model: ModelConfig) -> R:
        """Check the request against the model and fill every default, the seed included. Raises
        InputError."""
        self.check_model(model)
        self.check()
        self, step = self._lasting(model), model.video_vae.time_factor
        limit_s = min(model.transformer.rope_max_pos[0], model.transformer.audio_rope_max_pos)
        if (self.num_frames - 1) / self.fps > limit_s:
            longest_clip = int(limit_s * self.fps) // step * step + 1
            length_s = float((self.num_frames - 1) / self.fps)
            raise InputError(
                f"--num-frames: {self.num_frames} frames at {float(self.fps):g} fps are "
                f"{length_s:.2f} s, the model's limit is {limit_s} s; at most {longest_clip} "
                "frames at this rate"
            )
        return replace(self, seed=draw_seed() if self.seed is None else self.seed)

    def _lasting(self: R, model: ModelConfig) -> R:
        """With a number of frames: the longest, and a window, where the model is to choose.

        Of a request that has that number and a window already, the same. Raises InputError.
        """
        window, most = longest(self.auto_duration, self.fps, model)
        if self.num_frames is not None:
            chosen = self.auto_duration is not None and self.num_frames == most
            return replace(self, auto_duration=window if chosen else None)
        if chooses_length(model):
            return replace(self, num_frames=most, auto_duration=window)
        if self.auto_duration is None and not model.release.chooses_length:
            return replace(self, num_frames=DEFAULT_FRAMES)
        raise InputError(NO_LENGTH)

    def remarks(self, model: ModelConfig) -> Iterator[str]:
        """Sentences for its user before a resolved request runs."""
        return iter(())

    # --- what stages are made from ----------------------------------------------------------------

    @property
    def seeds(self) -> range:
        """One for each video. Of a resolved request."""
        assert self.seed is not None, "the request is not resolved"
        return range(self.seed, self.seed + self.num_videos)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The texts for the text encoder, in one batch: the prompt, then the negative one if a
        branch uses it."""
        return (self.positive,)

    @property
    def positive(self) -> str:
        """The text that the clip follows."""
        return self.enhanced_prompt or self.prompt

    @property
    def text(self) -> list[Stage]:
        """The stages that read the prompts, and choose the clip's length where the model is to."""
        return [
            Text(self.prompts),
            *([Duration(self.auto_duration, self.fps)] if self.auto_duration else []),
        ]

    @property
    def noise(self) -> Noise:
        return Noise(tuple(self.seeds), self.noise_in)

    @property
    def files(self) -> list[Path]:
        """The files that it names."""
        return [path for path in (self.noise_in,) if path]

    @property
    def size_px(self) -> tuple[int, int]:
        """Height and width of the clip; 0 of one that has sound alone."""
        return 0, 0

    @property
    def clip_frames(self) -> int:
        """Number of frames of the clip that is written."""
        return self.num_frames

    @property
    def clip_fps(self) -> Fraction:
        return self.fps

    @property
    def first_image(self) -> Path | None:
        """The image that prompt enhancement sees, if any."""
        return None

    def settings(self, path: Any = str) -> dict[str, Any]:
        """Every setting as JSON-able values: what the MP4's metadata and the report carry."""
        return {"pipeline": self.name} | {
            f.name: plain(getattr(self, f.name), path) for f in fields(self)
        }


@dataclass(frozen=True)
class VideoRequest(Request):
    """The clip flags of pipelines that make pictures.

    append_images: whether an image at frame 0 is a guide beside the first frame, as every later one
    is, and not the first frame itself. least_images: that have to be given.
    """

    append_images: ClassVar[bool] = False
    least_images: ClassVar[int] = 0

    width: int = flag(768, "width of the video, in pixels", group="clip", most=MAX_SIDE_PX)
    height: int = flag(512, "height of the video, in pixels", group="clip", most=MAX_SIDE_PX)
    images: tuple[ImageSpec, ...] = flag(
        (),
        "images that frames follow, strength 1.0 unless given; frame 0 is the first",
        parse_image,
        group="conditioning",
        name="--image",
        metavar="FILE:FRAME[:STRENGTH]",
        repeat=True,
        keyword="image",
    )
    latents_in: Path | None = flag(
        None,
        "safetensors file with image.0, image.1, ..., latents for --image "
        "latent:K:FRAME[:STRENGTH]",
        Path,
        group="conditioning",
        metavar="FILE",
    )
    image_crf: int | None = flag(
        None,
        "H.264 compression of images before use, 0 for none (default: 33; LTX-2.5: 18)",
        int,
        group="conditioning",
        least=0,
        most=51,
    )
    prompt_at: tuple[PromptSpan, ...] = flag(
        (),
        "texts beside --prompt, each for a time range in seconds or in %",
        parse_span,
        group="clip",
        metavar="START:END=TEXT",
        repeat=True,
    )
    prompt_softness: float = flag(
        0.001,
        "softness of the ranges of --prompt-at, 1 for no bounds",
        group="clip",
        above=0,
        most=1,
    )
    hdr: str | None = flag(
        None,
        "make the clip in high dynamic range: space of images and files, which are EXR; *.mp4 is HLG",
        group="output",
        choices=SPACES,
    )
    hdr_transfer: str = flag(
        TRANSFERS[0],
        "curve of *.mp4 and *.mov of --hdr: hlg, or pq, where 1 is 203 cd/m2",
        group="output",
        choices=TRANSFERS,
    )
    audio: bool = flag(True, "write the video without sound", group="output", name="--no-audio")
    num_generated_keyframes: int = flag(
        0,
        "number of keyframes to generate beside the clip in stage 1; LTX-2.5",
        group="sampling",
        metavar="K",
        least=0,
        most=MAX_KEYFRAMES,
    )

    def check(self) -> None:
        super().check()
        if len(self.images) < self.least_images:
            raise InputError(
                f"--image: {len(self.images)} given, the {self.name} pipeline goes between at "
                f"least {self.least_images}"
            )
        for image in self.images:
            if not 0 <= image.strength <= 1:
                raise InputError(
                    f"--image: strength {image.strength} of {image.path}, expected 0 to 1"
                )
        latent = [image.path for image in self.images if image.latent]
        if latent and self.latents_in is None:
            raise InputError(
                f"--image: {latent[0]} is a tensor of --latents-in, which is not given; give it, or "
                "name an image"
            )
        if self.latents_in is not None and not latent:
            raise InputError("--latents-in: no --image latent:K:FRAME reads it; leave it out")
        if self.hdr_transfer != TRANSFERS[0] and not self.hdr:
            raise InputError(
                f"--hdr-transfer: {self.hdr_transfer}, but the clip is not in high dynamic range; "
                "add --hdr"
            )
        for image in self.images:
            if not image.latent and is_exr(image.path) != bool(self.hdr):
                wrong = "is no EXR file" if self.hdr else "is an EXR file"
                advice = "convert it, or leave --hdr out" if self.hdr else "add --hdr"
                raise InputError(f"--image: {image.path} {wrong}; {advice}")
        frames = [image.frame for image in self.images]
        if twice := [frame for frame in frames if frames.count(frame) > 1]:
            raise InputError(f"--image: two images at frame {twice[0]}; give each frame one image")

    def check_files(self) -> None:
        super().check_files()
        for image in self.images:
            if not image.latent:
                existing_file("--image", image.path)
        if self.latents_in is not None:
            existing_file("--latents-in", self.latents_in)

    def resolved(self: Any, model: ModelConfig) -> Any:
        unit, step = (
            model.video_vae.space_factor * self.factor(model).numerator,
            model.video_vae.time_factor,
        )
        for side, value in (("--width", self.width), ("--height", self.height)):
            check_step(side, value, unit, 0, "px", f"divisible by {unit} ({self.name})")
        full = super().resolved(model)
        for image in self.images:
            if not 0 <= image.frame < full.image_frames:
                last = full.image_frames - 1
                raise InputError(
                    f"--image: frame {image.frame} of {image.path}, but the clip has frames 0 to "
                    f"{last}"
                )
        if self.num_generated_keyframes and not model.transformer.keyframe_vector:
            raise InputError(
                f"--num-generated-keyframes: {self.num_generated_keyframes}, but "
                f"LTX-{model.release.name} has no vector for keyframes; leave it out, or pass a "
                "model of LTX-2.5"
            )
        check_step("--num-frames", full.num_frames, step, 1, "frames", f"{step}*k + 1")
        for span in full.prompt_at:
            span.check(float(full.num_frames / full.fps))
        return replace(
            full, image_crf=model.image_crf if self.image_crf is None else self.image_crf
        )

    @property
    def files(self) -> list[Path]:
        latents = [self.latents_in] if self.latents_in else []
        return [i.path for i in self.images if not i.latent] + latents + super().files

    @property
    def size_px(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def relay(self) -> Relay | None:
        """The prompts by time, if there are any."""
        spans = self.prompt_at
        return Relay(super().positive, spans, self.prompt_softness) if spans else None

    @property
    def positive(self) -> str:
        return self.relay.text if self.relay else super().positive

    def settings(self, path: Any = str) -> dict[str, Any]:
        found = super().settings(path)
        return found | {"prompt_at": [str(span) for span in self.prompt_at]}

    @property
    def image_frames(self) -> int:
        """How many frames there are that an image can be given for."""
        return self.num_frames

    @property
    def first_image(self) -> Path | None:
        seen = (image.path for image in self.images if not image.latent)
        return next((path for path in seen if not is_exr(path)), None)

    @property
    def high_range(self) -> HighRange | None:
        return HighRange(self.hdr, transfer=self.hdr_transfer) if self.hdr else None

    def factor(self, model: ModelConfig) -> Fraction:
        """By how much the clip is wider and higher than its first stage: what the spatial upsampler
        multiplies by."""
        found = model.upsampler
        return (
            found.scale if self.scale > 1 and found and not found.temporal else Fraction(self.scale)
        )

    def geometry(self, model: ModelConfig, scale: Fraction | int = 1) -> Geometry:
        """The latent grid of the clip at 1/scale of its width and height."""
        width, height = (int(side / Fraction(scale)) for side in (self.width, self.height))
        return Geometry.of(model, width, height, self.num_frames, self.fps)

    def denoise(
        self, name: str, geometry: Geometry, options: ModelOptions, sigmas: np.ndarray,
        loras: tuple[LoraSpec, ...],
        given: Sequence[Conditioning] = (), **more: Any,
    ) -> list[Stage]:  # fmt: skip
        """One denoising stage, after the encoding of the images at its size, and of what else is
        given, if any."""
        images = [
            LatentImage(spec, geometry, self.latents_in, name, self.append_images)
            if spec.latent and self.latents_in
            else Image(spec, geometry, self.image_crf or 0, self.append_images, self.hdr)
            for spec in self.images
        ]
        slots = (
            slot_frames(self.num_frames, self.num_generated_keyframes) if name == "stage1" else ()
        )
        given, rule = (
            (*images, *(Slot(frame, geometry) for frame in slots), *given),
            options.cross_timestep_rule,
        )
        before: list[Stage] = [GivenLatents(name, given)] if given else []
        return [
            *before,
            Denoise(
                name,
                geometry,
                sigmas,
                loras,
                self.noise,
                given=given,
                rule=rule,
                relay=self.relay,
                **more,
            ),
        ]

    def decoded(self, geometry: Geometry, model: ModelConfig, options: ModelOptions) -> list[Stage]:
        """The stages that make the clip of the last latents, and of the sound that a stage kept."""
        sound: list[Stage] = [Sound(geometry, self.num_videos)] if self.audio else []
        decoder = video_decoder(model, options.video_decoder)
        return [*sound, decoding(decoder, geometry, model, options.vae_tiling, self.noise)]


@dataclass(frozen=True)
class Guided(VideoRequest):
    """The flags of pipelines with a guided stage."""

    negative_prompt: str | None = flag(
        None, "text that describes what to avoid (default: the model's)", group="guidance"
    )
    steps: int | None = flag(
        None,
        "denoising steps of the guided stage (default: 40 for LTX-2.0, else 30)",
        int,
        group="sampling",
        least=1,
        most=MAX_STEPS,
    )
    step_plan: str | PlanFile | None = flag(
        None,
        "steps to evaluate: a list such as 0,4,8,9, or a JSON file of plans",
        parse_step_plan,
        group="sampling",
        metavar="PLAN",
    )
    skip_step: int | None = flag(
        None,
        "steps of the guided stage to leave out after each that is evaluated, 0 for none",
        int,
        group="sampling",
        least=0,
        most=MAX_STEPS,
    )
    video_skip_step: int | None = flag(
        None,
        "steps to leave out after each that is evaluated for video (default: 0)",
        int,
        group="sampling",
        least=0,
        most=MAX_STEPS,
    )
    audio_skip_step: int | None = flag(
        None,
        "steps to leave out after each that is evaluated for sound (default: 0)",
        int,
        group="sampling",
        least=0,
        most=MAX_STEPS,
    )
    guidance_interval: tuple[float, float] | None = flag(
        None,
        "part of the steps that are guided, as shares of them (default: 0 1, all)",
        parse_interval,
        group="guidance",
        metavar=("START", "STOP"),
    )
    video_cfg: float = flag(
        3.0,
        "scale of classifier-free guidance for video, 1 for none",
        group="guidance",
    )
    audio_cfg: float = flag(
        7.0,
        "scale of classifier-free guidance for sound, 1 for none",
        group="guidance",
    )
    video_stg: float = flag(
        1.0,
        "scale of spatio-temporal guidance (STG) for video, 0 for none",
        group="guidance",
    )
    audio_stg: float = flag(
        1.0,
        "scale of spatio-temporal guidance (STG) for sound, 0 for none",
        group="guidance",
    )
    video_modality: float = flag(
        3.0,
        "scale of guidance by the sound for video, 1 for none",
        group="guidance",
    )
    audio_modality: float = flag(
        3.0,
        "scale of guidance by the video for sound, 1 for none",
        group="guidance",
    )
    video_rescale: float = flag(
        0.7,
        "rescaling of guided video to its unguided spread, 0 for none",
        group="guidance",
    )
    audio_rescale: float = flag(
        0.7,
        "rescaling of guided sound to its unguided spread, 0 for none",
        group="guidance",
    )
    stg_blocks: tuple[int, ...] | None = flag(
        None,
        "transformer blocks that STG skips, such as 14,19 (default: 29 for LTX-2.0, else 28)",
        parse_blocks,
        group="guidance",
        metavar="LIST",
    )

    @property
    def guidance(self) -> np.ndarray:
        """f32[2, 4]: rows video and audio, columns cfg, stg, modality, rescale."""
        names = ("cfg", "stg", "modality", "rescale")
        rows = [[getattr(self, f"{m}_{name}") for name in names] for m in ("video", "audio")]
        return np.array(rows, np.float32)

    @property
    def prompts(self) -> tuple[str, ...]:
        negative = (self.negative_prompt or "",) if Branches.of(self.guidance).uncond else ()
        return (self.positive, *negative)

    def check(self) -> None:
        super().check()
        step_plans.check(self)

    def check_files(self) -> None:
        super().check_files()
        step_plans.check_files(self)

    @property
    def files(self) -> list[Path]:
        return [*super().files, *step_plans.files(self)]

    @property
    def plan(self) -> StepPlan | None:
        """Which steps of the guided stage are evaluated; None for all. Of a resolved request."""
        return step_plans.plan_of(self)

    def resolved(self: Any, model: ModelConfig) -> Any:
        full = super().resolved(model)
        negative = (
            model.release.negative_prompt if self.negative_prompt is None else self.negative_prompt
        )
        steps = self.steps or self.default_steps(model)
        blocks = stg_blocks(model, self.stg_blocks, bool(self.video_stg or self.audio_stg))
        return step_plans.resolved(
            replace(full, negative_prompt=negative, steps=steps, stg_blocks=blocks)
        )

    def default_steps(self, model: ModelConfig) -> int:
        return model.release.steps


def stg_blocks(model: ModelConfig, given: tuple[int, ...] | None, used: bool) -> tuple[int, ...]:
    """The given ones, else the model's. used: whether any scale needs them. Raises InputError."""
    num_layers = model.transformer.num_layers
    if given is None:
        return model.release.stg_blocks(num_layers)
    if given == () and used:
        raise InputError(
            "--stg-blocks: no block is given; name one, or set --video-stg 0 --audio-stg 0"
        )
    for block in given:
        if not 0 <= block < num_layers:
            raise InputError(
                f"--stg-blocks: block {block}, but the model has blocks 0 to {num_layers - 1}"
            )
    return given


def draw_seed() -> int:
    return secrets.randbelow(2**32)


def check_step(name: str, value: int, step: int, offset: int, unit: str, rule: str) -> None:
    """Refuse a value that is not step*k + offset and at least step (offset 0) or 1, naming the two
    nearest."""
    lowest = offset or step
    if value >= lowest and (value - offset) % step == 0:
        return
    below = (value - offset) // step * step + offset
    nearest = f"{below} and {below + step}" if below >= lowest else f"{lowest} and {lowest + step}"
    raise InputError(f"{name}: {value}, expected {rule}; the nearest are {nearest} {unit}")


def distilled_lora(
    request: Request | type[Request], options: ModelOptions, checkpoint: Checkpoint
) -> LoraSpec | None:
    """The distilled LoRA of a run whose options are checked.

    Pipelines of distilled steps ("optional") merge it into dev weights, and into weights of unknown
    kind if one is near. Raises InputError where one is needed and there is none, or several fit,
    and where the checkpoint is distilled and the pipeline samples dev weights.
    """
    asked, known = options.distilled_lora, sign(checkpoint, options.assume)
    where, kind = checkpoint.source("transformer").where, known.kind if known else None
    if known and kind == "distilled" and request.distilled in ("needed", "unused"):
        guided = getattr(request, "guided", None) is True
        advice = "leave --guided out" if guided else "use --pipeline distilled"
        raise InputError(
            f"--model: {where} is distilled ({known.how}); {request.name} samples dev weights and "
            f"would leave grain; {advice}, or pass --assume dev"
        )
    if request.distilled == "unused":
        return None
    if request.distilled == "optional" and known and kind == "dev" and asked == NO_LORA:
        raise InputError(
            f"--distilled-lora: none, but {where} is dev ({known.how}), and the distilled steps of "
            f"{request.name} need one; leave the flag out, or pass --assume distilled"
        )
    if request.distilled == "optional" and asked == NO_LORA:
        return None
    if asked is not None:
        return asked
    unknown = kind is None and not checkpoint.fitting_loras()
    if request.distilled == "optional" and (kind == "distilled" or unknown):
        return None
    try:
        return LoraSpec(checkpoint.distilled_lora())
    except InputError as error:
        if request.distilled == "optional" and known:
            needs = f"{where} is dev ({known.how}), and the distilled steps of {request.name} need"
            raise InputError(f"{error} ({needs} it; --assume distilled overrules that)") from error
        raise
