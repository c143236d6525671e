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
LONG_FILE = 500  # of a file
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


def files_of_tests() -> Iterator[tuple[str, str]]:
    """Name and text of every file of the tests."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_text()


def lines(files: Iterator[tuple[str, str]]) -> int:
    return sum(text.count("\n") for _, text in files)


def long_files() -> list[str]:
    found = [(name, text.count("\n")) for name, text in product()]
    return [f"{name} {count}" for name, count in found if count > LONG_FILE]


def flags() -> set[str]:
    """The fields that declare a flag, by name."""
    return {
        node.target.id
        for _, text in product()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Call)
        and re.fullmatch(r"flag.*|\w+_flag", getattr(node.value.func, "id", ""))
    }


def flag_lists() -> list[str]:
    """Lists, sets and dicts of three or more names of flags, most of whose texts are such names."""
    known, found = flags(), []
    for name, text in product():
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.Set):
                continue
            items = node.keys if isinstance(node, ast.Dict) else node.elts
            texts = [i.value for i in items if isinstance(i, ast.Constant)]
            words = [x for x in texts if isinstance(x, str) and (x in known or x[:2] == "--")]
            if len(words) >= 3 and len(words) >= 0.75 * len(texts):
                found.append(f"{name}:{node.lineno} {', '.join(words)}")
    return found


def cancelled() -> list[str]:
    """Fields of pipelines and groups of flags whose parent has the same field."""
    classes = {}
    for name, text in product():
        if name.startswith("ltx2rt/pipelines"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    classes[node.name] = node
    own = {
        name: {
            s.target.id
            for s in node.body
            if isinstance(s, ast.AnnAssign)
            and isinstance(s.target, ast.Name)
            and "ClassVar" not in ast.unparse(s.annotation)
        }
        for name, node in classes.items()
    }

    def above(name: str) -> set[str]:
        parents = [b.id for b in classes[name].bases if getattr(b, "id", "") in classes]
        return {field for parent in parents for field in own[parent] | above(parent)}

    return [f"{name}.{field}" for name in classes for field in own[name] & above(name)]


def depth() -> int:
    """Classes of the deepest pipeline, `Request` included."""
    from ltx2rt.pipelines import pipelines
    from ltx2rt.pipelines.request import Request

    return max(sum(issubclass(c, Request) for c in type_.__mro__) for type_ in pipelines().values())


def naming(pattern: str) -> list[str]:
    """The files that match."""
    return [name for name, text in product() if re.search(pattern, text, re.IGNORECASE)]


FIGURES = {
    "lists of three or more flags": flag_lists,
    "fields that cancel a parent's": cancelled,
    "flags": flags,
    f"files over {LONG_FILE} lines": long_files,
}


def main() -> None:
    for word, pattern in NAMED.items():
        files = naming(pattern)
        print(f"{len(files):>6} files name the {word}: {', '.join(files)}")
    long = long_functions()
    print(f"{len(long):>6} functions of more than {LONG} lines: {', '.join(long)}")
    print(
        f"{len(naming(RELEASES)):>6} files compare releases outside the rows of ltx2rt/release.py"
    )
    for what, several in FIGURES.items():
        print(f"{len(several()):>6} {what}: {'; '.join(sorted(several()))}")
    print(f"{depth():>6} classes of the deepest pipeline")
    print(f"{lines(product()):>6} lines of the product, {lines(files_of_tests())} of the tests")


if __name__ == "__main__":
    main()
