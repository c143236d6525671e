"""The form of a row: what a user has, what they type, and what they must see.

Rows lie in `ROWS` of a module for each kind of material (`clips.py`, ...); add yours there, or add a
module and name it in `MODULES` of `test_rows.py`. Keep a row to a few seconds. A row that needs
`real` packages is not in `make test`; `make test-real` installs what `PACKAGES` names and runs all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# what `make test-real` installs: PYTHON, and npm's node_modules
REAL = REPOSITORY / ".venv" / "real"
TINY = REPOSITORY / "examples" / "tiny-trained"


def nothing(folder: Path) -> None:
    """Neither makes nor checks anything."""


@dataclass(frozen=True)
class Row:
    """name: the situation. command: words after `ltx2rt`, run in an empty folder; `TINY` stands for
    the trained model with its flags, `REAL` for the folder of real material. make: writes the
    inputs there. says: regular expressions that stderr matches, `silent` those that it does not.
    check: asserts about the folder afterwards. status: of the command. real: whether it needs what
    `make test-real` installs."""

    name: str
    command: str
    make: Callable[[Path], object] = nothing
    says: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    check: Callable[[Path], object] = nothing
    status: int = 0
    real: bool = False

    @property
    def argv(self) -> list[str]:
        """The words, with the names replaced."""
        model = f"--backend cuda --device cpu --model {TINY}"
        return self.command.replace("TINY", model).replace("REAL", str(REAL)).split()
