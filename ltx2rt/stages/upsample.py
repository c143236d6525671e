"""upsample: video latents to twice their rows and columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.models.geometry import Geometry
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.stage import Stage, State, videos_of


@dataclass(frozen=True)
class Upsample(Stage):
    """geometry: of the latents that it reads."""

    geometry: Geometry
    num_videos: int = 1
    name = "upsample"

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        yield Call("upsampler", self.geometry.video_shape, self.num_videos)

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        assert state.video is not None, "nothing was denoised"
        (call,) = self.needs(session.config)
        with watch.stage(self.name):
            found = [session.run(call, {"latent": x})["latent"] for x in videos_of(state.video)]
            state.video = np.concatenate([session.backend.to_host(x) for x in found])
        state.put("upsampled", state.video)
