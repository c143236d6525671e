"""The files of a cache: one for each sample, one for each caption's context, and `manifest.jsonl`,
with a line of facts about the cache and one for each sample of the latest complete `prepare`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.atomic_file import replacing
from ltx2rt.errors import InputError, concerning
from ltx2rt.text_files import mismatch, read_json_lines
from ltx2rt.train.data import parse_bucket
from ltx2rt.weights.files import TensorFile
from ltx2rt.weights.trained import is_of

MANIFEST = "manifest.jsonl"
SAMPLES, CONTEXTS = "samples", "contexts"
SCALES = ("reference_downscale", "reference_temporal_scale")
AGAIN = "run `ltx2rt train prepare` again, which keeps everything that is whole"
HEAD = {"model": str, "empty": str, "trigger?": (str, None), **{f"{n}?": int for n in SCALES}}
LINE = {
    "name": str, "caption": str, "bucket": str, "fps": str, "streams": [str], "sample": str,
    "context": str, "reference?": ([int], None), "held_out?": bool,
}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A line of the manifest. sample, context: names of files; streams: parts of the sample, of
    video, audio, reference, mask, audio_reference and audio_mask; fps: as a fraction. reference:
    latent frames, rows and columns of the reference. held_out: it is measured and not trained
    on."""

    name: str
    caption: str
    bucket: str
    fps: str
    streams: tuple[str, ...]
    sample: str
    context: str
    reference: tuple[int, int, int] | None = None
    held_out: bool = False


def digest_of(*what: Any) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def file_facts(paths: Iterable[Path | None]) -> list[tuple[str, int, int]]:
    """Place, size and time of the last change of files, in the order of their names."""
    stats = {path.resolve(): path.stat() for path in paths if path is not None}
    return sorted((str(path), s.st_size, s.st_mtime_ns) for path, s in stats.items())


def sample_path(cache: Path, key: str) -> Path:
    return cache / SAMPLES / f"{key}.safetensors"


def context_path(cache: Path, key: str) -> Path:
    return cache / CONTEXTS / f"{key}.safetensors"


def whole(path: Path) -> bool:
    """Tell if a file of the cache can be read; its header states its length."""
    try:
        return path.is_file() and bool(TensorFile(path).names())
    except InputError:
        return False


def heard_latents(cache: Path, sample: Sample) -> int:
    """How many latents the sound of a sample's reference has; 0 without one."""
    if (name := "audio_reference") not in sample.streams:
        return 0
    return TensorFile(sample_path(cache, sample.sample)).info(name).shape[1]


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """float32."""
    file = TensorFile(path)
    return {name: file.read(name).astype(np.float32) for name in file.names()}


def write_manifest(cache: Path, head: Mapping[str, Any], samples: Sequence[Sample]) -> None:
    lines = [json.dumps(head), *(json.dumps(asdict(sample)) for sample in samples)]
    with replacing(cache / MANIFEST) as partial:
        partial.write_text("\n".join(lines) + "\n")


def _read(cache: Path) -> tuple[dict[str, Any], list[Sample]]:
    path = cache / MANIFEST
    if not path.is_file():
        raise InputError(
            f"--data: {cache} is no finished cache; make it with `ltx2rt train prepare`"
        )
    with concerning("--data"):
        head, *rows = read_json_lines(path, dict, AGAIN)
    try:
        if wrong := mismatch(head, HEAD):
            raise ValueError(wrong)
        return head, [_sample(row) for row in rows]
    except (ValueError, ZeroDivisionError) as error:
        raise InputError(f"--data: {path} is damaged ({error}); {AGAIN}") from None


def _sample(row: Mapping[str, Any]) -> Sample:
    """Raises ValueError or ZeroDivisionError for a row that is none."""
    if wrong := mismatch(row, LINE):
        raise ValueError(wrong)
    known: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in row.items()
        if name in Sample.__dataclass_fields__
    }
    parse_bucket(row["bucket"], "bucket")
    if Fraction(row["fps"]) <= 0 or not {"video", "audio"} & set(row["streams"]):
        raise ValueError(f"{row['name']}: no rate, or neither video nor audio")
    return Sample(**known)


def read_manifest(cache: Path, base: str) -> tuple[dict[str, Any], list[Sample]]:
    """The facts about a cache that the model with the digest `base` made, and its samples. Raises
    InputError, also for a sample that lacks a part of its line."""
    head, samples = _read(cache)
    if not is_of(head["model"], base, cache):
        raise InputError(
            f"--data: {cache} was made with another model; run `ltx2rt train prepare` with this one"
        )
    for sample in samples:
        path = sample_path(cache, sample.sample)
        if lacking := set(sample.streams) - _names(path):
            raise InputError(
                f"--data: {path} of {sample.name} has no {min(lacking)}, which {MANIFEST} "
                f"lists; remove it and {AGAIN}"
            )
    for key in {head["empty"], *(sample.context for sample in samples)}:
        _names(context_path(cache, key))
    return head, samples


def _names(path: Path) -> set[str]:
    """Arrays of a file of the cache. Raises InputError for one that is missing or cut."""
    if not path.exists():
        raise InputError(f"--data: {path} is missing; {AGAIN}")
    try:
        return set(TensorFile(path).names())
    except InputError as error:
        said = str(error).removesuffix("; download it again")
        raise InputError(f"--data: {said}; remove it and {AGAIN}") from None


def require_same(values: Iterable[Any], what: str) -> None:
    """Raises InputError for caches of different values."""
    if len(found := sorted(set(values), key=str)) > 1:
        raise InputError(
            f"--data: clips of several kinds of {what} ({', '.join(map(str, found))}); a run "
            "trains one of them: prepare each in a cache of its own"
        )
