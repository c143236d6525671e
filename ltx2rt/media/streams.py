"""Files of media opened to be read, and which of their streams are.

Decides it once for every reader: tracks that can be decoded, of these the file's default ones, then
the largest picture or the loudest sound. Two tracks of one channel each are left and right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.errors import InputError

CONTAINERS = re.compile(  # names of FFmpeg's readers
    "mov,mp4,m4a,3gp,3g2,mj2|matroska,webm|wav|flac|mp3|ogg|avi|aiff|caf|mpeg|mpegts|aac|amr|asf|flv|"
    "gif|apng|w64|wv|tta|au|ac3|mpegvideo|eac3|dts|ape|yuv4mpegpipe|mjpeg|h264|hevc|mxf|dv|ivf|nut"
)
LISTENED_S = 30  # part of each track that is compared
LOUDER = 2.0  # times the power of an earlier track, which is taken otherwise: 3 dB

CHANNEL = re.compile(
    r"(?i)\W*(l|r|left|right|mono|(ch|channel|track|audio|sound|mono)?\W*\d+)?\W*"
)  # a title


@dataclass(frozen=True)
class Tracks:
    """Numbers of the tracks that a user names, from 1; None: by the flags in a file."""

    video: int | None = None
    audio: int | None = None


AUTO = Tracks()


@dataclass(frozen=True)
class Chosen:
    """indices: of the container's streams that are read; two of sound are left and right.
    said: sentences about tracks that are left out."""

    indices: tuple[int, ...] = ()
    said: tuple[str, ...] = ()


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A container for reading. FFmpeg gets the open file and no protocol, so it fetches nothing
    that a path or a playlist names. Tags need not be text. Raises OSError if it is no file.
    """
    import av

    if not path.is_file():
        raise OSError("not a file")
    tags: dict[str, Any] = {}
    if hasattr(av.container.InputContainer, "metadata_errors"):  # PyAV 19 reads any tags
        tags["metadata_errors"] = "replace"
    with (
        path.open("rb") as file,
        av.open(file, options={"protocol_whitelist": "none"}, **tags) as container,
    ):
        yield container


def sound_in(folder: Path) -> Path:
    """The sound of a folder of frames: sound.wav, or the only WAV that is there."""
    usual = folder / "sound.wav"
    found = [] if usual.exists() else [file for file in folder.iterdir() if file.suffix == ".wav"]
    return found[0] if len(found) == 1 else usual


def tagged_s(stream: Any) -> Fraction | None:
    """Seconds of Matroska's tag DURATION, such as 00:00:01.250000000."""
    if found := re.fullmatch(r"(\d+):(\d+):(\d+\.?\d*)", stream.metadata.get("DURATION", "")):
        hours, minutes, seconds = map(Fraction, found.groups())
        return 3600 * hours + 60 * minutes + seconds
    return None


def moving(container: Any) -> list[Any]:
    """Its video streams, except for covers."""
    from av.stream import Disposition

    pictures = Disposition.attached_pic
    return [s for s in container.streams.video if not s.disposition & pictures]


def chosen_video(container: Any, number: int | None) -> Chosen:
    """The video stream to read; of no index if there is none. number: as of `Tracks`. Raises
    InputError for a number that the file does not have."""
    streams = moving(container)
    found = _eligible(streams, number, "video")
    if not found:
        return Chosen()
    best = max(found, key=lambda s: (s.width * s.height, -s.index))
    if number is not None or len(streams) == 1:
        return Chosen((best.index,))
    which = f"track {streams.index(best) + 1} ({best.width}x{best.height}) is read"
    return Chosen((best.index,), (_several(streams, "video", which),))


def chosen_audio(path: Path, container: Any, number: int | None) -> Chosen:
    """The streams of sound to read, as of `chosen_video`. container: of the path, which is opened
    again where tracks are compared."""
    streams = [*container.streams.audio]
    found = _eligible(streams, number, "audio")
    if not found:
        return Chosen()
    if number is not None or len(streams) == 1:
        return Chosen((found[0].index,))
    if pair := _sides(streams):
        numbers = " and ".join(str(streams.index(s) + 1) for s in pair)
        which = f"tracks {numbers} of one channel each are read as left and right"
        return Chosen(tuple(s.index for s in pair), (_several(streams, "audio", which),))
    best = found[0]
    if len(found) > 1:
        state = path.stat()
        powers = _powers(path, tuple(s.index for s in found), (state.st_size, state.st_mtime_ns))
        for stream, power in zip(found, powers, strict=True):
            best = stream if power > LOUDER * powers[found.index(best)] else best
    which = f"track {streams.index(best) + 1}{_titled(best)} is read"
    return Chosen((best.index,), (_several(streams, "audio", which),))


def _sides(streams: Sequence[Any]) -> list[Any]:
    """Left and right: the first two of tracks of one channel each, alike but for their names as
    channels; else none."""
    known = [s for s in streams if s.codec_context is not None]
    alike = {(s.channels, s.codec_context.name, s.rate, s.metadata.get("language")) for s in known}
    names = [s.metadata.get("title", "") for s in known]
    titled = len({*names}) > 1 and not all(CHANNEL.fullmatch(name) for name in names)
    return [] if len(known) < 2 or len(alike) > 1 or titled or known[0].channels > 1 else known[:2]


def _eligible(streams: Sequence[Any], number: int | None, kind: str) -> list[Any]:
    """The streams to choose from: the numbered one, or the default ones that can be decoded."""
    from av.stream import Disposition

    if number is not None and number > len(streams):
        raise InputError(
            f"--{kind}-track: {number}, but the file has {len(streams)} {kind} "
            f"track{'s' * (len(streams) != 1)}; name one of them"
        )
    if number is not None:
        streams = streams[number - 1 : number]
    known = [s for s in streams if s.codec_context is not None]
    return [s for s in known if s.disposition & Disposition.default] or known


def _several(streams: Sequence[Any], kind: str, which: str) -> str:
    return f"it has {len(streams)} {kind} tracks, {which}; --{kind}-track N chooses another"


def _titled(stream: Any) -> str:
    about = [stream.metadata.get(tag, "") for tag in ("title", "language")]
    text = ", ".join(part[:40] for part in about if part and part != "und")
    return f" ({text})" if text else ""


@lru_cache(maxsize=32)
def _powers(path: Path, indices: tuple[int, ...], state: tuple[int, int]) -> list[float]:
    """Mean power of the first seconds of each stream, once for each state of the file."""
    from av import AudioResampler
    from av.error import FFmpegError

    total = {index: [0.0, 1] for index in indices}
    mixers = {index: AudioResampler("flt", "mono") for index in indices}
    with opened(path) as container:
        for packet in container.demux([container.streams[i] for i in indices]):
            at = packet.pts if packet.pts is not None else 0
            if at * (packet.time_base or 0) > LISTENED_S:
                break
            try:
                heard = [
                    part
                    for frame in packet.decode()
                    for part in mixers[packet.stream.index].resample(frame)
                ]
            except FFmpegError:  # reading tells
                continue
            for part in heard:
                samples = part.to_ndarray().astype(np.float64)
                total[packet.stream.index][0] += float(np.square(samples).sum())
                total[packet.stream.index][1] += samples.size
    return [power / count for power, count in total.values()]
