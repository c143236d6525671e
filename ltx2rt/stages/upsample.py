"""upsample: video latents to more rows and columns, or to more frames."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.models.geometry import Geometry
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.stage import Stage, State, videos_of


@dataclass(frozen=True)
class Upsample(Stage):
    """geometry: of the latents that it reads. scale: of rows and columns, for which the sizes were chosen."""

    geometry: Geometry
    num_videos: int = 1
    scale: Fraction = Fraction(2)
    name = "upsample"

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        """Raises InputError if the upsampler found is of another scale."""
        if model.upsampler and model.upsampler.scale != self.scale:
            raise InputError(
                f"--upsampler: it is a {model.upsampler.kind} one, a x{float(self.scale):g} spatial one is expected "
                "here; pass one with --upsampler"
            )
        yield Call("upsampler", self.geometry.video_shape, self.num_videos)

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        assert state.video is not None, "nothing was denoised"
        (call,) = self.needs(session.config)
        with watch.stage(self.name):
            found = [session.run(call, {"latent": x})["latent"] for x in videos_of(state.video)]
            state.video = np.concatenate([session.backend.to_host(x) for x in found])
        state.put("upsampled", state.video)


@dataclass(frozen=True)
class UpsampleTime(Upsample):
    """f latent frames to 2f - 1, which play at twice the rate."""

    name = "upsample time"

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        yield Call("temporal-upsampler", self.geometry.video_shape, self.num_videos)
