"""The files of a server: what it was sent (`in`), what it made (`out`), the queue.

A clip gets its name, `JOB.EPOCH.mp4`, when it and all that belongs to it are on the disk. The epoch
keeps a run that was given up from replacing another's file. Only files with names that a server
gives are ever removed, and a finished clip only if the queue knows its job.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import IO, Any

from ltx2rt.errors import InputError
from ltx2rt.serve.jobs import JOB_ID, Job
from ltx2rt.serve.refusal import NO_SPACE
from ltx2rt.system import sync, take_lock
from ltx2rt.text_files import read_json

STORAGE = "storage"  # the code of a run that failed because its files could not be written
DISK_FULL = "disk_full", "the disk is full"
MIN_FREE_BYTES = 2 * 10**9
CLIP, THUMBNAIL, REPORT = ".mp4", ".webp", ".json"
FRAMES = ".zip"  # beside a clip in high dynamic range, if asked for
SEGMENTS = ".segments"  # a folder, of a job that is being made
_RUN = rf"(?P<stem>(?P<job>{JOB_ID.pattern})\.[0-9]+)(\.[0-9]+)?"
OUTPUT = re.compile(rf"{_RUN}(\.mp4|\.zip|\.webp|\.json)")
UNFINISHED_OUTPUT = re.compile(rf"\.\.?{_RUN}\.partial\.(mp4|zip)(\.[0-9]+\.partial)?")
INPUT = re.compile(r"[0-9a-f]{64}(\.(media|mask|exr|context|latents))?")
UNFINISHED_INPUT = re.compile(rf"\.{INPUT.pattern}\.[0-9a-f]{{8}}")


class Folder:
    """The folder of one server, or of one batch; another process that opens it is refused.
    min_free_bytes: with less, the disk counts as full. queue: its file, if that is elsewhere.
    Raises InputError, which names the flag, if it cannot be written, or another server uses it."""

    def __init__(
        self, root: Path, flag: str = "--data", min_free_bytes: int = MIN_FREE_BYTES,
        queue: Path | None = None,
    ):  # fmt: skip
        self.queue = queue or root / "jobs.db"
        self.root, self.inputs, self.outputs = root, root / "in", root / "out"
        self.flag, self.min_free_bytes = flag, min_free_bytes
        # when an input was sent or found, by the monotonic clock
        self._since: dict[str, float] = {}
        self._senders: dict[str, set[str]] = {}  # users by input
        self._inputs_lock = Lock()
        try:
            for folder in (self.inputs, self.outputs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(flag, root, error) from None
        self._locks = [_locked(root / "lock", flag, root)]
        if queue:
            try:
                self._locks.append(_locked(Path(f"{queue}.lock"), "--queue", queue))
            except InputError:
                self.close()
                raise

    def close(self) -> None:
        for lock in self._locks:
            lock.close()

    def require_queue(self) -> None:
        """Refuse files of a server without their queue. Raises InputError."""
        if self.queue.exists() and self.queue.stat().st_size:
            return
        found = [path.name for path, _ in (*_own(self.outputs, OUTPUT), *_own(self.inputs, INPUT))]
        others = self.queue.parent.glob(self.queue.name + "-*")
        found += [path.name for path in others if path.stat().st_size]
        if found:
            raise InputError(
                f"{self.flag}: {self.root} holds {len(found)} files of a server, such as "
                f"{found[0]}, but not its queue, {self.queue.name}; put that back (--queue), "
                "or name another folder"
            )

    def keep_input(self, data: bytes, suffix: str = "", user: str = "") -> str:
        """Keep a file with these bytes among the inputs; its digest, which with the suffix is its
        name. user: may name it from now on."""
        digest = hashlib.sha256(data).hexdigest()
        name = digest + suffix
        with self._inputs_lock:
            self._senders.setdefault(name, set()).add(user)
            self._since[name] = time.monotonic()  # `sweep_inputs` leaves it alone
            if (self.inputs / name).exists():
                return digest
        partial = self.inputs / f".{name}.{os.urandom(4).hex()}"
        try:
            partial.write_bytes(data)
            sync(partial)
            os.replace(partial, self.inputs / name)
        finally:
            partial.unlink(missing_ok=True)
        sync(self.inputs)
        return digest

    def sent_by(self, user: str, digest: str) -> bool:
        """Whether the user has sent this server a file with the digest since it started."""
        with self._inputs_lock:
            senders = self._senders.items()
            return any(user in users for name, users in senders if name.startswith(digest))

    def keep_longer(self, names: Iterable[str]) -> bool:
        """Count inputs as sent just now; whether all are there."""
        with self._inputs_lock:
            self._since |= dict.fromkeys(names := list(names), time.monotonic())
            return all((self.inputs / name).is_file() for name in names)

    def published(self, job: Job) -> dict[str, Any] | None:
        """The result of a job whose files are whole, else None."""
        clip = self.outputs / (job.stem + CLIP)
        try:
            return result(clip, job.job.get("n", 1)) if clip.exists() else None
        except (OSError, ValueError):  # it was not made to its end, or was damaged since
            return None

    def remove(self, job: Job) -> None:
        _discard(self.outputs / f"{job.id}{SEGMENTS}")
        clips = clip_names(job.stem, job.job.get("n", 1))
        beside = job.stem + THUMBNAIL, job.stem + REPORT
        for name in (*clips, *map(frames_of, clips), *beside):
            (self.outputs / name).unlink(missing_ok=True)

    def remove_unfinished(self, job: Job) -> None:
        """Remove what a run of the job has left whose process has ended: partial files, and all
        others where the first clip, which comes last, is not there."""
        whole = (self.outputs / (job.stem + CLIP)).exists()
        for names in (UNFINISHED_OUTPUT,) if whole else (UNFINISHED_OUTPUT, OUTPUT):
            _remove(self.outputs, names, job.stem)

    def sweep(self, kept: Iterable[Job], known: Collection[str]) -> list[str]:
        """Remove what dead runs have left: partial files, and files of known jobs that are not
        kept. known: the ids of all jobs in the queue. Finished clips of other jobs stay, for the
        queue may be an older copy; returns their names."""
        self._remove_unfinished()
        kept = list(kept)
        self._remove_segments({job.id for job in kept if not job.over})
        stems, unknown = {job.stem for job in kept}, []
        for path, match in list(_own(self.outputs, OUTPUT)):
            if match["stem"] in stems:
                continue
            if match["job"] in known or not (self.outputs / (match["stem"] + CLIP)).exists():
                path.unlink(missing_ok=True)
            elif path.suffix == CLIP:
                unknown.append(path.name)
        return sorted(unknown)

    def clear(self) -> None:
        """Remove every file that a server or batch made here, and the queue."""
        for path in self.root.glob(f"{self.queue.name}*"):
            path.unlink()
        self._remove_unfinished()
        self._remove_segments()
        _remove(self.outputs, OUTPUT)
        _remove(self.inputs, INPUT)

    def _remove_unfinished(self) -> None:
        _remove(self.outputs, UNFINISHED_OUTPUT)
        _remove(self.inputs, UNFINISHED_INPUT)

    def _remove_segments(self, kept: Collection[str] = ()) -> None:
        """Remove the segments of all jobs but the ones with these ids."""
        for path in self.outputs.glob(f"*{SEGMENTS}"):
            job = path.name.removesuffix(SEGMENTS)
            if JOB_ID.fullmatch(job) and job not in kept and not path.is_symlink():
                _discard(path)

    def remove_folder(self) -> None:
        """Remove the folder itself, unless it holds files that were not made here."""
        self.clear()
        self.close()
        with suppress(OSError):
            for path in (self.inputs, self.outputs):
                path.rmdir()
            (self.root / "lock").unlink()
            self.root.rmdir()

    def sweep_inputs(self, jobs: Iterable[Job], older_than_s: float) -> None:
        """Remove unneeded inputs of this age; after a start they count as sent just now."""
        needed = {name for job in jobs for name in inputs_of(job.job)}
        for path, _ in list(_own(self.inputs, INPUT)):
            with self._inputs_lock:
                since = self._since.setdefault(path.name, now := time.monotonic())
                if path.name not in needed and now - since >= older_than_s:
                    path.unlink(missing_ok=True)
                    del self._since[path.name]
                    self._senders.pop(path.name, None)

    def used_bytes(self) -> int:
        total = 0
        for path, _ in _own(self.outputs, OUTPUT):
            with suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def problem(self) -> tuple[str, str] | None:
        """Code and sentence if no clip could be kept here now. Writes a little and waits for it."""
        error = _write_error(self.outputs) or _write_error(self.inputs)
        if error is not None and error.errno not in NO_SPACE:
            return "unavailable", f"the folder cannot be written ({error.strerror})"
        return DISK_FULL if error or self.full() else None

    def full(self) -> bool:
        return self.free_bytes() < self.min_free_bytes

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.root).free


def _locked(path: Path, flag: str, what: Path) -> IO[str]:
    """An open file that no other process holds. Raises InputError."""
    try:
        with ExitStack() as opened:
            held = opened.enter_context(path.open("w"))
            take_lock(held.fileno())
            opened.pop_all()
            return held
    except BlockingIOError:
        raise InputError(f"{flag}: {what} is in use by another server; name another one") from None
    except OSError as error:
        raise _unwritable(flag, what, error) from None


def _unwritable(flag: str, path: Path, error: OSError) -> InputError:
    return InputError(f"{flag}: {path} cannot be written ({error.strerror}); name another one")


def _own(folder: Path, names: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    """The files of a folder whose names a server gives."""
    for path in folder.iterdir():
        if (match := names.fullmatch(path.name)) and path.is_file() and not path.is_symlink():
            yield path, match


def _discard(segments: Path) -> None:
    from ltx2rt.run.segments import discard  # imports the models, which a queue does without

    discard(segments)


def _remove(folder: Path, names: re.Pattern[str], stem: str | None = None) -> None:
    """Remove those files of a folder, or those of one run."""
    for path, match in list(_own(folder, names)):
        if stem is None or match["stem"] == stem:
            path.unlink(missing_ok=True)


def inputs_of(job: Mapping[str, Any]) -> Iterator[str]:
    """The names of the files among the inputs that a job reads."""
    yield from (image[0] for image in job["images"])
    yield from (file[0] for files in job.get("files", {}).values() for file in files)


def segments_of(job: Mapping[str, Any]) -> Path:
    """Where a worker keeps the segments of a job, from which a later run of it goes on."""
    return Path(job["stem"]).with_name(job["id"] + SEGMENTS)


def clip_names(stem: str, count: int) -> list[str]:
    """Names of the videos of one job: `JOB.EPOCH.mp4`, `JOB.EPOCH.1.mp4` ..."""
    return [stem + (f".{number}" if number else "") + CLIP for number in range(count)]


def frames_of(clip: str) -> str:
    """Name of the frames of a clip."""
    return clip.removesuffix(CLIP) + FRAMES


def publish(
    stem: Path, write: Callable[[int, Path], None], thumbnail: Callable[[Path], None],
    report: Callable[[], Any],
    count: int,
) -> dict:  # fmt: skip
    """Make the job's files; the first clip comes last, when all are whole and on the disk. Returns
    the job's result. write: makes one of `count` clips by its number, in their order, and frames
    beside it where they are asked for."""
    clips = [stem.with_name(name) for name in clip_names(stem.name, count)]
    partials = [clip.with_name(f".{clip.stem}.partial{CLIP}") for clip in clips]
    picture, told = (stem.with_name(stem.name + suffix) for suffix in (THUMBNAIL, REPORT))
    try:
        for number, partial in enumerate(partials):
            write(number, partial)
        thumbnail(picture)
        told.write_text(json.dumps(report()))
        frames = [path for clip in partials if (path := clip.with_suffix(FRAMES)).exists()]
        for path in (*partials, *frames, told):
            sync(path)
    except BaseException:
        with suppress(OSError):
            frames = [clip.with_suffix(FRAMES) for clip in partials]
            for path in (*partials, *frames, picture, told):
                path.unlink(missing_ok=True)
        raise
    for partial, clip in reversed(list(zip(partials, clips, strict=True))):
        if partial.with_suffix(FRAMES) in frames:
            os.replace(partial.with_suffix(FRAMES), clip.with_suffix(FRAMES))
        os.replace(partial, clip)
    sync(stem.parent)
    return result(clips[0], count)


def result(clip: Path, count: int = 1) -> dict[str, Any]:
    """Path of a job's first clip."""
    report = read_json(clip.with_suffix(REPORT), dict)
    files = clip_names(clip.stem, count)
    kept = [clip.parent / name for name in (*files, *map(frames_of, files))]
    size = sum(path.stat().st_size for path in kept if path.suffix == CLIP or path.exists())
    return {"file": clip.name, "files": files, "bytes": size, "report": report}


def _write_error(folder: Path) -> OSError | None:
    """The error of writing a file without a name in the folder, None if it works."""
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def writing_problem(folder: Path, error: OSError) -> str | None:
    """Why no clip can be written into the folder, if that is what the error of a run came from."""
    found = error if error.errno in NO_SPACE else _write_error(folder)
    return (found.strerror or str(found)) if found else None
