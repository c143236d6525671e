"""Video files that a run is given: their sizes and times, and their frames one after another.

Decides rotation, variable rates, high dynamic range, and which files are refused. Other frames are
in the decoder's order, as the reference reads them; sizes are changed by
`ltx2rt.media.images.fit`. Nothing is kept: files are read again for each use.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, partial
from itertools import islice, pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.media.hdr import is_exr, read_exr, tone_mapped, wide_to_709
from ltx2rt.media.images import STILL_BRANDS, Resize, read_rgb, readable
from ltx2rt.media.mp4 import BT709, BT2020, LIMITED_RANGE, MATRICES, USUAL, Colours
from ltx2rt.media.streams import CONTAINERS, chosen_video, moving, opened, sound_in, tagged_s

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")  # frames of a folder
MOVING = (".gif", ".mjpeg", ".mjpg")  # videos that begin as a picture does
NUMBERS, NUMBERED = re.compile(r"(\d+)"), re.compile(r"%(?:0\d)?d|#+")
HD, UNSPECIFIED = (1280, 720), 2  # pixels; FFmpeg's AVCOL_SPC_UNSPECIFIED
HIGH_RANGES = {16: "PQ", 18: "HLG"}  # FFmpeg's AVCOL_TRC_*
COMMON_RATES = (
    *(Fraction(n * 1000, 1001) for n in (24, 30, 60)), *map(Fraction, (24, 25, 30, 50, 60)),
)  # fmt: skip
# frames a second, usual for animations and cameras
MORE_RATES = tuple(map(Fraction, (5, 8, 10, 12, 15, 16, 18, 20, 48, 100, 120)))
ALPHA = "its alpha channel is dropped, what it hides becomes visible"
ODD = "it is {}x{}; the last pixels of odd sides are cut off"
# the most that gaps may add: an hour, or so many frames for each; beyond it, times are damaged
LONGEST_S, REPEATED = 3600, 100
MOST_REPEATED = Fraction(8, 5)  # frames in place of each that is there
ROUNDED_S = Fraction(1, 1000)  # containers may count milliseconds
SOUND_LONGER_S = 1  # than the picture, of a whole file


@dataclass(frozen=True)
class VideoInfo:
    """width, height: upright, in pixels, even: an odd one loses its last. fps: the header's
    average. rotation: degrees counter-clockwise by which the decoder's frames are turned. times_s:
    of every frame; the first need not be 0, and its sound starts there as well. pixel_aspect: the
    width of a pixel by its height, upright. sound_s: when the sound ends, by the header, after the
    first frame. colours: that a clip made of it keeps. ignored: a sentence for each thing that
    reading changes or leaves out. varies: the average rate of frames that come at no constant one,
    else 0. resampled: whether frames are found by their times."""

    width: int
    height: int
    num_frames: int
    fps: Fraction
    rotation: int
    has_sound: bool
    times_s: tuple[Fraction, ...]
    ignored: tuple[str, ...] = ()
    varies: Fraction = Fraction(0)
    resampled: bool = False
    pixel_aspect: Fraction = Fraction(1)
    sound_s: float = field(default=0.0, compare=False)
    colours: Colours = USUAL

    def said(self, fps: Fraction | None = None) -> Iterator[str]:
        """Sentences about changes; a variable rate is resampled to its own, or to `fps`."""
        if self.varies:
            yield (
                f"its frame rate varies around {float(self.varies):.4g} fps; it is resampled "
                f"to {float(fps or self.fps):.5g} fps"
            )
        yield from self.ignored


def video_info(
    path: Path, flag: str, most: int | None = None, track: int | None = None
) -> VideoInfo:
    """Facts of a video file; its frames are decoded, the first `most` of them or all, so that none
    fails later. Those of a file with a variable rate are the facts after resampling. flag: that
    names the file, for messages. track: as of `Tracks.video`. Raises InputError if it is no video,
    is truncated or damaged, changes its size, or has no frame rate."""
    files = folder_frames(path) or ([path] if path.is_file() else [])
    states = [file.stat() for file in files]
    return _info(
        path, flag, most, track, tuple((s.st_ino, s.st_size, s.st_mtime_ns) for s in states)
    )


def is_still(path: Path) -> bool:
    """Whether it is a file of one picture, by its header."""
    moves = path.suffix.lower() in MOVING or not path.is_file()
    return not moves and readable(path) and not is_animated(path)


def is_clip(path: Path) -> bool:
    """Whether it is a file of video, by its header, and no picture, also of a kind that cannot be
    read here."""
    from av.error import FFmpegError

    try:
        with opened(path) as container:
            still = container.metadata.get("major_brand") in STILL_BRANDS or readable(path)
            return bool(
                CONTAINERS.fullmatch(container.format.name) and not still and moving(container)
            )
    except (FFmpegError, OSError):
        return False


def folder_frames(path: Path) -> list[Path]:
    """The pictures of a folder, only of EXR if there are any, in the order of the numbers in their
    names; a still picture is one of its own; empty for a video file."""
    if not path.is_dir():
        return [path] if is_still(path) else []
    found = [file for file in path.iterdir() if file.name[0] != "."]
    kept = [f for f in found if is_exr(f)] or [f for f in found if f.suffix.lower() in PICTURES]
    return sorted(
        kept, key=lambda f: [int(x) if x.isdecimal() else x for x in NUMBERS.split(f.name)]
    )


def frames_path(given: Any) -> Path:
    """A path; the folder of numbered frames for their pattern. Raises InputError for pictures in
    the folder that the pattern leaves out."""
    path = Path(given)
    if not NUMBERED.search(path.name) or path.exists() or not path.parent.is_dir():
        return path
    before, after = map(re.escape, NUMBERED.split(path.name, maxsplit=1))
    for file in folder_frames(path.parent):
        if not re.fullmatch(rf"{before}\d+{after}", file.name):
            raise InputError(f"{path}: {file} is no such frame; move it to another folder")
    return path.parent


def is_light(path: Path) -> bool:
    """Whether it is a folder of EXR images, which hold light."""
    return path.is_dir() and any(map(is_exr, folder_frames(path)[:1]))


def _pictures_info(path: Path, flag: str, most: int | None) -> VideoInfo:
    """Facts of a folder of pictures, or of one, which say no rate: 24 fps; a folder's sound is a
    file of it."""
    files = folder_frames(path)[:most]
    if is_light(path):
        sizes = [read_exr(file, flag).shape[1::-1] for file in files]
    else:
        sizes = [read_rgb(file, flag).shape[1::-1] for file in files]
    if len(set(sizes)) != 1:
        none = "no pictures (*.png, *.jpg, *.exr); name a file"
        wrong = "images of several sizes; make them equal" if sizes else none
        raise InputError(f"{flag}: {path} is a folder with {wrong}")
    (width, height), fps = sizes[0], Fraction(24)
    times_s = tuple(i / fps for i in range(len(sizes)))
    odd = (ODD.format(width, height),) if width % 2 or height % 2 else ()
    heard = path.is_dir() and sound_in(path).is_file()
    return VideoInfo(width // 2 * 2, height // 2 * 2, len(sizes), fps, 0, heard, times_s, odd)


def _animated(path: Path, flag: str) -> Iterator[tuple[Fraction, np.ndarray]]:
    """Times and pictures of an animated WebP, which FFmpeg does not read; its end comes last,
    without a picture."""
    from PIL import Image, ImageSequence

    time, none = Fraction(0), np.zeros((0, 0, 3), np.uint8)
    try:
        with Image.open(path, formats=["WEBP"]) as image:
            for frame in ImageSequence.Iterator(image):
                pixels = np.asarray(frame.convert("RGB"))
                yield time, pixels[: image.height // 2 * 2, : image.width // 2 * 2]
                time += Fraction(max(int(frame.info.get("duration", 0)), 1), 1000)
    except Exception as error:  # Pillow's readers raise whatever a damaged file makes them do
        raise InputError(
            f"{flag}: {path} is no readable WebP ({error}); save it again as MP4"
        ) from error
    yield time, none


def _animated_info(path: Path, flag: str, most: int | None) -> VideoInfo:
    from PIL import Image

    *times, end = [time for time, _ in _animated(path, flag)]
    with Image.open(path, formats=["WEBP"]) as image:
        size = image.size
        alpha = image.mode == "RGBA" and image.getchannel("A").getextrema()[0] != 255
    odd = (ODD.format(*size),) if size[0] % 2 or size[1] % 2 else ()
    mean = Fraction(len(times)) / end
    timed = _timed(times, mean, (mean,), end - times[-1])
    hidden = (ALPHA,) if alpha else ()
    width, height = (side // 2 * 2 for side in size)
    shown = timed.times_s[:most]
    how = {
        "varies": timed.varies,
        "resampled": timed.resampled,
        "ignored": (*hidden, *odd, *timed.said),
    }
    return VideoInfo(width, height, len(shown), timed.fps, 0, False, shown, **how)


def is_animated(path: Path) -> bool:
    """Whether a PNG, a WebP, a GIF or an AVIF has several pictures."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(4096)
    if start[:3] == b"GIF":
        from PIL import Image

        try:
            with Image.open(path, formats=["GIF"]) as image:
                return int(getattr(image, "n_frames", 1)) > 1
        except Exception:  # a damaged one, of which FFmpeg says more
            return True
    moving_png = start[1:4] == b"PNG" and b"acTL" in start.partition(b"IDAT")[0]
    return moving_png or start[4:12] == b"ftypavis" or is_animated_webp(path)


def is_animated_webp(path: Path) -> bool:
    """Tell by the header: a file of several pictures."""
    with path.open("rb") as file:
        start = file.read(21)
    return start[:4] + start[8:16] == b"RIFFWEBPVP8X" and start[20:] > b"" and start[20] & 2 > 0


@lru_cache(maxsize=32)
def _info(path: Path, flag: str, most: int | None, track: int | None, state: Any) -> VideoInfo:
    """As `video_info`, once for each state of the file."""
    if path.is_dir() or is_still(path):
        return _pictures_info(path, flag, most)
    if path.is_file() and is_animated_webp(path):
        return _animated_info(path, flag, most)
    with _reading(path, flag, track) as (container, stream, said):
        scan = _Scan()
        scan.read(container, stream, path, flag, most)
        fps, first = stream.average_rate or stream.guessed_rate, scan.first
        if first is None or not fps:
            raise InputError(
                f"{flag}: {path} has no frames, or tells no frame rate; save it again as MP4"
            )
        fps, ignored = Fraction(fps), [*said, *_ignored(stream, first, scan.hides)]
        sounds = [s.codec_context is not None for s in container.streams.audio]
        if sounds and not any(sounds):
            ignored.append("its sound is of no known codec, and is left out")
        header = stream.average_rate, stream.guessed_rate
        timed = _timed(scan.times, fps, header, scan.length)
        ignored += timed.said
        begins_s = min(scan.begins, default=timed.times_s[0])
        if (late_s := float(timed.times_s[0] - begins_s)) > 1.5 / float(fps):
            ignored.append(f"its first {late_s:.3g} s cannot be decoded, and are left out")
        colour = _guessed_matrix(first)
        ignored += ["its colours are taken as BT.709, as players do at its size"] if colour else []
        (turns, _), size = _upright(first), (first.width // 2 * 2, first.height // 2 * 2)
        aspect = Fraction(stream.sample_aspect_ratio or 1)
        return VideoInfo(
            *(size[::-1] if turns % 2 else size),
            num_frames=len(timed.times_s[:most]),
            fps=timed.fps,
            rotation=turns * 90,
            has_sound=any(sounds),
            times_s=timed.times_s[:most],
            ignored=tuple(ignored),
            varies=timed.varies,
            resampled=timed.resampled,
            pixel_aspect=1 / aspect if turns % 2 else aspect,
            sound_s=_sound_end_s(container) - float(timed.times_s[0]),
            colours=_colours(stream.codec_context, first),
        )


@dataclass
class _Scan:
    """One pass over a stream. first: its first frame. times: of all; length: seconds of the last
    one, 0 if that is not the clip's. begins: times of packets before the first frame. hides:
    whether the alpha of any frame does."""

    first: Any = None
    times: list[Fraction | None] = field(default_factory=list)
    begins: list[Fraction] = field(default_factory=list)
    length: Fraction = Fraction(0)
    hides: bool = False

    def read(self, container: Any, stream: Any, path: Path, flag: str, most: int | None) -> None:
        """Decode the stream, up to its frame `most`. Raises InputError."""
        packets = 0
        for packet in container.demux(stream):
            packets += packet.size > 0
            if self.first is None and packet.pts is not None:
                self.begins.append(packet.pts * packet.time_base)
            if packet.is_corrupt:
                raise _truncated(path, flag, len(self.times))
            for frame in packet.decode():
                self.first = self.first or frame
                if (frame.width, frame.height) != (self.first.width, self.first.height):
                    raise InputError(
                        f"{flag}: {path} changes its size at frame {len(self.times)}; cut it there"
                    )
                self.times.append(None if frame.pts is None else frame.pts * frame.time_base)
                self.length = Fraction((frame.duration or 0) * frame.time_base)
                self.hides = self.hides or _hides(frame)
            if most is not None and len(self.times) >= most:
                self.length = Fraction(0)
                return
        if packets != stream.frames and _ends_early(container, stream, self.times, packets):
            raise _truncated(path, flag, len(self.times))


def _hides(frame: Any) -> bool:
    """Whether any pixel is not opaque. GIFs have an alpha channel, used or not."""
    alpha = any(component.is_alpha for component in frame.format.components)
    return alpha and bool(frame.to_ndarray(format="rgba")[..., 3].min() < 255)


@dataclass(frozen=True)
class _Timed:
    """A clip's rate and the time of each of its frames. resampled: whether they are found by time
    among the file's; varies: as of `VideoInfo`; said: sentences about what was changed."""

    fps: Fraction
    times_s: tuple[Fraction, ...]
    resampled: bool = False
    varies: Fraction = Fraction(0)
    said: tuple[str, ...] = ()


def _timed(
    given: Sequence[Fraction | None],
    fps: Fraction,
    header: Sequence[Fraction | None],
    length_s: Fraction,
) -> _Timed:
    """Frames of a file by their times. fps: by the header; header: its rates; length_s: of
    the last one, 0: unknown.

    Times that go back are counted off from the one before. The rate is that of most intervals, and
    gaps between frames, or a last one that lasts longer, repeat a frame; without such a rate the
    usual one nearest to the mean, or a lower one of whose frames all intervals are multiples.
    """
    times = [time for time in given if time is not None]
    back = sum(b <= a for a, b in pairwise(times))
    damaged = f"its timestamps are damaged; its frames are read at {float(fps):.4g} fps"
    counted = _Timed(fps, tuple(i / fps for i in range(len(given))), said=(damaged,))
    if len(times) < len(given):
        return replace(counted, said=())
    if 2 * back >= len(times) > 1:
        return counted
    found = _rate(times, header)
    for i in range(1, len(times)):
        if times[i] <= times[i - 1]:
            times[i] = times[i - 1] + 1 / (found or fps)
    said = [f"its timestamps go back in {back} places; frames are counted off there"] * (back > 0)
    constant = is_constant(times, fps)
    rate = fps if constant else found
    longer_s = length_s if len(times) > 1 and length_s > 3 / (2 * (rate or fps)) else 0
    if constant and not longer_s:
        return _Timed(fps, tuple(times), said=tuple(said))
    mean = (len(times) - 1) / (times[-1] - times[0])
    nearest = min(COMMON_RATES, key=lambda common: abs(common - mean))
    steps = [b - a for a, b in pairwise(times)]
    lower = (r for r in MORE_RATES if mean < r < nearest and _multiples(steps, r))
    rate = rate or next(lower, None)
    one = rate or nearest
    end_s = times[-1] - times[0] + (longer_s or 1 / (rate or mean))
    count = max(round(end_s * one), 1)
    if count > max(LONGEST_S * one, REPEATED * len(times)):
        return counted
    if rate and count > len(times):
        said += [f"it lacks {count - len(times)} frames; the one before each gap is shown longer"]
    shown = tuple(times[0] + i / one for i in range(count))
    return _Timed(one, shown, True, Fraction(0) if rate else mean, tuple(said))


def _rate(times: Sequence[Fraction], header: Sequence[Fraction | None]) -> Fraction | None:
    """The rate of more than half of the intervals, within a rounding of 1 ms, where the others are
    one missing frame each, a tenth of them at most, or whole numbers of frames that lengthen the
    clip little. None: there is no such rate."""
    steps = sorted(b - a for a, b in pairwise(times) if b > a)
    if not steps:
        return None
    rates = {Fraction(rate) for rate in (*header, *COMMON_RATES, *MORE_RATES) if rate}

    def near(rate: Fraction) -> tuple[int, bool, Fraction]:
        """Number of its intervals; whether the header agrees up to rounding; how near it is."""
        alike = [step for step in steps if abs(step - 1 / rate) <= min(ROUNDED_S, 1 / (4 * rate))]
        off = abs(sum(alike, Fraction(0)) / len(alike) - 1 / rate) if alike else Fraction(1)
        rounded_s = 2 * ROUNDED_S * (len(steps) - len(alike) + 1)
        return len(alike), rate in header and off * len(alike) <= rounded_s, -off

    rate = max(rates, key=near)
    alike = near(rate)[0]
    single = steps[-1] * rate < Fraction(5, 2)
    whole = sum(steps) * rate <= MOST_REPEATED * len(steps) and _multiples(steps, rate)
    few = single or whole or 10 * alike >= 9 * len(steps)
    return rate if 2 * alike > len(steps) and few else None


def _multiples(steps: Sequence[Fraction], rate: Fraction) -> bool:
    """Whether every interval is a whole number of frames at the rate, within a rounding of 1 ms."""
    slack = min(ROUNDED_S * rate, Fraction(1, 10))
    return all(abs(step * rate - max(round(step * rate), 1)) <= slack for step in steps)


def is_constant(times: Sequence[Fraction], fps: Fraction) -> bool:
    """Whether frame i is shown at i / fps, counted from the first one. Timestamps may be off by
    less than half a frame, as in containers that count milliseconds."""
    at = [(time - times[0]) * fps for time in times]
    near = all(abs(x - i) < 0.5 for i, x in enumerate(at))
    return near and all(abs(b - a - 1) < 0.5 for a, b in pairwise(at))


def _ignored(stream: Any, frame: Any, hides: bool) -> Iterator[str]:
    if hides or stream.metadata.get("alpha_mode") == "1":  # VP8 and VP9: decoders leave it out
        yield ALPHA
    if kind := HIGH_RANGES.get(stream.codec_context.color_trc):
        yield f"its colours of high dynamic range ({kind}) are tone-mapped to ordinary ones"
    elif stream.codec_context.color_primaries == BT2020:
        yield "its colours are brought from the primaries of BT.2020 to those of BT.709"
    if frame.interlaced_frame:
        yield "it is interlaced; the lines of two fields are seen as one frame"
    if frame.width % 2 or frame.height % 2:
        yield ODD.format(frame.width, frame.height)
    if (aspect := stream.sample_aspect_ratio or 1) != 1:
        yield f"its pixels are {aspect.numerator}:{aspect.denominator}; the model sees square ones"


def _colours(codec: Any, frame: Any) -> Colours:
    """The tags of a file in an ordinary range, where it names its matrix."""
    wide = codec.color_trc in HIGH_RANGES or codec.color_primaries == BT2020
    if wide or frame.format.is_rgb or frame.colorspace not in MATRICES:
        return USUAL
    tags = codec.color_primaries, codec.color_trc
    primaries, transfer = (BT709 if tag in (0, UNSPECIFIED) else tag for tag in tags)
    range_ = int(frame.color_range) or LIMITED_RANGE
    return Colours(int(frame.colorspace), primaries, transfer, range_)


def _sound_end_s(container: Any) -> float:
    """By the header; 0 where it does not say, or without sound."""
    for stream in container.streams.audio[:1]:
        return float(((stream.start_time or 0) + (stream.duration or 0)) * stream.time_base)
    return 0.0


def _ends_early(container: Any, stream: Any, times: list[Fraction | None], packets: int) -> bool:
    """Whether frames end before the header's length, where the file's count does not tell. An index
    lists the packets that an edit list leaves."""
    if stream.frames and container.format.name.startswith("mov") and len(stream.index_entries):
        return packets < len(stream.index_entries)
    tag_s = tagged_s(stream)  # length of only the picture
    end_s = tag_s or Fraction(container.duration or 0, 10**6)
    with_sound = container.streams.audio and not tag_s
    slack_s = SOUND_LONGER_S if with_sound else 2 / (stream.average_rate or 1)
    last = times[-1] if times else None
    return last is not None and last + slack_s < end_s


def _truncated(path: Path, flag: str, count: int) -> InputError:
    return InputError(f"{flag}: {path} is truncated: {count} frames can be decoded; copy it again")


def read_frames(
    path: Path,
    flag: str,
    num_frames: int,
    wide: bool = False,
    resize: Resize | None = None,
    track: int | None = None,
) -> Iterator[np.ndarray]:
    """The first `num_frames` frames, upright, u8[H, W, 3] each, or u16 where they are `wide`, f32
    of a folder of EXR images; decoded as they are taken. A variable rate is resampled by time, and
    high dynamic range is tone-mapped, unless wide. Raises InputError if one cannot be decoded,
    which `video_info` finds out first."""
    count, info = (
        0,
        video_info(path, flag, None, track),
    )  # a part of a variable rate has another average
    for pixels in islice(_resampled(_decoded(path, flag, wide, track), info), num_frames):
        yield resize(pixels) if resize else pixels
        count += 1
    if count < num_frames:
        raise _truncated(path, flag, count)


def _decoded(
    path: Path, flag: str, wide: bool, track: int | None = None
) -> Iterator[tuple[Fraction | None, np.ndarray]]:
    """Times and upright pixels of all frames."""
    if path.is_file() and is_animated_webp(path):
        yield from ((time, pixels) for time, pixels in _animated(path, flag) if pixels.size)
        return
    if path.is_dir() or is_still(path):
        for file in folder_frames(path):
            pixels = read_exr(file, flag) if is_exr(file) else read_rgb(file, flag)
            yield None, pixels[: pixels.shape[0] // 2 * 2, : pixels.shape[1] // 2 * 2]
        return
    with _reading(path, flag, track) as (container, stream, _):
        codec, shown = stream.codec_context, np.asarray
        if transfer := HIGH_RANGES.get(codec.color_trc):
            shown = partial(tone_mapped, transfer=transfer.lower())
        elif codec.color_primaries == BT2020:
            shown = wide_to_709
        sixteen = wide or shown is not np.asarray
        for frame in container.decode(stream):
            if _guessed_matrix(frame):
                frame.colorspace = BT709
            pixels = frame.to_ndarray(format="rgb48le" if sixteen else "rgb24")
            turns, mirrored = _upright(frame)
            pixels = np.rot90(pixels[:, ::-1] if mirrored else pixels, turns)
            pixels = pixels[: pixels.shape[0] // 2 * 2, : pixels.shape[1] // 2 * 2]
            time = None if frame.pts is None else frame.pts * frame.time_base
            yield time, pixels if wide else shown(pixels)


def _resampled(
    frames: Iterator[tuple[Fraction | None, np.ndarray]], info: VideoInfo
) -> Iterator[np.ndarray]:
    """The frame nearest to each time of the facts, or the one before a gap; at a constant rate all
    frames unchanged."""
    if not info.resampled:
        yield from (pixels for _, pixels in frames)
        return
    dues, half_s, at = deque(info.times_s), 1 / (2 * info.fps), Fraction(0)
    shown: np.ndarray | None = None
    for time, pixels in frames:
        since, at = at, at if time is None else time
        if shown is not None and at <= since:
            at = since + 2 * half_s  # as `_timed` counts
        while shown is not None and dues and dues[0] < at - min((at - since) / 2, half_s):
            dues.popleft()
            yield shown
        shown = pixels
    if shown is not None:
        yield from repeat(shown, len(dues))


def _guessed_matrix(frame: Any) -> bool:
    """Whether a frame has colours without a matrix, and a size at which players take BT.709."""
    large = frame.height >= HD[1] or frame.width >= HD[0]
    return large and not frame.format.is_rgb and frame.colorspace == UNSPECIFIED


@contextmanager
def _reading(
    path: Path, flag: str, track: int | None
) -> Iterator[tuple[Any, Any, tuple[str, ...]]]:
    """The container, the video stream of `chosen_video`, and sentences about the choice. FFmpeg's
    refusals become InputErrors."""
    from av.error import FFmpegError

    try:
        with opened(path) as container:
            choice = chosen_video(container, track)
            if not choice.indices:
                unknown = "has video of no known codec; save it again as MP4"
                none = "has no video; expected a file such as *.mp4"
                raise InputError(f"{flag}: {path} {unknown if moving(container) else none}")
            yield container, container.streams[choice.indices[0]], choice.said
    except (FFmpegError, OSError) as error:
        raise InputError(
            f"{flag}: {path} is no readable video "
            f"({getattr(error, 'strerror', None) or error}); save it again as MP4"
        ) from error


def _upright(frame: Any) -> tuple[int, bool]:
    """Quarter turns counter-clockwise that make a frame upright, once it is mirrored left to right
    if the second value is true."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return round(frame.rotation / 90) % 4, False
    a, b, _, c, d, *_ = np.frombuffer(matrix, np.int32).astype(float)
    mirrored = a * d < b * c
    side = -1 if mirrored else 1
    return round(-math.degrees(math.atan2(side * b, side * a)) / 90) % 4, bool(mirrored)
