"""A small `generate`, as words for ranks to run."""

import pytest

FLAGS = ["--backend", "cuda", "--device", "cpu", "--prompt", "x", "--width", "64", "--height", "64"]
FLAGS += "--fps 48 --image-crf 0 --steps 2 --num-frames 17".split()


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("tiny-2.3", "official")


@pytest.fixture
def flags(model, tmp_path):
    """flags(*more) -> words of a small `generate` that writes clip.mp4."""
    fixed = ["generate", *FLAGS, "--model", model, "--output", tmp_path / "clip.mp4"]
    return lambda *more: [str(word) for word in (*fixed, *more)]
