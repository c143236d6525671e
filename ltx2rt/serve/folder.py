"""The files of a server: what it was sent (`in`), what it made (`out`), the queue.

Decides when a clip counts as made: its MP4 has its name, `JOB.EPOCH.mp4`, only when it and all that belongs to it are
on the disk. The epoch in the name keeps a run that was given up from replacing another's file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.serve.queue import Job

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLIP, THUMBNAIL, REPORT = ".mp4", ".webp", ".json"


class Folder:
    """Raises InputError, which names the flag, if it cannot be written, or another server uses it."""

    def __init__(self, root: Path, flag: str = "--data"):
        self.root, self.inputs, self.outputs = root, root / "in", root / "out"
        try:
            for folder in (self.inputs, self.outputs):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = (root / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{flag}: {root} is in use by another server; name another folder") from None
        except OSError as error:
            raise InputError(f"{flag}: {root} cannot be written ({error.strerror}); name another folder") from None

    def close(self) -> None:
        self._lock.close()

    @property
    def queue(self) -> Path:
        return self.root / "jobs.db"

    def keep_input(self, data: bytes, suffix: str = "") -> str:
        """Keep a file with these bytes among the inputs; its digest, which with the suffix is its name."""
        digest = hashlib.sha256(data).hexdigest()
        name = digest + suffix
        try:
            os.utime(self.inputs / name)  # `sweep_inputs` leaves it alone
        except FileNotFoundError:
            partial = self.inputs / f".{name}.{os.urandom(4).hex()}"
            try:
                partial.write_bytes(data)
                sync(partial)
                os.replace(partial, self.inputs / name)
            finally:
                partial.unlink(missing_ok=True)
            sync(self.inputs)
        return digest

    def published(self, job: Job) -> dict[str, Any] | None:
        """The result of a job whose clip has its name, else None."""
        clip = self.outputs / (job.stem + CLIP)
        return result(clip, job.job.get("n", 1)) if clip.exists() else None

    def remove(self, stem: str) -> None:
        for path in (*(self.outputs / (stem + suffix) for suffix in (CLIP, THUMBNAIL, REPORT)), *self._further(stem)):
            path.unlink(missing_ok=True)

    def _further(self, stem: str) -> Iterable[Path]:
        """The clips of a job of several but the first."""
        return self.outputs.glob(f"{stem}.*{CLIP}")

    def sweep(self, jobs: Iterable[Job]) -> None:
        """Remove what none of the jobs made or needs: a dead server's partial files, forgotten clips and images."""
        jobs = list(jobs)
        made = {job.stem for job in jobs}
        for path in self.outputs.iterdir():
            if path.name.startswith(".") or ".".join(path.name.split(".")[:2]) not in made:
                path.unlink(missing_ok=True)
        self.sweep_inputs(jobs)

    def sweep_inputs(self, jobs: Iterable[Job], older_than_s: float = 0.0) -> None:
        """Remove what was sent so long ago and none of the jobs needs."""
        needed, before = {name for job in jobs for name in inputs_of(job.job)}, time.time() - older_than_s
        for path in self.inputs.iterdir():
            with suppress(FileNotFoundError):  # what was being written has its name now
                if path.name not in needed and path.stat().st_mtime <= before:
                    path.unlink()

    def used_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.outputs.iterdir() if path.exists())

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.root).free


def inputs_of(job: Mapping[str, Any]) -> Iterator[str]:
    """The names of the files among the inputs that a job reads."""
    yield from (image[0] for image in job["images"])
    yield from (file[0] for files in job.get("files", {}).values() for file in files)


def clip_names(stem: str, count: int) -> list[str]:
    """Of the videos of one job: `JOB.EPOCH.mp4`, `JOB.EPOCH.1.mp4` ..."""
    return [stem + (f".{number}" if number else "") + CLIP for number in range(count)]


def publish(
    stem: Path, write: Callable[[int, Path], None], thumbnail: Callable[[Path], None], report: Callable[[], Any],
    count: int = 1,
) -> dict:  # fmt: skip
    """Make the job's files; the first clip comes last, when all are whole and on the disk. Returns the job's result.

    write: makes one of `count` clips by its number, in their order.
    """
    clips = [stem.with_name(name) for name in clip_names(stem.name, count)]
    partials = [clip.with_name(f".{clip.stem}.partial{CLIP}") for clip in clips]
    for number, partial in enumerate(partials):
        write(number, partial)
    thumbnail(stem.with_name(stem.name + THUMBNAIL))
    stem.with_name(stem.name + REPORT).write_text(json.dumps(report()))
    for path in (*partials, stem.with_name(stem.name + REPORT)):
        sync(path)
    for partial, clip in reversed(list(zip(partials, clips, strict=True))):
        os.replace(partial, clip)
    sync(stem.parent)
    return result(clips[0], count)


def result(clip: Path, count: int = 1) -> dict[str, Any]:
    """Of a job's first clip."""
    report: Mapping[str, Any] = json.loads(clip.with_suffix(REPORT).read_text())
    files = clip_names(clip.stem, count)
    size = sum((clip.parent / name).stat().st_size for name in files)
    return {"file": clip.name, "files": files, "bytes": size, "report": report}


def sync(path: Path) -> None:
    """Wait until a file, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
