"""Sound of any file, at any rate.

Decides how samples become numbers, where a clip is cut, and how rates are converted. Leaves what the sound is for, and
what becomes of too little of it, to the stages.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.atomic_file import replacing
from ltx2rt.errors import InputError
from ltx2rt.media.mp4 import fit_audio, opened

LEVELS = {"u8": (128, 2**7), "s16": (0, 2**15), "s32": (0, 2**31), "flt": (0, 1), "dbl": (0, 1)}  # of 0, of 1
MIN_RATE, MAX_RATE = 1000, 768_000  # Hz; no recording has another
ZERO_CROSSINGS, ROLLOFF = 6, 0.99  # of the low-pass; torchaudio's defaults, which the reference takes


def read_sound(
    path: Path, start_s: float = 0.0, max_duration_s: float | None = None, on_time: bool = False
) -> tuple[np.ndarray, int]:
    """The samples of a file's first audio stream from `start_s` on, f32[1 or 2, N], and their rate in Hz.

    Whole numbers are divided by 2^(bits - 1). Those of 8 bits are unsigned, and 128 is taken off first, which the
    reference leaves out: their silence is 0 here and 1 there. The cuts are round(seconds * rate) samples. The first
    sample counts as the time at which the file says that it is played; a stream that begins after `start_s` is given
    from its first sample, with on_time after as much silence. Everything before is decoded, not sought: a seek is not
    exact in every format. Raises InputError if there is no sound, it cannot be decoded, or is not of one or two
    channels.
    """
    from av.error import FFmpegError

    pieces, found, position, skip, end = [], None, 0, 0, sys.maxsize
    try:
        with opened(path) as container:
            if not container.streams.audio:
                raise InputError(f"{path}: holds no sound; pass a file with an audio stream")
            for frame in container.decode(audio=0):
                this = frame.format.name.removesuffix("p"), frame.layout.nb_channels, frame.sample_rate
                if found is None:
                    found = this
                    _check_stream(path, *this)
                    early = round((start_s - (frame.time or 0)) * this[2])
                    skip = max(early, 0)
                    end = skip + round(max_duration_s * this[2]) if max_duration_s is not None else end
                    if on_time and early < 0:
                        position = min(-early, end)
                        pieces.append(np.zeros((this[1], position), np.float32))
                if this != found:
                    raise InputError(f"{path}: its sound changes from {found} to {this}; save it again as WAV")
                samples = frame.to_ndarray() if frame.format.is_planar else frame.to_ndarray().reshape(-1, this[1]).T
                offset, one = LEVELS[this[0]]
                kept = samples[:, max(skip - position, 0) : max(end - position, 0)]
                pieces.append((kept.astype(np.float32) - np.float32(offset)) / np.float32(one))
                position += samples.shape[1]
                if position >= end:
                    break
    except (FFmpegError, OSError) as error:
        raise InputError(f"{path}: no readable sound ({error}); save it again as WAV") from error
    waveform = np.concatenate(pieces, axis=1) if pieces else np.zeros((1, 0), np.float32)
    if not waveform.size or found is None:
        where = f"ends before {start_s:g} s; start earlier" if position else "is empty; pass another file"
        raise InputError(f"{path}: its sound {where}")
    if not np.isfinite(waveform).all():
        raise InputError(f"{path}: its sound holds NaN or infinite samples; save it again")
    return waveform, found[2]


def _check_stream(path: Path, kind: str, channels: int, rate: int) -> None:
    if channels not in (1, 2):
        raise InputError(f"{path}: its sound has {channels} channels, expected one or two; mix it down to stereo")
    if kind not in LEVELS:
        raise InputError(f"{path}: its samples are {kind}, known: {', '.join(LEVELS)}; save it again as WAV")
    check_rate(path, rate)


def check_rate(where: Path, rate: int) -> None:
    """Raises InputError."""
    if not MIN_RATE <= rate <= MAX_RATE:
        raise InputError(f"{where}: a sample rate of {rate} Hz, expected {MIN_RATE} to {MAX_RATE}; resample it")


def resample(waveform: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    """f32[..., N] at `rate` -> f32[..., ceil(N * new_rate / rate)] at `new_rate`; the same array if they are equal.

    Output j is the sum over inputs i of x_i h(i / rate - j / new_rate), where h(t) = sinc(c t) cos^2(pi c t / 12)
    c / rate within 6 / c seconds, and 0 beyond; c = 0.99 min(rate, new_rate). Before and after the waveform is silence.
    Accumulated in float64.
    """
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
    taps = np.sinc(t) * np.cos(np.pi * t / (2 * ZERO_CROSSINGS)) ** 2 * (np.abs(t) < ZERO_CROSSINGS) * cutoff / old
    padded = np.pad(waveform.astype(np.float64), [(0, 0)] * (waveform.ndim - 1) + [(width, width + 1)])
    start, out = block * old + first[phase] + width, 0.0
    for tap in range(taps.shape[1]):
        out = out + padded[..., start + tap] * taps[phase, tap]
    return np.asarray(out, np.float32)


def write_wav(path: Path, waveform: np.ndarray, sample_rate: int, comment: dict[str, Any] | None = None) -> None:
    """f32[2, N] in [-1, 1], clamped, as 16-bit PCM; the whole file or none. comment: stored as JSON, in the tag ICMT.

    Raises ValueError for misshapen or non-finite data.
    """
    waveform = fit_audio(waveform, waveform.shape[-1], Fraction(sample_rate), sample_rate)
    samples = np.rint(waveform.T * np.float32(2**15 - 1)).astype("<i2").tobytes()
    body = _chunk(b"fmt ", struct.pack("<HHIIHH", 1, 2, sample_rate, 4 * sample_rate, 4, 16))  # PCM, channels, ...
    if comment is not None:
        text = json.dumps(comment, ensure_ascii=False).encode() + b"\0"
        body += _chunk(b"LIST", b"INFO" + _chunk(b"ICMT", text))
    with replacing(path) as partial:
        partial.write_bytes(_chunk(b"RIFF", b"WAVE" + body + _chunk(b"data", samples)))


def _chunk(name: bytes, body: bytes) -> bytes:
    """Of a RIFF file: its name, its size, itself, up to an even number of bytes."""
    return name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)
