"""Named sharding profiles: which axis of which network is split over which mesh axis, and the mesh
each is meant for.

One registry for both backends. A network that a profile does not name is replicated: the VAE,
vocoder and upsampler weights always are, and their tiles are spread instead, or slabs of
their inputs. The text encoder runs positive and negative prompt in one batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ltx2rt.errors import InputError
from ltx2rt.graph.ir import Graph
from ltx2rt.passes.place import shared_key_head
from ltx2rt.placement.devices import device_kinds
from ltx2rt.placement.mesh import FSDP, MESH_AXES, canonical
from ltx2rt.suggest import hint

Rules = Mapping[str, str]  # axis -> mesh axis

HEADS_AND_FF = {"heads": "tensor", "kv_heads": "tensor", "ff": "tensor"}
EMBED = {"D": FSDP, "audio_D": FSDP}


@dataclass(frozen=True)
class Profile:
    """rules: per network; those to `fsdp` are of weights alone, which are gathered where they are
    used. Videos are spread over `data` in every profile.

    mesh: what it is meant for, -1 for all devices that are left. strict: networks whose sizes must
    divide; the others fall back to replicated. audio: "replicated", every device has all audio
    tokens; or "split", as the video's are.
    """

    name: str
    rules: Mapping[str, Rules]
    mesh: Mapping[str, int] = field(default_factory=dict)
    strict: frozenset[str] = frozenset({"transformer"})
    # few tokens: to split them communicates more than it saves
    audio: Literal["replicated", "split"] = "replicated"

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which something is split."""
        used = {axis for rules in self.rules.values() for axis in rules.values()}
        return tuple(axis for axis in MESH_AXES if axis in used)

    def rules_of(self, network: str) -> Rules:
        rules = self.rules.get(network, {})
        split = self.audio == "split" and "tokens" in rules
        return {**rules, "audio_tokens": rules["tokens"]} if split else rules


# Whatever the mesh has: heads and feed-forward, tokens, guidance branches, weights.
SPLIT = {
    "transformer": HEADS_AND_FF | {"tokens": "sequence", "B": "guidance"} | EMBED,
    "text-encoder": HEADS_AND_FF,
    "diffusion-features": {"slabs": "tensor"},
    "diffusion-slabs": {"slabs": "tensor"},
}

PROFILES = {
    profile.name: profile
    for profile in (
        Profile("single", {}),
        Profile("hopper", SPLIT, {"tensor": -1}),
        # two halves of the weights fit v6e's 32 GB
        Profile("trillium", SPLIT, {"sequence": -1, "tensor": 2}),
        Profile("ironwood", SPLIT, {"sequence": -1}),  # v5p and v7x hold the weights whole
        Profile(
            "trillium-2d", SPLIT | {"transformer": HEADS_AND_FF | EMBED}, {"fsdp": -1, "tensor": 4}
        ),
        Profile("ironwood-1d", SPLIT | {"transformer": HEADS_AND_FF}, {"tensor": -1}),
        Profile("cpu", SPLIT, {"tensor": -1}),
    )
}


def _by_device() -> dict[str, str]:
    """Profiles by the name of a kind of devices, and by what its backend calls it."""
    kinds = device_kinds().values()
    return {"cpu": "cpu"} | {name: k.profile for k in kinds for name in (k.name, *k.found_as)}


def profile_of(name: str | None, device_kind: str, mesh: Mapping[str, int]) -> Profile:
    """The profile by name, or the device kind's own: of "cpu", of a kind by its name or by what its
    backend calls it. Raises InputError naming the known ones, or the axes of the profile if it
    splits nothing over one of the mesh."""
    several = [axis for axis, size in mesh.items() if size > 1]
    by_device = _by_device() if name is None and several else {}
    if name is None and several and device_kind not in by_device:
        kinds = ", ".join(by_device)
        raise InputError(
            f"unknown device kind {device_kind!r}; known: {kinds}; choose one of the profiles "
            f"with --profile: {', '.join(PROFILES)}"
        )
    name = name or (by_device[device_kind] if several else "single")
    if name not in PROFILES:
        raise InputError(
            f"unknown profile {name!r}; known profiles: {', '.join(PROFILES)}{hint(name, PROFILES)}"
        )
    profile = PROFILES[name]
    for axis in several:
        if axis not in ("data", *profile.axes):
            raise InputError(
                f"profile {name} splits nothing over {axis}={mesh[axis]}; "
                f"its mesh axes: {', '.join(profile.axes) or 'none'}"
            )
    return profile


def default_mesh(profile: Profile, devices: int) -> dict[str, int]:
    """A profile's usual mesh of so many devices. Raises InputError if they do not divide."""
    fixed = math.prod(size for size in profile.mesh.values() if size != -1)
    if devices == 1 or not profile.mesh:
        return {}
    if devices % fixed:
        sizes = {axis: "N" if size == -1 else size for axis, size in profile.mesh.items()}
        meant = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        raise InputError(
            f"profile {profile.name} is meant for {meant}, not for {devices} devices; say which "
            "with --mesh"
        )
    mesh = {axis: devices // fixed if size == -1 else size for axis, size in profile.mesh.items()}
    return canonical({axis: size for axis, size in mesh.items() if size > 1})


def resolve(
    name: str | None, device_kind: str, mesh: Mapping[str, int], devices: int
) -> tuple[Profile, dict[str, int]]:
    """The profile, and the mesh of all `devices`: the requested or the profile's one. Raises
    InputError as `profile_of` and `default_mesh` do, and for another number of devices."""
    profile = profile_of(name, device_kind, mesh or {"data": devices})
    used = {axis: size for axis, size in mesh.items() if size > 1}
    found = used or default_mesh(profile, devices)
    if (count := math.prod(found.values())) == devices:
        return profile, found
    if mesh:
        raise InputError(
            f"--mesh: {dict(mesh)} is of {count} devices, there are {devices}; make the two agree"
        )
    raise InputError(
        f"profile {profile.name} has no mesh of {devices} devices; give a --mesh of all of them, "
        "or another --profile"
    )


def undivided(
    graph: Graph, rules: Rules, mesh: Mapping[str, int]
) -> Iterator[tuple[str, str, int]]:
    """(part, axis, size) where a rule would split a linear's axis, but cannot."""
    found = {}
    for node in graph.nodes:
        if node.op == "repeat":
            yield from undivided(node.repeat.body, rules, mesh)
        elif node.op in ("linear", "split"):  # a packed linear's axes are in the split after it
            for axis, size in node.attrs["out" if node.op == "linear" else "into"].items():
                parts = mesh.get(rules.get(axis, ""), 1)
                found |= {axis: size} if size % parts and not shared_key_head(axis, size) else {}
    for axis, size in found.items():
        yield graph.name, axis, size
