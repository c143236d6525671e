"""A group: the flags of one feature, what refuses them, and what they add to a run.

A group is a frozen dataclass. Its fields are flags, and facts that resolving has found. A request
has the fields of all its groups; methods get the whole request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.models.geometry import Geometry
from ltx2rt.session.options import ModelOptions


@dataclass(frozen=True)
class Group:
    def check(self, request: Any) -> None:
        """Refuse values that no model could satisfy. Reads no file. Raises InputError."""

    def measured(self, request: Any) -> dict[str, Any]:
        """Fields that decide the length, by a file that is there. Raises InputError."""
        return {}

    def check_options(self, request: Any, options: ModelOptions) -> None:
        """Refuse model flags that do not go with these. Raises InputError."""

    def restated(self, request: Any, model: ModelConfig) -> dict[str, Any]:
        """Fields to change before any group is resolved, which read them. Raises InputError."""
        return {}

    def resolved(self, request: Any, model: ModelConfig) -> dict[str, Any]:
        """Fields to change: defaults that the model decides. Raises InputError."""
        return {}

    def remarks(self, request: Any, model: ModelConfig) -> Iterator[str]:
        """Sentences for the user before a resolved request runs."""
        return iter(())

    def added(self, request: Any, name: str, geometry: Geometry) -> dict[str, Any]:
        """Return fields for the denoising stage `name`. Conditionings under `given` follow those of
        earlier groups."""
        return {}

    def negates(self, request: Any) -> bool:
        """Whether the run reads the negative prompt."""
        return False


def refuse_beside(**given: Any) -> None:
    """Refuse two flags that exclude each other. Raises InputError naming both."""
    names = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if len(names) > 1:
        raise InputError(f"{names[1]}: given beside {names[0]}; leave one of the two out")
