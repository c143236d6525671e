"""audio: decode the chosen audio latents to waveforms in chunks of one length, so that a clip of
another length builds no program.

Processes other than the main one have nothing to do. The official pipelines decode a clip at once;
a chunk brings all that its kept part depends on, and ends where the clip ends, so that the result
is the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.models import audio_vae, vocoder
from ltx2rt.models.geometry import Geometry
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.stage import SOUND, Stage, State, finite, videos_of

# audio latents, 3.2 s: two such chunks are enough for the 126 latents of 121 frames at 24 per
# second
CHUNK = 80


@dataclass(frozen=True)
class Sound(Stage):
    geometry: Geometry
    num_videos: int = 1
    name = "audio"
    makes = (SOUND,)

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        mel = self.geometry.mel_shape(model.audio_vae)
        for network, shape, chunks in (
            (
                "audio-decoder",
                self.geometry.audio_shape,
                latent_chunks(model, self.geometry.audio_latents),
            ),
            ("vocoder", mel, mel_chunks(model, self.vocoded(model))),
        ):
            yield Call(network, chunks.shape(shape), times=len(chunks.parts) * self.num_videos)

    def vocoded(self, model: ModelConfig) -> int:
        """Mel frames that the vocoder is given."""
        return self.geometry.mel_shape(model.audio_vae)[2]

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        num_chunks = sum(call.times for call in self.needs(session.config))
        if not session.backend.is_main and session.backend.num_processes > 1:
            for _ in range(num_chunks):
                watch.check()
            return
        assert state.sound is not None, "no stage kept its sound"
        with watch.stage(self.name, num_chunks, "chunks") as done:

            def finished() -> None:
                done()
                watch.check()

            made = [self.decode(session, x, finished) for x in videos_of(state.sound)]
            state.mel, waveforms = map(np.concatenate, zip(*made, strict=True))
        finite(self.name, waveforms=waveforms)
        state.hear(waveforms, session.config.vocoder.sample_rate)

    def decode(
        self, session: Session, latent: np.ndarray, finished: Callable[[], None]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Decode like `decode_sound`."""
        return decode_sound(session, latent, finished)


def decode_sound(
    session: Session, latent: np.ndarray, finished: Callable[[], None] = lambda: None
) -> tuple[np.ndarray, np.ndarray]:
    """Normalised latent [B,8,n,16] -> mel [B,2,T,64] and waveform [B,2,N] at
    config.vocoder.sample_rate. finished: called after every chunk."""
    mel = decode_mel(session, latent, finished)
    return mel, vocode(session, mel, finished)


def decode_mel(session: Session, latent: np.ndarray, finished: Callable[[], None]) -> np.ndarray:
    """Normalised latent [B,8,n,16] -> mel [B,2,T,64], the natural logarithm."""

    def to_mel(part: np.ndarray) -> np.ndarray:
        outputs = session.run(Call("audio-decoder", part.shape), {"latent": part})
        mel = session.backend.to_host(outputs["mel"])
        finished()
        return mel

    factor = session.config.audio_vae.time_factor
    parts = latent_chunks(session.config, latent.shape[2])
    return parts.run(latent, to_mel, factor, early=factor - 1)


def vocode(
    session: Session, mel: np.ndarray, finished: Callable[[], None] = lambda: None
) -> np.ndarray:
    """mel [B,2,T,64] -> waveform [B,2,N] at config.vocoder.sample_rate."""
    config = session.config.vocoder

    def to_waveform(part: np.ndarray) -> np.ndarray:
        outputs = session.run(Call("vocoder", part.shape), vocoder.feeds(config, part))
        waveform = session.backend.to_host(outputs["waveform"])
        finished()
        return waveform

    parts = mel_chunks(session.config, mel.shape[2])
    return parts.run(mel, to_waveform, vocoder.frame_samples(config))


@dataclass(frozen=True)
class Chunk:
    """Positions [start, start + size) of a clip, of which the results of [first, stop) are kept.
    Positions outside the clip are too far from these to change them."""

    start: int
    first: int
    stop: int


@dataclass(frozen=True)
class Chunks:
    """Parts of one size that make a whole, along axis 2."""

    size: int
    parts: tuple[Chunk, ...]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return (*whole[:2], self.size, *whole[3:])

    def run(
        self,
        x: np.ndarray,
        network: Callable[[np.ndarray], np.ndarray],
        factor: int,
        early: int = 0,
    ):
        """`network` of x. Position i becomes [factor i, factor (i + 1)) - early, from 0 on."""
        pieces = []
        for chunk in self.parts:
            start, stop = max(chunk.start, 0), min(chunk.start + self.size, x.shape[2])
            beyond = (start - chunk.start, chunk.start + self.size - stop)
            part = np.pad(
                x[:, :, start:stop], [(0, 0), (0, 0), beyond] + [(0, 0)] * (x.ndim - 3), mode="edge"
            )
            first, last = max(0, factor * chunk.first - early), factor * chunk.stop - early
            pieces.append(
                network(part)[:, :, first - factor * chunk.start : last - factor * chunk.start]
            )
        return np.concatenate(pieces, axis=2)


def latent_chunks(model: ModelConfig, latents: int) -> Chunks:
    """Samples of a clip of `latents` audio latents."""
    return chunks(latents, CHUNK, audio_vae.reach(model.audio_vae))


def mel_chunks(model: ModelConfig, frames: int) -> Chunks:
    """Samples of a clip of `frames` mel frames."""
    return chunks(frames, CHUNK * model.audio_vae.time_factor, vocoder.reach(model.vocoder))


def chunks(length: int, size: int, reach: tuple[int, int] | None) -> Chunks:
    """Chunks of `size` that make `length` positions, each of which depends on reach[0] before and
    reach[1] after it. reach: None if the whole cannot be cut.

    The first begins where the clip begins and the last ends where it ends, for what a network pads
    there differs from layer to layer. In a clip shorter than both reaches some position is near
    both ends: that is one chunk of its own length.
    """
    before, after = reach or (length, length)
    step = size - before - after
    if step < 1 or length < before + after:
        return Chunks(length, (Chunk(0, 0, length),))
    starts = [0]
    while starts[-1] + step + size < length:
        starts.append(starts[-1] + step)
    if length > size or (after and length < size):  # a causal network's chunk may end anywhere
        starts.append(length - size)
    cuts = [0, *(max(start, 0) + before for start in starts[1:]), length]
    return Chunks(size, tuple(Chunk(*of) for of in zip(starts, cuts[:-1], cuts[1:], strict=True)))
