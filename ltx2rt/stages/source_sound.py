"""source sound: a file's sound to the audio latents that a clip is made for, and to the waveform
that it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np

from ltx2rt.config import AudioVaeConfig, ModelConfig
from ltx2rt.media.mp4 import Sound, fitted_blocks
from ltx2rt.media.sound import resample, sound_blocks, stretched
from ltx2rt.models.geometry import Geometry, pixel_frames
from ltx2rt.models.mel import WINDOW, log_mel
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.stage import Stage, State, finite

SLACK_S = 0.01  # silence at the end of a clip, where codecs cut a sound


def frames_within(seconds: float, fps: Fraction, step: int) -> int:
    """The most frames, step*k + 1, that last no longer."""
    most = math.floor((Fraction(seconds + SLACK_S) * fps - 1) / step)
    return max(most, 0) * step + 1


@dataclass(frozen=True)
class SourceSound(Stage):
    """path: any file with sound, of which `max_duration_s` (None: as long as the clip) from
    `start_s` on are used.

    Silence follows a sound that ends before the clip's latents. zeros: zeros follow its latents
    instead, and silence precedes a sound that begins after `start_s`. sound: whether it becomes
    the clip's sound. record: the latents' name in `--latents-out`. track: as of `Tracks.audio`.
    speed: as of `Footage`.
    """

    path: Path
    geometry: Geometry
    start_s: float = 0.0
    max_duration_s: float | None = None
    zeros: bool = False
    num_videos: int = 1
    sound: bool = True
    record: str = "audio_input"
    track: int | None = None
    speed: Fraction = Fraction(1)
    name = "source sound"

    @property
    def clip_s(self) -> float:
        g = self.geometry
        return float(pixel_frames(g.frames, g.time_factor) / g.fps)

    @property
    def length_s(self) -> float:
        return self.clip_s if self.max_duration_s is None else self.max_duration_s

    def _blocks(self, say: Callable[[str], None]) -> Iterator[tuple[int, np.ndarray]]:
        how = {"on_time": self.zeros, "say": say, "track": self.track}
        return sound_blocks(self.path, self.start_s, self.length_s * float(self.speed), **how)

    @cached_property
    def heard(self) -> tuple[Sound, int, list[str]]:
        """The file's sound in that time, which may be long and is not kept, its rate, and sentences
        about it. Raises InputError."""
        said, size, rate, channels = list[str](), 0, 0, 0
        for hz, block in self._blocks(said.append):
            rate, channels, size = hz, len(block), size + block.shape[1]
        if channels == 1:
            said.append(f"{self.path}: its one channel is played left and right")
        size = min(round(size / self.speed), round(self.length_s * rate))

        def blocks() -> Iterator[np.ndarray]:
            read = (block for _, block in self._blocks(lambda text: None))
            stereo = (np.broadcast_to(block, (2, block.shape[1])) for block in read)
            return fitted_blocks(stretched(stereo, rate, self.speed), size)

        return Sound(size, blocks), rate, said

    @property
    def read(self) -> tuple[np.ndarray, int]:
        """The sound, f32[2, N], and its rate. Raises InputError."""
        return np.asarray(self.heard[0]), self.heard[1]

    @property
    def needed(self) -> int:
        """Mel samples for all latents: the last one's first mel frame, and its mirror."""
        g = self.geometry
        encoded = 1 if self.zeros else g.audio_latents
        return max((encoded - 1) * g.audio_time_factor * g.mel_hop, WINDOW // 2 + 1)

    def padding(self, size: int, rate: int) -> int:
        """Return the samples of silence that must follow `size` samples of the file."""
        to = self.geometry.mel_sample_rate
        if -(-size * to // rate) >= self.needed:
            return 0
        return max(round(self.clip_s * rate), math.ceil(self.needed * rate / to)) - size

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        yield Call("audio-encoder", self.geometry.mel_shape(model.audio_vae))

    def check(self, session: Session) -> Sequence[str]:
        """Reads the file whole: the length in its header may be wrong."""
        sound, rate, missing = self.heard
        said = [*missing]
        if self.padding(sound.size, rate):
            lasts = f"{self.path}: its sound lasts {sound.size / rate:.4f} s"
            said.append(f"{lasts}; silence follows up to {self.clip_s:.4f} s")
        return said

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        (call,) = self.needs(session.config)
        with watch.stage(self.name):
            waveform, rate = self.read
            padding = self.padding(waveform.shape[1], rate)
            waveform = np.pad(waveform, ((0, 0), (0, padding)))[None]
            latent = encode_sound(session, call, waveform, rate)
        finite(self.name, latents=latent)
        state.source["audio"] = latent
        state.put(self.record, latent)
        if self.sound:
            state.hear(np.repeat(waveform, self.num_videos, axis=0), rate)


def encode_sound(session: Session, call: Call, waveform: np.ndarray, rate: int) -> np.ndarray:
    """f32[1, 2, N] at `rate` Hz -> normalised latents of the call, f32[1, 8, n, 16]."""
    return encode_mel(session, call, spectrogram(waveform, rate, session.config.audio_vae))


def encode_mel(session: Session, call: Call, mel: np.ndarray) -> np.ndarray:
    """f32[1, 2, T, bins] -> normalised latents f32[1, 8, n, 16], zeros after the last frame."""
    mel = mel[:, :, : call.sizes[2]]  # no latent hears later
    heard = -(-mel.shape[2] // session.config.audio_vae.time_factor)
    mel = np.pad(mel, ((0, 0), (0, 0), (0, call.sizes[2] - mel.shape[2]), (0, 0)))
    latent = session.backend.to_host(session.run(call, {"mel": mel})["latent"])
    return np.where(np.arange(latent.shape[2])[:, None] < heard, latent, np.float32(0))


def spectrogram(waveform: np.ndarray, rate: int, config: AudioVaeConfig) -> np.ndarray:
    """f32[B, 2, N] at any rate -> f32[B, 2, T, mel bins], the audio encoder's input. Raises
    ValueError if N is too small for one mel frame."""
    return log_mel(resample(waveform, rate, config.sample_rate), config)
