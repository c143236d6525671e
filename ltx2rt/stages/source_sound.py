"""source sound: a file's sound to the audio latents that a clip is made for, and to the waveform
that it is given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np

from ltx2rt.config import AudioVaeConfig, ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.media.sound import read_sound, resample, stretched
from ltx2rt.models.geometry import Geometry, pixel_frames
from ltx2rt.models.mel import WINDOW, log_mel
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.stage import Stage, State, finite, say

SLACK_S = 0.01  # silence at the end of a clip, where codecs cut a sound


def frames_within(seconds: float, fps: Fraction, step: int) -> int:
    """The most frames, step*k + 1, that last no longer."""
    most = math.floor((Fraction(seconds + SLACK_S) * fps - 1) / step)
    return max(most, 0) * step + 1


@dataclass(frozen=True)
class SourceSound(Stage):
    """path: any file with sound, of which `max_duration_s` (None: as long as the clip) from
    `start_s` on are used.

    fit: of sound that ends before the clip's latents, "error" refuses it, "pad" appends silence to
    the clip's end, and "zeros" appends zeros to its latents; then sound that begins after `start_s`
    also has silence before it. sound: whether it becomes the clip's sound. record: the latents'
    name in `--latents-out`. track: as of `Tracks.audio`. speed: as of `Footage`.
    """

    path: Path
    geometry: Geometry
    start_s: float = 0.0
    max_duration_s: float | None = None
    fit: str = "error"
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
    def read(self) -> tuple[np.ndarray, int]:
        """The file's sound in that time, f32[1 or 2, N], and its rate. Raises InputError."""
        return self._read[:2]

    @cached_property
    def _read(self) -> tuple[np.ndarray, int, list[str]]:
        """The result of `read`, and sentences about missing parts of the file."""
        duration_s = self.clip_s if self.max_duration_s is None else self.max_duration_s
        said: list[str] = []
        how = {"on_time": self.fit == "zeros", "say": said.append, "track": self.track}
        read, rate = read_sound(self.path, self.start_s, duration_s * float(self.speed), **how)
        if self.speed != 1:
            stereo = np.broadcast_to(read, (2, read.shape[1]))
            read = np.concatenate([*stretched([stereo], rate, self.speed)], 1)
        return read[:, : round(duration_s * rate)], rate, said

    @property
    def needed(self) -> int:
        """Mel samples for all latents: the last one's first mel frame, and its mirror."""
        g = self.geometry
        encoded = 1 if self.fit == "zeros" else g.audio_latents
        return max((encoded - 1) * g.audio_time_factor * g.mel_hop, WINDOW // 2 + 1)

    @property
    def padding(self) -> int:
        """Samples of silence that the file's sound lacks."""
        waveform, rate = self.read
        size, to = waveform.shape[1], self.geometry.mel_sample_rate
        if -(-size * to // rate) >= self.needed:
            return 0
        return max(round(self.clip_s * rate), math.ceil(self.needed * rate / to)) - size

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        yield Call("audio-encoder", self.geometry.mel_shape(model.audio_vae))

    def check(self, session: Session) -> None:
        """Reads the file whole: the length in its header may be wrong."""
        waveform, rate, missing = self._read
        said = list(missing)
        if len(waveform) == 1:
            said.append(f"{self.path}: its one channel is played left and right")
        if self.padding:
            length_s, needed_s = (
                waveform.shape[1] / rate,
                self.needed / self.geometry.mel_sample_rate,
            )
            lasts = f"{self.path}: its sound lasts {length_s:.4f} s"
            if self.fit == "error":
                g, heard_s = self.geometry, waveform.shape[1] / rate
                fitting = frames_within(heard_s, g.fps, g.time_factor)
                raise InputError(
                    f"{lasts}, a clip of {self.clip_s:.4f} s needs {needed_s:.4f} s; {fitting} "
                    f"frames fit ({float(fitting / g.fps):.4f} s); leave the length out, or fill up "
                    "with silence by --audio-fit pad"
                )
            said.append(f"{lasts}; silence follows up to {self.clip_s:.4f} s")
        say(session, said)

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        (call,) = self.needs(session.config)
        with watch.stage(self.name):
            waveform, rate = self.read
            waveform = np.pad(
                np.broadcast_to(waveform, (2, waveform.shape[1])), ((0, 0), (0, self.padding))
            )[None]
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
