"""The errors a user or a file can cause. The command line prints them as one line and exits with
2."""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Bad input: says what was found, what was expected, and what to do."""


@contextmanager
def concerning(what: str) -> Iterator[None]:
    """Begin the InputErrors of a block with the flag or file that they concern."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{what}: {error}") from None


class GraphError(TypeError):
    """A model text or a pass built an illegal graph: names the op, its axes and what they should
    be."""


class Cancelled(Exception):
    """A run was cancelled by its caller; the session is as usable as before it."""
