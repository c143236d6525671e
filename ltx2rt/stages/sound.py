"""audio: decode the chosen audio latents to waveforms in chunks of one length, so that a clip of
another length builds no program.

Devices share the vocoder's chunks. Every process makes the whole spectrogram for them, which takes a
fiftieth of the vocoder's time; only the main one gets waveforms. The official pipelines decode a
clip at once; a chunk brings all that its kept part depends on, and ends where the clip ends, so that
the result is the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

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
Finished = Callable[[], None]  # called after every chunk


@dataclass(frozen=True)
class Sound(Stage):
    geometry: Geometry
    num_videos: int = 1
    name = "audio"
    makes = (SOUND,)

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        latents = latent_chunks(model, self.geometry.audio_latents)
        mel = mel_chunks(model, self.vocoded(model))
        heard = self.geometry.mel_shape(model.audio_vae)
        for _ in range(self.num_videos):
            yield from latents.calls("audio-decoder", self.geometry.audio_shape)
            yield from mel.calls("vocoder", heard, each=True)

    def vocoded(self, model: ModelConfig) -> int:
        """Mel frames that the vocoder is given."""
        return self.geometry.mel_shape(model.audio_vae)[2]

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        assert state.sound is not None, "no stage kept its sound"
        with watch.stage(self.name, len([*self.needs(session.config)]), "chunks") as done:

            def finished() -> None:
                done()
                watch.check()

            mel, waveforms = self.decode(session, state.sound, finished)
        if waveforms.size:
            finite(self.name, waveforms=waveforms)
            state.mel = mel
            state.hear(waveforms, session.config.vocoder.sample_rate)

    def decode(
        self, session: Session, latent: np.ndarray, finished: Finished
    ) -> tuple[np.ndarray, np.ndarray]:
        return decode_sound(session, latent, finished)


def decode_sound(
    session: Session, latent: np.ndarray, finished: Finished = lambda: None
) -> tuple[np.ndarray, np.ndarray]:
    """Normalised latent [B,8,n,16] -> mel [B,2,T,64] and waveform [B,2,N] at
    config.vocoder.sample_rate, as `vocode` makes it."""
    mel = decode_mel(session, latent, finished)
    return mel, vocode(session, mel, finished)


def decode_mel(session: Session, latent: np.ndarray, finished: Finished) -> np.ndarray:
    """Normalised latent [B,8,n,16] -> mel [B,2,T,64], the natural logarithm."""
    factor = session.config.audio_vae.time_factor
    parts = latent_chunks(session.config, latent.shape[2])
    results = (
        session.run(Call("audio-decoder", part.shape), {"latent": part})["mel"]
        for part in parts.cut(latent)
    )
    return parts.join(_taken(session, results, finished), factor, early=factor - 1)


def vocode(session: Session, mel: np.ndarray, finished: Finished) -> np.ndarray:
    """mel [B,2,T,64], the same in all processes -> waveform [B,2,N] at config.vocoder.sample_rate;
    of no samples where only the main process has it."""
    config, parts = session.config.vocoder, mel_chunks(session.config, mel.shape[2])
    calls = ((Call("vocoder", part.shape), vocoder.feeds(config, part)) for part in parts.cut(mel))
    # closed if `finished` raises, so that no process waits for another's chunk
    with closing(session.each(calls, "waveform")) as results:
        made = _taken(session, results, finished)
    return parts.join(made, vocoder.frame_samples(config)) if made else mel[..., :0, 0]


def _taken(session: Session, results: Iterable[Any], finished: Finished) -> list[np.ndarray]:
    """The results that are there, on the host."""
    made = []
    for result in results:
        if result is not None:
            made.append(session.backend.to_host(result))
        finished()
    return made


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

    def calls(self, network: str, whole: tuple[int, ...], each: bool = False) -> list[Call]:
        """Calls of a network for all parts of one sample."""
        return [Call(network, (*whole[:2], self.size, *whole[3:]), each=each)] * len(self.parts)

    def cut(self, x: np.ndarray) -> Iterator[np.ndarray]:
        """The parts of x [B, ...], [1, ...] each, of one sample after the other."""
        for sample in videos_of(x):
            for chunk in self.parts:
                at = np.arange(chunk.start, chunk.start + self.size).clip(0, x.shape[2] - 1)
                yield sample.take(at, axis=2)

    def join(self, made: list[np.ndarray], factor: int, early: int = 0) -> np.ndarray:
        """Join the results of all parts as if of the whole. Position i becomes [factor i, factor
        (i + 1)) - early, from 0 on."""
        pieces = []
        for i, chunk in enumerate(self.parts):
            first, last = max(0, factor * chunk.first - early), factor * chunk.stop - early
            kept = slice(first - factor * chunk.start, last - factor * chunk.start)
            pieces.append(np.concatenate(made[i :: len(self.parts)])[:, :, kept])
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
