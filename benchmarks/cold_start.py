"""Time from starting a process to the end of its first guided step, by phase.

Decides the phases, each in a fresh process as in a real run, and what loading is held against.
  import   from the start of the process until the backend has its device
  plan     headers read and audited, graphs traced and placed
  load     weights on the device: the text encoder's (if the model has one), then the transformer's
  text     the prompt encoded
  lower    the denoise loop of stage 1 lowered
  warmup   the first step minus the second, without its recording: compiling,
  starting libraries record   the step recorded as a CUDA graph; nothing on a CPU
  step     the second step
`plain` reads the same files into one buffer that is used again and again; loading is also given as
a ratio to the time that its own bytes take at that rate. Before each process the files are dropped
from the page cache, as far as the system lets them go (not from a file system in memory), or with
--warm-cache read into it.

Without --model, a checkpoint of the preset's sizes is written first: slices of one random block;
values do not matter here. `--preset ltx-2.3 --no-text` needs 46 GB of disk.

    python -m benchmarks.cold_start --device cuda --model MODEL_DIR --output
    benchmarks/results/cold-start.json python -m benchmarks.cold_start --device cpu --preset
    tiny-2.3 --width 128 --height 64 --num-frames 17
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Spread, machine, record

PHASES = ("import", "plan", "load", "text", "lower", "warmup", "record", "step")
PROMPT = "a red fox walks through a snowy forest at dawn"
BUFFER_BYTES = 2**26


def write_model(folder: Path, name: str, text: bool) -> None:
    """The official layout's main file and, with `text`, its Gemma folder."""
    from ltx2rt.instruments.make import plan_checkpoint
    from ltx2rt.weights.files import TensorInfo, write_tensors
    from ltx2rt.weights.presets import preset

    plan = plan_checkpoint(preset(name), name, "official")
    wanted = [
        f"{name}.safetensors",
        *(path for path in plan.tensors if text and path.startswith("gemma")),
    ]
    files = {path: plan.tensors[path] for path in wanted}
    largest = max(
        np.prod(tensor.info.shape) for tensors in files.values() for tensor in tensors.values()
    )
    block = np.random.default_rng(0).standard_normal(int(largest), np.float32) * np.float32(0.02)
    blocks: dict[Any, np.ndarray] = {}

    def values(info: TensorInfo) -> np.ndarray:
        if info.dtype not in blocks:
            blocks[info.dtype] = block.astype(info.dtype)
        return blocks[info.dtype][: int(np.prod(info.shape))].reshape(info.shape)

    for path, tensors in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        infos = {stored: tensor.info for stored, tensor in tensors.items()}
        write_tensors(
            folder / path,
            infos,
            lambda stored, infos=infos: values(infos[stored]),
            plan.metadata[path],
        )
    for path, content in plan.texts.items():
        if text:
            (folder / path).write_text(content)


def weight_files(model: Path) -> list[Path]:
    return [model] if model.is_file() else sorted(model.rglob("*.safetensors"))


def plain_read(files: list[Path], buffer: bytearray) -> int:
    """Read every byte; the number of them."""
    total = 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


def prepare_cache(files: list[Path], warm: bool) -> None:
    if warm:
        plain_read(files, bytearray(BUFFER_BYTES))
        return
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # pages that are still to be written stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- in the fresh process -------------------------------------------------------------------------


def first_step(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every phase, the bytes loaded and the device."""
    from ltx2rt.backend import get_backend
    from ltx2rt.flags import given_flags
    from ltx2rt.pipelines.build import Loras
    from ltx2rt.pipelines.clip import resolve
    from ltx2rt.pipelines.one_stage import OneStage
    from ltx2rt.session.options import ModelOptions
    from ltx2rt.session.session import Session
    from ltx2rt.session.stopwatch import Stopwatch
    from ltx2rt.stages.denoise import Denoise
    from ltx2rt.stages.noise import standard_normal
    from ltx2rt.stages.stage import MODALITIES, State
    from ltx2rt.stages.text import Text
    from ltx2rt.weights.checkpoint import open_checkpoint

    options = ModelOptions("cuda", **given_flags(args, ModelOptions))
    backend = get_backend("cuda", options.device)
    square = np.ones((2, 2), np.float32)
    backend.merge(square, [([(square, square)], 1.0)], False)  # the device itself starts here
    backend.synchronize()
    found = {"import": time.time() - args.started}

    session = Session(open_checkpoint(options.model), backend, options)
    half = {"width": args.width // 2, "height": args.height // 2, "num_frames": args.num_frames}
    clip = resolve(OneStage(PROMPT, **half, seed=0, steps=3), session.config)
    text, denoise, *_ = clip.stages(session.config, options, Loras())
    assert isinstance(text, Text) and isinstance(denoise, Denoise), (
        "one-stage begins with its prompts"
    )
    encoded = session.config.gemma is not None
    session.audit([text, denoise] if encoded else [denoise])
    found["plan"] = time.time() - args.started - found["import"]

    watch = Stopwatch(synchronize=backend.synchronize)
    session.weights.loading = lambda network: watch.apart("load")
    (loop,) = denoise.needs(session.config)
    inputs = session.graph(loop).inputs
    before = State(
        {m: standard_normal(0, m, inputs[f"{m}_context"].type.shape) for m in MODALITIES}
    )
    if encoded:
        text.run(session, before, watch)
    recorded: list[float] = []
    with watch.stage("lower"):
        if backend.device_kind == "cuda":
            from ltx2rt_cuda.device.cuda import Pool

            pool = backend._pool = Pool()  # type: ignore[attr-defined]  # the one that it would make itself
            pool.recording = timed(pool.recording, recorded)
        session.program(loop)
    denoise.run(session, State(before.contexts, max_steps=1), watch)
    found["first_step_after"] = time.time() - args.started
    denoise.run(session, State(before.contexts, max_steps=1), watch)
    first, second = (stage.steps_s[0] for stage in watch.stages if stage.name == denoise.name)
    seconds = {"text": 0.0} | {stage.name: stage.time_s for stage in watch.stages} | watch.apart_s
    found |= {name: seconds[name] for name in ("load", "text", "lower")}
    found |= {"warmup": first - second - sum(recorded), "record": sum(recorded), "step": second}
    device = backend.device().name if backend.device_kind == "cuda" else machine()["device"]
    return found | {
        "loaded_bytes": session.weights.loaded_bytes,
        "device": device,
        "dtype": session.dtype,
    }


def timed(recording: Callable, seconds: list[float]) -> Callable:
    """A context that is `context` and leaves the seconds from its beginning (when the device is
    idle) to its end."""

    @contextmanager
    def context(graph: Any) -> Iterator[None]:
        with recording(graph):
            start = time.perf_counter()
            yield
        seconds.append(time.perf_counter() - start)

    return context


def child(args: argparse.Namespace) -> dict[str, Any]:
    if args.child == "ours":
        return first_step(args)
    files, buffer = weight_files(args.model), bytearray(BUFFER_BYTES)
    start = time.perf_counter()
    return {"bytes": plain_read(files, buffer), "seconds": time.perf_counter() - start}


# --- outside --------------------------------------------------------------------------------------


def run_child(name: str, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    prepare_cache(weight_files(model), args.warm_cache)
    command = [
        sys.executable,
        "-m",
        "benchmarks.cold_start",
        "--child",
        name,
        "--model",
        str(model.resolve()),
    ]
    for flag in ("device", "width", "height", "num_frames", "dtype", "weights_dtype"):
        if (value := getattr(args, flag)) is not None:
            command += [f"--{flag.replace('_', '-')}", str(value)]
    command += ["--compile"] * args.compile + ["--started", repr(time.time())]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: the fresh process failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    rounds = [
        {name: run_child(name, model, args) for name in ("plain", "ours")}
        for _ in range(args.rounds)
    ]
    ours = [found["ours"] for found in rounds]
    loaded = ours[0]["loaded_bytes"]
    rates = [found["plain"]["bytes"] / found["plain"]["seconds"] for found in rounds]
    ratios = [found["load"] / (loaded / rate) for found, rate in zip(ours, rates, strict=True)]
    return {
        "device": ours[0]["device"],
        "dtype": ours[0]["dtype"],
        "loaded_bytes": loaded,
        "plain_bytes_per_s": Spread.of(rates),
        "seconds": {name: Spread.of([found[name] for found in ours]) for name in PHASES},
        "first_step_after_s": Spread.of([found["first_step_after"] for found in ours]),
        "load_ratio_to_plain": Spread.of(ratios),
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description="time from a cold start to the first guided step, by phase"
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="a checkpoint as `generate` takes it")
    model.add_argument(
        "--preset", default="tiny-2.3", choices=("tiny-2.0", "tiny-2.3", "ltx-2.0", "ltx-2.3")
    )
    parser.add_argument(
        "--no-text", action="store_true", help="with --preset: no text encoder, contexts at random"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="with --preset: where it is written (default: a temporary folder)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--weights-dtype", choices=("bfloat16", "float8"), help="of the transformer's blocks"
    )
    parser.add_argument(
        "--width", type=int, default=768, help="of the clip; stage 1 has half of it"
    )
    parser.add_argument("--height", type=int, default=512)
    parser.add_argument("--num-frames", type=int, default=121)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--warm-cache", action="store_true", help="read the files into the page cache first"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    parser.add_argument("--child", choices=("plain", "ours"), help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        found = child(args)
        print(json.dumps(found))
        return found
    facts = {
        "benchmark": "cold_start",
        **machine("torch"),
        "cache": "warm" if args.warm_cache else "cold",
    }
    asked = ("width", "height", "num_frames", "weights_dtype", "compile", "no_text", "rounds")
    facts["asked"] = {name: getattr(args, name) for name in asked} | {
        "model": str(args.model or args.preset)
    }
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.model is None:
            write_model(Path(folder), args.preset, text=not args.no_text)
        facts |= measure(args.model or Path(folder), args)
    print(f"{facts['device']}, {facts['dtype']}; {facts['asked']}; files {facts['cache']}")
    for name, spread in facts["seconds"].items():
        print(f"{name:7} {spread} s")
    print(f"first step done {facts['first_step_after_s']} s after the start of the process")
    gigabytes, rate = facts["loaded_bytes"] / 1e9, facts["plain_bytes_per_s"].median / 1e9
    print(
        f"loading {gigabytes:.3f} GB: {facts['load_ratio_to_plain']} x a plain read, of "
        f"{rate:.2f} GB/s"
    )
    record(args.output, facts)
    return facts


if __name__ == "__main__":
    main()
