"""How far one fact is spread over the product, and how long it is: `python -m tests.counts`.

A part or an encoding that few files name can be added, or removed, by few changes.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
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
COMPLEX = 30  # independent ways through a function (cyclomatic complexity)
PACKED = 3  # arguments that a call unpacks from a tuple of the same function
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert)
LAYOUT = {tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
RELEASES = r"generation ==|\bV25\b"


@cache
def product() -> list[tuple[str, str]]:
    """Name and text of every file."""
    paths = (path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py")))
    return [(str(path.relative_to(ROOT)), path.read_text()) for path in paths]


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Every node of the product's trees, with its file."""
    return [(name, node) for name, text in product() for node in ast.walk(ast.parse(text))]


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """File and line of every function of the product, and its tree."""
    for name, node in nodes():
        if isinstance(node, FUNCTIONS):
            yield f"{name}:{node.lineno}", node


def long_functions() -> list[str]:
    """File, line, name and length."""
    lengths = ((where, f, (f.end_lineno or 0) - f.lineno + 1) for where, f in functions())
    return [f"{where} {f.name} {lines}" for where, f, lines in lengths if lines > LONG]


def complexity(function: ast.AST) -> int:
    """Number of independent ways through a function, those of inner functions included."""
    count = 1
    for node in ast.walk(function):
        count += isinstance(node, BRANCHES)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        count += 1 + len(node.ifs) if isinstance(node, ast.comprehension) else 0
    return count


def complex_functions() -> list[str]:
    """File, line, name and complexity."""
    counted = ((where, f, complexity(f)) for where, f in functions())
    return [f"{where} {f.name} {count}" for where, f, count in counted if count > COMPLEX]


def packed_calls() -> list[str]:
    """Calls that unpack a tuple of `PACKED` values or more which the same function has put
    together: the names of the arguments are lost on the way."""
    found = []
    for where, function in functions():
        tuples = {}
        for node in ast.walk(function):
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs += zip(target.elts, node.value.elts, strict=False)
                tuples |= {
                    name.id: len(value.elts)
                    for name, value in pairs
                    if isinstance(name, ast.Name) and isinstance(value, ast.Tuple)
                }
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            names = [
                a.value.id
                for a in call.args
                if isinstance(a, ast.Starred) and isinstance(a.value, ast.Name)
            ]
            if many := [name for name in names if tuples.get(name, 0) >= PACKED]:
                found.append(f"{where.partition(':')[0]}:{call.lineno} *{many[0]}")
    return found


def statements() -> int:
    """Number of statements of the product."""
    return sum(isinstance(node, ast.stmt) for _, node in nodes())


def tokens() -> int:
    """Number of tokens of the product, without layout and comments."""
    lines = (io.StringIO(text).readline for _, text in product())
    found = (token.type for line in lines for token in tokenize.generate_tokens(line))
    return sum(kind not in LAYOUT for kind in found)


def flags() -> set[str]:
    """The fields that declare a flag, by name."""
    return {
        node.target.id
        for _, node in nodes()
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Call)
        and re.fullmatch(r"flag.*|\w+_flag", getattr(node.value.func, "id", ""))
    }


def flag_lists() -> list[str]:
    """Lists, sets and dicts of three or more names of flags, most of whose texts are such names."""
    known, found = flags(), []
    for name, node in nodes():
        if not isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.Set):
            continue
        items = node.keys if isinstance(node, ast.Dict) else node.elts
        texts = [i.value for i in items if isinstance(i, ast.Constant)]
        named = [x.removeprefix("--").replace("-", "_") for x in texts if isinstance(x, str)]
        words = [x for x in named if x in known]
        if len(words) >= 3 and len(words) >= 0.75 * len(texts):
            found.append(f"{name}:{node.lineno} {', '.join(words)}")
    return found


def cancelled() -> list[str]:
    """Fields of pipelines and groups of flags whose parent has the same field."""
    classes = {
        node.name: node
        for name, node in nodes()
        if name.startswith("ltx2rt/pipelines") and isinstance(node, ast.ClassDef)
    }
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
    f"functions over {LONG} lines": long_functions,
    f"functions over a complexity of {COMPLEX}": complex_functions,
    "calls that unpack a local tuple": packed_calls,
}


def main() -> None:
    for word, pattern in NAMED.items():
        files = naming(pattern)
        print(f"{len(files):>6} files name the {word}: {', '.join(files)}")
    print(
        f"{len(naming(RELEASES)):>6} files compare releases outside the rows of ltx2rt/release.py"
    )
    for what, several in FIGURES.items():
        print(f"{len(several()):>6} {what}: {'; '.join(sorted(several()))}")
    print(f"{depth():>6} classes of the deepest pipeline")
    print(f"{statements():>6} statements and {tokens()} tokens of the product")


if __name__ == "__main__":
    main()
