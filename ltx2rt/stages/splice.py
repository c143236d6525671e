"""splice: a source's own frames and sound outside the regenerated part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.media.sound import resample
from ltx2rt.media.splice import splice_frames, splice_sound
from ltx2rt.media.video import read_frames
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.source_video import SourceVideo
from ltx2rt.stages.stage import Stage, State


@dataclass(frozen=True)
class Splice(Stage):
    """video, sound: the source, as long as the clip; None: it has no sound, and the clip's stays as
    it is. frames: the regenerated pixel frames, seconds: the part of the sound. The clip
    gets the rate of the source's sound."""

    video: SourceVideo
    sound: SourceSound | None
    frames: range
    seconds: tuple[float, float]
    name = "splice"

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        return iter(())

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        state.frames = map(self._frames, state.frames)
        if self.sound is None or state.waveforms is None or state.sample_rate is None:
            return
        with watch.stage(self.name):
            source, rate = self.sound.read
            source = np.broadcast_to(source, (2, source.shape[1]))
            made = resample(state.waveforms, state.sample_rate, rate)
            size = round(self.sound.clip_s * rate)
            made = np.pad(made, ((0, 0), (0, 0), (0, max(size - made.shape[2], 0))))[..., :size]
            state.waveforms = np.stack(
                [splice_sound(one, source, *self.seconds, rate) for one in made]
            )
            state.sample_rate = rate
        state.put("waveform", state.waveforms if len(made) > 1 else state.waveforms[0])

    def _frames(self, chunks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        source = read_frames(self.video.path, self.video.flag, self.video.num_frames)
        return splice_frames(chunks, source, self.frames)
