"""Clips of any length: a pipeline's clip made segment after segment, each a request like any other.

A segment after the first repeats the last frames of the one before, and goes on from there. All but
the first have one shape, so that a clip of any length needs two programs for a denoising stage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from operator import index
from pathlib import Path
from typing import Any

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of
from ltx2rt.media.footage import Footage
from ltx2rt.media.splice import Seam
from ltx2rt.media.video import VideoInfo
from ltx2rt.pipelines.groups.group import Group
from ltx2rt.pipelines.groups.images import Images
from ltx2rt.pipelines.groups.seeds import SEED_LIMIT
from ltx2rt.pipelines.groups.size import (
    DEFAULT_FRAMES,
    MAX_FRAMES,
    MAX_SECONDS,
    STEP,
    Duration,
    check_step,
)
from ltx2rt.pipelines.groups.source_clip import SourceClip
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.clip_end import ends, leading
from ltx2rt.stages.conditioning import GivenLatents
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.duration import chooses_length
from ltx2rt.stages.inset import Inset
from ltx2rt.stages.joined import JoinFrames
from ltx2rt.stages.segments import (
    ColourLock,
    ContinuedSound,
    Keep,
    PartOfSound,
    Past,
    PastSound,
    SegmentFile,
    segment_starts,
)
from ltx2rt.stages.segments import Segments as JoinSegments
from ltx2rt.stages.sound import Sound
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.stage import Stage

flag = flags_of("conditioning")

MAX_SEGMENTS = 1000
ONE_CLIP_S = 20  # a longer clip is made in segments


def parse_numbers(text: str | int | Sequence[int]) -> tuple[int, ...]:
    """Numbers of segments, from 1. Raises TypeError or ValueError."""
    if isinstance(text, str):
        return tuple(int(part) for part in text.split(",") if part.strip())
    return tuple(map(index, text if isinstance(text, Sequence) else (text,)))


@dataclass(frozen=True)
class SegmentSeed:
    segment: int
    seed: int

    def __str__(self) -> str:
        return f"{self.segment}:{self.seed}"


def parse_segment_seed(text: str | Sequence[int] | SegmentSeed) -> SegmentSeed:
    """SEGMENT:SEED. Raises TypeError or ValueError, and InputError for a seed out of bounds."""
    if isinstance(text, SegmentSeed):
        return text
    number, seed = map(int, text.split(":")) if isinstance(text, str) else map(index, text)
    if not 0 <= seed < SEED_LIMIT:
        raise InputError(f"--segment-seed: seed {str(seed)[:30]}, expected 0 to 2^64 - 1")
    return SegmentSeed(number, seed)


@dataclass(frozen=True)
class Segments(Group):
    """A clip in segments, and one of its segments. parts_folder: where the segments are kept; those
    that are there are not made again. number: of the segment, from 1, whose request this is; 0: the
    clip's."""

    segment_frames: int | None = flag(
        None,
        "make the clip in segments of this many frames, 8k+1, each continuing the one before; a "
        f"clip of over {ONE_CLIP_S} s is always made so (default: {DEFAULT_FRAMES})",
        group="clip",
        least=17,
        most=MAX_FRAMES,
    )
    segment_prompts: tuple[str, ...] = flag(
        (),
        "prompts of the second segment, the third, ...; the last one is that of all later ones",
        str,
        group="clip",
        name="--prompt",
        repeat=True,
        also=("--segment-prompt",),
        typed=False,
    )
    overlap: int = flag(
        25, "frames of the segment before that a segment repeats, 8k+1", least=9, most=97
    )
    segment_seeds: tuple[SegmentSeed, ...] = flag(
        (),
        "seeds of segments in place of those that follow from --seed, the first is 1",
        parse_segment_seed,
        group="sampling",
        name="--segment-seed",
        metavar="SEGMENT:SEED",
        expects="SEGMENT:SEED such as 3:77",
        repeat=True,
    )
    cut: tuple[int, ...] = flag(
        (),
        "segments that begin anew, such as 3,5",
        parse_numbers,
        metavar="LIST",
        expects="numbers of segments such as 3 or 3,5",
        json="array",
    )
    colour_lock: float = flag(
        0.0, "how far segments keep the first one's colours, 0 to 1", least=0, most=1
    )
    anchor: float = flag(
        0.0, "strength of the first frame before later segments, 0: none", least=0, most=1
    )
    parts_folder: Path | None = field(default=None, repr=False)
    number: int = field(default=0, repr=False)

    def asked(self, request: Any) -> bool:
        """Whether the clip is made in several segments."""
        frames = request[Duration].stated(request) or 0
        longer = frames > 1 and frames - 1 > ONE_CLIP_S * request.fps
        return not self.number and (self.segment_frames is not None or longer)

    @property
    def prefix(self) -> str:
        """Beginning of the names of a segment's noise."""
        return f"segment{self.number}." if self.number else ""

    def clip_frames(self, request: Any) -> int:
        return self.spans(request)[-1].stop

    def spans(self, request: Any) -> list[range]:
        """The clip's frames that each segment has. Of a resolved request. A given clip keeps its
        frames where a segment begins anew."""
        given, size = request.has(SourceClip), request.segment_frames
        whole = -(-(request.num_frames - 1) // STEP) * STEP + 1
        starts = segment_starts(whole, size, self.overlap, () if given else self.cut)
        ends = [
            min(start + size, request.num_frames) if given else start + size for start in starts
        ]
        return [range(start, end) for start, end in zip(starts, ends, strict=True)]

    def parts(self, request: Any) -> list[SegmentFile]:
        folder, origin, found = self.parts_folder or Path(), 0, []
        for number, span in enumerate(self.spans(request), 1):
            start, origin = span.start, span.start if number in self.cut else origin
            path = folder / f"{number - 1:04d}.mov"
            info = VideoInfo(0, 0, len(span), request.fps, 0, request.heard, (Fraction(0),))
            own = {"origin": origin, "wide": bool(request.high_range)}
            found.append(SegmentFile(Footage(path, "a segment", info), start, **own))
        return found

    def made(self, request: Any) -> tuple[str, ...]:
        there = [part.path.exists() for part in self.parts(request)] if self.parts_folder else []
        return tuple(f"segment{number}." for number, made in enumerate(there, 1) if made)

    # --- checks -----------------------------------------------------------------------------------

    def check(self, request: Any) -> None:
        if not self.asked(request):
            if request.length_by_sound:
                return
            for name, given in (
                ("--prompt: several", self.segment_prompts),
                ("--segment-seed", self.segment_seeds),
                ("--cut", self.cut),
                ("--colour-lock", self.colour_lock),
                ("--anchor", self.anchor),
            ):
                if given and not self.number:
                    raise InputError(
                        f"{name}: the clip has one segment; give --segment-frames, fewer than it has"
                    )
            return
        followed = getattr(request, "audio_conditioning", None)
        for name, given in (
            ("--num-videos", request.num_videos > 1),
            ("--auto-duration", request.auto_duration),
            ("--num-generated-keyframes", getattr(request, "num_generated_keyframes", 0)),
            ("--prompt-at", request.prompt_at),
            (
                "--audio-conditioning-at start",
                followed and request.audio_conditioning_at == "start",
            ),
        ):
            if given:
                raise InputError(f"{name}: does not go with a clip in segments; leave it out")
        for prompt in self.segment_prompts:
            if not prompt.strip():
                raise InputError("--prompt: one is empty; say what the segment shows")
            if prompt != prompt.encode(errors="ignore").decode():
                raise InputError("--prompt: holds characters that are no text")
        if self.segment_prompts and (request.enhance_prompt or request.enhanced_prompt):
            raise InputError(
                "--enhance-prompt: writes one prompt out, but --prompt gives several; "
                "leave one of the two out"
            )

    def restated(self, request: Any, model: ModelConfig) -> dict[str, Any]:
        """The frames of the clip and of a segment."""
        if not self.asked(request):
            return {}
        count, step = request.num_frames, model.video_vae.time_factor
        if count is None and chooses_length(model):
            raise InputError(
                "--segment-frames: how long is the clip? Give --num-frames, or --seconds"
            )
        most = int(ONE_CLIP_S * request.fps) // step * step + 1
        size = request.segment_frames or min(DEFAULT_FRAMES, most)
        count = DEFAULT_FRAMES if count is None else count
        stated = [] if request.has(SourceClip) else [("--num-frames", count)]
        for name, value in (("--segment-frames", size), *stated):
            check_step(name, value, step, 1, "frames", f"{step}*k + 1")
        if size > most:
            seconds = f"over {ONE_CLIP_S} s, which no segment is; at most {most}"
            raise InputError(f"--segment-frames: {size} frames are {seconds}")
        if count <= size:
            return {"segment_frames": None, "num_frames": count}
        if (seconds := float((count - 1) / request.fps)) > MAX_SECONDS:
            raise InputError(
                f"--num-frames: {count} frames are {seconds:.0f} s, expected at most "
                f"{MAX_SECONDS} s"
            )
        check_step("--overlap", self.overlap, step, 1, "frames", f"{step}*k + 1")
        if self.overlap >= size:
            raise InputError(
                f"--overlap: {self.overlap}, but a segment has {size} frames; give fewer"
            )
        return {"segment_frames": size, "num_frames": count}

    def resolved(self, request: Any, model: ModelConfig) -> dict[str, Any]:
        """Refuse numbers of segments that there are not, and too many segments."""
        self.check(request)
        if not self.asked(request):
            return {}
        count = len(self.spans(request))
        if count > MAX_SEGMENTS:
            raise InputError(
                f"--segment-frames: {count} segments, expected at most {MAX_SEGMENTS}; give more"
            )
        if len(self.segment_prompts) >= count:
            raise InputError(
                f"--prompt: {len(self.segment_prompts) + 1} are given, but the clip has {count} "
                f"segments; give at most {count}"
            )
        numbers = [seed.segment for seed in self.segment_seeds]
        for name, given, least in (("--segment-seed", numbers, 1), ("--cut", list(self.cut), 2)):
            for number in given:
                if not least <= number <= count:
                    raise InputError(
                        f"{name}: segment {str(number)[:30]}, expected {least} to {count}"
                    )
                if given.count(number) > 1:
                    raise InputError(f"{name}: segment {number} is given twice; give it once")
        return {}

    # --- what is made -----------------------------------------------------------------------------

    def remarks(self, request: Any, model: ModelConfig) -> Iterator[str]:
        if self.asked(request):
            count, new = len(self.spans(request)), request.segment_frames - self.overlap
            seconds = request.clip_frames / float(request.fps)
            yield f"{count} segments: {request.segment_frames} frames, then {new} new ones each; {seconds:.2f} s"
            if made := len(self.made(request)):
                yield f"{made} of them are there already, in {self.parts_folder}"

    def stages(
        self, request: Any, model: ModelConfig, options: ModelOptions, loras: Any
    ) -> list[Stage]:
        """The stages of the segments that are not there yet, and of the clip that they make."""
        stages, parts, sound = [], self.parts(request), request.given_sound(model)
        for i, part in enumerate(parts):
            if self.parts_folder and part.path.exists():
                continue
            made = [
                PartOfSound(
                    stage.path,
                    stage.geometry,
                    sound=stage.sound,
                    longer=sound,
                    since_s=part.start / request.fps,
                )
                if sound and isinstance(stage, SourceSound)
                else stage
                for stage in self.request_of(i, request).stages(model, options, loras)
            ]
            if i and i + 1 not in self.cut:
                first = part.start - parts[i - 1].start
                begun = next(p for p in parts if p.start == part.origin)
                anchor = (begun, self.anchor) if self.anchor else None
                before = replace(parts[i - 1], first=first)
                inset = request.inset(model)
                made = list(continued(made, before, options, model, anchor, inset))
                if self.colour_lock:
                    kept = (request.segment_frames - first - 1) // model.video_vae.time_factor + 1
                    lock = ColourLock(begun, kept, self.colour_lock)
                    last = max(i for i, stage in enumerate(made) if isinstance(stage, Denoise))
                    made.insert(last + 1, lock)
            look = self.colour_lock > 0 and part.start == part.origin
            stages += [*made, Keep(part, i + 1, len(parts), look)]
        return [*stages, JoinSegments(parts, sound)]

    def request_of(self, i: int, request: Any) -> Any:
        """Segment i as a request, with the clip's images at its new frames."""
        spans, prompts = self.spans(request), (request.prompt, *self.segment_prompts)
        start, end = spans[i].start, spans[i].stop
        new = range(start if i == 0 else spans[i - 1].stop, end)
        given: dict[str, Any] = {}
        if request.has(SourceClip):
            given["source"] = replace(request.source, window=spans[i])
        if request.has(Images):
            images = [image for image in request.images if image.frame in new]
            given["images"] = tuple(replace(image, frame=image.frame - start) for image in images)
        seeds = {seed.segment: seed.seed for seed in self.segment_seeds}
        given |= {"prompt": prompts[min(i, len(prompts) - 1)], "num_frames": end - start}
        given |= {"seed": seeds.get(i + 1, segment_seed(request.seeds[0], i)), "number": i + 1}
        whole = dict(segment_frames=None, segment_prompts=(), segment_seeds=(), cut=())
        return replace(request, **given, **whole)


def segment_seed(seed: int, i: int) -> int:
    """The seed of segment i: the clip's for the first, so that this one is the plain clip's; of the
    others a number that depends on both alone, not on how many segments there are."""
    digest = hashlib.sha256(f"segment {i} of {seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % 2**63 if i else seed


def continued(
    stages: list[Stage],
    before: SegmentFile,
    options: ModelOptions,
    model: ModelConfig,
    anchor: tuple[SegmentFile, float] | None = None,
    inset: Inset | None = None,
) -> Iterator[Stage]:
    """The stages of a clip, each of which continues the part before, in pictures and sound.

    Every denoising stage is given the part's last frames at its own size, after what it is given
    besides; the sound of these frames is kept as well, unless the clip is made for a sound that stays as it is.
    anchor: a file whose first frame is a guide one latent frame before the clip, and its strength.
    inset: the place of the part's pictures in the model's.
    """
    denoising = [stage for stage in stages if isinstance(stage, Denoise)]
    overlap = before.num_frames
    past = Past(denoising[-1].geometry, before, before.start + before.first)
    seam, masks = Seam(overlap, before.first, 0), {}
    heard = any(isinstance(stage, SourceSound) for stage in stages)
    mixed = heard and any("audio" not in stage.frozen for stage in denoising)
    if before.info.has_sound and (mixed or not heard):
        masks = {"audio": past.mask}
    if masks and not mixed:
        yield PastSound(past)
    for stage in stages:
        if isinstance(stage, Denoise) and "video" not in stage.frozen:
            how = options.vae_tiling, model, inset
            tail = ends(stage.geometry, before, None, overlap, 0, *how)
            guide = [leading(stage.geometry, *anchor, *how)] if anchor else []
            given = (*stage.given, *tail, *guide)
            stage = replace(stage, given=given)
            yield GivenLatents(stage.name, stage.given)
        if isinstance(stage, Denoise) and "audio" not in stage.frozen:
            stage = replace(stage, masks={**stage.masks, **masks})
        if isinstance(stage, Sound):
            stage = ContinuedSound(stage.geometry, past=past)
        if not isinstance(stage, GivenLatents):
            yield stage
        if masks and mixed and isinstance(stage, SourceSound):
            yield PastSound(past, mixed)
    yield JoinFrames(seam, before, None)
