"""The folder that keeps the work of an unfinished run. A run goes on only from segments and steps
of the very same request, model and versions; it removes steps of another run, and no segments."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ltx2rt.atomic_file import alone_in, remove_left, replacing
from ltx2rt.errors import InputError
from ltx2rt.flags import flagged
from ltx2rt.notes import note
from ltx2rt.pipelines import pipeline
from ltx2rt.pipelines.clip import Clip
from ltx2rt.pipelines.earlier import current
from ltx2rt.pipelines.request import Request
from ltx2rt.run.files import UNNAMED, Files
from ltx2rt.run.plan import Plan
from ltx2rt.run.recording import CLIP, STREAM
from ltx2rt.run.report import comment, written
from ltx2rt.session.options import plain
from ltx2rt.session.session import Session
from ltx2rt.stages.kept_steps import STEPS, latest
from ltx2rt.stages.segments import LOOK, MEL, RECORD
from ltx2rt.text_files import read_json
from ltx2rt.weights.digests import SHORT_DIGEST

REQUEST = "request.json"
STEPS_ALONE = ".part"  # suffix of a folder without segments
SUFFIXES = (".mov", LOOK, MEL, RECORD)
PART = "[0-9][0-9][0-9][0-9]"  # the number of a segment, in the names of its files


def folder_of(output: Path, in_segments: bool = True) -> Path:
    """Where the segments of an output, or its finished steps, are kept until it is whole."""
    return output.parent / f"{output.name}{'.segments' if in_segments else STEPS_ALONE}"


def check_files(request: Request, files: Files) -> None:
    """Refuse what no clip in segments goes with. Raises InputError."""
    if request.in_segments and files.warmup:
        raise InputError("--warmup: does not go with a clip in segments; leave it out")


def check_records(clip: Clip, folder: Path) -> None:
    """Refuse --latents-out where an earlier run made segments without it. Raises InputError."""
    for number, part in enumerate(clip.parts, 1):
        if part.path.exists() and not part.record_path.exists():
            raise InputError(
                f"--latents-out: segment {number} in {folder} was made without it; leave it out, or "
                "remove the folder to begin anew"
            )


def seed_of(folder: Path, request: Request) -> int | None:
    """The seed of the run that left segments or steps of this prompt; None without one."""
    with suppress(InputError):
        found = read_json(folder / REQUEST, {"seed": int, "prompt": str, "settings": dict})
        same = found["settings"].get("pipeline") == request.name
        return found["seed"] if same and found["prompt"] == request.prompt else None
    return None


@contextmanager
def claimed(session: Session, plan: Plan, folder: Path, own: bool = False) -> Iterator[None]:
    """Have the folder for the plan's clip alone, and say what is kept in it if the run is stopped.
    own: it is a server's, and no user's. Raises InputError if it holds segments of another clip, or
    another run is at it."""
    segmented = plan.clip.segments is not None
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
        asked = comment(session, plan.clip, 0) | {"files": written(session, plan)}
        _check(json.loads(json.dumps(asked)), folder, segmented, own)
        unnamed = folder.name.startswith(f"{UNNAMED}-")
        named = f" with --output {folder.with_suffix('')}" if unnamed else ""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            for line in _kept(plan.clip, folder):
                note(f"{line} are kept in {folder}: the same command{named} goes on")
            raise
        finally:
            if not segmented and latest(folder) is None:
                discard(folder)


def _kept(clip: Clip, folder: Path) -> Iterator[str]:
    if made := sum(part.path.exists() for part in clip.parts):
        yield f"{made} of {len(clip.parts)} segments"
    if found := latest(folder):
        stage, done, of = found
        yield f"{done} of {of} steps of {stage}"


def _check(asked: Any, folder: Path, segmented: bool, own: bool) -> None:
    """own: the folder is no user's, and segments of another run in it are removed."""
    path, found = folder / REQUEST, None
    if os.path.lexists(path):
        try:
            found = _as_now(read_json(path, dict, "remove the folder"), asked, segmented)
        except InputError as error:
            if segmented and not own:
                raise InputError(f"--output: {error}") from None
            found = {"its request": str(error)}
    if found not in (None, asked) and (own or not segmented):
        kept = "segments" if segmented else "steps"
        note(f"{kept} of another run are removed ({_difference(found, asked)})")
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


def _as_now(found: dict[str, Any], asked: Any, segmented: bool) -> dict[str, Any]:
    """The request that an earlier release stored as this one states it: its settings, and those
    that it lacks. Segments, but no steps, of other versions are used."""
    settings, now = found.get("settings"), asked["settings"]
    if not isinstance(settings, dict):
        return found
    options = _dict(settings.get("options"))
    options = now["options"] | {key: x for key, x in options.items() if key in now["options"]}
    settings = current(now["pipeline"], settings) | {"options": options}
    for name, f in flagged(pipeline(now["pipeline"])).items():
        if name in now and name not in settings and now[name] == plain(f.default):
            settings[name] = now[name]
    files = found.get("files", asked["files"])
    found = _same_files(found | {"settings": settings, "files": files}, asked)
    if segmented and (before := _dict(found.get("versions"))) != asked["versions"]:
        found["versions"] = asked["versions"]
        if found == asked:
            note(
                f"segments of version {before.get('ltx2rt')} are there; later ones are of this one"
            )
    return found


def _same_files(found: Any, asked: Any) -> Any:
    """Put today's digests in place of the shorter ones that version 0.1 made, for the same names."""
    if not (isinstance(found, dict) and isinstance(asked, dict)):
        return found
    changed = {key: _same_files(x, asked.get(key)) for key, x in found.items()}
    short = len(str(found.get("digest"))) == SHORT_DIGEST and found.get("name") == asked.get("name")
    return changed | ({"digest": asked.get("digest")} if short else {})


def _dict(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


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
    own = [f"*{STEPS}", REQUEST]
    if folder.suffix != STEPS_ALONE:
        own += [*(f"{PART}{suffix}" for suffix in SUFFIXES), STREAM, f"{CLIP}.m??"]
    for path in (path for pattern in own for path in folder.glob(pattern)):
        with suppress(IsADirectoryError):  # a user's
            path.unlink(missing_ok=True)
    if last:
        with suppress(OSError):
            folder.rmdir()
