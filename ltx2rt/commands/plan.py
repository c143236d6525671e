"""`ltx2rt plan`: what a run would cost on devices that need not be here.

The run is planned as `generate` plans it, on a backend that has a mesh and memory and runs nothing; a preset is planned
from an empty checkpoint of its sizes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from ltx2rt.backend import DeviceInfo, get_factory
from ltx2rt.commands.generate import Plan, make_plan
from ltx2rt.commands.options import planned_flags, planned_options
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, flag, given_flags
from ltx2rt.pipelines import pipeline
from ltx2rt.pipelines.request import Request
from ltx2rt.placement.cost import Traffic, weight_bytes
from ltx2rt.placement.devices import DEVICE_KINDS, DeviceKind, device_kind
from ltx2rt.placement.plan import StageCost, peak
from ltx2rt.placement.profiles import resolve, undivided
from ltx2rt.session.open import opened_checkpoint
from ltx2rt.session.options import NO_LORA, ModelOptions
from ltx2rt.session.session import Session
from ltx2rt.weights.random.make import make_checkpoint


@dataclass(frozen=True)
class Devices:
    """Devices that need not be here."""

    devices: int = flag(MISSING, "", int, metavar="N")
    device_kind: str = flag(MISSING, f"{', '.join(DEVICE_KINDS)}, or h100, 4090, ...", metavar="KIND")


class DatasheetBackend:
    """Devices of one kind, known by their data sheet."""

    def __init__(self, kind: DeviceKind, mesh: Mapping[str, int]):
        self.kind, self.mesh = kind, mesh
        self.name, self.device_kind = kind.backend, kind.framework_kind
        self.is_main, self.versions, self.num_built = True, {}, 0
        self.num_processes = prod(mesh.values()) if get_factory(kind.backend).process_per_device else 1

    def device(self) -> DeviceInfo:
        size = int(self.kind.memory_bytes)
        return DeviceInfo(self.device_kind, self.kind.name, size, size, reserve_bytes=self.kind.reserve_bytes)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a device that is not here runs nothing")

    load = lower = lower_loop = merge = each = to_host = synchronize = peak_bytes = agree = trim = _refuse


@dataclass(frozen=True)
class Estimate:
    """plan: of one of the devices; costs: its stages; notes: what is not split or shared, and why; advice: what to try
    if it does not fit, else empty."""

    devices: int
    kind: DeviceKind
    session: Session
    plan: Plan
    costs: tuple[StageCost, ...]
    notes: tuple[str, ...]
    advice: str

    @property
    def fits(self) -> bool:
        return not self.advice


@contextmanager
def datasheet_session(options: ModelOptions, preset: str | None, kind: DeviceKind, devices: int) -> Iterator[Session]:
    """A session that can plan but not run; of a preset, on an empty checkpoint that lives as long as the body.

    Raises InputError for unknown profiles and a mesh of another size.
    """
    profile, mesh = resolve(options.profile, kind.name, options.mesh, devices)
    with tempfile.TemporaryDirectory(prefix="ltx2rt-plan-") as folder:
        if preset is not None:
            make_checkpoint(preset, "official", folder, empty=True)
            options = replace(options, model=Path(folder))
        options = replace(options, backend=kind.backend, mesh=mesh, profile=profile.name)
        yield Session(opened_checkpoint(options), DatasheetBackend(kind, mesh), options)


def estimate(options: ModelOptions, request: Request, devices: Devices, preset: str | None = None) -> Estimate:
    """Raises InputError for what `generate` refuses, unknown devices and profiles, and a mesh of another size."""
    kind = device_kind(devices.device_kind)
    if devices.devices < 1:
        raise InputError(f"--devices: {devices.devices}, expected at least 1")
    if preset is not None and request.distilled == "optional" and options.distilled_lora is None:
        options = replace(options, distilled_lora=NO_LORA)  # its weights stand for distilled ones
    with datasheet_session(options, preset, kind, devices.devices) as session:
        plan = make_plan(session, request)
        costs = tuple(session.costs(plan.stages))
        budget = int(kind.memory_bytes) - kind.reserve_bytes
        advice = "" if peak(costs).peak_bytes <= budget else session.advice(plan.stages, budget)
        notes = (*_whole(session, plan, kind), *_unshared(session, plan))
        return Estimate(devices.devices, kind, session, plan, costs, notes, advice)


def _whole(session: Session, plan: Plan, kind: DeviceKind) -> Iterator[str]:
    """What the profile would split and every device holds whole, because its size does not divide."""
    options = replace(session.options, profile="single", mesh={})
    single = Session(session.checkpoint, DatasheetBackend(kind, {}), options, session.dtype)
    every = [replace(c, steps=None) for s in plan.stages for c in s.needs(session.config)]
    calls = {c.row.rules: c for c in sorted(every, key=lambda c: not c.row.partial(c.sizes))}  # whole networks win
    for network in ("text-encoder", "transformer"):
        graph, whole = session.graph(calls[network]), single.graph(calls[network])
        rules = session.placement.profile.rules.get(network, {})
        held, all_ = weight_bytes([graph]) / 1e9, weight_bytes([whole]) / 1e9
        yield f"{network}: {held:.3g} GB of its {all_:.3g} GB of weights on each device"
        for part, axis, size in dict.fromkeys(undivided(whole, rules, graph.mesh)):
            parts = graph.mesh[rules[axis]]
            yield f"{network}: {part} is replicated, {axis}={size} does not divide over {rules[axis]}={parts}"


def _unshared(session: Session, plan: Plan) -> Iterator[str]:
    """Where branches do not share what they have in common, and why."""
    for stage in plan.stages:
        for call in stage.needs(session.config):
            branches = call.row.branches(call.sizes) if call.row.branches else 1
            parts = session.placement.of(branches).mesh.get("guidance", 1)
            if parts > 1:
                yield (
                    f"{stage.name}: guidance={parts} puts its {branches} branches on devices of their own; what they "
                    "have in common is computed on each, as it would have to be sent otherwise"
                )


def to_json(found: Estimate) -> dict[str, Any]:
    """flops, collectives and time_s of a stage with steps are of one step."""
    return {
        "fits": found.fits,
        "devices": found.devices,
        "stages": [
            {
                "name": c.name,
                "weights_bytes": c.weights_bytes,
                "activation_bytes": c.activation_bytes,
                "flops": c.flops,
                "collectives": {name: {"count": t.count, "bytes": t.bytes} for name, t in c.collectives.items()},
                "time_s": c.time_s(found.kind),
            }
            for c in found.costs
        ],
    }


def to_text(found: Estimate) -> str:
    clip, session, kind, worst = found.plan.request, found.session, found.kind, peak(found.costs)
    float8 = session.options.weights_dtype == "float8"
    weights, rates = ", weights in float8" * float8, f", in float8 / {kind.float8_flops_per_s / 1e12:g} T/s" * float8
    mesh = session.backend.mesh
    where = ", ".join(f"{axis}={size}" for axis, size in mesh.items()) or "one device"
    height, width = clip.size_px
    size = f"{width}x{height}, " if width else ""
    size += "at most " if clip.auto_duration else ""
    wide = max(14, *(len(c.name) for c in found.costs))
    lines = [
        f"{clip.name}, {size}{clip.clip_frames} frames, {session.dtype}{weights}, "
        f"on {found.devices} x {kind.name} ({where}, profile {session.placement.profile.name}); per device, estimated:",
        "",
        f"{'stage':<{wide}} {'steps':>5} {'weights':>9} {'activations':>11} {'TFLOP/step':>10} {'time/step':>10}"
        f"  collectives/step",
    ]
    for c in found.costs:
        lines.append(
            f"{c.name:<{wide}} {c.steps:>5} {c.weights_bytes / 1e9:>6.2f} GB {c.activation_bytes / 1e9:>8.2f} GB "
            f"{c.flops / 1e12:>10.1f} {c.time_s(kind):>8.3f} s  {_traffic(c.collectives)}"
        )
    total = sum(c.steps * c.time_s(kind) for c in found.costs)
    verdict = "fits" if found.fits else "does NOT fit"
    lines += [
        "",
        f"memory: {verdict}: {worst.name} needs {worst.peak_bytes / 1e9:.1f} GB of {kind.memory_bytes / 1e9:.0f} GB"
        + f", {kind.reserve_bytes / 1e9:.1f} GB of which stay free" * bool(kind.reserve_bytes)
        + f"; try {found.advice}" * (not found.fits),
        f"estimated time: {total:.2f} s in all, a bound from below; a step is max(FLOP / "
        f"{kind.flops_per_s / 1e12:g} T/s{rates}, weights / {kind.memory_bytes_per_s / 1e12:g} TB/s, "
        f"received / {kind.link_bytes_per_s / 1e9:g} GB/s)",
    ]
    if mesh:
        lines.append("an all-reduce of B bytes among n devices receives 2 (n - 1) / n B")
    return "\n".join([*lines, *found.notes]) + "\n"


def _traffic(collectives: Mapping[str, Traffic]) -> str:
    return ", ".join(f"{t.count} {name}, {t.bytes / 1e9:.3g} GB" for name, t in collectives.items()) or "none"


def flags(to: Any) -> None:
    add_flags(to, Devices)
    parts = ("text_encoder", "upsampler", "temporal_upsampler", "distilled_lora", "loras", "dtype")
    how = ("stage_weights", "text_encoder_offload", "video_decoder", "vae_tiling")
    planned_flags(to, *parts, *how)
    to.add_argument("--json", action="store_true")


def main(args: argparse.Namespace) -> None:
    type_, options = pipeline(args.pipeline), planned_options(args)
    options = replace(options, dtype=options.dtype or "bfloat16")
    if args.model:
        options.check()
    request = type_(prompt="a plan", seed=0, **given_flags(args, type_))
    request.check()
    found = estimate(options, request, Devices(**given_flags(args, Devices)), args.preset)
    print(json.dumps(to_json(found), indent=1) if args.json else to_text(found).rstrip())
