"""One picture of several clips: frames in rows, their sounds below, and how far two clips of one
request lie apart.

python -m benchmarks.contact_sheet SHEET.png TITLE NAME=CLIP.mp4 NAME=CLIP.mp4
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ltx2rt.media.sound import read_sound
from ltx2rt.media.video import read_frames, video_info

COLUMNS, CELL_PX, GAP_PX, LEFT_PX, TOP_PX, SOUND_PX = 7, 120, 4, 86, 34, 56
GAIN = 16  # factor for the difference
PAPER, INK, WAVE = (250, 250, 248), (40, 40, 46), (58, 92, 168)
COLOURS = 128  # colours in the PNG's palette: a sheet stays well below 300 kB


def draw(path: Path, title: str, clips: Mapping[str, Path], apart: bool = True) -> None:
    """clips: MP4s of one length by their names on the sheet. apart: draw the difference of the
    first two.

    A sound begins at the left edge of the first frame, and passes the other frames at their times.
    Raises InputError for a file that is no clip with sound.
    """
    frames = {name: _frames(clip) for name, clip in clips.items()}
    chosen = np.linspace(0, len(next(iter(frames.values()))) - 1, COLUMNS).round().astype(int)
    pictures = {name: found[chosen] for name, found in frames.items()}
    rows = [(name, _strip(pictures[name])) for name in clips]
    sounds = [(name, _wave(clip, chosen[1])) for name, clip in clips.items()]
    if apart:
        a, b = (pictures[name].astype(int) for name in list(clips)[:2])
        rows.append(
            (f"difference\nx {GAIN}", _strip(np.clip(GAIN * abs(a - b), 0, 255).astype(np.uint8)))
        )
        rows += sounds
    else:
        rows = [
            row
            for both in zip(rows, [("", wave) for _, wave in sounds], strict=True)
            for row in both
        ]
    height = TOP_PX + sum(image.height + GAP_PX for _, image in rows)
    sheet = Image.new("RGB", (LEFT_PX + rows[0][1].width + GAP_PX, height), PAPER)
    pen, top = ImageDraw.Draw(sheet), TOP_PX
    pen.text((8, 8), title, INK, ImageFont.load_default(15))
    for name, image in rows:
        pen.text((8, top + image.height // 2), name, INK, ImageFont.load_default(13), anchor="lm")
        sheet.paste(image, (LEFT_PX, top))
        top += image.height + GAP_PX
    sheet.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def _frames(clip: Path) -> np.ndarray:
    count = video_info(clip, "contact sheet").num_frames
    return np.stack(list(read_frames(clip, "contact sheet", count)))


def _strip(frames: np.ndarray) -> Image.Image:
    height, width = (round(CELL_PX * side / max(frames.shape[1:3])) for side in frames.shape[1:3])
    strip = Image.new("RGB", (COLUMNS * (CELL_PX + GAP_PX) - GAP_PX, height), PAPER)
    for i, frame in enumerate(frames):
        strip.paste(Image.fromarray(frame).resize((width, height)), (i * (CELL_PX + GAP_PX), 0))
    return strip


def _wave(clip: Path, frames_per_cell: int) -> Image.Image:
    """The mean of both channels; full scale is the height."""
    waveform, rate = read_sound(clip)
    per_s = (CELL_PX + GAP_PX) / frames_per_cell * float(video_info(clip, "contact sheet").fps)
    wave = Image.new("RGB", (COLUMNS * (CELL_PX + GAP_PX) - GAP_PX, SOUND_PX), PAPER)
    pen = ImageDraw.Draw(wave)
    for x, part in enumerate(
        np.array_split(waveform.mean(0), round(waveform.shape[1] / rate * per_s))
    ):
        low, high = (
            (1 - part.clip(-1, 1)[[part.argmax(), part.argmin()]]) * (SOUND_PX - 1) / 2
        ).round()
        pen.line((x, low, x, high), WAVE)
    return wave


if __name__ == "__main__":
    draw(
        Path(sys.argv[1]),
        sys.argv[2],
        {n: Path(p) for n, p in (word.split("=", 1) for word in sys.argv[3:])},
    )
