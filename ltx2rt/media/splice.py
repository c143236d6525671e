"""A clip of which a part was made anew, put into the clip that it was made from.

Decides what is copied: outside the part that was made, every pixel and every sample is the source's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ltx2rt.media.mp4 import to_rgb8

FADE_S = 0.005  # from the source's sound to the new one, within the part: a jump would click


def splice_frames(chunks: Iterable[np.ndarray], source: Iterable[np.ndarray], made: range) -> Iterator[np.ndarray]:
    """The frames of `made` from the chunks, all others from the source; u8[n, H, W, 3], chunk by chunk.

    chunks: f32[3, n, H, W] in [-1, 1] or u8[n, H, W, 3] of the whole clip; source: u8[H, W, 3] for each of its frames,
    taken as they are needed. made: pixel frames. Raises ValueError if the source ends early or has another size.
    """
    frames, first = iter(source), 0
    for chunk in chunks:
        rgb = np.array(to_rgb8(chunk))
        for number, pixels in enumerate(rgb, first):
            kept = next(frames, None)
            if kept is None or kept.shape != pixels.shape:
                found = "nothing" if kept is None else f"{kept.shape[1]}x{kept.shape[0]}"
                raise ValueError(f"source: {found} at frame {number}, expected {rgb.shape[2]}x{rgb.shape[1]}")
            if number not in made:
                pixels[:] = kept
        first += len(rgb)
        yield rgb


def splice_sound(made: np.ndarray, source: np.ndarray, start_s: float, end_s: float, sample_rate: int) -> np.ndarray:
    """The samples of [start_s, end_s) from `made`, with a short fade at either end, all others from the source.

    made f32[2, N]; source f32[2, M] at the same rate, silent after its end. Returns f32[2, N].
    """
    size = made.shape[1]
    kept = np.pad(source[:, :size], ((0, 0), (0, max(size - source.shape[1], 0))))
    start, end = (min(max(round(s * sample_rate), 0), size) for s in (start_s, end_s))
    fade = round(FADE_S * sample_rate)
    at = np.arange(start, end, dtype=np.float32)
    rise = 1.0 if start == 0 else (at - start + 1) / (fade + 1)
    fall = 1.0 if end == size else (end - at) / (fade + 1)
    weight = np.clip(np.minimum(rise, fall), 0, 1).astype(np.float32)
    out = kept.astype(np.float32)
    out[:, start:end] += weight * (made[:, start:end] - out[:, start:end])
    return out
