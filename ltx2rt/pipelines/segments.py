"""Clips of any length: a pipeline's clip made segment after segment, each a request like any other.

A segment after the first repeats the last frames of the one before, and goes on from there. All but
the first have one shape, so that a clip of any length needs two programs for a denoising stage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil
from operator import index
from pathlib import Path
from typing import Any

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flag
from ltx2rt.media.splice import Seam
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines.request import (
    DEFAULT_FRAMES,
    MAX_FRAMES,
    SEED_LIMIT,
    Loras,
    VideoRequest,
    check_step,
)
from ltx2rt.pipelines.sound_following import SoundFollowing
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.clip_end import ends, leading
from ltx2rt.stages.denoise import Denoise, Noise
from ltx2rt.stages.given import GivenLatents
from ltx2rt.stages.joined import JoinFrames
from ltx2rt.stages.segments import (
    ColourLock,
    ContinuedSound,
    Keep,
    Past,
    PastSound,
    SegmentFile,
    Segments,
    segment_starts,
)
from ltx2rt.stages.sound import Sound
from ltx2rt.stages.stage import Stage

MAX_SEGMENTS = 1000
MAX_LENGTH_S = 3600
WHOLE = "whole"  # --segments without a number: the clip has --num-frames


def parse_segments(text: str | int) -> int | str:
    """A number of segments, or `whole`."""
    try:
        return WHOLE if text == WHOLE else int(text) if isinstance(text, str) else index(text)
    except (TypeError, ValueError):
        raise InputError(
            f"--segments: {str(text)[:80]!r}, expected a number of segments, or none"
        ) from None


def parse_numbers(text: str | int | Sequence[int]) -> tuple[int, ...]:
    """Numbers of segments, from 1."""
    try:
        if isinstance(text, str):
            return tuple(int(part) for part in text.split(",") if part.strip())
        return tuple(map(index, text if isinstance(text, Sequence) else (text,)))
    except (TypeError, ValueError):
        raise InputError(
            f"--cut: {str(text)[:80]!r}, expected numbers of segments such as 3 or 3,5"
        ) from None


def parse_segment_seed(text: str | Sequence[int]) -> tuple[int, int]:
    """SEGMENT:SEED."""
    try:
        number, seed = map(int, text.split(":")) if isinstance(text, str) else map(index, text)
    except (TypeError, ValueError):
        raise InputError(
            f"--segment-seed: {str(text)[:80]!r}, expected SEGMENT:SEED such as 3:77"
        ) from None
    if not 0 <= seed < SEED_LIMIT:
        raise InputError(f"--segment-seed: seed {str(seed)[:30]}, expected 0 or more, below 2^63")
    return number, seed


@dataclass(frozen=True)
class Segmented(SoundFollowing, VideoRequest):
    """parts_folder: where the segments are kept; those that are there are not made again. number: of
    the segment, from 1, whose request this is; 0: the clip's."""

    segments: int | str | None = flag(
        None,
        "make the clip in segments, one continuing the other: N of --num-frames each, or without "
        "a number as many as --num-frames of the clip need",
        parse_segments,
        group="clip",
        metavar="N",
        least=2,
        most=MAX_SEGMENTS,
        bare=WHOLE,
    )
    segment_frames: int | None = flag(
        None,
        f"number of frames of a segment, 8k+1, with --segments alone (default: {DEFAULT_FRAMES})",
        int,
        group="clip",
        least=17,
        most=MAX_FRAMES,
    )
    length: float | None = flag(
        None,
        "length of a clip that is made in segments, in seconds, in place of --segments",
        float,
        group="clip",
        metavar="S",
        above=0,
        most=MAX_LENGTH_S,
    )
    segment_prompts: tuple[str, ...] = flag(
        (),
        "prompts of the second segment, the third, ...; the last one is that of all later ones",
        str,
        group="clip",
        name="--segment-prompt",
        repeat=True,
        keyword="segment_prompt",
    )
    overlap: int = flag(
        25,
        "number of frames that a segment sees and repeats of the one before, 8k + 1",
        group="conditioning",
        least=9,
        most=97,
    )
    segment_seeds: tuple[tuple[int, int], ...] = flag(
        (),
        "seeds of segments in place of those that follow from --seed, the first is 1",
        parse_segment_seed,
        group="sampling",
        name="--segment-seed",
        metavar="SEGMENT:SEED",
        repeat=True,
        keyword="segment_seed",
    )
    cut: tuple[int, ...] = flag(
        (),
        "segments that begin anew, with nothing of the one before, such as 3,5",
        parse_numbers,
        group="conditioning",
        metavar="LIST",
    )
    colour_lock: float = flag(
        0.0,
        "how far the colours and contrasts of segments are held to those of the first, 0 to 1",
        group="conditioning",
        least=0,
        most=1,
    )
    anchor: float = flag(
        0.0,
        "strength of the first frame as a guide before each later segment, 0 for none",
        group="conditioning",
        least=0,
        most=1,
    )
    parts_folder: Path | None = field(default=None, repr=False)
    number: int = field(default=0, repr=False)

    @property
    def in_segments(self) -> bool:
        return self.segments is not None or self.length is not None

    @property
    def clip_frames(self) -> int:
        if not self.in_segments or self.num_frames is None or self.segments == WHOLE:
            return super().clip_frames
        return self.starts[-1] + self.num_frames

    @property
    def starts(self) -> tuple[int, ...]:
        """The clip's frame at which each segment begins. Of a resolved request."""
        if self.segments is not None:
            new = (int(self.segments) - 1) * (self.num_frames - self.overlap)
        else:
            step = 8  # frames of a latent, in every release
            whole = ceil((Fraction(self.length or 0) * self.fps - 1) / step) * step + 1
            new = max(whole - self.num_frames, 0)
        return segment_starts(self.num_frames + new, self.num_frames, self.overlap, self.cut)

    def settings(self, path: Any = str) -> dict[str, Any]:
        found = super().settings(path)
        found["segment_seeds"] = [f"{number}:{seed}" for number, seed in self.segment_seeds]
        return {name: x for name, x in found.items() if name not in ("parts_folder", "number")}

    @property
    def noise(self) -> Noise:
        return replace(super().noise, prefix=f"segment{self.number}." if self.number else "")

    @property
    def made(self) -> tuple[str, ...]:
        there = [part.path.exists() for part in self.parts] if self.parts_folder else []
        return tuple(f"segment{number}." for number, made in enumerate(there, 1) if made)

    @property
    def image_frames(self) -> int:
        return self.clip_frames

    def denoise(self, name: str, geometry: Geometry, *rest: Any, **more: Any) -> list[Stage]:
        return super().denoise(name, geometry, *rest, **more, **self.following(name, geometry))

    def kept_in(self, folder: Path) -> Any:
        return replace(self, parts_folder=folder) if self.in_segments else self

    # --- checks -----------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        if self.segments is not None and self.length is not None:
            raise InputError("--length: given beside --segments; leave one of the two out")
        if self.segment_frames is not None and self.segments != WHOLE:
            raise InputError(
                "--segment-frames: goes with --segments without a number, which makes a clip of "
                "--num-frames; otherwise --num-frames says it"
            )
        if not self.in_segments:
            for name, given in (
                ("--segment-prompt", self.segment_prompts),
                ("--segment-seed", self.segment_seeds),
                ("--cut", self.cut),
                ("--colour-lock", self.colour_lock),
                ("--anchor", self.anchor),
            ):
                if given and not self.number:
                    raise InputError(f"{name}: the clip has one segment; give --segments")
            return
        at_start = self.audio_conditioning_at == "start"
        for name, given in (
            ("--num-videos", self.num_videos > 1),
            ("--auto-duration", self.auto_duration),
            ("--num-generated-keyframes", self.num_generated_keyframes),
            ("--prompt-at", self.prompt_at),
            ("--audio-conditioning-at start", self.audio_conditioning and at_start),
        ):
            if given:
                raise InputError(f"{name}: does not go with a clip in segments; leave it out")
        for prompt in self.segment_prompts:
            if not prompt.strip():
                raise InputError("--segment-prompt: one is empty; say what the segment shows")
            if prompt != prompt.encode(errors="ignore").decode():
                raise InputError("--segment-prompt: holds characters that are no text")
        if self.segment_prompts and (self.enhance_prompt or self.enhanced_prompt):
            raise InputError(
                "--enhance-prompt: writes one prompt out, but --segment-prompt gives several; "
                "leave one of the two out"
            )

    def _lasting(self, model: ModelConfig) -> Any:
        if self.in_segments and self.num_frames is None:
            return replace(self, num_frames=DEFAULT_FRAMES)
        return super()._lasting(model)

    def _in_length(self: Any, model: ModelConfig) -> Any:
        """This clip by its length in seconds and by the frames of a segment."""
        if self.num_frames is None:
            raise InputError(
                "--segments: without a number it makes a clip of --num-frames; give that, or the "
                "number of segments"
            )
        size, step = self.segment_frames or DEFAULT_FRAMES, model.video_vae.time_factor
        for name, value in (("--segment-frames", size), ("--num-frames", self.num_frames)):
            check_step(name, value, step, 1, "frames", f"{step}*k + 1")
        if self.num_frames <= size:
            raise InputError(
                f"--segments: {self.num_frames} frames are one segment of {size}; leave it out, or "
                "give a smaller --segment-frames"
            )
        length = float((self.num_frames - 1) / self.fps)
        if length > MAX_LENGTH_S:
            raise InputError(
                f"--num-frames: {self.num_frames} frames are {length:.0f} s, expected at most "
                f"{MAX_LENGTH_S} s"
            )
        return replace(self, segments=None, segment_frames=None, num_frames=size, length=length)

    def resolved(self: Any, model: ModelConfig) -> Any:
        if self.segments == WHOLE:
            self.check()
            self = self._in_length(model)
        if not self.in_segments:
            return super().resolved(model)
        step, size = model.video_vae.time_factor, self.num_frames or DEFAULT_FRAMES
        check_step("--overlap", self.overlap, step, 1, "frames", f"{step}*k + 1")
        if self.overlap >= size:
            raise InputError(
                f"--overlap: {self.overlap}, but a segment has {size} frames; give fewer"
            )
        full = super().resolved(model)
        count = len(full.starts)
        if count == 1:
            raise InputError(
                f"--length: {full.length:g} s are {full.clip_frames} frames, and one segment has "
                f"{full.num_frames}; leave it out, or give a smaller --num-frames"
            )
        if count > MAX_SEGMENTS:
            raise InputError(
                f"--length: {count} segments, expected at most {MAX_SEGMENTS}; give more "
                "--num-frames"
            )
        if len(full.segment_prompts) >= count:
            raise InputError(
                f"--segment-prompt: {len(full.segment_prompts)} after --prompt, but the clip has "
                f"{count} segments; give at most {count - 1}"
            )
        numbers = [number for number, _ in full.segment_seeds]
        for name, given, least in (("--segment-seed", numbers, 1), ("--cut", list(full.cut), 2)):
            for number in given:
                if not least <= number <= count:
                    raise InputError(
                        f"{name}: segment {str(number)[:30]}, expected {least} to {count}"
                    )
                if given.count(number) > 1:
                    raise InputError(f"{name}: segment {number} is given twice; give it once")
        return full

    # --- what is made -----------------------------------------------------------------------------

    def remarks(self, model: ModelConfig) -> Iterator[str]:
        yield from super().remarks(model)
        if self.in_segments:
            count, new = len(self.starts), self.num_frames - self.overlap
            seconds = self.clip_frames / float(self.fps)
            yield f"{count} segments: {self.num_frames} frames, then {new} new ones each; {seconds:.2f} s"
            if made := len(self.made):
                yield f"{made} of them are there already, in {self.parts_folder}"

    @property
    def parts(self) -> list[SegmentFile]:
        folder, origin, found = self.parts_folder or Path(), 0, []
        for number, start in enumerate(self.starts, 1):
            origin = start if number in self.cut else origin
            path = folder / f"{number - 1:04d}.mov"
            more = self.audio, start, origin, bool(self.hdr)
            found.append(SegmentFile.of(path, self.num_frames, self.fps, *more))
        return found

    def all_stages(self, model: ModelConfig, options: ModelOptions, loras: Loras) -> list[Stage]:
        """Those of the segments that are not there yet, and of the clip that they make."""
        if not self.in_segments:
            return super().all_stages(model, options, loras)
        stages, parts = [], self.parts
        for i, part in enumerate(parts):
            if self.parts_folder and part.path.exists():
                continue
            made = self._segment(i).stages(model, options, loras)
            if i and i + 1 not in self.cut:
                first = part.start - parts[i - 1].start
                begun = next(p for p in parts if p.start == part.origin)
                anchor = (begun.path, self.anchor) if self.anchor else None
                before = replace(parts[i - 1], first=first)
                made = list(continued(made, before, options, model, anchor))
                if self.colour_lock:
                    kept = (self.num_frames - first - 1) // model.video_vae.time_factor + 1
                    lock = ColourLock(begun, kept, self.colour_lock)
                    last = max(i for i, stage in enumerate(made) if isinstance(stage, Denoise))
                    made.insert(last + 1, lock)
            look = self.colour_lock > 0 and part.start == part.origin
            stages += [*made, Keep(part, i + 1, len(parts), look)]
        return [*stages, Segments(parts)]

    def _segment(self, i: int) -> Any:
        """Segment i as a request; the clip's images are those of the segment that they are new
        in."""
        start, prompts = self.starts[i], (self.prompt, *self.segment_prompts)
        new = range(
            start if i == 0 else self.starts[i - 1] + self.num_frames, start + self.num_frames
        )
        images = [
            replace(image, frame=image.frame - start) for image in self.images if image.frame in new
        ]
        return replace(
            self,
            prompt=prompts[min(i, len(prompts) - 1)],
            seed=dict(self.segment_seeds).get(i + 1, segment_seed(self.seeds[0], i)),
            images=tuple(images),
            segments=None,
            length=None,
            segment_prompts=(),
            segment_seeds=(),
            cut=(),
            number=i + 1,
        )


def segment_seed(seed: int, i: int) -> int:
    """The seed of segment i: the clip's for the first, so that this one is the plain clip's; of the
    others a number that depends on both alone, not on how many segments there are."""
    digest = hashlib.sha256(f"segment {i} of {seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % SEED_LIMIT if i else seed


def continued(
    stages: list[Stage],
    before: SegmentFile,
    options: ModelOptions,
    model: ModelConfig,
    anchor: tuple[Path, float] | None = None,
) -> Iterator[Stage]:
    """The stages of a clip, each of which continues the part before, in pictures and sound.

    Every denoising stage is given the part's last frames at its own size, after what it is given
    besides; the sound of these frames is kept, too. anchor: a file whose first frame is a guide one
    latent frame before the clip, and its strength.
    """
    denoising = [stage for stage in stages if isinstance(stage, Denoise)]
    overlap = before.num_frames
    past = Past(denoising[-1].geometry, before, before.start + before.first)
    seam, masks = Seam(overlap, before.first, 0), {}
    if before.info.has_sound:
        yield PastSound(past)
        masks = {"audio": past.mask}
    file = before.path, before.info.num_frames
    for stage in stages:
        if isinstance(stage, Denoise):
            how = options.vae_tiling, model, before.wide
            tail = ends(stage.geometry, file, None, overlap, 0, 1.0, *how)
            guide = [leading(stage.geometry, *anchor, *how)] if anchor else []
            given = (*stage.given, *tail, *guide)
            stage = replace(stage, given=given, masks={} if "audio" in stage.frozen else masks)
            yield GivenLatents(stage.name, stage.given)
        if isinstance(stage, Sound):
            stage = ContinuedSound(stage.geometry, past=past)
        if not isinstance(stage, GivenLatents):
            yield stage
    yield JoinFrames(seam, before, None)
