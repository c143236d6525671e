"""The end or the beginning of a clip as a part of the clip that a stage makes: it continues the
one, or leads to the other.

Decides which frames are encoded and where their tokens go. The frames are encoded again, because
only a clip's first latent frame is one pixel frame: latents cut out of a longer clip would be at
the wrong place in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import ClassVar

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.models.geometry import Geometry, keyframe_positions, pack_video, pixel_frames
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.conditioning import Conditioning, Tokens
from ltx2rt.stages.inset import Inset
from ltx2rt.stages.joined import WholeClip
from ltx2rt.stages.source_video import SourceVideo
from ltx2rt.stages.stage import State
from ltx2rt.stages.tiling import plan_encoder_tiles


@dataclass(frozen=True)
class ClipFrames(SourceVideo):
    """Frames of a file from `first` on, which is shown `copies` times more; the geometry has the
    number of all. wide: as of `WholeClip`."""

    first: int = 0
    copies: int = 0
    wide: bool = False

    def pictures(self) -> Iterator[np.ndarray]:
        count = pixel_frames(self.geometry.frames, self.geometry.time_factor) - self.copies
        frames = self.footage.part(self.first, self.first + count).frames(self.wide)
        start = next(frames)
        return chain(repeat(start, self.copies + 1), frames)


@dataclass(frozen=True)
class ClipEnd(Conditioning):
    """Tokens of a file's frames at the stage's size.

    source: what encodes them; skip: how many of its latent frames are left out, whose past is not
    the clip's. latent: the stage's latent frame whose place the first of the others takes; frame:
    the pixel frame that they are appended at, instead. strength: 1 keeps them exactly. name: what
    `--latents-out` calls the latents.
    """

    kind: ClassVar[str] = "videos"
    source: SourceVideo
    clip: Geometry
    name: str
    skip: int = 0
    latent: int = 0
    frame: int | None = None
    strength: float = 1.0

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        return self.source.needs(model)

    def blank(self) -> Tokens:
        return self._tokens(np.zeros(self.source.geometry.video_shape, np.float32))

    def encode(self, session: Session, state: State, watch: Stopwatch) -> Tokens:
        latent = self.source.encode(session, watch)
        state.put(f"source.{self.name}", latent)
        return self._tokens(latent)

    def _tokens(self, latent: np.ndarray) -> Tokens:
        g = self.clip
        positions = None if self.frame is None else keyframe_positions(g, self.frame)
        mask = np.float32(1) - np.float32(self.strength)
        offset = self.latent * g.rows * g.columns
        return Tokens(pack_video(latent[:, :, self.skip :]), mask, positions, offset=offset)


def ends(
    clip: Geometry, before: WholeClip | None, after: WholeClip | None, overlap: int, guide: int,
    tiling: str, inset: Inset | None = None,
) -> Iterator[ClipEnd]:  # fmt: skip
    """The clip that continues `before` and leads to `after`.

    overlap: pixel frames of either that the stage's clip repeats, 8k + 1. guide: the clip's pixel
    frame that is the first of `after`. inset: as of `SourceVideo`. The encoder is causal,
    and its first latent is one frame: frames 1 to 8k of `after` are encoded after 9 equal frames,
    the two latents of these are left out, and frame 0 is a guide with the clip.
    """
    latents = (overlap - 1) // clip.time_factor + 1
    if before is not None:
        first = before.info.num_frames - overlap
        yield ClipEnd(_frames(clip, before, latents, first, 0, tiling, inset), clip, "tail")
    if after is not None:
        head = _frames(clip, after, latents + 1, 0, clip.time_factor, tiling, inset)
        place = clip.frames - (latents - 1)
        yield ClipEnd(head, clip, "head", skip=2, latent=place)
        yield ClipEnd(_frames(clip, after, 1, 0, 0, tiling, inset), clip, "first", frame=guide)


def leading(
    clip: Geometry, file: WholeClip, strength: float, tiling: str, inset: Inset | None,
) -> ClipEnd:  # fmt: skip
    """The first frame of a file as a guide one latent frame before the clip."""
    source = _frames(clip, file, 1, 0, 0, tiling, inset)
    return ClipEnd(source, clip, "anchor", frame=-clip.time_factor, strength=strength)


def _frames(
    clip: Geometry, file: WholeClip, count: int, first: int, copies: int, tiling: str,
    inset: Inset | None,
) -> ClipFrames:  # fmt: skip
    """`count` latent frames of a file at the clip's size. inset: as of `SourceVideo`."""
    g = replace(clip, frames=count)
    tiles = plan_encoder_tiles(tiling, g)
    how = {"wide": file.wide, "inset": inset}
    return ClipFrames(file.footage, g, tiles, first=first, copies=copies, **how)
