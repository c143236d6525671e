"""Denoising against diffusers in the same process, on the same weights and inputs.

Decides shapes and what is compared.

On a CPU, one forward of the transformer in float32, as diffusers' pipeline calls it for text to
video (one timestep per sample, no mask, positions given). The default is a stage 1 of 768 x 512 x
121 frames (1536 video, 126 audio and 1024 text tokens) at 1/4 of the width and 1/6 of the depth.

On a GPU (or with --guided, then by a transformer of that width and depth), guided steps of both
stages of a two-stage request at full size: 4 branches of 1536 video tokens, then 1 branch of 6144.
Ours are the steps that `generate` runs; diffusers' are its pipeline's loop, which runs the
conditional and the unconditional branch in one batch and each other branch by itself, without the
all-ones text mask that the pipeline passes. Both hold the same tensors, drawn on the device. On a
GPU, "without-NAME" is ours without one piece of scheduling of `ltx2rt/scheduling.py`. A run is
several steps, so that what is computed once per request (RoPE tables, for one) is spread as in a
short request. FLOPs are those of our graph. With `--weights-dtype float8` diffusers keeps the
tensors that ours are quantised from, and the floor stays bfloat16's.

    python -m benchmarks.step --output benchmarks/results/step-cpu.json
    python -m benchmarks.step --device cuda --output benchmarks/results/step-h200.json
    python -m benchmarks.step --device cuda --weights-dtype float8
    python -m benchmarks.step --guided --steps 2 --output benchmarks/results/step-guided-cpu.json
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed
from diffusers.pipelines.ltx2.pipeline_ltx2 import rescale_noise_cfg
from ltx2rt_cuda.ops.table import DTYPES
from torch.profiler import ProfilerActivity, profile

from benchmarks.end_to_end import kernel_groups
from benchmarks.kernels import product_rate
from benchmarks.measure import Spread, interleaved, machine, ratios, record
from benchmarks.peer import diffusers_transformer, transformer_tensors
from benchmarks.random_weights import random_session
from ltx2rt.backend import get_backend
from ltx2rt.config import TransformerConfig
from ltx2rt.flags import given_flags
from ltx2rt.models import transformer
from ltx2rt.models.guided_step import CFG, MODALITY, RESCALE, STG
from ltx2rt.models.samplers import trajectory
from ltx2rt.pipelines import pipeline
from ltx2rt.placement.cost import flops
from ltx2rt.run.plan import make_plan
from ltx2rt.scheduling import SWITCHES, VARIABLE
from ltx2rt.session.call import Call
from ltx2rt.session.options import ModelOptions
from ltx2rt.session.session import Session
from ltx2rt.session.weights import RetainedWeights
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.noise import standard_normal
from ltx2rt.weights.presets import preset
from tests.parity import ArraySource, random_params, relative_l2

SAME = 1e-4  # relative L2 under which two implementations compute the same thing in float32


@dataclass(frozen=True)
class Shape:
    generation: str = "2.3"
    batch: int = 1
    layers: int = 8
    heads: int = 8
    head_dim: int = 128
    audio_head_dim: int = 64
    grid: tuple[int, int, int] = (16, 8, 12)  # latent frames, rows, columns
    audio_tokens: int = 126
    text_tokens: int = 1024

    @property
    def transformer(self) -> TransformerConfig:
        return replace(
            preset(f"ltx-{self.generation}").config.transformer,
            num_layers=self.layers,
            num_heads=self.heads,
            audio_num_heads=self.heads,
            head_dim=self.head_dim,
            audio_head_dim=self.audio_head_dim,
        )


MID = Shape()
TINY = replace(
    MID,
    layers=2,
    heads=2,
    head_dim=12,
    audio_head_dim=6,
    grid=(3, 2, 3),
    audio_tokens=5,
    text_tokens=7,
)


class Contest:
    """One transformer, its weights and one set of inputs; a `run` for every implementation."""

    def __init__(self, shape: Shape, seed: int = 0):
        self.shape = shape
        self.config = c = shape.transformer
        rng, batch = np.random.default_rng(seed), shape.batch
        tokens = {"video": int(np.prod(shape.grid)), "audio": shape.audio_tokens}
        widths = {"video": c.width, "audio": c.audio_width}
        self.inputs: dict[str, np.ndarray] = {}
        for name, channels in (("video", c.video_channels), ("audio", c.audio_channels)):
            width = c.caption_channels if c.caption_projection else widths[name]
            self.inputs[f"{name}_latent"] = rng.standard_normal(
                (batch, tokens[name], channels), np.float32
            )
            self.inputs[f"{name}_context"] = rng.standard_normal(
                (batch, shape.text_tokens, width), np.float32
            )
            self.inputs[f"{name}_sigma"] = np.full(batch, 0.7, np.float32)
        rope = LTX2AudioVideoRotaryPosEmbed(c.width, modality="video")
        audio_rope = LTX2AudioVideoRotaryPosEmbed(
            c.audio_width, modality="audio", scale_factors=(4,)
        )
        self.video_positions = rope.prepare_video_coords(1, *shape.grid, "cpu", fps=24.0)
        self.audio_positions = audio_rope.prepare_audio_coords(1, shape.audio_tokens, "cpu")
        feeds = transformer.position_feeds(
            c, self.video_positions[0].numpy(), self.audio_positions[0].numpy()
        )
        structure = transformer.ForwardShape(
            batch,
            tokens["video"],
            tokens["audio"],
            shape.text_tokens,
            transformer.coordinate_counts(feeds),
        )
        self.graph = transformer.trace(c, structure, "float32")
        self.feeds = (
            self.inputs
            | feeds
            | {f"{m}_levels": self.inputs[f"{m}_sigma"][:, None] for m in tokens}
        )
        self.params = random_params(self.graph, seed)

    def diffusers(self) -> Callable[[], dict[str, np.ndarray]]:
        tensors = {name: torch.from_numpy(p.copy()) for name, p in self.params.items()}
        module = diffusers_transformer(self.config, tensors)
        x = {name: torch.from_numpy(value) for name, value in self.inputs.items()}
        batch, factor = self.shape.batch, self.config.timestep_scale
        coords = (p.expand(batch, -1, -1, -1) for p in (self.video_positions, self.audio_positions))
        arguments = dict(zip(("video_coords", "audio_coords"), coords, strict=True))
        arguments |= dict(
            hidden_states=x["video_latent"], audio_hidden_states=x["audio_latent"],
            encoder_hidden_states=x["video_context"],
            audio_encoder_hidden_states=x["audio_context"],
            timestep=x["video_sigma"] * factor, sigma=x["video_sigma"] * factor, return_dict=False,
        )  # fmt: skip

        @torch.inference_mode()
        def run() -> dict[str, np.ndarray]:
            video, audio = module(**arguments)
            return {"video_velocity": video.numpy(), "audio_velocity": audio.numpy()}

        return run

    def ours(self, name: str, device: str) -> Callable[[], dict[str, np.ndarray]]:
        backend = get_backend(name, device)
        weights, program = (
            backend.load([self.graph], ArraySource(self.params)),
            backend.lower(self.graph),
        )
        return lambda: {k: backend.to_host(v) for k, v in program(weights, self.feeds).items()}


def matmul_rate(backends: tuple[str, ...], rows: int, width: int, rounds: int = 9) -> float:
    """The floor's FLOP/s: the fastest float32 product [rows, width] x [width, 4 width] of any
    framework here."""
    rng, shapes = np.random.default_rng(0), ((rows, width), (width, 4 * width))
    a, b = (rng.standard_normal(shape, np.float32) for shape in shapes)
    p, q = torch.from_numpy(a), torch.from_numpy(b)
    runs: dict[str, Callable] = {"torch": lambda: p @ q}
    if "tpu" in backends:
        import jax

        device = jax.devices("cpu")[0]
        x, y = (jax.device_put(array, device) for array in (a, b))
        product = jax.jit(lambda x, y: jax.numpy.matmul(x, y, precision="highest"))
        runs["jax"] = lambda: product(x, y).block_until_ready()
    return 2 * a.size * b.shape[1] / min(map(min, interleaved(runs, rounds, warmup=2).values()))


def measure(
    shape: Shape, backends: tuple[str, ...], device: str, rounds: int, threads: int
) -> dict:
    """All facts of one contest. Raises RuntimeError if two implementations disagree."""
    torch.set_num_threads(threads)
    contest = Contest(shape)
    runs = {"diffusers": contest.diffusers()} | {
        name: contest.ours(name, device) for name in backends
    }
    reference = runs["diffusers"]()
    distances = {}
    for name in backends:
        outputs = runs[name]()
        distances[name] = max(relative_l2(outputs[k], reference[k]) for k in reference)
        if not distances[name] <= SAME:
            raise RuntimeError(
                f"{name} is {distances[name]:.2e} away from diffusers: there is nothing to compare"
            )
    rate = matmul_rate(backends, int(np.prod(shape.grid)), contest.config.width)
    seconds = interleaved(runs, rounds)
    return {
        "shape": asdict(shape),
        "dtype": "float32",
        "flops": flops(contest.graph),
        "matmul_flops_per_s": rate,
        "floor_s": flops(contest.graph) / rate,
        "seconds": {name: Spread.of(s) for name, s in seconds.items()},
        "ratio_to_diffusers": {name: ratios(seconds, name, "diffusers") for name in backends},
        "relative_l2": distances,
        "rounds": rounds,
    }


# --- guided steps at full size --------------------------------------------------------------------

# bfloat16 moves the guided result of a deep random network by some percent; unrelated results are
# 1.4 apart.
ALIKE = {"float32": SAME, "bfloat16": 0.5}
# Halves and heads need several devices, `benchmarks.kernels --stored` times what is decoded in a
# step, and no step has neighbourhoods.
OF_OTHERS = ("halves", "heads", "unpack", "neighbourhood")
WITHOUT = tuple(f"without-{name}" for name in SWITCHES if name not in OF_OTHERS)


class Guided:
    """Guided steps of one stage from one start; a `run` for each implementation returns both
    modalities' latents."""

    def __init__(self, session: Session, stage: Denoise, steps: int):
        self.session, self.stage, self.config = session, stage, session.config.transformer
        self.device = session.backend.torch_device  # type: ignore[attr-defined]
        self.dtype = DTYPES[session.dtype]
        self.sigmas = stage.sigmas[: steps + 1]
        self.steps = len(self.sigmas) - 1
        self.pairs = trajectory("euler", self.sigmas).sigmas
        shape, feeds = stage.shape(session.config, stage.blank)
        self.call = Call(
            "guided-step", shape, steps=self.steps
        )  # no LoRA: both stages share weights
        self.graph = session.graph(replace(self.call, steps=None))
        self.start = {
            m: standard_normal(0, f"start.{m}", state.shape) for m, state in stage.blank.items()
        }
        for m in self.start:
            feeds[f"{m}_context"] = standard_normal(
                0, f"context.{m}", self.graph.inputs[f"{m}_context"].type.shape
            )
        self.feeds = feeds | {"guidance": stage.guidance[0]}

    def ours(self, session: Session) -> Callable[[], dict[str, Any]]:
        start = {f"{m}_latent": x for m, x in self.start.items()}

        def run() -> dict[str, Any]:
            *_, last = session.denoise(self.call, self.feeds | start, {"sigmas": self.pairs})
            session.backend.synchronize()
            return {m: last[f"{m}_latent"] for m in self.start}

        return run

    def in_jax(self) -> Session:
        """A session of the other backend that holds the same weights."""
        session = Session(
            self.session.checkpoint,
            get_backend("tpu", "cpu"),
            replace(self.session.options, backend="tpu"),
        )
        graph, tensors = session.graph(self.call), transformer_tensors(self.session, self.call)
        weights = session.backend.load(
            [graph], ArraySource({name: x.numpy() for name, x in tensors.items()})
        )
        session.weights.held[self.call.weights] = RetainedWeights(weights, graph, shares=False)
        return session

    def without(self, name: str) -> Session:
        """A session of the same weights, whose steps leave out the scheduling `without-NAME`."""
        session = Session(self.session.checkpoint, self.session.backend, self.session.options)
        session.weights = self.session.weights
        os.environ[VARIABLE] = name.removeprefix("without-")
        try:
            self.ours(session)()  # its graph is made, lowered and recorded now
        finally:
            del os.environ[VARIABLE]
        return session

    def diffusers(self) -> Callable[[], dict[str, torch.Tensor]]:
        module = diffusers_transformer(self.config, transformer_tensors(self.session, self.call))
        if self.session.options.compile:
            # no fullgraph: with STG an attention asks a tensor whether all rows are perturbed
            module.compile_repeated_blocks(dynamic=False)
        g, device = self.stage.geometry, self.device
        coords = {
            "video_coords": module.rope.prepare_video_coords(
                1, g.frames, g.rows, g.columns, device, fps=float(g.fps)
            ),
            "audio_coords": module.audio_rope.prepare_audio_coords(1, g.audio_latents, device),
        }
        keyframes = {}
        if self.config.keyframe_vector:  # the first latent frame is of one picture
            first = torch.arange(g.frames * g.rows * g.columns, device=device) < g.rows * g.columns
            keyframes["video_keyframes_mask"] = first[None, :, None]
        context = {
            m: torch.from_numpy(self.feeds[f"{m}_context"]).to(device, self.dtype)
            for m in self.start
        }
        timesteps = torch.from_numpy(self.sigmas * np.float32(self.config.timestep_scale)).to(
            device
        )
        scales = dict(zip(("video", "audio"), self.stage.guidance[0].tolist(), strict=True))
        blocks, branches = list(self.stage.stg_blocks), self.stage.branches

        def velocities(
            x: dict, rows: slice, timestep: torch.Tensor, **branch: Any
        ) -> list[torch.Tensor]:
            """The contexts `rows` in one batch."""
            batch = context["video"][rows].shape[0]
            video, audio = (x[m].to(self.dtype).expand(batch, -1, -1) for m in ("video", "audio"))
            arguments = {
                name: value.expand(batch, -1, -1, -1) for name, value in coords.items()
            } | branch
            found = module(
                hidden_states=video, audio_hidden_states=audio,
                encoder_hidden_states=context["video"][rows],
                audio_encoder_hidden_states=context["audio"][rows], timestep=timestep.expand(batch),
                sigma=timestep.expand(batch), use_cross_timestep=True, return_dict=False,
                **arguments, **keyframes,
            )  # fmt: skip
            return [v.float() for v in found]

        def step(
            x: dict, timestep: torch.Tensor, sigma: float, target: float
        ) -> dict[str, torch.Tensor]:
            found = {"cond": velocities(x, slice(0, 2 if branches.uncond else 1), timestep)}
            if branches.perturbed:
                found["stg"] = velocities(
                    x, slice(0, 1), timestep, spatio_temporal_guidance_blocks=blocks
                )
            if branches.isolated:
                found["isolated"] = velocities(x, slice(0, 1), timestep, isolate_modalities=True)
            after = {}
            for i, (m, scale) in enumerate(scales.items()):
                x0 = {name: x[m] - v[i] * sigma for name, v in found.items()}
                cond = guided = x0["cond"][:1]
                if branches.uncond:
                    guided = guided + (scale[CFG] - 1) * (cond - x0["cond"][1:])
                if branches.perturbed:
                    guided = guided + scale[STG] * (cond - x0["stg"])
                if branches.isolated:
                    guided = guided + (scale[MODALITY] - 1) * (cond - x0["isolated"])
                if scale[RESCALE] > 0:
                    guided = rescale_noise_cfg(guided, cond, guidance_rescale=scale[RESCALE])
                after[m] = x[m] + (x[m] - guided) / sigma * (target - sigma)
            return after

        @torch.inference_mode()
        def run() -> dict[str, torch.Tensor]:
            x = {m: torch.from_numpy(start).to(device) for m, start in self.start.items()}
            for i, (sigma, target) in enumerate(
                zip(self.sigmas[:-1].tolist(), self.sigmas[1:].tolist(), strict=True)
            ):
                x = step(x, timesteps[i], sigma, target)
            self.session.backend.synchronize()
            return x

        return run


def measure_guided_stage(
    contest: Guided, rate: float, rounds: int, others: Sequence[str]
) -> dict[str, Any]:
    """All facts of one stage. others: "tpu", our other backend, and of WITHOUT. Raises RuntimeError
    if the implementations disagree."""
    cuda, peaks, outputs, kernels = contest.device.type == "cuda", {}, {}, {}
    sessions = {"cuda": contest.session} | {
        name: contest.in_jax() if name == "tpu" else contest.without(name) for name in others
    }
    runs = {"diffusers": contest.diffusers()} | {
        name: contest.ours(session) for name, session in sessions.items()
    }
    for (
        name,
        run,
    ) in runs.items():  # diffusers first: what ours keeps for its next run is no cost of theirs
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        backend = sessions.get(name, contest.session).backend
        outputs[name] = {m: backend.to_host(x) for m, x in run().items()}
        if name not in WITHOUT:  # recorded into the same memory as the other
            peaks[name] = contest.session.backend.peak_bytes()
    theirs = outputs["diffusers"]
    distances = {
        name: max(relative_l2(outputs[name][m], theirs[m]) for m in theirs) for name in sessions
    }
    for name, distance in distances.items():
        if not distance <= ALIKE[contest.session.dtype]:
            where = f"{contest.stage.name}, {name}"
            raise RuntimeError(
                f"{where}: {distance:.2e} away from diffusers: there is nothing to compare"
            )
    per_step = {
        name: [s / contest.steps for s in found]
        for name, found in interleaved(runs, rounds).items()
    }
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    for name in ("diffusers", "cuda"):
        with profile(activities=activities) as profiler:
            runs[name]()
        groups = kernel_groups(profiler, cuda).items()
        kernels[name] = {
            group: {key: row[key] / contest.steps for key in ("time_s", "launches")}
            | {"share": row["share"]}
            for group, row in groups
        }
    work = flops(contest.graph)
    speed = {name: work / Spread.of(found).median for name, found in per_step.items()}
    return {
        "branches": contest.stage.branches.names,
        "tokens": {m: x.shape[1] for m, x in contest.start.items()},
        "steps": contest.steps,
        "flops": work,
        "floor_s": work / rate,
        "seconds": {name: Spread.of(found) for name, found in per_step.items()},
        "flops_per_s": speed,
        "share_of_matmul": {name: found / rate for name, found in speed.items()},
        "ratio_to_diffusers": {name: ratios(per_step, name, "diffusers") for name in sessions},
        "relative_l2": distances,
        "launches": {
            name: sum(row["launches"] for row in found.values()) for name, found in kernels.items()
        },
        "kernels": kernels,
        "peak_bytes": peaks,
    }


def lines(stage: str, found: dict[str, Any], launches: str) -> str:
    head = f"{stage}: {len(found['branches'])} branches of {found['tokens']['video']} video tokens"
    text = [f"{head}, {found['flops'] / 1e12:.4g} TFLOP a step, floor {found['floor_s']:.3f} s"]
    for name, seconds in found["seconds"].items():
        peak = found["peak_bytes"].get(name)
        text.append(
            f"  {name:21} {seconds} s, {found['flops_per_s'][name] / 1e12:.4g} TFLOP/s = "
            f"{found['share_of_matmul'][name]:.0%} of matmul"
            + (f", {found['launches'][name]:.0f} {launches}" if name in found["launches"] else "")
            + (f", peak {peak / 1e9:.1f} GB" if peak else "")
        )
    for name, ratio in found["ratio_to_diffusers"].items():
        text.append(f"  {name} {ratio} x diffusers, results {found['relative_l2'][name]:.1e} apart")
    return "\n".join(text)


def measure_guided(args: argparse.Namespace) -> dict[str, Any]:
    name = f"{'tiny' if args.tiny else 'ltx'}-{args.generation}"
    size = dict(
        zip(
            ("width", "height", "num_frames"),
            (128, 64, 17) if args.tiny else args.clip,
            strict=True,
        )
    )
    facts: dict[str, Any] = {
        "preset": name,
        "pipeline": args.pipeline,
        "clip": size,
        "compile": args.compile,
        "rounds": args.rounds,
        "stages": {},
    }
    small = (
        replace(MID, generation=args.generation) if args.device == "cpu" and not args.tiny else None
    )
    with random_session(
        name, small and small.transformer, **given_flags(args, ModelOptions)
    ) as session:
        steps = {"steps": max(args.steps, 3)} if args.pipeline == "two-stage" else {}
        plan = make_plan(session, pipeline(args.pipeline)("a fox", seed=0, **steps, **size))
        contests = [
            Guided(session, replace(stage, sampler="euler"), args.steps)  # LTX-2.5's draws noise
            for stage in plan.stages
            if isinstance(stage, Denoise)
        ]
        facts["device"] = (
            session.backend.device().name if args.device == "cuda" else machine()["device"]
        )
        facts |= {"dtype": session.dtype, "weights_dtype": args.weights_dtype or session.dtype}
        facts["matmul_flops_per_s"] = rate = product_rate(contests[0].device, contests[0].dtype)
        head = f"{facts['device']}; {name}, {args.pipeline}, {facts['dtype']}, "
        head += f"weights in {facts['weights_dtype']}, {size}"
        if small:
            facts["transformer"] = sizes = {
                name: asdict(small)[name] for name in ("layers", "heads", "head_dim")
            }
            head += f", {sizes}"
        print(f"{head}; matmul {rate / 1e12:.3g} TFLOP/s")
        others = [name for name in ("tpu", *WITHOUT) if name in args.backends]
        if args.device == "cuda":
            others = [] if args.compile else list(WITHOUT)
        for contest in contests:
            found = facts["stages"][contest.stage.name] = measure_guided_stage(
                contest, rate, args.rounds, others
            )
            print(
                lines(
                    contest.stage.name, found, "launches" if args.device == "cuda" else "operators"
                ),
                flush=True,
            )
            record(args.output, facts)
    return facts


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description="denoising against diffusers'")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--generation", choices=("2.0", "2.3", "2.5"), default="2.3")
    parser.add_argument("--pipeline", choices=("two-stage", "distilled"), default="two-stage")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="toy shapes, to see that it runs")
    parser.add_argument("--threads", type=int, default=2, help="of a CPU")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    forward = parser.add_argument_group("one forward (on a CPU)")
    help_ = f"guided steps always have cuda, and those on a GPU {', '.join(WITHOUT)}"
    forward.add_argument("--backends", nargs="+", default=["cuda", "tpu"], help=help_)
    forward.add_argument("--batch", type=int, default=1)
    guided = parser.add_argument_group("guided steps (on a GPU)")
    guided.add_argument("--guided", action="store_true", help="on a CPU too")
    guided.add_argument(
        "--clip", type=int, nargs=3, default=(768, 512, 121), metavar=("WIDTH", "HEIGHT", "FRAMES")
    )
    guided.add_argument("--steps", type=int, default=3, help="of each stage in one run")
    guided.add_argument("--dtype", choices=("bfloat16", "float32"))
    guided.add_argument("--weights-dtype", choices=("bfloat16", "float8"), help="of our blocks")
    guided.add_argument(
        "--compile", action="store_true", help="the blocks by Inductor, ours and diffusers'"
    )
    args = parser.parse_args(argv)
    if args.guided or args.device == "cuda":
        torch.set_num_threads(args.threads)
        facts = {"benchmark": "step", **machine("torch", "diffusers")} | measure_guided(args)
        record(args.output, facts)
        return facts
    shape = replace(TINY if args.tiny else MID, generation=args.generation, batch=args.batch)
    facts = {"benchmark": "step", **machine("torch", "jax", "diffusers"), "threads": args.threads}
    facts |= measure(shape, tuple(args.backends), args.device, args.rounds, args.threads)
    rate = f"{facts['matmul_flops_per_s'] / 1e9:.0f} GFLOP/s of matmul"
    print(f"{facts['device']}, {args.threads} threads, load {facts['load']}; float32, {shape}")
    print(f"floor     {facts['floor_s']:.3f} s: {facts['flops'] / 1e9:.0f} GFLOP at {rate}")
    for name, spread in facts["seconds"].items():
        ratio = facts["ratio_to_diffusers"].get(name)
        print(f"{name:9} {spread} s" + (f", {ratio} x diffusers" if ratio else ""))
    record(args.output, facts)
    return facts


if __name__ == "__main__":
    main()
