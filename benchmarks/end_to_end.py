"""A whole two-stage request on weights drawn on the devices: time of every phase, and how far
repeats lie apart.

Decides the timed part: from the prompt to the last frame and the last audio sample on the host,
without loading and without the MP4 encoder (so that it runs without PyAV). Every repetition is the
same request with the same seed; their distances from the first are the floor for any other
comparison. Weights are random, so pictures are noise.

With `--peer` diffusers' pipelines run the same request on the same tensors, as they are, compiled
or in float8 (`benchmarks.peer` lists its parts): each repetition of ours is followed by one of theirs, and
the ratio is taken within that round.

    python -m benchmarks.end_to_end --output benchmarks/results/end-to-end.json
    python -m benchmarks.end_to_end --peer diffusers
    torchrun --nproc-per-node 4 -m benchmarks.end_to_end --profile-kernels
    python -m benchmarks.end_to_end --preset tiny-2.3 --device cpu --width 128 --height 64
    --num-frames 17 --steps 2
"""

from __future__ import annotations

import argparse
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import Spread, machine, ratios, record
from benchmarks.random_weights import random_session
from ltx2rt.commands.options import PRESETS
from ltx2rt.flags import add_flags, given_flags
from ltx2rt.instruments.compare import PSNR_CAP_DB, correlation, luma, ssim
from ltx2rt.media.mp4 import to_rgb8
from ltx2rt.pipelines import FIRST, pipeline, pipelines
from ltx2rt.pipelines.groups.sound import SoundFrom
from ltx2rt.pipelines.request import Request
from ltx2rt.pipelines.two_stage import TwoStage
from ltx2rt.placement.devices import DeviceKind, device_kinds
from ltx2rt.run.plan import Plan, make_plan
from ltx2rt.run.run import run_stages, warm_up
from ltx2rt.session.options import ModelOptions
from ltx2rt.session.session import Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.stage import State

PROMPT = "a red fox walks through a snowy forest at dawn"
# diffusers as it is, with compiled blocks, and with those in float8 by torchao as well.
PEERS = ("diffusers", "diffusers-compiled", "diffusers-float8")
# Kernel names, in lower case; the first group that matches has it. The rest is pointwise:
# elementwise, reductions, copies, and whatever Inductor fused of them.
GROUPS = {
    "all-reduce": r"all_?reduce",
    "all-gather": r"all_?gather",
    "transfer": r"memcpy|memset|sendrecv|c10d::|nccl",
    "attention": r"flash|fmha|sdpa|attention",
    "convolution": r"conv|fprop|cudnn",
    "GEMM": r"gemm|cutlass|cublas|nvjet|splitk|\b(?:aten::)?(?:addmm|mm|bmm|baddbmm|linear|matmul)\b",
}


@dataclass(frozen=True)
class Clip:
    """The product of one repetition: u8[F, H, W, 3] and f32[2, N]; frames are empty where this rank
    has none."""

    frames: np.ndarray
    waveform: np.ndarray


def group_of(kernel: str) -> str:
    return next(
        (group for group, pattern in GROUPS.items() if re.search(pattern, kernel.lower())),
        "pointwise",
    )


class KernelWatch(Stopwatch):
    """A stopwatch that also counts the device's kernels in each stage: time, share and launches
    of each group."""

    def __init__(self, device_kind: str, **settings: Any):
        super().__init__(**settings)
        self.cuda = device_kind == "cuda"
        self.kernels: dict[str, dict[str, dict[str, Any]]] = {}

    @contextmanager
    def stage(self, name: str, *steps: Any, **how: Any) -> Iterator[Callable[..., None]]:
        activities = [ProfilerActivity.CUDA] if self.cuda else [ProfilerActivity.CPU]
        with profile(activities=activities) as profiler, super().stage(name, *steps, **how) as done:
            yield done
        self.kernels[name] = kernel_groups(profiler, self.cuda)


def kernel_groups(profiler: profile, cuda: bool) -> dict[str, dict[str, Any]]:
    """Time, share and launches of each group of kernels that ran on the GPU, and the same of the
    three longest of it by name; on a CPU, of operators."""
    found: dict[str, dict[str, Any]] = {}
    for event in profiler.events() or ():
        if getattr(event, "is_user_annotation", False):
            continue
        if cuda:
            if event.device_type != DeviceType.CUDA:
                continue
            microseconds = event.time_range.elapsed_us()
        else:  # an operator's own time, without those that it calls
            microseconds = event.self_cpu_time_total
        group = found.setdefault(
            group_of(event.name), {"time_s": 0.0, "launches": 0, "longest": {}}
        )
        name = event.name[:120]
        kernel = group["longest"].setdefault(name, {"time_s": 0.0, "launches": 0})
        for row in (group, kernel):
            row["time_s"] += microseconds / 1e6
            row["launches"] += 1
    total = sum(row["time_s"] for row in found.values())
    for row in found.values():
        row["share"] = row["time_s"] / total if total else 0.0
        row["longest"] = dict(by_time(row["longest"])[:3])
    return dict(by_time(found))


def by_time(rows: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return sorted(rows.items(), key=lambda item: -item[1]["time_s"])


def run_once(
    session: Session, plan: Plan, watch: Stopwatch, max_steps: int | None = None
) -> tuple[Clip, float]:
    """One request: its clip, and the seconds from prompt to clip. max_steps: of each stage, None:
    all."""
    start, state = watch.clock(), State(max_steps=max_steps)
    run_stages(session, plan, watch, state)
    chunks = [to_rgb8(chunk) for video in state.frames for chunk in video]
    session.backend.synchronize()
    frames = np.concatenate(chunks) if chunks else np.zeros((0, 1, 1, 3), np.uint8)
    waveform = np.zeros((2, 0), np.float32) if state.waveforms is None else state.waveforms[0]
    return Clip(frames, waveform), watch.clock() - start


def phases(watch: Stopwatch, request_s: float) -> dict[str, float]:
    """Seconds by phase: the whole, every stage, and the mean step of those with steps."""
    found = {"request": request_s}
    for stage in watch.stages:
        found[stage.name] = stage.time_s
        if stage.name.startswith("stage"):
            found[f"{stage.name} step"] = stage.time_s / len(stage.steps_s)
    return found


def distance(a: Clip, b: Clip) -> dict[str, float | None]:
    """Distance of `b` from `a`: PSNR in dB over all 8-bit samples (200: identical), mean SSIM of
    luma, audio correlation."""
    squared = sum(
        int(((x.astype(np.int32) - y) ** 2).sum()) for x, y in zip(a.frames, b.frames, strict=True)
    )
    scores = [ssim(luma(x), luma(y)) for x, y in zip(a.frames, b.frames, strict=True)]
    return {
        "psnr_db": 10 * math.log10(255**2 * a.frames.size / squared) if squared else PSNR_CAP_DB,
        "ssim": float(np.mean(scores)),
        "audio_corr": correlation(a.waveform.astype(np.float64), b.waveform.astype(np.float64)),
    }


def summary(runs: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """For every phase: mean, spread (largest less smallest) and every run, in seconds."""
    columns = {name: [run[name] for run in runs] for name in runs[0]}
    return {
        n: {"mean": float(np.mean(c)), "spread": max(c) - min(c), "runs": c}
        for n, c in columns.items()
    }


def by_datasheet(session: Session, plan: Plan, name: str) -> dict[str, float] | None:
    """Seconds of a step of each stage by the data sheet, if there is one of this device."""
    kind: DeviceKind | None = next(
        (k for n, k in device_kinds().items() if n.split("-")[0] in name.lower()), None
    )
    return {c.name: c.time_s(kind) for c in session.memory.costs(plan.stages)} if kind else None


def table(facts: dict[str, Any]) -> str:
    names = {
        "stage1": "denoise",
        "stage1 step": "  per step",
        "stage2": "refinement",
        "stage2 step": "  per step",
    }
    lines = [f"{'seconds':<12} {'mean':>8} {'spread':>8}  every run"]
    for name, row in facts["seconds"].items():
        runs = " ".join(f"{x:.3f}" for x in row["runs"])
        lines.append(
            f"{names.get(name, name):<12} {row['mean']:>8.3f} {row['spread']:>8.3f}  {runs}"
        )
    if peak := facts.get("peak_bytes"):
        lines.append(f"peak memory {peak / 1e9:.1f} GB of one device")
    if peer := facts.get("peer"):
        lines.append(
            f"diffusers {peer['seconds']['diffusers']} s; ours {peer['ratio_to_diffusers']} x "
            "diffusers"
        )
    for what in ("repeats", "against", "from diffusers"):
        for i, d in enumerate(facts.get(what, ())):
            audio = "none" if d["audio_corr"] is None else f"{d['audio_corr']:.6f}"
            lines.append(
                f"{what} {i + 1}: PSNR {d['psnr_db']:.1f} dB, SSIM {d['ssim']:.6f}, audio {audio}"
            )
    for stage, groups in facts.get("kernels", {}).items():
        lines.append(f"kernels of {stage} (one step, where it has steps)")
        for group, row in groups.items():
            lines.append(
                f"  {group:<12} {row['time_s'] * 1e3:>10.3f} ms {row['share']:>6.1%} "
                f"{row['launches']:>7} launches"
            )
    return "\n".join(lines)


def asked(args: argparse.Namespace) -> Request:
    """The request; beside a peer its sound is of the second stage, as diffusers' two calls have it."""
    type_ = pipeline(args.pipeline)
    request = type_(PROMPT, **given_flags(args, type_))
    return replace(request, audio_from="stage2") if args.peer and type_.has(SoundFrom) else request


def measure(args: argparse.Namespace) -> dict[str, Any]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    mesh = {"tensor": world} if world > 1 else {}
    request = asked(args)
    with random_session(args.preset, mesh=mesh, **given_flags(args, ModelOptions)) as session:
        plan = make_plan(session, request)
        session.memory.require(plan.stages, warm=True)
        return _measure(session, plan, args)


def _measure(session: Session, plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    backend, clip, options = session.backend, plan.clip, session.options
    device = backend.device()
    facts: dict[str, Any] = {
        "benchmark": "end_to_end",
        **machine("torch", *(["diffusers"] if args.peer else [])),
    }
    facts |= {
        "device": f"{device.name} x {math.prod(backend.mesh.values())}",
        "preset": args.preset,
        "clip": f"{clip.width}x{clip.height}x{clip.num_frames}",
        "pipeline": clip.request.name,
        "steps": [stage.steps() for stage in plan.stages if isinstance(stage, Denoise)],
        "dtype": session.dtype,
        "weights_dtype": options.weights_dtype or session.dtype,
        "mesh": dict(backend.mesh),
        "profile": session.placement.profile.name,
        "compile": options.compile,
        "memory": session.memory.line(plan.stages) or session.memory.mode,
        "paper_step_s": by_datasheet(session, plan, device.name),
    }

    def say(line: str) -> None:
        if backend.is_main:
            print(line, flush=True)

    def write() -> None:
        if backend.is_main and args.output:
            record(args.output, facts)

    head = (
        "device",
        "preset",
        "pipeline",
        "clip",
        "steps",
        "dtype",
        "weights_dtype",
        "mesh",
        "profile",
    )
    say(", ".join(f"{name} {facts[name]}" for name in head))
    start = time.perf_counter()
    warm_up(session, plan)
    facts["load_and_warmup_s"] = time.perf_counter() - start
    say(f"weights drawn and one step of each stage: {facts['load_and_warmup_s']:.1f} s")
    peer, theirs, once_s, rounds = None, [], [], {"cuda": [], "diffusers": []}
    if args.peer:
        from benchmarks.peer import Peer

        peer = Peer(session, plan, args.peer)
        for _ in range(2):  # the first compiles, where anything is compiled
            start = time.perf_counter()
            peer.run(max_steps=1)
            once_s.append(time.perf_counter() - start)
        say(f"{args.peer}: one step of each stage {once_s[0]:.1f} s, again {once_s[1]:.1f} s")
    runs, clips = [], []
    for i in range(args.repeats):
        watch = Stopwatch(synchronize=backend.synchronize)
        clip, request_s = run_once(session, plan, watch)
        runs.append(phases(watch, request_s))
        clips.append(clip)
        say(f"run {i + 1}: {request_s:.3f} s")
        facts["seconds"] = summary(runs)
        if peer is None:
            facts["peak_bytes"] = backend.peak_bytes()
        else:
            start = time.perf_counter()
            theirs = [peer.run()]
            rounds["cuda"].append(request_s)
            rounds["diffusers"].append(time.perf_counter() - start)
            say(f"diffusers {i + 1}: {rounds['diffusers'][-1]:.3f} s")
            found = {name: Spread.of(seconds) for name, seconds in rounds.items()}
            facts["peer"] = {
                "kind": args.peer,
                "compile_s": once_s[0] - once_s[1],
                "seconds": found,
                "ratio_to_diffusers": ratios(rounds, "cuda", "diffusers"),
            }
        write()
    if backend.is_main:
        facts["repeats"] = [distance(clips[0], clip) for clip in clips[1:]]
        facts["from diffusers"] = [distance(clip, clips[0]) for clip in theirs]
        if args.against:
            kept = np.load(args.against)
            facts["against"] = [distance(Clip(kept["frames"], kept["waveform"]), clips[0])]
        if args.save:
            np.savez(args.save, frames=clips[0].frames, waveform=clips[0].waveform)
    if args.profile_kernels:
        for call in plan.stages[0].needs(
            session.config
        ):  # what draws an offloaded encoder is no kernel of its stage
            session.load(call)
        kernels = KernelWatch(backend.device_kind, synchronize=backend.synchronize)
        run_once(session, plan, kernels, max_steps=1)
        facts["kernels"] = kernels.kernels
    write()
    say(table(facts))
    return facts


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description="time of a whole request, by phase")
    parser.add_argument("--preset", default="ltx-2.3", choices=PRESETS)
    parser.add_argument("--pipeline", choices=tuple(pipelines()), default=FIRST)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    model = (
        "dtype",
        "weights_dtype",
        "compile",
        "profile",
        "max_memory",
        "video_decoder",
    )
    add_flags(parser, ModelOptions, only=model)
    add_flags(parser, TwoStage, only=("width", "height", "num_frames", "steps", "step_plan"))
    parser.set_defaults(width=768, height=512)  # the size of every figure before
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--peer", choices=PEERS, help="after each repetition the same request by this one"
    )
    parser.add_argument(
        "--profile-kernels", action="store_true", help="one more run, of one step a stage, profiled"
    )
    parser.add_argument("--save", type=Path, metavar="FILE.npz", help="keep the first run's clip")
    parser.add_argument(
        "--against", type=Path, metavar="FILE.npz", help="compare the first run with a kept clip"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    args = parser.parse_args(argv)
    if args.peer and "WORLD_SIZE" in os.environ:
        parser.error("--peer shares the weights of one device; leave torchrun out")
    return measure(args)


if __name__ == "__main__":
    main()
