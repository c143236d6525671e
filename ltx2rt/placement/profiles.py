"""Named sharding profiles: which axis of which network is split over which mesh axis.

One registry for both backends. A network that a profile does not name is replicated: the VAE, vocoder and upsampler
weights always are, and their tiles are spread instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ltx2rt.errors import InputError
from ltx2rt.graph.ir import Graph
from ltx2rt.models.guided_step import PER_STEP, STATE
from ltx2rt.passes.coalesce import coalesce
from ltx2rt.passes.hoist import hoist
from ltx2rt.passes.loop import looped
from ltx2rt.passes.pack import pack
from ltx2rt.passes.place import place
from ltx2rt.passes.spread import spread

Rules = Mapping[str, str]  # axis -> mesh axis

STEP_SLOTS = 8  # modulation rows of a slot that stays empty cost next to nothing

HEADS_AND_FF = {"heads": "tensor", "kv_heads": "tensor", "ff": "tensor"}


@dataclass(frozen=True)
class Profile:
    """rules: per network. strict: networks whose sizes must divide; the others fall back to replicated."""

    name: str
    rules: Mapping[str, Rules]
    strict: frozenset[str] = frozenset()


SPLIT = {
    "transformer": HEADS_AND_FF | {"tokens": "sequence", "B": "guidance"},
    "text-encoder": HEADS_AND_FF,
}
STRICT = frozenset({"transformer"})

PROFILES = {
    profile.name: profile
    for profile in (
        Profile("single", {}),
        Profile("hopper", SPLIT, STRICT),
        Profile("trillium", SPLIT, STRICT),  # v6e: meant for tensor=2,sequence=4 on eight chips
        Profile("ironwood", SPLIT, STRICT),  # v7x: meant for sequence=8, which holds the weights whole
        Profile("cpu", SPLIT, STRICT),
    )
}
BY_DEVICE = {"cuda": "hopper", "tpu": "trillium", "cpu": "cpu"}


def profile_of(name: str | None, device_kind: str, mesh: Mapping[str, int]) -> Profile:
    """The profile by name, or the device kind's own. Raises InputError naming the known ones."""
    if name is None:
        split = any(size > 1 for size in mesh.values())
        name = BY_DEVICE.get(device_kind, device_kind) if split else "single"
    if name not in PROFILES:
        raise InputError(f"unknown profile {name!r}; known profiles: {', '.join(PROFILES)}")
    return PROFILES[name]


def placed(graph: Graph, network: str, profile: Profile, mesh: Mapping[str, int]) -> Graph:
    """`graph` as one device of the mesh runs it, by the profile's rules for `network`."""
    rules = profile.rules.get(network, {})
    return coalesce(pack(place(graph, rules, mesh, strict=network in profile.strict)))


def placed_loop(step: Graph, profile: Profile, mesh: Mapping[str, int], num_steps: int) -> Graph:
    """All denoise steps as one device runs them: the graph of one step placed, looped, and lightened by `hoist`.

    step: for the videos of one device; the mesh axis `data` multiplies them.

    The loop has room for `num_steps` rounded up to a multiple of STEP_SLOTS; another number of steps in it is the same
    graph.
    """
    count = -(-num_steps // STEP_SLOTS) * STEP_SLOTS
    local = place(step, profile.rules.get("transformer", {}), mesh, strict="transformer" in profile.strict)
    local = spread(local, "videos", "data", mesh.get("data", 1))
    return coalesce(pack(hoist(looped(local, "denoise", count, STATE, PER_STEP))))


def undivided(graph: Graph, rules: Rules, mesh: Mapping[str, int]) -> Iterator[tuple[str, str, int]]:
    """(part, axis, size) wherever a rule would split an axis of a linear of the unplaced `graph`, but cannot."""
    found = {}
    for node in graph.nodes:
        if node.op == "repeat":
            yield from undivided(node.plan["repeat"].body, rules, mesh)
        elif node.op == "linear":
            found |= {a: n for a, n in node.attrs["out"].items() if n % mesh.get(rules.get(a, ""), 1)}
    for axis, size in found.items():
        yield graph.name, axis, size
