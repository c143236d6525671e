"""Meshes: the order in which devices are numbered along named axes, and the mesh of each stage.

Decides which devices are neighbours. What an axis splits is the profiles' business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

# The last axis is the fastest: devices that communicate most often are neighbours.
FSDP = "fsdp"
MESH_AXES = ("data", "guidance", "sequence", FSDP, "tensor")


def canonical(mesh: Mapping[str, int]) -> dict[str, int]:
    """`mesh` in the order of MESH_AXES."""
    return {axis: mesh[axis] for axis in MESH_AXES if axis in mesh}


def stage_mesh(mesh: Mapping[str, int], branches: int) -> dict[str, int]:
    """The mesh of a stage with `branches` guidance branches: with one, the devices of `guidance`
    serve as `sequence`. Every device keeps its number, and its slice of every weight."""
    if branches == 1 and mesh.get("guidance", 1) > 1:
        mesh = {**mesh, "sequence": mesh["guidance"] * mesh.get("sequence", 1), "guidance": 1}
    return canonical({axis: size for axis, size in mesh.items() if size > 1})


def text_mesh(mesh: Mapping[str, int]) -> dict[str, int]:
    """The text encoder's mesh. Prompts are few and short: devices share its heads."""
    devices = math.prod(mesh.values())
    return {"tensor": devices} if devices > 1 else {}


def in_words(mesh: Mapping[str, int], between: str = ", ") -> str:
    return between.join(f"{axis}={size}" for axis, size in mesh.items()) or "one device"
