"""Choose the tests of `make test`, so that it takes minutes: of tests that run the same lines of the
product, the cheaper ones. The others are in long_tests.txt, and `make test-long` runs them too.

    pip install coverage
    export COVERAGE_PROCESS_START=tests/choose.toml
    python -m pytest -p tests.choose -n 2 --dist loadfile -m 'not slow and not real'
    python -m tests.choose SECONDS    # processor time, both cores together, of the tests that stay

An hour and a half of two cores. Do it again when `make test` takes longer than eight minutes.
"""

from __future__ import annotations

import json
import os
import resource
import sqlite3
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / ".venv" / "chosen"
LONG = Path(__file__).with_name("long_tests.txt")
ALWAYS_S = 0.3  # tests that take less stay in any case
UNSEEN_S = 6  # and those of no known line, as their processes are killed, that take less than this
ALWAYS = (  # lines do not tell: numbers of networks and of a clip, graphs, sizes, the page's scripts
    "tests/models/", "tests/stages/test_denoise.py", "tests/test_unchanged.py", "tests/test_counts.py",
    "tests/pipelines/test_agree.py::test_guided_pipelines_on_distilled_weights_agree", "tests/serve/test_page.py",
    "tests/commands/test_natural.py", "tests/test_docs.py::test_block_runs_as_it_stands[README",
)  # fmt: skip


def processor_s() -> float:
    """Seconds of this process and of its children that have ended."""
    own, children = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Record a test's processor time, and its lines under its name, of processes it starts too."""
    import coverage

    FOLDER.mkdir(exist_ok=True)
    os.environ["TEST"] = item.nodeid
    if current := coverage.Coverage.current():
        current.switch_context(item.nodeid)
    before = processor_s()
    yield
    with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps([item.nodeid, round(processor_s() - before, 2)]) + "\n")
    return True


def lines_of_tests() -> dict[str, set[tuple[str, int]]]:
    """Lines of the product by test."""
    from coverage.numbits import numbits_to_nums

    found = defaultdict(set)
    for path in FOLDER.glob("lines.*"):
        with sqlite3.connect(path) as data:
            rows = data.execute(
                "select path, context, numbits from line_bits join file on file.id = file_id "
                "join context on context.id = context_id"
            )
            for file, context, numbits in rows:
                test = context.rpartition("|")[2]
                found[test] |= {(file, line) for line in numbits_to_nums(numbits)}
    return found


def chosen(seconds: dict[str, float], lines: dict[str, set], most_s: float) -> set[str]:
    """Tests of at most so many seconds in all: first the cheap ones, then again and again the one
    that runs the most lines more for each second."""
    quick = {
        test
        for test, s in seconds.items()
        if s < (ALWAYS_S if lines.get(test) else UNSEEN_S) or test.startswith(ALWAYS)
    }
    left_s = most_s - sum(seconds[test] for test in quick)
    seen = set().union(*(lines.get(test, set()) for test in quick))
    more = {test: lines.get(test, set()) - seen for test in seconds.keys() - quick}
    while more := {test: new for test, new in more.items() if seconds[test] <= left_s}:
        best = max(more, key=lambda test: (len(more[test]) / seconds[test], -seconds[test], test))
        quick.add(best)
        left_s -= seconds[best]
        new = more.pop(best)
        for test in more if new else ():
            more[test] -= new
    return quick


def main() -> None:
    seconds: Counter[str] = Counter()
    for path in FOLDER.glob("*.jsonl"):
        for test, s in map(json.loads, path.read_text().splitlines()):
            seconds[test] += s
    lines = lines_of_tests()
    quick = chosen(seconds, lines, float(sys.argv[1]))
    every, kept = (set().union(*(lines.get(t, ()) for t in tests)) for tests in (seconds, quick))
    LONG.write_text("".join(f"{test}\n" for test in sorted(seconds.keys() - quick)))
    spent_s = sum(seconds[test] for test in quick)
    print(f"{len(quick)} of {len(seconds)} tests, {spent_s:.0f} of {seconds.total():.0f} s;")
    print(f"{len(kept)} of {len(every)} lines of the product that tests run")


if __name__ == "__main__":
    main()
