"""`make demo`: a tiny trained model makes the same clip with sound on both backends, from a prompt
and an image.

`make demo PROMPT="a green square grows, grey background"` makes another one; `examples/clips.py`
has the words. `make demo MODEL=tiny-2.5` takes random weights of that preset, which it writes
below `demo/`; a model that can choose how long the clip is does so. MODEL may also be a folder that
holds a model, which is only read.

Decides the settings of that clip; everything is done by the commands that it echoes, which work the
same on a real checkpoint.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks import contact_sheet
from examples.clips import BACKGROUNDS, COLOURS, FRAMES, MOTIONS, PITCHES, SIZE, Clip

TRAINED = Path("examples/tiny-trained")
TINY = ("tiny-2.0", "tiny-2.3", "tiny-2.5")  # presets of random weights
WORDS = {
    "triangle": PITCHES,
    "yellow": COLOURS,
    "right": MOTIONS,
    "brown": BACKGROUNDS,
}  # the default's first
CLIP = shlex.split(f"--width {SIZE} --height {SIZE} --steps 20 --seed 7 --image-crf 0")
LENGTH = {"tiny-2.5": "--auto-duration 0.5 1.5"}  # for the models that choose it; for others:
BACKENDS = {"cuda": "PyTorch", "tpu": "JAX"}


def ltx2rt(*arguments: str | Path) -> None:
    """Echo and run one `ltx2rt` command; a failure ends the demo with its status."""
    words = [str(a) for a in arguments]
    print(f"\n$ ltx2rt {shlex.join(words)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "ltx2rt.cli", *words]).returncode
    if status:
        sys.exit(status)


def described(prompt: str) -> Clip:
    """The shape that a prompt asks for; where none of its words is known, the default's."""
    said = re.findall(r"\w+", prompt.lower())
    return Clip(
        *(next((name for name in names if name in said), word) for word, names in WORDS.items()),
        phase=0.2,
    )


def main(
    model: str = str(TRAINED), prompt: str = Clip(*WORDS).prompt, folder: Path = Path("demo")
) -> None:
    is_random = model in TINY
    if not is_random and not Path(model).is_dir():
        sys.exit(f"make demo: MODEL={model} is neither a folder nor one of {', '.join(TINY)}")
    folder.mkdir(exist_ok=True)
    path, image, sheet = Path(model), folder / "image.png", folder / "sheet.png"
    Image.fromarray(np.uint8(255 * described(prompt).frames(count=1)[0])).save(image)
    if is_random:
        path = folder / model
        shutil.rmtree(path, ignore_errors=True)
        ltx2rt("weights", "make", "--preset", model, "--layout", "official", path)
    clips = {name: folder / f"{backend}.mp4" for backend, name in BACKENDS.items()}
    length = shlex.split(LENGTH.get(model, f"--num-frames {FRAMES}"))
    for backend, clip in zip(BACKENDS, clips.values(), strict=True):
        inputs = ("--prompt", prompt, "--image", f"{image}:0", *CLIP, *length)
        ltx2rt("generate", "--backend", backend, "--model", path, *inputs, "--output", clip)
    ltx2rt("compare", *clips.values())
    contact_sheet.draw(sheet, prompt, clips)
    if is_random:
        print(
            "\nThe weights are random, so the clips are noise; what counts is that the two agree."
        )
    elif path == TRAINED:
        known = "; ".join(", ".join(names) for names in WORDS.values())
        print(
            f'\nAnother one: make demo PROMPT="{Clip("square", "green", "grows", "grey").prompt}" '
            f"(it knows: {known})"
        )
    for name, clip in clips.items():
        print(f"{clip}: {name}, {os.path.getsize(clip)} bytes")
    print(
        f"{sheet}: frames and sound of both; {path}: the checkpoint; {image}: the picture at "
        "frame 0"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
