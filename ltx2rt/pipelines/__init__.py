"""The pipelines by name: every module of this package that has a `PIPELINE`, a class derived from
`Request`.

A pipeline is added by its file alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.flags import field_names, flagged, keywords
from ltx2rt.media.output import is_sound
from ltx2rt.notes import note
from ltx2rt.pipelines.groups.size import with_sides
from ltx2rt.pipelines.request import Request
from ltx2rt.suggest import hint

FIRST = "two-stage"  # the default
UNGUIDED = "distilled"  # the default of what is for steps without guidance
CLIP, SECONDS = "video_path", "seconds"
HDR = "hdr"
SOUND_ALONE = "output *.wav"  # among fields, says that all files to write are sounds


def pipelines() -> dict[str, type[Request]]:
    """All of them, the default one first."""
    found = {}
    for module in sorted(info.name for info in iter_modules(__path__)):
        pipeline = getattr(import_module(f"{__name__}.{module}"), "PIPELINE", None)
        if pipeline is not None:
            found[pipeline.name] = pipeline
    return {FIRST: found.pop(FIRST), **found}


def pipeline(name: str) -> type[Request]:
    """Raises InputError naming the known ones."""
    known = pipelines()
    if not isinstance(name, str) or name not in known:
        raise InputError(
            f"--pipeline: {str(name)[:80]!r}, expected one of "
            f"{', '.join(known)}{hint(str(name), known)}"
        )
    return known[name]


def chosen(given: Collection[str], default: str = FIRST) -> tuple[str, str]:
    """The pipeline that a request with these fields asks for, and the fields that decide, joined by
    "and", "" for the default one. given: may have `SOUND_ALONE`. Raises InputError for a clip with
    which nothing is to be done."""
    known = flagged(*pipelines().values())
    asked = {field: f.metadata["flag"].asks for field, f in known.items() if field in given}
    decisive = [field for field, name in asked.items() if name or field == CLIP]
    if not decisive and SOUND_ALONE in given:
        return "t2a", SOUND_ALONE
    if not decisive or set(decisive) <= flagged(pipeline(default)).keys():
        others = (known.keys() & given) - flagged(pipeline(default)).keys()
        if default == FIRST and others and others <= flagged(pipeline(UNGUIDED)).keys():
            return UNGUIDED, min(others)
        return default, ""
    if decisive == [CLIP] and SECONDS in given:
        return "extend", f"{CLIP} and {SECONDS}"
    if decisive == [CLIP] and HDR in given:
        return "hdr-ic-lora", f"{CLIP} and {HDR}"
    if decisive == [CLIP]:
        raise InputError(
            "--video-path: say what to do with the clip: --start-time and --end-time regenerate a "
            "part (retake), --mask, --mask-box or --pad a region (inpaint), --seconds, "
            "--extend-frames, --before, --join or --loop continue it (extend), --noise-level redraws "
            "it (v2v), --hdr converts it (hdr-ic-lora), as --upscale it becomes larger, and as "
            "--video-conditioning it is a reference (ic-lora); or name a --pipeline"
        )
    asking = {field: name for field, name in asked.items() if name}
    unread = {
        field: set(decisive) - flagged(pipeline(name)).keys() for field, name in asking.items()
    }
    field = min(asking, key=lambda field: len(unread[field]))
    return asking[field], field


def sound_alone(outputs: Iterable[str | Path]) -> set[str]:
    """`SOUND_ALONE` for files that are all sounds."""
    named = [is_sound(Path(output)) for output in outputs]
    return {SOUND_ALONE} if named and all(named) else set()


def readers(field: str) -> list[str]:
    """Names of the pipelines that read a field."""
    return [name for name, type_ in pipelines().items() if field in flagged(type_)]


def unread(name: str, flag: str, field: str) -> InputError:
    """The refusal of a flag that the pipeline does not read."""
    if (name, field) == ("a2v", CLIP):
        return InputError(
            f"{flag}: --audio-path makes new pictures for a sound and takes no clip; leave one "
            "of the two out"
        )
    able = readers(field)
    others = f", or choose --pipeline {' or '.join(able)}" if len(able) < 5 else ""
    return InputError(f"{flag}: the {name} pipeline does not read it; leave it out{others}")


def make_request(name: str | None, **given: Any) -> Request:
    """The request of a pipeline, or if that is None of the one that the inputs choose, from the
    keywords of a Python caller. Raises InputError."""
    given = with_sides(given)
    if name is None:
        spelled = field_names(*pipelines().values())
        name, field = chosen({spelled.get(keyword, keyword) for keyword in given})
        if field:
            note(f"pipeline {name}, because of {field}")
    type_ = pipeline(name)
    for field in given.keys() - flagged(type_).keys():
        if readers(field):
            raise unread(name, field, field)
    request = type_(**keywords(given, type_))
    request.check()
    return request
