"""The files of a server: what it was sent (`in`), what it made (`out`), the queue.

Decides when a clip counts as made: its MP4 has its name, `JOB.EPOCH.mp4`, only when it and all that belongs to it are
on the disk. The epoch in the name keeps a run that was given up from replacing another's file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.serve.queue import Job

CLIP, THUMBNAIL, REPORT = ".mp4", ".webp", ".json"


class Folder:
    """Raises InputError if it cannot be written, or another server uses it."""

    def __init__(self, root: Path):
        self.root, self.inputs, self.outputs = root, root / "in", root / "out"
        try:
            for folder in (self.inputs, self.outputs):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = (root / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"--data: {root} is in use by another server; name another folder") from None
        except OSError as error:
            raise InputError(f"--data: {root} cannot be written ({error.strerror}); name another folder") from None

    def close(self) -> None:
        self._lock.close()

    @property
    def queue(self) -> Path:
        return self.root / "jobs.db"

    def keep_input(self, data: bytes) -> str:
        """The name of a file with these bytes among the inputs."""
        name = hashlib.sha256(data).hexdigest()
        if not (self.inputs / name).exists():
            partial = self.inputs / f".{name}.{os.urandom(4).hex()}"
            partial.write_bytes(data)
            sync(partial)
            os.replace(partial, self.inputs / name)
            sync(self.inputs)
        return name

    def published(self, job: Job) -> dict[str, Any] | None:
        """The result of a job whose clip has its name, else None."""
        clip = self.outputs / (job.stem + CLIP)
        return result(clip) if clip.exists() else None

    def remove(self, stem: str) -> None:
        for suffix in (CLIP, THUMBNAIL, REPORT):
            (self.outputs / (stem + suffix)).unlink(missing_ok=True)

    def sweep(self, jobs: Iterable[Job]) -> None:
        """Remove what none of the jobs made or needs: a dead server's partial files, forgotten clips and images."""
        jobs = list(jobs)
        made, needed = {job.stem for job in jobs}, {image[0] for job in jobs for image in job.job["images"]}
        for path in self.outputs.iterdir():
            if path.name.startswith(".") or path.with_suffix("").name not in made:
                path.unlink(missing_ok=True)
        for path in self.inputs.iterdir():
            if path.name not in needed:
                path.unlink(missing_ok=True)

    def used_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.outputs.iterdir() if path.exists())

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.root).free


def publish(
    stem: Path, write: Callable[[Path], None], thumbnail: Callable[[Path], None], report: Callable[[], Any]
) -> dict:
    """Make the clip's files; the clip itself comes last, whole and on the disk. Returns the job's result."""
    partial = stem.with_name(f".{stem.name}.partial{CLIP}")
    write(partial)
    thumbnail(stem.with_name(stem.name + THUMBNAIL))
    stem.with_name(stem.name + REPORT).write_text(json.dumps(report()))
    for path in (partial, stem.with_name(stem.name + REPORT)):
        sync(path)
    clip = stem.with_name(stem.name + CLIP)
    os.replace(partial, clip)
    sync(stem.parent)
    return result(clip)


def result(clip: Path) -> dict[str, Any]:
    report: Mapping[str, Any] = json.loads(clip.with_suffix(REPORT).read_text())
    return {"file": clip.name, "bytes": clip.stat().st_size, "report": report}


def sync(path: Path) -> None:
    """Wait until a file, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
