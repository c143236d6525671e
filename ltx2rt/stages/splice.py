"""splice: a source's own frames and sound outside the regenerated part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ltx2rt.media.hdr import to_codes
from ltx2rt.media.mp4 import to_rgb8
from ltx2rt.media.sound import read_sound, resample
from ltx2rt.media.splice import splice_frames, splice_sound, stacked
from ltx2rt.media.video import VideoInfo, read_frames
from ltx2rt.session.session import Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.source_video import SourceVideo
from ltx2rt.stages.stage import FramesStage, State


@dataclass(frozen=True)
class Splice(FramesStage):
    """video, sound: the part of the source that the model sees, all of it or a window; sound None:
    it has none, and the clip's stays as it is. info: of the file. frames: the file's frames that
    are new, seconds: the part of its sound. The clip gets the rate of the source's sound."""

    video: SourceVideo
    sound: SourceSound | None
    info: VideoInfo
    frames: range
    seconds: tuple[float, float]
    name = "splice"

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        super().run(session, state, watch)
        if self.sound is None or state.waveforms is None or state.sample_rate is None:
            return
        with watch.stage(self.name):
            source, rate = self._source(self.sound)
            made = resample(state.waveforms, state.sample_rate, rate)
            first = round(self.video.start / self.info.fps * rate)
            made = made[..., : max(source.shape[1] - first, 0)]
            after = source.shape[1] - first - made.shape[2]
            made = np.pad(made, ((0, 0), (0, 0), (first, after)))
            spliced = [splice_sound(one, source, *self.seconds, rate) for one in made]
            state.hear(np.stack(spliced), rate)

    def _source(self, sound: SourceSound) -> tuple[np.ndarray, int]:
        """f32[2, N] of the whole file, as long as its frames, and the rate in Hz."""
        length_s = float(self.info.num_frames / self.info.fps)
        start_s = float(self.info.times_s[0])
        found, rate = read_sound(sound.path, start_s, length_s, on_time=True, say=lambda text: None)
        over = max(round(length_s * rate) - found.shape[1], 0)
        return np.pad(np.broadcast_to(found, (2, found.shape[1])), ((0, 0), (0, over))), rate

    def changed(self, chunks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        start = self.video.start
        source = self.video.codes(
            read_frames(
                self.video.path, self.video.flag, self.info.num_frames, False, self.info.resize
            )
        )
        levels = to_codes if self.video.space else to_rgb8
        yield from stacked(islice(source, start))
        made = range(self.frames.start - start, self.frames.stop - start)
        yield from splice_frames(chunks, source, made, levels)
        yield from stacked(source)
