"""Choose the mesh of a run without --mesh: of those that fit, the one of the least estimated time.

Decides only by data sheets and the run's own sizes, so that every process of a launch decides
alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ltx2rt.backend import DeviceInfo, get_factory
from ltx2rt.errors import InputError
from ltx2rt.graph.encodings import ENCODINGS, Encoding
from ltx2rt.graph.ir import Graph
from ltx2rt.passes.coalesce import coalesce
from ltx2rt.passes.place import place
from ltx2rt.passes.share import share
from ltx2rt.passes.unpack import keep, kept_as, unpack
from ltx2rt.placement.cost import is_plain_linear, node_flops
from ltx2rt.placement.devices import DeviceKind
from ltx2rt.placement.mesh import canonical, in_words
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.plan import StageCost, Work, cost
from ltx2rt.placement.profiles import PROFILES, default_mesh
from ltx2rt.session.call import Call
from ltx2rt.session.memory import Needing
from ltx2rt.session.options import ModelOptions
from ltx2rt.session.session import Session
from ltx2rt.weights.checkpoint import Checkpoint

# two estimates that are closer say nothing: the mesh that the profile is meant for stays
MARGIN = 0.03


class DatasheetBackend:
    """Devices of one kind, known by their data sheet."""

    runs = False

    def __init__(self, kind: DeviceKind, mesh: Mapping[str, int]):
        self.kind, self.mesh = kind, mesh
        self.name, self.device_kind = kind.backend, kind.framework_kind
        self.is_main, self.versions, self.num_built = True, {}, 0
        self.num_processes = (
            math.prod(mesh.values()) if get_factory(kind.backend).process_per_device else 1
        )

    def device(self) -> DeviceInfo:
        size = int(self.kind.memory_bytes)
        return DeviceInfo(
            self.device_kind, self.kind.name, size, size,
            reserve_bytes=self.kind.reserve_bytes, reserve_share=self.kind.reserve_share,
        )  # fmt: skip

    def limit(self, max_memory: float | None) -> None:
        """Nothing is taken of a device that is not here."""

    def attend_by(self, name: str, dtype: str) -> None:
        """Nothing attends on a device that is not here."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a device that is not here runs nothing")

    load = park = unpark = lower = lower_loop = trainer = compile_ahead = merge = _refuse
    each = to_host = synchronize = peak_bytes = agree = trim = _refuse


@dataclass(frozen=True)
class Arrangement:
    """A mesh, and estimates of all denoise steps on it; steps: one of each stage, by name."""

    mesh: Mapping[str, int]
    time_s: float
    read_bytes: int
    steps: Mapping[str, StageCost]

    def __str__(self) -> str:
        return in_words(self.mesh, ",")


@dataclass(frozen=True)
class Choice:
    """The mesh of a run, the next best of those that take no more memory, and the fastest of all if
    it has no room for all weights."""

    best: Arrangement
    runner_up: Arrangement | None
    roomier: Arrangement | None
    session: Session  # on the best mesh of devices that are not here
    estimator: Estimator

    def __str__(self) -> str:
        said, other = f"mesh {self.best}: denoising takes an estimated", self.runner_up
        said += f" {self.best.time_s:.3g} s; "
        said += (
            f"the next best, --mesh {other}, {other.time_s:.3g} s"
            if other
            else "no other takes as little memory"
        )
        if self.roomier:
            said += f"; {self.roomier}, {self.roomier.time_s:.3g} s, has no room for all weights"
        return said


def choose(
    checkpoint: Checkpoint,
    options: ModelOptions,
    kind: DeviceKind,
    devices: int,
    stages: Sequence[Needing],
    estimator: Estimator | None = None,
) -> Choice | None:
    """The mesh of a run of these stages; None if nothing of it is split. estimator: of the same
    options, on another number of devices. Meshes that fit are tried from the fastest steps on, each
    with fewer weights on a device, until one keeps them all; of these the one of the shortest
    request, with loads of weights that do not stay. Where no mesh fits, the one of the least
    weights. Raises InputError if none splits the run, in the words of the profile's own mesh."""
    budget = DatasheetBackend(kind, {}).device().room_bytes(options.max_memory)
    if estimator is None:
        estimator = Estimator(Session(checkpoint, DatasheetBackend(kind, {}), options), kind)
    ranked = arrangements(estimator, devices, stages)
    left, found = ranked, []
    while left and left[0].time_s < min((time_s for time_s, _, _ in found), default=math.inf):
        one = left[0]
        session = Session(checkpoint, DatasheetBackend(kind, one.mesh), options)
        session.adopt(estimator.session)
        left = [other for other in left if other.read_bytes < one.read_bytes]
        own = [stage.within(session) for stage in stages]
        fits = session.memory.fit(own, budget)
        if fits or not (left or found):
            found.append((session.memory.request_s(own, kind.loaded()), one, session))
            if not (fits and session.memory.reload_s(own, kind)):
                break
    if not found:
        return None
    _, best, session = min(found, key=lambda one: one[0])
    others = (one for one in ranked if one is not best and one.read_bytes <= best.read_bytes)
    roomier = ranked[0] if ranked[0].read_bytes > best.read_bytes else None
    return Choice(best, next(others, None), roomier, session, estimator)


def arrangements(
    estimator: Estimator, devices: int, stages: Sequence[Needing]
) -> list[Arrangement]:
    """Every way to split the steps over the devices, the fastest first. Raises as `choose`."""
    config, kind = estimator.session.config, estimator.kind
    needs = ((stage.name, call) for stage in stages for call in stage.needs(config))
    calls = {name: call for name, call in needs if call.steps is not None}
    if not calls:
        return []
    profile = PROFILES[kind.profile]
    meant, estimated, reason = default_mesh(profile, devices), [], None
    for mesh in _meshes(devices, max(call.branches for call in calls.values())):
        on = Placement(profile, mesh)
        try:
            steps = {name: estimator.step(call, on) for name, call in calls.items()}
        except InputError as error:
            reason = error if mesh == meant else reason
            continue
        time_s = sum((calls[n].steps or 0) * step.time_s(kind) for n, step in steps.items())
        read_bytes = max(step.read_bytes for step in steps.values())
        estimated.append(Arrangement(mesh, time_s, read_bytes, steps))
    if not estimated and reason:
        raise reason
    return sorted(
        estimated, key=lambda one: (one.time_s * (1 - MARGIN * (one.mesh == meant)), str(one))
    )


def _meshes(devices: int, branches: int) -> Iterator[dict[str, int]]:
    """Sizes of `guidance`, `sequence` and `tensor`; `data` and `fsdp` serve other aims."""
    for guidance in (n for n in range(1, branches + 1) if devices % n == branches % n == 0):
        left = devices // guidance
        for tensor in (n for n in range(1, left + 1) if left % n == 0):
            mesh = {"guidance": guidance, "sequence": left // tensor, "tensor": tensor}
            yield canonical({axis: size for axis, size in mesh.items() if size > 1})


class Estimator:
    """The cost of one denoise step on one device of a mesh; graphs are traced and shared once. Rates
    are the data sheet's, but for those that the compiler's code has given."""

    def __init__(self, session: Session, kind: DeviceKind):
        compiled = kind.sustained is not None and kind.sustained.compiled
        self.session, self.kind = session, kind.loaded() if compiled else kind
        self._shared: dict[Any, Graph] = {}
        self._costs: dict[Any, StageCost] = {}

    def step(self, call: Call, placement: Placement) -> StageCost:
        on = placement.of(call.branches)
        key = call.program, tuple(on.mesh.items())
        if key not in self._costs:
            graph = self._graph(call, on.mesh.get("guidance", 1) == 1)
            strict = "transformer" in on.profile.strict
            placed = place(graph, on.rules("transformer", weights=False), on.mesh, strict)
            placed = coalesce(self._kept(placed, call))
            found = cost(Work(call.network, ((self.session.as_run(placed, steps=True), 1),), {}))
            if (encoding := self._encoding) and encoding.product:  # almost all linears are
                plain = ((n, times) for n, times in placed.walk() if is_plain_linear(n))
                linear = sum(node_flops(node) * times for node, times in plain)
                found = replace(found, quantised_flops=linear, quantised=True)
            self._costs[key] = found
        return self._costs[key]

    @property
    def _encoding(self) -> Encoding | None:
        return ENCODINGS.get(self.session.options.weights_dtype or "")

    def _kept(self, placed: Graph, call: Call) -> Graph:
        """The graph with weights as a device holds them, but for those that it multiplies by."""
        encoding = self._encoding
        if encoding and not encoding.product:
            return unpack(kept_as(placed, encoding.name))
        return placed if encoding else unpack(keep(placed, self.session.weights.stored(call)))

    def _graph(self, call: Call, shared: bool) -> Graph:
        if not shared:
            return self.session.traced(call, call.sizes)
        if call.program not in self._shared:
            self._shared[call.program] = share(self._graph(call, False))
        return self._shared[call.program]
