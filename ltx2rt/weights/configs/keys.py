"""A JSON object that knows where it came from, and tables that spell a dataclass's fields in each
layout. A missing or unsupported key is an InputError with the file, the key and the expected value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ltx2rt.errors import InputError

if TYPE_CHECKING:
    from ltx2rt.weights.files import TensorReader

MISSING = object()
MAX_SIZE = 2**20  # four times the largest released one, Gemma's vocabulary
# counts of layers, blocks, registers, bins: they bound loops and tables
MAX_COUNT = 256


class Keys:
    """Every access names the key it misses."""

    def __init__(self, data: Any, where: str):
        if not isinstance(data, Mapping):
            raise InputError(f"{where}: expected a JSON object, found {data!r:.40}")
        self.data, self.where = data, where

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def inner(self, key: str) -> Keys:
        return Keys(self.need(key), f"{self.where}.{key}")

    def need(self, key: str) -> Any:
        if key not in self.data:
            raise InputError(
                f"{self.where}: required key {key} is absent; pass a checkpoint with its full "
                "metadata"
            )
        return self.data[key]

    def wrong(self, key: str, value: Any, expected: str) -> InputError:
        return InputError(f"{self.where}: {key} = {value!r:.100}, expected {expected}")

    def get(self, key: str, default: Any) -> Any:
        """The value, null included; `default` if the key is absent, an error if that is MISSING."""
        return self.need(key) if default is MISSING else self.data.get(key, default)

    def number(
        self, key: str, kind: type = int, default: Any = MISSING, most: float = MAX_SIZE
    ) -> Any:
        """A number > 0 as `kind`; an int is integral and at most `most`."""
        value, most = self.get(key, default), most if kind is int else 2**53
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= most or kind(value) != value:  # as nan is
            raise self.wrong(key, value, f"a positive {kind.__name__} up to {most}")
        return kind(value)

    def count(self, key: str, default: Any = MISSING) -> int:
        """A number that becomes a loop or a table; it cannot be so large that either takes long."""
        return self.number(key, default=default, most=MAX_COUNT)

    def flag(self, key: str, default: Any = MISSING) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def sizes(
        self, key: str, length: int | None = None, default: Any = MISSING, most: float = MAX_SIZE
    ) -> tuple[int, ...]:
        value = self.get(key, default)
        fits = isinstance(value, list | tuple) and 0 < len(value) <= MAX_COUNT
        if not fits or length not in (None, len(value)):
            raise self.wrong(key, value, f"{length or 'some'} integers")
        return tuple(Keys({key: item}, self.where).number(key, most=most) for item in value)

    def rows(self, key: str, default: Any = MISSING) -> tuple[tuple[int, ...], ...]:
        value = self.get(key, default)
        if not isinstance(value, list | tuple) or len(value) > MAX_COUNT:
            raise self.wrong(key, value, "a list of lists of integers")
        return tuple(Keys({key: row}, self.where).sizes(key) for row in value)

    def choice(self, key: str, known: Mapping[Any, Any], default: Any = MISSING) -> Any:
        value = self.get(key, default)
        if isinstance(value, list | dict) or value not in known:
            named = ", ".join(map(repr, known))
            raise InputError(f"{self.where}: {key} = {value!r} is not supported, known: {named}")
        return known[value]

    def must(self, **expected: Any) -> None:
        """Keys that have to be there with this value."""
        for key, value in expected.items():
            if (found := self.need(key)) != value:
                raise InputError(
                    f"{self.where}: {key} = {found!r} is not supported, expected {value!r}"
                )

    def may(self, **expected: Any) -> None:
        """Check keys that mean this value when absent."""
        self.must(**{key: value for key, value in expected.items() if key in self.data})


@dataclass(frozen=True)
class ConfigSource:
    """A part of a checkpoint, as its config is read from it."""

    layout: str  # "official" or "diffusers"
    keys: Keys  # its section of the official config, or its folder's config.json
    source: TensorReader
    configs: Mapping[str, Any]  # those of the parts before it in the table, by name


def parse_json(text: str | bytes, where: str) -> Keys:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON ({error}); download the file again") from error
    return Keys(data, where)


@dataclass(frozen=True)
class Row:
    """A field: its kind, its key in either layout, its value if absent (MISSING: an error)."""

    field: str
    kind: str  # "int", "count", "float", "flag", "sizes", "counts", "rows"
    official: str = ""  # without keys the field is called the same in both layouts
    diffusers: str = ""
    default: Any = MISSING

    def key(self, layout: str) -> str:
        return getattr(self, layout) or self.official or self.field

    def read(self, keys: Keys, key: str) -> Any:
        if self.kind in ("int", "float"):
            return keys.number(key, {"int": int, "float": float}[self.kind], self.default)
        if self.kind == "counts":
            return keys.sizes(key, default=self.default, most=MAX_COUNT)
        return getattr(keys, self.kind)(key, default=self.default)


def read(rows: Iterable[Row], keys: Keys, layout: str, prefix: str = "") -> dict[str, Any]:
    """The fields of a dataclass from a config of the layout; prefix: of its keys."""
    return {row.field: row.read(keys, prefix + row.key(layout)) for row in rows}


def write(rows: Iterable[Row], config: Any, layout: str, prefix: str = "") -> dict[str, Any]:
    return {prefix + row.key(layout): _json(getattr(config, row.field)) for row in rows}


def _json(value: Any) -> Any:
    return [_json(item) for item in value] if isinstance(value, tuple) else value
