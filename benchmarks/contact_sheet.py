"""One picture of several clips of one request: frames in rows, how far two of them lie apart, and their sounds.

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

COLUMNS, CELL_PX, GAP_PX, LEFT_PX, SOUND_PX = 7, 120, 4, 86, 64
GAIN = 16  # of the difference
PAPER, INK, WAVE = (250, 250, 248), (40, 40, 46), (58, 92, 168)
COLOURS = 128  # of the PNG's palette: a sheet stays well below 300 kB


def draw(path: Path, title: str, clips: Mapping[str, Path]) -> None:
    """clips: MP4s of one size and length by what the sheet calls them. The difference is that of the first two.

    A sound's left edge is at the time of the frame above it. Raises InputError for what is no clip with sound.
    """
    frames = {name: _frames(clip) for name, clip in clips.items()}
    chosen = np.linspace(0, len(next(iter(frames.values()))) - 1, COLUMNS).round().astype(int)
    rows = {name: found[chosen] for name, found in frames.items()}
    if len(rows) > 1:
        a, b = (rows[name].astype(int) for name in list(rows)[:2])
        rows[f"difference\nx {GAIN}"] = np.clip(GAIN * abs(a - b), 0, 255).astype(np.uint8)
    sides = next(iter(rows.values())).shape[1:3]
    height, width = (round(CELL_PX * side / max(sides)) for side in sides)
    pitch, top = width + GAP_PX, 34
    size = LEFT_PX + COLUMNS * pitch, top + len(rows) * (height + GAP_PX) + len(clips) * (SOUND_PX + GAP_PX)
    sheet = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((8, 8), title, INK, ImageFont.load_default(15))
    label = ImageFont.load_default(13)
    for name, cells in rows.items():
        pen.text((8, top + height // 2 - 8), name, INK, label)
        for i, cell in enumerate(cells):
            sheet.paste(Image.fromarray(cell).resize((width, height)), (LEFT_PX + i * pitch, top))
        top += height + GAP_PX
    per_s = pitch / (chosen[1] / float(video_info(next(iter(clips.values())), "contact sheet").fps))
    for name, clip in clips.items():
        waveform, rate = read_sound(clip)
        pen.text((8, top + SOUND_PX // 2 - 8), name, INK, label)
        columns = np.array_split(waveform.mean(0), max(1, round(waveform.shape[1] / rate * per_s)))
        for x, part in enumerate(columns[: size[0] - LEFT_PX]):
            low, high = (top + SOUND_PX / 2 - np.array([part.max(), part.min()]).clip(-1, 1) * SOUND_PX / 2).round()
            pen.line((LEFT_PX + x, low, LEFT_PX + x, high), WAVE)
        top += SOUND_PX + GAP_PX
    sheet.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def _frames(clip: Path) -> np.ndarray:
    count = video_info(clip, "contact sheet").num_frames
    return np.stack(list(read_frames(clip, "contact sheet", count)))


if __name__ == "__main__":
    draw(Path(sys.argv[1]), sys.argv[2], {n: Path(p) for n, p in (word.split("=", 1) for word in sys.argv[3:])})
