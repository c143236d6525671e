"""Collectives of one denoise step, read off the placed graph, against the floor and the field. No
device is needed.

A collective is large if it carries activations in the compute dtype, small if it carries float32
statistics. The floor of tensor parallelism by named axes: of each block 4 large (self-attention,
text attention, both cross-attentions together, feed-forward; video with audio) and 3 small (q with
k of all attentions that start together), and nothing is gathered. The field's best-known runtime
executes 20 all-reduces a block and 28 all-gathers a forward.

    python -m benchmarks.collectives --devices 4 --output benchmarks/results/collectives.json
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, record
from ltx2rt.graph import Graph
from ltx2rt.instruments.make import standing_for
from ltx2rt.pipelines.two_stage import TwoStage
from ltx2rt.placement.cost import by_kind, exchanges
from ltx2rt.placement.devices import device_kind
from ltx2rt.run.estimate import datasheet_session
from ltx2rt.run.plan import make_plan
from ltx2rt.session.options import ModelOptions

FLOOR = {"large_per_block": 4, "small_per_block": 3, "all_gathers": 0}
FIELD = {"all_reduces_per_block": 20, "all_gathers": 28}  # sglang 0.5.23, tensor parallelism over 4


def count(graph: Graph, num_blocks: int, compute: str) -> dict[str, Any]:
    """Executions and bytes (handed in by one device, received by it) of one step. compute: the
    dtype of activations."""
    found = by_kind(exchanges(graph))
    reduces = [
        (node.inputs[0].type.dtype, times)
        for node, times in graph.walk()
        if node.op == "all_reduce"
    ]
    large = sum(times for dtype, times in reduces if dtype == compute)
    small = sum(times for _, times in reduces) - large
    return {
        "large_per_block": large / num_blocks,
        "small_per_block": small / num_blocks,
        "all_gathers": found["all_gather"].count if "all_gather" in found else 0,
        "count": {kind: t.count for kind, t in found.items()},
        "bytes": {kind: t.bytes for kind, t in found.items()},
        "received_bytes": {kind: t.received_bytes for kind, t in found.items()},
    }


def measure(preset: str, devices: int, width: int, height: int, num_frames: int) -> dict[str, Any]:
    request = TwoStage("a plan", width=width, height=height, num_frames=num_frames, seed=0)
    with standing_for(preset, ModelOptions("", Path())) as options:
        session = datasheet_session(options, device_kind("h100-80gb"), devices)
        blocks, plan = session.config.transformer.num_layers, make_plan(session, request)
        loops = {
            stage.name: call
            for stage in plan.stages
            for call in stage.needs(session.config)
            if call.steps
        }
        steps = {name: session.graph(replace(call, steps=None)) for name, call in loops.items()}
        stages = {name: count(step, blocks, session.dtype) for name, step in steps.items()}
    clip = f"{width}x{height}x{num_frames}"
    return {
        "preset": preset,
        "devices": devices,
        "clip": clip,
        "stages": stages,
        "floor": FLOOR,
        "field": FIELD,
    }


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(
        description="collectives of one denoise step against the floor"
    )
    parser.add_argument("--preset", default="ltx-2.3")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--height", type=int, default=512)
    parser.add_argument("--num-frames", type=int, default=121)
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    args = parser.parse_args(argv)
    facts = {"benchmark": "collectives", **machine()}
    facts |= measure(args.preset, args.devices, args.width, args.height, args.num_frames)
    print(f"{args.preset}, {facts['clip']}, tensor={args.devices}, one step, per device")
    print(
        f"{'':10} {'large/block':>11} {'small/block':>11} {'all-gathers':>11} {'GB in':>7} "
        f"{'GB received':>11}"
    )
    for name, found in facts["stages"].items():
        sums = (sum(found[key].values()) / 1e9 for key in ("bytes", "received_bytes"))
        numbers = (found[key] for key in FLOOR)
        print("{:10} {:>11g} {:>11g} {:>11} {:>7.2f} {:>11.2f}".format(name, *numbers, *sums))
    print("{:10} {:>11} {:>11} {:>11}".format("floor", *FLOOR.values()))
    print(f"{'field':10} {FIELD['all_reduces_per_block']:>11} in all {FIELD['all_gathers']:>16}")
    record(args.output, facts)
    return facts


if __name__ == "__main__":
    main()
