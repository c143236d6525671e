"""docs/tasks.md: ten tasks, each with its command, a strip of in and out, and seconds on a card.

    python -m benchmarks.tasks            write the page and its pictures
    python -m benchmarks.tasks NAME ...   make only the pictures of some tasks anew, and the page

The tiny trained model draws the strips; `ltx2rt plan` gives the seconds. A strip holds the words
that it was made by, so that a test tells one that is out of date.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image, PngImagePlugin

from examples.clips import Clip
from ltx2rt import cli
from ltx2rt.media.mp4 import write_mp4
from ltx2rt.media.sound import write_wav
from ltx2rt.media.video import read_frames, video_info

ROOT = Path(__file__).parents[1]
PAGE, STRIPS = ROOT / "docs" / "tasks.md", ROOT / "docs" / "tasks"
CARD = "rtx4090-24gb"
COLUMNS, CELL_PX, GAP_PX = 6, 96, 3
MADE, CLIP_FRAMES, FPS = "a red circle slides to the right, dark background", 121, 24
SMALL = "--width 128 --height 128 --num-frames 25 --image-crf 0"


@dataclass(frozen=True)
class Task:
    """words: of the command; tiny: of the one that draws the strip; shown: its input; flags: those
    that matter, with what they do; planned: words for `plan`, if they are others."""

    title: str
    name: str
    words: str
    tiny: str
    flags: dict[str, str]
    shown: str = ""
    prompt: str = "a red fox in the snow"
    drawn: str = MADE
    planned: str | None = None


TASKS = (
    Task("A clip from words", "words", "", f"{SMALL} --steps 20",
         {"--seconds": "length; without it the prompt chooses", "--size": "1536x1024 by default, or 9:16",
          "--seed": "the same seed makes the same clip"}),
    Task("A photo that moves", "photo", "--image fox.png", f"{SMALL} --steps 20 --image photo.png",
         {"--image": "FILE, or FILE:FRAME:STRENGTH", "--image-crf": "0 keeps the photo sharp",
          "--nag": "11 obeys --negative-prompt"}, "photo.png"),
    Task("What lies between two pictures", "between", "--image dawn.png dusk.png:last",
         f"--pipeline keyframes {SMALL} --steps 20 --image photo.png:0 last.png:24",
         {"--image": "FILE:FRAME each, more than two as well", "--num-frames": "rounded to 8k+1",
          "--seconds": "length in place of it"}, "photo.png last.png", "the sun crosses a snowy valley"),
    Task("Pictures for a song", "song", "--audio-path song.mp3",
         f"{SMALL} --steps 20 --audio-path sound.wav",
         {"--audio-path": "the clip is as long as it", "--audio-start-time": "second to begin at",
          "--audio-max-duration": "seconds to take of it"}, prompt="a woman sings on a stage"),
    Task("A part of a clip made again", "retake", "--video-path clip.mp4 --start-time 1 --end-time 2",
         "--video-path clip.mp4 --start-time 0.3 --end-time 1",
         {"--start-time": "seconds, or `1m30s`, `0:01:30`", "--end-time": "the same",
          "--keep": "`audio` keeps the sound"},
         "clip.mp4", "the fox jumps", "a green square bounces on the floor, dark background"),
    Task("A region removed or replaced", "region", "--video-path clip.mp4 --mask-box 20,8,40,24",
         "--video-path clip.mp4 --mask-box 0,0,128,64",
         {"--mask-box": "LEFT,TOP,WIDTH,HEIGHT in pixels", "--mask": "picture or clip, white is made again",
          "--pad": "new border around the clip"}, "clip.mp4", "an empty field of snow",
         "a blue square grows, dark background"),
    Task("A clip continued", "continue", "--video-path clip.mp4 --extend-frames 96",
         "--video-path clip.mp4 --extend-frames 16 --overlap 9",
         {"--extend-frames": "new frames, rounded to 8k", "--before": "in front of it",
          "--join": "up to another clip"}, "clip.mp4", "the fox runs on"),
    Task("A clip in another style", "style", "--video-path clip.mp4 --noise-level 0.725",
         "--video-path clip.mp4 --noise-level 0.9",
         {"--noise-level": "more changes more, 0 to 1", "--lora": "a style of your own",
          "--guided": "slower, follows the prompt closer; dev weights"}, "clip.mp4", "a red fox, an oil painting",
         "a yellow circle slides to the right, brown background"),
    Task("A minute", "minute", "--seconds 60", "--width 128 --height 128 --num-frames 49 "
         "--segment-frames 25 --overlap 9 --steps 20 --image-crf 0",
         {"--seconds": "over 20 are made in segments", "--prompts": "a file with a prompt for each segment",
          "--overlap": "frames that a segment repeats"}),
    Task("A fast draft", "draft", "--preset draft", "--preset draft --width 128 --height 128 --num-frames 25",
         {"--preset": "`draft`, `standard` or `best`", "--seed": "the same in the clip that follows it",
          "--like": "a clip; takes its settings, also its seed"},
         planned="--size 768x512 --video-decoder conv"),
)  # fmt: skip


def command(task: Task) -> str:
    """The command of the page."""
    words = f"ltx2rt generate --model MODEL_DIR {task.words}".rstrip()
    return f'{words} \\\n    --prompt "{task.prompt}" --output {task.name}.mp4'


def run(*words: str) -> str:
    """Standard output of one command of ltx2rt. Raises RuntimeError if it fails."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = cli.main(list(words))
    if status:
        raise RuntimeError(f"ltx2rt {shlex.join(words)}: status {status}")
    return out.getvalue()


def seconds(task: Task) -> float:
    """A whole request of LTX-2.5, distilled, on the card, without the first load, by the plan. The
    current folder has the inputs of `inputs`."""
    words = shlex.split(task.words if task.planned is None else task.planned)
    words = ["photo.png" if w.endswith("fox.png") else w for w in words]
    words = [w.replace("dawn.png", "photo.png").replace("dusk.png", "last.png") for w in words]
    words = ["sound.wav" if w == "song.mp3" else w for w in words]
    if not {"--video-path", "--audio-path", "--seconds"} & {*words}:
        words += ["--num-frames", str(CLIP_FRAMES)]
    model = ["--preset", "ltx-2.5", "--assume", "distilled"]
    planned = run("plan", *model, "--device-kind", CARD, "--json", *words)
    return json.loads(planned)["time_s"]


def inputs(width: int, height: int, num_frames: int) -> None:
    """Write photo.png, last.png, sound.wav and clip.mp4 to the current folder."""
    shape = Clip("circle", "red", "right", "dark", phase=0.2)
    frames = (shape.frames() * 255).round().astype(np.uint8)
    still = [Image.fromarray(frames[i]).resize((width, height)) for i in (0, -1)]
    still[0].save("photo.png")
    still[1].save("last.png")
    picked = np.linspace(0, len(frames) - 1, num_frames).round().astype(int)
    whole = np.stack(
        [np.asarray(Image.fromarray(frames[i]).resize((width, height))) for i in picked]
    )
    sound = np.resize(shape.sound(), (2, round(num_frames / FPS * 48000))).astype(np.float32)
    how = {"waveform": sound, "sample_rate": 48000}
    write_mp4(Path("clip.mp4"), [whole], num_frames=num_frames, fps=Fraction(FPS), **how)
    write_wav(Path("sound.wav"), sound, 48000)


def strip(task: Task) -> None:
    """Make the clip in the current folder, and its strip."""
    words = shlex.split(task.tiny)
    model = str(ROOT / "examples" / "tiny-trained")
    how = ["--model", model, "--backend", "cuda", "--device", "cpu", "--seed", "7", "--quiet"]
    run("generate", *how, *words, "--prompt", task.drawn, "--output", "out.mp4")
    rows = [cells(Path(name)) for name in task.shown.split()] + [cells(Path("out.mp4"))]
    step = CELL_PX + GAP_PX
    sheet = Image.new("RGB", (COLUMNS * step - GAP_PX, len(rows) * step - GAP_PX), "white")
    for y, row in enumerate(rows):
        for x, cell in enumerate(row):
            sheet.paste(cell.resize((CELL_PX, CELL_PX)), (x * step, y * step))
    info = PngImagePlugin.PngInfo()
    info.add_text("Command", made_by(task))
    sheet.quantize(64).save(STRIPS / f"{task.name}.png", optimize=True, pnginfo=info)


def made_by(task: Task) -> str:
    return f"{task.tiny} --prompt {task.drawn!r}"


def cells(path: Path) -> list[Image.Image]:
    """Frames of a clip at equal distances; of a picture itself."""
    if path.suffix == ".png":
        return [Image.open(path)]
    count = video_info(path, "").num_frames
    frames = list(islice(read_frames(path, "", count), count))
    picked = np.linspace(0, len(frames) - 1, COLUMNS).round().astype(int)
    return [Image.fromarray(frames[i]) for i in picked]


def page(times: dict[str, float]) -> str:
    """The text of docs/tasks.md. times: seconds by the task's name."""
    parts = [HEAD]
    for task in TASKS:
        text = f"## {task.title}\n\n![{task.title}](tasks/{task.name}.png)\n\n"
        text += f"```sh gpu\n{command(task)}\n```\n\n"
        text += "".join(f"- `{flag}`: {does}\n" for flag, does in task.flags.items())
        parts.append(f"{text}- {times[task.name]:.0f} s on an RTX 4090\n")
    return "\n".join([*parts, FOOT])


HEAD = """\
# Ten tasks

Each with a command that does it and the three flags that matter. In a strip the first row is what
is given, the last one what is made; the [tiny trained model](../examples/tiny-trained/README.md)
drew them, which knows coloured shapes and nothing else. Seconds are for LTX-2.5, distilled, in
bfloat16 at the default 1536x1024, 121 frames, by `ltx2rt plan`, scaled from what an H200 took, without
the first load; given clips have that size. `python -m benchmarks.tasks` makes this page. All pipelines:
[pipelines.md](pipelines.md).
"""
FOOT = """\
## With an IC-LoRA

No strip shows these, since the tiny model has no such LoRA. Each takes the released IC-LoRA that lies
near the model, or the one that `--lora` names.

```sh gpu
ltx2rt generate --model MODEL_DIR --upscale clip.mp4 --lora upscaler.safetensors \\
    --prompt "a red fox in the snow" --output large.mp4
ltx2rt generate --model MODEL_DIR --reference fox.png --lora ingredients.safetensors \\
    --prompt "the fox runs through the snow" --output sheet.mp4
ltx2rt generate --model MODEL_DIR --video-path clip.mp4 --hdr ACESCG --lora hdr.safetensors \\
    --prompt "a red fox in the snow" --output hdr.mp4
```

- `--upscale`: a clip or a picture, at twice its size
- `--reference`: a sheet of characters, things and places, or a control video
- `--hdr`: the space of EXR frames; `*.mp4` is HLG
"""


def main(names: list[str]) -> None:
    STRIPS.mkdir(exist_ok=True)
    here = Path.cwd()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            inputs(1536, 1024, CLIP_FRAMES)
            times = {task.name: seconds(task) for task in TASKS}
            inputs(128, 128, 25)
            for task in TASKS:
                if not names or task.name in names:
                    strip(task)
                    print(f"{task.name}: drawn, {times[task.name]:.1f} s on {CARD}", flush=True)
        finally:
            os.chdir(here)
    PAGE.write_text(page(times))


if __name__ == "__main__":
    main(sys.argv[1:])
