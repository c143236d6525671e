"""Sound of the clips that a segment joins, before and after the segment is made: its latents, and
the whole clip's.

Decides the kept part in seconds, not in latents: eight frames are no whole number of audio latents
at most rates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.media.footage import Footage
from ltx2rt.media.hdr import to_codes
from ltx2rt.media.mp4 import Sound, to_rgb8
from ltx2rt.media.sound import resample
from ltx2rt.media.splice import (
    Seam,
    join_frames,
    join_sounds,
    splice_frames,
    splice_sound,
    stacked,
)
from ltx2rt.media.video import VideoInfo
from ltx2rt.models.geometry import Geometry
from ltx2rt.models.mel import WINDOW
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.source_sound import encode_sound
from ltx2rt.stages.source_video import SourceVideo
from ltx2rt.stages.stage import FramesStage, Stage, State, finite

BLOCK_S, QUIET_S = 0.005, 0.1  # a block that is tested for silence; most silence that is dropped
QUIET = 1e-4  # share of the power before, below which it is silent: AAC leaves as much of it there


@dataclass(frozen=True)
class WholeClip:
    """Footage that appears whole in the written clip. wide: whether its frames are codes of high
    dynamic range, in 16 bits."""

    footage: Footage
    wide: bool = field(default=False, kw_only=True)

    @property
    def path(self) -> Path:
        return self.footage.path

    @property
    def info(self) -> VideoInfo:
        return self.footage.info

    @property
    def num_frames(self) -> int:
        return self.info.num_frames

    def frames(self) -> Iterator[np.ndarray]:
        return self.footage.frames(self.wide)

    @cached_property
    def heard_s(self) -> Fraction:
        """Seconds until which there is sound: a model's clip ends with some 0.03 s of silence, to
        which new sound is not joined. Raises InputError."""
        whole_s = self.num_frames / self.info.fps
        if not self.info.has_sound:
            return whole_s
        rate = self.footage.rate
        block, most = round(BLOCK_S * rate), round(QUIET_S * rate)
        sound = self.footage.sound(rate)
        wave = sound.part(max(sound.size - 3 * most - 1, 0), sound.size).astype(np.float64)
        level = (wave[:, -3 * most : -most] ** 2).mean() if wave.shape[1] > 3 * most else 0.0
        end = wave.shape[1]
        while (
            wave.shape[1] - end < most and (wave[:, end - block : end] ** 2).mean() < QUIET * level
        ):
            end -= block
        return whole_s - Fraction(wave.shape[1] - end, rate)


def kept_sound(geometry: Geometry, before_s: Fraction, after_s: Fraction | None) -> np.ndarray:
    """f32[audio latents]: 0 where a token hears nothing after `before_s`, or nothing before
    `after_s`; 1 elsewhere. Token i is of the mel frames max(4i - 3, 0) to 4i, each of half a window
    around its 10 ms."""
    hop_s, factor = Fraction(geometry.mel_hop, geometry.mel_sample_rate), geometry.audio_time_factor
    half_s = Fraction(WINDOW // 2, geometry.mel_sample_rate)
    mask = np.ones(geometry.audio_latents, np.float32)
    for i in range(geometry.audio_latents):
        begins, ends = max(factor * (i - 1) + 1, 0) * hop_s - half_s, factor * i * hop_s + half_s
        if ends <= before_s or (after_s is not None and begins >= after_s):
            mask[i] = 0
    return mask


@dataclass(frozen=True)
class OverlapSound(Stage):
    """Latents of the sound in the frames that a segment repeats; silence in between."""

    geometry: Geometry
    seam: Seam
    before: WholeClip | None
    after: WholeClip | None
    name = "source sound"

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        yield Call("audio-encoder", self.geometry.mel_shape(model.audio_vae))

    def check(self, session: Session) -> Sequence[str]:
        clips = filter(None, (self.before, self.after))
        return [sentence for clip in clips for sentence in clip.footage.missing]

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        (call,) = self.needs(session.config)
        rate = session.config.audio_vae.sample_rate
        start, stop, end = self.seam.cuts(self.geometry.fps, rate)
        with watch.stage(self.name):
            waveform = np.zeros((2, end), np.float32)
            if self.before:
                until = round(self.before.heard_s * rate)
                heard = self.before.footage.sound(rate).part(max(until - start, 0), until)
                waveform[:, max(start - heard.shape[1], 0) : start] = heard
            if self.after:  # a clip of these frames alone may have a sample less
                heard = self.after.footage.sound(rate).part(0, end - stop)
                waveform[:, stop : stop + heard.shape[1]] = heard
            latent = encode_sound(session, call, waveform[None], rate)
        finite(self.name, latent=latent)
        state.source["audio"] = latent
        state.put("source.audio", latent)


@dataclass(frozen=True)
class JoinFrames(FramesStage):
    """The frames of the clip before, the new part of the segment, the clip after."""

    seam: Seam
    before: WholeClip | None
    after: WholeClip | None
    name = "join"

    def changed(self, chunks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        before = (self.before.frames(), self.before.num_frames) if self.before else (iter(()), 0)
        return join_frames(
            chunks,
            before,
            self.after.frames() if self.after else iter(()),
            self.seam,
            to_codes if self.before and self.before.wide else to_rgb8,
        )


@dataclass(frozen=True)
class Join(JoinFrames):
    """Join also their sound. The clip gets the rate of a given sound."""

    fps: Fraction = Fraction(24)

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        super().run(session, state, watch)
        if state.waveforms is None or state.sample_rate is None:
            return
        with watch.stage(self.name):
            given = [clip for clip in (self.before, self.after) if clip and clip.info.has_sound]
            rate = given[0].footage.rate if given else state.sample_rate
            start, stop, end = self.seam.cuts(self.fps, rate)
            made = resample(np.asarray(state.waveforms), state.sample_rate, rate)
            made = np.pad(made, ((0, 0), (0, 0), (0, max(end - made.shape[2], 0))))[..., :end]
            none = Sound(0, lambda: iter(()))
            left, right = (
                clip.footage.sound(rate) if clip else none for clip in (self.before, self.after)
            )
            if self.before:
                left = replace(left, size=min(left.size, round(self.before.heard_s * rate)))
            state.hear([join_sounds(one, left, right, start, stop, rate) for one in made], rate)


@dataclass(frozen=True)
class Splice(FramesStage):
    """Restore a clip's own frames and sound outside the part that is made anew.

    video: the part of the clip that the model sees, all of it or a window. heard: whether its sound
    is kept, else that of the new clip stays as it is. frames: the clip's frames that are new,
    seconds: the part of its sound. The new clip gets the rate of the clip's sound.
    """

    video: SourceVideo
    clip: WholeClip
    heard: bool
    frames: range
    seconds: tuple[float, float]
    name = "splice"

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        super().run(session, state, watch)
        if not self.heard or state.waveforms is None or state.sample_rate is None:
            return
        with watch.stage(self.name):
            rate = self.clip.footage.rate
            made = resample(np.asarray(state.waveforms), state.sample_rate, rate)
            first = round(self.video.start / self.clip.info.fps * rate)
            source = self.clip.footage.sound(rate)
            spliced = [splice_sound(one, source, *self.seconds, rate, first) for one in made]
            state.hear(spliced, rate)

    def changed(self, chunks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        start = self.video.start
        source = self.video.codes(self.clip.frames())
        levels = to_codes if self.video.space else to_rgb8
        yield from stacked(islice(source, start))
        made = range(self.frames.start - start, self.frames.stop - start)
        yield from splice_frames(chunks, source, made, levels)
        yield from stacked(source)
