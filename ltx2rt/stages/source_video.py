"""source video: a given file to latents, in the tiles that the official pipelines encode it in.

Decides which pixels a tile reads and how tiles blend; at most one span of frames is held at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.media.footage import Footage
from ltx2rt.media.hdr import to_codes, to_model
from ltx2rt.media.images import contain, cover, fit
from ltx2rt.media.video import is_still
from ltx2rt.models.geometry import Geometry, pixel_frames
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.inset import Inset, lasting
from ltx2rt.stages.stage import Stage, State
from ltx2rt.stages.tiling import Span, Tiling


@dataclass(frozen=True)
class SourceVideo(Stage):
    """The first frames of the footage, up to the geometry's number, resized to cover its size and
    cropped.

    tiling: `plan_encoder_tiles`. stride: after the first two frames every `stride`-th. inset: the
    place of the file's pictures in the clip's; without, they are scaled to cover it. A file that
    ends earlier repeats its last frame, up to the next latent. space: of `media.hdr.SPACES`, of a
    folder of EXR images.
    """

    footage: Footage
    geometry: Geometry
    tiling: Tiling
    stride: int = 1
    inset: Inset | None = field(default=None, kw_only=True)
    space: str | None = field(default=None, kw_only=True)
    name = "source video"

    @property
    def start(self) -> int:
        return self.footage.taken.start

    @property
    def num_frames(self) -> int:
        """Frames of the file up to the last one that is encoded: two, then every `stride`-th."""
        count = pixel_frames(self.geometry.frames, self.geometry.time_factor)
        return 1 if count == 1 else 2 + (count - 2) * self.stride

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        for spans in self.tiling:
            yield Call("video-encoder", self._shape(*spans))

    def _shape(self, t: Span, r: Span, c: Span) -> tuple[int, ...]:
        g = self.geometry
        rows, columns = ((span.stop - span.start) * g.space_factor for span in (r, c))
        return (1, 3, pixel_frames(t.stop - t.start, g.time_factor), rows, columns)

    def check(self, session: Session) -> Sequence[str]:
        file, count = self.footage, self.footage.info.num_frames
        short = count - self.start <= self.num_frames - self.geometry.time_factor
        if short and not is_still(file.path):
            raise InputError(
                f"{file.flag}: {file.path} has {count} frames, {self.num_frames} are read; "
                "pass a longer one"
            )
        over = 0 if self.inset or file.window else count - self.num_frames
        return [f"{file.path}: the last {over} of its {count} frames are left out"] * (over > 0)

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        with watch.stage(self.name):
            state.source["video"] = self.encode(session, watch)
        state.put("source.video", state.source["video"])

    def pictures(self) -> Iterator[np.ndarray]:
        """The frames that are encoded, u8[H, W, 3] at the file's size."""
        read = enumerate(lasting(self.shown(), self.num_frames))
        return (pixels for i, pixels in read if i == 0 or (i - 1) % self.stride == 0)

    def fitted(self, pixels: np.ndarray) -> np.ndarray:
        """Scale u8[H, W, 3] to the geometry's size: f32[3, height, width] in [-1, 1]. EXR images
        become ACEScct codes; without an inset they lie within the size, mirrored around."""
        height, width = self.geometry.size_px
        if self.space is None and self.inset:
            half = np.float32(np.iinfo(pixels.dtype).max / 2)
            shown = cover(self.inset.pad(pixels.astype(np.float32)), width, height)
            return (shown / half - 1).transpose(2, 0, 1)
        if self.space is None:
            return fit(pixels, width, height)
        shown = self.inset.pad(pixels) if self.inset else pixels
        return to_model(contain(shown, width, height), self.space).transpose(2, 0, 1)

    def codes(self, frames: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """The file's frames as codes u16[H, W, 3] in high dynamic range; others as they are."""
        if self.space is None:
            return frames
        return (to_codes(np.moveaxis(to_model(x, self.space), 2, 0)[:, None])[0] for x in frames)

    def shown(self) -> Iterator[np.ndarray]:
        """The file's own frames from the first one on, up to the last that is encoded or there."""
        return self.footage.part(self.start, self.start + self.num_frames).frames()

    def encode(self, session: Session, watch: Stopwatch) -> np.ndarray:
        """The normalised latents, f32[1, C, f, h, w]."""
        g, latents = self.geometry, np.zeros(self.geometry.video_shape, np.float32)
        height, width = g.size_px
        frames = (self.fitted(pixels) for pixels in self.pictures())
        held, first = np.zeros((3, 0, height, width), np.float32), 0  # the frames from `first` on
        for t in self.tiling.frames:
            start, count = t.start * g.time_factor, pixel_frames(t.stop - t.start, g.time_factor)
            kept = held[:, start - first :]
            new = itertools.islice(frames, count - kept.shape[1])
            held, first = np.concatenate([kept, np.stack(list(new), 1)], 1), start
            for r, c in itertools.product(self.tiling.rows, self.tiling.columns):
                watch.check()
                rows, columns = (
                    slice(s.start * g.space_factor, s.stop * g.space_factor) for s in (r, c)
                )
                tile = np.ascontiguousarray(held[None, :, :, rows, columns])
                latent = session.run(Call("video-encoder", tile.shape), {"frames": tile})["latent"]
                weights = t.weights[:, None, None] * r.weights[:, None] * c.weights
                latents[:, :, t.positions, r.positions, c.positions] += (
                    session.backend.to_host(latent) * weights
                )
        return latents


def usable_frames(num_frames: int, time_factor: int, stride: int) -> int:
    """A file's frames that are encoded: every `stride`-th, cut to time_factor*k + 1."""
    taken = 1 + len(range(1, num_frames, stride))
    return (taken - 1) // time_factor * time_factor + 1
