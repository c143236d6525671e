"""Seconds of a training step of a LoRA on weights drawn on the device: its share of the rate of a
product, and its memory against `plan --train`.

Every size of clip is one row: latents and noise are random, the graph, the optimiser and memory are
those of `train run`. A step is one batch, its gradients and the update. With `--max-memory` the
weights that have no room come from host memory.

    python -m benchmarks.train --output benchmarks/results/train.json
    python -m benchmarks.train --preset tiny-2.3 --device cpu --sizes 64x64x9 --rank 4 --rounds 2
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.measure import Spread, interleaved, machine, record
from benchmarks.race import drawn, timed
from benchmarks.random_weights import random_session
from ltx2rt.backend import AdamW
from ltx2rt.commands.options import PRESETS
from ltx2rt.flags import add_flags, given_flags
from ltx2rt.models.geometry import Geometry
from ltx2rt.run.training_estimate import FPS
from ltx2rt.session.options import ModelOptions
from ltx2rt.session.session import Session
from ltx2rt.train.data import Bucket, parse_bucket
from ltx2rt.train.recipe import MODES
from ltx2rt.train.step import Step, in_words

PRODUCT = (6144, 4096, 16384)  # rows, contracted, columns


def feeds(step: Step) -> dict[str, np.ndarray]:
    """Inputs of a batch: all tokens are noised, to one level."""
    draw, found = np.random.default_rng(0), {}
    for name, value in step.graph.inputs.items():
        shape = value.type.shape
        if name in step.tables:
            found[name] = step.tables[name]
        elif name.endswith("_noised"):
            found[name] = np.ones(shape, np.int32)
        elif name.endswith("_sigma"):
            found[name] = np.full(shape, 0.5, np.float32)
        elif name.endswith("_mask"):
            found[name] = np.zeros(shape, np.float32)
        else:
            found[name] = draw.standard_normal(shape, np.float32)
    return found


def row(session: Session, bucket: Bucket, args: argparse.Namespace, rate: float) -> dict[str, Any]:
    """Figures of one size of clip. rate: FLOP/s of a product."""
    size = bucket.width, bucket.height, bucket.frames
    geometry = Geometry.of(session.config, *size, FPS)
    step = Step(session, geometry, ("video", "audio"), 1, MODES["t2v"].targets, args.rank)
    began = time.perf_counter()
    trainer, batch = step.trainer(0, AdamW()), feeds(step)

    def train() -> None:
        trainer.accumulate(batch, {"video_loss": 1.0, "audio_loss": 1.0})
        trainer.update(1e-4)
        session.backend.synchronize()

    train()
    first_s = time.perf_counter() - began
    taken = Spread.of(interleaved({"": train}, args.rounds)[""])
    flop, planned = step.cost().flops, step.memory
    share = flop / taken.median / rate
    peak = session.backend.peak_bytes()
    shape = "x".join(map(str, size))
    print(
        f"{shape}: {taken} s a step, {flop / 1e12:.4g} TFLOP, {share:.0%} of a product's rate; "
        f"planned {planned.total / 1e9:.3g} GB ({in_words(planned)})"
        + (f", peak {peak / 1e9:.3g} GB" if peak else ""),
        flush=True,
    )
    return {
        "clip": shape, "s": taken, "load_and_first_step_s": first_s, "flop": flop,
        "share_of_product": share, "planned_bytes": planned.total,
        "streamed_bytes": planned.streamed, "peak_bytes": peak,
    }  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    options = given_flags(args, ModelOptions)
    facts: dict[str, Any] = {"benchmark": "train", **machine("torch"), "rows": []}
    facts |= {"preset": args.preset, "rank": args.rank, "max_memory": options.get("max_memory")}
    with random_session(args.preset, **options) as session:
        device = session.backend.device()
        rows, inner, columns = (max(16, n // args.shrink) for n in PRODUCT)
        kind = torch.device(session.backend.device_kind)
        x, weight = drawn(kind, rows, inner), drawn(kind, columns, inner)
        product_s = timed(lambda: F.linear(x, weight), kind, args.rounds).median
        rate = 2 * rows * inner * columns / product_s
        print(f"{device.name}: a product alone runs at {rate / 1e12:.4g} TFLOP/s", flush=True)
        facts |= {"device": device.name, "dtype": session.dtype, "product_flop_per_s": rate}
        for bucket in args.sizes:
            gc.collect()  # a trainer is part of a cycle: the last one's weights would stay
            facts["rows"].append(row(session, bucket, args, rate))
            record(args.output, facts)
    return facts


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="time and memory of a training step of a LoRA")
    parser.add_argument("--preset", default="ltx-2.3", choices=PRESETS)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add_flags(parser, ModelOptions, only=("dtype", "weights_dtype", "max_memory"))
    parser.add_argument(
        "--sizes", nargs="+", type=parse_bucket, metavar="WxHxF", help="of clips, each a row",
        default=[parse_bucket("768x512x49"), parse_bucket("768x512x121")],
    )  # fmt: skip
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shrink", type=int, default=1, help="divides the product that is timed")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    return measure(parser.parse_args(argv))


if __name__ == "__main__":
    main()
