"""The cost in quality of each way of making a clip, on clips with measurable properties.

The tiny trained checkpoint is asked for clips of `examples.clips`, each with its own seed; a
quarter of them show a combination of shape, colour and motion that it was never trained on.
`benchmarks.recognise` tells whether the clip shows its prompt. Rows that ought to make the same
clip as `REFERENCE` are compared with it, and every row makes its first clip twice. Each row runs in
a separate process, two at a time.

    python -m benchmarks.quality                     # all rows; prints the table of docs/quality.md
    python -m benchmarks.quality --rows JAX float8   # these again
    python -m benchmarks.quality --rows              # the table of the results
    python -m benchmarks.quality --long              # rows of examples/long-trained, 256x256
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import ltx2rt
from benchmarks.measure import RESULTS, machine
from benchmarks.recognise import marks, psnr_db
from benchmarks.stored_models import write_copy
from examples.clips import FPS, LONG, RATE, Clip, random_clip
from ltx2rt.instruments.compare import RATE as COMPARED_RATE
from ltx2rt.instruments.compare import compare_sound, correlation, luma, ssim
from ltx2rt.media.mp4 import write_mp4
from ltx2rt.media.output import write_wav

COUNT = 64
HELD_OUT = 4  # every fourth
NONE = {
    f"{m}_{name}": value
    for m in ("video", "audio")
    for name, value in (("cfg", 1), ("stg", 0), ("modality", 1))
}
# More devices than cores: a thread may come late to a rendezvous, which XLA takes for a deadlock
# after 40 s.
XLA = "--xla_force_host_platform_device_count={} --xla_cpu_collective_call_terminate_timeout_seconds=600"


@dataclass(frozen=True)
class Row:
    """model, clip: keywords of `ltx2rt.open` and `generate`. given: inputs of a clip other than its
    prompt, a key of `GIVEN`. part: of the clips, where it takes long. lora: whether the distilled
    LoRA has to be named. same: the row whose clips it should make, empty for none. ranks:
    processes."""

    model: Mapping[str, Any] = field(default_factory=dict)
    clip: Mapping[str, Any] = field(default_factory=dict)
    given: str = ""
    part: float = 1.0
    lora: bool = False
    same: str = ""
    ranks: int = 1
    devices: int = 1
    form: str = ""  # how the transformer is stored (`stored_models`)

    def size(self, clip: Clip) -> dict[str, int]:
        """Keywords of a clip's size, unless given material decides it."""
        pipeline, frames = self.clip.get("pipeline"), {"num_frames": clip.num_frames}
        if pipeline == "retake":
            return {}
        return frames if pipeline == "t2a" else frames | {"width": clip.side, "height": clip.side}


def _torch(
    part: float = 1.0, given: str = "", lora: bool = False, same: str = "", **clip: Any
) -> Row:
    return Row({"backend": "cuda"}, clip, given, part, lora, same)


EIGHT = "guidance=2,fsdp=2,tensor=2"
FORMS = {"GGUF, Q8_0": "Q8_0", "GGUF, Q4_K and Q4_0": "Q4_K", "nvfp4": "nvfp4"}
REFERENCE, ONE_STAGE, DRAWN = "PyTorch", "`one-stage`", "as drawn"
ROWS = {
    REFERENCE: Row({"backend": "cuda"}),
    "JAX": Row({"backend": "tpu"}, same=REFERENCE),
    "two processes, tensor=2": Row({"backend": "cuda"}, part=0.25, same=REFERENCE, ranks=2),
    f"eight devices, {EIGHT}": Row(
        {"backend": "tpu", "mesh": EIGHT}, part=0.25, same=REFERENCE, devices=8
    ),
    "bfloat16": Row({"backend": "cuda", "dtype": "bfloat16"}, same=REFERENCE),
    "float8": Row({"backend": "cuda", "weights_dtype": "float8"}, same=REFERENCE),
    "int8": Row({"backend": "cuda", "weights_dtype": "int8"}, same=REFERENCE),
    **{name: Row({"backend": "cuda"}, same=REFERENCE, form=form) for name, form in FORMS.items()},
    "without any guidance": _torch(**NONE),
    "`one-stage`": _torch(pipeline="one-stage"),
    "`one-stage`, without CFG": _torch(pipeline="one-stage", video_cfg=1, audio_cfg=1),
    "`one-stage`, without STG": _torch(pipeline="one-stage", video_stg=0, audio_stg=0),
    "`one-stage`, without modality guidance": _torch(
        pipeline="one-stage", video_modality=1, audio_modality=1
    ),
    "`one-stage`, without any guidance": _torch(pipeline="one-stage", **NONE),
    **{
        f"`one-stage`, guidance in {start} to {stop}": _torch(
            pipeline="one-stage", guidance_interval=(start, stop)
        )
        for start, stop in ((0, 0.44), (0.27, 0.87), (0.44, 1))
    },
    "`distilled`": _torch(pipeline="distilled", lora=True),
    "`hq`": _torch(pipeline="hq"),
    "with an image": _torch(given="image"),
    "`distilled`, with an image": _torch(pipeline="distilled", given="image", lora=True),
    "`keyframes`": _torch(pipeline="keyframes", given="first and last"),
    "`a2v`": _torch(pipeline="a2v", given="sound"),
    "`retake`, 0.35 to 0.7 s": _torch(
        pipeline="retake", given="clip", lora=True, start_time=0.35, end_time=0.7
    ),
    "`t2a`": _torch(pipeline="t2a"),
}
# Fewer evaluations of one-stage's 30 steps: only by name, in a separate table.
FEWER = {
    f"`one-stage`, {words}": _torch(pipeline="one-stage", same=ONE_STAGE, **given)
    for words, given in (
        ("`--steps 15`", {"steps": 15}),
        ("`--skip-step 1`", {"skip_step": 1}),
        ("a plan of 15", {"step_plan": "0,5,7,9,11,13,16,18,21,23,25,26,27,28,29"}),
        ("`--steps 10`", {"steps": 10}),
        ("`--skip-step 2`", {"skip_step": 2}),
        ("a plan of 10", {"step_plan": "0,7,10,13,16,20,23,26,28,29"}),
    )
}
KEPT = (REFERENCE, ONE_STAGE)  # rows that others are compared with
OF_LONG = (
    *(DRAWN, REFERENCE, ONE_STAGE, "`distilled`", "with an image", "`keyframes`", "`a2v`"),
    *("`retake`, 0.35 to 0.7 s", "`t2a`"),
)


def place(name: str) -> int:
    """Place of a row in the table, which names its files."""
    return [DRAWN, *ROWS, *FEWER].index(name)


def asked(number: int, long: bool = False) -> Clip:
    clip = random_clip(np.random.default_rng([16, number]), trained=number % HELD_OUT != 0)
    return replace(clip, **LONG) if long else clip


# --- inputs of a clip other than its prompt -------------------------------------------------------


def _images(clip: Clip, path: Path, *frames: int) -> dict[str, Any]:
    named = []
    for i in frames:
        Image.fromarray(_bytes(clip.frames(first=i, count=1)[0])).save(
            path.with_suffix(f".{i}.png")
        )
        named.append(f"{path.with_suffix(f'.{i}.png')}:{i}")
    return {"image": named, "image_crf": 0}


def _sound(clip: Clip, path: Path) -> dict[str, Any]:
    write_wav(path.with_suffix(".wav"), clip.sound(), RATE)
    return {"audio_path": path.with_suffix(".wav")}


def _clip(clip: Clip, path: Path) -> dict[str, Any]:
    chunk = clip.frames().transpose(3, 0, 1, 2) * 2 - 1
    sound = {"waveform": clip.sound(), "sample_rate": RATE}
    write_mp4(
        path.with_suffix(".mp4"), [chunk], num_frames=clip.num_frames, fps=Fraction(FPS), **sound
    )
    return {"video_path": path.with_suffix(".mp4")}


def _bytes(frames: np.ndarray) -> np.ndarray:
    return np.round(255 * frames).astype(np.uint8)


GIVEN: dict[str, Callable[[Clip, Path], dict[str, Any]]] = {
    "": lambda clip, path: {},
    "image": lambda clip, path: _images(clip, path, 0),
    "first and last": lambda clip, path: _images(clip, path, 0, clip.num_frames - 1),
    "sound": _sound,
    "clip": _clip,
}


# --- a row ----------------------------------------------------------------------------------------


def run_row(
    name: str, model: Path, count: int, folder: Path, long: bool = False
) -> list[dict[str, Any]]:
    """The marks of each clip of a row, and how it was made; in other processes than the main one
    nothing of use.

    The clips of `KEPT` stay in `folder`, and others are compared with them.
    """
    if name == DRAWN:
        drawn = (asked(i, long) for i in range(count))
        return [
            _of(i, marks(clip, _bytes(clip.frames()), clip.sound(), RATE))
            for i, clip in enumerate(drawn)
        ]
    row, found, first = (ROWS | FEWER)[name], [], {}
    numbers = range(max(1, round(count * row.part)))
    model = write_copy(model, folder / row.form, row.form) if row.form else model
    with ltx2rt.open(model, **options(row, model)) as session:
        for i in (*numbers, 0):
            clip = asked(i, long)
            given, start = keywords(row, clip, folder / f"{place(name)}-{i}"), time.process_time()
            made = session.generate(**given, seed=i)
            cpu_s = time.process_time() - start
            frames = made.frames if len(made.frames) else None
            parts = {"frames": made.frames, "waveform": made.waveform}
            first = first or parts
            if found and i == 0:
                found[0]["repeats"] = all(
                    np.array_equal(parts[name], first[name]) for name in parts
                )
                break
            of = _of(i, marks(clip, frames, made.waveform, made.sample_rate)) | {"cpu_s": cpu_s}
            if "image" in given and frames is not None:
                of["frame 0"] = psnr_db(frames[0], _bytes(clip.frames(count=1)[0]))
            kept = folder / f"{place(row.same or name)}-{i}.npz"
            if name in KEPT:
                np.savez(kept, **parts)
            elif row.same and frames is not None:
                of |= _distance(np.load(kept), frames, made.waveform, made.sample_rate)
            found.append(of)
    return found


def options(row: Row, model: Path) -> dict[str, Any]:
    lora = {"distilled_lora": next(model.glob("*distilled-lora*.safetensors"))} if row.lora else {}
    return dict(row.model) | lora


def keywords(row: Row, clip: Clip, path: Path) -> dict[str, Any]:
    """Keywords of `Session.generate`. path: of the clip's inputs, without an ending."""
    given = GIVEN[row.given](clip, path)
    return {"prompt": clip.prompt, **row.size(clip), **row.clip, **given}


def _of(number: int, found: Mapping[str, Any]) -> dict[str, Any]:
    return {"held_out": number % HELD_OUT == 0, **found}


def _distance(
    reference: Any, frames: np.ndarray, waveform: np.ndarray | None, rate: int
) -> dict[str, Any]:
    a, b = reference["frames"], frames
    scores = [ssim(luma(x), luma(y)) for x, y in zip(a, b, strict=True)]
    found: dict[str, Any] = {"psnr_db": psnr_db(a, b), "ssim": float(np.mean(scores))}
    if waveform is not None:
        before, after = (x.astype(np.float64) for x in (reference["waveform"], waveform))
        found["audio_corr"] = correlation(before, after)
        if rate == COMPARED_RATE:
            found |= compare_sound(before, after)
    return found


def summary(clips: list[dict[str, Any]]) -> dict[str, Any]:
    """For every mark the mean over clips of combinations that were trained and that were held out;
    medians of marks with a unit, and the lowest PSNR."""
    found: dict[str, Any] = {"clips": len(clips), "repeats": clips[0].get("repeats")}
    for name in (
        *("colour", "shape", "motion", "background"),
        *("pitch", "side", "level", "clicked", "silent"),
    ):
        parts = [
            [c[name] for c in clips if name in c and c["held_out"] is held]
            for held in (False, True)
        ]
        if any(parts):
            found[name] = [round(float(np.mean(part)), 4) if part else None for part in parts]
    for name in ("lag_ms", "frame 0", "psnr_db", "ssim", "audio_corr", "mel_l1", "rms_db", "cpu_s"):
        values = [
            abs(c[name]) if name in ("lag_ms", "rms_db") else c[name]
            for c in clips
            if c.get(name) is not None
        ]
        if values:
            found[name] = round(float(np.median(values)), 6)
    if "psnr_db" in found:
        found["lowest_psnr_db"] = round(min(c["psnr_db"] for c in clips), 2)
    for name, worst in (
        ("audio_corr", min),
        ("mel_l1", max),
        ("rms_db", lambda x: max(map(abs, x))),
    ):
        if values := [c[name] for c in clips if c.get(name) is not None]:
            found[f"worst_{name}"] = round(float(worst(values)), 4)
    if "onsets_a" in clips[0]:
        found["onsets_equal"] = round(
            float(np.mean([c["onsets_a"] == c["onsets_b"] for c in clips])), 4
        )
    return found


# --- all rows -------------------------------------------------------------------------------------


def start(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row in one separate process or several. Raises RuntimeError with its output if it
    fails."""
    row = (ROWS | FEWER).get(name, Row())
    output = args.folder / f"{place(name)}.json"
    words = [
        "-m",
        "benchmarks.quality",
        "--rows",
        name,
        "--worker",
        output,
        "--folder",
        args.folder,
    ]
    words += ["--model", args.model, "--count", args.count, *["--long"] * args.long]
    if row.ranks > 1:
        words = ["-m", "torch.distributed.run", "--nproc-per-node", row.ranks, *words]
    env = (
        os.environ
        | {"OMP_NUM_THREADS": "1"}
        | ({"XLA_FLAGS": XLA.format(row.devices)} if row.devices > 1 else {})
    )
    ran = subprocess.run(
        [sys.executable, *map(str, words)], env=env, capture_output=True, text=True
    )
    if ran.returncode:
        raise RuntimeError(f"{name}: {ran.stderr[-2000:]}")
    return json.loads(output.read_text())


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown; of two percentages the first is of combinations that were trained."""
    head = [
        "",
        "clips",
        "colour",
        "shape",
        "motion",
        "pitch",
        "side",
        "level",
        "click at a bounce",
        "lag",
        "no click else",
    ]
    head += ["from the reference: PSNR (lowest)", "SSIM", "sound", "frame 0", "repeat"]
    lines = [head, ["---"] * len(head)]
    for name, row in rows.items():
        psnr = f"{row['psnr_db']:.1f} dB ({row['lowest_psnr_db']:.1f})" if "psnr_db" in row else ""
        cells = [
            name,
            str(row["clips"]),
            *(
                _share(row.get(key))
                for key in ("colour", "shape", "motion", "pitch", "side", "level")
            ),
        ]
        cells += [
            _share(row.get("clicked")),
            _unit(row.get("lag_ms"), "{:.0f} ms"),
            _share(row.get("silent")),
            psnr,
        ]
        cells += [_unit(row.get("ssim"), "{:.4f}"), _unit(row.get("audio_corr"), "{:.4f}")]
        cells += [
            _unit(row.get("frame 0"), "{:.1f} dB"),
            {True: "equal", False: "differs"}.get(row["repeats"], ""),
        ]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _share(parts: Iterable[float | None] | None) -> str:
    return (
        " / ".join("-" if part is None else f"{100 * part:.0f}" for part in parts) if parts else ""
    )


def _unit(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="what each way of making a clip costs in quality")
    parser.add_argument("--model", type=Path)
    parser.add_argument(
        "--count", type=int, default=COUNT, help="of prompts, each with its own seed"
    )
    parser.add_argument("--rows", nargs="*", choices=(DRAWN, *ROWS, *FEWER), metavar="ROW")
    parser.add_argument("--folder", type=Path, help="what rows leave for each other")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time")
    parser.add_argument("--long", action="store_true", help="clips of 256x256 and 121 frames")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    kind = "long" if args.long else "tiny"
    args.model = args.model or Path(f"examples/{kind}-trained")
    args.folder = args.folder or Path(f"demo/quality{'-long' * args.long}")
    args.output = args.output or RESULTS / f"quality{'-long' * args.long}.json"
    if args.rows is None:
        args.rows = OF_LONG if args.long else (DRAWN, *ROWS)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.worker:
        found = run_row(args.rows[0], args.model, args.count, args.folder, args.long)
        if int(os.environ.get("RANK", "0")) == 0:
            args.worker.write_text(json.dumps(found))
        return
    facts: dict[str, Any] = {"benchmark": "quality", "rows": {}}
    if args.output.exists():
        facts |= json.loads(args.output.read_text())

    def run(name: str) -> None:
        began = time.time()
        try:
            clips = start(name, args)
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            return
        rows = facts["rows"] | {name: summary(clips) | {"commit": machine()["commit"]}}
        facts["rows"] = {n: rows[n] for n in (DRAWN, *ROWS, *FEWER) if n in rows}
        args.output.write_text(json.dumps(facts | machine("torch", "jax"), indent=1) + "\n")
        print(
            f"{name}: {len(clips)} clips, {time.time() - began:.0f} s", file=sys.stderr, flush=True
        )

    first = [name for name in args.rows if name in KEPT]
    for names in (first, [name for name in args.rows if name not in KEPT]):
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(run, names))
    print(table(facts["rows"]))


if __name__ == "__main__":
    main()
