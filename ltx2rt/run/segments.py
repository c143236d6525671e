"""The folder that keeps the work of an unfinished run. A run goes on only from segments and steps
of the very same request, model and versions; it removes steps of another run, and no segments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ltx2rt.atomic_file import alone_in, remove_left, replacing
from ltx2rt.errors import InputError, concerning
from ltx2rt.notes import note
from ltx2rt.pipelines.request import Request
from ltx2rt.run.files import UNNAMED, Files
from ltx2rt.run.plan import Plan
from ltx2rt.run.recording import CLIP, STREAM
from ltx2rt.run.report import comment, written
from ltx2rt.session.session import Session
from ltx2rt.stages.kept_steps import STEPS, latest
from ltx2rt.text_files import read_json

REQUEST = "request.json"
PART = "[0-9][0-9][0-9][0-9].*"  # frames and samples, and the mel that these were made of


def folder_of(output: Path, in_segments: bool = True) -> Path:
    """Where the segments of an output, or its finished steps, are kept until it is whole."""
    return output.parent / f"{output.name}.{'segments' if in_segments else 'part'}"


def check_files(request: Request, files: Files) -> None:
    """Refuse what no clip in segments goes with. Raises InputError."""
    if request.in_segments and files.warmup:
        raise InputError("--warmup: does not go with a clip in segments; leave it out")


def check_records(request: Any, folder: Path) -> None:
    """Refuse --latents-out where an earlier run made segments without it. Raises InputError."""
    for number, part in enumerate(request.parts, 1):
        if part.path.exists() and not part.record_path.exists():
            raise InputError(
                f"--latents-out: segment {number} in {folder} was made without it; leave it out, or "
                "remove the folder to begin anew"
            )


def seed_of(folder: Path) -> int | None:
    """The seed of the run that left segments; None where there is none."""
    with suppress(InputError):
        return read_json(folder / REQUEST, {"seed": int})["seed"]
    return None


@contextmanager
def claimed(session: Session, plan: Plan, folder: Path) -> Iterator[None]:
    """Have the folder for the plan's clip alone, and say what is kept in it if the run is stopped.
    Raises InputError if it holds segments of another clip, or another run is at it."""
    segmented = plan.request.in_segments
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if not folder.parent.is_dir():
            raise
        raise InputError(
            f"--output: the folder {folder}, which keeps unfinished work, cannot be made "
            f"({error.strerror}); move what is there, or choose another name"
        ) from error
    with alone_in(folder, "--output"):
        asked = comment(session, plan.request, 0) | {"files": written(session, plan)}
        _check(json.loads(json.dumps(asked)), folder, segmented)
        unnamed = folder.name.startswith(f"{UNNAMED}-")
        named = f" with --output {folder.with_suffix('')}" if unnamed else ""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            for line in _kept(plan.request, folder):
                note(f"{line} are kept in {folder}: the same command{named} goes on")
            raise
        finally:
            if not segmented and latest(folder) is None:
                discard(folder)


def _kept(request: Request, folder: Path) -> Iterator[str]:
    parts = request.parts if request.in_segments else []
    if made := sum(part.path.exists() for part in parts):
        yield f"{made} of {len(parts)} segments"
    if found := latest(folder):
        stage, done, of = found
        yield f"{done} of {of} steps of {stage}"


def _check(asked: Any, folder: Path, segmented: bool) -> None:
    path = folder / REQUEST
    with concerning("--output"):
        found = read_json(path, dict, "remove the folder") if path.exists() else None
    if found not in (None, asked) and not segmented:
        note(f"steps of another run are removed ({_difference(found, asked)})")
        discard(folder, last=False)
        found = None
    if found is None:
        if other := next(folder.iterdir(), None):
            raise InputError(f"--output: {other} is of no run; move it, or choose another name")
        with replacing(path) as partial:
            partial.write_text(json.dumps(asked))
    elif found != asked:
        raise InputError(
            f"--output: {folder} holds segments of another run ({_difference(found, asked)}); "
            "remove the folder to begin anew, or choose another name"
        )


def _difference(found: Any, asked: Any, name: str = "") -> str:
    """The first thing that differs, with both of its values."""
    if isinstance(found, dict) and isinstance(asked, dict):
        for key in {**found, **asked}:
            if found.get(key) != asked.get(key):
                return _difference(found.get(key), asked.get(key), key)
    return f"{name}: {str(found)[:60]!r}, now {str(asked)[:60]!r}"


def discard(folder: Path, last: bool = True) -> None:
    """Remove segments and steps, and if it is the `last` time the empty folder."""
    remove_left(folder)
    recorded = (folder / STREAM, *folder.glob(f"{CLIP}.m??"), *folder.glob(f"*{STEPS}"))
    for path in (*folder.glob(PART), *recorded, folder / REQUEST):
        path.unlink(missing_ok=True)
    if last:
        with suppress(OSError):
            folder.rmdir()
