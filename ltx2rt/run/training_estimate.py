"""The cost of a training step on devices that are not here."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from ltx2rt.backend import get_factory
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, flag, flagged, given_flags, marked, spelling
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines import pipelines
from ltx2rt.placement.devices import DeviceKind
from ltx2rt.placement.mesh import in_words
from ltx2rt.placement.plan import StageCost
from ltx2rt.run.estimate import Devices, datasheet_session
from ltx2rt.session.options import ModelOptions
from ltx2rt.train.data import Bucket, parse_bucket
from ltx2rt.train.prepare_flags import PrepareRequest
from ltx2rt.train.recipe import MODES
from ltx2rt.train.request import TrainRequest
from ltx2rt.train.step import Step

# Flags of `train run`, and of the cache that it reads, that size its step.
READ = marked("plan", TrainRequest, PrepareRequest)
FPS = Fraction(24)
WORDS = {
    "block": "each block anew",
    "none": "all values kept",
    "exchanges": "each block anew but for exchanges",
}


@dataclass(frozen=True)
class Training:
    """train: the size of the clips; None: a run is planned, not a training step."""

    train: Bucket | None = flag(
        None,
        "a training step on clips of this size, in place of a run, in pixels and frames at 24 fps",
        lambda text: parse_bucket(text, "--train"),
        group="training",
        metavar="WxHxF",
    )


def training_flags(to: Any) -> None:
    """Add the flags that size a training step to the parser of a command that plans."""
    add_flags(to, Training)
    add_flags(to, TrainRequest, PrepareRequest, only=READ)


def training_step(args: argparse.Namespace) -> tuple[Bucket, dict[str, Any]] | None:
    """The size of the clips and the flags of a training step, if one is asked for in place of a
    run. Raises InputError for flags of one that are given with the other."""
    bucket = Training(**given_flags(args, Training)).train
    read = {name: x for name, x in vars(args).items() if name in READ}
    own = argparse.Namespace(**read)  # --audio of a run is another flag
    flags = given_flags(own, TrainRequest) | given_flags(own, PrepareRequest)
    of_runs = flagged(*pipelines().values())
    if bucket is None:
        if flags:
            name = next(iter(flags)).replace("_", "-")
            raise InputError(f"--{name}: sizes a training step; add --train WxHxF")
        return None
    unread = [spelling(f) for name, f in of_runs.items() if hasattr(args, name)]
    if unread := [*unread, *(["--lora"] if hasattr(args, "loras") else [])]:
        raise InputError(f"{unread[0]}: a training step does not read it; leave the flag out")
    return bucket, flags


@dataclass(frozen=True)
class StepEstimate:
    """cost: one batch and the step of the optimiser, on one of the devices."""

    devices: int
    kind: DeviceKind
    step: Step
    cost: StageCost

    @property
    def mesh(self) -> Mapping[str, int]:
        return self.step.session.backend.mesh

    @property
    def fits(self) -> bool:
        return self.cost.peak_bytes <= self.room_bytes

    @property
    def room_bytes(self) -> int:
        session = self.step.session
        return session.backend.device().room_bytes(session.options.max_memory)


def datasheet_step(
    options: ModelOptions, kind: DeviceKind, devices: int, bucket: Bucket, flags: Mapping[str, Any]
) -> Step:
    """The step of `train run` on these devices. flags: those of READ. Raises InputError."""
    if devices > 1 and not options.mesh and get_factory(kind.backend).process_per_device:
        options = replace(options, mesh={"data": devices})
    given: dict[str, Any] = {name: f.default for name, f in READ.items()} | dict(flags)
    mode = MODES[given["mode"]]
    scales = (given["reference_downscale"], given["reference_temporal_scale"])
    if not mode.reference and scales != (1, 1):
        raise InputError(
            f"--reference-downscale, --reference-temporal-scale: --mode {given['mode']} has no "
            "references; leave them out, or plan --mode ic-lora"
        )
    session = datasheet_session(options, kind, devices)

    def geometry(size: Bucket) -> Geometry:
        return Geometry.of(session.config, size.width, size.height, size.frames, FPS)

    shown, heard = (mode.reference and n in mode.streams for n in ("video", "audio"))
    reference = (geometry(bucket.reference(*scales)), *scales) if shown else None
    own = geometry(bucket)
    return Step(
        session, own, mode.streams, given["batch"],
        given["targets"] or mode.targets, given["rank"], remat=given["remat"],
        ema=given["ema"] is not None, reference=reference, heard=own.audio_latents if heard else 0,
    )  # fmt: skip


def estimate_step(
    options: ModelOptions, bucket: Bucket, flags: Mapping[str, Any], devices: Devices
) -> StepEstimate:
    """Raises InputError."""
    kind, count = devices.found
    step = datasheet_step(options, kind, count, bucket, flags)
    return StepEstimate(count, kind, step, step.cost())


def to_json(found: StepEstimate) -> dict[str, Any]:
    """Figures of one device and one step, of one batch."""
    c, m = found.cost, found.step.memory
    held = ("streamed", "state", "kept", "block")
    return {
        "fits": found.fits,
        "devices": found.devices,
        "mesh": dict(found.mesh),
        "trained": sum(found.step.groups().values()),
        "weights_bytes": m.frozen,
        **{f"{name}_bytes": getattr(m, name) for name in held},
        "flops": c.flops,
        "collectives": c.collectives_json,
        **{name: getattr(c, name)(found.kind) for name in ("copy_s", "exchange_s", "time_s")},
    }


def to_text(found: StepEstimate) -> str:
    c, m, kind, step = found.cost, found.step.memory, found.kind, found.step
    mesh, (height, width) = found.mesh, step.geometry.size_px
    frames = (step.geometry.frames - 1) * step.geometry.time_factor + 1
    groups = ", ".join(f"{name} {count / 1e6:.3g} M" for name, count in step.groups().items())
    remat = WORDS[step.remat]
    count = step.batch * mesh.get("data", 1)
    memory_gb = min(kind.memory_bytes / 1e9, step.session.options.max_memory or math.inf)
    lines = [
        (
            f"training step of {count} clip{'s' * (count > 1)} of {width}x{height}x{frames} "
            f"({' and '.join(step.streams)}), LoRA of rank {step.rank}, {step.session.dtype}, "
            f"{remat}, on {found.devices} x {kind.name} ({in_words(mesh)}, profile "
            f"{step.session.placement.profile.name}); per device, estimated:"
        ),
        "",
        f"trained      {groups}",
        f"weights      {m.frozen / 1e9:.2f} GB{_moved(found)}",
        f"LoRA         {m.state / 1e9:.2f} GB with gradients and both moments",
        f"kept         {m.kept / 1e9:.2f} GB for the backward pass",
        f"one block    {m.block / 1e9:.2f} GB",
        f"memory       {'fits' if found.fits else 'does NOT fit'}: {c.peak_bytes / 1e9:.1f} GB of "
        f"{memory_gb:.0f} GB, where {memory_gb - found.room_bytes / 1e9:.1f} GB are kept in "
        "reserve",
        f"work         {c.flops / 1e12:.4g} TFLOP",
        f"exchanges    {c.traffic}",
        f"time         {c.time_s(kind):.3f} s, a bound from below; {c.exchange_s(kind):.3f} s of "
        "it are exchanges",
    ]
    return "\n".join(lines)


def _moved(found: StepEstimate) -> str:
    step, moved = found.step, found.step.memory.streamed
    if not moved:
        return ""
    return (
        f", and {moved / 1e9:.3g} GB of {step.streams_blocks} blocks in the host's memory, copied "
        f"twice in {found.cost.copy_s(found.kind):.2f} s"
    )
