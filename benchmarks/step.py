"""The denoise transformer against diffusers' in the same process, on the same weights and inputs.

Decides shapes and what is compared: one forward in float32 of a text-to-video step, as diffusers' pipeline calls it
(one timestep per sample, no mask, positions given). The default is a stage 1 of 768 x 512 x 121 frames (1536 video,
126 audio and 1024 text tokens) at 1/4 of the width and 1/6 of the depth.

    python -m benchmarks.step --output benchmarks/results/step-cpu.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed

from benchmarks.measure import Spread, interleaved, machine, ratios, record
from ltx2rt.backend import get_backend
from ltx2rt.models import transformer
from ltx2rt.placement.cost import flops
from ltx2rt.testing import ArraySource, random_params, relative_l2
from ltx2rt.weights.configs import diffusers_transformer_json
from ltx2rt.weights.names import to_diffusers
from ltx2rt.weights.presets import preset

SAME = 1e-4  # relative L2 under which two implementations compute the same thing


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


MID = Shape()
TINY = replace(MID, layers=2, heads=2, head_dim=12, audio_head_dim=6, grid=(3, 2, 3), audio_tokens=5, text_tokens=7)


class Contest:
    """One transformer, its weights and one set of inputs; a `run` for every implementation."""

    def __init__(self, shape: Shape, seed: int = 0):
        self.shape = shape
        self.config = replace(
            preset(f"ltx-{shape.generation}").config.transformer,
            num_layers=shape.layers,
            num_heads=shape.heads,
            audio_num_heads=shape.heads,
            head_dim=shape.head_dim,
            audio_head_dim=shape.audio_head_dim,
        )
        c, rng, batch = self.config, np.random.default_rng(seed), shape.batch
        tokens = {"video": int(np.prod(shape.grid)), "audio": shape.audio_tokens}
        widths = {"video": c.width, "audio": c.audio_width}
        self.inputs: dict[str, np.ndarray] = {}
        for name, channels in (("video", c.video_channels), ("audio", c.audio_channels)):
            width = c.caption_channels if c.caption_projection else widths[name]
            self.inputs[f"{name}_latent"] = rng.standard_normal((batch, tokens[name], channels), np.float32)
            self.inputs[f"{name}_context"] = rng.standard_normal((batch, shape.text_tokens, width), np.float32)
            self.inputs[f"{name}_sigma"] = np.full(batch, 0.7, np.float32)
        rope = LTX2AudioVideoRotaryPosEmbed(c.width, modality="video")
        audio_rope = LTX2AudioVideoRotaryPosEmbed(c.audio_width, modality="audio", scale_factors=(4,))
        self.video_positions = rope.prepare_video_coords(1, *shape.grid, "cpu", fps=24.0)
        self.audio_positions = audio_rope.prepare_audio_coords(1, shape.audio_tokens, "cpu")
        feeds = transformer.position_feeds(c, self.video_positions[0].numpy(), self.audio_positions[0].numpy())
        structure = transformer.Structure(
            batch, tokens["video"], tokens["audio"], shape.text_tokens, transformer.coordinate_counts(feeds)
        )
        self.graph = transformer.trace(c, structure, "float32")
        self.feeds = self.inputs | feeds | {f"{m}_levels": self.inputs[f"{m}_sigma"][:, None] for m in tokens}
        self.params = random_params(self.graph, seed)

    def diffusers(self) -> Callable[[], dict[str, np.ndarray]]:
        sizes = {k: v for k, v in diffusers_transformer_json(self.config).items() if not k.startswith("_")}
        with torch.device("meta"):
            module = LTX2VideoTransformer3DModel(**sizes).eval()
        state = {to_diffusers("transformer", name): torch.from_numpy(p.copy()) for name, p in self.params.items()}
        module.load_state_dict(state, assign=True)
        x = {name: torch.from_numpy(value) for name, value in self.inputs.items()}
        batch, factor = self.shape.batch, self.config.timestep_scale
        coords = (p.expand(batch, -1, -1, -1) for p in (self.video_positions, self.audio_positions))
        arguments = dict(zip(("video_coords", "audio_coords"), coords, strict=True))
        arguments |= dict(
            hidden_states=x["video_latent"], audio_hidden_states=x["audio_latent"],
            encoder_hidden_states=x["video_context"], audio_encoder_hidden_states=x["audio_context"],
            timestep=x["video_sigma"] * factor, sigma=x["video_sigma"] * factor, return_dict=False,
        )  # fmt: skip

        @torch.inference_mode()
        def run() -> dict[str, np.ndarray]:
            video, audio = module(**arguments)
            return {"video_velocity": video.numpy(), "audio_velocity": audio.numpy()}

        return run

    def ours(self, name: str, device: str) -> Callable[[], dict[str, np.ndarray]]:
        backend = get_backend(name, device)
        weights, program = backend.load([self.graph], ArraySource(self.params)), backend.lower(self.graph)
        return lambda: {k: backend.to_host(v) for k, v in program(weights, self.feeds).items()}


def matmul_rate(backends: tuple[str, ...], rows: int, width: int, rounds: int = 9) -> float:
    """The floor's FLOP/s: the fastest float32 product [rows, width] x [width, 4 width] of any framework here."""
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


def measure(shape: Shape, backends: tuple[str, ...], device: str, rounds: int, threads: int) -> dict:
    """All facts of one contest. Raises RuntimeError if two implementations disagree."""
    torch.set_num_threads(threads)
    contest = Contest(shape)
    runs = {"diffusers": contest.diffusers()} | {name: contest.ours(name, device) for name in backends}
    reference = runs["diffusers"]()
    distances = {}
    for name in backends:
        outputs = runs[name]()
        distances[name] = max(relative_l2(outputs[k], reference[k]) for k in reference)
        if not distances[name] <= SAME:
            raise RuntimeError(f"{name} is {distances[name]:.2e} away from diffusers: there is nothing to compare")
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


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description="the denoise transformer against diffusers'")
    parser.add_argument("--device", choices=("cpu",), default="cpu")
    parser.add_argument("--backends", nargs="+", default=["cuda", "tpu"])
    parser.add_argument("--generation", choices=("2.0", "2.3"), default="2.3")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="toy shapes, to see that it runs")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    args = parser.parse_args(argv)
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
