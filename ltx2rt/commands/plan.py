"""`ltx2rt plan`: what a run would cost on devices that need not be here, as text or JSON."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ltx2rt.atomic_file import check_outputs
from ltx2rt.commands.options import json_flag, planned_flags, planned_options
from ltx2rt.errors import InputError, singular
from ltx2rt.flags import add_flags, given_flags, groups
from ltx2rt.graph.encodings import ENCODINGS
from ltx2rt.instruments.make import standing_for
from ltx2rt.pipelines import pipeline
from ltx2rt.placement.mesh import in_words
from ltx2rt.placement.plan import StageCost, peak
from ltx2rt.run import training_estimate
from ltx2rt.run.estimate import Devices, Estimate, estimate, to_json
from ltx2rt.run.trace_events import write_trace
from ltx2rt.run.training_estimate import estimate_step, training_flags, training_step

EXAMPLE = """\
examples:
  ltx2rt plan --preset ltx-2.5 --device-kind h100 --devices 2
  ltx2rt plan --preset ltx-2.3 --device-kind h200 --train 768x512x49
"""


def to_text(found: Estimate, verbose: bool = False) -> str:
    """Lines about time, memory and price; verbose: also each stage, the rates and the notes."""
    clip, session, kind, worst = found.plan.clip, found.session, found.kind, peak(found.costs)
    encoding = ENCODINGS.get(session.options.weights_dtype or "")
    weights = f", weights in {encoding.name}" if encoding else ""
    rates = ""
    if encoding and encoding.product:
        rates = f", in {encoding.name} / {kind.quantised_flops_per_s / 1e12:.4g} T/s"
    mesh = session.backend.mesh
    height, width = clip.size_px
    size = f"{width}x{height}, " if width else ""
    size += "at most " if clip.request.auto_duration else ""
    rows: dict[Any, list[StageCost]] = {}  # those of segments that do the same are one
    for c in found.costs:
        rows.setdefault((c.label, c.steps, c.flops, c.streamed_bytes), []).append(c)
    wide = max(14, *(len(f"{k[0]} x{len(of)}" if len(of) > 1 else k[0]) for k, of in rows.items()))
    table = [
        f"{clip.request.name}, {size}{clip.clip_frames} frames, {session.dtype}{weights}, "
        f"on {found.devices} x {kind.name} ({in_words(mesh)}, profile "
        f"{session.placement.profile.name}); per device, estimated:",
        "",
        f"{'stage':<{wide}} {'steps':>5} {'weights':>9} {'activations':>11} {'streamed':>9} "
        f"{'TFLOP/step':>10} {'time/step':>10} {'waits':>8}  collectives/step",
    ]
    for same in rows.values():
        c = max(same, key=lambda c: c.peak_bytes)
        label = f"{c.label} x{len(same)}" if len(same) > 1 else c.label
        table.append(
            f"{label:<{wide}} {c.steps:>5} {c.weights_bytes / 1e9:>6.2f} GB "
            f"{c.activation_bytes / 1e9:>8.2f} GB {c.streamed_bytes / 1e9:>6.2f} GB "
            f"{c.flops / 1e12:>10.1f} {c.time_s(kind):>8.3f} s {c.waits_s(kind):>6.3f} s  "
            f"{c.traffic}"
        )
    verdict = "fits" if found.fits else "does NOT fit"
    most = session.asked.max_memory
    memory_gb = min(kind.memory_bytes / 1e9, most or math.inf)
    reserve_gb = memory_gb - session.backend.device().room_bytes(most) / 1e9
    lines = [*table, ""] if verbose else table[:1]
    lines += [
        f"memory: {verdict}: {worst.name} needs {worst.peak_bytes / 1e9:.1f} GB of "
        f"{memory_gb:.0f} GB"
        + f", where {reserve_gb:.1f} GB are kept in reserve" * (reserve_gb >= 0.05)
        + f"; try {found.advice}" * (not found.fits),
        f"estimated time: {found.time_s:.2f} s in all, {_basis(found)}",
    ]
    if verbose:
        lines[-1] += (
            f"; a step is max(FLOP / {kind.flops_per_s / 1e12:.4g} T/s{rates}, weights / "
            f"{kind.memory_bytes_per_s / 1e12:.3g} TB/s){' + exchanges' * bool(mesh)}"
        )
    if line := session.memory.line(found.plan.stages):
        lines.insert(-1, line)
    if found.price_per_clip is not None:
        lines.append(
            f"price: {found.price_per_clip:.4f} a clip, {found.clips_per_hour:.0f} clips an hour"
        )
    if verbose:
        lines += [_exchanges(found)] * bool(mesh) + list(found.notes)
    return singular("\n".join([*lines, *_layouts(found)]))


def _layouts(found: Estimate) -> Iterator[str]:
    """A table of the devices as replicas, each with its own clip."""
    if found.layouts:
        yield f"\nreplicas  a clip  clips/hour  {'price/clip  ' * bool(found.price)}memory    mesh of each"
    for one in found.layouts:
        figures = f"{one.time_s:>6.2f} s  {one.clips_per_hour:>10.0f}"
        if one.price_per_clip is not None:
            figures += f"  {one.price_per_clip:>10.4f}"
        held = f"{peak(one.costs).peak_bytes / 1e9:>5.1f} GB"
        mesh = in_words(one.session.backend.mesh, ",")
        way = "" if one.session.memory.mode == "resident" else f", {one.session.memory.mode}"
        wide, shown = len(figures), figures if one.fits else "does NOT fit"
        yield f"{f'{one.replicas}x{one.devices}':<7}{shown:<{wide}}  {held}  {mesh}{way}"


def _basis(found: Estimate) -> str:
    """The origin of the time."""
    if found.basis == "bound" or (host := found.kind.sustained) is None:
        return "a bound from below by the data sheet"
    if host.compiled:
        return "by the compiler's code, not run"
    scaled = f"scaled from what was measured on {host.on}"
    how = "at rates measured on it" if found.basis == "measured" else scaled
    return f"{how}, with {found.outside_s:.2f} s outside of stages"


def _exchanges(found: Estimate) -> str:
    """How the time of exchanges is estimated."""
    kind = found.kind
    links, hidden = f"{kind.link_bytes_per_s / 1e9:g} GB/s", "none of it hidden"
    if kind.neighbours:
        links = "the links of its neighbours"
    if kind.exposed < 1:
        hidden = f"{1 - kind.exposed:.0%} of it hidden"
    elif any(c.timeline(kind).travelled_s > c.exchange_s(kind) + 1e-6 for c in found.costs):
        hidden = "less what passes under products of the other half of the tokens"
    return (
        f"exchanges: received / {links} and {kind.collective_s * 1e6:g} us each, {hidden}; "
        "an all-reduce of B bytes among n devices receives 2 (n - 1) / n B"
    )


def flags(to: Any) -> None:
    to.epilog = EXAMPLE
    add_flags(to, Devices)
    planned_flags(to, "plan")
    training_flags(to)
    json_flag(to)
    about = "also print stages, rates, exchanges, and what is not split"
    groups(to)["output"].add_argument("--verbose", action="store_true", help=about)
    about = "write a step of each stage as trace events (JSON), for Perfetto or chrome://tracing"
    groups(to)["output"].add_argument("--trace", type=Path, metavar="FILE", help=about)


def main(args: argparse.Namespace) -> None:
    type_, options = pipeline(args.pipeline), planned_options(args)
    options = replace(options, dtype=options.dtype or "bfloat16")
    if args.model:
        options.check()
    devices = Devices(**given_flags(args, Devices))
    if step := training_step(args):
        if devices.price is not None:
            raise InputError("--price: a training step makes no clip; leave the flag out")
        if args.trace:
            raise InputError("--trace: a training step has no trace; leave the flag out")
        with standing_for(args.preset, options) as options:
            of_step = estimate_step(options, *step, devices)
        shown = json.dumps(training_estimate.to_json(of_step), indent=1) if args.json else None
        print(shown or training_estimate.to_text(of_step))
        return
    prompt = "" if hasattr(args, "context") else "a plan"
    request = type_(prompt=prompt, seed=0, **given_flags(args, type_))
    request.check()
    if args.trace:
        if args.trace.suffix != ".json":
            raise InputError(f"--trace: {args.trace}, expected a name that ends in .json")
        check_outputs([("--trace", args.trace)], [args.model] if args.model else [])
    with standing_for(args.preset, options, request.distilled) as options:
        found = estimate(options, request, devices)
    if args.trace:
        write_trace(found, args.trace)
    print(json.dumps(to_json(found), indent=1) if args.json else to_text(found, args.verbose))
