"""decode: video latents to frames, tile by tile, while the frames before are taken."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.models.geometry import Geometry, pixel_frames
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.stage import Stage, State, finite, videos_of
from ltx2rt.stages.tiling import Tiling, blend_tiles, plan_tiles, tile_latents


def tiling(geometry: Geometry, model: ModelConfig, mode: str) -> Tiling:
    """The tiles of a clip. mode: "auto", or "off" for one tile."""
    return plan_tiles(mode, (geometry.frames, geometry.rows, geometry.columns), model.video_vae)


@dataclass(frozen=True)
class Frames(Stage):
    """All devices share the tiles; the main process gets all frames, another one nothing, but takes part."""

    geometry: Geometry
    tiling: Tiling
    num_videos: int = 1
    name = "decode"

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        tiles = list(itertools.product(self.tiling.frames, self.tiling.rows, self.tiling.columns))
        for spans in tiles * self.num_videos:
            latent = (1, self.geometry.video_channels, *(s.stop - s.start for s in spans))
            yield Call("video-decoder", latent, each=True)

    def steps(self) -> int:
        return len(self.tiling.frames) * self.num_videos

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        assert state.video is not None, "nothing was denoised"
        finite(self.name, latents=state.video)
        state.put("video_latent", state.video)
        state.frames = self._frames(session, state.video, watch)

    def _frames(self, session: Session, latents: np.ndarray, watch: Stopwatch) -> Iterator[Iterator[np.ndarray]]:
        backend, videos = session.backend, videos_of(latents)
        tiles = itertools.chain.from_iterable(tile_latents(video, self.tiling) for video in videos)
        decoded = session.each(decoding(map(watch.checked, tiles)), "frames")
        num_frames = pixel_frames(self.geometry.frames, session.config.video_vae.time_factor)
        if not backend.is_main:
            with watch.stage(self.name):
                deque(decoded, maxlen=0)
            return

        def chunks(video: int) -> Iterator[np.ndarray]:
            name = self.name if len(videos) == 1 else f"{self.name} {video + 1}"
            with watch.stage(name, num_frames, "frames") as done:
                for chunk in blend_tiles(decoded, self.tiling, backend.to_host):
                    done(chunk.shape[1])
                    yield chunk

        yield from map(chunks, range(len(videos)))


def decoding(latents: Iterator[np.ndarray]) -> Iterator[tuple[Call, dict[str, np.ndarray]]]:
    """The decoder's call for each latent."""
    for latent in latents:
        yield Call("video-decoder", latent.shape), {"latent": latent}
