"""Placement of a run's graphs, and the passes that apply it.

Decides the mesh of each stage and the order of the passes. `profiles` defines the split axes,
`passes` the rewriting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.graph.encodings import QUANTISED
from ltx2rt.graph.ir import Graph
from ltx2rt.models.samplers import PER_STEP
from ltx2rt.passes.adapters import Adapters, adapted
from ltx2rt.passes.coalesce import coalesce
from ltx2rt.passes.data_parallel import data_parallel
from ltx2rt.passes.fsdp import gather_weights
from ltx2rt.passes.hoist import hoist
from ltx2rt.passes.loop import looped, step_slots
from ltx2rt.passes.pack import pack
from ltx2rt.passes.place import place
from ltx2rt.passes.quantise import quantise
from ltx2rt.passes.share import share
from ltx2rt.passes.unpack import keep, kept_as, unpack
from ltx2rt.placement.mesh import FSDP, stage_mesh, text_mesh
from ltx2rt.placement.profiles import Profile, Rules


@dataclass(frozen=True)
class Placement:
    """Split of a run: a profile over a mesh of all devices, or of a stage.

    weights_dtype: one of `encodings.QUANTISED` quantises the transformer's blocks; anything else
    leaves weights in the graph's dtype, but those that are kept as stored: encodings by the names
    of tensors. adapters: trained low-rank pairs of the transformer's linears. keep_bytes: as of
    `hoist`.
    """

    profile: Profile = field(hash=False)
    mesh: Mapping[str, int] = field(default_factory=dict, hash=False)
    weights_dtype: str | None = None
    adapters: Adapters | None = None
    stored: Mapping[str, str] = field(default_factory=dict, hash=False)
    keep_bytes: int | None = None

    def of(self, branches: int) -> Placement:
        """The placement of a stage with `branches` guidance branches."""
        return replace(self, mesh=stage_mesh(self.mesh, branches))

    @property
    def text(self) -> Placement:
        """The placement of the text encoder."""
        return replace(self, mesh=text_mesh(self.mesh))

    def local(self, graph: Graph, network: str) -> Graph:
        """`graph` as one device runs it, by the profile's rules for `network`. Raises InputError if
        a size of a strict network does not divide, or quantised weights would be cut for `fsdp`."""
        return self._passed(graph, network, None)

    def loop(self, step: Graph, num_steps: int) -> Graph:
        """All denoise steps as one device runs them, with room for `step_slots(num_steps)`.

        step: one guided step of the videos of one device; the mesh axis `data` multiplies them.
        Raises as `local` does.
        """
        return self._passed(step, "transformer", num_steps)

    def _passed(self, graph: Graph, network: str, num_steps: int | None) -> Graph:
        return reduce(lambda done, one: one(done, self, network, num_steps), PASSES, graph)

    def cuts(self, network: str) -> tuple[Any, ...]:
        """The rules and mesh axes that cut a network or its weights; none if it stays whole."""
        rules = self.profile.rules_of(network)
        several = {axis: size for axis, size in self.mesh.items() if size > 1}
        if network == "transformer" or not several.keys().isdisjoint({*rules.values(), FSDP}):
            return *sorted(rules.items()), *several.items()
        return ()

    def sharing(self, network: str) -> int:
        """The number of devices that a network is cut over."""
        return prod(self.mesh.values()) if self.cuts(network) else 1

    def rules(self, network: str, weights: bool) -> Rules:
        """Axis to mesh axis: of weights that are gathered when used, or of all else."""
        rules = self.profile.rules_of(network).items()
        return {axis: mesh_axis for axis, mesh_axis in rules if (mesh_axis == FSDP) == weights}


def _quantised(graph: Graph, on: Placement, network: str, steps: int | None) -> Graph:
    gathered = on.mesh.get(FSDP, 1) > 1
    if on.weights_dtype not in QUANTISED or network != "transformer":
        return graph if gathered else keep(graph, on.stored)
    if gathered:
        raise InputError(
            f"--weights-dtype: a row of {on.weights_dtype} and its scale stay together, "
            f"{FSDP}={on.mesh[FSDP]} cuts weights along D; leave one of the two out"
        )
    return (kept_as if on.adapters else quantise)(graph, on.weights_dtype)


def _shared(graph: Graph, on: Placement, network: str, steps: int | None) -> Graph:
    """Share nodes between guidance branches, unless the branches are on different devices."""
    return share(graph) if network == "transformer" and on.mesh.get("guidance", 1) == 1 else graph


# Each takes a graph, the placement, the network, and the number of steps if the graph becomes their
# loop.
PASSES: tuple[Callable[[Graph, Placement, str, int | None], Graph], ...] = (
    # From here on shapes are per device, and every communication is a node.
    lambda g, on, net, steps: place(
        g, on.rules(net, weights=False), on.mesh, net in on.profile.strict
    ),
    # After place: the scales belong to the rows that a device holds.
    _quantised,
    # After place: adapters are cut like their linears; before pack, which joins those.
    lambda g, on, net, _: adapted(g, on.adapters) if on.adapters and net == "transformer" else g,
    # After place, so that every part of a divided stack of blocks keeps its tokens cut; after
    # quantise, which wants the stack whole; before the loop and hoist, for which the parts are
    # stacks like any other.
    _shared,
    # After place, which knows the videos of one device only; before the loop, whose state is all
    # videos'.
    lambda g, on, net, steps: (
        data_parallel(g, "videos", "data", on.mesh.get("data", 1)) if steps else g
    ),
    lambda g, on, net, steps: looped(g, "denoise", step_slots(steps), PER_STEP) if steps else g,
    # Before pack: a linear that leaves the loop must not take along those that stay.
    lambda g, on, net, steps: hoist(g, on.keep_bytes) if steps else g,
    lambda g, on, net, steps: pack(g),
    lambda g, on, net, steps: coalesce(g),
    # After pack: weights are joined before they are cut, so there are as few gathers as matrix
    # products.
    lambda g, on, net, steps: gather_weights(
        g, on.rules(net, weights=True), on.mesh, net in on.profile.strict
    ),
    # Last: until here a weight is one parameter, however it is kept.
    lambda g, on, net, steps: unpack(g),
    # Then `rotate`, `interleave` and `fuse`, in a backend: only it knows its streams and kernels.
)
