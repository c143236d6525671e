"""upsample: video latents to more rows and columns, or to more frames."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.models.geometry import Geometry
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.stage import Stage, State, videos_of


@dataclass(frozen=True)
class Upsample(Stage):
    """geometry: of the latents that it reads. scale: of rows and columns. keyframes: number of
    generated ones that it upsamples, like the latent frames of a clip."""

    geometry: Geometry
    num_videos: int = 1
    scale: Fraction = Fraction(2)
    keyframes: int = 0
    name = "upsample"
    network: ClassVar[str] = "upsampler"

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        """Raises InputError if the upsampler found is of another scale."""
        if model.upsampler and model.upsampler.scale != self.scale:
            raise InputError(
                f"--upsampler: it is a {model.upsampler.kind} one, a x{float(self.scale):g} "
                "spatial one is expected here; pass one with --upsampler"
            )
        for frames in (self.geometry.frames, self.keyframes):
            if frames:
                shape = replace(self.geometry, frames=frames).video_shape
                yield from [Call(self.network, shape)] * self.num_videos

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        assert state.video is not None, "nothing was denoised"
        with watch.stage(self.name):
            state.video = self._upsampled(session, state.video)
            if self.keyframes:
                frames = sorted(state.keyframes)
                latents = np.concatenate([state.keyframes[i] for i in frames], axis=2)
                found = self._upsampled(session, latents)
                each = np.split(found, len(frames), axis=2)
                state.keyframes = dict(zip(frames, each, strict=True))
                state.put("upsampled_keyframes", found)
        state.put("upsampled", state.video)

    def _upsampled(self, session: Session, latents: np.ndarray) -> np.ndarray:
        """latents: [videos, C, f, h, w]."""
        made = [
            session.run(Call(self.network, x.shape), {"latent": x})["latent"]
            for x in videos_of(latents)
        ]
        return np.concatenate([session.backend.to_host(x) for x in made])


@dataclass(frozen=True)
class UpsampleTime(Upsample):
    """f latent frames to 2f - 1, which play at twice the rate; keyframes stay, at twice the pixel
    frame. round: its number, from 1. The state keeps the latents under its name."""

    round: int = 1
    network: ClassVar[str] = "temporal-upsampler"

    @property
    def name(self) -> str:  # pyrefly: ignore[bad-override]
        return f"round{self.round}_upsample"

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        yield from [Call(self.network, self.geometry.video_shape)] * self.num_videos

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        assert state.video is not None, "nothing was denoised"
        with watch.stage(self.name):
            state.video = state.latents[self.name] = self._upsampled(session, state.video)
        state.keyframes = {2 * frame: latent for frame, latent in state.keyframes.items()}
        state.put(f"upsampled_round{self.round}", state.video)
