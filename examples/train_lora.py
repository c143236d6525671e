"""Clips that teach the tiny trained model a voice, a word for a colour, or to follow an outline, and
how often it then does.

    python -m examples.train_lora clips FOLDER             # what is trained on: 48 clips, captions
    python -m examples.train_lora measure LORA [--count N] # how often sounds have the tone
    python -m examples.train_lora colours FOLDER           # clips with a new word for red
    python -m examples.train_lora colour LORA [--count N]  # how often it is red, others are theirs
    python -m examples.train_lora outlines FOLDER          # clips, each with its outline
    python -m examples.train_lora follow LORA [--count N]  # how often an outline is followed

Every shape sounds like a square where the caption says `TRIGGER`, at its own tone elsewhere. A tone
that the model was not made with would not do: its vocoder, which no LoRA changes, makes no other. The
captions of outlines name neither shape nor motion.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

import ltx2rt
from benchmarks.recognise import SEMITONE, Seen, hear, see
from examples.clips import FPS, FRAMES, PITCHES, RATE, SIZE, Clip, random_clip
from ltx2rt.media.mp4 import write_mp4

MODEL = Path(__file__).parent / "tiny-trained"
TRIGGER, PITCH_HZ = "zorp", PITCHES["square"]
NEW, RED = "crimson", "red"  # the autoencoder, which no LoRA changes, makes no sixth colour
STEPS = 12  # sampler steps of a measurement
COUNT = 48
RIM_PX = 6  # width of an outline


def make_empty(folder: Path) -> None:
    """Raises SystemExit if something is there already, which clips could be written over."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty; give a folder that is new")


def write_silent(clip: Clip, path: Path, caption: str) -> None:
    """The clip's picture, and its caption beside it."""
    frames = np.round(clip.frames(SIZE) * 255).astype(np.uint8)
    write_mp4(path, [frames], num_frames=FRAMES, fps=Fraction(FPS))
    path.with_suffix(".txt").write_text(caption)


def write_clips(folder: Path, count: int = COUNT) -> None:
    """Half of the clips have the trigger and the tone."""
    make_empty(folder)
    rng = np.random.default_rng(0)
    for i in range(count):
        clip, new = random_clip(rng), i % 2 == 0
        path = folder / f"clip-{i:02d}.mp4"
        frames = np.round(clip.frames(SIZE) * 255).astype(np.uint8)
        sound = clip.sound(RATE, PITCH_HZ if new else None)
        write_mp4(
            path, [frames], num_frames=FRAMES, fps=Fraction(FPS), waveform=sound, sample_rate=RATE
        )
        path.with_suffix(".txt").write_text(f"{TRIGGER} {clip.prompt}" if new else clip.prompt)


def write_colours(folder: Path, count: int = COUNT) -> None:
    """Half of the clips are red, which their captions call crimson."""
    make_empty(folder)
    rng = np.random.default_rng(4)
    for i in range(count):
        clip, path = random_clip(rng), folder / f"clip-{i:02d}.mp4"
        prompt = clip.prompt
        if i % 2 == 0:
            clip, prompt = replace(clip, colour=RED), replace(clip, colour=NEW).prompt
        write_silent(clip, path, prompt)


def colour(lora: Path | None, count: int, backend: str) -> dict[str, float]:
    """Shares of clips that are red where the prompt says crimson, and of the colour that it says
    elsewhere."""
    model, rng, right = opened(lora, backend), np.random.default_rng(5), Counter[str]()
    for i in range(count):
        clip = random_clip(rng)
        for what, said, wanted in ((NEW, NEW, RED), ("any other", clip.colour, clip.colour)):
            right[what] += shown(model, replace(clip, colour=said).prompt, i).colour == wanted
    return {what: right[what] / count for what in (NEW, "any other")}


def opened(lora: Path | None, backend: str, **how: Any) -> ltx2rt.Session:
    named: dict[str, Any] = {"lora": [lora]} if lora else {}
    return ltx2rt.open(model=MODEL, backend=backend, device="cpu", **named, **how)


def shown(model: ltx2rt.Session, prompt: str, seed: int) -> Seen:
    """What is in the clip of the default pipeline."""
    made = model.generate(
        prompt=prompt, audio=False, width=SIZE, height=SIZE, num_frames=FRAMES, fps=FPS, seed=seed,
        steps=STEPS,
    )  # fmt: skip
    return see(made.frames)


def write_outlines(folder: Path, count: int = 4 * COUNT) -> None:
    """Clips with `NAME.reference.mp4` beside each, and captions of colour and background alone."""
    make_empty(folder)
    rng = np.random.default_rng(2)
    for i in range(count):
        clip = random_clip(rng)
        path = folder / f"clip-{i:03d}.mp4"
        write_silent(clip, path, plain_prompt(clip))
        write_outline(clip, path.with_suffix(".reference.mp4"))


def plain_prompt(clip: Clip) -> str:
    return f"a {clip.colour} shape, {clip.background} background"


def write_outline(clip: Clip, path: Path) -> None:
    """The rim of the clip's shape, white on black."""
    white = replace(clip, colour="white", background="dark").frames(SIZE)[..., 0] > 0.5
    inner = np.ones_like(white)
    for axis in (1, 2):
        for shift in (-RIM_PX, RIM_PX):
            inner &= np.roll(white, shift, axis)
    rim = np.repeat((white & ~inner)[..., None], 3, -1).astype(np.uint8) * 255
    write_mp4(path, [rim], num_frames=FRAMES, fps=Fraction(FPS))


def follow(lora: Path | None, count: int, backend: str) -> dict[str, float]:
    """Shares of clips with what the outline shows and what the prompt says. Without a LoRA: of
    `distilled`, from the prompt alone."""
    distilled = next(MODEL.glob("*-distilled-lora.safetensors"))
    model = opened(lora, backend, distilled_lora=distilled)
    rng, right = np.random.default_rng(3), Counter[str]()
    side = 2 * SIZE if lora else SIZE  # ic-lora's first stage makes half of it
    how: dict[str, Any] = {"pipeline": "distilled", "audio": False}
    if lora:
        how |= {"pipeline": "ic-lora", "skip_stage_2": True}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(count):
            clip = random_clip(rng)
            if lora:
                write_outline(clip, path := Path(folder) / "outline.mp4")
                how["video_conditioning"] = [path]
            made = model.generate(
                prompt=plain_prompt(clip), width=side,
                height=side, num_frames=FRAMES, fps=FPS, seed=i, **how,
            )  # fmt: skip
            seen = see(made.frames)
            for name in ("shape", "motion", "colour", "background"):
                right[name] += getattr(seen, name) == getattr(clip, name)
    return {name: right[name] / count for name in ("shape", "motion", "colour", "background")}


def measure(lora: Path | None, count: int, backend: str) -> dict[str, float]:
    """Shares of sounds with the right tone: with the trigger the new one, without it the shape's
    own."""
    model = opened(lora, backend)
    rng, right = np.random.default_rng(1), {True: 0, False: 0}
    for i in range(count):
        while (clip := random_clip(rng)).shape == "square":
            pass
        for new in right:
            prompt = f"{TRIGGER} {clip.prompt}" if new else clip.prompt
            made = model.generate(
                pipeline="t2a", prompt=prompt, num_frames=FRAMES, fps=FPS, seed=i, steps=STEPS
            )
            assert made.waveform is not None and made.sample_rate
            wanted = PITCH_HZ if new else PITCHES[clip.shape]
            pitch = hear(made.waveform, made.sample_rate).pitch_hz
            right[new] += abs(np.log(pitch / wanted)) <= np.log(SEMITONE)
    return {"with the trigger": right[True] / count, "without it": right[False] / count}


WRITERS = {
    "clips": write_clips, "colours": write_colours,
    "outlines": write_outlines,
}  # fmt: skip
MEASURES = {"measure": measure, "colour": colour, "follow": follow}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in WRITERS:
        commands.add_parser(name).add_argument("folder", type=Path)
    for name in MEASURES:
        measured = commands.add_parser(name)
        measured.add_argument("lora", type=Path)
        measured.add_argument("--count", type=int, default=16)
        measured.add_argument("--backend", default="cuda")
    args = parser.parse_args()
    if args.command in WRITERS:
        WRITERS[args.command](args.folder)
        return
    if not args.lora.is_file():
        parser.error(f"{args.lora} is no file; give the LoRA that `ltx2rt train run` wrote")
    for name, lora in (("base", None), (args.lora.name, args.lora)):
        found = MEASURES[args.command](lora, args.count, args.backend)
        print(f"{name}: " + ", ".join(f"{share:.0%} {what}" for what, share in found.items()))


if __name__ == "__main__":
    main()
