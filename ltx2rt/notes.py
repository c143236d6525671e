"""Notes beside results: one line each on stderr.

The level of the logger `ltx2rt` decides whether: above WARNING, as `--quiet` sets it, there are
none.
"""

from __future__ import annotations

import logging
import sys

from ltx2rt.errors import printable, singular

LOGGER = logging.getLogger("ltx2rt")


def note(text: str, prefix: str = "ltx2rt: ") -> None:
    if LOGGER.isEnabledFor(logging.WARNING):
        print(f"{prefix}{printable(singular(text))}", file=sys.stderr, flush=True)
