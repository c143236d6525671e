"""One MP4 or MOV with H.264 video and AAC sound, or WebM with VP9 and Opus, written while frames still arrive.

Decides codecs, tags, exact rates and that a failed run leaves nothing behind. Where the frames come from is the
pipeline's business. Encoding is deterministic: the number of threads is fixed, because x264's result depends on it.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.atomic_file import replacing

AAC_FRAME = 1024  # samples
AAC_RATES = (
    7350,
    8000,
    11025,
    12000,
    16000,
    22050,
    24000,
    32000,
    44100,
    48000,
    64000,
    88200,
    96000,
)  # ISO 14496-3
OPUS_RATES = (8000, 12000, 16000, 24000, 48000)  # RFC 6716
AAC_BITS_PER_S = 192_000  # FFmpeg's encoder is audibly lossy at its default of 128_000
MAX_PENDING_CHUNKS = 2  # decoded chunks held while the encoder is busy
ENCODER_THREADS = 8
RGB_THREADS, RGB_ROWS = 8, 32  # frames at once; rows of one at once, which stay in a core's cache
# Without macroblock-tree rate control, whose result has differed between runs on a loaded machine.
H264_OPTIONS = {"crf": "19", "preset": "veryfast", "x264-params": "mbtree=0:rc-lookahead=0"}
# Constant quality, as good as H.264's at its 19; two-thread rows do not change what is written.
VP9_OPTIONS = {"crf": "20", "b": "0", "deadline": "good", "cpu-used": "5", "row-mt": "1"}
OPUS_BITS_PER_S = 160_000
# No noise substitution: it turns a difference of 1e-5 between two waveforms into another random noise.
AAC_OPTIONS = {"aac_pns": "0"}
BT709, LIMITED_RANGE = (
    1,
    1,
)  # the codes of H.264 annex E (matrix, primaries, transfer) and of FFmpeg's AVCOL_RANGE_MPEG


@dataclass(frozen=True)
class Container:
    """A format of FFmpeg's and its encoders with their options.

    audio_rates: in Hz, empty where every rate is taken. pixels: the video encoder's format.
    """

    format: str
    video: str
    video_options: dict[str, str]
    audio: str
    audio_options: dict[str, str]
    audio_bits_per_s: int
    audio_rates: tuple[int, ...]
    pixels: str = "yuv420p"

    def options(self, fps: Fraction, sample_rate: int) -> dict[str, str]:
        if self.format == "webm":
            return {"fflags": "+bitexact"}  # no random identifier
        return {
            "movflags": "+faststart",
            "movie_timescale": str(_movie_timescale(fps, sample_rate)),
        }


MP4 = Container("mp4", "libx264", H264_OPTIONS, "aac", AAC_OPTIONS, AAC_BITS_PER_S, AAC_RATES)
MOV = replace(MP4, format="mov")
WEBM = Container("webm", "libvpx-vp9", VP9_OPTIONS, "libopus", {}, OPUS_BITS_PER_S, OPUS_RATES)
# Frames and float32 samples come back bit for bit: a clip that is continued later.
EXACT = Container("mov", "png", {"compression_level": "3"}, "pcm_f32le", {}, 0, (), pixels="rgb24")


@dataclass(frozen=True)
class Durations:
    """Seconds of each stream of a file; None where there is none."""

    video_s: float
    audio_s: float | None


def write_mp4(
    path: Path,
    chunks: Iterable[np.ndarray],
    *,
    num_frames: int,
    fps: Fraction,
    waveform: np.ndarray | None = None,
    sample_rate: int = 0,
    comment: dict[str, Any] | None = None,
    container: Container = MP4,
) -> Durations:
    """Encode `chunks` as they come and rename the finished file to `path`, whatever its suffix.

    chunks: f32[3, F, H, W] in [-1, 1] (clamped, rounded to the nearest 8-bit value) or u8[F, H, W, 3]; `num_frames` in
    all, H and W even. The iterator runs in the caller's thread, the encoder in its own. waveform: f32[2, N] in [-1, 1]
    (clamped), padded with silence or trimmed to num_frames / fps seconds; None: no sound. comment: stored as JSON.
    Raises ValueError for misshapen or non-finite data, RuntimeError if the streams of the written file disagree.
    """
    import av

    if waveform is not None:
        waveform = fit_audio(waveform, num_frames, fps, sample_rate)
    kind = container
    with replacing(path) as partial:
        with av.open(
            str(partial), "w", format=kind.format, options=kind.options(fps, sample_rate)
        ) as file:
            if comment is not None:
                file.metadata["comment"] = json.dumps(comment, ensure_ascii=False)
            video: Any = file.add_stream(kind.video, rate=fps, options=dict(kind.video_options))
            video.pix_fmt = kind.pixels
            codec = video.codec_context
            codec.thread_count = ENCODER_THREADS
            codec.time_base = 1 / fps
            if kind.pixels == "yuv420p":
                codec.color_range = LIMITED_RANGE
                codec.colorspace = codec.color_primaries = codec.color_trc = BT709
            # both streams exist before the first packet: the header is written then
            audio: Any = None
            if waveform is not None:
                audio = file.add_stream(
                    kind.audio, rate=sample_rate, layout="stereo", options=dict(kind.audio_options)
                )
                if kind.audio_bits_per_s:
                    audio.bit_rate = kind.audio_bits_per_s
            _encode_video(file, video, chunks, num_frames)
            if audio is not None and waveform is not None:
                _encode_audio(file, audio, waveform, sample_rate)
        return _verify(partial, num_frames, fps, sample_rate, audio is not None)


def fit_audio(waveform: np.ndarray, num_frames: int, fps: Fraction, sample_rate: int) -> np.ndarray:
    """Pad with silence or trim f32[2, N] to exactly num_frames / fps seconds (rounded to a sample), clamped to +-1."""
    if waveform.ndim != 2 or waveform.shape[0] != 2 or waveform.shape[1] == 0:
        raise ValueError(f"waveform: shape {list(waveform.shape)}, expected [2, N]")
    if not np.isfinite(waveform).all():
        raise ValueError("waveform: holds NaN or infinite samples; the audio decoder went wrong")
    size = round(num_frames / fps * sample_rate)
    kept = waveform[:, :size].clip(-1, 1).astype(np.float32)
    return np.pad(kept, ((0, 0), (0, size - kept.shape[1])))


def to_rgb8(chunk: np.ndarray) -> np.ndarray:
    """f32[3, F, H, W] in [-1, 1] -> u8[F, H, W, 3], clamped and rounded to nearest; u8 passes through."""
    if chunk.dtype == np.uint8:
        return chunk
    frames = np.empty((*chunk.shape[1:], 3), np.uint8)
    with ThreadPoolExecutor(RGB_THREADS, thread_name_prefix="rgb") as pool:
        list(pool.map(_frame_to_rgb8, chunk.swapaxes(0, 1), frames))  # raises what a frame raised
    return frames


def _frame_to_rgb8(frame: np.ndarray, out: np.ndarray) -> None:
    """f32[3, H, W] -> u8[H, W, 3]; channel by channel numpy transposes four times as fast as all at once."""
    scaled = np.empty((3, RGB_ROWS, frame.shape[2]), np.float32)
    levels = np.empty(scaled.shape, np.uint8)
    for start in range(0, frame.shape[1], RGB_ROWS):
        rows = frame[:, start : start + RGB_ROWS]
        if not np.isfinite(rows).all():
            raise ValueError("frames: hold NaN or infinite pixels; the video decoder went wrong")
        height = rows.shape[1]
        x = np.add(rows, np.float32(1), out=scaled[:, :height])
        x *= np.float32(127.5)
        x += np.float32(0.5)
        np.copyto(levels[:, :height], x.clip(0, 255, out=x), casting="unsafe")
        for channel in range(3):
            out[start : start + height, :, channel] = levels[channel, :height]


def _encode_video(
    container: Any, stream: Any, chunks: Iterable[np.ndarray], num_frames: int
) -> None:
    import av
    from av.video.reformatter import ColorRange, Colorspace, Interpolation

    # without accurate rounding swscale darkens chroma by a fraction of a level
    conversion = Interpolation.AREA | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND
    written = 0

    def encode(chunk: np.ndarray) -> None:
        nonlocal written
        for pixels in to_rgb8(chunk):
            height, width = pixels.shape[:2]
            if written == 0:
                stream.width, stream.height = width, height
            elif (width, height) != (stream.width, stream.height):
                raise ValueError(f"frames: {width}x{height} after {stream.width}x{stream.height}")
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if stream.pix_fmt == "yuv420p":
                frame = frame.reformat(
                    format="yuv420p",
                    dst_colorspace=Colorspace.ITU709,
                    dst_color_range=ColorRange.MPEG,
                    interpolation=conversion,
                )
            else:
                frame = frame.reformat(format=stream.pix_fmt)
            frame.pts, frame.time_base = written, stream.codec_context.time_base
            container.mux(stream.encode(frame))
            written += 1

    with ThreadPoolExecutor(1, thread_name_prefix="mp4") as encoder:
        pending: deque[Future[None]] = deque()
        for chunk in chunks:
            if len(pending) == MAX_PENDING_CHUNKS:
                pending.popleft().result()
            pending.append(encoder.submit(encode, chunk))
        for future in pending:
            future.result()
    if written != num_frames:
        raise ValueError(f"frames: {written} arrived, expected {num_frames}")
    container.mux(stream.encode())


def _encode_audio(container: Any, stream: Any, waveform: np.ndarray, sample_rate: int) -> None:
    import av

    for start in range(0, waveform.shape[1], AAC_FRAME):
        samples = np.ascontiguousarray(waveform[:, start : start + AAC_FRAME])
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
        frame.sample_rate, frame.pts, frame.time_base = sample_rate, start, Fraction(1, sample_rate)
        container.mux(stream.encode(frame))
    container.mux(stream.encode())


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A container for reading. FFmpeg gets the open file and no protocol, so it fetches nothing that a path or a
    playlist names. Tags that are no text are mended. Raises OSError for what is no file.
    """
    import av

    if not path.is_file():
        raise OSError("not a file")
    with (
        path.open("rb") as file,
        av.open(
            file, options={"protocol_whitelist": "none"}, metadata_errors="replace"
        ) as container,
    ):
        yield container


def durations(path: Path) -> Durations:
    """What the file's own index says, or the tags that FFmpeg writes in a WebM."""
    with opened(path) as container:
        seconds = {s.type: _seconds(s) for s in container.streams}
    return Durations(seconds["video"], seconds.get("audio"))


def _seconds(stream: Any) -> float:
    if stream.duration is not None:
        return float(stream.duration * (stream.time_base or 0))
    return float(tagged_s(stream) or 0)


def tagged_s(stream: Any) -> Fraction | None:
    """Seconds of Matroska's tag DURATION, such as 00:00:01.250000000."""
    if found := re.fullmatch(r"(\d+):(\d+):(\d+\.?\d*)", stream.metadata.get("DURATION", "")):
        hours, minutes, seconds = map(Fraction, found.groups())
        return 3600 * hours + 60 * minutes + seconds
    return None


def _movie_timescale(fps: Fraction, sample_rate: int) -> int:
    """Units per second of the edit lists: whole for frames and samples alike, where 32 bits allow (default: 1000)."""
    both = math.lcm(fps.numerator, sample_rate or 1)
    return both if both < 2**31 else fps.numerator


def _verify(
    path: Path, num_frames: int, fps: Fraction, sample_rate: int, has_audio: bool
) -> Durations:
    """Reopen the file: the video lasts num_frames / fps, and the sound as long within a frame and an AAC frame."""
    found = durations(path)
    expected_s, frame_s = float(num_frames / fps), float(1 / fps)
    if abs(found.video_s - expected_s) > frame_s / 2:
        raise RuntimeError(
            f"{path}: the written video lasts {found.video_s:.4f} s, expected {expected_s:.4f} s"
        )
    if has_audio:
        slack_s = frame_s + AAC_FRAME / sample_rate
        if found.audio_s is None or abs(found.audio_s - found.video_s) > slack_s:
            raise RuntimeError(
                f"{path}: video {found.video_s:.4f} s, sound {found.audio_s} s; they may differ {slack_s:.4f} s"
            )
    return found
