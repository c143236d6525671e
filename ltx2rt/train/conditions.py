"""Tokens of a training sample that are given: clean, without noise and without a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.models.geometry import Geometry, pixel_frames
from ltx2rt.stages.noise import uniform
from ltx2rt.train.request import TrainRequest


def given_tokens(
    r: TrainRequest,
    g: Geometry,
    latents: Mapping[str, np.ndarray],
    stream: str,
    streams: Sequence[str] = ("video", "audio"),
) -> dict[str, np.ndarray]:
    """Return bool[tokens] of either stream: the tokens of one sample that the conditions of a
    resolved request give.

    latents: of them mask f32[f, h, w] and audio_mask f32[n], above 0.5 where tokens are given.
    stream: the sample's random numbers. streams: the present ones.
    """
    video = np.zeros((g.frames, g.rows, g.columns), bool)
    audio = np.zeros(g.audio_latents, bool)

    def drawn(name: str, share: float | None) -> bool:
        return bool(uniform(r.seed, f"{stream}.{name}", 1)[0] < (share or 0))

    if drawn("first_frame", r.first_frame):
        video[:1] = True
    for name, span in (("prefix", r.prefix), ("suffix", r.suffix)):
        count, share = span or (0, 0.0)
        if drawn(name, share):
            sizes = span_of(name, count, g, "video" in streams)
            for given, size in zip((video, audio), sizes, strict=True):
                given[slice(size) if name == "prefix" else slice(len(given) - size, None)] = True
    if drawn("mask", r.mask):
        video |= latents.get("mask", np.float32(0)) > 0.5
        audio |= latents.get("audio_mask", np.float32(0)) > 0.5
    if r.crop and drawn("crop", r.crop[-1]):
        rows, columns = rectangle(r.crop[:4], g)
        video[:, rows, columns] = True
    return {"video": video.reshape(-1), "audio": audio}


def span_of(name: str, count: int, g: Geometry, shown: bool) -> tuple[int, int]:
    """Return how many latent frames are given, and latents of the sound of their time; without a
    picture, `count` counts these. At most half of a clip that is no longer than the span."""
    whole = g.frames if shown else g.audio_latents
    given = min(count, max(1, whole // 2)) if count >= whole else count
    if not shown:
        return 0, given
    factor = g.time_factor
    kept = pixel_frames(given, factor) if name == "prefix" else given * factor
    return given, round(g.audio_latents * kept / pixel_frames(g.frames, factor))


def rectangle(sides: tuple[int, ...], g: Geometry) -> tuple[slice, slice]:
    """Return the latent rows and columns that are whole in a rectangle of pixels (top, left,
    bottom, right); of 0, 0, 0, 0 the middle half of both."""
    if not any(sides):
        rows, columns = (slice(n // 4, max(n // 4 + 1, n - n // 4)) for n in (g.rows, g.columns))
        return rows, columns
    top, left, bottom, right = sides
    rows, columns = (
        slice(-(-first // g.space_factor), min(last, side) // g.space_factor)
        for first, last, side in zip((top, left), (bottom, right), g.size_px, strict=True)
    )
    if rows.start >= rows.stop or columns.start >= columns.stop:
        height, width = g.size_px
        raise InputError(
            f"--crop: {','.join(map(str, sides))} holds no whole square of {g.space_factor} "
            f"pixels of a clip of {width}x{height}; choose a larger rectangle"
        )
    return rows, columns
