"""Sound of any file, at any rate.

Decides how samples become numbers, when they are played, where a clip is cut, and how rates are
converted. Leaves the use of the sound, and the handling of too little of it, to the stages.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.atomic_file import replacing
from ltx2rt.errors import InputError
from ltx2rt.media.mp4 import Sound, fit_audio
from ltx2rt.media.provenance import Origin
from ltx2rt.media.streams import chosen_audio, opened, sound_in, tagged_s
from ltx2rt.notes import note

# words for 0 and 1
LEVELS = {
    "u8": (128, 2**7),
    "s16": (0, 2**15),
    "s32": (0, 2**31),
    "s64": (0, 2**63),
    "flt": (0, 1),
    "dbl": (0, 1),
}
MIN_RATE, MAX_RATE = 1000, 768_000  # Hz; no recording has another
# How far a sample may be from its time. Containers round times to 1 ms and recorders jitter by a
# few, a lost packet of AAC or MP3 is 21 ms or more, and 45 ms are noticed (ITU-R BT.1359).
SYNC_S = 0.02
# FFmpeg's readers of headers that count samples
COUNTED = ("mov,mp4,m4a,3gp,3g2,mj2", "wav", "flac")
UNKNOWN_BYTES = 2**31 - 2**20  # and more: in WAV of a recorder that did not know the size
BLOCK = 2**18  # samples at once
TWICE_S = 1  # that times of sound may go back, as a file holds it twice; beyond, they are wrong
MAX_RIFF_BYTES = 2**32 - 2**10  # sizes have 32 bits
LOUDEST = 2**6  # 36 dB over full scale: no mix reaches it, but whole numbers of 8 bits as floats do
# Parameters of the low-pass: torchaudio's defaults, which the reference takes.
ZERO_CROSSINGS, ROLLOFF = 6, 0.99


def read_sound(
    path: Path,
    start_s: float = 0.0,
    max_duration_s: float | None = None,
    on_time: bool = False,
    say: Callable[[str], None] = note,
    track: int | None = None,
) -> tuple[np.ndarray, int]:
    """The samples of a file's sound from `start_s` on, f32[1 or 2, N], and their rate in Hz, as
    `sound_blocks` gives them."""
    read = [*sound_blocks(path, start_s, max_duration_s, on_time, say, track)]
    return np.concatenate([block for _, block in read], 1), read[0][0]


def sound_blocks(
    path: Path,
    start_s: float = 0.0,
    max_duration_s: float | None = None,
    on_time: bool = False,
    say: Callable[[str], None] = note,
    track: int | None = None,
) -> Iterator[tuple[int, np.ndarray]]:
    """The rate in Hz and a part of a file's samples, f32[1 or 2, n], one after another from
    `start_s` on. track: its number in the file, from 1; None: `chosen_audio`.

    Whole numbers are divided by 2^(bits - 1). 8-bit numbers are unsigned, and 128 is taken off
    first, which the reference leaves out: their silence is 0 here and 1 there. The cuts are
    round(seconds * rate) samples. The first sample counts as the time at which the file says that
    it is played; a stream that begins after `start_s` is given from its first sample, with on_time
    after as much silence. Everything before is decoded, not sought: a seek is not exact in every
    format.

    Silence replaces lost samples: packets that cannot be decoded, and what lacks before a frame
    that starts over SYNC_S after the samples before it. A frame without a time follows these at
    once. say: gets a sentence about such silence, and one about sound that is shorter than its
    header states.

    More than two channels are mixed to stereo by libswresample's matrix, which `say` hears of; in
    a layout that it does not know, odd ones are left and even ones right.

    Sound at times that were given before is left out; from where times go back by over TWICE_S, or
    stand still, it is counted off, and times count no more. Numbers, channels and a rate that
    change are brought to the first ones.

    Raises InputError if there is no sound, nothing of it can be decoded, or it is far beyond full
    scale.
    """
    from av.error import FFmpegError

    path = sound_in(path) if path.is_dir() else path
    try:
        with opened(path) as container:
            if not container.streams.audio:
                raise InputError(f"{path}: holds no sound; pass a file with an audio stream")
            choice = chosen_audio(path, container, track)
    except (FFmpegError, OSError) as error:
        raise InputError(f"{path}: no readable sound ({error}); save it again as WAV") from error
    if not choice.indices:
        raise InputError(f"{path}: its sound is of no known codec; save it again as WAV")
    for sentence in choice.said:
        say(f"{path}: {sentence}")
    tracks = [_Track(path, i, start_s, max_duration_s, on_time) for i in choice.indices]
    sides = [_blocks(track, say) for track in tracks]
    yield from sides[0] if len(sides) == 1 else _paired(sides)


def _paired(sides: Sequence[Iterator[tuple[int, np.ndarray]]]) -> Iterator[tuple[int, np.ndarray]]:
    """Two tracks of one channel each as left and right; the shorter one ends in silence."""
    held, rate = [np.zeros((1, 0), np.float32)] * 2, 0
    for parts in zip_longest(*sides):
        rate = next(part[0] for part in parts if part)
        held = [
            np.concatenate([x, part[1]], 1) if part else x
            for x, part in zip(held, parts, strict=True)
        ]
        size = min(x.shape[1] for x in held)
        if size:
            yield rate, np.concatenate([x[:, :size] for x in held])
        held = [x[:, size:] for x in held]
    if size := max(x.shape[1] for x in held):
        yield rate, np.concatenate([np.pad(x, ((0, 0), (0, size - x.shape[1]))) for x in held])


def _blocks(track: _Track, say: Callable[[str], None]) -> Iterator[tuple[int, np.ndarray]]:
    """As `sound_blocks`, of one stream."""
    for frame in _decoded(track):
        for block in track.samples(frame):
            yield track.rate, block
    if track.form is None:
        raise track.unreadable()
    track.leave_out()
    for block in track.silence(track.unread_s):
        yield track.rate, block
    if not track.given:
        late = f"ends before {track.start_s:g} s; start earlier"
        where = late if track.position else "is empty; pass another file"
        raise InputError(f"{track.path}: its sound {where}")
    for sentence in track.sentences():
        say(f"{track.path}: {sentence}")


def _decoded(track: _Track) -> Iterator[Any]:
    """The stream's frames, up to the end of the wanted part. Raises InputError."""
    from av.error import FFmpegError

    try:
        with opened(track.path) as container:
            stream = container.streams[track.index]
            track.promised_s = _promised_s(track.path, container, stream)
            for packet in container.demux(stream):
                try:
                    frames = packet.decode()
                except FFmpegError as error:
                    track.fail(packet, error)
                    continue
                for frame in frames:
                    yield frame
                    if track.position >= track.stop:
                        return
    except (FFmpegError, OSError) as error:
        raise track.unreadable(error) from error


@dataclass
class _Track:
    """A stream's samples, counted from its start.

    Samples `skip` to `stop` are wanted, `position` is behind the last one decoded, `given` of them
    have been yielded. unread_s: length of packets, since the latest frame, that cannot be decoded.
    lost: when the file has lost sound, and for how many seconds; twice: when it has sound at times
    that were given before. held: such frames, until a later one comes. counted: since when times
    do not count. longest: samples of its longest frame. form: kind of numbers, channels and rate;
    mixes: the one that the mixer takes; changes: since when another is there. mixed: the layout of
    more than two channels, which is unknown to libswresample or not.
    """

    path: Path
    index: int
    start_s: float
    max_duration_s: float | None
    on_time: bool
    form: tuple[str, int, int] | None = None
    channels: int = 1
    rate: int = 1
    first_s: float = 0.0
    skip: int = 0
    stop: int = sys.maxsize
    position: int = 0
    given: int = 0
    longest: int = 0
    promised_s: float = 0.0
    unread_s: float = 0.0
    mixed: str = ""
    unknown: bool = False
    mixer: Any = None
    mixes: tuple[str, int, int] | None = None
    error: Exception | None = None
    changes: float | None = None
    counted: float | None = None
    held: list[Any] = field(default_factory=list)
    lost: list[tuple[float, float]] = field(default_factory=list)
    twice: list[tuple[float, float]] = field(default_factory=list)

    @property
    def ends_s(self) -> float:
        return self.first_s + self.position / self.rate

    def fail(self, packet: Any, error: Exception) -> None:
        """Note a packet that cannot be decoded."""
        self.error = self.error or error
        self.unread_s += float((packet.duration or 0) * (packet.time_base or 0))

    def unreadable(self, error: Exception | None = None) -> InputError:
        if error := error or self.error:
            return InputError(f"{self.path}: no readable sound ({error}); save it again as WAV")
        return InputError(f"{self.path}: its sound is empty; pass another file")

    def samples(self, decoded: Any) -> Iterator[np.ndarray]:
        """The next frame, after silence for lost samples, without those that were given before."""
        for frame in self._formed(decoded):
            if self.form is None:
                self._begin(decoded, frame)
                yield from self._wanted(np.zeros((self.channels, max(-self.skip, 0)), np.float32))
            late_s = self._late_s(frame)
            again = round(max(-late_s, 0.0) * self.rate)
            if again and frame.samples - again < SYNC_S * self.rate:
                self.held.append(frame)
                stands = len(self.held) > 1 and frame.time <= self.held[0].time
                if stands or frame.time < self.ends_s - TWICE_S:
                    yield from self._count_off()
                continue
            self.leave_out(again)
            yield from self.silence(max(late_s, 0.0))
            yield from self._played(frame, again)

    def _count_off(self) -> Iterator[np.ndarray]:
        self.counted, held, self.held = self.ends_s, self.held, []
        for frame in held:
            yield from self._played(frame)

    def leave_out(self, again: int = 0) -> None:
        """Leave out the frames that are held, and samples of the next one."""
        if again := again + sum(frame.samples for frame in self.held):
            self.twice.append((self.ends_s, again / self.rate))
        self.held = []

    def _played(self, frame: Any, first: int = 0) -> Iterator[np.ndarray]:
        """Its samples from `first` on that are wanted. Raises InputError."""
        before = self.position - first
        samples = _numbers(frame, max(self.skip - before, first), self.stop - before)
        if len(samples) > self.channels:
            samples = np.stack([samples[side::2].mean(0) for side in (0, 1)])
        if not np.isfinite(samples).all():
            raise InputError(f"{self.path}: its sound holds NaN or infinite samples; save it again")
        if samples.size and (peak := np.abs(samples).max()) > LOUDEST:
            raise InputError(
                f"{self.path}: its samples reach {peak:.3g}, expected -1 to 1; divide them by "
                "their full scale, which is 32768 for numbers of 16 bits"
            )
        self.position += frame.samples - first
        self.longest = max(self.longest, frame.samples)
        yield from self._wanted(samples)

    def silence(self, seconds: float) -> Iterator[np.ndarray]:
        """Samples that the file lacks, where they are wanted."""
        gap, start = round(seconds * self.rate), max(self.position, self.skip)
        missing = min(self.position + gap, self.stop) - start
        if missing > 0:
            self.lost.append((self.first_s + start / self.rate, missing / self.rate))
        self.position += gap
        for at in range(0, missing, BLOCK):
            yield from self._wanted(np.zeros((self.channels, min(BLOCK, missing - at)), np.float32))

    def _wanted(self, samples: np.ndarray) -> Iterator[np.ndarray]:
        if samples.shape[1]:
            self.given += samples.shape[1]
            yield samples

    def _begin(self, decoded: Any, frame: Any) -> None:
        kind = frame.format.name.removesuffix("p")
        if kind not in LEVELS:
            raise InputError(
                f"{self.path}: its samples are {kind}, known: {', '.join(LEVELS)}; save it again in 16, 24 "
                "or 32 bits"
            )
        check_rate(self.path, frame.sample_rate)
        self.form, self.rate = _form(decoded), frame.sample_rate
        self.channels = min(frame.layout.nb_channels, 2)
        self.first_s = (frame.time or 0.0) - self.unread_s
        self.mixed = decoded.layout.name if decoded.layout.nb_channels > 2 else ""
        skip = round((self.start_s - self.first_s) * self.rate)
        self.skip = skip if self.on_time else max(skip, 0)
        if self.max_duration_s is not None:
            self.stop = self.skip + round(self.max_duration_s * self.rate)

    def _formed(self, decoded: Any) -> Sequence[Any]:
        """The frame in the first one's form, of which more than two channels are mixed to stereo,
        unless their layout is unknown."""
        from av import AudioResampler
        from av.error import FFmpegError

        form = _form(decoded)
        if self.form in (None, form) and (form[1] <= 2 or self.unknown):
            return [decoded]
        if form != self.mixes:
            layout = "mono" if self.form and self.channels == 1 else "stereo"
            rate = self.rate if self.form else form[2]
            self.mixer, self.mixes = AudioResampler("fltp", layout, rate), form
        if self.form not in (None, form):
            self.changes = self.changes or self.ends_s
        try:
            frames = self.mixer.resample(decoded)
        except FFmpegError:
            self.unknown = self.unknown or self.form is None
            return [decoded] if self.form is None else []
        if len(frames) == 1 and frames[0].samples == decoded.samples:
            frames[0].pts, frames[0].time_base = decoded.pts, decoded.time_base
        return frames

    def _late_s(self, frame: Any) -> float:
        """Delay of a frame after the samples before it, below 0 if it is early; 0 within SYNC_S
        unless a packet between them cannot be decoded."""
        unread_s, self.unread_s = self.unread_s, 0.0
        if frame.time is None or self.counted is not None:
            return unread_s
        late_s = frame.time - self.ends_s
        if abs(late_s - unread_s) < SYNC_S:  # a container rounds times, and not lengths
            return unread_s
        return late_s if abs(late_s) > SYNC_S else 0.0

    def sentences(self) -> Iterator[str]:
        """Sentences about sound that is mixed, missing or shorter than in its header."""
        if self.mixed:
            how = ", odd channels left, even ones right" if self.unknown else ""
            yield f"its sound ({self.mixed}) is mixed to stereo{how}"
        if self.changes is not None:
            first = f"the {self.rate} Hz and channels ({self.channels}) of its beginning"
            yield f"its sound changes at {self.changes:.4g} s; it is brought to {first}"
        if self.lost:
            how = "cannot be decoded" if self.error else "are missing"
            yield _where(self.lost, how) + "; silence is put there"
        if self.twice:
            yield _where(self.twice, "come twice") + "; the second is left out"
        if self.counted is not None:
            where = f"at {self.counted:.4g} s"
            yield f"the times of its sound go back {where}; it is counted off from there"
        late_s = 2 * self.longest / self.rate  # a codec adds a frame or less
        if self.position < self.stop and self.promised_s - self.ends_s > late_s:
            yield (
                f"its sound ends at {self.ends_s:.4g} s, its header says {self.promised_s:.4g} "
                "s; if it is cut, copy it again"
            )


def _form(frame: Any) -> tuple[str, int, int]:
    return frame.format.name, frame.layout.nb_channels, frame.sample_rate


def _where(parts: Sequence[tuple[float, float]], how: str) -> str:
    """A sentence about parts of the sound, by their times and lengths."""
    where = f"at {parts[0][0]:.4g} s"
    if len(parts) > 1:
        where = f"in {len(parts)} places, the first {where}"
    return f"{sum(length_s for _, length_s in parts):.3g} s of its sound {how} {where}"


def _promised_s(path: Path, container: Any, stream: Any) -> float:
    """When the sound ends by its header, with what a codec adds; 0 where FFmpeg guesses."""
    if container.format.name in COUNTED and stream.duration:
        end_s = float(((stream.start_time or 0) + stream.duration) * stream.time_base)
        return end_s * (_promised_bytes(path) / path.stat().st_size)
    return float(tagged_s(stream) or 0)


def _promised_bytes(path: Path) -> int:
    """The size that a WAV states, of which FFmpeg reads what is there; else the file's."""
    with path.open("rb") as file:
        kind, stated = struct.unpack("<4sI", file.read(8).ljust(8, b"\0"))
    known = kind == b"RIFF" and stated < UNKNOWN_BYTES
    return max(path.stat().st_size, stated + 8 if known else 0)


def _numbers(frame: Any, start: int, stop: int) -> np.ndarray:
    """Samples `start` to `stop` of the frame, f32[channels, N]; infinite beyond float32."""
    if frame.format.name.startswith("s64"):  # PyAV makes no array of them
        size = frame.samples * (1 if frame.format.is_planar else frame.layout.nb_channels)
        samples = np.stack([np.frombuffer(plane, np.int64)[:size] for plane in frame.planes])
    else:
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
        raise InputError(
            f"{where}: a sample rate of {rate} Hz, expected {MIN_RATE} to {MAX_RATE}; resample it"
        )


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


def resampled(
    blocks: Iterable[np.ndarray], rate: int, new_rate: int, size: int = BLOCK
) -> Iterator[np.ndarray]:
    """Resample f32[2, n] after f32[2, n], `size` at once or more, to the numbers of `resample`."""
    divisor = math.gcd(rate, new_rate)
    old, new = rate // divisor, new_rate // divisor
    # a whole number of periods, within which a sample has all its neighbours
    margin = -(-(ZERO_CROSSINGS * old / (ROLLOFF * min(old, new)) + 2) // old)
    lead, held = int(margin) * old, [np.zeros((2, int(margin) * old), np.float32)]
    for block in blocks:
        held.append(block)
        if (there := sum(part.shape[1] for part in held)) < size + 2 * lead:
            continue
        whole, ready = np.concatenate(held, 1), (there - 2 * lead) // old * old
        made = resample(whole[:, : ready + 2 * lead], rate, new_rate)
        yield made[:, lead // old * new : (lead + ready) // old * new]
        held = [whole[:, ready:]]
    yield resample(np.concatenate(held, 1), rate, new_rate)[:, lead // old * new :]


def stretched(blocks: Iterable[np.ndarray], rate: int, speed: Fraction) -> Iterator[np.ndarray]:
    """Play f32[2, n] after f32[2, n] at another speed and the same pitch, by FFmpeg's `atempo`;
    a few samples may lack at the end."""
    from av import AudioFrame
    from av.error import BlockingIOError, EOFError
    from av.filter import Graph

    if speed == 1:
        yield from blocks
        return
    graph, time_base, at = Graph(), Fraction(1, rate), 0
    times = math.ceil(abs(math.log2(speed)))  # one filter blends at 0.5 to 2 and skips beyond
    graph.link_nodes(
        graph.add_abuffer(sample_rate=rate, format="fltp", layout="stereo", time_base=time_base),
        *(graph.add("atempo", str(float(speed) ** (1 / times))) for _ in range(times)),
        graph.add("aformat", "sample_fmts=fltp"),
        graph.add("abuffersink"),
    ).configure()
    for block in chain(blocks, [None]):
        frame = None
        if block is not None:
            frame = AudioFrame.from_ndarray(np.ascontiguousarray(block), "fltp", "stereo")
            frame.sample_rate, frame.time_base, frame.pts = rate, time_base, at
            at += frame.samples
        graph.push(frame)
        with suppress(BlockingIOError, EOFError):
            while True:
                yield graph.pull().to_ndarray()


def at_rate(waveform: np.ndarray | Sound, rate: int, new_rate: int) -> np.ndarray | Sound:
    """As `resample`."""
    if not isinstance(waveform, Sound):
        return resample(waveform, rate, new_rate)
    size = -(-waveform.size * new_rate // rate)
    return Sound(size, lambda: resampled(waveform.blocks(), rate, new_rate))


def write_wav(
    path: Path,
    waveform: np.ndarray | Sound,
    sample_rate: int,
    comment: dict[str, Any] | None = None,
    origin: Origin | None = None,
) -> None:
    """Write the file of `wav_bytes`, whole or not at all, marked with its origin."""
    data = _wav(waveform, sample_rate, comment, origin.xmp() if origin else None)
    with replacing(path) as partial:
        with partial.open("wb") as file:
            file.writelines(data)
        if origin:
            origin.mark(partial, path.suffix.lower())


def write_float_wav(path: Path, waveform: np.ndarray, sample_rate: int) -> None:
    """f32[1 or 2, N] bit for bit."""
    frame_bytes, ieee_float = 4 * len(waveform), 3
    body = _chunk(b"fmt ", struct.pack(
        "<HHIIHH", ieee_float, len(waveform), sample_rate, frame_bytes * sample_rate, frame_bytes, 32
    ))  # fmt: skip
    body += _chunk(b"data", np.ascontiguousarray(waveform.T, "<f4").tobytes())
    path.write_bytes(_chunk(b"RIFF", b"WAVE" + body))


def wav_bytes(waveform: np.ndarray | Sound, sample_rate: int) -> bytes:
    """f32[2, N] in [-1, 1], clamped, as a file of 16-bit PCM. Raises ValueError for misshapen or
    non-finite data."""
    return b"".join(_wav(waveform, sample_rate, None, None))


def _wav(
    waveform: np.ndarray | Sound, rate: int, comment: dict[str, Any] | None, xmp: str | None
) -> Iterator[bytes]:
    """The file of `wav_bytes` part by part. comment: stored as JSON, in the tag ICMT. xmp: stored
    in the chunk _PMX."""
    sound = fit_audio(waveform, waveform.shape[-1], Fraction(rate), rate)
    # PCM, channels, ...
    head = _chunk(b"fmt ", struct.pack("<HHIIHH", 1, 2, rate, 4 * rate, 4, 16))
    if comment is not None:
        text = json.dumps(comment, ensure_ascii=False).encode() + b"\0"
        head += _chunk(b"LIST", b"INFO" + _chunk(b"ICMT", text))
    end = _chunk(b"_PMX", xmp.encode()) if xmp is not None else b""
    if (size := 4 * sound.size) + len(head) + len(end) > MAX_RIFF_BYTES:
        raise InputError(f"sound: {size} bytes are too many for a WAV; write *.flac")
    yield b"RIFF" + struct.pack("<I", 4 + len(head) + 8 + size + len(end)) + b"WAVE" + head
    yield b"data" + struct.pack("<I", size)
    for block in sound.blocks():
        yield np.rint(block.T * np.float32(2**15 - 1)).astype("<i2").tobytes()
    yield end


def _chunk(name: bytes, body: bytes) -> bytes:
    """A chunk of a RIFF file: its name, its size, itself, up to an even number of bytes."""
    return name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)
