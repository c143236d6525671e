"""A tiny random model, a cache of three clips, and commands on them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train_runs import options, run_train, write_clips

Command = Callable[..., Any]


@pytest.fixture(scope="session")
def model(tiny) -> Path:
    return tiny("tiny-2.3", "official")


@pytest.fixture(scope="session")
def prepare(model) -> Command:
    """prepare(clips, cache, *words): fill a cache, with clips of 64x64 and 9 frames."""

    def filled(clips: Path, cache: Path, *words: object) -> None:
        size = () if "--buckets" in words else ("--buckets", "64x64x9")
        assert run_train(model, "prepare", clips, "--output", cache, *size, *words) == 0

    return filled


@pytest.fixture(scope="session")
def cache(prepare, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    prepare(write_clips(folder / "clips"), folder / "cache")
    return folder / "cache"


@pytest.fixture(scope="session")
def train(model, cache) -> Command:
    """train(output, *words, **flags): a run to its end, on `cache` or other data."""

    def trained(output: Path, *words: object, data: Path = cache, **flags: object) -> None:
        assert run_train(model, "run", *options(data, output, **flags), *words) == 0

    return trained


@pytest.fixture
def refused(model, capsys) -> Command:
    """refused(*words) -> the last line of a command that is refused."""

    def line(*words: object, model: Path = model) -> str:
        capsys.readouterr()
        try:
            status = run_train(model, *words)
        except SystemExit as end:
            status = end.code
        assert status == 2
        return capsys.readouterr().err.splitlines()[-1]

    return line


@pytest.fixture
def no_run(refused, cache) -> Command:
    """no_run(output, *words, **flags) -> the line in which such a run is refused."""

    def line(output: Path, *words: object, data: Path = cache, **flags: object) -> str:
        return refused("run", *options(data, output, **flags), *words)

    return line
