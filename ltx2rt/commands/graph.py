"""`ltx2rt graph`: a network at a clip's size, as one device of a mesh runs it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ltx2rt.commands.options import model_or_preset, planned_options
from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, flag, given_flags, groups, marked
from ltx2rt.graph import Graph
from ltx2rt.graph.show import FORMATS, show
from ltx2rt.models.catalog import CATALOG
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines.groups.size import DEFAULT_FRAMES, Length, Size, check_step
from ltx2rt.pipelines.one_stage import OneStage
from ltx2rt.pipelines.request import Request
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import profile_of
from ltx2rt.session.options import ModelOptions
from ltx2rt.suggest import hint
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.part_table import PARTS
from ltx2rt.weights.presets import preset

DEFAULT_KIND = "h100-80gb"  # whose profile is taken if none is named
LOOP = "denoise"  # the guided step, looped over the model's steps
NAMES = (*CATALOG, LOOP)


@dataclass(frozen=True)
class GraphRequest:
    """The graph to print, and its format."""

    component: str
    branches: int = flag(4, "number of guidance branches", group="network", least=1)
    format: str = flag("text", "format of the output", group="output", choices=FORMATS)


def component_graph(
    config: ModelConfig,
    name: str,
    clip: Request | None = None,
    branches: int = 4,
    profile: str | None = None,
    mesh: Mapping[str, int] | None = None,
    weights_dtype: str | None = None,
    dtype: str = "bfloat16",
) -> Graph:
    """clip: whose size it has; None: the default one. Raises InputError if there is no such
    component, or the clip's size is not legal."""
    asked: Request = clip or OneStage()
    clip = replace(asked, num_frames=asked.num_frames or DEFAULT_FRAMES, **asked[Size].filled())
    vae, mesh = config.video_vae, mesh or {}
    side, time = vae.space_factor, vae.time_factor
    for flag_, px in (("--width", clip.width), ("--height", clip.height)):
        check_step(flag_, px, side, 0, "px", f"multiples of {side}")
    check_step("--num-frames", clip.num_frames, time, 1, "frames", f"{time}*k + 1")
    if name not in NAMES:
        raise InputError(
            f"no graph is called {name!r}; known: {', '.join(NAMES)}{hint(name, NAMES)}"
        )
    row = CATALOG["guided-step" if name == LOOP else name]
    for part in row.parts:
        if config.part(part) is None:
            raise InputError(f"no {PARTS[part].word} was found; pass one with {PARTS[part].flag}")
    geometry = Geometry.of(config, clip.width, clip.height, clip.num_frames, clip.fps)
    placement = Placement(profile_of(profile, DEFAULT_KIND, mesh), mesh, weights_dtype)
    placement = placement.of(branches) if row.branches else placement.text
    sizes = row.shared(row.sizes(config, geometry, branches), placement.sharing(row.rules))
    graph = row.trace(config, sizes, row.dtype or dtype)
    if name == LOOP:
        return placement.loop(graph, config.release.steps)
    return placement.local(graph, row.rules)


def flags(to: Any) -> None:
    groups(to)["network"].add_argument(
        "component", metavar="COMPONENT", help=f"network to print: {', '.join(NAMES)}"
    )
    model_or_preset(to)
    add_flags(to, Size)
    add_flags(to, Length, only=("num_frames",))
    add_flags(to, GraphRequest)
    add_flags(to, ModelOptions, only=marked("placed", ModelOptions))


def main(args: argparse.Namespace) -> None:
    options = planned_options(args)
    asked = GraphRequest(args.component, **given_flags(args, GraphRequest))
    clip = OneStage("a graph", **given_flags(args, OneStage))
    config = open_checkpoint(args.model).config if args.model else preset(args.preset).config
    placed = {name: getattr(options, name) for name in marked("placed", ModelOptions)}
    graph = component_graph(config, asked.component, clip, asked.branches, **placed)
    print(show(graph, asked.format), end="")
