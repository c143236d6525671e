"""The pipelines by name: every module of this package that has a `PIPELINE`, a class derived from
`Request`.

A pipeline is added by its file alone.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.flags import keywords
from ltx2rt.pipelines.request import Request
from ltx2rt.suggest import hint

FIRST = "two-stage"  # the default


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
    if name not in known:
        expected = f"expected one of {', '.join(known)}{hint(str(name), known)}"
        raise InputError(f"--pipeline: {str(name)[:80]!r}, {expected}")
    return known[name]


def make_request(name: str, **given: Any) -> Request:
    """The request of a pipeline from the keywords of a Python caller. Raises InputError."""
    type_ = pipeline(name)
    request = type_(**keywords(given, type_))
    request.check()
    return request
