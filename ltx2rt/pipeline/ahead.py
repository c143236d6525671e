"""`ltx2rt compile`: every network of a run through the compiler of devices that need not be here.

Decides which graphs a run consists of on a topology, at which size, and how the figures are shown. They are of compiled
programs; nothing is run. How a graph is compiled is the backend's business.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from ltx2rt.backend import Compiled, DoesNotFit, get_ahead_compiler
from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.graph import Graph
from ltx2rt.pipeline.graphs import component_graph
from ltx2rt.pipeline.request import COMPILED, CompileRequest, GraphRequest, default_steps
from ltx2rt.pipeline.schedule import STAGE2_SIGMAS
from ltx2rt.pipeline.tiling import plan_tiles
from ltx2rt.placement.cost import weight_bytes
from ltx2rt.placement.devices import DeviceKind, topology
from ltx2rt.placement.profiles import resolve
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.random.presets import preset

PARTS = {"denoise-before": "before", "denoise-step": "step"}  # components that are a part of the denoise loop
MODEL_BRANCHES = 4  # cond, uncond, perturbed, isolated: none of the default guidance scales is neutral


@dataclass(frozen=True)
class Cell:
    """One program to compile.

    stage, branches: of the denoise loop. size: what it works on, for the reader. part: which part of the graph, or how
    it runs, as the compiler takes it.
    """

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
class Job:
    """All programs of a request, and the devices they are for."""

    topology: str
    kind: DeviceKind
    mesh: Mapping[str, int]
    cells: tuple[Cell, ...]


def plan_job(request: CompileRequest) -> Job:
    """What to compile, from headers and sizes alone. Raises InputError for what no compiler could mend."""
    if request.stage not in (None, 1, 2):
        raise InputError(f"--stage: {request.stage}, expected 1 or 2")
    if unknown := [name for name in request.components if name not in COMPILED]:
        raise InputError(f"--component: unknown {unknown[0]!r}; known: {', '.join(COMPILED)}")
    kind, devices = topology(request.topology)
    profile, mesh = resolve(request.profile, kind.name, request.mesh, devices)
    if request.model:
        config = open_checkpoint(request.model, request.text_encoder, request.upsampler).config
    else:
        config = preset(request.preset or "").config
    placement = {"profile": profile.name, "mesh": mesh, "weights_dtype": request.weights_dtype}
    cells = tuple(_cells(config, request, placement))
    return Job(request.topology, kind, mesh, cells)


def _cells(config: ModelConfig, request: CompileRequest, where: Mapping[str, Any]) -> Iterator[Cell]:
    """In the order of a run. The first stage works at half the size."""
    unit = 2 * config.video_vae.space_factor
    if request.width % unit or request.height % unit or min(request.width, request.height) < unit:
        raise InputError(f"--width, --height: {request.width}x{request.height}, expected multiples of {unit}")
    full = (request.width, request.height, request.num_frames)
    half = (request.width // 2, request.height // 2, request.num_frames)

    def graph(component: str, size: tuple[int, int, int], **settings: int) -> Graph:
        width, height, frames = size
        asked = GraphRequest(component, width=width, height=height, num_frames=frames, **settings, **where)
        return component_graph(config, asked)

    def cell(component: str, size: tuple[int, int, int]) -> Cell:
        return Cell(component, graph(component, size), "x".join(map(str, size)))

    for component in COMPILED:
        if component not in request.components:
            continue
        if component in PARTS:
            stages = ((1, half, MODEL_BRANCHES, default_steps(config)), (2, full, 1, len(STAGE2_SIGMAS) - 1))
            for stage, size, branches, steps in stages:
                if request.stage in (None, stage):
                    branches = request.branches or branches
                    loop = graph("denoise", size, branches=branches, steps=steps)
                    clip = "{}x{}x{}, {} branch{}".format(*size, branches, "es" if branches > 1 else "")
                    yield Cell(component, loop, clip, stage, branches, PARTS[component])
        elif component == "video-encoder":  # an image is encoded at the size of each stage
            for stage, (width, height, _) in ((1, half), (2, full)):
                if request.stage in (None, stage):
                    size = (width, height, 1)
                    yield Cell(component, graph(component, size), "x".join(map(str, size)), stage)
        elif component == "video-decoder":  # every device decodes tiles of its own
            size = _tile(config, request)
            yield Cell(component, graph(component, size), "x".join(map(str, size)), part="each")
        else:
            yield cell(component, half if component == "upsampler" else full)


def _tile(config: ModelConfig, request: CompileRequest) -> tuple[int, int, int]:
    """Width, height and frames of the largest tile that the decoder gets at once."""
    vae = config.video_vae
    space, time = vae.space_factor, vae.time_factor
    if (request.num_frames - 1) % time or request.num_frames < 1:
        raise InputError(f"--num-frames: {request.num_frames}, expected {time}*k + 1")
    latent = ((request.num_frames - 1) // time + 1, request.height // space, request.width // space)
    frames, rows, columns = max(plan_tiles(request.vae_tiling, latent, vae).tile_shapes, key=prod)
    return columns * space, rows * space, (frames - 1) * time + 1


def compile_job(job: Job, backend: str = "tpu") -> Iterator[tuple[Cell, Compiled | DoesNotFit]]:
    """Each program as soon as it is compiled; which one is at work is said on stderr. InputError before the first."""
    compiler = get_ahead_compiler(backend, job.topology, job.mesh)

    def compile_cell(cell: Cell) -> tuple[Cell, Compiled | DoesNotFit]:
        weights, memory = weight_bytes([cell.graph]), job.kind.memory_bytes
        if weights > memory:
            return cell, DoesNotFit(f"its weights alone take {weights / 1e9:.1f} GB of {memory / 1e9:.0f} GB")
        print(f"compiling {cell.name}, {cell.size}, for {job.topology} ...", file=sys.stderr, flush=True)
        try:
            return cell, compiler(cell.graph, cell.part)
        except DoesNotFit as error:
            return cell, error

    return map(compile_cell, job.cells)


FIGURES = tuple(field.name for field in fields(Compiled))


def to_json(job: Job, cell: Cell, found: Compiled | DoesNotFit) -> dict[str, Any]:
    """Counts are of one call, bytes of one device, compile_s is what the compiler took here. What does not fit has no
    figures but why_not."""
    refused = isinstance(found, DoesNotFit)
    return {
        "component": cell.component,
        "stage": cell.stage,
        "branches": cell.branches,
        "size": cell.size,
        "topology": job.topology,
        "mesh": dict(job.mesh),
        **{name: None if refused else getattr(found, name) for name in FIGURES},
        "fits": fits(job, found),
        **({"why_not": str(found)} if refused else {}),
    }


def fits(job: Job, found: Compiled | DoesNotFit) -> bool:
    return isinstance(found, Compiled) and found.peak_bytes <= job.kind.memory_bytes


def header(job: Job) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in job.mesh.items()) or "one device"
    return (
        f"compiled for {job.topology} ({mesh}), not run; per device, of one call; it has "
        f"{job.kind.memory_bytes / 1e9:.0f} GB\n\n"
        f"{'component':<22} {'size':<26} {'collectives':>11} {'received':>9} {'weights':>9} {'temporaries':>11} "
        f"{'outputs':>8} {'compile':>8}  fits"
    )


def row(job: Job, cell: Cell, found: Compiled | DoesNotFit) -> str:
    if isinstance(found, DoesNotFit):
        return f"{cell.name:<22} {cell.size:<26} does NOT fit: {found}"
    count = sum(found.collectives.values())
    sizes = (found.received_bytes, found.weights_bytes, found.temp_bytes, found.output_bytes)
    received, weights, temporaries, outputs = (f"{n / 1e9:.3g} GB" for n in sizes)
    return (
        f"{cell.name:<22} {cell.size:<26} {count:>11} {received:>9} {weights:>9} {temporaries:>11} {outputs:>8} "
        f"{found.compile_s:>6.0f} s  {'yes' if fits(job, found) else 'NO'}"
    )
