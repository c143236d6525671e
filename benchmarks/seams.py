"""Visibility and audibility of seams in clips that are made in segments, and drift of such
clips.

The tiny trained checkpoint is asked for shapes that bounce, for long enough to take several
segments. Every measure of a seam is divided by the median of the same measure at other places of
the same clip, so that 1 is the inside of a segment; one clip made at once is measured
where the first row has its seams. A seam on which a bounce falls is left out: the bounce clicks and
turns the shape by itself.

    python -m benchmarks.seams             # all rows; prints the tables of docs/quality.md
    python -m benchmarks.seams --rows      # the tables of the results
    python -m benchmarks.seams --long      # of examples/long-trained, 256x256
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import ltx2rt
from benchmarks.measure import RESULTS, machine
from benchmarks.recognise import APART, IN_TIME_S, marks, see
from examples.clips import FPS, LONG, Clip, random_clip
from ltx2rt.instruments.compare import luma
from ltx2rt.stages.segments import segment_starts

COUNT, STEPS = 2, 10
FRAMES, LONG_FRAMES = 169, 313
NEAR, PAIRS = (
    24,
    24,
)  # frames before and after a seam, and how many other places are taken among them
HIGH_HZ = 8000
FIT_S, FADE_S, AFTER_S, CLICK_S = 0.05, 0.02, 0.02, 0.002
FLOOR = 1e-10  # power that no one hears, -100 dB of full scale


@dataclass(frozen=True)
class Row:
    """Frames of a segment, of its overlap and of the clip; a segment as long as the clip has no
    seam. lock, anchor: `--colour-lock`, `--anchor`."""

    segment: int
    overlap: int = 9
    lock: float = 0.0
    anchor: float = 0.0
    frames: int = FRAMES

    @property
    def starts(self) -> tuple[int, ...]:
        return segment_starts(self.frames, self.segment, self.overlap)

    @property
    def seams(self) -> list[int]:
        """The first new frame of each segment but the first."""
        return [start + self.segment for start in self.starts[:-1]]

    @property
    def cuts_s(self) -> list[float]:
        """When the new sound of each of them begins, after whole audio latents of the one
        before."""
        places = [round(start / FPS * 100) for start in self.starts]  # mel frames of 10 ms
        frames = round(self.segment / FPS * 25) * 4 - 3
        known = [frames - (b - a) for a, b in pairwise(places)]
        return [
            (place + (n - 1) // 4 * 4 + 1) / 100 for place, n in zip(places[1:], known, strict=True)
        ]


ROWS = {
    "25 frames, overlap 9": Row(25, 9),
    "25 frames, overlap 9, colour lock": Row(25, 9, 1.0),
    "25 frames, overlap 9, anchor": Row(25, 9, 0.0, 1.0),
    "25 frames, overlap 17": Row(25, 17),
    "49 frames, overlap 9": Row(49, 9),
    "49 frames, overlap 17": Row(49, 17),
    "49 frames, overlap 25": Row(49, 25),
    "49 frames, overlap 25, colour lock": Row(49, 25, 1.0),
    "49 frames, overlap 25, anchor": Row(49, 25, 0.0, 1.0),
    "81 frames, overlap 57": Row(81, 57),
    "one clip": Row(FRAMES),
}
LONG_ROWS = {
    "121 frames, overlap 25": Row(121, 25, frames=LONG_FRAMES),
    "121 frames, overlap 25, anchor": Row(121, 25, anchor=1.0, frames=LONG_FRAMES),
    "121 frames, overlap 57": Row(121, 57, frames=LONG_FRAMES),
    "one long clip": Row(LONG_FRAMES, frames=LONG_FRAMES),
}
EVERY = ROWS | LONG_ROWS


def asked(number: int, row: Row) -> Clip:
    clip = replace(random_clip(np.random.default_rng([40, number])), motion="bounces")
    return clip if row.frames == FRAMES else replace(clip, **LONG)


# --- at a seam ------------------------------------------------------------------------------------


def jumps(frames: np.ndarray) -> np.ndarray:
    """f64[F]: the mean absolute difference from the frame before, in levels; 0 for the first."""
    x = frames.astype(np.float32)
    return np.array([0.0, *(float(np.abs(b - a).mean()) for a, b in pairwise(x))])


def bends(frames: np.ndarray) -> np.ndarray:
    """f64[F]: the mean absolute second difference at a frame and the two before; 0 for the first
    two."""
    x = frames.astype(np.float32)
    later = (float(np.abs(x[i] - 2 * x[i - 1] + x[i - 2]).mean()) for i in range(2, len(x)))
    return np.array([0.0, 0.0, *later])


def centres(frames: np.ndarray) -> np.ndarray:
    """f64[F, 2]: x and y of the shape in pixels; nan where there is none."""
    picture = frames / np.float32(255)
    side = frames.shape[2] // 16
    rim = np.concatenate([picture[:, :, :side], picture[:, :, -side:]], 2)
    behind = np.median(rim, (0, 2))
    found = np.full((len(frames), 2), np.nan)
    for i, mask in enumerate(np.sqrt(((picture - behind[:, None]) ** 2).sum(-1)) > APART):
        if mask.mean() > 0.005:
            rows, columns = mask.nonzero()
            found[i] = columns.mean(), rows.mean()
    return found


def leaps(centre: np.ndarray) -> np.ndarray:
    """f64[F]: pixels between a frame's centre and the straight line through the six before it."""
    found = np.full(len(centre), np.nan)
    for i in range(6, len(centre)):
        line = np.polyfit(np.arange(6), centre[i - 6 : i], 1)
        found[i] = float(np.hypot(*(centre[i] - np.array([6, 1]) @ line)))
    return found


def against(values: np.ndarray, seam: int, others: Iterable[int]) -> tuple[float, float]:
    """The value at a seam, and the median of those at places near it that are no seams."""
    around = [i for i in others if 0 < abs(i - seam) <= NEAR and 7 <= i < len(values)][:PAIRS]
    return float(values[seam]), float(np.nanmedian(values[around]))


def high_power(wave: np.ndarray, rate: int) -> np.ndarray:
    """f64[N]: mono, above HIGH_HZ, squared."""
    spectrum = np.fft.rfft(wave.mean(0).astype(np.float64))
    spectrum[np.fft.rfftfreq(wave.shape[1], 1 / rate) < HIGH_HZ] = 0
    return np.fft.irfft(spectrum, wave.shape[1]) ** 2


def click(power: np.ndarray, rate: int, at_s: float) -> float:
    """The power within 2 ms of a time, and a floor."""
    middle, reach = round(at_s * rate), round(CLICK_S * rate)
    return float(power[middle - reach : middle + reach + 1].mean()) + FLOOR


def phase_error(wave: np.ndarray, rate: int, at_s: float) -> float:
    """How much of the sound in the 20 ms after a time is not the strongest tone of the 50 ms before
    the cross-fade that ends there: RMS of the residual of the fitted sine, divided by that of the
    sound."""
    mono = wave.mean(0).astype(np.float64)
    stop, after = round((at_s - FADE_S) * rate), round(at_s * rate)
    fitted = np.arange(stop - round(FIT_S * rate), stop)
    spectrum = np.abs(np.fft.rfft(mono[fitted] * np.hanning(len(fitted)), 2**17))
    coarse = float(np.fft.rfftfreq(2**17, 1 / rate)[spectrum.argmax()])

    def basis(samples: np.ndarray, hertz: float) -> np.ndarray:
        angle = 2 * np.pi * hertz * (samples - stop) / rate
        return np.stack([np.cos(angle), np.sin(angle)], 1)

    def residual(hertz: float) -> tuple[float, np.ndarray]:
        weights, left, *_ = np.linalg.lstsq(basis(fitted, hertz), mono[fitted], rcond=None)
        return float(left.sum()), weights

    hertz = min(np.linspace(coarse - 3, coarse + 3, 121), key=lambda f: residual(f)[0])
    heard = np.arange(after, after + round(AFTER_S * rate))
    rest = mono[heard] - basis(heard, hertz) @ residual(hertz)[1]
    return float(np.sqrt((rest**2).mean() / ((mono[heard] ** 2).mean() + FLOOR)))


def places(row: Row) -> Row:
    """The row that says where a clip is measured: of one clip the first of its length."""
    return row if row.seams else next(r for r in EVERY.values() if r.frames == row.frames)


def seams(
    row: Row, frames: np.ndarray, wave: np.ndarray, rate: int, bounces_s: np.ndarray
) -> list[dict]:
    """Measure each seam and other places near it; a seam with a bounce within IN_TIME_S of its
    frame or of its sound is left out."""
    measured = places(row)
    inside = [i for i in range(len(frames)) if all(not s - 9 <= i <= s + 2 for s in measured.seams)]
    pictures = {"jump": jumps(frames), "bend": bends(frames), "leap": leaps(centres(frames))}
    power, found = high_power(wave, rate), []
    for at_s, seam in zip(measured.cuts_s, measured.seams, strict=True):
        if any(abs(bounce - at) <= IN_TIME_S for bounce in bounces_s for at in (at_s, seam / FPS)):
            continue
        one = {name: against(values, seam, inside) for name, values in pictures.items()}
        near = [i / FPS for i in inside if 0 < abs(i - seam) <= NEAR and 8 < i < len(frames) - 8]
        for name, measure in (
            ("click", lambda t: click(power, rate, t)),
            ("tone", lambda t: phase_error(wave, rate, t)),
        ):
            one[name] = measure(at_s), float(np.median([measure(t) for t in near]))
        found.append(one)
    return found


# --- from one end to the other --------------------------------------------------------------------


def look(frames: np.ndarray, wave: np.ndarray, rate: int) -> dict[str, float]:
    """Looks and sound of a second of a clip: levels of 255, dB, Hz."""
    x, y = frames.astype(np.float64), np.stack([luma(f) for f in frames])
    around = (
        4 * y[:, 1:-1, 1:-1] - y[:, :-2, 1:-1] - y[:, 2:, 1:-1] - y[:, 1:-1, :-2] - y[:, 1:-1, 2:]
    )
    mono = wave.mean(0).astype(np.float64)
    spectrum = np.abs(np.fft.rfft(mono)) ** 2
    hertz = np.fft.rfftfreq(len(mono), 1 / rate)
    return {
        "brightness": float(y.mean()),
        "contrast": float(y.std()),
        "saturation": float((x.max(-1) - x.min(-1)).mean()),
        "sharpness": float(around.var()),
        "level_db": float(10 * np.log10((mono**2).mean() + FLOOR)),
        "centroid_hz": float((spectrum * hertz).sum() / (spectrum.sum() + FLOOR)),
    }


def run_row(row: Row, model: Path, count: int) -> dict[str, Any]:
    """Medians over all seams of all clips, and means of the clips' first and last second."""
    at_seams, ends, began = [], [], time.process_time()
    with ltx2rt.open(model, backend="cuda", device="cpu", distilled_lora="none") as session:
        how: dict[str, Any] = {"pipeline": "one-stage", "num_frames": row.frames, "steps": STEPS}
        if row.seams:
            how |= {"segment_frames": row.segment, "overlap": row.overlap}
            how |= {"colour_lock": row.lock, "anchor": row.anchor}
        for number in range(count):
            clip = asked(number, row)
            size = {"width": clip.side, "height": clip.side}
            made = session.generate(clip.prompt, seed=number, **size, **how)
            assert made.waveform is not None and len(made.frames) == row.frames, made
            rate, wave = made.sample_rate, made.waveform
            bounces_s = see(made.frames, scale=clip.scale).bounces_s
            at_seams += seams(row, made.frames, wave, rate, bounces_s)
            parts = (made.frames[:25], wave[:, :rate]), (made.frames[-25:], wave[:, -rate:])
            ends.append([look(*part, rate) | marks(clip, *part, rate) for part in parts])
    if not at_seams:
        raise SystemExit("a bounce falls on every seam; raise --count")
    found: dict[str, Any] = {"clips": count, "seams": count * len(row.seams)}
    found["bounces"] = count * len(places(row).seams) - len(at_seams)
    tones = np.array([one.pop("tone") for one in at_seams])
    found["tone"] = [None if np.isnan(x) else round(float(x), 4) for x in np.median(tones, 0)]
    for name in at_seams[0]:
        ratios = [one[name][0] / max(one[name][1], 1e-12) for one in at_seams]
        found[name] = [round(float(f(ratios)), 3) for f in (np.nanmedian, _high)]
    found["leap_px"] = round(float(np.nanmedian([one["leap"][0] for one in at_seams])), 2)
    names = sorted({name for pair in ends for part in pair for name in part} - {"lag_ms"})
    found["ends"] = {
        name: [round(float(np.mean([p[i][name] for p in ends if name in p[i]])), 3) for i in (0, 1)]
        for name in names
        if all(any(name in pair[i] for pair in ends) for i in (0, 1))
    }
    return found | {"cpu_s": round(time.process_time() - began, 1)}


def _high(values: list[float]) -> float:
    return float(np.nanpercentile(values, 90))


# --- all rows -------------------------------------------------------------------------------------


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown of the seams: medians, in parentheses the worst tenth; of the tone at seams,
    inside."""
    head = ["", "clips", "seams", "left out", "jump", "second difference", "position", "click"]
    head += ["off the tone: seam, inside"]
    lines = [head, ["---"] * len(head)]
    for name, row in rows.items():
        ratios = [f"{row[key][0]:.2f} ({row[key][1]:.2f})" for key in ("jump", "bend", "leap")]
        ratios[2] += f", {row['leap_px']:.1f} px"
        sounds = ["{:.2f} ({:.2f})".format(*row["click"]), ", ".join(map(_share, row["tone"]))]
        lines.append(
            [
                name,
                str(row["clips"]),
                str(row["seams"] or "none"),
                str(row["bounces"]),
                *ratios,
                *sounds,
            ]
        )
    return _lines(lines)


def drift_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown of the first and the last second."""
    shown: dict[str, Callable[[float], str]] = {
        "brightness": "{:.1f}".format, "contrast": "{:.1f}".format, "saturation": "{:.1f}".format,
        "sharpness": "{:.0f}".format, "level_db": "{:.1f} dB".format,
        "centroid_hz": "{:.0f} Hz".format,
    }  # fmt: skip
    shown |= dict.fromkeys(("colour", "background", "shape", "pitch"), lambda x: f"{100 * x:.0f} %")
    head = ["", *(name.removesuffix("_db").removesuffix("_hz") for name in shown)]
    lines = [head, ["---"] * len(head)]
    for name, row in rows.items():
        cells = [" to ".join(map(form, row["ends"][key])) for key, form in shown.items()]
        lines.append([name, *cells])
    return _lines(lines)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _lines(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="how visible and audible seams of segments are")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--count", type=int, default=COUNT, help="number of clips of each row")
    parser.add_argument("--rows", nargs="*", choices=[*EVERY], metavar="ROW")
    parser.add_argument("--long", action="store_true", help="rows of longer, larger clips")
    parser.add_argument("--output", type=Path, default=RESULTS / "seams.json")
    args = parser.parse_args(argv)
    facts: dict[str, Any] = {"benchmark": "seams", "rows": {}}
    if args.output.exists():
        facts |= json.loads(args.output.read_text())
    own = LONG_ROWS if args.long else ROWS
    model = args.model or Path("examples/long-trained" if args.long else "examples/tiny-trained")
    for name in own if args.rows is None else args.rows:
        rows = facts["rows"] | {name: run_row(EVERY[name], model, args.count)}
        facts["rows"] = {n: rows[n] for n in EVERY if n in rows}
        args.output.write_text(json.dumps(facts | machine("torch"), indent=1) + "\n")
    print(table(facts["rows"]), drift_table(facts["rows"]), sep="\n\n")


if __name__ == "__main__":
    main()
