"""The fields that requests may have, from the flags of the pipelines, and their values.

Files and images come as bytes, so that no field names a path.
"""

from __future__ import annotations

import re
from argparse import SUPPRESS
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.flags import Flag, convert, flagged, marked, parse_seconds, reader
from ltx2rt.pipelines import pipelines
from ltx2rt.pipelines.groups.images import parse_image
from ltx2rt.pipelines.groups.size import Pixels
from ltx2rt.pipelines.groups.sound import parse_reference
from ltx2rt.pipelines.groups.text import Enhancing
from ltx2rt.pipelines.request import Request
from ltx2rt.serve.upload import MAX_BYTES
from ltx2rt.suggest import same

LAST = re.compile("end|last|tail")  # in a peer's name of an image: for the last frame
NO_FRAME = re.compile("reference|key")  # in such a name: the frame is not known
MAX_PROMPT = 2**17 - 1  # characters of a word on Linux' command line
MAX_VALUE = 4000  # characters of other text
MAX_PROMPTS = 64  # limit for segments
MAX_DIGITS = 40  # characters of a number


def served() -> dict[str, type[Request]]:
    """The pipelines that make pictures."""
    return {name: type_ for name, type_ in pipelines().items() if type_.has(Pixels)}


@cache
def uploads(*types: type[Request]) -> dict[str, str]:
    """Kinds of files that pipelines take besides images, by field; default: all pipelines."""
    flags = _flags(*(types or served().values()))
    kinds = {name: how.file for name, how in flags.items() if how.parse is not parse_image}
    return {name: kind for name, kind in kinds.items() if kind in MAX_BYTES}


@cache
def structured() -> tuple[str, ...]:
    """The fields that are JSON, also as text of a form."""
    flags = _flags(*served().values()).items()
    listed = [name for name, how in flags if how.repeat or how.json == "array"]
    return ("loras", "metadata", "input_reference", *listed, *uploads())


def file_field(name: str, known: Collection[str]) -> tuple[str, dict[str, Any]] | None:
    """The field among `known` that another program's name of a file means, with the frame of an
    image; None without one."""
    field, word = same(name, known), name.lower()
    if field is None or (field == "images" and NO_FRAME.search(word)):
        return None
    return field, {"frame": "last"} if field == "images" and LAST.search(word) else {}


def several(field: str) -> bool:
    """Whether a field takes more than one value."""
    return field == "loras" or (field in flagged(*served().values()) and how(field).repeat)


def _flags(*types: type[Request]) -> dict[str, Flag]:
    return {name: f.metadata["flag"] for name, f in flagged(*types).items()}


@cache
def how(field: str) -> Flag:
    return _flags(*pipelines().values())[field]


def as_given(files: Mapping[str, list[list]], folder: Path) -> dict[str, Any]:
    """The files of a job, which are in the folder, as keywords of its pipeline."""
    found: dict[str, Any] = {}
    for field, several in files.items():
        named = [(str(folder / file), *rest) for file, *rest in several]
        one = named[0] if how(field).parse is parse_reference else named[0][0]
        found[field] = named if how(field).repeat else one
    return found


@cache
def offered(type_: type[Request], with_enhancer: bool = False) -> dict[str, Field]:
    """The clip flags that requests may set: those that name no file to keep, and are not marked as
    the command line's own."""
    but = marked("command", type_) | ({} if with_enhancer else flagged(Enhancing))
    flags = {name: how for name, how in _flags(type_).items() if how.file is None}
    own = [name for name, how in flags.items() if name not in but and how.help != SUPPRESS]
    return {name: flagged(type_)[name] for name in own}


def front(type_: type[Request]) -> list[str]:
    """The fields that tell what the pipeline is to do with which file, apart from images; where the
    seconds to add tell it, only the file."""
    flags = _flags(type_)
    adds = "extend_frames" in flags
    return [
        name
        for name, how in flags.items()
        if ((how.asks == type_.name and not adds) or (how.asks is None and how.file and how.common))
        and how.parse is not parse_image
    ]


def value(f: Field, given: Any) -> Any:
    """A field's value from JSON or from the text of a form. Raises InputError."""
    own: Flag = f.metadata["flag"]
    parse, name, text = reader(f), f"--{f.name.replace('_', '-')}", str(given)
    if own.repeat:
        given = given.splitlines() if isinstance(given, str) else given
        texts = isinstance(given, list) and len(given) <= MAX_PROMPTS
        if not texts or not all(isinstance(x, str) and len(x) <= MAX_PROMPT for x in given):
            raise InputError(
                f"{name}: expected a list of at most {MAX_PROMPTS} texts of at most "
                f"{MAX_PROMPT} characters"
            )
        return convert(f, given)
    if own.bare is not None and given is True:
        return own.bare
    if parse is bool:
        return truth(name, given)
    if parse is str and isinstance(given, str) and len(given) > MAX_PROMPT:
        raise InputError(f"{name}: {len(given)} characters, expected at most {MAX_PROMPT}")
    if "\0" in text:
        raise InputError(f"{name}: holds a zero byte; leave it out")
    misfit = InputError(f"{name}: {text[:80]!r}, expected {own.expects or schema(f)['type']}")
    kinds = (str, int, float, list) if own.json in ("array", "string") else (str, int, float)
    if (
        isinstance(given, bool)
        or not isinstance(given, kinds)
        or (len(text) > MAX_VALUE and parse is not str)
    ):
        raise misfit
    if (parse is int or own.json == "integer") and not re.fullmatch(
        r"-?[0-9]{1,20}(\.0)?", text.strip()
    ):
        raise InputError(f"{name}: {text[:80]}, expected a whole number of at most 20 digits")
    try:
        return convert(f, given)
    except InputError:
        raise
    except (TypeError, OverflowError, ValueError):
        raise misfit from None


def truth(name: str, given: Any) -> bool:
    """Raises InputError, which names the flag."""
    if (text := str(given).lower()) not in ("true", "false"):
        raise InputError(f"{name}: {str(given)[:80]!r}, expected true or false")
    return text == "true"


def schema(f: Field) -> dict[str, Any]:
    """As JSON schema has it."""
    how = f.metadata["flag"]
    types: dict[Any, str] = {int: "integer", bool: "boolean"}
    types |= dict.fromkeys((float, parse_seconds), "number")
    negated = how.name is not None and how.name.startswith("--no-")
    found = {
        "type": how.json or types.get(reader(f), "string"),
        "description": "" if negated else how.help,
        "group": how.group,
    }
    if how.repeat:
        found |= {"type": "array", "items": {"type": "string"}}
    if how.choices:
        found["enum"] = list(how.choices)
    bounds = {"minimum": how.least, "maximum": how.most, "exclusiveMinimum": how.above}
    found |= {name: bound for name, bound in bounds.items() if bound is not None}
    if f.default not in (MISSING, None):
        found["default"] = float(f.default) if isinstance(f.default, Fraction) else f.default
    return found


def number(given: Any) -> float | None:
    """A finite number, or its text."""
    try:
        found = None if isinstance(given, bool) or len(str(given)) > MAX_DIGITS else float(given)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found is not None and abs(found) < 1e12 else None
