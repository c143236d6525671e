"""Versions, which ranks compare before they work together."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from ltx2rt.version import VERSION


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of ltx2rt and of the installed packages among `packages`."""
    found = {"ltx2rt": VERSION}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
