"""Training data as people have it: a folder of clips and captions, or a table of them. Decides
which files make a sample, and which bucket a clip belongs to; opens no clip."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError, few
from ltx2rt.notes import note
from ltx2rt.stages.source_video import usable_frames
from ltx2rt.text_files import mismatch, parse, read_json_lines, read_text, read_toml

VIDEOS = (
    ".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".gif", ".ts", ".mts", ".m2ts", ".mpg", ".mpeg", ".wmv",
    ".flv", ".3gp", ".ogv", ".vob", ".mxf", ".apng",
)  # fmt: skip
# clips of one frame, unless they are animated
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".heic", ".heif", ".avif", ".tif", ".tiff")
SOUNDS = (
    ".wav", ".flac", ".mp3", ".m4a", ".ogg", ".opus", ".aac", ".aif", ".aiff", ".caf", ".wma", ".amr", ".ac3",
    ".mka", ".w64", ".wv",
)  # fmt: skip
COLUMNS = {  # names in a table, the official one first
    "video": ("video", "media_path", "video_path", "file_name", "file_path", "path", "image_path"),
    "caption": ("caption", "text", "prompt"),
    "audio": ("audio", "audio_path"),
    "reference": ("reference_video", "ref_media_path", "control_path"),
    "mask": ("video_mask",),
    "audio_reference": ("reference_audio",),
    "audio_mask": ("audio_mask",),
}
BESIDE = ("reference", "mask")  # NAME.reference.mp4 beside NAME.mp4; a sound there is audio_*
SYSTEM = ("__MACOSX", "@eaDir", "Thumbs.db", "desktop.ini")  # beside names that begin with a dot
CAPTIONS = (".txt", ".caption")  # endings, the second one kohya's
TABLES = ("metadata.jsonl", "metadata.csv", "captions.json")  # in a folder; Hugging Face's first
CAPTION_BYTES = 10**6
MUSUBI = ("video_directory", "image_directory", "video_jsonl_file", "image_jsonl_file")


@dataclass(frozen=True, kw_only=True)
class ClipFiles:
    """One sample's files. audio: in place of the video's own sound. reference: what an IC-LoRA
    follows. mask: bright where the clip is given; audio_mask: loud where the sound is given."""

    video: Path | None = None
    audio: Path | None = None
    reference: Path | None = None
    mask: Path | None = None
    audio_reference: Path | None = None
    audio_mask: Path | None = None

    @property
    def files(self) -> list[Path]:
        return [path for f in fields(ClipFiles) if (path := getattr(self, f.name))]


@dataclass(frozen=True)
class CaptionedClip(ClipFiles):
    """A sample as people have it, with its text."""

    name: str
    caption: str


@dataclass(frozen=True)
class Bucket:
    """A size that clips are cut to: pixels and pixel frames."""

    width: int
    height: int
    frames: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"

    def reference(self, downscale: int, temporal_scale: int) -> Bucket:
        """The size of a moving reference, smaller and with fewer frames by these factors."""
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


def parse_rate(text: str) -> Fraction | None:
    """Frames per second; None for `keep`. Raises ValueError."""
    if text == "keep":
        return None
    ntsc = {"23.976": 24, "29.97": 30, "59.94": 60}
    rate = Fraction(1000 * ntsc[text], 1001) if text in ntsc else Fraction(text)
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

    def rank(b: Bucket) -> tuple[float, int, int]:
        unlike = abs(math.log(b.width / b.height) - math.log(width / height))
        return unlike, -b.frames, -b.width * b.height

    return min((b for b in buckets if b.frames <= frames), key=rank, default=None)


def read_clips(
    path: Path, columns: Mapping[str, str | None] | None = None
) -> tuple[list[CaptionedClip], list[tuple[str, str]]]:
    """The samples of a folder, or of a CSV, JSON or JSONL file, in a fixed order, and the faults of
    others: (name, reason). columns: names of a table's columns for kinds of COLUMNS, None: found.
    Raises InputError for data without clips."""
    names = {kind: (column,) for kind, column in (columns or {}).items() if column}
    if path.suffix == ".toml":
        path = _of_musubi(path)
    if not path.exists():
        raise InputError(
            f"{path} does not exist; pass a folder of clips, or a CSV, JSON or JSONL file"
        )
    found = [*_clips_of(path)] if path.is_dir() else []
    table = next((path / name for name in TABLES if (path / name).is_file()), None)
    if table and not any(_text_file(file) for file, _ in found):
        note(f"captions: {table}")
        path = table
    if not path.is_dir():
        rows = enumerate(_rows(path), 1)
        made = [(f"row {i}", partial(_row, path, row, COLUMNS | names)) for i, row in rows]
    elif names:
        raise InputError(
            f"--{next(iter(names))}-column: {path} is a folder with captions in NAME.txt; "
            "leave it out"
        )
    else:
        made = [(str(f.relative_to(path)), partial(_clip, path, f, more)) for f, more in found]
    if not made:
        raise InputError(
            f"{path}: no clips were found; expected files of {' '.join(VIDEOS + SOUNDS + IMAGES)}"
        )
    clips: dict[str, CaptionedClip] = {}
    faults = []
    for name, make in made:
        try:
            clip = make()
            if clip.name in clips:
                raise InputError(f"{clip.name} is listed twice; name each clip once")
            if not clip.caption.strip():
                where = "NAME.txt beside it" if path.is_dir() else "its column"
                raise InputError(f"its caption is missing or empty; write one into {where}")
            clips[clip.name] = clip
        except InputError as error:
            faults.append((name, str(error)))
    return list(clips.values()), faults


def _of_musubi(path: Path) -> Path:
    """Return the folder or table that a configuration of musubi-tuner's data names."""
    datasets = read_toml("--data", path).get("datasets", [])
    tables = [] if mismatch(datasets, [{str: object}]) else datasets
    found = [value for rows in tables for name, value in rows.items() if name in MUSUBI]
    if len(found) != 1 or not isinstance(found[0], str):
        names = few(found)
        raise InputError(
            f"--data: {path} names {len(found)} folders or tables of clips ({names}), expected one; "
            "pass each by itself, and train with --data CACHE CACHE"
        )
    note(f"{path}: {found[0]} is read; its other settings are not, such as sizes: see --buckets")
    beside = path.parent / found[0]
    return beside if beside.exists() else Path(found[0])


def is_hidden(path: Path) -> bool:
    """Tell if systems and programs made the file or folder for themselves, by its name."""
    return path.name.startswith(".") or path.name in SYSTEM


def _clips_of(folder: Path) -> Iterator[tuple[Path, dict[str, Path]]]:
    """Yield clips of a folder and its sub-folders, each with its references and masks."""
    own: list[Path] = []
    unknown: list[Path] = []
    beside: defaultdict[Path, dict[str, Path]] = defaultdict(dict)
    for path in sorted(folder.rglob("*")):
        suffix, inner = path.suffix.lower(), path.relative_to(folder)
        hidden = any(map(is_hidden, (inner, *inner.parents[:-1])))
        if hidden or suffix not in VIDEOS + SOUNDS + IMAGES:
            if not hidden and path.is_file() and suffix not in CAPTIONS and _text_file(path):
                unknown.append(path)
            continue
        stem, _, kind = path.stem.rpartition(".")
        if stem and (kind := kind.lower()) in BESIDE:
            beside[path.with_name(stem)][f"audio_{kind}" if suffix in SOUNDS else kind] = path
        else:
            own.append(path)
    shown = {p.with_suffix("") for p in own if p.suffix.lower() not in SOUNDS}
    stems = {p.with_suffix("") for p in own}
    for path in unknown:
        if path.with_suffix("") not in stems:
            note(f"{path}: has a caption, but its ending is of no kind of clip; it is left out")
    for path in own:  # but for the sound of a clip
        if path.suffix.lower() not in SOUNDS or path.with_suffix("") not in shown:
            yield path, beside[path.with_suffix("")]


def _clip(folder: Path, file: Path, more: Mapping[str, Path]) -> CaptionedClip:
    """The sample of a file, with its caption and sound from the neighbouring files."""
    text = _text_file(file)
    caption = read_text(text, CAPTION_BYTES).strip() if text else ""
    sound = next((p for p in map(file.with_suffix, SOUNDS) if p.exists()), None)
    alone = file.suffix.lower() in SOUNDS
    own = {"audio": file} if alone else {"video": file, "audio": sound}
    return CaptionedClip(str(file.relative_to(folder)), caption, **own, **more)


def _text_file(clip: Path) -> Path | None:
    """The file that its caption is in."""
    return next(filter(os.path.lexists, map(clip.with_suffix, CAPTIONS)), None)


def _rows(path: Path) -> list[Mapping[str, Any]]:
    """A JSON file may be an object of captions, or of rows, by file names as well."""
    if (suffix := path.suffix.lower()) == ".jsonl":
        return read_json_lines(path, dict, "expected an object with video and caption in each line")
    text = read_text(path)
    try:
        if suffix in (".csv", ".tsv"):
            between = max(",;\t", key=text.partition("\n")[0].count)
            lines = io.StringIO(text, newline="")
            return [*csv.DictReader(lines, delimiter=between, skipinitialspace=True)]
        found = parse(text, ([dict], {str: (str, list, dict)}))
        if isinstance(found, list):
            return found
        rows = ((k, row if isinstance(row, dict) else {"caption": row}) for k, row in found.items())
        return [{"video": name} | row for name, row in rows]
    except (ValueError, csv.Error) as error:
        raise InputError(
            f"{path} cannot be read: {error}; expected a CSV, JSON or JSONL table of clips, "
            "with the columns video and caption"
        ) from None


def _row(path: Path, row: Mapping[str, Any], columns: Mapping[str, Sequence[str]]) -> CaptionedClip:
    got: dict[str, str] = {}
    for kind, names in columns.items():
        value = next((row[name] for name in names if row.get(name)), "")
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(value, (list, dict)):
            raise InputError(f"its {kind} is {json.dumps(value)[:80]}, expected one text")
        got[kind] = str(value)
    name, caption = got["video"] or got["audio"], got.pop("caption")
    if not name:
        raise InputError(f"it names no clip; expected a column {' or '.join(columns['video'])}")
    files = {kind: path.parent / inner for kind, inner in got.items() if inner}
    for file in files.values():
        try:
            if not file.is_file():
                raise InputError(f"{file} does not exist or is no file; check the path")
        except (OSError, ValueError) as error:  # a name that is too long, or has a zero byte
            raise InputError(f"{str(file)[:200]}: {error}; check the path") from None
    if "video" in files and files["video"].suffix.lower() in SOUNDS:
        files = {"audio": files.pop("video")} | files
    return CaptionedClip(name, caption, **files)
