"""extend: new frames and sound after a given clip, before it, between two clips, or from its end to
its beginning.

A segment is made that repeats some frames of the clips at its ends, as they are; of it the new part
is written between the clips' own frames. The cost depends on the segment alone, not on how long the
clips are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import flag_like, flags_of
from ltx2rt.media.footage import Footage
from ltx2rt.media.splice import FADE_FRAMES, Seam
from ltx2rt.media.video import frames_path
from ltx2rt.pipelines.build import Loras, decoded, denoise_once, text
from ltx2rt.pipelines.clip import Clip, Draft
from ltx2rt.pipelines.groups import GIVEN_CLIP
from ltx2rt.pipelines.groups.group import refuse_beside
from ltx2rt.pipelines.groups.size import Length, check_step, longest_s
from ltx2rt.pipelines.groups.sound import NewSound
from ltx2rt.pipelines.groups.source_clip import FileSize, read_clip
from ltx2rt.pipelines.request import Request
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.clip_end import ends
from ltx2rt.stages.joined import Join, OverlapSound, WholeClip, kept_sound
from ltx2rt.stages.stage import Stage

flag = flags_of("conditioning")

Clips = tuple[WholeClip | None, WholeClip | None]
DEFAULT_NEW = 96  # frames, 4 s at 24


class Extend(Request):
    name = "extend"
    summary = "continue a given clip, lead to it, join two, or close a loop"
    task = "Continue a clip"
    example = "--video-path clip.mp4 --extend-frames 96"
    distilled = "optional"
    groups = (*GIVEN_CLIP, NewSound())
    about: ClassVar = {"video_path": "clip to continue; its size and rate are kept (required)"}

    extend_frames: int | None = flag(
        None,
        "frames to add, rounded to 8k, between two clips to 8k - 1 (default: 96, 95)",
        asks="extend",
        least=1,
        most=10**6,
    )
    seconds: float | None = flag_like(
        Length, "seconds", help="seconds to add, rounded to 8 frames, in place of --extend-frames"
    )
    overlap: int = flag(
        17, "number of frames of the clip that the model sees and repeats, 8k + 1", least=9, most=97
    )
    before: bool = flag(False, "add the frames before the clip", asks="extend")
    join: Path | None = flag(
        None,
        "second clip of the same rate",
        frames_path,
        metavar="FILE",
        expects="a path",
        asks="extend",
        file="video",
        kept=True,
    )
    loop: int | None = flag(
        None, "add 8G - 1 frames back to the first", asks="extend", metavar="G", least=1, most=10**5
    )
    crossfade: bool = flag(
        True,
        "keep all frames; else up to 8 are blended at a seam",
        name="--no-crossfade",
        also=("--crossfade",),
    )

    @property
    def bridge(self) -> bool:
        """Whether the new frames are between two."""
        return self.loop is not None or self.join is not None

    @property
    def joins(self) -> bool:
        return self.join is not None

    def seam(self, new: int) -> Seam:
        """new: frames to add."""
        before = 0 if self.before else self.overlap
        after = self.overlap if self.before or self.bridge else 0
        return Seam(before, new, after, self.crossfade)

    def clips(self, source: Footage, other: Footage | None) -> Clips:
        """The clip before the new frames and the one after them. other: the file of --join."""
        clip = WholeClip(source)
        if self.before:
            return None, clip
        if other:
            return clip, WholeClip(other)
        return clip, clip if self.loop is not None else None

    def written(self, clips: Clips) -> Clips:
        """Those of `clips` that are written beside the new frames: a loop has its clip once."""
        before, after = clips
        return before, None if self.loop is not None else after

    # --- checks -----------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        refuse_beside(before=self.before, join=self.join is not None, loop=self.loop is not None)
        stated = {"extend_frames": self.extend_frames, "loop": self.loop}
        if self.seconds is not None:
            refuse_beside(seconds=True, **{name: n is not None for name, n in stated.items()})

    def into(self, draft: Draft, model: ModelConfig) -> None:
        """Reads the second file whole, once."""
        source, step = draft.given, model.video_vae.time_factor
        info, other = source.info, None
        new = self._new_frames(info.fps, step)
        if self.join is not None:
            width, height = source.size
            size = replace(self[FileSize], width=width, height=height)
            other = size.sized(read_clip(self.join, "--join"))
            if other.info.fps != info.fps:
                raise InputError(
                    f"--join: {self.join} has {float(other.info.fps):g} fps, expected "
                    f"{float(info.fps):g} as {self.video_path} has"
                )
        clips = self.clips(source, other)
        for clip in clips:
            if clip and clip.info.num_frames < self.overlap:
                raise InputError(
                    f"{clip.footage.flag}: {clip.path} has {clip.info.num_frames} frames, --overlap "
                    f"{self.overlap} needs as many; give a smaller one, at least 9"
                )
        frames = self.seam(new).num_frames
        limit_s = longest_s(draft.request, model)
        if (frames - 1) / info.fps > limit_s:
            over = -(-(frames - 1 - limit_s * info.fps) // step) * step
            raise InputError(
                f"--extend-frames: {new} and the overlap are {float((frames - 1) / info.fps):.2f} "
                f"s, the model's limit is {limit_s:g} s; at most {new - int(over)}"
            )
        draft.fill(extend_frames=new, seconds=None, num_frames=frames)
        draft.other = other

    def completed(self, clip: Clip, model: ModelConfig) -> Clip:
        written = self.written(self.clips(clip.given, clip.other))
        old = sum(one.info.num_frames for one in written if one)
        return replace(clip, clip_frames=old + (self.extend_frames or 0))

    def _new_frames(self, fps: Fraction, step: int) -> int:
        """Number of frames to add. Raises InputError."""
        off = 1 if self.bridge else 0
        asked = Fraction(DEFAULT_NEW if self.extend_frames is None else self.extend_frames + off)
        if self.seconds is not None:
            asked = Fraction(self.seconds) * fps
        new = max(round(asked / step), 1) * step - off
        if self.loop is not None:
            new = step * self.loop - 1
            if self.extend_frames not in (None, new):
                raise InputError(
                    f"--extend-frames: {self.extend_frames} beside --loop {self.loop}, which adds "
                    f"{new}; leave one of the two out"
                )
        check_step("--overlap", self.overlap, step, 1, "frames", f"{step}*k + 1")
        return new

    # --- what is made -----------------------------------------------------------------------------

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        new, seam = self.extend_frames or 0, self.seam(self.extend_frames or 0)
        seconds = clip.clip_frames / float(clip.fps)
        old, asked = clip.clip_frames - new, clip.asked.extend_frames
        rounded = f", in place of {asked}" if asked not in (None, new) else ""
        yield (
            f"{old} frames and {new} new ones{rounded}: {clip.clip_frames} in all, {seconds:.2f} s"
        )
        if any(seam.faded(side) for side in (seam.before, seam.after)):
            yield f"{FADE_FRAMES} frames are blended at a seam; --no-crossfade keeps all of the file's own"
        yield from super().remarks(clip, model)
        if clip.other:
            yield from (f"{self.join}: {sentence}" for sentence in clip.other.said())
        clips = self.clips(clip.given, clip.other)
        silent = [str(one.path) for one in clips if one and not one.info.has_sound]
        if clip.heard and silent:
            yield f"{silent[0]} has no sound: silence beside the new part"

    def stages(
        self, clip: Clip, model: ModelConfig, options: ModelOptions, loras: Loras
    ) -> list[Stage]:
        full, seam = clip.geometry(model), self.seam(self.extend_frames or 0)
        before, after = clips = self.clips(clip.given, clip.other)
        heard = [one if one and clip.audio and one.info.has_sound else None for one in clips]
        until, since = Fraction(seam.before) / clip.fps, Fraction(seam.stop) / clip.fps
        if before and heard[0]:  # its sound may end a little before its frames do
            until -= before.num_frames / clip.fps - before.heard_s
        seam = replace(seam, heard_s=until)
        mask = kept_sound(full, until if heard[0] else Fraction(0), since if heard[1] else None)
        tiling, inset = options.vae_tiling, clip.inset(model)
        given = ends(full, before, after, self.overlap, seam.stop, tiling, inset)
        kept = {"masks": {"audio": mask} if any(heard) else {}}
        joined = replace(seam, after=0) if self.loop is not None else seam
        return [
            *([OverlapSound(full, seam, *heard)] if any(heard) else []),
            *text(clip),
            *denoise_once(clip, full, options, loras, tuple(given), **kept),
            *decoded(clip, full, model, options, sound=clip.heard),
            Join(joined, *self.written(clips), clip.fps),
        ]


PIPELINE = Extend
