"""A flag is written once: on the dataclass field that holds its value.

`flag` declares a field's default, help, group, parser and bounds. From the fields come the flags
of the command line (`add_flags`), the values that it read (`given_flags`) and the keywords of the
Python interface (`keywords`). Each command chooses the dataclasses that it reads.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from fractions import Fraction
from functools import cache, partial
from inspect import get_annotations
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.suggest import hint, nearest

GROUPS = (  # titles in `--help`, in this order
    "pipeline", "network", "model", "clip", "conditioning", "guidance", "sampling", "training",
    "devices and memory", "server", "jobs", "output", "log",
)  # fmt: skip
# titles of the short help
COMMON = ("model and pipeline", "prompt and inputs", "clip and output", "hardware")
MODEL, INPUTS, CLIP, HARDWARE = COMMON

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse_seconds(given: Any) -> float:
    """Seconds from a number, or from text such as 1.5s, 1m30s, 1:30 or 0:01:30.5. Raises
    ValueError."""
    text, number = str(given).strip(), r"(\d+(?:\.\d*)?|\.\d+)"
    if text and (units := re.fullmatch("".join(f"(?:{number}{unit} ?)?" for unit in UNITS), text)):
        found = zip(units.groups(), UNITS.values(), strict=True)
        return sum(float(amount or 0) * seconds for amount, seconds in found)
    if clock := re.fullmatch(r"(?:(\d+):)?(\d+):([0-5]?\d(?:\.\d*)?)", text):
        hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        return hours * 3600 + minutes * 60 + seconds
    return float(given)


# parsers: name of a value in `--help`, and what an error expects
KINDS: dict[Callable, tuple[str, str]] = {
    bool: ("", "True or False"),
    int: ("N", "a whole number"),
    float: ("X", "a number"),
    parse_seconds: ("S", "seconds, such as 90, 1.5s, 1m30s or 1:30"),
    Path: ("FILE", "a path"),
    str: ("TEXT", "text"),
}


@dataclass(frozen=True)
class Flag:
    """How a field is spelled and read.

    parse: text to value, None for the field's type, where bool is a switch.
    repeat: the field is a tuple of such values.
    group: its title in `--help`. metavar: several names if the flag takes that many values.
    split: text of a repeated one is cut at commas, too.
    least, most, above: bounds that hold for every model; `above` itself is out of them.
    name: the flag, if it is not the field's name with dashes; a switch of a field that is True by
    default starts with `--no-`. also: other spellings of it; of such a switch, its opposite.
    expects: the values in an error, where the parser does not tell.
    bare: the text that the flag stands for if no value follows it; in Python, True.
    file: kind of the files that the value names: image, sound, video, mask, tensors, latents, context,
        folder.
    kept: the clip keeps parts of the file.
    json: type of the value in JSON, where the parser does not tell.
    asks: the pipeline that a request with this flag is for, if it names none.
    typed: whether the command line has it; requests in Python and JSON always do.
    common: its title in the short help, which shows no flag that has none.
    marks: words by which a part of the program finds the flags that it reads, see `marked`; of a
    repeated one whose last use counts, last.
    """

    help: str
    parse: Callable[[str], Any] | None = None
    group: str | None = None
    metavar: str | tuple[str, ...] | None = None
    choices: tuple[str, ...] | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    repeat: bool = False
    split: bool = False
    name: str | None = None
    also: tuple[str, ...] = ()
    expects: str = ""
    bare: str | None = None
    file: str | None = None
    kept: bool = False
    json: str | list[str] | None = None
    asks: str | None = None
    typed: bool = True
    common: str | None = None
    marks: str = ""

    def admits(self, number: float | Fraction) -> bool:
        """Whether the number is finite and within the bounds."""
        return (
            abs(number) < math.inf
            and (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
            and (self.above is None or number > self.above)
        )

    @property
    def bounds(self) -> str:
        """The numbers that it admits, in words."""
        if self.least is not None and self.most is not None:
            return f"{_shown(self.least)} to {_shown(self.most)}"
        if self.least == 0:
            return "0 or more"
        bounds = {"at least": self.least, "more than": self.above, "at most": self.most}
        words = [f"{word} {_shown(n)}" for word, n in bounds.items() if n is not None]
        return " and ".join(words) or "a finite number"


def flag(default: Any, help: str, parse: Callable[[str], Any] | None = None, **how: Any) -> Any:
    """A dataclass field with a flag. default: MISSING for a required flag. parse: None for the type
    that the field is annotated with. how: the other fields of `Flag`."""
    metadata = {"flag": Flag(help, parse, **how)}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


setting = partial(flag, typed=False)  # read from configuration files, Python and JSON


def flags_of(group: str) -> Callable[..., Any]:
    """`flag` for a module most of whose flags stand under one title."""
    return partial(flag, group=group)


def reader(f: Field) -> Callable[[Any], Any]:
    """The reader of the flag's text: its parser, else the field's type, or the type of its items.
    Raises TypeError for a type that needs a parser."""
    if own := f.metadata["flag"].parse:
        return own
    name = str(f.type).removeprefix("<class '").removesuffix("'>").removesuffix(" | None")
    if name.startswith("tuple[") and f.metadata["flag"].repeat:
        name = name[6:].removesuffix(", ...]")
    found = next((kind for kind in KINDS if kind.__name__ == name.rpartition(".")[2]), None)
    if found is None:
        raise TypeError(f"{f.name}: {f.type} needs a parser in its flag")
    return found


def flag_like(type_: type, name: str, default: Any = ..., **how: Any) -> Any:
    """A field with the flag of another type's field, but for what is given here."""
    f = flagged(type_)[name]
    metadata = {"flag": replace(f.metadata["flag"], **how)}
    return field(default=f.default if default is ... else default, metadata=metadata)


def flagged(*types: type) -> dict[str, Field]:
    """The fields that have flags, by name; the first type that has a name gives its field."""
    found: dict[str, Field] = {}
    for type_ in types:
        found |= {name: f for name, f in _flagged(type_).items() if name not in found}
    return found


@cache
def _flagged(type_: type) -> dict[str, Field]:
    found = {f.name: f for f in fields(type_) if "flag" in f.metadata}
    for f in found.values():
        reader(f)
    return found


def marked(word: str, *types: type) -> dict[str, Field]:
    """The fields of the types whose flags have the mark, by name."""
    found = flagged(*types)
    return {name: f for name, f in found.items() if word in f.metadata["flag"].marks.split()}


def assemble(type_: type, groups: Iterable[Any], help: Mapping[str, str]) -> None:
    """Make a frozen dataclass of a type: first the fields of its groups, then its own, which
    replace those of the same name. groups: dataclass instances, whose values are the defaults.
    help: text of flags that mean something particular in this type, by field."""
    own, type_.__annotations__ = get_annotations(type_), {}
    for f, default in [(f, getattr(group, f.name)) for group in groups for f in fields(group)]:
        if f.name in own:
            continue
        metadata = dict(f.metadata)
        if f.name in help:
            metadata["flag"] = replace(metadata["flag"], help=help[f.name])
        type_.__annotations__[f.name] = f.type
        own_field = field(default=default, metadata=metadata, repr=f.repr, compare=f.compare)
        setattr(type_, f.name, own_field)
    type_.__annotations__ |= own
    dataclass(frozen=True)(type_)


def named_files(given: Any) -> Iterator[tuple[Field, Path]]:
    """The files and folders that a dataclass's flags name, each with the field of its flag."""
    for name, f in flagged(type(given)).items():
        value = getattr(given, name) if f.metadata["flag"].file else ()
        for one in value if isinstance(value, tuple) else [value]:
            path = getattr(one, "path", one)
            if isinstance(path, Path) and not getattr(one, "latent", None):
                yield f, path


def spelling(f: Field) -> str:
    return f.metadata["flag"].name or f"--{f.name.replace('_', '-')}"


def add_flags(
    parser: Any,
    *types: type,
    only: Iterable[str] | None = None,
    but: Iterable[str] = (),
    **defaults: Any,
) -> None:
    """Add the flags of the types' fields: all, `only` some, or all but some. `defaults` replace the
    fields' own in the help. A flag that is not given leaves nothing in the namespace."""
    found, titled, left_out = flagged(*types), groups(parser), set(but)
    for name in found if only is None else only:
        f = found[name]
        if name in left_out or not f.metadata["flag"].typed:
            continue
        default = defaults.get(name, f.default)
        required = default is MISSING and f.default_factory is MISSING
        to = titled.get(f.metadata["flag"].group, parser)
        add_flag(to, f, default=default, required=required)


def add_flag(to: Any, f: Field, *, default: Any = None, required: bool = False, **how: Any) -> None:
    """Add the flag of one field to a parser or a group. how: more for `add_argument`."""
    own: Flag = f.metadata["flag"]
    words: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "required": required}
    words["help"] = _help(own, default, required)
    if reader(f) is bool:
        words["action"] = "store_false" if default is True else "store_true"
    else:
        words["metavar"] = _metavar(f)
    if isinstance(own.metavar, tuple):
        words["nargs"] = len(own.metavar)
    elif own.repeat:
        words |= {"nargs": "+", "action": "store" if "last" in own.marks.split() else "extend"}
    elif own.bare is not None:
        words |= {"nargs": "?", "const": own.bare}
    also = own.also
    if words.get("action") == "store_false" and also:  # what the field is without the flag
        to.add_argument(*also, **words | {"action": "store_true", "help": argparse.SUPPRESS})
        also = ()
    added = to.add_argument(spelling(f), *also, **words | how)
    added.common = own.common


def groups(parser: Any) -> dict[str | None, Any]:
    """The parser's argument groups by title, with those of GROUPS; empty ones are not shown."""
    titles = {group.title for group in parser._action_groups}
    for title in GROUPS:
        if title not in titles:
            parser.add_argument_group(title)
    return {group.title: group for group in parser._action_groups}


def shorten(parser: Any, titles: Mapping[str, str | None]) -> None:
    """Leave flags with a title in the parser's help. titles: of COMMON, by field."""
    found: dict[str, Any] = {title: parser.add_argument_group(title) for title in COMMON}
    for action in parser._actions:
        if title := titles.get(action.dest):
            found[title]._group_actions.append(action)
        elif action.dest not in ("help", "help_all"):
            action.help = argparse.SUPPRESS
    options = parser._optionals
    options._group_actions[:] = [a for a in options._group_actions if a.dest not in titles]
    parser._action_groups = [*found.values(), options]


MANY = 30  # flags of a command; with more its help shows some of them
# titles that stay in a short help, but for rare flags
OWN = ("pipeline", "server", "jobs", "training", "output")


def keep_common(parser: Any) -> None:
    """Leave in a command's help the flags that are required, common, or its own."""
    choices = [a for g in parser._mutually_exclusive_groups if g.required for a in g._group_actions]
    for group in parser._action_groups:
        titles = {action: getattr(action, "common", None) for action in group._group_actions}
        whole = group.title in OWN and group.title not in titles.values()
        for action, common in titles.items():
            kept = whole or common or action.required or action in choices
            if not kept and action.dest not in ("help", "help_all") and action.option_strings:
                action.help = argparse.SUPPRESS


def _metavar(f: Field) -> str | tuple[str, ...]:
    how: Flag = f.metadata["flag"]
    kind, _ = KINDS.get(reader(f), ("VALUE", ""))
    return how.metavar or "|".join(how.choices or ()) or kind


def _help(how: Flag, default: Any, required: bool) -> str:
    text = how.help
    has_text = isinstance(default, (int, float, str, Fraction)) and not isinstance(default, bool)
    if text == argparse.SUPPRESS:
        return text
    if required:
        text += " (required)"
    elif has_text and default != "" and "default" not in text:
        text += f" (default: {_shown(default)})"
    return text.replace("%", "%%")


def _shown(value: Any) -> str:
    return f"{float(value):g}" if isinstance(value, (float, Fraction)) else str(value)


def given_flags(args: argparse.Namespace, *types: type) -> dict[str, Any]:
    """Values of the given flags by field name. Raises InputError for a value that is refused."""
    given = {name: (f, getattr(args, name, None)) for name, f in flagged(*types).items()}
    return {name: convert(f, value) for name, (f, value) in given.items() if value is not None}


def words_of(args: argparse.Namespace, *types: type) -> list[str]:
    """The given flags as words for another command."""
    words = []
    for name, f in flagged(*types).items():
        if not hasattr(args, name):
            continue
        how, value = f.metadata["flag"], getattr(args, name)
        if reader(f) is bool:
            words += [spelling(f)] if value is not f.default else []
        elif isinstance(how.metavar, tuple):
            words += [spelling(f), *map(str, value)]
        else:
            words += [f"{spelling(f)}={one}" for one in (value if how.repeat else [value])]
    return words


def convert(f: Field, value: Any) -> Any:
    """The field's value from text of the command line or an object of a Python caller. Text is
    parsed, lists become tuples, choices and bounds are checked. Raises InputError naming the
    flag."""
    if not f.metadata["flag"].repeat:
        return _one(f, value)
    several = isinstance(value, Iterable) and not isinstance(value, str)
    items = list(value) if several else [value]
    if f.metadata["flag"].split:
        items = [part for x in items for part in (x.split(",") if isinstance(x, str) else [x])]
    return tuple(_one(f, item) for item in items)


def _one(f: Field, value: Any) -> Any:
    how: Flag = f.metadata["flag"]
    if value is None and f.default is None:
        return None
    parse: Any = reader(f)
    value = how.bare if value is True and how.bare is not None else value
    value = os.path.expanduser(value) if isinstance(value, str) and parse is not str else value
    is_switch = type(value).__name__ in ("bool", "bool_")  # numpy's, too
    try:
        if value is None or (parse is bool) != is_switch:
            raise ValueError
        found = parse(value)
        if parse is int:
            wrong = isinstance(value, float) and found != value
        else:
            wrong = parse is str and found != value and not isinstance(value, Path)
        if wrong:
            raise ValueError
    except InputError:
        raise
    except (AttributeError, TypeError, ValueError, OverflowError):
        _, kind = KINDS.get(parse, ("", how.metavar or parse.__name__.replace("parse_", "")))
        name = spelling(f) if how.typed else f.name
        text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        raise InputError(f"{name}: {text[:80]!r}, expected {how.expects or kind}") from None
    if how.choices and found not in how.choices:
        raise InputError(
            f"{spelling(f)}: {str(found)[:80]!r}, expected one of "
            f"{', '.join(how.choices)}{hint(str(found), how.choices)}"
        )
    _check_bounds(f, found)
    return found


def check_bounds(given: Any) -> None:
    """Refuse the numbers of a dataclass that are out of their fields' bounds. Raises InputError."""
    for name, f in flagged(type(given)).items():
        value = getattr(given, name)
        for one in value if isinstance(value, tuple) else [value]:
            _check_bounds(f, one)


def _check_bounds(f: Field, value: Any) -> None:
    how: Flag = f.metadata["flag"]
    if isinstance(value, (int, float, Fraction)) and not how.admits(value):
        expected = how.bounds if abs(value) < math.inf else "a finite number"
        raise InputError(f"{spelling(f)}: {_shown(value)[:20]}, expected {expected}")


def field_names(*types: type) -> dict[str, str]:
    """The fields by each of their names: a field's, and its flag's ones with underscores."""
    found = flagged(*types)
    spelled = {
        one[2:].replace("-", "_"): name
        for name, f in found.items()
        for one in (spelling(f), *f.metadata["flag"].also)
    }
    return spelled | {name: name for name in found}


def typed(words: Iterable[str], *types: type) -> set[str]:
    """The fields of which the words of a command line have flags."""
    flags_, found = {word.partition("=")[0] for word in words}, flagged(*types)
    return {
        name
        for name, f in found.items()
        if not flags_.isdisjoint((spelling(f), *f.metadata["flag"].also))
    }


def keywords(given: Mapping[str, Any], *types: type) -> dict[str, Any]:
    """Values by field name from a Python caller's keywords. Raises InputError."""
    found, names = flagged(*types), field_names(*types)
    if unknown := sorted(given.keys() - names.keys()):
        near = nearest(unknown[0], names)
        known = f"did you mean {near}?" if near else f"known: {', '.join(sorted(found))}"
        raise InputError(f"unknown keyword {unknown[0][:80]!r}; {known}")
    values = {}
    for name, value in given.items():
        converted = convert(found[names[name]], value)
        if names[name] in values:
            raise InputError(f"keyword {name!r}: {names[name]!r} is given as well; leave one out")
        negated = name.startswith("no_") and name not in found
        values[names[name]] = not converted if negated else converted
    return values
