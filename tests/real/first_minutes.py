"""The first command of a new user, typed before any help was read."""

from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from ltx2rt.media.output import write_wav
from tests.real.clips import facts, film
from tests.real.table import Row

QUICK = "generate TINY --prompt=a --output clip.mp4"
CLIP = f"{QUICK} --video in.mp4"
NEW = f"{QUICK} --size 64x64 --steps 1"


def things(folder: Path) -> None:
    """A portrait photo, a song of 1 s, and a clip of 1 s."""
    Image.linear_gradient("L").resize((512, 600)).convert("RGB").save(folder / "photo.jpg")
    wave = 0.1 * np.sin(np.arange(8000) / 5).astype(np.float32)
    write_wav(folder / "song.wav", np.stack([wave, wave]), 8000)
    film(folder, size=(64, 64), frames=25, rate=24)


def made(folder: Path, width: int = 64, height: int = 64, frames: int = 25) -> None:
    assert facts(folder / "clip.mp4")[:3] == (width, height, frames)


def works(name: str, command: str, *says: str, check=made) -> Row:
    return Row(name, command, things, says, check=check)


def refused(name: str, command: str, says: str) -> Row:
    return Row(name, command, things, (says,), status=2)


ROWS = [
    works("text, one second", f"{NEW} --seconds 1", "1 s: 25 frames, 1.04 s"),
    works("a portrait photo decides the size", f"{QUICK} --width 192 --steps 1 --num-frames 9 --image photo.jpg",
        check=partial(made, width=192, height=224, frames=9)),
    works("a song decides the length", f"{NEW} --audio song.wav", "pipeline a2v, because of --audio-path",
        check=partial(made, frames=17)),
    works("a song and its seconds", f"{NEW} --audio song.wav --seconds 1", check=partial(made, frames=17)),
    works("redo a part", f"{CLIP} --start 0.4 --end 0.6", "pipeline retake"),
    works("continue", f"{CLIP} --extend-frames 8", check=partial(made, frames=33)),
    works("continue for a second", f"{CLIP} --seconds 1", "pipeline extend, because of --video-path and --seconds",
        check=partial(made, frames=49)),
    works("remove something", f"{CLIP} --mask-box 20,20,20,20"),
    works("restyle", f"{CLIP} --noise-level 0.5"),
    works("see it early", f"{NEW} --num-frames 9 --preview early.webp",
        check=lambda folder: Image.open(folder / "early.webp").verify()),
    refused("a preview of another kind", f"{NEW} --preview early.gif", "early.gif, expected none, or a name in"),
    works("continue by another word", f"{CLIP} --extend 1", "--extend: read as --seconds 1",
        check=partial(made, frames=49)),
    works("a photo and words without flags", "generate TINY photo.jpg --prompt=a --output clip.mp4 --size 64x64 "
        "--steps 1 --frames 9 --mute", "read as --image .*photo.jpg", "--frames: read as --num-frames 9",
        check=partial(made, frames=9)),
    works("a first and a last frame", f"{NEW} --frames 9 --first-frame photo.jpg --last-frame photo.jpg",
        "--last-frame: read as --image photo.jpg:last", check=partial(made, frames=9)),
    refused("strength of other programs", f"{CLIP} --strength 0.6", r"did you mean --noise-level\?"),
    refused("a flag of another pipeline", f"{NEW} --song song.wav", r"did you mean --audio-path\?"),
    refused("a size in one number", f"{QUICK} --size 64", "'64', expected WIDTHxHEIGHT"),
    refused("two photos at one frame", f"{NEW} --image photo.jpg photo.jpg", "such as photo.jpg:last"),
    works("a clip as a photo", f"{NEW} --seconds 1 --image in.mp4:1", "frames 0 to 16 guide the clip from frame 1"),
    refused("a chosen GPU", f"{NEW} --gpu 0", "CUDA_VISIBLE_DEVICES=0"),
    refused("steps of a distilled run", f"{CLIP} --noise-level 0.5 --steps 4", "or add --guided"),
]  # fmt: skip
