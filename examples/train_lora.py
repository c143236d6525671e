"""Clips that teach the tiny trained model a voice that it has not, and how often it then has learnt
it.

    python -m examples.train_lora clips FOLDER                   # what is trained on: 48 clips with
    captions python -m examples.train_lora measure LORA [--count N]       # how often sounds have
    the tone, with and without it

Every shape sounds like a square where the caption says `TRIGGER`, at its own tone elsewhere. A tone
that the model was not made with would not do: its vocoder, which no LoRA changes, makes no other.
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path

import numpy as np

import ltx2rt
from benchmarks.recognise import SEMITONE, hear
from examples.clips import FPS, FRAMES, PITCHES, RATE, SIZE, random_clip
from ltx2rt.media.mp4 import write_mp4

MODEL = Path(__file__).parent / "tiny-trained"
TRIGGER, PITCH_HZ = "zorp", PITCHES["square"]
STEPS = 12  # sampler steps of a measurement
COUNT = 48


def write_clips(folder: Path, count: int = COUNT) -> None:
    """Half of the clips have the trigger and the tone."""
    folder.mkdir(parents=True, exist_ok=True)
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


def measure(lora: Path | None, count: int, backend: str) -> dict[str, float]:
    """Shares of sounds with the right tone: with the trigger the new one, without it the shape's
    own."""
    model = ltx2rt.open(
        model=MODEL, backend=backend, device="cpu", **({"lora": [lora]} if lora else {})
    )
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("clips").add_argument("folder", type=Path)
    measured = commands.add_parser("measure")
    measured.add_argument("lora", type=Path)
    measured.add_argument("--count", type=int, default=16)
    measured.add_argument("--backend", default="cuda")
    args = parser.parse_args()
    if args.command == "clips":
        write_clips(args.folder)
        return
    for name, lora in (("base", None), (args.lora.name, args.lora)):
        found = measure(lora, args.count, args.backend)
        print(f"{name}: " + ", ".join(f"{share:.0%} {what}" for what, share in found.items()))


if __name__ == "__main__":
    main()
