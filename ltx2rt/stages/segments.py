"""A clip that is made segment after segment: each is a separate file, which the next one continues.

Decides where segments begin, the contents of a segment's file, and its part in the clip. A segment
continues the frames and the sound that were written, so that a run that goes on from files makes
the same clip as one that never stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from itertools import islice, pairwise, takewhile
from pathlib import Path

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.media.mp4 import EXACT, EXACT_CODES, write_mp4
from ltx2rt.media.sound import read_sound
from ltx2rt.media.splice import join_sound, stacked
from ltx2rt.models import vocoder
from ltx2rt.models.geometry import Geometry
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.joined import WholeClip
from ltx2rt.stages.kept_steps import STEPS, durable
from ltx2rt.stages.sound import Finished, Sound, decode_mel, vocode
from ltx2rt.stages.source_sound import SourceSound, encode_mel
from ltx2rt.stages.stage import FRAMES, SOUND, Stage, State, finite
from ltx2rt.weights.files import TensorFile, write_arrays

SEGMENT = "segment"  # the stage that reports a finished segment
MEL, LOOK, RECORD = ".npy", ".look.npy", ".safetensors"  # files next to a segment's


def segment_starts(
    num_frames: int, segment: int, overlap: int, cuts: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the first pixel frame of each segment of a clip. Segments overlap by `overlap` frames,
    the last one by more if it would end beyond the clip. cuts: numbers of segments, from 1, that
    overlap nothing, and so make the clip longer."""
    new = max(segment - overlap, 1)  # an overlap of a whole segment is refused later
    count = 1 + max(-(-(num_frames - segment) // new), 0)
    starts = [*(i * new for i in range(count - 1)), num_frames - segment]
    later = 0
    for i, (before, start) in enumerate(pairwise([*starts]), 1):
        later += before + segment - start if i + 1 in cuts else 0
        starts[i] = start + later
    return tuple(starts)


@dataclass(frozen=True)
class SegmentFile(WholeClip):
    """The file of a segment, which need not be there yet, from its frame `first` on.

    start: the clip's frame that is the segment's first; origin: the one that was the first after
    the latest cut. Sound is cut at the clip's samples; the mel spectrogram that it was made of is
    in a file beside, and so are the latents that --latents-out asks for.
    """

    start: int = 0
    first: int = 0
    origin: int = 0

    @property
    def num_frames(self) -> int:
        return self.info.num_frames - self.first

    def frames(self) -> Iterator[np.ndarray]:
        return islice(super().frames(), self.first, None)

    def chunks(self, stop: int) -> Iterator[np.ndarray]:
        """u8[n, H, W, 3], or u16 of codes, up to the clip's frame `stop`."""
        return stacked(islice(self.frames(), stop - self.start))

    @property
    def record_path(self) -> Path:
        return self.path.with_suffix(RECORD)

    def mel(self) -> np.ndarray:
        """f32[1, 2, T, mel bins], from the segment's first frame on."""
        return np.load(self.path.with_suffix(MEL))

    def sample(self, frame: int, rate: int) -> int:
        """The clip's sample at one of its frames."""
        return round(frame / self.info.fps * rate)

    def samples(self, start: int, stop: int) -> np.ndarray:
        """f32[2, stop - start] of the clip's samples."""
        waveform, rate = read_sound(self.path)
        first = self.sample(self.start, rate)
        heard = waveform[:, start - first : stop - first]
        return np.pad(heard, ((0, 0), (0, stop - start - heard.shape[1])))


@dataclass(frozen=True)
class Past:
    """The sound that a segment is given of the part before: mel frames of one grid from the clip's
    latest cut on. geometry: of the segment; start: the clip's frame that is its first. A segment
    begins at the mel frame that is nearest to its first frame, at most half a mel frame of 10 ms
    away."""

    geometry: Geometry
    before: SegmentFile
    start: int

    def _place(self, frame: int) -> int:
        """The grid's mel frame at a pixel frame of the clip."""
        g = self.geometry
        return round((frame - self.before.origin) / g.fps * g.mel_sample_rate / g.mel_hop)

    @property
    def place(self) -> int:
        """The grid's mel frame that is the segment's first."""
        return self._place(self.start)

    @property
    def passed(self) -> int:
        """Number of the previous part's mel frames before the segment."""
        return self.place - self._place(self.before.start)

    @property
    def latents(self) -> int:
        """Number of the segment's audio latents that hold only the part's sound."""
        g = self.geometry
        known = (g.audio_latents - 1) * g.audio_time_factor + 1 - self.passed
        return max((known - 1) // g.audio_time_factor + 1, 0)

    @property
    def cut(self) -> int:
        """The segment's first mel frame that is new."""
        return max((self.latents - 1) * self.geometry.audio_time_factor + 1, 0)

    @property
    def mask(self) -> np.ndarray:
        """f32[audio latents]: 0 where the part's sound is kept, 1 elsewhere."""
        return (np.arange(self.geometry.audio_latents) >= self.latents).astype(np.float32)

    def mel(self) -> np.ndarray:
        """f32[1, 2, T, mel bins] of the part, up to the segment's first new frame."""
        found, end = self.before.mel(), self.passed + self.cut
        return np.pad(
            found[:, :, :end], ((0, 0), (0, 0), (0, max(end - found.shape[2], 0)), (0, 0)), "edge"
        )


@dataclass(frozen=True)
class PastSound(Stage):
    """The latents of the sound that a segment repeats of the part before. mixed: those after them
    are a file's."""

    past: Past
    mixed: bool = False
    name = "source sound"

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        yield Call("audio-encoder", self.past.geometry.mel_shape(model.audio_vae))

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        (call,) = self.needs(session.config)
        with watch.stage(self.name):
            latent = encode_mel(session, call, self.past.mel()[:, :, self.past.passed :])
        if self.mixed:
            repeated = np.arange(latent.shape[2])[:, None] < self.past.latents
            latent = np.where(repeated, latent, state.source["audio"])
        finite(self.name, latent=latent)
        state.source["audio"] = latent
        state.put("source.audio", latent)


@dataclass(frozen=True)
class ContinuedSound(Sound):
    """The sound of a segment that goes on where the part before ends.

    The vocoder is given the part's mel frames and the new ones in one, with all that samples near
    the seam depend on, so that the clip sounds as if the vocoder had run once over all of it.
    """

    past: Past = field(kw_only=True)

    def vocoded(self, model: ModelConfig) -> int:
        return self._lead(model)[0] + super().vocoded(model) - self.past.cut

    def _lead(self, model: ModelConfig) -> tuple[int, int]:
        """Mel frames that the vocoder is given, and the last of them that are new."""
        most = self.past.passed + self.past.cut
        back, ahead = vocoder.reach(model.vocoder) or (most, 0)
        ahead = min(ahead, max(self.past.cut - 1, 0))
        return min(back + ahead, most), ahead

    def decode(
        self, session: Session, latent: np.ndarray, finished: Finished
    ) -> tuple[np.ndarray, np.ndarray]:
        """The mel of the segment, and the waveform from its first frame on."""
        past, config = self.past, session.config
        old, new = past.mel(), decode_mel(session, latent, finished)[:, :, past.cut :]
        lead, ahead = self._lead(config)
        waveform = vocode(session, np.concatenate([old[:, :, -lead:], new], 2), finished)[0]
        if not waveform.size:
            return new, waveform
        size = vocoder.frame_samples(config.vocoder)  # samples of a mel frame
        rate = config.vocoder.sample_rate
        stop = past.before.sample(past.before.origin, rate) + size * (past.place + past.cut - ahead)
        before = past.before.samples(past.before.sample(past.start, rate), stop)
        start, end = size * (lead - ahead), waveform.shape[1]
        joined = join_sound(waveform, before, waveform[:, :0], start, end, rate)
        return np.concatenate([old[:, :, past.passed :], new], 2), joined[None]


@dataclass(frozen=True)
class PartOfSound(SourceSound):
    """The latents of a longer sound, which reports missing parts, from `since_s` on."""

    longer: SourceSound = field(kw_only=True)
    since_s: Fraction = field(kw_only=True)

    @property
    def read(self) -> tuple[np.ndarray, int]:
        sound, rate, _ = self.longer.heard
        first, size = round(self.since_s * rate), round(self.clip_s * rate)
        heard = sound.part(first, first + size)
        return np.pad(heard, ((0, 0), (0, size - heard.shape[1]))), rate

    def check(self, session: Session) -> Sequence[str]:
        """The longer sound is checked whole."""
        return ()


def statistics(latents: np.ndarray) -> np.ndarray:
    """f32[2, C]: mean and unbiased standard deviation of each channel of [1, C, f, h, w]."""
    axes = (0, 2, 3, 4)
    return np.stack([latents.mean(axes), latents.std(axes, ddof=1)]).astype(np.float32)


@dataclass(frozen=True)
class ColourLock(Stage):
    """Moves mean and deviation of every channel of the new latents towards the first segment's
    (adaptive instance normalisation), before they are decoded. kept: latent frames of the part
    before, which stay. share: 0 leaves all, 1 moves all the way."""

    first: SegmentFile
    kept: int
    share: float
    name = "colour lock"

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        assert state.video is not None, "nothing was denoised"
        new = state.video[:, :, self.kept :]
        shape = (1, -1, 1, 1, 1)
        mean, deviation = (x.reshape(shape) for x in statistics(new))
        aim, spread = (x.reshape(shape) for x in np.load(self.first.path.with_suffix(LOOK)))
        locked = (new - mean) * (spread / np.maximum(deviation, 1e-5)) + aim
        moved = (1 - np.float32(self.share)) * new + np.float32(self.share) * locked
        state.video = np.concatenate([state.video[:, :, : self.kept], moved], 2).astype(np.float32)


@dataclass(frozen=True)
class Keep(Stage):
    """Writes the segment that was made, and clears the state for the next one. number: from 1; of:
    how many there are. look: whether the statistics of its latents are kept for `ColourLock`."""

    part: SegmentFile
    number: int
    of: int
    look: bool = False
    name = SEGMENT

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        if session.backend.is_main:
            self._write(next(state.frames), state)
        for frames in state.frames:
            deque(frames, maxlen=0)
        watch.check()  # all processes wait for the file
        with watch.stage(SEGMENT, 1) as step:  # for observers
            step()
        own = takewhile(lambda stage: stage.name != SEGMENT, reversed(watch.stages[:-1]))
        took_s, others = sum(stage.time_s for stage in own), self.of - self.number
        left = f", about {took_s * others:.0f} s left" if others else ""
        watch.say(f"segment {self.number} of {self.of}: {took_s:.1f} s{left}")
        empty = State(keep=state.keep, folder=state.folder, origin=state.origin)
        for f in fields(State):
            setattr(state, f.name, getattr(empty, f.name))

    def _write(self, frames: Iterator[np.ndarray], state: State) -> None:
        """The frames come last: with them the segment is there."""
        info = self.part.info
        if state.keep:
            own = {f"segment{self.number}.{name}": x for name, x in state.record.items()}
            with durable(self.part.record_path) as partial:
                write_arrays(partial, own)
        if state.mel is not None:
            _save(self.part.path.with_suffix(MEL), state.mel)
        if self.look and state.video is not None:
            _save(self.part.path.with_suffix(LOOK), statistics(state.video))
        with durable(self.part.path) as partial:
            write_mp4(
                partial,
                frames,
                num_frames=info.num_frames,
                fps=info.fps,
                waveform=None if state.waveforms is None else state.waveforms[0],
                sample_rate=state.sample_rate or 0,
                origin=state.origin,
                container=EXACT_CODES if self.part.wide else EXACT,
            )
        for path in self.part.path.parent.glob(f"{SEGMENT}{self.number}.*{STEPS}"):
            path.unlink()


def _save(path: Path, array: np.ndarray) -> None:
    with durable(path) as partial, partial.open("wb") as file:
        np.save(file, array)


@dataclass(frozen=True)
class JoinSegments(Stage):
    """The clip of all segments, of which each is read up to where the next one begins. sound: of a
    file, that they were made for."""

    parts: Sequence[SegmentFile]
    sound: SourceSound | None = None
    name = "segments"

    @property
    def makes(self) -> Collection[str]:  # type: ignore[override]
        return (FRAMES, SOUND) if self.parts[0].info.has_sound else (FRAMES,)

    def check(self, session: Session) -> Sequence[str]:
        return self.sound.check(session) if self.sound else ()

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        if not session.backend.is_main:
            return
        state.frames = iter([self._frames()])
        if self.parts[0].info.has_sound:
            rate = self.sound.heard[1] if self.sound else session.config.vocoder.sample_rate
            heard = [
                part.samples(part.sample(part.start, rate), part.sample(stop, rate))
                for part, stop in stops(self.parts)
            ]
            state.hear(np.concatenate(heard, axis=1)[None], rate)
        for part in self.parts if state.keep else ():
            file = TensorFile(part.record_path)
            state.record |= {name: file.read(name) for name in file.names()}

    def _frames(self) -> Iterator[np.ndarray]:
        for part, stop in stops(self.parts):
            yield from part.chunks(stop)


def stops(parts: Sequence[SegmentFile]) -> Iterator[tuple[SegmentFile, int]]:
    """Each part with the clip's frame up to which it is shown: where the next one begins."""
    for part, following in pairwise(parts):
        yield part, following.start
    yield parts[-1], parts[-1].start + parts[-1].info.num_frames
