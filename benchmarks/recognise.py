"""Picture and sound of a clip in the words of `examples.clips`.

Decides the measures, by image moments and one spectrum: nothing here has learnt anything. A shape
differs from the background of its row; `None` stands for a missing thing or one that fits no word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from examples.clips import BACKGROUNDS, COLOURS, FPS, PITCHES, Clip

# from the background, in RGB of [0, 1]: half as far as the nearest colours of `examples.clips` are
APART = 0.25
LEAST_AREA = 0.004  # share of the picture; the smallest shape there has 0.012, at scale 1
# How a shape leans to its tip, skewness of y, and how square it is, mean of r^4 cos(4 angle) by
# that of r^2, squared.
MOMENTS = {"circle": (0.0, 0.0), "square": (0.0, -0.6), "triangle": (-0.566, 0.048)}
SLIDE, GROWTH, BOUNCE = (
    0.48,
    np.log(2.9),
    0.33,
)  # a typical way in sides, growth of the radius, height in sides
CLICK_HZ = (1.5 * max(PITCHES.values()), 2600.0)  # clicks are at 1800
# By how much the last third of a sound is further to the right, or louder, than the first: half of
# the least that any drawn clip has which slides, or grows.
SIDE_DB, LEVEL_DB = 2.3, 2.6
WINDOW_S = 0.02  # in which a level is measured
QUIETEST_CLICK = 0.02  # share of full scale
SEMITONE = 2 ** (1 / 12)
IN_TIME_S = 0.12  # beyond it a click does not belong to a bounce


@dataclass(frozen=True)
class Seen:
    """bounces_s: when the shape is lowest, f64[n], of whatever moves."""

    colour: str | None
    shape: str | None
    motion: str | None
    background: str
    bounces_s: np.ndarray


def see(frames: np.ndarray, fps: float = FPS, scale: float = 1.0) -> Seen:
    """The clip that u8[F, H, W, 3] shows. scale: of its shapes, as in `Clip`."""
    picture = frames / np.float32(255)
    side = frames.shape[2] // 16
    rim = np.concatenate([picture[:, :, :side], picture[:, :, -side:]], 2)
    behind = np.median(rim, (0, 2))  # f32[H, 3]
    distance = np.sqrt(((picture - behind[:, None]) ** 2).sum(-1))
    mask = _smooth(distance) > APART
    area = mask.mean((1, 2))
    there = np.flatnonzero(area > LEAST_AREA * scale**2)
    background = nearest(behind.mean(0), BACKGROUNDS)
    if len(there) < len(frames) // 2:
        return Seen(None, None, None, background, np.zeros(0))
    colour = nearest(np.median(picture[mask], 0), COLOURS)
    poses = np.array([_pose(mask[i]) for i in there])
    moments = np.median(poses[:, 2:], 0)
    shape = min(MOMENTS, key=lambda name: float(((moments - MOMENTS[name]) ** 2).sum()))
    seconds, x, y = there / fps, poses[:, 0], poses[:, 1]
    return Seen(
        colour,
        shape,
        _motion(seconds, x, y, np.log(area[there]) / 2),
        background,
        _lowest(seconds, y),
    )


def nearest(colour: np.ndarray, names: Mapping[str, tuple[float, float, float]]) -> str:
    return min(names, key=lambda name: float(((colour - np.array(names[name])) ** 2).sum()))


def _smooth(planes: np.ndarray) -> np.ndarray:
    """Means of 3 x 3, so that no single pixel counts."""
    for axis in (1, 2):
        planes = (np.roll(planes, 1, axis) + planes + np.roll(planes, -1, axis)) / 3
    return planes


def _pose(mask: np.ndarray) -> tuple[float, float, float, float]:
    """Centre x and y in sides, and the two of `MOMENTS`."""
    rows, columns = mask.nonzero()
    x, y = columns - columns.mean(), rows - rows.mean()
    spread = (x**2 + y**2).mean()
    leaning = (y**3).mean() / max((y**2).mean(), 1e-9) ** 1.5
    fourfold = (x**4 - 6 * x**2 * y**2 + y**4).mean() / max(spread, 1e-9) ** 2
    return (
        columns.mean() / mask.shape[1],
        rows.mean() / mask.shape[0],
        float(leaning),
        float(fourfold),
    )


def _motion(seconds: np.ndarray, x: np.ndarray, y: np.ndarray, size: np.ndarray) -> str | None:
    """The strongest one, of straight lines through x and the logarithm of the size, and the height
    of y."""
    way, growth = (np.polyfit(seconds, values, 1)[0] * np.ptp(seconds) for values in (x, size))
    strength = {
        "right": way / SLIDE, "left": -way / SLIDE, "grows": growth / GROWTH,
        "shrinks": -growth / GROWTH,
        "bounces": np.ptp(y) / BOUNCE,
    }  # fmt: skip
    best = max(strength, key=lambda name: float(strength[name]))
    return best if strength[best] > 0.4 else None


def _lowest(seconds: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Seconds at which y, which grows downwards, turns sharply: between frames, as two straight
    lines meet."""
    inner = np.arange(1, len(y) - 1)
    before, here, after = y[:-2], y[1:-1], y[2:]
    low = (here >= before) & (here > after) & (here > y.min() + 0.6 * np.ptp(y))
    slope = np.maximum(here - before, here - after)
    offset = (after - before) / (2 * np.maximum(slope, 1e-9))
    return (seconds[inner] + offset * np.median(np.diff(seconds)))[low]


@dataclass(frozen=True)
class Heard:
    """pitch_hz: of the strongest tone; shape: that has it, to a semitone; clicks_s: when each
    begins, f64[n]; side_db, level_db: how much further to the right, and how much louder, the tones
    are in the last third than in the first."""

    pitch_hz: float
    shape: str | None
    clicks_s: np.ndarray
    side_db: float
    level_db: float


def hear(waveform: np.ndarray, rate: int) -> Heard:
    """The sounds in f32[channels, N]."""
    wave = waveform.mean(0)
    spectrum = np.fft.rfft(wave * np.hanning(len(wave)), 4 * len(wave))
    hertz = np.fft.rfftfreq(4 * len(wave), 1 / rate)
    tones = (hertz > 0.6 * min(PITCHES.values())) & (hertz < CLICK_HZ[0])
    pitch = float(hertz[tones][np.abs(spectrum[tones]).argmax()])
    shape = min(PITCHES, key=lambda name: abs(np.log(PITCHES[name] / pitch)))
    if abs(np.log(PITCHES[shape] / pitch)) > np.log(SEMITONE):
        shape = None
    return Heard(pitch, shape, _clicks(wave, rate), *_changes(waveform, rate))


def _changes(waveform: np.ndarray, rate: int) -> tuple[float, float]:
    """`side_db` and `level_db` of `Heard`, by medians, which no click moves; the first channel is
    the left one, the last the right one."""
    spectrum, hertz = np.fft.rfft(waveform), np.fft.rfftfreq(waveform.shape[-1], 1 / rate)
    tones = (hertz > 0.6 * min(PITCHES.values())) & (hertz < CLICK_HZ[0])
    tone, step = np.fft.irfft(spectrum * tones, waveform.shape[-1]), round(WINDOW_S * rate)
    windows = tone[:, : tone.shape[-1] // step * step].reshape(len(tone), -1, step)
    power = (windows**2).mean(-1) + 1e-12
    third = power.shape[-1] // 3

    def change(values: np.ndarray) -> float:
        decibels = 10 * np.log10(values)
        return float(np.median(decibels[-third:]) - np.median(decibels[:third]))

    return change(power[-1] / power[0]), change(power.sum(0))


def _clicks(wave: np.ndarray, rate: int) -> np.ndarray:
    """Times at which the band of the clicks rises to half of a peak that stands out."""
    spectrum, hertz = np.fft.rfft(wave), np.fft.rfftfreq(len(wave), 1 / rate)
    band = np.fft.irfft(spectrum * ((hertz > CLICK_HZ[0]) & (hertz < CLICK_HZ[1])), len(wave))
    step = rate // 500  # 2 ms
    loud = np.sqrt((band[: len(band) // step * step].reshape(-1, step) ** 2).mean(1))
    loud = np.convolve(loud, np.ones(3) / 3, "same")
    least = max(QUIETEST_CLICK, 0.25 * float(loud.max()), 4 * float(np.median(loud)))
    found, reach = [], 40
    for i in np.flatnonzero(loud > least):
        near = loud[max(0, i - reach) : i + reach]
        if loud[i] == near.max():
            rise = np.flatnonzero(loud[max(0, i - reach) : i + 1] < loud[i] / 2)
            found.append((max(0, i - reach) + (rise[-1] + 1 if len(rise) else 0)) * step / rate)
    return np.array(found)


def lags_s(bounces_s: np.ndarray, clicks_s: np.ndarray) -> np.ndarray:
    """Time from each bounce to the nearest click, f64[n]; nan if no click belongs to it."""
    lags = np.array([min(clicks_s - at, key=abs, default=np.nan) for at in bounces_s], np.float64)
    return np.where(np.abs(lags) <= IN_TIME_S, lags, np.nan)


def marks(
    asked: Clip, frames: np.ndarray | None, waveform: np.ndarray | None, rate: int
) -> dict[str, float]:
    """1 or 0 for each thing that was asked for; of a shape that bounces, what share of its bounces
    has a click, and their median lag in ms; of one that does not, whether there is no click; of one
    that slides, whether its tone goes to that side; of one that grows or shrinks, whether its tone
    gets louder or softer. Marks that were not measured are left out."""
    found: dict[str, float] = {}
    seen = None if frames is None else see(frames, scale=asked.scale)
    heard = None if waveform is None else hear(waveform, rate)
    if seen:
        found |= {
            name: getattr(seen, name) == getattr(asked, name)
            for name in ("colour", "shape", "motion")
        }
        found["background"] = seen.background == asked.background
    if heard:
        found["pitch"] = heard.shape == asked.shape
        way = -1 if asked.motion in ("left", "shrinks") else 1
        if asked.motion in ("left", "right"):
            found["side"] = way * heard.side_db > SIDE_DB
        if asked.motion in ("grows", "shrinks"):
            found["level"] = way * heard.level_db > LEVEL_DB
        if asked.motion != "bounces":
            found["silent"] = not len(heard.clicks_s)
    if seen and heard and asked.motion == "bounces":
        lags = lags_s(seen.bounces_s, heard.clicks_s)
        found["clicked"] = float(np.isfinite(lags).mean()) if len(lags) else 0.0
        if np.isfinite(lags).any():
            found["lag_ms"] = float(1000 * np.nanmedian(lags))
    return {name: float(value) for name, value in found.items()}


def psnr_db(a: np.ndarray, b: np.ndarray) -> float:
    """PSNR of pictures of 8-bit samples; 200 where they are equal."""
    squared = float(((a.astype(np.float64) - b) ** 2).mean())
    return 10 * np.log10(255**2 / squared) if squared else 200.0
