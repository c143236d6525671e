"""A flag is written once: on the dataclass field that holds its value.

`flag` declares default, spelling, help and parser of a field; from the fields are made the command line's parser
(`add_flags`), the values that it read (`given_flags`) and the keywords of the Python interface (`convert`). Which
dataclasses a command reads is the command's business.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError

NATIVE = (int, float, Path)  # read by argparse itself, which names the flag in its error
KINDS = {int: "a whole number", float: "a number", str: "text", Path: "a path", bool: "True or False"}


@dataclass(frozen=True)
class Flag:
    """How a field is spelled and read. parse: text to value, `bool` for a switch; repeat: a tuple of such values.

    name: the flag, if it is not the field's name with dashes; a switch of a field that is True by default starts with
    `--no-`. keyword: a second name in the Python interface.
    """

    help: str
    parse: Callable[[str], Any] = str
    name: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    repeat: bool = False
    keyword: str | None = None


def flag(default: Any, help: str = "", parse: Callable[[str], Any] = str, **spelling: Any) -> Any:
    """A dataclass field with a flag. default: MISSING for a required one; spelling: the other fields of `Flag`."""
    metadata = {"flag": Flag(help, parse, **spelling)}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def flagged(*types: type) -> dict[str, Field]:
    """The fields that have flags, by name; of a name that several types have, the first type's."""
    found: dict[str, Field] = {}
    for type_ in types:
        for f in fields(type_):
            if "flag" in f.metadata:
                found.setdefault(f.name, f)
    return found


def spelling(f: Field) -> str:
    return f.metadata["flag"].name or f"--{f.name.replace('_', '-')}"


def add_flags(
    parser: Any, *types: type, only: Iterable[str] | None = None, but: Iterable[str] = (), **defaults: Any
) -> None:
    """Add the flags of the types' fields, all but `but` or `only` some; `defaults` replace the fields' own.

    A flag that is not given leaves nothing in the namespace.
    """
    found, but = flagged(*types), set(but)
    for name in found if only is None else only:
        if name in but:
            continue
        f, default = found[name], defaults.get(name, found[name].default)
        how: Flag = f.metadata["flag"]
        words: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": how.help}
        if default is MISSING and f.default_factory is MISSING:
            words["required"] = True
        if how.parse is bool:
            words["action"] = "store_false" if default is True else "store_true"
        else:
            words |= {"metavar": how.metavar, "choices": how.choices}
            if how.parse in NATIVE:
                words["type"] = how.parse
            if how.repeat:
                words |= {"nargs": "+", "action": "extend"}
            elif isinstance(default, (int, float, str, Fraction)) and default != "" and "default" not in how.help:
                words["help"] = f"{how.help} (default: {_shown(default)})".lstrip()
        parser.add_argument(spelling(f), **words)


def _shown(value: Any) -> str:
    return f"{float(value):g}" if isinstance(value, (float, Fraction)) else str(value)


def given_flags(args: argparse.Namespace, *types: type) -> dict[str, Any]:
    """Values by field name of the flags that were given. Raises InputError for what a flag's parser refuses."""
    found = {name: f for name, f in flagged(*types).items() if getattr(args, name, None) is not None}
    return {name: convert(f, getattr(args, name)) for name, f in found.items()}


def words_of(args: argparse.Namespace, *types: type) -> list[str]:
    """The flags that were given, as words for another command."""
    words = []
    for name, f in flagged(*types).items():
        if not hasattr(args, name):
            continue
        how, value = f.metadata["flag"], getattr(args, name)
        if how.parse is bool:
            words.append(spelling(f))
        else:
            words += [f"{spelling(f)}={one}" for one in (value if how.repeat else [value])]
    return words


def convert(f: Field, value: Any) -> Any:
    """A value for the field from what the command line or a Python caller gave: text is parsed, lists become tuples.

    Raises InputError naming the flag.
    """
    how: Flag = f.metadata["flag"]
    if how.repeat:
        given = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
        return tuple(_one(f, how, item) for item in given)
    return _one(f, how, value)


def _one(f: Field, how: Flag, value: Any) -> Any:
    if value is None and f.default is None:
        return None
    parse: Any = how.parse
    is_switch = type(value).__name__ in ("bool", "bool_")  # numpy's, too
    try:
        if value is None or (parse is bool) != is_switch:
            raise ValueError
        found = parse(value)
        wrong = isinstance(value, float) and found != value if parse is int else parse is str and found != value
        if wrong and not isinstance(value, Path):
            raise ValueError
        value = found
    except InputError:
        raise
    except (AttributeError, TypeError, ValueError, OverflowError):
        kind = KINDS.get(parse) or how.metavar or parse.__name__.replace("parse_", "")
        raise InputError(f"{spelling(f)}: {str(value)[:80]!r}, expected {kind}") from None
    if how.choices and value not in how.choices:
        raise InputError(f"{spelling(f)}: {value!r}, expected one of {', '.join(how.choices)}")
    return value


def keywords(given: Mapping[str, Any], *types: type) -> dict[str, Any]:
    """Values by field name from the keywords of a Python caller. Raises InputError for one that no type has."""
    found = flagged(*types)
    names = {name: name for name in found} | {spelling(f)[2:].replace("-", "_"): name for name, f in found.items()}
    names |= {f.metadata["flag"].keyword: name for name, f in found.items() if f.metadata["flag"].keyword}
    if unknown := sorted(given.keys() - names.keys()):
        raise InputError(f"unknown keyword {unknown[0]!r}; known: {', '.join(sorted(found))}")
    values = {}
    for name, value in given.items():
        converted = convert(found[names[name]], value)
        negated = name.startswith("no_") and name not in found
        values[names[name]] = not converted if negated else converted
    return values
