"""The errors a user or a file can cause. The command line prints them as one line and exits with
2."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

ONE = re.compile(
    r"'[^']*'|"  # quoted words are a user's
    r"(?<![\w./+-])(?<![+-] )1 (?:(byte|channel|clip|device|file|frame|head|image|job|layer|line|module|pixel"
    r"|place|prompt|sample|segment|step|tensor|token|video)s|(process)es)"
    r"( are| belong| differ| have| wait| were)?(?![\w/-]|\.\w)"
)
# what a terminal obeys or hides: control characters, changes of the direction of text
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
VERBS = {" are": " is", " have": " has", " were": " was", None: ""}


def singular(text: str) -> str:
    """Mend nouns and verbs after a 1: `1 frames are` becomes `1 frame is`."""

    def mended(found: re.Match[str]) -> str:
        noun = found[1] or found[2]
        return f"1 {noun}{VERBS.get(found[3], f'{found[3]}s')}" if noun else found[0]

    return ONE.sub(mended, text)


def printable(text: str) -> str:
    """The text with escapes in place of characters that a terminal obeys: files are strangers'."""
    return OBEYED.sub(lambda found: repr(found[0])[1:-1], text)


def few(names: Iterable[object], most: int = 8, between: str = ", ") -> str:
    """Return the first names for a sentence, and the number of the others; "none" for none."""
    every = [*map(str, names)]
    more = f" and {len(every) - most} more" * (most < len(every))
    return (between.join(every[:most]) or "none") + more


class InputError(ValueError):
    """Bad input: says what was found, what was expected, and what to do."""

    def __init__(self, text: str):
        super().__init__(singular(text))


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
