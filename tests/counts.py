"""How far one fact is spread over the product, and how long it is: `python -m tests.counts`.

A part or an encoding that few files name can be added, or removed, by few changes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("ltx2rt", "backends", "kernels")
NAMED = {
    "duration head": r"duration[_ -]?head",
    "diffusion decoder": r"diffusion[_ -]?decoder",
    "temporal upsampler": r"temporal[_ -]?upsampler",
    "float8": r"float8",
}
LONG = 60  # lines of a function
RELEASES = r"generation ==|\bV25\b"


def product() -> Iterator[tuple[str, str]]:
    """Name and text of every file."""
    for folder in PRODUCT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def long_functions() -> list[str]:
    """File, line, name and length."""
    found = []
    for name, text in product():
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.FunctionDef)
                and (lines := (node.end_lineno or 0) - node.lineno + 1) > LONG
            ):
                found.append(f"{name}:{node.lineno} {node.name} {lines}")
    return found


def naming(pattern: str) -> list[str]:
    """The files that match."""
    return [name for name, text in product() if re.search(pattern, text, re.IGNORECASE)]


def main() -> None:
    for word, pattern in NAMED.items():
        files = naming(pattern)
        print(f"{len(files):>6} files name the {word}: {', '.join(files)}")
    long = long_functions()
    print(f"{len(long):>6} functions of more than {LONG} lines: {', '.join(long)}")
    print(
        f"{len(naming(RELEASES)):>6} files compare releases outside the rows of ltx2rt/release.py"
    )
    print(f"{sum(text.count(chr(10)) for _, text in product()):>6} lines")


if __name__ == "__main__":
    main()
