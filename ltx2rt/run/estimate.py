"""The cost of a run on devices that are not here.

The run is planned as `generate` plans it, on a backend that has a mesh and memory and runs nothing;
a preset is planned from an empty checkpoint of its sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, replace
from functools import cached_property
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.flags import check_bounds, flag
from ltx2rt.pipelines.request import Request
from ltx2rt.placement.cost import weight_bytes
from ltx2rt.placement.devices import DeviceKind, kind_and_count
from ltx2rt.placement.mesh import in_words, stage_mesh
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.plan import StageCost, peak
from ltx2rt.placement.profiles import resolve, undivided
from ltx2rt.placement.stream import ROAD_BYTES_PER_S
from ltx2rt.run.plan import Plan, Resolved, checked, resolved
from ltx2rt.session.arrange import DatasheetBackend, Estimator, choose
from ltx2rt.session.open import opened_checkpoint
from ltx2rt.session.options import MEMORY, ModelOptions
from ltx2rt.session.session import Session
from ltx2rt.weights.checkpoint import Checkpoint

MAX_DEVICES = 10_000  # more than any machine has; a plan takes longer with their number


@dataclass(frozen=True)
class Devices:
    """Devices to plan for; they need not be here."""

    device_kind: str = flag(
        MISSING, "such as H100, RTX 4090, 8xh100 or v6e-8", group=MEMORY, metavar="KIND"
    )
    devices: int = flag(
        1, "number of devices", group=MEMORY, least=1, most=MAX_DEVICES, common="hardware"
    )
    price: float | None = flag(
        None, "price of a device for an hour, to tell a clip's", group=MEMORY, metavar="X", above=0,
        common="hardware",
    )  # fmt: skip

    @property
    def found(self) -> tuple[DeviceKind, int]:
        """The kind and the number of devices. Raises InputError."""
        check_bounds(self)
        kind, count = kind_and_count(self.device_kind)
        if count and self.devices not in (1, count):
            raise InputError(
                f"--devices: {self.devices}, but --device-kind {self.device_kind} is {count} x "
                f"{kind.name}; leave one of the two out"
            )
        return kind, count or self.devices


@dataclass(frozen=True)
class Estimate:
    """plan: of one of the devices; costs: its stages; notes: what is not split or shared, and why;
    advice: what to try if it does not fit, else empty."""

    devices: int
    kind: DeviceKind
    session: Session
    plan: Plan
    costs: tuple[StageCost, ...]
    notes: tuple[str, ...]
    advice: str
    outside_s: float = 0.0  # seconds of a request beside its stages
    price: float | None = None  # a device for an hour
    replicas: int = 1  # on so many devices each
    layouts: tuple[Estimate, ...] = ()  # the same devices as replicas of fewer, and this one

    @property
    def basis(self) -> str:
        return self.kind.basis(self.devices)

    @cached_property
    def time_s(self) -> float:
        """Seconds of a whole request."""
        return sum(c.steps * c.time_s(self.kind) for c in self.costs) + self.outside_s

    @property
    def clips_per_hour(self) -> float:
        return 3600 / self.time_s * self.session.backend.mesh.get("data", 1) * self.replicas

    @property
    def price_per_clip(self) -> float | None:
        devices = self.devices * self.replicas
        return None if self.price is None else self.price * devices / self.clips_per_hour

    @property
    def fits(self) -> bool:
        return not self.advice


def datasheet_session(
    options: ModelOptions, kind: DeviceKind, devices: int, checkpoint: Checkpoint | None = None
) -> Session:
    """A session that only plans; checkpoint: the options' own, if it is open already. Raises
    InputError for unknown profiles and other meshes."""
    profile, mesh = resolve(options.profile, kind.name, options.mesh, devices)
    options = replace(options, backend=kind.backend, mesh=mesh, profile=profile.name)
    backend = DatasheetBackend(kind, mesh)
    checkpoint = checkpoint or opened_checkpoint(options, backend.device())
    return Session(checkpoint, backend, options)


def estimate(options: ModelOptions, request: Request, devices: Devices) -> Estimate:
    """Estimate a request on the devices, and on replicas of fewer if no flag says the mesh. Raises
    InputError for unknown devices or meshes, and for what `generate` refuses."""
    kind, count = devices.found
    checkpoint = opened_checkpoint(options, DatasheetBackend(kind, {}).device())
    asked = resolved(checkpoint, options, request)
    found, estimator, said = _estimate(options, checkpoint, asked, kind, count)
    notes = (*said, *_whole(found.session, found.plan, kind), *_unshared(found, estimator))
    found, layouts = replace(found, price=devices.price, notes=notes), []
    for each in (1, 2, 4, 8) if not (options.mesh or options.profile) else ():
        with suppress(InputError):  # such as heads that do not divide
            if each < count and count % each == 0:
                one, *_ = _estimate(options, checkpoint, asked, kind, each, estimator)
                layouts.append(replace(one, price=devices.price, replicas=count // each))
    return replace(found, layouts=(*layouts, found) if layouts else ())


def _estimate(
    options: ModelOptions, checkpoint: Checkpoint, asked: Resolved, kind: DeviceKind, count: int,
    estimator: Estimator | None = None,
) -> tuple[Estimate, Estimator, list[str]]:  # fmt: skip
    """The estimate, the estimator for other numbers of devices, and the choice of the mesh."""
    choice = None
    if not (options.mesh or options.profile or count == 1):  # else a flag says the mesh
        on = replace(options, backend=kind.backend)
        choice = choose(checkpoint, on, kind, count, asked[2], estimator)
    if choice:
        options = replace(options, mesh=choice.best.mesh)
    session = datasheet_session(options, kind, count, checkpoint)
    if estimator := choice.estimator if choice else estimator:
        session.adopt(estimator.session)
    plan = checked(session, asked)
    budget = session.backend.device().room_bytes(options.max_memory)
    fits = session.memory.fit(plan.stages, budget)
    session.memory.choose_road(plan.stages)
    fastest = ROAD_BYTES_PER_S[session.weights.residence.road]
    kind = replace(kind, host_bytes_per_s=min(kind.host_bytes_per_s, fastest))
    costs = tuple(session.memory.costs(plan.stages))
    advice = "" if fits else session.memory.advice(plan.stages, budget, peak(costs))
    said = [str(choice)] if choice else []
    outside_s = session.memory.outside_s(plan.stages, kind)
    found = Estimate(count, kind.loaded(), session, plan, costs, (), advice, outside_s)
    return found, estimator or Estimator(session, kind), said


def _whole(session: Session, plan: Plan, kind: DeviceKind) -> Iterator[str]:
    """Parts that every device holds whole because their size does not divide over the mesh."""
    options = replace(session.options, profile="single", mesh={})
    single = Session(session.checkpoint, DatasheetBackend(kind, {}), options, session.dtype)
    single.adopt(session)
    every = [replace(c, steps=None) for s in plan.stages for c in s.needs(session.config)]
    # whole networks win
    calls = {c.row.rules: c for c in sorted(every, key=lambda c: not c.row.partial(c.sizes))}
    for network in filter(calls.__contains__, ("text-encoder", "transformer")):
        graph, whole = session.graph(calls[network]), single.graph(calls[network])
        rules = session.placement.profile.rules.get(network, {})
        held, all_ = weight_bytes([graph]) / 1e9, weight_bytes([whole]) / 1e9
        yield f"{network}: {held:.3g} GB of its {all_:.3g} GB of weights on each device"
        for part, axis, size in dict.fromkeys(undivided(whole, rules, graph.mesh)):
            parts = graph.mesh[rules[axis]]
            yield f"{network}: {part} is replicated, {axis}={size} does not divide over {rules[axis]}={parts}"


def _unshared(found: Estimate, estimator: Estimator) -> Iterator[str]:
    """Where branches do not share what they have in common, and whether that is cheaper."""
    session, kind = found.session, estimator.kind
    profile = session.placement.profile
    for stage in found.plan.stages:
        for call in stage.needs(session.config):
            branches = call.branches
            mesh = session.placement.of(branches).mesh
            if mesh.get("guidance", 1) == 1 or call.steps is None:
                continue
            split, together = Placement(profile, mesh), Placement(profile, stage_mesh(mesh, 1))
            said = (
                f"{stage.name}: guidance={mesh['guidance']} puts its {branches} branches on "
                "devices of their own; what they have in common is computed on each"
            )
            try:
                costs = [estimator.step(call, on) for on in (split, together)]
            except InputError:
                yield said
                continue
            times = [c.time_s(kind) for c in costs]
            sent = [c.exchange_s(kind) for c in costs]
            cheaper = int(times[1] < times[0])
            less = "exchanges" if sent[cheaper] < sent[1 - cheaper] else "computes"
            where = in_words(together.mesh, ",")
            yield (
                f"{said}: {costs[0].flops / 1e12:.3g} TFLOP and {sent[0]:.3g} s of exchange a "
                f"step, shared on {where} {costs[1].flops / 1e12:.3g} and {sent[1]:.3g}; "
                f"{('splitting', 'sharing')[cheaper]} is cheaper, {times[cheaper]:.3g} s to "
                f"{times[1 - cheaper]:.3g}, as it {less} less"
            )


def _summary(found: Estimate) -> dict[str, Any]:
    bill = {"clips_per_hour": found.clips_per_hour, "price_per_clip": found.price_per_clip}
    return {
        "fits": found.fits,
        "memory_mode": found.session.memory.mode,
        **{name: getattr(found, name) for name in ("devices", "time_s", "basis")},
        **(bill if found.price is not None else {}),
        "mesh": dict(found.session.backend.mesh),
    }


def to_json(found: Estimate) -> dict[str, Any]:
    """flops, collectives, time_s and exchange_s, its part in which devices wait for each other, are
    of one step of a stage with steps."""
    layouts = [
        {"replicas": one.replicas, "clips_per_hour": one.clips_per_hour} | _summary(one)
        for one in found.layouts
    ]
    compared = {"layouts": layouts} if layouts else {}
    return _summary(found) | compared | {"stages": [_stage(c, found) for c in found.costs]}


def _stage(c: StageCost, found: Estimate) -> dict[str, Any]:
    counted = ("steps", "weights_bytes", "streamed_bytes", "activation_bytes", "flops")
    timed = ("copy_s", "waits_s", "exchange_s", "time_s")
    return {
        "name": c.label,
        **{name: getattr(c, name) for name in counted},
        "resident_bytes": c.weights_bytes,
        **{name: getattr(c, name)(found.kind) for name in timed},
        "collectives": c.collectives_json,
        "basis": found.basis,
    }
