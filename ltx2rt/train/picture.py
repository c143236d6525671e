"""The picture of a run's losses, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ltx2rt.atomic_file import replacing

PICTURE = "loss.svg"
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 400, 56, 24, 180, 40  # pixels; margins
CURVES = {
    "video_loss": ("picture", "#1f77b4"),
    "held_out_video_loss": ("picture, held out", "#0b3d66"),
    "audio_loss": ("sound", "#d62728"),
    "held_out_audio_loss": ("sound, held out", "#7a1111"),
}
Points = list[tuple[int, float]]


def draw_losses(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw losses by step, each a mean over a tenth of the steps; held-out ones as measured."""
    curves = {name: points for name in CURVES if (points := _points(name, rows))}
    with replacing(path) as partial:
        partial.write_text("\n".join(_svg(curves)) + "\n")


def _points(name: str, rows: Sequence[Mapping[str, Any]]) -> Points:
    points = [(row["step"] + 1, row[name]) for row in rows if row.get(name) is not None]
    span = 1 if name.startswith("held") else max(1, len(points) // 10)
    total, means = 0.0, []
    for i, (step, y) in enumerate(points):
        total += y - (points[i - span][1] if i >= span else 0)
        means.append((step, total / min(span, i + 1)))
    return means


def _svg(curves: Mapping[str, Points]) -> Iterator[str]:
    values = [y for points in curves.values() for _, y in points] or [0.0]
    low, high = min(values), max(values)
    ticks = _ticks(low, high if high > low else low + 1)
    bottom, top = ticks[0], ticks[-1]
    last = max((points[-1][0] for points in curves.values()), default=1)

    def place(x: float, y: float) -> tuple[float, float]:
        right = (WIDTH - LEFT - RIGHT) * x / last
        up = (HEIGHT - TOP - BOTTOM) * (y - bottom) / (top - bottom)
        return LEFT + right, HEIGHT - BOTTOM - up

    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
    )
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    for y in ticks:
        x, at = place(0, y)
        yield f'<path d="M{x:.1f},{at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
        yield f'<text x="{x - 6:.1f}" y="{at + 4:.1f}" text-anchor="end">{y:.4g}</text>'
    for step in (x for x in _ticks(0, last) if x <= last):
        x, at = place(step, bottom)
        yield f'<text x="{x:.1f}" y="{at + 18:.1f}" text-anchor="middle">{step:.0f}</text>'
    yield f'<text x="{LEFT}" y="{HEIGHT - 6}">step</text><text x="8" y="14">loss</text>'
    for row, (name, points) in enumerate(curves.items()):
        label, colour = CURVES[name]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        dashed = ' stroke-dasharray="5 3"' if name.startswith("held") else ""
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"{dashed}/>'
        x, y = WIDTH - RIGHT + 10, TOP + 12 + 18 * row
        yield f'<text x="{x}" y="{y}" fill="{colour}">{label} {points[-1][1]:.3f}</text>'
    yield "</svg>"


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers that enclose the range."""
    size = 10 ** math.floor(math.log10(high - low))
    step = next(s for s in (size / 5, size / 2, size, 2 * size) if (high - low) / s <= 6)
    first = math.floor(low / step)
    return [step * i for i in range(first, math.ceil(high / step) + 1)]
