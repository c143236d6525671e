"""Inpainting and outpainting: which pixels of a clip are regenerated, which of its latent cells
hold one of them, and the clip's own pixels everywhere else.

Decides which pixels the encoder sees in the generated region, and how far they fade into the
clip's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from pathlib import Path

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.media.footage import Footage
from ltx2rt.media.images import Resize, read_rgb, readable
from ltx2rt.media.mp4 import to_rgb8
from ltx2rt.models.geometry import Geometry, pixel_frames
from ltx2rt.stages.inset import lasting
from ltx2rt.stages.source_video import SourceVideo
from ltx2rt.stages.stage import FramesStage

FLAG = "--mask"
WHITE = 127.5  # brightness above which a pixel of a mask is white
GREEN = np.array([0x66, 0xFF, 0x00], np.uint8)  # what in- and outpainting IC-LoRAs are shown
FADE_PX = 4  # on either side of the region's edge
FILLS = ("mean", "green", "none")


@dataclass(frozen=True)
class Region:
    """The white pixels of a mask, grown by `grow` pixels, and a border around the clip's frames.

    path: an image or a video, None for none. size_px: height and width of the frames. pad: pixels
    added left, above, right and below. box: a rectangle of white: left, top, width and
    height in pixels of the file. resize: what brings a mask of the file's size to the clip's.
    start: the first frame of a part of the clip, up to `num_frames`. speed: of the clip's
    `Footage`, and of a video's. span: the frames of the clip of which a part
    is made, None: all.
    """

    path: Path | None
    size_px: tuple[int, int]
    num_frames: int
    grow: int = 0
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)
    box: tuple[int, int, int, int] | None = None
    resize: Resize | None = None
    start: int = 0
    speed: Fraction = Fraction(1)
    span: range | None = None

    def check(self) -> None:
        """Refuse a mask that is not of the clip's size, or shorter. Raises InputError."""
        if self.path is None or readable(self.path):
            return
        if (count := self._video.info.num_frames) < self.num_frames:
            raise InputError(
                f"{FLAG}: {self.path} has {count} frames, the clip has {self.num_frames}; pass an "
                "image, or as many frames"
            )

    @property
    def _video(self) -> Footage:
        assert self.path is not None, "a region without a file is a box"
        return Footage.read(self.path, FLAG, ceil(self.num_frames * self.speed)).retimed(self.speed)

    def _drawn(self) -> Iterator[np.ndarray]:
        """bool[H, W] of the mask for each frame: white, and grown; nothing outside the span."""
        for number, drawn in enumerate(self._painted(), self.start):
            yield drawn if self.span is None or number in self.span else np.zeros_like(drawn)

    def _painted(self) -> Iterator[np.ndarray]:
        if self.path and not readable(self.path):
            yield from map(self._grown, self._video.part(self.start, self.num_frames).frames())
            return
        if self.path:
            pixels = read_rgb(self.path, FLAG)
        else:
            columns, rows = self.resize.given if self.resize else self.size_px[::-1]
            left, top, width, height = self.box or (0, 0, 0, 0)
            pixels = np.zeros((rows, columns, 3), np.uint8)
            pixels[top : top + height, left : left + width] = 255
        drawn = self._grown(pixels)
        yield from (drawn for _ in range(self.start, self.num_frames))

    def _grown(self, pixels: np.ndarray) -> np.ndarray:
        if self.resize and pixels.shape[:2] != self.size_px:
            pixels = self.resize(pixels)
        if pixels.shape[:2] != self.size_px:
            found, expected = (f"{w}x{h}" for h, w in (pixels.shape[:2], self.size_px))
            raise InputError(
                f"{FLAG}: {self.path} is {found}, the clip {expected}; give it the clip's size"
            )
        return near(pixels.mean(axis=2) > WHITE, self.grow) > 0

    def masks(self) -> Iterator[np.ndarray]:
        """bool[H, W] of every frame with its border: whether a pixel is regenerated."""
        for drawn in self._drawn():
            yield np.pad(drawn, self._widths, constant_values=True)

    @property
    def _widths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        left, top, right, bottom = self.pad
        return (top, bottom), (left, right)

    def cells(self, geometry: Geometry) -> np.ndarray:
        """Return f32[f, h, w] of latents: 1 for a cell that has a pixel to make, or that touches
        the border, where edges of frames are repeated; 0 elsewhere."""
        g = geometry
        found = np.zeros((g.frames, g.rows, g.columns), np.float32)
        count = pixel_frames(g.frames, g.time_factor)
        height, width = g.size_px
        for number, mask in enumerate(lasting(self.masks(), count)):
            over = ((0, height - mask.shape[0]), (0, width - mask.shape[1]))
            mask = np.pad(mask, over, mode="edge")
            cell = mask.reshape(g.rows, g.space_factor, g.columns, g.space_factor).any((1, 3))
            latent = (number + g.time_factor - 1) // g.time_factor
            found[latent] = np.maximum(found[latent], cell)
        left, top, right, bottom = self.pad
        below, beyond = height - (self.size_px[0] + top), width - (self.size_px[1] + left)
        widths = (left, top, right and beyond, bottom and below)
        left, top, right, bottom = (px // g.space_factor + 1 if px else 0 for px in widths)
        found[:, :top], found[:, g.rows - bottom :] = 1, 1
        found[:, :, :left], found[:, :, g.columns - right :] = 1, 1
        return found

    def filled(
        self, frames: Iterator[np.ndarray], fill: str, border: np.ndarray | None = None
    ) -> Iterator[np.ndarray]:
        """The frames u8[H, W, 3] with the mask's pixels filled (FILLS; "mean": of a frame's other
        pixels), and a border around them of a colour or of their edges."""
        left, top, _, _ = self.pad
        for pixels, drawn in zip(frames, self._drawn(), strict=True):
            if fill != "none" and drawn.any():
                pixels, kept = pixels.copy(), pixels[~drawn]
                mean = kept.mean(0) + 0.5 if len(kept) else np.full(3, 127)
                pixels[drawn] = GREEN if fill == "green" else mean.astype(np.uint8)
            padded = np.pad(pixels, (*self._widths, (0, 0)), mode="edge")
            if border is not None:
                height, width = pixels.shape[:2]
                padded[:] = border
                padded[top : top + height, left : left + width] = pixels
            yield padded

    def composed(
        self, chunks: Iterator[np.ndarray], frames: Iterator[np.ndarray]
    ) -> Iterator[np.ndarray]:
        """Made pixels in the region, the clip's own elsewhere, u8[n, H, W, 3] chunk by chunk; they
        fade into each other within FADE_PX of the region's edge. chunks: f32[3, n, H, W] in [-1, 1]
        or u8[n, H, W, 3]; frames: u8[H, W, 3] without border."""
        given = zip(frames, self.masks(), strict=True)
        for chunk in chunks:
            rgb = np.array(to_rgb8(chunk))
            for made in rgb:
                pixels, mask = next(given)
                share = near(mask, FADE_PX)[..., None]
                kept = np.pad(pixels, (*self._widths, (0, 0)), mode="edge").astype(np.float32)
                made[:] = np.rint(kept + share * (made - kept)).astype(np.uint8)
            yield rgb


def near(mask: np.ndarray, radius: int) -> np.ndarray:
    """f32[H, W]: the share of white pixels of bool[H, W] in the square of `radius` pixels around
    each, cut at the picture's edges."""
    found, counted = mask.astype(np.float64), 1.0
    for axis in (0, 1):
        size = mask.shape[axis]
        start = np.maximum(np.arange(size) - radius, 0)
        stop = np.minimum(np.arange(size) + radius + 1, size)
        total = np.cumsum(found, axis=axis)
        total = np.concatenate([np.zeros_like(total.take([0], axis)), total], axis=axis)
        found = total.take(stop, axis) - total.take(start, axis)
        counted = counted * np.expand_dims(stop - start, 1 - axis)
    return (found / counted).astype(np.float32)


@dataclass(frozen=True)
class RegionVideo(SourceVideo):
    """A file's frames as its region's model sees them. fill: of FILLS; border: its colour."""

    region: Region = field(kw_only=True)
    fill: str = "mean"
    border: np.ndarray | None = None

    def pictures(self) -> Iterator[np.ndarray]:
        seen = self.region.filled(self.shown(), self.fill, self.border)
        read = enumerate(lasting(seen, self.num_frames))
        return (pixels for i, pixels in read if i == 0 or (i - 1) % self.stride == 0)


@dataclass(frozen=True)
class Compose(FramesStage):
    """Restore the source's own pixels outside the regenerated region."""

    video: SourceVideo
    region: Region
    name = "compose"

    def changed(self, chunks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        return self.region.composed(chunks, self.video.shown())
