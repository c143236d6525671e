"""`make demo`: a random tiny model makes the same clip with sound on both backends, from a prompt and an image.

`make demo MODEL=tiny-2.5` takes that one; a model that can choose how long the clip is does so.

Decides the settings of that clip; everything is done by the commands that it echoes, which work the same on a real
checkpoint.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

PROMPT = "a red fox walks through a snowy forest at dawn"
CLIP = shlex.split("--width 256 --height 128 --steps 4 --seed 7")
LENGTH = {"tiny-2.5": "--auto-duration 0.5 1.5"}  # of the models that choose it; of others:
FRAMES = "--num-frames 25"
BACKENDS = {"cuda": "PyTorch", "tpu": "JAX"}


def ltx2rt(*arguments: str | Path) -> None:
    """Echo and run one `ltx2rt` command; a failure ends the demo with its status."""
    words = [str(a) for a in arguments]
    print(f"\n$ ltx2rt {shlex.join(words)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "ltx2rt.cli", *words]).returncode
    if status:
        sys.exit(status)


def draw_picture(path: Path) -> None:
    """A sun over snow, 320 x 180: not the clip's shape, so that resizing and cropping are seen too."""
    from PIL import Image, ImageDraw

    picture = Image.linear_gradient("L").resize((320, 180)).convert("RGB")
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 120, 320, 180), fill=(230, 235, 245))
    draw.ellipse((200, 30, 260, 90), fill=(250, 180, 60))
    picture.save(path)


def main(name: str = "tiny-2.3", folder: Path = Path("demo")) -> None:
    folder.mkdir(exist_ok=True)
    model, image = folder / name, folder / "image.png"
    shutil.rmtree(model, ignore_errors=True)
    draw_picture(image)
    ltx2rt("weights", "make", "--preset", name, "--layout", "official", model)
    clips = {backend: folder / f"{backend}.mp4" for backend in BACKENDS}
    for backend, clip in clips.items():
        inputs = ("--prompt", PROMPT, "--image", f"{image}:0", *CLIP, *LENGTH.get(name, FRAMES).split())
        ltx2rt("generate", "--backend", backend, "--model", model, *inputs, "--output", clip)
    ltx2rt("compare", *clips.values())
    print("\nThe weights are random, so the clips are noise; what counts is that the two agree.")
    for backend, clip in clips.items():
        print(f"{clip}: {BACKENDS[backend]}, {os.path.getsize(clip)} bytes")
    print(f"{model}: the checkpoint, {image}: the picture at frame 0")


if __name__ == "__main__":
    main(*sys.argv[1:2])
