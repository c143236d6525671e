"""`ltx2rt plan`: what a run would cost on devices that need not be here.

The run is planned as `generate` plans it, on a backend that has a mesh and memory and runs nothing; a preset is planned
from an empty checkpoint of its sizes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from ltx2rt.backend import DeviceInfo
from ltx2rt.errors import InputError
from ltx2rt.pipeline.generate import Plan, make_plan, plan_costs
from ltx2rt.pipeline.networks import Networks
from ltx2rt.pipeline.request import PlanRequest
from ltx2rt.placement.cost import Traffic, weight_bytes
from ltx2rt.placement.devices import DeviceKind, device_kind
from ltx2rt.placement.plan import StageCost, peak
from ltx2rt.placement.profiles import resolve, undivided
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.make import make_checkpoint


class PaperBackend:
    """Devices of one kind, known by their data sheet."""

    def __init__(self, kind: DeviceKind, mesh: Mapping[str, int]):
        self.kind, self.mesh = kind, mesh
        self.name, self.device_kind = kind.backend, kind.framework_kind
        self.is_main, self.versions, self.num_built = True, {}, 0
        self.num_processes = prod(mesh.values()) if kind.framework_kind == "cuda" else 1  # JAX drives all its devices

    def device(self) -> DeviceInfo:
        size = int(self.kind.memory_bytes)
        return DeviceInfo(self.device_kind, self.kind.name, size, size)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a device on paper runs nothing")

    load = lower = lower_loop = merge = each = agree = to_host = synchronize = trim = peak_bytes = _refuse


@dataclass(frozen=True)
class PaperPlan:
    """request: what was asked; plan: of one of the devices; costs: its stages; notes: what is not split, and why."""

    request: PlanRequest
    kind: DeviceKind
    plan: Plan
    costs: tuple[StageCost, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return peak(self.costs).peak_bytes <= self.kind.memory_bytes


def plan_on_paper(request: PlanRequest) -> PaperPlan:
    """Raises InputError for what `generate` refuses, unknown devices and profiles, and a mesh of another size."""
    kind = device_kind(request.device_kind)
    if request.devices < 1:
        raise InputError(f"--devices: {request.devices}, expected at least 1")
    profile, mesh = resolve(request.options.profile, kind.name, request.options.mesh, request.devices)
    options = replace(request.options, backend=kind.backend, mesh=mesh, profile=profile.name)
    with _model(request) as model:
        options = replace(options, model=model)
        checkpoint = open_checkpoint(model, options.text_encoder, options.upsampler)
        backend = PaperBackend(kind, mesh)
        plan = make_plan(request.clip(options), checkpoint, backend)
        costs = plan_costs(plan)
        return PaperPlan(request, kind, plan, costs, tuple(_whole(plan, kind)))


@contextmanager
def _model(request: PlanRequest) -> Iterator[Path]:
    """The checkpoint's path; of a preset, an empty one that lives as long as the plan is made."""
    if request.preset is None:
        yield request.options.model
        return
    with tempfile.TemporaryDirectory(prefix="ltx2rt-plan-") as folder:
        make_checkpoint(request.preset, "official", folder, empty=True)
        yield Path(folder)


def _whole(plan: Plan, kind: DeviceKind) -> Iterator[str]:
    """What the profile would split and every device holds whole, because its size does not divide."""
    networks = plan.networks
    single = Networks(
        networks.checkpoint, PaperBackend(kind, {}), replace(networks.options, profile="single"), networks.dtype
    )
    batch = plan.graphs["text-encoder"].inputs["token_ids"].type.shape[0]
    graphs = {"text-encoder": single.text_graph(batch), "transformer": single.step_graph(plan.stages[-1].structure)}
    for network, graph in graphs.items():
        rules = networks.profile.rules.get(network, {})
        held, whole = weight_bytes([plan.graphs[network]]) / 1e9, weight_bytes([graph]) / 1e9
        yield f"{network}: {held:.3g} GB of its {whole:.3g} GB of weights on each device"
        mesh = plan.graphs[network].mesh
        for part, axis, size in dict.fromkeys(undivided(graph, rules, mesh)):
            parts = mesh[rules[axis]]
            yield f"{network}: {part} is replicated, {axis}={size} does not divide over {rules[axis]}={parts}"


def to_json(paper: PaperPlan) -> dict[str, Any]:
    """flops, collectives and time_s of a stage with steps are of one step."""
    return {
        "fits": paper.fits,
        "devices": paper.request.devices,
        "stages": [
            {
                "name": c.name,
                "weights_bytes": c.weights_bytes,
                "activation_bytes": c.activation_bytes,
                "flops": c.flops,
                "collectives": {name: {"count": t.count, "bytes": t.bytes} for name, t in c.collectives.items()},
                "time_s": c.time_s(paper.kind),
            }
            for c in paper.costs
        ],
    }


def to_text(paper: PaperPlan) -> str:
    plan, kind, worst = paper.plan, paper.kind, peak(paper.costs)
    clip, mesh = plan.request, plan.networks.backend.mesh
    float8 = plan.request.options.weights_dtype == "float8"
    weights, rates = ", weights in float8" * float8, f", in float8 / {kind.float8_flops_per_s / 1e12:g} T/s" * float8
    where = ", ".join(f"{axis}={size}" for axis, size in mesh.items()) or "one device"
    lines = [
        f"{clip.pipeline}, {clip.width}x{clip.height}, {clip.num_frames} frames, {plan.networks.dtype}{weights}, "
        f"on {paper.request.devices} x {kind.name} ({where}, profile {plan.networks.profile.name}); per device:",
        "",
        f"{'stage':<14} {'steps':>5} {'weights':>9} {'activations':>11} {'TFLOP/step':>10} {'time/step':>10}"
        f"  collectives/step",
    ]
    for c in paper.costs:
        lines.append(
            f"{c.name:<14} {c.steps:>5} {c.weights_bytes / 1e9:>6.2f} GB {c.activation_bytes / 1e9:>8.2f} GB "
            f"{c.flops / 1e12:>10.1f} {c.time_s(kind):>8.3f} s  {_traffic(c.collectives)}"
        )
    total = sum(c.steps * c.time_s(kind) for c in paper.costs)
    verdict = "fits" if paper.fits else "does NOT fit"
    lines += [
        "",
        f"memory: {verdict}: {worst.name} needs {worst.peak_bytes / 1e9:.1f} GB of {kind.memory_bytes / 1e9:.0f} GB",
        f"time on paper: {total:.2f} s in all, a bound from below; a step is max(FLOP / "
        f"{kind.flops_per_s / 1e12:g} T/s{rates}, weights / {kind.memory_bytes_per_s / 1e12:g} TB/s, "
        f"received / {kind.link_bytes_per_s / 1e9:g} GB/s)",
    ]
    if mesh:
        lines.append("an all-reduce of B bytes among n devices receives 2 (n - 1) / n B")
    return "\n".join([*lines, *paper.notes]) + "\n"


def _traffic(collectives: Mapping[str, Traffic]) -> str:
    return ", ".join(f"{t.count} {name}, {t.bytes / 1e9:.3g} GB" for name, t in collectives.items()) or "none"
