"""Measures of the difference between two clips, in pictures and in sound.

Decides the measures and their JSON-safe edge cases. Frames are compared in order, as decoded; sound
at 48 kHz.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.media.mp4 import durations
from ltx2rt.media.streams import opened

RATE = 48000  # Hz; the rate for which BS.1770 tabulates its filters
PSNR_CAP_DB = 200.0  # identical pictures; one wrong level in a 20 s 4K clip is still below it
SILENCE_LUFS = -70.0  # BS.1770's absolute gate
# ITU-R BS.1770-5, annex 1, tables 1 and 2: (b0, b1, b2), (1, a1, a2)
SHELF = (
    (1.53512485958697, -2.69169618940638, 1.19839281085285),
    (1.0, -1.69065929318241, 0.73248077421585),
)
HIGH_PASS = ((1.0, -2.0, 1.0), (1.0, -1.99004745483398, 0.99007225036621))
MEL_BANDS, MEL_HOP, MEL_WINDOW = 80, RATE // 100, 2048  # mel_l1's: 10 ms, 43 ms
MEL_FLOOR = 1e-5  # least amplitude: -100 dB below a full-scale sine, where sound is silence
ONSET_RISE_DB, ONSET_REST_S = 12.0, 0.05  # above the loudest 10 ms of the 50 ms before
ONSET_MATCH_S = 0.25  # onsets further apart are two
FILTER_TAIL = RATE  # samples after which the high-pass (38 Hz) has died away


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Measures of `b` against `a`, all finite numbers or None.

    psnr_db over all 8-bit RGB samples of the frames both have (200 = identical); ssim of luma, mean
    over frames; audio_corr: Pearson over both channels of the common length; lufs_*: integrated
    loudness (-70: silent); duration_*_s; frames_* decoded; identical: every compared frame is.
    Sound is None where a file has none, lufs also where it is shorter than 0.4 s, audio_corr also
    where one side is constant and the other is not. mel_l1: mean absolute difference of natural
    log-mel amplitudes; rms_db: level of `b` above that of `a`; onsets_*: how many sudden rises;
    onset_ms: median distance of those that match, None if none does. Raises InputError if a file is
    no readable video or the sizes differ.
    """
    squared, samples, ssim_sum, compared, counts = 0, 0, 0.0, 0, [0, 0]
    streams = [_frames(path) for path in (a, b)]
    while True:
        pair = [next(stream, None) for stream in streams]
        counts = [count + (frame is not None) for count, frame in zip(counts, pair, strict=True)]
        x, y = pair
        if x is None and y is None:
            break
        if x is None or y is None:
            continue
        if x.shape != y.shape:
            sizes = (f"{path} is {z.shape[1]}x{z.shape[0]}" for path, z in ((a, x), (b, y)))
            raise InputError(f"compare: {', '.join(sizes)}; only clips of one size can be compared")
        squared += int(((x.astype(np.int32) - y) ** 2).sum())
        samples += x.size
        ssim_sum += ssim(luma(x), luma(y))
        compared += 1
    if not compared:
        raise InputError(f"compare: {b if counts[0] else a} has no frames")
    (sound_a, sound_b), lasting = map(_sound, (a, b)), [durations(path) for path in (a, b)]
    return {
        "psnr_db": 10 * math.log10(255**2 * samples / squared) if squared else PSNR_CAP_DB,
        "ssim": ssim_sum / compared,
        "identical": squared == 0 and counts[0] == counts[1],
        **compare_sound(sound_a, sound_b),
        "lufs_a": None if sound_a is None else loudness(sound_a),
        "lufs_b": None if sound_b is None else loudness(sound_b),
        **{f"duration_video_{n}_s": x.video_s for n, x in zip("ab", lasting, strict=True)},
        **{f"duration_audio_{n}_s": x.audio_s for n, x in zip("ab", lasting, strict=True)},
        **{f"frames_{name}": count for name, count in zip("ab", counts, strict=True)},
    }


def compare_sound(a: np.ndarray | None, b: np.ndarray | None) -> dict[str, Any]:
    """audio_corr, mel_l1, rms_db, onsets_a, onsets_b, onset_ms of f64[channels, N] at 48 kHz; None
    where one is."""
    names = ("audio_corr", "mel_l1", "rms_db", "onsets_a", "onsets_b", "onset_ms")
    if a is None or b is None:
        return dict.fromkeys(names)
    first, second = onsets(a), onsets(b)
    level = rms_db(b) - rms_db(a)
    found = correlation(a, b), mel_l1(a, b), level, len(first), len(second), onset_ms(first, second)
    return dict(zip(names, found, strict=True))


def format_comparison(result: dict[str, Any]) -> str:
    """One line per measure."""
    shown = dict(result)
    if result["psnr_db"] == PSNR_CAP_DB:
        shown["psnr_db"] = "inf (the compared frames are identical)"
    width = max(map(len, shown))
    for name, value in shown.items():
        if value is None or isinstance(value, float):
            shown[name] = "none" if value is None else f"{value:.6g}"
    return "\n".join(f"{name:<{width}}  {value}" for name, value in shown.items())


def luma(rgb: np.ndarray) -> np.ndarray:
    """BT.709 luma of u8[H, W, 3]: f64[H, W] in [0, 255]."""
    return rgb @ np.array([0.2126, 0.7152, 0.0722])


def ssim(x: np.ndarray, y: np.ndarray) -> float:
    """Structural similarity of two f64[H, W] planes in [0, 255]: 8x8 windows every 4 pixels, as
    FFmpeg and x264 do. (2 mx my + C1)(2 sxy + C2) / ((mx^2 + my^2 + C1)(sx^2 + sy^2 + C2)), C1 =
    (0.01*255)^2, C2 = (0.03*255)^2."""
    mean_x, mean_y, xx, yy, xy = (_window_means(plane) for plane in (x, y, x * x, y * y, x * y))
    unbiased = 64 / 63
    var_x, var_y = (xx - mean_x**2) * unbiased, (yy - mean_y**2) * unbiased
    covariance = (xy - mean_x * mean_y) * unbiased
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    scores = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    return float((scores / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))).mean())


def _window_means(plane: np.ndarray) -> np.ndarray:
    """Means of 8x8 windows every 4 pixels; what is beyond a multiple of 4 is left out."""
    rows, columns = (size // 4 for size in plane.shape)
    blocks = plane[: rows * 4, : columns * 4].reshape(rows, 4, columns, 4).sum((1, 3))
    return (blocks[:-1, :-1] + blocks[1:, :-1] + blocks[:-1, 1:] + blocks[1:, 1:]) / 64


def correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson correlation of f64[2, N] over the common length; equal constants correlate fully,
    others not at all."""
    size = min(x.shape[1], y.shape[1])
    x, y = x[:, :size], y[:, :size]
    if np.array_equal(x, y):
        return 1.0
    x, y = x - x.mean(), y - y.mean()
    energy = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return float((x * y).sum()) / energy if energy else None


def rms_db(x: np.ndarray) -> float:
    """Level of f64[channels, N] in dB, a full-scale square wave at 0; not below -100."""
    return 20 * math.log10(max(math.sqrt(float(np.mean(x * x))) if x.size else 0.0, MEL_FLOOR))


def mel_l1(x: np.ndarray, y: np.ndarray) -> float | None:
    """Mean absolute difference of log-mel amplitudes (natural logarithm, 80 bands, 10 ms) of
    f64[channels, N] at 48 kHz, means of channels, common length. None where that is empty."""
    size = min(x.shape[1], y.shape[1])
    if not size:
        return None
    a, b = (_log_mel(side[:, :size].mean(0)) for side in (x, y))
    return float(np.abs(a - b).mean())


def _log_mel(x: np.ndarray) -> np.ndarray:
    """f64[frames, bands] of f64[N]: Hann windows every 10 ms around their middles, amplitudes of a
    sine as they are."""
    padded = np.pad(x, MEL_WINDOW // 2)
    windows = np.lib.stride_tricks.sliding_window_view(padded, MEL_WINDOW)[::MEL_HOP]
    hann = np.hanning(MEL_WINDOW + 1)[:-1]
    amplitude = np.abs(np.fft.rfft(windows * hann)) * (2 / hann.sum())
    return np.log(np.maximum(amplitude @ _mel_bands().T, MEL_FLOOR))


@cache
def _mel_bands() -> np.ndarray:
    """f64[bands, bins]: triangles of equal width in mel (2595 log10(1 + f/700), O'Shaughnessy) up
    to 24 kHz, each of sum 1; a band narrower than a bin reads the nearest one."""
    mel = np.linspace(0, 2595 * math.log10(1 + RATE / 2 / 700), MEL_BANDS + 2)
    edges = 700 * (10 ** (mel / 2595) - 1)
    bins = np.arange(MEL_WINDOW // 2 + 1) * RATE / MEL_WINDOW
    low, middle, high = (edges[i : i + MEL_BANDS, None] for i in range(3))
    rising, falling = (bins - low) / (middle - low), (high - bins) / (high - middle)
    bands = np.maximum(0, np.minimum(rising, falling))
    empty = bands.sum(1) == 0
    bands[empty, np.abs(bins - middle[empty]).argmin(1)] = 1
    return bands / bands.sum(1, keepdims=True)


def onsets(x: np.ndarray) -> np.ndarray:
    """Times in seconds at which f64[channels, N] at 48 kHz rises by 12 dB above the 50 ms before,
    to 10 ms."""
    hop = MEL_HOP
    count = x.shape[1] // hop
    power = (x[:, : count * hop].reshape(len(x), count, hop) ** 2).mean((0, 2))
    level = 10 * np.log10(np.maximum(power, MEL_FLOOR**2))
    rest = round(ONSET_REST_S * RATE / hop)
    before = np.pad(level, (rest, 0), constant_values=20 * math.log10(MEL_FLOOR))
    loudest = np.lib.stride_tricks.sliding_window_view(before, rest)[:count].max(1)
    return np.flatnonzero(level > loudest + ONSET_RISE_DB) * hop / RATE


def onset_ms(a: np.ndarray, b: np.ndarray) -> float | None:
    """Median distance in ms of the onsets `a` to the nearest of `b`, of those within 0.25 s; None
    if none is."""
    near = np.abs(a[:, None] - b).min(1, initial=math.inf)
    near = near[near <= ONSET_MATCH_S]
    return float(np.median(near) * 1000) if near.size else None


def loudness(waveform: np.ndarray) -> float | None:
    """Integrated loudness in LUFS of f64[channels, N] at 48 kHz (left and right weigh 1), None
    below 0.4 s. ITU-R BS.1770: K-weighting, 0.4 s blocks every 0.1 s, an absolute gate at -70 and a
    relative one 10 below the mean."""
    block, hop = RATE * 4 // 10, RATE // 10
    size = waveform.shape[1]
    if size < block:
        return None
    power = np.concatenate([[0.0], np.cumsum((k_weighted(waveform) ** 2).sum(0))])
    starts = np.arange(0, size - block + 1, hop)
    blocks = (power[starts + block] - power[starts]) / block
    loud = blocks[_lufs(blocks) > SILENCE_LUFS]
    if loud.size:
        loud = loud[_lufs(loud) > _lufs(loud.mean()) - 10]
    return float(_lufs(loud.mean())) if loud.size else SILENCE_LUFS


def k_weighted(waveform: np.ndarray) -> np.ndarray:
    """Both BS.1770 filters, applied as their frequency response to the zero-padded f64[channels,
    N]."""
    size = waveform.shape[1]
    padded = size + FILTER_TAIL
    z = np.exp(-2j * np.pi * np.arange(padded // 2 + 1) / padded)  # z^-1
    response = np.ones_like(z)
    for numerator, denominator in (SHELF, HIGH_PASS):
        response *= np.polyval(numerator[::-1], z) / np.polyval(denominator[::-1], z)
    return np.fft.irfft(np.fft.rfft(waveform, padded) * response, padded)[:, :size]


def _lufs(power: np.ndarray) -> np.ndarray:
    return -0.691 + 10 * np.log10(np.maximum(power, 1e-30))


def _frames(path: Path) -> Iterator[np.ndarray]:
    """u8[H, W, 3] per frame, converted with accurate rounding."""
    from av.error import FFmpegError
    from av.video.reformatter import Interpolation

    conversion = Interpolation.BILINEAR | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND
    try:
        with opened(path) as container:
            if not container.streams.video:
                raise InputError(f"compare: {path} has no video")
            for frame in container.decode(video=0):
                yield frame.to_ndarray(format="rgb24", interpolation=conversion)
    except (FFmpegError, OSError) as error:
        raise InputError(f"compare: {path} is no readable video ({error})") from error


def _sound(path: Path) -> np.ndarray | None:
    """The sound at 48 kHz stereo, f64[2, N]; None if the file has none, or none in its stream."""
    import av
    from av.error import FFmpegError

    resampler = av.AudioResampler(format="fltp", layout="stereo", rate=RATE)
    try:
        with opened(path) as container:
            if not container.streams.audio:
                return None
            frames = [out for one in container.decode(audio=0) for out in resampler.resample(one)]
            frames += resampler.resample(None)
    except (FFmpegError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"compare: {path}: its sound is damaged ({reason}); copy it again"
        ) from error
    if not frames:
        return None
    return np.concatenate([frame.to_ndarray() for frame in frames], axis=-1).astype(np.float64)
