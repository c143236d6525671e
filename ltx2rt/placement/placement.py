"""Where a run's graphs live, and the passes that take each of them there.

Decides the mesh of each stage and the order of the passes. What a profile splits stands in `profiles`, how in `passes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

from ltx2rt.errors import InputError
from ltx2rt.graph.ir import Graph
from ltx2rt.models.guided_step import PER_STEP, STATE
from ltx2rt.passes.coalesce import coalesce
from ltx2rt.passes.data_parallel import data_parallel
from ltx2rt.passes.fsdp import gather_weights
from ltx2rt.passes.hoist import hoist
from ltx2rt.passes.loop import looped, step_slots
from ltx2rt.passes.pack import pack
from ltx2rt.passes.place import place
from ltx2rt.passes.quantise import quantise
from ltx2rt.placement.mesh import FSDP, stage_mesh, text_mesh
from ltx2rt.placement.profiles import Profile, Rules


@dataclass(frozen=True)
class Placement:
    """How a run is split: a profile over a mesh of all devices, or of a stage.

    weights_dtype: "float8" quantises the transformer's blocks; anything else leaves weights in the graph's dtype.
    """

    profile: Profile
    mesh: Mapping[str, int] = field(default_factory=dict)
    weights_dtype: str | None = None

    def of(self, branches: int) -> Placement:
        """The placement of a stage with so many guidance branches."""
        return replace(self, mesh=stage_mesh(self.mesh, branches))

    @property
    def text(self) -> Placement:
        """The placement of the text encoder."""
        return replace(self, mesh=text_mesh(self.mesh))

    def local(self, graph: Graph, network: str) -> Graph:
        """`graph` as one device runs it, by the profile's rules for `network`.

        Raises InputError if a size of a strict network does not divide, or float8 weights would be cut for `fsdp`.
        """
        return _passed(graph, Job(self, network))

    def loop(self, step: Graph, num_steps: int) -> Graph:
        """All denoise steps as one device runs them, with room for `step_slots(num_steps)`.

        step: one guided step of the videos of one device; the mesh axis `data` multiplies them. Raises as `local` does.
        """
        return _passed(step, Job(self, "transformer", num_steps))


@dataclass(frozen=True)
class Job:
    """One graph's way through the passes. num_steps: of the loop that it becomes, if any."""

    placement: Placement
    network: str
    num_steps: int | None = None

    @property
    def mesh(self) -> Mapping[str, int]:
        return self.placement.mesh

    @property
    def strict(self) -> bool:
        return self.network in self.placement.profile.strict

    def rules(self, weights: bool) -> Rules:
        """Axis to mesh axis: of weights that are gathered where they are used, or of everything else."""
        rules = self.placement.profile.rules_of(self.network)
        return {axis: mesh_axis for axis, mesh_axis in rules.items() if (mesh_axis == FSDP) == weights}


def _quantised(graph: Graph, job: Job) -> Graph:
    if job.placement.weights_dtype != "float8" or job.network != "transformer":
        return graph
    if job.mesh.get(FSDP, 1) > 1:
        raise InputError(
            f"--weights-dtype: a float8 row and its scale stay together, {FSDP}={job.mesh[FSDP]} cuts weights along D; "
            "leave one of the two out"
        )
    return quantise(graph)


def _data_parallel(graph: Graph, job: Job) -> Graph:
    return data_parallel(graph, "videos", "data", job.mesh.get("data", 1)) if job.num_steps else graph


def _looped(graph: Graph, job: Job) -> Graph:
    return looped(graph, "denoise", step_slots(job.num_steps), STATE, PER_STEP) if job.num_steps else graph


PASSES: tuple[Callable[[Graph, Job], Graph], ...] = (
    # From here on shapes are those of one device, and every communication is a node.
    lambda graph, job: place(graph, job.rules(weights=False), job.mesh, job.strict),
    # After place: the scales are those of the rows that a device holds.
    _quantised,
    # After place, which knows the videos of one device only; before the loop, whose state is that of all.
    _data_parallel,
    _looped,
    # Before pack: a linear that leaves the loop must not take along those that stay.
    lambda graph, job: hoist(graph) if job.num_steps else graph,
    lambda graph, job: pack(graph),
    lambda graph, job: coalesce(graph),
    # After pack: weights are joined before they are cut, so there are as few gathers as matrix products.
    lambda graph, job: gather_weights(graph, job.rules(weights=True), job.mesh, job.strict),
    # Then `fuse`, in a backend: it alone knows its kernels.
)


def _passed(graph: Graph, job: Job) -> Graph:
    return reduce(lambda done, one: one(done, job), PASSES, graph)
