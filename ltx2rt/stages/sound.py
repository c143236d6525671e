"""audio: the chosen audio latents to waveforms. Processes other than the main one have nothing to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.models import vocoder
from ltx2rt.models.geometry import Geometry
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.stage import Stage, State, finite, videos_of


@dataclass(frozen=True)
class Sound(Stage):
    geometry: Geometry
    num_videos: int = 1
    name = "audio"

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        yield Call("audio-decoder", self.geometry.audio_shape, self.num_videos)
        yield Call("vocoder", self.geometry.mel_shape(model.audio_vae), self.num_videos)

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        if not session.backend.is_main and session.backend.num_processes > 1:
            return
        assert state.sound is not None, "no stage kept its sound"
        with watch.stage(self.name):
            state.waveforms = np.concatenate([decode_sound(session, x)[1] for x in videos_of(state.sound)])
        state.sample_rate = session.config.vocoder.sample_rate
        finite(self.name, waveforms=state.waveforms)
        state.put("waveform", state.waveforms if self.num_videos > 1 else state.waveforms[0])


def decode_sound(session: Session, latent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Normalised latent [B,8,n,16] -> mel [B,2,T,64] and waveform [B,2,N] at config.vocoder.sample_rate."""
    mel = session.backend.to_host(session.run(Call("audio-decoder", latent.shape), {"latent": latent})["mel"])
    outputs = session.run(Call("vocoder", mel.shape), vocoder.feeds(session.config.vocoder, mel))
    return mel, session.backend.to_host(outputs["waveform"])
