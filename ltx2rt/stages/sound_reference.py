"""Sound that adds tokens to the clip's own, for LoRAs that have learnt to follow them.

Decides when they are heard: each at its own time in the file, or all of them before the clip.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError, concerning
from ltx2rt.media.sound import read_sound, stretched
from ltx2rt.models.geometry import Geometry, audio_positions, pack_audio
from ltx2rt.models.mel import WINDOW
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.conditioning import Conditioning, Tokens
from ltx2rt.stages.source_sound import encode_sound
from ltx2rt.stages.stage import State, finite

GAP_S = np.float32(0.04)  # between the end of sound before a clip and its start, as DubIt has it
MAX_S = 20.0  # limit of the model's time axis
QUIET = 1e-3  # root mean square below which sound is silent: -60 dB of full scale


@dataclass(frozen=True)
class LatentSound(Conditioning):
    """The state's latest audio latents, given as sound before the clip."""

    clip: Geometry

    def blank(self) -> Tokens:
        return beside(np.zeros(self.clip.audio_shape, np.float32), self.clip, before=True)

    def encode(self, session: Session, state: State, watch: Stopwatch) -> Tokens:
        assert state.audio is not None, "the stage before makes sound"
        return beside(state.audio, self.clip, before=True)


@dataclass(frozen=True)
class SoundReference(Conditioning):
    """A file's sound. flag: that names it; clip: the stage's geometry.

    before: its tokens are before the clip; else each has its time in the file, also beyond the
    clip's end. strength: 1 keeps them exactly. silent: a silent file is taken as well. The file is
    used from start_s on, at most most_s of it as it is played. track, speed: as of `SourceSound`.
    """

    kind: ClassVar[str] = "sound"
    path: Path
    clip: Geometry
    flag: str
    before: bool = False
    strength: float = 1.0
    silent: bool = False
    start_s: float = 0.0
    most_s: float = MAX_S
    track: int | None = None
    speed: Fraction = Fraction(1)

    @cached_property
    def sound(self) -> tuple[np.ndarray, int, list[str]]:
        """f32[2, N], the rate in Hz, and sentences about omitted parts. Raises InputError."""
        g, said = self.clip, []
        how = {"on_time": not self.before, "say": said.append}
        with concerning(self.flag):
            read_s = (self.most_s + 1.0) * float(self.speed)
            found, rate = read_sound(self.path, self.start_s, read_s, **how, track=self.track)
        if len(found) == 1:
            said.append(f"{self.path}: its one channel is taken as left and right")
            found = np.broadcast_to(found, (2, found.shape[1]))
        found = np.concatenate([*stretched([found], rate, self.speed)], 1)
        if found.shape[1] > (size := round(self.most_s * rate)):
            if self.most_s == MAX_S:
                said.append(f"{self.path}: its first {MAX_S:g} s are used, the longest reference")
            found = found[:, :size]
        least_s = (WINDOW // 2 + 1) / g.mel_sample_rate
        if found.shape[1] < (least_s + 1 / g.mel_sample_rate) * rate:
            raise InputError(
                f"{self.flag}: {self.path} holds {found.shape[1] / rate:.4f} s of sound, expected "
                f"more than {least_s:.4f} s; pass a longer file"
            )
        if np.sqrt(np.square(found, dtype=np.float64).mean()) < QUIET:
            quiet = f"{self.path} is silent, below -60 dB"
            if not self.silent:
                raise InputError(f"{self.flag}: {quiet}; pass a file with sound to follow")
            said.append(f"{quiet}: there is no voice to keep")
        return found, rate, said

    @property
    def geometry(self) -> Geometry:
        """The clip's geometry, with the audio latents of the file's sound."""
        g, (waveform, rate, _) = self.clip, self.sound
        mel_frames = -(-waveform.shape[1] * g.mel_sample_rate // rate) // g.mel_hop + 1
        return replace(g, audio_latents=-(-mel_frames // g.audio_time_factor))

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        yield Call("audio-encoder", self.geometry.mel_shape(model.audio_vae))

    def check(self, session: Session) -> list[str]:
        return self.sound[2]

    def blank(self) -> Tokens:
        return self._tokens(np.zeros(self.geometry.audio_shape, np.float32))

    def encode(self, session: Session, state: State, watch: Stopwatch) -> Tokens:
        latent = self.latents(session)
        state.put("reference.audio", latent)
        return self._tokens(latent)

    def latents(self, session: Session) -> np.ndarray:
        """f32[1, 8, n, 16], normalised."""
        (call,) = self.needs(session.config)
        waveform, rate, _ = self.sound
        latent = encode_sound(session, call, waveform[None], rate)
        finite(self.flag, latents=latent)
        return latent

    def _tokens(self, latent: np.ndarray) -> Tokens:
        return beside(latent, self.geometry, self.before, self.strength)


def beside(latent: np.ndarray, geometry: Geometry, before: bool, strength: float = 1.0) -> Tokens:
    """Tokens of latents [1, 8, n, 16] of a geometry. before: their last one ends GAP_S before the
    clip begins, which are negative times; else they have the times of the clip's own."""
    positions = audio_positions(geometry)
    if before:
        positions = positions - positions[0, -1, 1] - GAP_S
    mask = np.float32(1) - np.float32(strength)
    return Tokens(pack_audio(latent), mask, positions, modality="audio")
