"""A tiny random model, and a cache of three clips."""

from pathlib import Path

import pytest

from ltx2rt.instruments.make import make_checkpoint
from tests.train_runs import run_train, write_clips


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint("tiny-2.3", "official", folder)
    return folder


@pytest.fixture(scope="module")
def cache(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    clips = write_clips(folder / "clips")
    assert (
        run_train(
            model, "prepare", "--data", clips, "--output", folder / "cache", "--buckets", "64x64x9"
        )
        == 0
    )
    return folder / "cache"
