"""The keywords of Python, for type checkers and editors: `python -m tests.keywords` writes the stub
`ltx2rt/keywords.pyi` from the flags. Types of values that a flag parses stay open."""

from __future__ import annotations

import inspect
from pathlib import Path

import ltx2rt
from ltx2rt.flags import field_names, flagged, reader
from ltx2rt.pipelines import pipelines
from ltx2rt.session.options import ModelOptions

STUB = Path(ltx2rt.__file__).with_name("keywords.pyi")
HEAD = '''\
"""Keywords of `open` and `Session.generate`, made from the flags by `python -m tests.keywords`."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, TypedDict
'''
PLAIN = {bool: "bool", int: "int", float: "float", str: "str"}


def kind(name: str, field, files: str) -> str:
    """The type of a keyword's value. files: of a file."""
    how = field.metadata["flag"]
    if name.startswith("no_") and name != field.name:
        return "bool"
    read = reader(field)
    found = files if read is Path else PLAIN.get(read, "Any")
    if found == "Any" or how.bare is not None:
        return "Any"
    several = f"{found} | Sequence[{found}]" if how.repeat else found
    return f"{several} | None" if field.default is None else several


def stub() -> str:
    """The text of the file."""
    text = HEAD
    generate = inspect.signature(ltx2rt.Session.generate).parameters
    tables = (
        ("ClipKeywords", [*pipelines().values()], {*generate}, "Any", ["size: Any"]),
        ("ModelKeywords", [ModelOptions], {"model", "backend"}, "str | PathLike[str]", []),
    )
    for title, types, named, files, more in tables:
        fields = flagged(*types)
        lines = [
            f"{name}: {kind(name, fields[field], files)}"
            for name, field in field_names(*types).items()
            if name not in named and name.isidentifier()
        ]
        rows = "\n".join(f"    {line}" for line in sorted({*lines, *more}))
        text += f"\nclass {title}(TypedDict, total=False):\n{rows}\n"
    return text


if __name__ == "__main__":
    STUB.write_text(stub())
