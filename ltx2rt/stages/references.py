"""Videos and latents that add their tokens to the clip's own, for IC-LoRAs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.media.footage import Footage
from ltx2rt.media.images import fit
from ltx2rt.media.video import is_still
from ltx2rt.models.geometry import Geometry, pack_video, pixel_frames, video_positions
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.conditioning import Conditioning, ImageSpec, Still, Tokens
from ltx2rt.stages.source_video import SourceVideo
from ltx2rt.stages.stage import State
from ltx2rt.stages.tiling import plan_encoder_tiles


@dataclass(frozen=True)
class Reference(Conditioning):
    """A video that adds its tokens to the clip's (IC-LoRA). Each covers `downscale` times as many
    rows and columns of pixels as one of the clip's.

    source: what reads it, with a geometry of its own at the clip's rate, and a stride in time.
    clip: the stage's geometry. attention: how much its tokens and the clip's see of each other, 0
    to 1; mask: a video by whose brightness this is multiplied. number: among the references, from
    0.
    """

    kind: ClassVar[str] = "videos"
    source: SourceVideo
    clip: Geometry
    number: int = 0
    strength: float = 1.0
    downscale: int = 1
    attention: float = 1.0
    mask: Path | None = None

    @property
    def num_frames(self) -> int:
        return pixel_frames(self.clip.frames, self.clip.time_factor)

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        return self.source.needs(model)

    def check(self, session: Session) -> list[str]:
        self._weights()
        file, used, fps = self.source.footage, self.source.num_frames, float(self.clip.fps)
        path, info = file.path, file.info
        found = [f"{path}: {sentence}" for sentence in info.said()]
        if is_still(path):
            return [f"{path}: one picture, the reference of every frame", *found]
        if used < self.num_frames:
            found.append(
                f"{path}: {used} frames are read; the other {self.num_frames - used} have no "
                "reference"
            )
        if info.fps != self.clip.fps and not path.is_dir():
            found.append(
                f"{path}: has {float(info.fps):g} fps, its frames are taken one by one as if it "
                f"had {fps:g}"
            )
        return found

    def blank(self) -> Tokens:
        masked = self.mask is not None or self.attention < 1
        g = self.source.geometry
        weights = np.ones(g.num_video_tokens, np.float32) if masked else None
        return self._tokens(np.zeros(g.video_shape, np.float32), weights)

    def encode(self, session: Session, state: State, watch: Stopwatch) -> Tokens:
        latent = self.source.encode(session, watch)
        state.put(f"reference.{self.number}", latent)
        return self._tokens(latent, self._weights())

    def _tokens(self, latent: np.ndarray, weights: np.ndarray | None) -> Tokens:
        positions = video_positions(self.source.geometry, self.downscale, self.source.stride)
        return Tokens(
            pack_video(latent), np.float32(1) - np.float32(self.strength), positions, weights
        )

    def _weights(self) -> np.ndarray | None:
        """f32[T], what `ModalityState.attention` reads; None: all ones."""
        g, scale = self.source.geometry, np.float32(self.attention)
        if self.mask is not None:
            grid = (g.frames, g.rows, g.columns)
            mask = Footage.read(self.mask, "--conditioning-attention-mask", self.num_frames)
            mask = replace(mask.part(0, self.num_frames), resize=self.source.footage.resize)
            return brightness(mask, self.clip.size_px, grid).ravel() * scale
        return np.full(g.num_video_tokens, scale) if self.attention < 1 else None


@dataclass(frozen=True)
class ClipGuide(Still):
    """The clip of `spec`. As video is compressed, its frames are not compressed again."""

    kind: ClassVar[str] = "images"
    source: SourceVideo

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        return self.source.needs(model)

    def said(self) -> Iterator[str]:
        """Sentences about its frames."""
        file, fps, at = self.source.footage, self.geometry.fps, self.spec.frame
        rate = "" if file.info.fps == fps else f", one by one as if it had {float(fps):g} fps"
        frames = f"frames {file.taken[0]} to {file.taken[-1]} guide"
        used = f"its {frames} the clip from frame {at} on{rate}"
        return (f"{file.path}: {sentence}" for sentence in (*file.info.said(), used))

    def blank(self) -> Tokens:
        return self.tokens(np.zeros(self.source.geometry.video_shape, np.float32))

    def encode(self, session: Session, state: State, watch: Stopwatch) -> Tokens:
        return self.tokens(self.source.encode(session, watch))


def guide(spec: ImageSpec, geometry: Geometry, tiling: str, append: bool) -> Iterator[ClipGuide]:
    """The clip's frames up to the end of the one that is made, as far as there are any,
    time_factor*k + 1. tiling: mode of `plan_encoder_tiles`. Raises InputError."""
    g, start = geometry, spec.first
    end = start + pixel_frames(g.frames, g.time_factor) - spec.frame
    file = Footage.read(spec.path, "--image", end)
    if (left := min(file.info.num_frames, end) - start) > 0:
        own = replace(g, frames=(left - 1) // g.time_factor + 1)
        seen = file.part(start, start + pixel_frames(own.frames, g.time_factor))
        source = SourceVideo(seen, own, plan_encoder_tiles(tiling, own))
        yield ClipGuide(spec, g, source, append=append)


def brightness(video: Footage, size_px: tuple[int, int], grid: tuple[int, int, int]) -> np.ndarray:
    """Weight of each token of a reference: the brightness of a video, f32[frames, rows,
    columns] in [0, 1].

    Its frames, scaled to cover size_px (height, width) and cropped, averaged over colours and over
    the pixels of each cell of `grid`; its first frame is the mask's first, each other one the mean
    of as many frames. Raises InputError if these do not divide.
    """
    frames, rows, columns = grid
    height, width = size_px
    count = len(video.taken)
    if (count - 1) % max(frames - 1, 1) or count < frames:
        raise InputError(
            f"{video.flag}: {video.path} has {count} frames, expected {frames} or more, of which "
            f"all but the first divide by {frames - 1}; give it as many as the reference"
        )
    cells = np.empty((count, rows, columns), np.float32)
    for cell, pixels in zip(cells, video.frames(), strict=True):
        grey = ((fit(pixels, width, height).mean(0) + 1) / 2).clip(0, 1)
        cell[:] = grey.reshape(rows, height // rows, columns, width // columns).mean((1, 3))
    later = cells[1:].reshape(frames - 1, -1, rows, columns).mean(1) if frames > 1 else cells[:0]
    return np.concatenate([cells[:1], later])


@dataclass(frozen=True)
class StageReference(Conditioning):
    """Latents that an earlier stage made, whole, as reference tokens added to the clip's (IC-LoRA).

    latents: their name in the state's; geometry: theirs. downscale: rows and columns of pixels of
    the clip that one of theirs covers.
    """

    latents: str
    geometry: Geometry
    downscale: int

    def blank(self) -> Tokens:
        return self._tokens(np.zeros(self.geometry.video_shape, np.float32))

    def encode(self, session: Session, state: State, watch: Stopwatch) -> Tokens:
        return self._tokens(state.latents[self.latents])

    def _tokens(self, latent: np.ndarray) -> Tokens:
        return Tokens(
            pack_video(latent), np.float32(0), video_positions(self.geometry, self.downscale)
        )
