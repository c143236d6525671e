"""Pieces of clips: the frames and the sound of a file that become one sample.

Decides sizes, rates and places, and finds every fault of a clip before the first is encoded.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.media.footage import Footage
from ltx2rt.media.images import read_rgb
from ltx2rt.media.sound import read_sound
from ltx2rt.media.video import VideoInfo, is_animated
from ltx2rt.models.catalog import PROMPT_TOKENS
from ltx2rt.models.geometry import Geometry
from ltx2rt.stages.noise import uniform
from ltx2rt.stages.sound_reference import MAX_S, SoundReference
from ltx2rt.stages.tokenizer import count_tokens
from ltx2rt.train.data import IMAGES, Bucket, CaptionedClip, bucket_of
from ltx2rt.train.manifest import file_facts
from ltx2rt.train.prepare_flags import PrepareRequest

FPS = Fraction(24)  # rate that sound without a picture, and a picture without time, count by
ASPECT = 0.03  # difference of the logarithms of aspect ratios that a crop may take away
SCALING = "bicubic"  # part of a sample's digest: latents of another scaling are encoded again
MOST_PX, MOST_FRAMES, MOST_BUCKETS = 768 * 512, 49, 6  # limits of chosen buckets
Fault = tuple[str, str]  # file, reason


@dataclass(frozen=True)
class ClipPiece:
    """A future sample. fps: after resampling; frames: the file's frames that it keeps; start: its
    first one, counted at `fps`. place: shares of the cropped pixels that are left and above. cut:
    cropped share of the picture. reference: size of the same frames of the reference's file.
    tiling: of the encoder, `plan_encoder_tiles`. caption: with the trigger. followed_s: the most
    seconds of a reference's sound."""

    name: str
    clip: CaptionedClip
    bucket: Bucket
    fps: Fraction
    sound: Path | None
    caption: str
    start: int = 0
    frames: tuple[int, ...] = (0,)
    place: tuple[float, float] = (0.5, 0.5)
    cut: float = 0.0
    reference: Bucket | None = None
    stride: int = 1
    tiling: str = "off"
    followed_s: float = MAX_S

    def geometry(self, config: ModelConfig, size: Bucket | None = None) -> Geometry:
        size = size or self.bucket
        return Geometry.of(config, size.width, size.height, size.frames, self.fps)

    @property
    def start_s(self) -> float:
        return float(self.start / self.fps)

    @property
    def length_s(self) -> float:
        return float(self.bucket.frames / self.fps)

    @property
    def streams(self) -> tuple[str, ...]:
        """Parts of the sample, as the manifest lists them."""
        clip, sound = self.clip, self.sound
        has = {
            "video": clip.video, "audio": sound, "reference": self.reference, "mask": clip.mask,
            "audio_reference": sound and clip.audio_reference,
            "audio_mask": sound and clip.audio_mask,
        }  # fmt: skip
        return tuple(name for name, there in has.items() if there)

    def followed(self, config: ModelConfig) -> SoundReference | None:
        """The sound of the reference from the piece's start on, at its full length."""
        if not (path := self.sound and self.clip.audio_reference):
            return None
        how = {"silent": True, "start_s": self.start_s, "most_s": self.followed_s}
        return SoundReference(path, self.geometry(config), self.name, **how)

    def made_from(self) -> list[Any]:
        """Everything that its latents depend on, except the model."""
        facts = (self.bucket, self.fps, self.frames, self.place, self.reference, self.stride)
        files = file_facts({self.sound, *self.clip.files})
        followed = [self.followed_s] if self.clip.audio_reference else []
        return [files, self.sound is not None, *map(str, (*facts, self.tiling, SCALING, *followed))]


@dataclass(frozen=True)
class Facts:
    """Sides in pixels, the time of every frame from the first one on, and their rate. remarks:
    sentences about things that reading changes."""

    width: int
    height: int
    times_s: Sequence[Fraction]
    rate: Fraction
    has_sound: bool
    remarks: tuple[str, ...] = ()

    def nearest(self, times_s: Sequence[Fraction]) -> tuple[int, ...]:
        """The frame next to each time, the later of two."""
        between = [(a + b) / 2 for a, b in pairwise(self.times_s)]
        return tuple(bisect_right(between, time) for time in times_s)


def facts_of(path: Path, name: str, fps: Fraction | None = None) -> Facts:
    """Decode a file's frames once and return its facts. fps: to which a variable rate is brought.
    Raises InputError."""
    info = footage_of(path, name).info
    said = tuple(f"{name}: {sentence}" for sentence in info.said(fps))
    times = tuple(i / info.fps for i in range(info.num_frames))
    return Facts(info.width, info.height, times, info.fps, info.has_sound, said)


def is_still(path: Path) -> bool:
    """Whether it is an image of one frame, by its content."""
    return path.suffix.lower() in IMAGES and not is_animated(path)


def footage_of(path: Path, name: str) -> Footage:
    """A sample's file, a still as one frame. Raises InputError."""
    if not is_still(path):
        return Footage.read(path, name)
    height, width = read_rgb(path, name).shape[:2]
    return Footage(path, name, VideoInfo(width, height, 1, FPS, 0, False, (Fraction(0),)))


def checked(
    clips: Sequence[CaptionedClip], request: PrepareRequest, config: ModelConfig, tokenizer: Any
) -> tuple[list[ClipPiece], list[Fault], list[str]]:
    """The pieces of all clips, the faults of those that cannot be used, and remarks."""
    known: list[tuple[CaptionedClip, Facts | None]] = []
    faults: list[Fault] = []
    for clip in clips:
        try:
            video = clip.video
            known.append((clip, facts_of(video, clip.name, request.fps) if video else None))
        except InputError as error:
            faults.append((clip.name, str(error)))
    shown = [facts for _, facts in known if facts]
    remarks = [remark for facts in shown for remark in facts.remarks]
    buckets = request.buckets or chosen_buckets(shown, request)
    pieces: list[ClipPiece] = []
    for clip, facts in known:
        try:
            found = list(_pieces(clip, facts, buckets, request))
            for piece in found:
                _check(piece, config, tokenizer, remarks.append)
            pieces += found
        except InputError as error:
            faults.append((clip.name, str(error)))
    return pieces, faults, remarks


def chosen_buckets(found: Sequence[Facts], request: PrepareRequest) -> tuple[Bucket, ...]:
    """Buckets for clips of these facts: no side is enlarged, at most MOST_PX pixels and MOST_FRAMES
    frames, of which three quarters of the clips have as many; the MOST_BUCKETS most frequent."""
    unit, sizes = 32 * request.reference_downscale, Counter[Bucket]()
    counts = sorted(_length(facts, request) for facts in found if len(facts.times_s) > 1)
    usual = min(counts[len(counts) // 4], MOST_FRAMES) if counts else MOST_FRAMES
    for facts in found:
        sides = facts.width, facts.height
        scale = min(1, math.sqrt(MOST_PX / math.prod(sides)))
        width, height = (max(unit, int(side * scale) // unit * unit) for side in sides)
        frames = (min(_length(facts, request), usual) - 1) // 8 * 8 + 1
        sizes[Bucket(width, height, frames)] += 1
    default = Bucket(768 // unit * unit, 512 // unit * unit, MOST_FRAMES)
    return tuple(bucket for bucket, _ in sizes.most_common(MOST_BUCKETS)) or (default,)


def _length(facts: Facts, request: PrepareRequest) -> int:
    """Frames of a clip after resampling."""
    return math.floor(facts.times_s[-1] * (request.fps or facts.rate)) + 1


def _pieces(
    clip: CaptionedClip, facts: Facts | None, buckets: Sequence[Bucket], request: PrepareRequest
) -> Iterator[ClipPiece]:
    """The pieces of a clip. Raises InputError for an unfitting clip or reference."""
    caption = " ".join(filter(None, (request.trigger, clip.caption)))
    if facts is None or clip.video is None:
        yield _sound_alone(clip, caption, buckets, request)
        return
    fps, total = request.fps or facts.rate, _length(facts, request)
    if request.no_upscale:
        buckets = [b for b in buckets if b.width <= facts.width and b.height <= facts.height]
        if not buckets:
            raise InputError("it is smaller than every bucket; leave out --no-upscale")
    bucket = bucket_of((facts.width, facts.height, total), buckets)
    if bucket is None:
        frames, rest = (total - 1) // 8 * 8 + 1, min(b.frames for b in buckets)
        raise InputError(
            f"{total} frames, the shortest bucket has {rest}; leave the clip out, or add a "
            f"bucket of at most {frames} frames to --buckets"
        )
    sound = None
    if request.audio != "none" and len(facts.times_s) > 1:
        sound = clip.audio or (clip.video if facts.has_sound else None)
    if request.audio == "required" and not sound:
        raise InputError("it has no sound, which --audio required asks for; leave it out")
    last = total - bucket.frames
    parts = {"first": [0], "middle": [last // 2], "all": range(0, last + 1, bucket.frames)}
    starts = parts[request.clips]
    centre = request.crop == "centre"
    place = (0.5, 0.5) if centre else tuple(uniform(0, f"crop.{clip.name}", 2).tolist())
    aspects = facts.width / facts.height, bucket.width / bucket.height
    cut, tiling = 1 - min(aspects) / max(aspects), request.vae_tiling
    for number, start in enumerate(starts):
        frames = facts.nearest([i / fps for i in range(start, start + bucket.frames)])
        name = f"{clip.name}#{number}" if len(starts) > 1 else clip.name
        piece = ClipPiece(
            name, clip, bucket, fps, sound, caption, start, frames, place, cut, tiling=tiling,
            followed_s=MAX_S if request.clips == "first" else float(bucket.frames / fps),
        )  # fmt: skip
        yield _with_reference(piece, request, aspects[0]) if clip.reference else piece


def _sound_alone(
    clip: CaptionedClip, caption: str, buckets: Sequence[Bucket], request: PrepareRequest
) -> ClipPiece:
    """A piece without a picture: as long as the longest bucket, or of --audio-durations."""
    bucket, fps = max(buckets, key=lambda b: b.frames), FPS
    assert clip.audio is not None
    if request.audio_durations:
        longest = max(request.audio_durations)
        waveform, rate = read_sound(clip.audio, 0.0, longest, say=lambda text: None)
        length_s = waveform.shape[1] / rate
        fitting = [s for s in request.audio_durations if s <= length_s + 1e-3]
        if not fitting:
            raise InputError(
                f"{length_s:.3g} s of sound, the shortest of --audio-durations is "
                f"{min(request.audio_durations):g}; leave the file out, or add a shorter duration"
            )
        fps = bucket.frames / Fraction(str(max(fitting)))  # the bucket's frames last so long
    return ClipPiece(clip.name, clip, bucket, fps, clip.audio, caption)


def _with_reference(piece: ClipPiece, request: PrepareRequest, aspect: float) -> ClipPiece:
    """Raises InputError for a reference of another aspect ratio or fewer frames."""
    assert piece.clip.reference is not None
    facts = facts_of(piece.clip.reference, piece.name)
    count = len(facts.times_s)
    if abs(math.log(facts.width / facts.height / aspect)) > ASPECT:
        raise InputError(
            f"its reference is {facts.width}x{facts.height}, of another aspect ratio than the "
            "clip; crop one of both"
        )
    if 1 < count <= piece.frames[-1]:
        raise InputError(
            f"its reference has {count} frames, the clip needs {piece.frames[-1] + 1}; pass a "
            "longer one"
        )
    stride = request.reference_temporal_scale
    size = piece.bucket.reference(request.reference_downscale, stride)
    return replace(piece, reference=replace(size, frames=1) if count == 1 else size, stride=stride)


def _check(
    piece: ClipPiece, config: ModelConfig, tokenizer: Any, say: Callable[[str], None]
) -> None:
    """Raises InputError for a caption that the model cannot read whole, and for sounds and masks
    that cannot be read. say: gets the remarks of reading a sound."""
    if (count := count_tokens(tokenizer, piece.caption)) > PROMPT_TOKENS:
        raise InputError(
            f"its caption has {count} tokens, the model reads {PROMPT_TOKENS}; shorten it"
        )
    clip = piece.clip
    for path in {piece.sound, clip.audio_mask} - {None}:
        assert path is not None
        read_sound(path, piece.start_s, piece.length_s, say=say)
    if reference := piece.followed(config):
        for sentence in reference.sound[2]:
            say(sentence)
    if clip.mask:
        facts_of(clip.mask, piece.name)
    piece.geometry(config)
