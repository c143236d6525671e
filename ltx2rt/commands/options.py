"""What commands share: their model flags, and the processes that they start."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from ltx2rt.backend import get_factory
from ltx2rt.flags import add_flags, given_flags
from ltx2rt.pipelines import FIRST, pipelines
from ltx2rt.pipelines.request import Request
from ltx2rt.ranks.start import start
from ltx2rt.session.open import located, with_mesh
from ltx2rt.session.options import ModelOptions

PRESETS = ("tiny-2.0", "tiny-2.3", "tiny-2.5", "ltx-2.0", "ltx-2.3", "ltx-2.5")
PLACED = ("profile", "mesh", "weights_dtype")
SIZED = ("width", "height", "num_frames")
WORDS = (  # flags of a clip that decide what it shows and not what it costs
    "prompt", "negative_prompt", "enhance_prompt", "enhance_seed", "enhanced_prompt", "seed", "noise_in",
)  # fmt: skip


def model_options(args: argparse.Namespace) -> ModelOptions:
    """Of a command that runs: on the mesh of this launch. Raises InputError."""
    return with_mesh(ModelOptions(**given_flags(args, ModelOptions)), os.environ)


def planned_options(args: argparse.Namespace) -> ModelOptions:
    """Of a command that runs nothing: the backend is the device kind's, or none; nothing is downloaded for it.

    Raises InputError.
    """
    given = given_flags(args, ModelOptions) | {"backend": "", "model": args.model or Path()}
    options = ModelOptions(**given)
    return located(replace(options, mesh=options.on_mesh(1), tp_size=None, offline=True))


def wanted_files(pipeline: type[Request]) -> list[str]:
    """The optional files of a checkpoint that the pipeline reads."""
    return ["upsampler"] * (pipeline.scale > 1) + ["lora"] * (pipeline.distilled in ("needed", "default"))


def model_or_preset(to: Any) -> None:
    model = to.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, metavar="PATH", help="a checkpoint: a file or a folder")
    model.add_argument("--preset", choices=PRESETS, help="the sizes of a released or a tiny model")


def planned_flags(to: Any, *models: str) -> None:
    """A model or a preset and some of its flags, a pipeline and all flags of pipelines but `WORDS`."""
    model_or_preset(to)
    to.add_argument("--pipeline", default=FIRST, metavar="NAME", help=f"{', '.join(pipelines())} (default: {FIRST})")
    add_flags(to, ModelOptions, only=(*models, *PLACED), dtype="bfloat16")
    add_flags(to, *pipelines().values(), but=WORDS)


def start_ranks(
    args: argparse.Namespace, options: ModelOptions, outputs: Sequence[Path], fed: bool = False
) -> int | None:
    """Run the command as a process for each device, if this process is not one of them; the exit status, or None.

    fed: the first of them reads this process's stdin.
    """
    factory, count = get_factory(options.backend), prod(options.mesh.values())
    if count == 1 or not factory.process_per_device or factory.rank_and_size(os.environ)[1] > 1:
        return None
    return start(args.argv, count, outputs, factory.most_processes(options.device), fed)
