"""Every network of a run through the compiler of devices that need not be here.

Decides which programs of a run's stages are compiled and how the figures are shown. They are of
compiled programs; nothing is run. How a graph is compiled is the backend's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ltx2rt.backend import Compiled, DoesNotFit, get_ahead_compiler
from ltx2rt.errors import InputError
from ltx2rt.flags import check_bounds, flag_like, flags_of
from ltx2rt.graph import Graph
from ltx2rt.models.catalog import CATALOG
from ltx2rt.models.geometry import pixel_frames
from ltx2rt.models.guided_step import Branches
from ltx2rt.notes import note
from ltx2rt.pipelines.build import Loras
from ltx2rt.pipelines.clip import Clip
from ltx2rt.pipelines.groups.images import Images
from ltx2rt.pipelines.groups.size import DEFAULT_FRAMES, Size
from ltx2rt.pipelines.kind import fitted
from ltx2rt.pipelines.request import Request
from ltx2rt.placement.cost import activation_bytes, weight_bytes
from ltx2rt.placement.devices import DeviceKind, slice_chips, topology
from ltx2rt.placement.mesh import canonical
from ltx2rt.placement.mesh import in_words as mesh_in_words
from ltx2rt.run.estimate import Devices, datasheet_session
from ltx2rt.run.training_estimate import datasheet_step
from ltx2rt.session.arrange import choose
from ltx2rt.session.call import Call
from ltx2rt.session.options import LoraSpec, ModelOptions
from ltx2rt.session.session import Session
from ltx2rt.stages.conditioning import ImageSpec
from ltx2rt.stages.denoise import Denoise
from ltx2rt.suggest import hint
from ltx2rt.train.data import Bucket

flag = flags_of("network")

# components that are a part of the denoise loop
PARTS = {"denoise-before": "before", "denoise-step": "step"}
COMPILED = (*(name for name, row in CATALOG.items() if row.branches is None), *PARTS)


@dataclass(frozen=True)
class Target:
    """The programs to compile, and the devices to compile them for."""

    device_kind: str = flag_like(
        Devices,
        "device_kind",
        help="TPUs to compile for, such as v6e-8 or v6e:2x4",
        metavar="GEN:CHIPS",
        also=("--topology",),
    )
    component: tuple[str, ...] = flag(
        (),
        f"networks to compile: {', '.join(COMPILED)} (default: all)",
        metavar="NAME",
        repeat=True,
    )
    stage: int | None = flag(
        None, "stage whose denoise step to compile (default: both)", metavar="1|2", least=1, most=2
    )
    branches: int | None = flag(
        None, "guidance branches of a step (default: 4 in stage 1, then 1)", least=1, most=4
    )
    times: bool = flag(
        False, "estimate each program's time by the compiler; takes longer", group="output"
    )


@dataclass(frozen=True)
class Cell:
    """One program to compile. stage, branches: of the denoise loop. size: what it works on, for the
    reader. part: which part of the graph, or how it runs, as the compiler takes it."""

    component: str
    graph: Graph
    size: str
    stage: int | None = None
    branches: int | None = None
    part: str | None = None

    @property
    def name(self) -> str:
        return self.component if self.stage is None else f"{self.component}, stage {self.stage}"


@dataclass(frozen=True)
class Compilation:
    """All programs of a request, and the devices they are for."""

    topology: str
    kind: DeviceKind
    mesh: Mapping[str, int]
    cells: tuple[Cell, ...]
    times: bool = False


def plan_job(options: ModelOptions, request: Request, target: Target) -> Compilation:
    """Plan the programs to compile, from headers and sizes alone, for the profile's mesh or one that
    divides the model. Raises InputError."""
    check_bounds(target)
    if unknown := [name for name in target.component if name not in COMPILED]:
        known = f"known: {', '.join(COMPILED)}{hint(unknown[0], COMPILED)}"
        raise InputError(f"--component: unknown {unknown[0]!r}; {known}")
    kind, devices = topology(target.device_kind)
    given = request
    if request.has(Images) and not request.images:
        frames = 0, (request.num_frames or DEFAULT_FRAMES) - 1  # the encoder is compiled, too
        some = frames[: max(request[Images].least, 1)]
        images = tuple(ImageSpec(Path("image"), frame) for frame in some)
        sides = request[Size].filled() if request.has(Size) else {}
        request = replace(request, images=images, **sides)
    request.check()
    given.check_files()
    session = datasheet_session(options, kind, devices)
    request.check_options(session.options)
    clip = fitted(request, session.options, session.checkpoint)
    named = clip.request.learnt or session.options.loras
    loras = Loras(named, LoraSpec(Path("distilled")))
    try:
        cells = tuple(_cells(session, clip, loras, target))
    except InputError:
        if options.mesh or options.profile:
            raise
        stages = clip.stages(session.config, session.options, Loras(named))
        own, number = replace(options, backend=kind.backend), request.num_videos
        for clips in (n for n in (1, 2, 4, 8) if devices % n == 0):
            with suppress(InputError):
                if choice := choose(session.checkpoint, own, kind, devices // clips, stages):
                    mesh = canonical({"data": clips, **choice.best.mesh})
                    given = replace(given, num_videos=max(number, clips))
                    made = plan_job(replace(options, mesh=mesh), given, target)
                    said = f"--mesh {mesh_in_words(mesh, ',')} --num-videos {given.num_videos}"
                    note(f"{target.device_kind}: the usual mesh does not divide this model; {said}")
                    return made
        raise
    found = {cell.component for cell in cells}
    if missing := [name for name in target.component if name not in found]:
        others = replace(target, component=())
        known = dict.fromkeys(x.component for x in _cells(session, clip, loras, others))
        raise InputError(f"--component: this run has no {missing[0]}; it has {', '.join(known)}")
    chips = slice_chips(target.device_kind)
    return Compilation(chips, kind, session.backend.mesh, cells, target.times)


def plan_training(
    options: ModelOptions, bucket: Bucket, flags: Mapping[str, Any], target: Target
) -> Compilation:
    """A batch forward and back. flags: of the training run. Raises InputError."""
    kind, devices = topology(target.device_kind)
    step = datasheet_step(options, kind, devices, bucket, flags)
    count = step.batch * step.session.backend.mesh.get("data", 1)
    size = f"{count} x {bucket}, rank {step.rank}"
    cell = Cell("train-step", step.graph, size, part=step.remat)
    chips = slice_chips(target.device_kind)
    return Compilation(chips, kind, step.session.backend.mesh, (cell,), target.times)


def _cells(session: Session, clip: Clip, loras: Loras, target: Target) -> Iterator[Cell]:
    """In the order of a run; of the decoder's tiles the largest alone."""
    stages = clip.stages(session.config, session.options, loras)
    asked, seen = target.component or COMPILED, set()
    for stage in stages:
        fitted = stage.within(session)
        if any(call.network in asked for call in fitted.needs(session.config)):
            stage = fitted  # else what is asked for is what other devices would run
        calls = {session.key(call): call for call in stage.needs(session.config)}.values()
        each = sorted(
            (c for c in calls if c.each), key=lambda c: activation_bytes(session.graph(c))
        )
        calls = [*(call for call in calls if not call.each), *each[-1:]]
        number = next((i for i in (1, 2) if stage.name.startswith(f"stage{i}")), None)
        if number is not None and target.stage not in (None, number):
            continue
        for call in calls:
            if number is None and session.key(call) in seen:  # another window of the same size
                continue
            seen.add(session.key(call))
            if call.steps is None:
                if call.network in asked:
                    graph, part = session.graph(call), "each" if call.each else None
                    yield Cell(call.network, graph, _size(session, call), number, part=part)
                continue
            if target.branches:
                branches = Branches(*(target.branches > i for i in (1, 2, 3)))
                if branches.isolated and len(call.sizes.streams) == 1:
                    raise InputError(
                        f"--branches: {target.branches}, but {clip.request.name} has one "
                        "stream and 3 at most"
                    )
                call = replace(call, sizes=replace(call.sizes, branches=branches))
            count = len(call.sizes.branches.names)
            assert isinstance(stage, Denoise), "only a denoising stage has steps"
            height, width = stage.geometry.size_px
            frames = clip.num_frames
            size = f"{width}x{height}x{frames}" if width else f"{frames} frames of sound"
            size += f", {count} branch{'es' if count > 1 else ''}"
            for component, part in PARTS.items():
                if component in asked:
                    yield Cell(component, session.graph(call), size, number, count, part)


def _size(session: Session, call: Call) -> str:
    """Width, height and frames that the call works on, in pixels, or a shape."""
    graph, vae = session.graph(call), session.config.video_vae
    values = graph.inputs | graph.outputs
    if "frames" in values:
        frames, rows, columns = values["frames"].type.shape[2:]
    elif len(call.sizes) == 5:  # latents
        frames, rows, columns = call.sizes[2:]
        frames = pixel_frames(frames, vae.time_factor)
        rows, columns = rows * vae.space_factor, columns * vae.space_factor
    else:
        return "x".join(map(str, call.sizes))
    return f"{columns}x{rows}x{frames}"


def compile_job(job: Compilation) -> Iterator[tuple[Cell, Compiled | DoesNotFit]]:
    """Each program once it is compiled; stderr names it before. Raises InputError."""
    compiler = get_ahead_compiler(job.kind.backend, job.topology, job.mesh, job.times)

    def compile_cell(cell: Cell) -> tuple[Cell, Compiled | DoesNotFit]:
        weights, memory = weight_bytes([cell.graph]), job.kind.memory_bytes
        if weights > memory:
            said = f"its weights alone take {weights / 1e9:.1f} GB of {memory / 1e9:.0f} GB"
            return cell, DoesNotFit(said)
        note(f"compiling {cell.name}, {cell.size}, for {job.topology} ...", prefix="")
        try:
            return cell, compiler(cell.graph, cell.part)
        except DoesNotFit as error:
            return cell, error

    return map(compile_cell, job.cells)


def to_json(job: Compilation, cell: Cell, found: Compiled | DoesNotFit) -> dict[str, Any]:
    """Counts are of one call, bytes of one device, compile_s is what the compiler took here. A
    program that does not fit has no figures but why_not."""
    figures = [field.name for field in fields(Compiled) if job.times or field.name != "times_s"]
    refused = isinstance(found, DoesNotFit)
    return {
        "component": cell.component,
        "stage": cell.stage,
        "branches": cell.branches,
        "size": cell.size,
        "topology": job.topology,
        "mesh": dict(job.mesh),
        **{name: None if refused else getattr(found, name) for name in figures},
        "fits": fits(job, found),
        **({"why_not": str(found)} if refused else {}),
    }


def fits(job: Compilation, found: Compiled | DoesNotFit) -> bool:
    return isinstance(found, Compiled) and found.peak_bytes <= job.kind.memory_bytes


def header(job: Compilation) -> str:
    return (
        f"compiled for {job.topology} ({mesh_in_words(job.mesh)}), not run; per device, of one "
        f"call; it has {job.kind.memory_bytes / 1e9:.0f} GB\n\n{'component':<22} {'size':<26} "
        f"{'collectives':>11} {'received':>9} {'weights':>9} {'temporaries':>11} "
        f"{'outputs':>8} {'compile':>8}  fits"
    )


def row(job: Compilation, cell: Cell, found: Compiled | DoesNotFit) -> str:
    if isinstance(found, DoesNotFit):
        return f"{cell.name:<22} {cell.size:<26} does NOT fit: {found}"
    count = sum(found.collectives.values())
    sizes = (found.received_bytes, found.weights_bytes, found.temp_bytes, found.output_bytes)
    received, weights, temporaries, outputs = (f"{n / 1e9:.3g} GB" for n in sizes)
    return (
        f"{cell.name:<22} {cell.size:<26} {count:>11} {received:>9} {weights:>9} "
        f"{temporaries:>11} {outputs:>8} {found.compile_s:>6.0f} s  "
        f"{'yes' if fits(job, found) else 'NO'}" + in_words(found.times_s)
    )


def in_words(times_s: Mapping[str, float] | None) -> str:
    """Another line, the longest first; nothing if there are none."""
    if not times_s:
        return ""
    longest = sorted(times_s.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {s * 1e3:.1f}" for name, s in longest)
    return f"\n  estimated by the compiler's code: {sum(times_s.values()) * 1e3:.1f} ms ({parts})"
