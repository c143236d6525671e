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
from typing import TYPE_CHECKING, ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of, setting
from ltx2rt.media.footage import Footage
from ltx2rt.media.splice import Seam
from ltx2rt.media.video import VideoInfo
from ltx2rt.pipelines.groups.group import Group, refuse_beside, refuse_in_segments
from ltx2rt.pipelines.groups.seeds import SEED_LIMIT
from ltx2rt.pipelines.groups.size import (
    DEFAULT_FRAMES,
    MAX_FRAMES,
    MAX_SECONDS,
    STEP,
    check_step,
)
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
    JoinSegments,
    Keep,
    PartOfSound,
    Past,
    PastSound,
    SegmentFile,
    segment_starts,
)
from ltx2rt.stages.sound import Sound
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.stage import Stage

if TYPE_CHECKING:
    from ltx2rt.pipelines.build import Loras
    from ltx2rt.pipelines.clip import Clip, Draft
    from ltx2rt.pipelines.request import Request

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
class SegmentPlan:
    """frames: of a segment. spans: the clip's frames that each has. cut: numbers of segments that
    begin anew. folder: where segments are kept; those that are there are not made again."""

    frames: int
    spans: tuple[range, ...]
    cut: tuple[int, ...] = ()
    folder: Path | None = None

    def files(self, fps: Fraction, has_sound: bool, wide: bool) -> list[SegmentFile]:
        folder, origin, found = self.folder or Path(), 0, []
        for number, span in enumerate(self.spans, 1):
            start, origin = span.start, span.start if number in self.cut else origin
            path = folder / f"{number - 1:04d}.mov"
            info = VideoInfo(0, 0, len(span), fps, 0, has_sound, (Fraction(0),))
            found.append(
                SegmentFile(Footage(path, "a segment", info), start, origin=origin, wide=wide)
            )
        return found


def one_clip_s(request: Request) -> float:
    """Seconds of the longest clip that is made in one segment: with faster motion the model sees
    more of them."""
    return ONE_CLIP_S / max(request.motion_speed, 1)


def made_of(clip: Clip) -> tuple[str, ...]:
    """Beginnings of names of noise that no stage draws any more: of segments that are there."""
    if clip.segments is None or clip.segments.folder is None:
        return ()
    there = enumerate((part.path.exists() for part in clip.parts), 1)
    return tuple(f"segment{number}." for number, made in there if made)


@dataclass(frozen=True)
class Segments(Group):
    """A clip in segments. parts_folder: where they are kept."""

    shapes: ClassVar[bool] = True

    segment_frames: int | None = flag(
        None,
        "make the clip in segments of this many frames, 8k+1, each continuing the one before; a "
        f"clip of over {ONE_CLIP_S} s is always made so (default: {DEFAULT_FRAMES})",
        group="clip",
        least=17,
        most=MAX_FRAMES,
    )
    segment_prompts: tuple[str, ...] = setting(
        (),
        "prompts of the second segment, the third, ...; the last one is that of all later ones",
        str,
        group="clip",
        name="--prompt",
        repeat=True,
        also=("--segment-prompt",),
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

    def splits(self, request: Request) -> bool:
        frames, fps = request.length
        frames = DEFAULT_FRAMES if frames is None and self.segment_frames else frames or 0
        longer = frames > 1 and frames - 1 > one_clip_s(request) * fps
        return longer or (self.segment_frames or frames) < frames

    def spans(self, num_frames: int, size: int, given: bool) -> list[range]:
        """The clip's frames that each segment has. given: it keeps the frames of a file where a
        segment begins again."""
        whole = -(-(num_frames - 1) // STEP) * STEP + 1
        starts = segment_starts(whole, size, self.overlap, () if given else self.cut)
        ends = [min(start + size, num_frames) if given else start + size for start in starts]
        return [range(start, end) for start, end in zip(starts, ends, strict=True)]

    # --- checks -----------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        for name, given in (
            ("--num-videos", request.num_videos > 1),
            ("--auto-duration", request.auto_duration),
            ("--prompt-at", request.prompt_at),
        ):
            if given:
                refuse_in_segments(request, name)
        for name, given in (
            ("--prompt: several", self.segment_prompts),
            ("--segment-seed", self.segment_seeds),
            ("--cut", self.cut),
            ("--colour-lock", self.colour_lock),
            ("--anchor", self.anchor),
        ):
            if given and not request.in_segments:
                raise InputError(
                    f"{name}: the clip has one segment; give --segment-frames, fewer than it has"
                )
        for prompt in self.segment_prompts:
            if not prompt.strip():
                raise InputError("--prompt: one is empty; say what the segment shows")
            if prompt != prompt.encode(errors="ignore").decode():
                raise InputError("--prompt: holds characters that are no text")
        refuse_beside(context=request.context, several_prompts=self.segment_prompts)
        if self.segment_prompts and (request.enhance_prompt or request.enhanced_prompt):
            raise InputError(
                "--enhance-prompt: writes one prompt out, but --prompt gives several; "
                "leave one of the two out"
            )

    def into(self, draft: Draft, model: ModelConfig) -> None:
        """Fill the frames of the clip and of a segment, and the plan of segments."""
        count, fps = draft.asked.length
        if self.segment_frames is None and not draft.asked.in_segments:
            return
        if count is None and chooses_length(model):
            raise InputError(
                "--segment-frames: how long is the clip? Give --num-frames, or --seconds"
            )
        count, step = DEFAULT_FRAMES if count is None else count, model.video_vae.time_factor
        fps, given = draft.request.fps, draft.source is not None
        most_s = one_clip_s(draft.request)
        most = int(most_s * fps) // step * step + 1
        size = self.segment_frames or min(DEFAULT_FRAMES, most)
        check_step("--segment-frames", size, step, 1, "frames", f"{step}*k + 1")
        if size > most:
            raise InputError(
                f"--segment-frames: {size} frames are over {most_s:g} s, which no segment is; at most "
                f"{most}"
            )
        if count <= size:
            return draft.fill(segment_frames=None, num_frames=count)
        if (seconds := float((count - 1) / fps)) > MAX_SECONDS:
            raise InputError(
                f"--num-frames: {count} frames are {seconds:.0f} s, expected at most "
                f"{MAX_SECONDS} s"
            )
        check_step("--overlap", self.overlap, step, 1, "frames", f"{step}*k + 1")
        if self.overlap >= size:
            raise InputError(
                f"--overlap: {self.overlap}, but a segment has {size} frames; give fewer"
            )
        draft.fill(segment_frames=size, num_frames=count)
        spans = tuple(self.spans(count, size, given))
        self._check_numbers(len(spans))
        draft.segments = SegmentPlan(size, spans, self.cut, self.parts_folder)

    def _check_numbers(self, count: int) -> None:
        """Refuse numbers of segments that there are not, and too many segments."""
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

    # --- what is made -----------------------------------------------------------------------------

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        if plan := clip.segments:
            count, new = len(plan.spans), plan.frames - self.overlap
            seconds = clip.clip_frames / float(clip.fps)
            yield f"{count} segments: {plan.frames} frames, then {new} new ones each; {seconds:.2f} s"
            if made := len(made_of(clip)):
                yield f"{made} of them are there already, in {plan.folder}"

    def all_stages(
        self, clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> list[Stage]:
        """The stages of the segments that are not there yet, and of the clip that they make."""
        stages, parts, sound = [], clip.parts, clip.whole_sound(model)
        for i, part in enumerate(parts):
            if self.parts_folder and part.path.exists():
                continue
            made = [
                PartOfSound(
                    stage.path,
                    stage.geometry,
                    sound=stage.sound,
                    longer=sound,
                    since_s=part.start / clip.fps,
                )
                if sound and isinstance(stage, SourceSound)
                else stage
                for stage in clip.request.stages(self.segment(i, clip), model, options, loras)
            ]
            if i and i + 1 not in self.cut:
                first = part.start - parts[i - 1].start
                begun = next(p for p in parts if p.start == part.origin)
                anchor = (begun, self.anchor) if self.anchor else None
                before = replace(parts[i - 1], first=first)
                inset = clip.inset(model)
                made = list(continued(made, before, options, model, anchor, inset))
                if self.colour_lock:
                    kept = (clip.seen_frames - first - 1) // model.video_vae.time_factor + 1
                    lock = ColourLock(begun, kept, self.colour_lock)
                    last = max(i for i, stage in enumerate(made) if isinstance(stage, Denoise))
                    made.insert(last + 1, lock)
            look = self.colour_lock > 0 and part.start == part.origin
            stages += [*made, Keep(part, i + 1, len(parts), look)]
        return [*stages, JoinSegments(parts, sound)]

    def segment(self, i: int, clip: Clip) -> Clip:
        """Segment i as a clip, with the images at its new frames, and the rest of a given clip."""
        assert clip.segments, "the clip is in segments"
        spans, prompts = clip.segments.spans, (clip.prompt, *self.segment_prompts)
        start, end = spans[i].start, spans[i].stop
        new = range(start if i == 0 else spans[i - 1].stop, end)
        images = [
            replace(image, frame=at - start, first=at - image.frame)
            for image in clip.images
            for at in [max(image.frame, new.start)]
            if at in new and (at == image.frame or image.moves)
        ]
        seeds = {seed.segment: seed.seed for seed in self.segment_seeds}
        seed = seeds.get(i + 1, segment_seed(clip.seeds[0], i))
        return replace(
            clip,
            segments=None,
            num_frames=end - start,
            source=clip.source and replace(clip.source, window=spans[i]),
            images=tuple(images),
            prompt=prompts[min(i, len(prompts) - 1)],
            seeds=range(seed, seed + 1),
            prefix=f"segment{i + 1}.",
        )


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
    anchor: tuple[SegmentFile, float] | None,
    inset: Inset | None,
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
            size, tiling = stage.geometry, options.vae_tiling
            tail = ends(size, before, None, overlap, 0, tiling, inset)
            guide = [leading(size, *anchor, tiling, inset)] if anchor else []
            stage = replace(stage, given=(*stage.given, *tail, *guide))
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
