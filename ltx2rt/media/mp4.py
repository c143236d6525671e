"""One MP4 or MOV with H.264 video and AAC sound, or WebM with VP9 and Opus, written while frames
still arrive.

Decides codecs, tags, exact rates and that a failed run leaves nothing behind. Where the frames come
from is the pipeline's business. Encoding is deterministic: the number of threads is fixed, because
x264's result depends on it.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.atomic_file import replacing
from ltx2rt.media.hdr import ten_bits, to_codes
from ltx2rt.media.provenance import Origin
from ltx2rt.media.streams import opened, tagged_s
from ltx2rt.system import WRITE

AAC_FRAME = 1024  # samples
AAC_RATES = (
    7350, 8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000,
)  # fmt: skip # ISO 14496-3
OPUS_RATES = (8000, 12000, 16000, 24000, 48000)  # RFC 6716
AAC_BITS_PER_S = 192_000  # FFmpeg's encoder is audibly lossy at its default of 128_000
SILENT_BLOCK = 2**18  # samples
MAX_PENDING_CHUNKS = 2  # decoded chunks held while the encoder is busy
ENCODER_THREADS = 8
RGB_THREADS, RGB_ROWS = 8, 32  # frames at once; rows of one at once, which stay in a core's cache
# Without macroblock-tree rate control: its result has differed between runs on a loaded machine.
H264_OPTIONS = {"crf": "19", "preset": "veryfast", "x264-params": "mbtree=0:rc-lookahead=0"}
# Constant quality, as good as H.264's at its 19; two-thread rows do not change the file.
VP9_OPTIONS = {"crf": "20", "b": "0", "deadline": "good", "cpu-used": "5", "row-mt": "1"}
OPUS_BITS_PER_S = 160_000
# No noise substitution: it turns a difference of 1e-5 between two waveforms into another random
# noise.
AAC_OPTIONS = {"aac_pns": "0"}
# the codes of H.264 annex E (matrix, primaries, transfer) and of FFmpeg's AVCOL_RANGE_MPEG
BT709, LIMITED_RANGE, FULL_RANGE = 1, 1, 2
# matrices of H.273 that a given clip may keep, as PyAV names them
MATRICES = {1: "ITU709", 5: "ITU601", 6: "ITU601"}
OF_COLOURS = ("yuv420p", "yuv422p10le")  # pixel formats that have the tags
X265_REORDERS = 4  # frames: three B-frames of its preset and the one that they wait for


@dataclass(frozen=True)
class Colours:
    """Tags of a video's colours, in the codes of H.273 and FFmpeg's AVCOL_RANGE_*. Only matrix and
    range change pixels here: primaries and transfer come from the given clip."""

    matrix: int = BT709
    primaries: int = BT709
    transfer: int = BT709
    range: int = LIMITED_RANGE


USUAL = Colours()


@dataclass(frozen=True)
class Container:
    """A format of FFmpeg's and its encoders with their options.

    audio_rates: in Hz, empty where every rate is taken. pixels: the video encoder's format.
    transfer: the code of its curve in H.273, where that is no ordinary one.
    """

    format: str
    video: str
    video_options: dict[str, str]
    audio: str
    audio_options: dict[str, str]
    audio_bits_per_s: int
    audio_rates: tuple[int, ...]
    pixels: str = "yuv420p"
    transfer: int = 0

    def of(self, num_frames: int) -> Container:
        """Return the container for a clip of this length. x265 4.1 reads an unset decoding time
        where it gets fewer frames than it may reorder."""
        params = self.video_options.get("x265-params")
        if params is None or num_frames > X265_REORDERS:
            return self
        options = self.video_options | {"x265-params": f"{params}:bframes=0"}
        return replace(self, video_options=options)

    def options(self, fps: Fraction, sample_rate: int) -> dict[str, str]:
        """sample_rate: in Hz; 0 without sound."""
        if self.format not in ("mp4", "mov"):
            return {"fflags": "+bitexact"}  # no random identifier
        # units per second of the edit lists: whole for frames and samples, if 32 bits allow
        both = math.lcm(fps.numerator, sample_rate or 1)
        scale = both if both < 2**31 else fps.numerator
        return {"movflags": "+faststart", "movie_timescale": str(scale)}


# Each fragment plays on what came before; the header, which knows the encoders' delays, comes with
# the first.
FRAGMENTS = {
    "movflags": "+delay_moov+default_base_moof+skip_trailer",
    "frag_duration": "500000",  # microseconds
    "flush_packets": "1",
}

MP4 = Container("mp4", "libx264", H264_OPTIONS, "aac", AAC_OPTIONS, AAC_BITS_PER_S, AAC_RATES)
MOV = replace(MP4, format="mov")
WEBM = Container("webm", "libvpx-vp9", VP9_OPTIONS, "libopus", {}, OPUS_BITS_PER_S, OPUS_RATES)
# AAC's delay would move Matroska's pictures
MKV = replace(
    MP4, format="matroska", audio="flac", audio_options={}, audio_bits_per_s=0, audio_rates=()
)
# Apple ProRes 422 HQ for editors, with their 24-bit PCM
PRORES = Container(
    "mov", "prores_ks", {"profile": "3", "vendor": "apl0"}, "pcm_s24le", {}, 0, (), "yuv422p10le"
)
MP3_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)  # ISO 13818-3
# Files without pictures.
FLAC = replace(MKV, format="flac", video="")
MP3 = replace(
    FLAC, format="mp3", audio="libmp3lame", audio_bits_per_s=320_000, audio_rates=MP3_RATES
)
M4A = replace(MP4, format="ipod", video="")
OGG = replace(WEBM, format="ogg", video="")
# Signals of 10 bits in hybrid log-gamma or PQ (BT.2100). One frame at a time: x265's result depends
# on it.
TEN_BITS, BT2020, ARIB_STD_B67, SMPTE_ST_2084 = "yuv420p10le", 9, 18, 16
H265_OPTIONS = {"crf": "12", "preset": "ultrafast"}
H265_OPTIONS["x265-params"] = "log-level=error:frame-threads=1"
HEVC = replace(MP4, video="libx265", video_options=H265_OPTIONS, pixels=TEN_BITS)
HLG = replace(HEVC, transfer=ARIB_STD_B67)
PQ = replace(HEVC, transfer=SMPTE_ST_2084)
# Frames and float32 samples come back bit for bit: a clip that is continued later.
EXACT = Container("mov", "png", {"compression_level": "3"}, "pcm_f32le", {}, 0, (), pixels="rgb24")
EXACT_CODES = replace(EXACT, pixels="rgb48be")  # as `to_codes` gives them, in high dynamic range


@dataclass(frozen=True)
class Sound:
    """f32[2, size] in blocks f32[2, n], which are made each time that they are taken: a given
    clip's sound may last for hours. An array where one is asked for."""

    size: int
    blocks: Callable[[], Iterator[np.ndarray]]

    @property
    def shape(self) -> tuple[int, int]:
        return 2, self.size

    def part(self, start: int, stop: int) -> np.ndarray:
        """f32[2, n] of the samples from `start` to `stop` that are there."""
        at, found = 0, [np.zeros((2, 0), np.float32)]
        for block in self.blocks():
            if at + block.shape[1] > start:  # an empty view would hold the block
                found.append(block[:, max(start - at, 0) : stop - at])
            at += block.shape[1]
            if at >= stop:
                break
        return np.concatenate(found, 1)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.part(0, self.size).astype(dtype or np.float32)


def fitted_blocks(blocks: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """The first `size` samples of blocks f32[1 or 2, n] as stereo, then silence."""
    left = size
    for block in blocks:
        if left and block.shape[1]:
            stereo = np.broadcast_to(block[:, :left], (2, min(left, block.shape[1])))
            left -= stereo.shape[1]
            yield stereo
        if not left:
            return
    for start in range(0, left, SILENT_BLOCK):
        yield np.zeros((2, min(SILENT_BLOCK, left - start)), np.float32)


@dataclass(frozen=True)
class Durations:
    """Seconds of each stream of a file; None where there is none."""

    video_s: float
    audio_s: float | None


def write_mp4(
    path: Path,
    chunks: Iterable[Any],
    *,
    num_frames: int,
    fps: Fraction,
    waveform: np.ndarray | Sound | None = None,
    sample_rate: int = 0,
    comment: dict[str, Any] | None = None,
    origin: Origin | None = None,
    container: Container = MP4,
    pixel_aspect: Fraction = Fraction(1),
    colours: Colours = USUAL,
) -> Durations:
    """Encode `chunks` as they come and rename the finished file to `path`, whatever its suffix.

    chunks: f32[3, F, H, W] in [-1, 1] (clamped, rounded to the nearest 8-bit value), u8[F, H, W,
    3], or of `HLG` and `PQ` f32[H, W, 3] each, signals in [0, 1]; `num_frames` in all, H and W
    even. The iterator runs in the caller's thread, the encoder in its own. waveform: f32[2, N] in
    [-1, 1] (clamped), padded with silence or trimmed to num_frames / fps seconds; None: no sound.
    comment: stored as JSON. origin: marks the file. pixel_aspect: width of a pixel by its
    height. colours: of 8 bits. Raises ValueError for misshapen or non-finite data, RuntimeError if the streams of the
    written file disagree.
    """
    import av

    sound = None if waveform is None else fit_audio(waveform, num_frames, fps, sample_rate)
    kind, rate = container.of(num_frames), None if sound is None else sample_rate
    how = kind.options(fps, sample_rate)
    with replacing(path) as partial:
        with av.open(str(partial), "w", format=kind.format, options=how) as file:
            _describe(file, kind, comment, origin)
            # both streams exist before the first packet: the header is written then
            video, audio = _streams(file, kind, fps, rate, pixel_aspect, colours)
            _encode_video(file, video, chunks, num_frames)
            if audio is not None and sound is not None:
                _encode_audio(file, audio, sound, sample_rate)
        if origin:
            origin.mark(partial, f".{kind.format}")
        return _verify(partial, num_frames, fps, rate)


def _describe(
    file: Any, kind: Container, comment: dict[str, Any] | None, origin: Origin | None
) -> None:
    """Set the tags of an open file. In MP4 and MOV the XMP gets a box at the end instead."""
    if comment is not None:
        file.metadata["comment"] = json.dumps(comment, ensure_ascii=False)
    if origin:
        file.metadata["creation_time"] = origin.time  # for the tracks as well
    if origin and kind.format not in ("mp4", "mov"):
        file.metadata["XMP"] = origin.xmp()


def _streams(
    file: Any, kind: Container, fps: Fraction, sample_rate: int | None, pixel_aspect: Fraction,
    colours: Colours,
) -> tuple[Any, Any]:  # fmt: skip
    """A video stream and, at a rate in Hz, one of sound, with their encoders."""
    video = _pictures(file, kind, fps, pixel_aspect, colours)
    return video, None if sample_rate is None else _heard(file, kind, sample_rate)


def _pictures(
    file: Any, kind: Container, fps: Fraction, pixel_aspect: Fraction, colours: Colours
) -> Any:
    video: Any = file.add_stream(kind.video, rate=fps, options=dict(kind.video_options))
    video.pix_fmt, codec = kind.pixels, video.codec_context
    codec.thread_count, codec.time_base = ENCODER_THREADS, 1 / fps
    if pixel_aspect != 1:
        codec.sample_aspect_ratio = pixel_aspect
    if kind.pixels in OF_COLOURS:
        codec.color_range, codec.colorspace = colours.range, colours.matrix
        codec.color_primaries, codec.color_trc = colours.primaries, colours.transfer
    if kind.pixels == TEN_BITS:
        codec.codec_tag, codec.color_range = "hvc1", LIMITED_RANGE  # as players of Apple ask
        codec.colorspace = codec.color_primaries = BT2020
        codec.color_trc = kind.transfer
    return video


def _heard(file: Any, kind: Container, sample_rate: int) -> Any:
    how = {"rate": sample_rate, "layout": "stereo", "options": dict(kind.audio_options)}
    audio: Any = file.add_stream(kind.audio, **how)
    if kind.audio_bits_per_s:
        audio.bit_rate = kind.audio_bits_per_s
    if kind.audio == "flac":
        audio.codec_context.format = "s32"  # 24 bits
    return audio


def write_sound(
    path: Path,
    sound: Sound,
    sample_rate: int,
    kind: Container,
    comment: dict[str, Any] | None,
    origin: Origin | None,
) -> None:
    """Write a file without pictures, whole or not at all."""
    import av

    with replacing(path) as partial:
        options = {"fflags": "+bitexact"}
        with av.open(str(partial), "w", format=kind.format, options=options) as file:
            _describe(file, kind, comment, origin)
            _encode_audio(file, _heard(file, kind, sample_rate), sound, sample_rate)
        if origin:
            origin.mark(partial, path.suffix.lower())


class FollowedClip:
    """A clip encoded once, as it comes, into a file and into a stream of fragments that is played
    meanwhile. path: of the file, whole after `close`; stream: of the fragmented MP4, which is
    written over from its beginning, to the same bytes if it is there. sample_rate: None without
    sound."""

    def __init__(
        self,
        path: Path,
        stream: Path,
        container: Container,
        *,
        fps: Fraction,
        sample_rate: int | None,
        comment: dict[str, Any] | None,
        origin: Origin | None = None,
        pixel_aspect: Fraction = Fraction(1),
        colours: Colours = USUAL,
    ):
        import av

        self.path, self.fps, self.rate, self._origin = path, fps, sample_rate, origin
        self._held = np.zeros((2, 0), np.float32)  # sound that is not yet a frame of AAC
        self._written, self._heard, self._suffix = 0, 0, f".{container.format}"
        self._stream = os.fdopen(os.open(stream, WRITE, 0o666), "wb", buffering=0)
        options = container.options(fps, sample_rate or 0)
        files = (
            av.open(str(path), "w", format=container.format, options=options),
            av.open(Sink(self._stream), "w", format="mp4", options=options | FRAGMENTS),
        )
        _describe(files[0], container, comment, origin)
        self._files = [
            (file, *_streams(file, container, fps, sample_rate, pixel_aspect, colours))
            for file in files
        ]

    def add(self, frames: Iterable[np.ndarray], waveform: np.ndarray | None) -> None:
        """frames: u8[H, W, 3] each, or signals as `write_mp4` takes them. waveform: f32[2, N], the
        sound of as many seconds, to a sample."""
        video = self._files[0][1]
        for pixels in frames:
            if self._written == 0:
                for _, each, _ in self._files:
                    each.height, each.width = pixels.shape[:2]
            self._mux(video.encode(_video_frame(video, pixels, self._written)), 1)
            self._written += 1
        if waveform is not None:
            self._held = np.concatenate([self._held, waveform.clip(-1, 1)], axis=1)
            self._hear(AAC_FRAME)

    def close(self) -> Durations:
        """Raises as `write_mp4` does."""
        self._mux(self._files[0][1].encode(), 1)
        if self.rate is not None:
            self._hear(1)
            self._mux(self._files[0][2].encode(), 2)
        for file, _, _ in self._files:
            file.close()
        self._stream.close()
        if self._origin:
            self._origin.mark(self.path, self._suffix)
        return _verify(self.path, self._written, self.fps, self.rate)

    def abandon(self) -> None:
        """Close the files as they are; an error in writing them comes again here."""
        for file, _, _ in self._files:
            with suppress(Exception):
                file.close()
        self._stream.close()

    def _hear(self, least: int) -> None:
        """Encode frames of AAC while `least` samples are held."""
        audio = self._files[0][2]
        while self._held.shape[1] >= least:
            samples, self._held = self._held[:, :AAC_FRAME], self._held[:, AAC_FRAME:]
            self._mux(audio.encode(_audio_frame(samples, self._heard, self.rate or 0)), 2)
            self._heard += samples.shape[1]

    def _mux(self, packets: list[Any], stream: int) -> None:
        for packet in packets:
            for streams in self._files:
                packet.stream = streams[stream]
                streams[0].mux(packet)


class Sink:
    """A file that FFmpeg can write to and not seek in."""

    def __init__(self, file: Any):
        self._file = file

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        return len(data)


def whole_fragments(data: Any, start: int, size: int) -> int:
    """The end of the last fragment of a fragmented MP4 that is there whole, from the border `start`
    on. data: a file, opened to read bytes, of `size` bytes. What follows is still being written."""
    found = at = start
    while at + 8 <= size:
        data.seek(at)
        length, kind = struct.unpack(">I4s", data.read(8))
        if length < 8 or at + length > size:
            break
        at += length
        if kind == b"mdat":
            found = at
    return found


def fit_audio(
    waveform: np.ndarray | Sound, num_frames: int, fps: Fraction, sample_rate: int
) -> Sound:
    """Pad with silence or trim f32[2, N] to num_frames / fps seconds, clamped to +-1."""
    if len(waveform.shape) != 2 or waveform.shape[0] != 2 or waveform.shape[1] == 0:
        raise ValueError(f"waveform: shape {list(waveform.shape)}, expected [2, N]")
    size = round(num_frames / fps * sample_rate)

    def blocks() -> Iterator[np.ndarray]:
        given = waveform.blocks() if isinstance(waveform, Sound) else [waveform]
        for block in fitted_blocks(given, size):
            if not np.isfinite(block).all():
                raise ValueError(
                    "waveform: holds NaN or infinite samples; the audio decoder went wrong"
                )
            yield block.clip(-1, 1).astype(np.float32)

    return Sound(size, blocks)


def to_rgb8(chunk: np.ndarray) -> np.ndarray:
    """f32[3, F, H, W] in [-1, 1] -> u8[F, H, W, 3], clamped, to nearest; u8 passes through."""
    if chunk.dtype == np.uint8:
        return chunk
    frames = np.empty((*chunk.shape[1:], 3), np.uint8)
    with ThreadPoolExecutor(RGB_THREADS, thread_name_prefix="rgb") as pool:
        list(pool.map(_frame_to_rgb8, chunk.swapaxes(0, 1), frames))  # raises a frame's error
    return frames


def _frame_to_rgb8(frame: np.ndarray, out: np.ndarray) -> None:
    """f32[3, H, W] -> u8[H, W, 3]; numpy transposes channel by channel four times as fast."""
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


# What an encoder of these pixels is given of a chunk, where that is not 8 bits.
LEVELS: dict[str, Callable[[Any], Any]] = {TEN_BITS: iter, EXACT_CODES.pixels: to_codes}


def _encode_video(container: Any, stream: Any, chunks: Iterable[Any], num_frames: int) -> None:
    written = 0

    def encode(chunk: Any) -> None:
        nonlocal written
        for pixels in LEVELS.get(stream.pix_fmt, to_rgb8)(chunk):
            height, width = pixels.shape[:2]
            if written == 0:
                stream.width, stream.height = width, height
            elif (width, height) != (stream.width, stream.height):
                raise ValueError(f"frames: {width}x{height} after {stream.width}x{stream.height}")
            container.mux(stream.encode(_video_frame(stream, pixels, written)))
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


def _video_frame(stream: Any, pixels: np.ndarray, number: int) -> Any:
    """Frame `number` of the stream, in its pixel format."""
    import av
    from av.video.reformatter import ColorRange, Colorspace, Interpolation

    if stream.pix_fmt == TEN_BITS:
        frame = av.VideoFrame(pixels.shape[1], pixels.shape[0], TEN_BITS)
        for plane, values in zip(frame.planes, ten_bits(pixels), strict=True):
            rows = np.zeros((len(values), plane.line_size // 2), np.uint16)
            rows[:, : values.shape[1]] = values
            plane.update(rows.tobytes())
    else:
        wide = pixels.dtype == np.uint16
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb48be" if wide else "rgb24")
        how: dict[str, Any] = {}
        if stream.pix_fmt in OF_COLOURS:
            # without accurate rounding swscale darkens chroma by a fraction of a level
            exact = Interpolation.AREA | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND
            codec = stream.codec_context
            how = {"dst_colorspace": Colorspace[MATRICES[codec.colorspace]]}
            how["dst_color_range"] = ColorRange(codec.color_range)
            how["interpolation"] = exact
        frame = frame.reformat(format=stream.pix_fmt, **how)
    frame.pts, frame.time_base = number, stream.codec_context.time_base
    return frame


def _audio_frame(samples: np.ndarray, first: int, sample_rate: int) -> Any:
    import av

    samples = np.ascontiguousarray(samples)
    frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
    frame.sample_rate, frame.pts, frame.time_base = sample_rate, first, Fraction(1, sample_rate)
    return frame


def _encode_audio(container: Any, stream: Any, sound: Sound, sample_rate: int) -> None:
    held, at, left = np.zeros((2, 0), np.float32), 0, sound.size
    for block in sound.blocks():
        held, left = np.concatenate([held, block], 1), left - block.shape[1]
        used = held.shape[1] // AAC_FRAME * AAC_FRAME if left else held.shape[1]
        for start in range(0, used, AAC_FRAME):
            samples = held[:, start : min(start + AAC_FRAME, used)]
            container.mux(stream.encode(_audio_frame(samples, at + start, sample_rate)))
        held, at = held[:, used:], at + used
    container.mux(stream.encode())


def durations(path: Path) -> Durations:
    """The times in the file's own index, or the tags that FFmpeg writes in a WebM."""

    def seconds(stream: Any) -> float:
        if stream.duration is None:
            return float(tagged_s(stream) or 0)
        return float(stream.duration * (stream.time_base or 0))

    with opened(path) as container:
        found = {stream.type: seconds(stream) for stream in container.streams}
    return Durations(found["video"], found.get("audio"))


def _verify(path: Path, num_frames: int, fps: Fraction, sample_rate: int | None) -> Durations:
    """Reopen the file: the video lasts num_frames / fps, the sound as long within two frames."""
    found = durations(path)
    expected_s, frame_s = float(num_frames / fps), float(1 / fps)
    if abs(found.video_s - expected_s) > frame_s / 2:
        raise RuntimeError(
            f"{path}: the written video lasts {found.video_s:.4f} s, expected {expected_s:.4f} s"
        )
    if sample_rate is not None:
        slack_s = frame_s + AAC_FRAME / sample_rate
        if found.audio_s is None or abs(found.audio_s - found.video_s) > slack_s:
            raise RuntimeError(
                f"{path}: video {found.video_s:.4f} s, sound {found.audio_s} s; they may differ "
                f"{slack_s:.4f} s"
            )
    return found
