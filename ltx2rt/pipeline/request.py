"""What the user asked for: every flag of `generate` and `probe`, its default and its legal range.

`check` validates what needs no file of the model; `resolve` fills the model's defaults and validates the rest against
its configuration. Both run before any weight is read. Which file is which part of a model is `weights`' decision.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.placement.mesh import MESH_AXES, canonical

PIPELINES = ("two-stage", "distilled", "one-stage")
COMPONENTS = (
    "transformer",
    "text-encoder",
    "tokenizer",
    "video-decoder",
    "video-encoder",
    "audio-decoder",
    "upsampler",
    "guided-step",
    "schedule",
)
COMPILED = (
    "text-encoder", "video-encoder", "denoise-before", "denoise-step", "upsampler", "audio-decoder", "vocoder",
    "video-decoder",
)  # fmt: skip
SEED_LIMIT = 2**63
MAX_FPS_TERM = 10**7  # FFmpeg counts time in 32-bit fractions

# The default of the LTX-2.0 and 2.3 family, as published with the models and in diffusers (Apache-2.0).
DEFAULT_NEGATIVE_PROMPT = (
    "blurry, out of focus, overexposed, underexposed, low contrast, washed out colors, excessive noise, grainy"
    " texture, poor lighting, flickering, motion blur, distorted proportions, unnatural skin tones, deformed "
    "facial features, asymmetrical face, missing facial features, extra limbs, disfigured hands, wrong hand "
    "count, artifacts around text, inconsistent perspective, camera shake, incorrect depth of field, "
    "background too sharp, background clutter, distracting reflections, harsh shadows, inconsistent lighting "
    "direction, color banding, cartoonish rendering, 3D CGI look, unrealistic materials, uncanny valley "
    "effect, incorrect ethnicity, wrong gender, exaggerated expressions, wrong gaze direction, mismatched lip "
    "sync, silent or muted audio, distorted voice, robotic voice, echo, background noise, off-sync audio, "
    "incorrect dialogue, added dialogue, repetitive speech, jittery movement, awkward pauses, incorrect "
    "timing, unnatural transitions, inconsistent framing, tilted camera, flat lighting, inconsistent tone, "
    "cinematic oversaturation, stylized filters, or AI artifacts."
)


@dataclass(frozen=True)
class LoraSpec:
    """One LoRA file, its strength, and the only stage it applies to ("stage1", "stage2"; None: both)."""

    path: Path
    strength: float = 1.0
    stage: str | None = None


@dataclass(frozen=True)
class ImageSpec:
    """One conditioning image at a pixel frame; strength 1 keeps it exactly."""

    path: Path
    frame: int
    strength: float = 1.0


@dataclass(frozen=True)
class GuidanceScales:
    """One modality's guidance. Neutral, so that its branch is not run: cfg 1, stg 0, modality 1."""

    cfg: float
    stg: float = 1.0
    modality: float = 3.0
    rescale: float = 0.7


@dataclass(frozen=True)
class ModelOptions:
    """The flags that `generate` and `probe` share: which model, how and where it runs."""

    backend: str
    model: Path
    text_encoder: Path | None = None
    upsampler: Path | None = None
    distilled_lora: LoraSpec | None = None
    loras: tuple[LoraSpec, ...] = ()
    lora_allow_partial: bool = False
    dtype: str | None = None  # None: bfloat16 on accelerators, float32 on CPU (probe: float32)
    weights_dtype: str | None = None  # of the transformer's blocks: "float8" or "bfloat16"; None: dtype
    device: str = "auto"
    cross_timestep_rule: str = "C"
    stage_weights: str = "resident"
    text_encoder_offload: bool = False
    vae_tiling: str = "auto"
    layers: str = "scan"
    compile: bool = False
    max_memory_gb: float | None = None  # pretend this much device memory
    profile: str | None = None  # None: the device kind's own
    mesh: Mapping[str, int] = field(default_factory=dict)  # devices along each mesh axis; empty: one device

    def compute_dtype(self, default: str) -> str:
        """The dtype asked for; weights of another one than float32 are multiplied in bfloat16."""
        return self.dtype or ("bfloat16" if self.weights_dtype else default)


@dataclass(frozen=True)
class Request:
    """One clip. After `resolve`, no field that shapes the clip is None."""

    options: ModelOptions
    prompt: str
    output: Path
    pipeline: str = "two-stage"
    negative_prompt: str | None = None
    width: int = 768
    height: int = 512
    num_frames: int = 121
    fps: Fraction = Fraction(24)
    steps: int | None = None  # of the guided schedule; the distilled pipeline has its own 8
    seed: int | None = None
    num_videos: int = 1  # of seeds seed, seed + 1, ..., in one batch
    images: tuple[ImageSpec, ...] = ()
    image_crf: int | None = None
    video_guidance: GuidanceScales = field(default_factory=lambda: GuidanceScales(cfg=3.0))
    audio_guidance: GuidanceScales = field(default_factory=lambda: GuidanceScales(cfg=7.0))
    stg_blocks: tuple[int, ...] | None = None
    audio_from: str | None = None  # "stage1" or "stage2"
    warmup: bool = False
    noise_in: Path | None = None
    latents_out: Path | None = None
    report: Path | None = None
    audio: bool = True
    metadata: bool = True

    @property
    def seeds(self) -> range:
        """One for each video. Of a resolved request."""
        assert self.seed is not None, "the request is not resolved"
        return range(self.seed, self.seed + self.num_videos)

    @property
    def outputs(self) -> list[Path]:
        """One file for each video."""
        return video_files(self.output, self.seeds)

    @property
    def num_stages(self) -> int:
        return 1 if self.pipeline == "one-stage" else 2

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting as JSON-able values: what the MP4's metadata and the report carry."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True)
class ProbeRequest:
    """One network run on given tensors. `inputs` is None for the tokenizer, which reads `prompts`."""

    options: ModelOptions
    component: str
    outputs: Path
    inputs: Path | None = None
    prompts: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphRequest:
    """One graph to print, of a checkpoint (`model`) or of a preset's sizes; exactly one of the two is given."""

    component: str
    model: Path | None = None
    preset: str | None = None
    width: int = 768
    height: int = 512
    num_frames: int = 121
    branches: int = 4  # guidance branches of a guided step
    steps: int | None = None  # of the denoise loop; None: the model's
    format: str = "text"
    profile: str | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    weights_dtype: str | None = None


@dataclass(frozen=True)
class CompileRequest:
    """Components to compile for a topology that need not be here, of a checkpoint (`model`) or of a preset's sizes.

    stage: 1 or 2, None: both. branches: of every denoise step; None: the model's in stage 1, one in stage 2.
    """

    topology: str
    model: Path | None = None
    preset: str | None = None
    text_encoder: Path | None = None
    upsampler: Path | None = None
    components: tuple[str, ...] = COMPILED
    stage: int | None = None
    branches: int | None = None
    width: int = 768
    height: int = 512
    num_frames: int = 121
    vae_tiling: str = "auto"
    profile: str | None = None  # None: the device kind's own
    mesh: Mapping[str, int] = field(default_factory=dict)  # empty: the profile's own
    weights_dtype: str | None = None  # of the transformer's blocks; None: bfloat16, as all else


@dataclass(frozen=True)
class PlanRequest:
    """A run to cost on `devices` of a kind: of `options.model`, or of a preset's sizes if that is given."""

    options: ModelOptions
    devices: int
    device_kind: str
    preset: str | None = None
    pipeline: str = "two-stage"
    width: int = 768
    height: int = 512
    num_frames: int = 121
    fps: Fraction = Fraction(24)
    steps: int | None = None
    audio: bool = True

    def clip(self, options: ModelOptions) -> Request:
        """The request of one such clip."""
        names = ("pipeline", "width", "height", "num_frames", "fps", "steps", "audio")
        given = {name: getattr(self, name) for name in names}
        return Request(options, "a plan", Path("plan.mp4"), seed=0, **given)


def parse_fps(text: str) -> Fraction:
    """23.976, 29.97 and 59.94 mean x*1000/1001 of the next integer; anything else is the decimal or fraction given."""
    ntsc = {"23.976": 24, "29.97": 30, "59.94": 60}
    try:
        fps = Fraction(ntsc[text] * 1000, 1001) if text in ntsc else Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise InputError(f"--fps: {text!r} is no number; give one such as 24, 23.976 or 30000/1001") from None
    if fps <= 0:
        raise InputError(f"--fps: {text}, expected more than 0")
    if max(fps.numerator, fps.denominator) >= MAX_FPS_TERM:
        raise InputError(f"--fps: {text} has too many digits for a container; write a fraction such as 24000/1001")
    return fps


def parse_lora(text: str, flag: str = "--lora") -> LoraSpec:
    """FILE[:STRENGTH[:stage1|stage2]], read from the right, so file names may contain colons."""
    path, stage = text, None
    head, _, last = text.rpartition(":")
    if head and last in ("stage1", "stage2"):
        path, stage = head, last
    head, _, last = path.rpartition(":")
    strength = _number(last) if head else None
    if strength is not None:
        path = head
    elif stage:
        raise InputError(f"{flag}: {text!r} names a stage but no strength; write FILE:STRENGTH:{stage}")
    if strength is not None and not math.isfinite(strength):
        raise InputError(f"{flag}: strength {strength} in {text!r}, expected a finite number")
    return LoraSpec(Path(path), 1.0 if strength is None else strength, stage)


def parse_image(text: str) -> ImageSpec:
    """FILE:FRAME[:STRENGTH], read from the right."""
    match = re.fullmatch(r"(?P<path>.+?):(?P<frame>[+-]?\d+)(:(?P<strength>[^:]+))?", text, re.DOTALL)
    strength = _number(match["strength"] or "1") if match else None
    if match is None or strength is None:
        raise InputError(f"--image: {text!r}, expected FILE:FRAME or FILE:FRAME:STRENGTH, such as cat.png:0:0.8")
    return ImageSpec(Path(match["path"]), int(match["frame"]), strength)


def parse_blocks(text: str) -> tuple[int, ...]:
    """A comma-separated list of block numbers."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"--stg-blocks: {text!r}, expected block numbers such as 28 or 14,19") from None


def parse_mesh(text: str) -> dict[str, int]:
    """`tensor=2` -> sizes by mesh axis, in the order of the devices however they are written."""
    mesh: dict[str, int] = {}
    for item in text.split(","):
        axis, _, size = item.partition("=")
        if axis not in MESH_AXES or not size.isdecimal() or int(size) < 1 or axis in mesh:
            known = ", ".join(MESH_AXES)
            raise InputError(f"--mesh: {text!r}, expected AXIS=N with an axis of {known}, such as tensor=2")
        mesh[axis] = int(size)
    return canonical(mesh)


def check_options(options: ModelOptions) -> None:
    """Refuse options that no model could satisfy. Raises InputError."""
    _exists("--model", options.model)
    if options.text_encoder and not options.text_encoder.is_dir():
        raise InputError(f"--text-encoder: {options.text_encoder} is not a folder; give the Gemma 3 folder")
    if options.upsampler:
        _exists("--upsampler", options.upsampler)
    if options.distilled_lora:
        _file("--distilled-lora", options.distilled_lora.path)
        if options.distilled_lora.stage:
            raise InputError("--distilled-lora: the pipeline decides its stage; write FILE or FILE:STRENGTH")
    for lora in options.loras:
        _file("--lora", lora.path)
    if options.weights_dtype and options.dtype == "float32":
        raise InputError(
            f"--weights-dtype: {options.weights_dtype} weights go with --dtype bfloat16, not float32; leave one out"
        )
    if options.max_memory_gb is not None and not 0 < options.max_memory_gb < math.inf:
        raise InputError(f"--max-memory: {options.max_memory_gb}, expected more than 0 GB")


def check(request: Request) -> None:
    """Refuse everything that is wrong whatever the model is. Raises InputError; reads no file of the model."""
    check_options(request.options)
    if not request.prompt.strip():
        raise InputError("--prompt: the prompt is empty; say what the clip shows")
    if request.pipeline not in PIPELINES:
        raise InputError(f"--pipeline: {request.pipeline!r}, expected one of {', '.join(PIPELINES)}")
    if request.steps is not None and request.steps < 1:
        raise InputError(f"--steps: {request.steps}, expected at least 1")
    if request.seed is not None and not 0 <= request.seed <= SEED_LIMIT - request.num_videos:
        raise InputError(f"--seed: {request.seed}, expected 0 or more and below 2^63, --num-videos included")
    if request.num_videos < 1:
        raise InputError(f"--num-videos: {request.num_videos}, expected at least 1")
    if request.num_videos % (data := request.options.mesh.get("data", 1)):
        raise InputError(f"--num-videos: {request.num_videos} do not divide over data={data}; choose a multiple of it")
    if request.fps <= 0:
        raise InputError(f"--fps: {request.fps}, expected more than 0")
    if request.image_crf is not None and not 0 <= request.image_crf <= 51:
        raise InputError(f"--image-crf: {request.image_crf}, expected 0 (off) to 51")
    for name, scales in (("video", request.video_guidance), ("audio", request.audio_guidance)):
        for scale in fields(scales):
            if not math.isfinite(value := getattr(scales, scale.name)):
                raise InputError(f"--{name}-{scale.name}: {value}, expected a finite number")
    if request.audio_from == "stage2" and request.num_stages == 1:
        raise InputError("--audio-from: the one-stage pipeline has no stage 2; leave the flag out")
    for lora in request.options.loras:
        if lora.stage == "stage2" and request.num_stages == 1:
            raise InputError(f"--lora: {lora.path} is for stage 2, and the one-stage pipeline has none")
    _writable("--output", request.output)
    if request.output.suffix.lower() != ".mp4":
        raise InputError(f"--output: {request.output} is not named *.mp4, the only format written; rename it")
    for flag, path in (("--latents-out", request.latents_out), ("--report", request.report)):
        if path:
            _writable(flag, path)
    if request.noise_in:
        _file("--noise-in", request.noise_in)


def video_files(output: Path, seeds: Sequence[int]) -> list[Path]:
    """`output` itself, or with the seed in its name if there are several videos."""
    return [output.with_stem(f"{output.stem}-{seed}") for seed in seeds] if len(seeds) > 1 else [output]


def draw_seed() -> int:
    return secrets.randbelow(2**32)


def default_steps(config: ModelConfig) -> int:
    """Steps of the guided schedule, as published with the models."""
    return 40 if config.generation == "2.0" else 30


def resolve(request: Request, config: ModelConfig) -> Request:
    """Check the request against the model and fill every default, the seed included. Raises InputError."""
    check(request)
    unit = config.video_vae.space_factor * request.num_stages
    for flag, value in (("--width", request.width), ("--height", request.height)):
        _check_step(flag, value, unit, 0, "px", f"divisible by {unit} ({request.pipeline})")
    step = config.video_vae.time_factor
    _check_step("--num-frames", request.num_frames, step, 1, "frames", f"{step}*k + 1")
    _check_images(request)
    limit_s = min(config.transformer.rope_max_pos[0], config.transformer.audio_rope_max_pos)
    if (request.num_frames - 1) / request.fps > limit_s:
        longest = int(limit_s * request.fps) // step * step + 1
        length_s = float((request.num_frames - 1) / request.fps)
        raise InputError(
            f"--num-frames: {request.num_frames} frames at {float(request.fps):g} fps are {length_s:.2f} s, the model's"
            f" limit is {limit_s} s; at most {longest} frames at this rate"
        )
    return replace(
        request,
        negative_prompt=DEFAULT_NEGATIVE_PROMPT if request.negative_prompt is None else request.negative_prompt,
        steps=request.steps or default_steps(config),
        seed=draw_seed() if request.seed is None else request.seed,
        image_crf=_default_crf(config) if request.image_crf is None else request.image_crf,
        stg_blocks=_stg_blocks(request, config),
        audio_from=request.audio_from or ("stage2" if request.pipeline == "distilled" else "stage1"),
    )


def _default_crf(config: ModelConfig) -> int:
    """How strongly the images that the model was trained on were compressed: 33, from version 2.4 on 18."""
    return 18 if config.version >= (2, 4) else 33


def _stg_blocks(request: Request, config: ModelConfig) -> tuple[int, ...]:
    """28 for LTX-2.3 and 29 for 2.0, of 48 blocks; the block at the same depth of a model with another number."""
    num_layers = config.transformer.num_layers
    if request.stg_blocks is None:
        block = 28 * num_layers // 48
        return (29,) if num_layers == 48 and config.generation == "2.0" else (block,)
    if request.stg_blocks == () and (request.video_guidance.stg or request.audio_guidance.stg):
        raise InputError("--stg-blocks: no block is given; name one, or set --video-stg 0 --audio-stg 0")
    for block in request.stg_blocks:
        if not 0 <= block < num_layers:
            raise InputError(f"--stg-blocks: block {block}, but the model has blocks 0 to {num_layers - 1}")
    return request.stg_blocks


def _check_step(flag: str, value: int, step: int, offset: int, unit: str, rule: str) -> None:
    """Refuse a value that is not step*k + offset and at least step (offset 0) or 1, naming the two nearest."""
    lowest = offset or step
    if value >= lowest and (value - offset) % step == 0:
        return
    below = (value - offset) // step * step + offset
    nearest = f"{below} and {below + step}" if below >= lowest else f"{lowest} and {lowest + step}"
    raise InputError(f"{flag}: {value}, expected {rule}; the nearest are {nearest} {unit}")


def _check_images(request: Request) -> None:
    for image in request.images:
        _file("--image", image.path)
        if not 0 <= image.frame < request.num_frames:
            last = request.num_frames - 1
            raise InputError(f"--image: frame {image.frame} of {image.path}, but the clip has frames 0 to {last}")
        if not 0 <= image.strength <= 1:
            raise InputError(f"--image: strength {image.strength} of {image.path}, expected 0 to 1")


def _exists(flag: str, path: Path) -> None:
    if not path.exists():
        raise InputError(f"{flag}: {path} does not exist; check the path")


def _file(flag: str, path: Path) -> None:
    _exists(flag, path)
    if not path.is_file():
        raise InputError(f"{flag}: {path} is a folder, expected a file")


def _writable(flag: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise InputError(f"{flag}: the folder {path.parent} does not exist; create it first")
    if path.is_dir():
        raise InputError(f"{flag}: {path} is a folder; add a file name")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _plain(value: object) -> object:
    """Dataclasses to dicts, paths and fractions to strings; every other value is JSON already."""
    if isinstance(value, (Path, Fraction)):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return value
