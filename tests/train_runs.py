"""Clips for training, and words of `ltx2rt train`."""

from fractions import Fraction
from pathlib import Path

import numpy as np

from ltx2rt import cli
from ltx2rt.media.mp4 import write_mp4

FPS, RATE = 24, 16000


def write_clips(folder: Path, count: int = 3, sound: bool = True, frames: int = 9) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(3)
    for i in range(count):
        shown = rng.integers(0, 255, (frames, 64, 64, 3), np.uint8)
        heard = (
            rng.uniform(-0.1, 0.1, (2, RATE * frames // FPS)).astype(np.float32) if sound else None
        )
        path = folder / f"{i}.mp4"
        write_mp4(
            path,
            [shown],
            num_frames=frames,
            fps=Fraction(FPS),
            waveform=heard,
            sample_rate=RATE if sound else 0,
        )
        path.with_suffix(".txt").write_text(f"clip number {i}")
    return folder


def run_train(model: Path, *words: object) -> int:
    where = ("--model", model, "--backend", "cuda", "--device", "cpu")
    return cli.main(["train", *map(str, (words[0], *where, *words[1:]))])


def options(cache: Path, output: Path, **more: object) -> list[object]:
    fixed = {
        "data": cache,
        "output": output,
        "rank": 2,
        "steps": 4,
        "save-every": 2,
        "lr": 1e-2,
    } | more
    return [word for name, value in fixed.items() for word in (f"--{name}", value)]
