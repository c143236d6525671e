"""Sound of any file, at any rate.

Decides how samples become numbers, when they are played, where a clip is cut, and how rates are
converted. Leaves the use of the sound, and the handling of too little of it, to the stages.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.atomic_file import replacing
from ltx2rt.errors import InputError
from ltx2rt.media.mp4 import fit_audio, opened, tagged_s
from ltx2rt.media.provenance import Origin
from ltx2rt.notes import note

# words for 0 and 1
LEVELS = {"u8": (128, 2**7), "s16": (0, 2**15), "s32": (0, 2**31), "flt": (0, 1), "dbl": (0, 1)}
MIN_RATE, MAX_RATE = 1000, 768_000  # Hz; no recording has another
# How far a sample may be from its time. Containers round times to 1 ms and recorders jitter by a
# few, a lost packet of AAC or MP3 is 21 ms or more, and 45 ms are noticed (ITU-R BT.1359).
SYNC_S = 0.02
# FFmpeg's readers of headers that count samples
COUNTED = ("mov,mp4,m4a,3gp,3g2,mj2", "wav", "flac")
LOUDEST = 2**6  # 36 dB over full scale: no mix reaches it, but whole numbers of 8 bits as floats do
# Parameters of the low-pass: torchaudio's defaults, which the reference takes.
ZERO_CROSSINGS, ROLLOFF = 6, 0.99


def read_sound(
    path: Path,
    start_s: float = 0.0,
    max_duration_s: float | None = None,
    on_time: bool = False,
    say: Callable[[str], None] = note,
) -> tuple[np.ndarray, int]:
    """The samples of a file's first audio stream from `start_s` on, f32[1 or 2, N], and their rate
    in Hz.

    Whole numbers are divided by 2^(bits - 1). 8-bit numbers are unsigned, and 128 is taken off
    first, which the reference leaves out: their silence is 0 here and 1 there. The cuts are
    round(seconds * rate) samples. The first sample counts as the time at which the file says that
    it is played; a stream that begins after `start_s` is given from its first sample, with on_time
    after as much silence. Everything before is decoded, not sought: a seek is not exact in every
    format.

    Silence replaces lost samples: it is put before a frame that starts over SYNC_S after the
    samples before it. A frame without a time follows these at once. say: gets a sentence about such
    silence, and one about sound that is shorter than its header states.

    More than two channels are mixed to stereo by libswresample's matrix, which `say` hears of.

    Raises InputError if there is no sound, it cannot be decoded, has times that go back, or is far
    beyond full scale.
    """
    track = _decoded(path, start_s, max_duration_s, on_time)
    end = min(track.position, track.stop)
    waveform = np.zeros((track.channels, max(end - track.skip, 0)), np.float32)
    for at, samples in track.pieces:
        start = max(at - track.skip, 0)
        waveform[:, start : start + samples.shape[1]] = samples
    if not waveform.size:
        late = f"ends before {start_s:g} s; start earlier"
        where = late if track.position else "is empty; pass another file"
        raise InputError(f"{path}: its sound {where}")
    if not np.isfinite(waveform).all():
        raise InputError(f"{path}: its sound holds NaN or infinite samples; save it again")
    if (peak := max(waveform.max(), -waveform.min())) > LOUDEST:
        advice = "divide them by their full scale, which is 32768 for numbers of 16 bits"
        raise InputError(f"{path}: its samples reach {peak:.3g}, expected -1 to 1; {advice}")
    if track.mixed:
        say(f"{path}: its sound ({track.mixed}) is mixed to stereo")
    if track.lost:
        lost_s, where = sum(s for _, s in track.lost), f"at {track.lost[0][0]:.4g} s"
        if len(track.lost) > 1:
            where = f"in {len(track.lost)} places, the first {where}"
        say(f"{path}: {lost_s:.3g} s of its sound are missing {where}; silence is put there")
    late_s = 2 * track.longest / track.rate  # a codec adds a frame or less
    if track.position < track.stop and track.promised_s - track.ends_s > late_s:
        ends = f"ends at {track.ends_s:.4g} s, its header says {track.promised_s:.4g} s"
        say(f"{path}: its sound {ends}; if it is cut, copy it again")
    return waveform, track.rate


@dataclass
class _Track:
    """Decoded samples in pieces, by the number of their first sample from the stream's start.

    Samples `skip` to `stop` are wanted, `position` is behind the last one decoded. lost: when the
    file has lost sound, and for how many seconds. longest: samples of its longest frame.
    mixed: the layout of more than two channels, which are mixed to stereo.
    """

    channels: int = 1
    rate: int = 1
    first_s: float = 0.0
    skip: int = 0
    stop: int = sys.maxsize
    position: int = 0
    longest: int = 0
    promised_s: float = 0.0
    mixed: str = ""
    pieces: list[tuple[int, np.ndarray]] = field(default_factory=list)
    lost: list[tuple[float, float]] = field(default_factory=list)

    @property
    def ends_s(self) -> float:
        return self.first_s + self.position / self.rate

    def add(self, path: Path, frame: Any) -> None:
        """Append the next frame, after silence for samples lost before it."""
        gap = round(_late_s(path, frame, self.ends_s) * self.rate)
        start = max(self.position, self.skip)
        if (missing := min(self.position + gap, self.stop) - start) > 0:
            self.lost.append((self.first_s + start / self.rate, missing / self.rate))
        self.position += gap
        wanted = _numbers(frame, self.skip - self.position, self.stop - self.position)
        self.pieces.append((self.position, wanted))
        self.position += frame.samples
        self.longest = max(self.longest, frame.samples)


def _decoded(path: Path, start_s: float, max_duration_s: float | None, on_time: bool) -> _Track:
    """Decode for `read_sound`. Raises InputError if that fails or the format changes."""
    from av import AudioResampler
    from av.error import FFmpegError

    track, form = _Track(), None
    try:
        with opened(path) as container:
            if not container.streams.audio:
                raise InputError(f"{path}: holds no sound; pass a file with an audio stream")
            mixer: Any = None
            for decoded in container.decode(audio=0):
                frame = decoded
                kind, channels = frame.format.name.removesuffix("p"), frame.layout.nb_channels
                this = (kind, channels, frame.sample_rate)
                if channels > 2:
                    mixer = mixer or AudioResampler("fltp", "stereo", frame.sample_rate)
                    (frame,) = mixer.resample(decoded)
                    frame.pts, frame.time_base = decoded.pts, decoded.time_base
                    kind, channels = "flt", 2
                if form is None:
                    form = this
                    if kind not in LEVELS:
                        known = ", ".join(LEVELS)
                        raise InputError(
                            f"{path}: its samples are {kind}, known: {known}; save it again as WAV"
                        )
                    check_rate(path, frame.sample_rate)
                    track = _Track(channels, frame.sample_rate, frame.time or 0.0)
                    track.mixed = decoded.layout.name if this[1] > 2 else ""
                    skip = round((start_s - track.first_s) * track.rate)
                    track.skip = skip if on_time else max(skip, 0)
                    if max_duration_s is not None:
                        track.stop = track.skip + round(max_duration_s * track.rate)
                if this != form:
                    change = f"its sound changes from {form} to {this}"
                    raise InputError(f"{path}: {change}; save it again as WAV")
                track.add(path, frame)
                if track.position >= track.stop:
                    break
            track.promised_s = _promised_s(container)
    except (FFmpegError, OSError) as error:
        raise InputError(f"{path}: no readable sound ({error}); save it again as WAV") from error
    return track


def _late_s(path: Path, frame: Any, due_s: float) -> float:
    """Delay of a frame after `due_s`, 0 within SYNC_S. Raises InputError if the frame is early: its
    times and samples contradict each other, and either may be wrong."""
    late_s = 0.0 if frame.time is None else frame.time - due_s
    if late_s < -SYNC_S:
        where = f"at {due_s:.4g} s the times of its sound go back by {-late_s:.3g} s"
        raise InputError(f"{path}: {where}; copy it again, or save it again as WAV")
    return late_s if late_s > SYNC_S else 0.0


def _promised_s(container: Any) -> float:
    """When the sound ends by its header, with what a codec adds; 0 where FFmpeg guesses."""
    stream = container.streams.audio[0]
    if container.format.name in COUNTED and stream.duration:
        return float(((stream.start_time or 0) + stream.duration) * stream.time_base)
    return float(tagged_s(stream) or 0)


def _numbers(frame: Any, start: int, stop: int) -> np.ndarray:
    """Samples `start` to `stop` of the frame, f32[channels, N]; infinite beyond float32."""
    samples = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, frame.layout.nb_channels).T
    offset, one = LEVELS[frame.format.name.removesuffix("p")]
    with np.errstate(over="ignore"):
        kept = samples[:, max(start, 0) : max(stop, 0)].astype(np.float32)
        return (kept - np.float32(offset)) / np.float32(one)


def check_rate(where: Path, rate: int) -> None:
    """Raises InputError."""
    if not MIN_RATE <= rate <= MAX_RATE:
        expected = f"expected {MIN_RATE} to {MAX_RATE}"
        raise InputError(f"{where}: a sample rate of {rate} Hz, {expected}; resample it")


def resample(waveform: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    """f32[..., N] at `rate` -> f32[..., ceil(N * new_rate / rate)] at `new_rate`; the same array if
    they are equal. Output j is the sum over inputs i of x_i h(i / rate - j / new_rate), where h(t)
    = sinc(c t) cos^2(pi c t / 12) c / rate within 6 / c seconds, and 0 beyond; c = 0.99 min(rate,
    new_rate). Before and after the waveform is silence. Accumulated in float64."""
    if rate == new_rate:
        return waveform
    divisor = math.gcd(rate, new_rate)
    old, new = rate // divisor, new_rate // divisor
    cutoff = ROLLOFF * min(old, new)
    width = math.ceil(ZERO_CROSSINGS * old / cutoff)
    block, phase = np.divmod(np.arange(-(-waveform.shape[-1] * new // old)), new)
    phases = np.arange(new)
    first = phases * old // new - width  # input of each phase's first tap, from its block's first
    inputs = first[:, None] + np.arange(2 * width + 2)
    t = (inputs / old - phases[:, None] / new) * cutoff
    window = np.cos(np.pi * t / (2 * ZERO_CROSSINGS)) ** 2 * (np.abs(t) < ZERO_CROSSINGS)
    taps = np.sinc(t) * window * cutoff / old
    silence = [(0, 0)] * (waveform.ndim - 1) + [(width, width + 1)]
    padded = np.pad(waveform.astype(np.float64), silence)
    start, out = block * old + first[phase] + width, 0.0
    for tap in range(taps.shape[1]):
        out = out + padded[..., start + tap] * taps[phase, tap]
    return np.asarray(out, np.float32)


def write_wav(
    path: Path,
    waveform: np.ndarray,
    sample_rate: int,
    comment: dict[str, Any] | None = None,
    origin: Origin | None = None,
) -> None:
    """Write the file of `wav_bytes`, whole or not at all, marked with its origin."""
    data = wav_bytes(waveform, sample_rate, comment, origin.xmp() if origin else None)
    with replacing(path) as partial:
        partial.write_bytes(data)
        if origin:
            origin.mark(partial, path.suffix.lower())


def wav_bytes(
    waveform: np.ndarray,
    sample_rate: int,
    comment: dict[str, Any] | None = None,
    xmp: str | None = None,
) -> bytes:
    """f32[2, N] in [-1, 1], clamped, as a file of 16-bit PCM. comment: stored as JSON, in the tag
    ICMT. xmp: stored in the chunk _PMX. Raises ValueError for misshapen or non-finite data."""
    waveform = fit_audio(waveform, waveform.shape[-1], Fraction(sample_rate), sample_rate)
    samples = np.rint(waveform.T * np.float32(2**15 - 1)).astype("<i2").tobytes()
    # PCM, channels, ...
    body = _chunk(b"fmt ", struct.pack("<HHIIHH", 1, 2, sample_rate, 4 * sample_rate, 4, 16))
    if comment is not None:
        text = json.dumps(comment, ensure_ascii=False).encode() + b"\0"
        body += _chunk(b"LIST", b"INFO" + _chunk(b"ICMT", text))
    body += _chunk(b"data", samples)
    if xmp is not None:
        body += _chunk(b"_PMX", xmp.encode())
    return _chunk(b"RIFF", b"WAVE" + body)


def _chunk(name: bytes, body: bytes) -> bytes:
    """A chunk of a RIFF file: its name, its size, itself, up to an even number of bytes."""
    return name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)
