"""Scheduling that changes no number, and the environment variable by which a user leaves it out.

The environment variable LTX2RT_WITHOUT holds names of SWITCHES, separated by commas. An environment
reaches every rank, worker and benchmark alike, and what is left out decides graphs before a session
exists.
"""

from __future__ import annotations

import os

from ltx2rt.errors import InputError
from ltx2rt.suggest import hint

VARIABLE = "LTX2RT_WITHOUT"
SWITCHES = {
    "rotate": "the last sum of a block is made at the beginning of the next one",
    "halves": "halves of the tokens or samples go through a block in turns, exchanges travel meanwhile",
    "heads": "attention goes in groups of heads, of which one travels while another attends (TPUs)",
    "sums": "AdaLN's sums of all layers are made in two launches",
    "unpack": "a kernel decodes weights that are kept as they are stored",
    "neighbourhood": "a kernel computes attention to windows of 8 to 16 rows and columns (TPUs)",
}


def left_out() -> frozenset[str]:
    """Raises InputError for a name that no switch has."""
    names = frozenset(filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(","))))
    for name in sorted(names - SWITCHES.keys()):
        raise InputError(
            f"{VARIABLE}: no scheduling is called {name!r}; known: "
            f"{', '.join(SWITCHES)}{hint(name, SWITCHES)}"
        )
    return names


def in_use(name: str) -> bool:
    assert name in SWITCHES
    return name not in left_out()
