"""Clips for training, and words of `ltx2rt train`."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt import cli
from ltx2rt.media.mp4 import write_mp4

FPS, RATE = 24, 16000


def write_clips(folder: Path, count: int = 3, sound: bool = True, frames: int = 9) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(3)
    for i in range(count):
        shown = rng.integers(0, 255, (frames, 64, 64, 3), np.uint8)
        heard: dict[str, Any] = {"num_frames": frames, "fps": Fraction(FPS)}
        if sound:
            waveform = rng.uniform(-0.1, 0.1, (2, RATE * frames // FPS)).astype(np.float32)
            heard |= {"waveform": waveform, "sample_rate": RATE}
        path = folder / f"{i}.mp4"
        write_mp4(path, [shown], **heard)
        path.with_suffix(".txt").write_text(f"clip number {i}")
    return folder


def write_mask(path: Path) -> None:
    """A clip of 64x64 with a white right half."""
    shown = np.zeros((9, 64, 64, 3), np.uint8)
    shown[:, :, 32:] = 255
    write_mp4(path, [shown], num_frames=9, fps=Fraction(FPS))


def run_train(model: Path, *words: object) -> int:
    where = ("--model", model, "--backend", "cuda", "--device", "cpu")
    return cli.main(["train", *map(str, (words[0], *where, *words[1:]))])


def options(data: Path, output: Path, **more: object) -> list[object]:
    """Words of a small `train run`."""
    flags = {"data": data, "output": output, "rank": 2, "steps": 4, "save_every": 2, "lr": 1e-2}
    named = {f"--{name.replace('_', '-')}": value for name, value in (flags | more).items()}
    return [word for pair in named.items() for word in pair]


def samples_of(cache: Path) -> list[dict[str, Any]]:
    """Lines of a cache's samples."""
    return [json.loads(line) for line in (cache / "manifest.jsonl").read_text().splitlines()[1:]]


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Metrics of every step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
