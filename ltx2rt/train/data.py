"""Training data as people have it: a folder of clips with captions beside them, or a table of them.

Decides which files make a sample, and which bucket a clip belongs to. Nothing is decoded here but
headers.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.stages.source_video import usable_frames

VIDEOS = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".gif")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")  # clips of one frame
SOUNDS = (".wav", ".flac", ".mp3")
COLUMNS = {  # names in a table, the official one first
    "video": ("video", "media_path", "video_path", "file_name"),
    "caption": ("caption", "text", "prompt"),
    "audio": ("audio",),
    "reference": ("reference_video", "ref_media_path"),
    "mask": ("video_mask",),
}
BESIDE = ("reference", "mask")  # NAME.reference.mp4 beside NAME.mp4


@dataclass(frozen=True)
class CaptionedClip:
    """One sample's files and text. video or audio may be absent; audio: in place of the video's own
    sound. reference: what an IC-LoRA follows. mask: bright where the clip is given."""

    name: str
    caption: str
    video: Path | None
    audio: Path | None
    reference: Path | None = None
    mask: Path | None = None


@dataclass(frozen=True)
class Bucket:
    """A size that clips are cut to: pixels and pixel frames."""

    width: int
    height: int
    frames: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"

    def reference(self, downscale: int, temporal_scale: int) -> Bucket:
        """The size of a moving reference that is so much smaller and has so many times fewer
        frames."""
        frames = usable_frames(self.frames, 8, temporal_scale)
        return Bucket(self.width // downscale, self.height // downscale, frames)


def parse_bucket(text: str, flag: str = "--buckets") -> Bucket:
    """WxHxF. Raises InputError for sizes that no model takes."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise InputError(f"{flag}: {text[:80]!r}, expected WxHxF, such as 768x512x49")
    width, height, frames = map(int, parts)
    if width % 32 or height % 32 or not width or not height or frames % 8 != 1:
        sides = (max(32, round(side / 32) * 32) for side in (width, height))
        near = "x".join(map(str, (*sides, max(0, (frames - 1) // 8) * 8 + 1)))
        raise InputError(
            f"{flag}: {text}, sides are multiples of 32 and frames 8 k + 1; the nearest is {near}"
        )
    return Bucket(width, height, frames)


NTSC = {"23.976": 24, "29.97": 30, "59.94": 60}  # times 1000 / 1001


def parse_rate(text: str) -> Fraction | None:
    """Frames per second; None for `keep`. Raises ValueError."""
    if text == "keep":
        return None
    rate = Fraction(1000 * NTSC[text], 1001) if text in NTSC else Fraction(text)
    if not 0 < rate <= 1000:
        raise ValueError
    return rate


def parse_share(text: str) -> tuple[int, int]:
    """I/N, the I-th of N shares. Raises ValueError."""
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError
    return part, parts


def bucket_of(size: tuple[int, int, int], buckets: Sequence[Bucket]) -> Bucket | None:
    """The bucket of a clip of (width, height, frames): the nearest aspect ratio, then most frames,
    then largest area. None if the clip is shorter than all of them."""
    width, height, frames = size
    fitting = [bucket for bucket in buckets if bucket.frames <= frames]
    aspect = math.log(width / height)
    return min(
        fitting,
        key=lambda b: (abs(math.log(b.width / b.height) - aspect), -b.frames, -b.width * b.height),
        default=None,
    )


def read_clips(path: Path, columns: Mapping[str, str | None] | None = None) -> list[CaptionedClip]:
    """The samples of a folder, or of a CSV, JSON or JSONL file, in a fixed order.

    columns: names of a table's columns for kinds of COLUMNS, None: found. Raises InputError for
    files that do not exist, and for captions that are missing or empty."""
    names = {kind: (column,) for kind, column in (columns or {}).items() if column}
    if names and path.is_dir():
        raise InputError(
            f"--{next(iter(names))}-column: {path} is a folder, whose captions are NAME.txt; "
            "leave it out"
        )
    if not path.exists():
        raise InputError(
            f"{path} does not exist; pass a folder of clips, or a CSV, JSON or JSONL file"
        )
    clips = (
        _folder(path)
        if path.is_dir()
        else [_row(path, i, row, COLUMNS | names) for i, row in enumerate(_rows(path), 1)]
    )
    if not clips:
        raise InputError(
            f"{path}: no clips were found; expected files of {' '.join(VIDEOS + SOUNDS)}"
        )
    if silent := [clip.name for clip in clips if not clip.caption.strip()]:
        raise InputError(
            f"{path}: {len(silent)} of {len(clips)} captions are missing or empty, such as that "
            f"of {silent[0]}; write one sentence for each clip (NAME.txt beside it, or its column)"
        )
    times = Counter(clip.name for clip in clips)
    if twice := next((name for name, count in times.items() if count > 1), None):
        raise InputError(f"{path}: {twice} is listed twice; name each clip once")
    return clips


def _folder(path: Path) -> list[CaptionedClip]:
    clips = []
    found = sorted(p for p in path.rglob("*") if p.suffix.lower() in VIDEOS + SOUNDS + IMAGES)
    files = [p for p in found if not p.stem.lower().endswith(tuple(f".{kind}" for kind in BESIDE))]
    extra = {(p.parent / p.stem): p for p in found if p not in files}
    videos = {p.with_suffix("") for p in files if p.suffix.lower() in VIDEOS + IMAGES}
    for file in files:
        sound = file.suffix.lower() in SOUNDS
        if sound and file.with_suffix("") in videos:
            continue  # it is the sound of the video beside it
        beside = next((p for p in map(file.with_suffix, SOUNDS) if p.exists()), None)
        text = file.with_suffix(".txt")
        caption = _text(text).strip() if text.exists() else ""
        clips.append(
            CaptionedClip(
                str(file.relative_to(path)),
                caption,
                None if sound else file,
                file if sound else beside,
                *(extra.get(file.with_suffix(f".{kind}")) for kind in BESIDE),
            )
        )
    return clips


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text ({error}); save it again") from None


def _rows(path: Path) -> list[Mapping[str, Any]]:
    text, suffix = _text(path), path.suffix.lower()
    try:
        if suffix == ".csv":
            return list(csv.DictReader(io.StringIO(text, newline="")))
        found = (
            json.loads(text)
            if suffix == ".json"
            else [json.loads(x) for x in text.split("\n") if x.strip()]
        )
    except (json.JSONDecodeError, csv.Error) as error:
        raise InputError(
            f"{path} cannot be read: {error}; expected a CSV, JSON or JSONL table of clips"
        ) from None
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise InputError(f"{path}: expected a list of objects with the keys video and caption")
    return found


def _row(
    path: Path, number: int, row: Mapping[str, Any], columns: Mapping[str, Sequence[str]]
) -> CaptionedClip:
    got = {
        kind: next((str(row[n]) for n in names if row.get(n)), None)
        for kind, names in columns.items()
    }
    if not got["video"] and not got["audio"]:
        raise InputError(
            f"{path}: row {number} names no clip; expected a column {' or '.join(columns['video'])}"
        )
    files: dict[str, Path | None] = {}
    for kind in ("video", "audio", *BESIDE):
        files[kind] = path.parent / name if (name := got[kind]) else None
        if (file := files[kind]) is not None and not file.is_file():
            raise InputError(f"{path}: row {number}: {file} does not exist; check the path")
    if files["video"] and files["video"].suffix.lower() in SOUNDS:
        files = files | {"video": None, "audio": files["audio"] or files["video"]}
    return CaptionedClip(got["video"] or got["audio"] or "", got["caption"] or "", **files)
