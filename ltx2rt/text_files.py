"""Text and JSON files that a user can touch: regular files below a size, and values of known types.

A shape describes a JSON value: a type (`float` admits whole numbers), None, a tuple of
alternatives, `[shape]` for a list, `{"key": shape}` for an object (`"key?"` may be absent), and
`{str: shape}` for an object with any keys.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError, concerning
from ltx2rt.system import opened_at_once

MOST_BYTES = 2**28
# How Python keeps bytes of the command line that are not in the locale's encoding.
NO_TEXT = (
    "holds bytes that are no text in this locale (lone surrogates); set LC_ALL=C.UTF-8, or put the "
    "text in a UTF-8 file for --prompts"
)
MOST_NUMBER = 2**64  # whole numbers beyond it are no count of anything
WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    None: "null",
}


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the contents of a regular file. Raises InputError that names the file, also for
    folders, pipes and devices."""
    try:
        with open(path, "rb", opener=opened_at_once) as file:
            status = os.fstat(file.fileno())
            regular, large = stat.S_ISREG(status.st_mode), status.st_size > most_bytes
            data = file.read() if regular and not large else b""
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{str(path)[:300]}: cannot be read ({reason}); check the path") from None
    if not regular:
        raise InputError(f"{path}: not a regular file; save its content as one")
    if large:
        raise InputError(f"{path}: more than {most_bytes} bytes; pass a smaller one")
    return data


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return UTF-8 text without a byte order mark, or UTF-16 text with one, its lines ended by line
    feeds. Raises InputError as `read_bytes` does."""
    data = read_bytes(path, most_bytes)
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # Windows PowerShell's
    try:
        return data.decode("utf-16" if wide else "utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: no UTF-8 text ({error}); save it again as UTF-8") from None


def read_toml(flag: str, path: Path) -> dict[str, Any]:
    """Return the values of a TOML file that a flag names. Raises InputError."""
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5000 digits
        raise InputError(f"{flag}: {path} is no TOML file ({error}); correct it") from None


def flag_lines(flag: str, path: Path, most_bytes: int = MOST_BYTES) -> list[str]:
    """Return the lines of a file that a flag names. Raises InputError that names both."""
    with concerning(flag):
        return read_text(path, most_bytes).split("\n")


def flag_rows(flag: str, path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the words of each line that is not empty and no comment, after the line's place in
    words. Raises InputError as `flag_lines` does."""
    for number, line in enumerate(flag_lines(flag, path), 1):
        if (words := line.split()) and not line.startswith("#"):
            yield f"{flag}: line {number} of {path}", words


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ValueError for a name that it has twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"{twice[:80]!r} is given twice")
    return found


def parse(text: str, shape: Any = object, object_of: Any = dict) -> Any:
    """Return the JSON value of a text. object_of: makes an object of its pairs, such as `once`.
    Raises ValueError: the reason in a few words."""
    try:
        found = json.loads(text, object_pairs_hook=object_of)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None
    if wrong := mismatch(found, shape):
        raise ValueError(wrong)
    return found


def read_json(path: Path, shape: Any = object, advice: str = "correct it") -> Any:
    """Return the JSON value of a file. Raises InputError that names the file and ends in advice."""
    text = read_text(path)
    try:
        return parse(text, shape)
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); {advice}") from None


def read_json_lines(path: Path, shape: Any, advice: str = "correct it") -> list[Any]:
    """Return one value for each line that is not blank. Raises InputError that names the line."""
    found = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        try:
            found += [parse(line, shape)] if line.strip() else []
        except ValueError as error:
            raise InputError(f"{path} is damaged (line {number}: {error}); {advice}") from None
    return found


def mismatch(value: Any, shape: Any, name: str = "it") -> str:
    """Return a sentence about the first part of a value that is not of its shape, "" if none."""
    if isinstance(shape, tuple):
        found = [mismatch(value, one, name) for one in shape]
        return "" if "" in found else found[0]
    if isinstance(shape, (list, dict)):
        if not isinstance(value, type(shape)):
            return _unexpected(value, type(shape), name)
        return next(filter(None, _within(value, shape, name)), "")
    if shape is None:
        return "" if value is None else _unexpected(value, shape, name)
    kinds = (int, float) if shape is float else shape
    fine = isinstance(value, kinds) and (shape in (bool, object) or not isinstance(value, bool))
    if fine and isinstance(value, (int, float)):
        fine = abs(value) <= MOST_NUMBER and math.isfinite(value)
    return "" if fine else _unexpected(value, shape, name)


def _within(value: Any, shape: Any, name: str) -> Any:
    """Yield the mismatch of every part of a list or an object."""
    if isinstance(shape, list):
        yield from (mismatch(x, shape[0], f"{name}[{i}]") for i, x in enumerate(value))
    elif str in shape:
        yield from (mismatch(x, shape[str], key[:80]) for key, x in value.items())
    else:
        for key, one in shape.items():
            plain = key.removesuffix("?")
            if plain in value:
                yield mismatch(value[plain], one, plain)
            elif plain == key:
                yield f"{key} is missing"


def _unexpected(value: Any, shape: Any, name: str) -> str:
    huge = isinstance(value, int) and abs(value) > MOST_NUMBER
    shown = "a huge number" if huge else repr(value)[:80]
    return f"{name} is {shown}, expected {WORDS.get(shape, 'another type')}"
