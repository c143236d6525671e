"""Video files that a run is given: their sizes and times, and their frames one after another.

Decides rotation and which files are refused. Frames come in the decoder's order, as the reference
reads them; sizes are changed by `ltx2rt.media.images.fit`. Nothing is kept: files are read again
for each use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.media.images import fit
from ltx2rt.media.mp4 import opened, tagged_s

HIGH_RANGES = {16: "PQ", 18: "HLG"}  # FFmpeg's AVCOL_TRC_*
SOUND_LONGER_S = 1  # than the picture, of a whole file


@dataclass(frozen=True)
class VideoInfo:
    """width, height: upright, in pixels. fps: the header's average. rotation: degrees
    counter-clockwise by which the decoder's frames are turned. times_s: of every frame, None if one
    has none; the first need not be 0, and the sound that belongs to it also starts there. ignored:
    a sentence for each thing in the file that reading leaves out.
    """

    width: int
    height: int
    num_frames: int
    fps: Fraction
    rotation: int
    has_sound: bool
    times_s: tuple[Fraction, ...] | None
    ignored: tuple[str, ...] = ()


def video_info(path: Path, flag: str, most: int | None = None) -> VideoInfo:
    """Facts of a video file; its frames are decoded, the first `most` of them or all, so that none
    fails later.

    flag: that names the file, for messages. Raises InputError if it is no video, is truncated or
    damaged, changes its size, or has no frame rate.
    """
    with _reading(path, flag) as (container, stream):
        times, packets, first = [], 0, None
        for packet in container.demux(stream):
            packets += packet.size > 0
            if packet.is_corrupt:
                raise _truncated(path, flag, len(times))
            for frame in packet.decode():
                first = first or frame
                if (frame.width, frame.height) != (first.width, first.height):
                    raise InputError(
                        f"{flag}: {path} changes its size at frame {len(times)}; cut it there"
                    )
                times.append(None if frame.pts is None else frame.pts * frame.time_base)
            if most is not None and len(times) >= most:
                break
        else:
            if packets != stream.frames and _ends_early(container, stream, times):
                raise _truncated(path, flag, len(times))
        fps = stream.average_rate or stream.guessed_rate
        if first is None or not fps:
            raise InputError(
                f"{flag}: {path} has no frames, or tells no frame rate; save it again as MP4"
            )
        turns = _quarter_turns(first)
        return VideoInfo(
            width=first.height if turns % 2 else first.width,
            height=first.width if turns % 2 else first.height,
            num_frames=len(times[:most]),
            fps=Fraction(fps),
            rotation=turns * 90,
            has_sound=bool(container.streams.audio),
            times_s=None if None in times else tuple(times[:most]),
            ignored=tuple(_ignored(stream, first)),
        )


def _ignored(stream: Any, frame: Any) -> Iterator[str]:
    if any(component.is_alpha for component in frame.format.components):
        yield "its alpha channel is dropped, what it hides becomes visible"
    if kind := HIGH_RANGES.get(stream.codec_context.color_trc):
        yield f"its colours of high dynamic range ({kind}) are read as if they were ordinary ones"
    if (aspect := stream.sample_aspect_ratio or 1) != 1:
        yield f"its pixels are {aspect.numerator}:{aspect.denominator}, and are read as square ones"
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is not None:
        a, b, _, c, d, *_ = np.frombuffer(matrix, np.int32).astype(float)
        if a * d < b * c:
            yield "its header mirrors it, which is not applied"


def _ends_early(container: Any, stream: Any, times: list[Fraction | None]) -> bool:
    """Whether frames end before the header's length, in a file that counts no frames or hides some
    by an edit list."""
    slack_s = SOUND_LONGER_S if container.streams.audio else 2 / (stream.average_rate or 1)
    end_s = Fraction(container.duration or 0, 10**6)
    if tag_s := tagged_s(stream):  # length of only the picture
        end_s, slack_s = tag_s, 2 / (stream.average_rate or 1)
    last = times[-1] if times else None
    return last is not None and last + slack_s < end_s


def _truncated(path: Path, flag: str, count: int) -> InputError:
    return InputError(f"{flag}: {path} is truncated: {count} frames can be decoded; copy it again")


def require_constant_rate(path: Path, flag: str, info: VideoInfo) -> None:
    """Refuse a file unless frame i is shown at i / fps, counted from its first frame. Raises
    InputError.

    Timestamps may be off by less than half a frame, as in containers that count milliseconds.
    """
    if info.times_s is None:
        raise InputError(f"{flag}: {path} has no timestamps; save it again as MP4")
    at = [(time - info.times_s[0]) * info.fps for time in info.times_s]
    gaps = [b - a for a, b in pairwise(at)]
    if any(abs(x - i) >= Fraction(1, 2) for i, x in enumerate(at)) or any(
        abs(gap - 1) >= 0.5 for gap in gaps
    ):
        low, high = (float(f(gaps) / info.fps) * 1000 for f in (min, max))
        raise InputError(
            f"{flag}: {path} has a variable frame rate ({float(info.fps):.5g} fps, but frames "
            f"last {low:.3g} to {high:.3g} ms); make it constant, such as with `ffmpeg -i IN -vf "
            "fps=24 OUT`"
        )


def read_frames(path: Path, flag: str, num_frames: int, wide: bool = False) -> Iterator[np.ndarray]:
    """The first `num_frames` frames in the decoder's order, upright, u8[H, W, 3] each, or u16 where
    they are `wide`; decoded as they are taken.

    Raises InputError if one cannot be decoded, which `video_info` finds out first.
    """
    count = 0
    with _reading(path, flag) as (container, stream):
        for frame in islice(container.decode(stream), num_frames):
            pixels = frame.to_ndarray(format="rgb48le" if wide else "rgb24")
            yield np.rot90(pixels, _quarter_turns(frame))
            count += 1
    if count < num_frames:
        raise _truncated(path, flag, count)


@contextmanager
def _reading(path: Path, flag: str) -> Iterator[tuple[Any, Any]]:
    """The container and its video stream, which is no cover picture. What FFmpeg refuses becomes
    one InputError."""
    from av.error import FFmpegError
    from av.stream import Disposition

    try:
        with opened(path) as container:
            moving = [
                s for s in container.streams.video if not s.disposition & Disposition.attached_pic
            ]
            if not moving:
                raise InputError(f"{flag}: {path} has no video; expected a file such as *.mp4")
            yield container, moving[0]
    except (FFmpegError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{flag}: {path} is no readable video ({reason}); save it again as MP4"
        ) from error


def _quarter_turns(frame: Any) -> int:
    """Counter-clockwise, from the display matrix; mirrored frames stay as they are."""
    return round(frame.rotation / 90) % 4


def read_mask(
    path: Path, flag: str, num_frames: int, size_px: tuple[int, int], grid: tuple[int, int, int]
) -> np.ndarray:
    """Weight of each token of a reference: the brightness of a video, f32[frames, rows,
    columns] in [0, 1].

    The first `num_frames` frames, resized to cover size_px (height, width) and cropped, averaged
    over colours and over the pixels of each cell of `grid`; its first frame is the mask's first,
    each other one the mean of as many frames. Raises InputError if these do not divide.
    """
    frames, rows, columns = grid
    height, width = size_px
    count = min(num_frames, video_info(path, flag, num_frames).num_frames)
    if (count - 1) % max(frames - 1, 1) or count < frames:
        raise InputError(
            f"{flag}: {path} has {count} frames, expected {frames} or more, of which all but the "
            f"first divide by {frames - 1}; give it as many as the reference"
        )
    cells = np.empty((count, rows, columns), np.float32)
    for cell, pixels in zip(cells, read_frames(path, flag, count), strict=True):
        grey = ((fit(pixels, width, height).mean(0) + 1) / 2).clip(0, 1)
        cell[:] = grey.reshape(rows, height // rows, columns, width // columns).mean((1, 3))
    later = cells[1:].reshape(frames - 1, -1, rows, columns).mean(1) if frames > 1 else cells[:0]
    return np.concatenate([cells[:1], later])
