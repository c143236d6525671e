"""`ltx2rt weights make`, `inspect`, `fetch` and `merge`."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ltx2rt.backend import chosen_backend
from ltx2rt.commands.options import PRESETS, add_choice, json_flag
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, given_flags
from ltx2rt.instruments.make import make_checkpoint
from ltx2rt.pipelines import FIRST, pipeline, pipelines
from ltx2rt.pipelines.kind import samples_dev
from ltx2rt.session.open import accelerator_room
from ltx2rt.session.options import ModelOptions, parse_lora
from ltx2rt.weights import hub
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.forms import Room
from ltx2rt.weights.inspect import format_inspection, inspect_path
from ltx2rt.weights.lora.file import merge_to_file, open_lora
from ltx2rt.weights.near import Chooser
from ltx2rt.weights.part_table import files_beside, wanted_by
from ltx2rt.weights.presets import UPSAMPLERS


def make_flags(to: Any) -> None:
    to.add_argument("directory", type=Path, metavar="DIR", help="folder to write")
    about, needed = f"sizes: {', '.join(PRESETS)} (required)", {"required": True}
    add_choice(to, "--preset", PRESETS, about, metavar="NAME", **needed)
    add_choice(to, "--layout", ("official", "diffusers"), "layout (required)", **needed)
    to.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    about = "kind of upsampler (default: x2)"
    add_choice(to, "--upsampler", tuple(UPSAMPLERS), about, default="x2")
    about = "write most blocks with scales, as released fp8 files have them (official layout)"
    to.add_argument("--fp8", action="store_true", help=about)
    about = "also write IC-LoRAs, for --upscale, --reference, --hdr and dubit"
    to.add_argument("--ic-lora", action="store_true", help=about)
    to.add_argument("--dry-run", action="store_true", help="print the manifest and write nothing")


def make(args: argparse.Namespace) -> None:
    names = ("seed", "dry_run", "upsampler", "fp8", "ic_lora")
    more = {name: getattr(args, name) for name in names}
    print(make_checkpoint(args.preset, args.layout, args.directory, **more))


def inspect_flags(to: Any) -> None:
    to.add_argument("path", type=Path, metavar="PATH", help="model file or folder")
    json_flag(to)


def inspect(args: argparse.Namespace) -> None:
    found = inspect_path(args.path)
    print(json.dumps(found, indent=1) if args.json else format_inspection(found))


def fetch_flags(to: Any) -> None:
    about = "repository of the hub"
    to.add_argument("repository", type=Path, metavar="ORG/NAME[/FILE]", help=about)
    names = ", ".join(pipelines())
    about = f"pipeline to fetch the files of: {names} (default: what distilled weights need)"
    to.add_argument("--pipeline", metavar="NAME", help=about)
    add_flags(to, ModelOptions, only=("video_decoder",))
    to.add_argument("--revision", metavar="R", help="branch, tag or commit (default: main)")


def fetch(args: argparse.Namespace) -> None:
    decoder = given_flags(args, ModelOptions).get("video_decoder")
    type_ = pipeline(args.pipeline or FIRST)
    wanted = (*files_beside(decoder), *wanted_by(type_))
    kind = "dev" if args.pipeline and samples_dev(type_) else "distilled"
    chooser = Chooser(partial(_room, args.repository), kind)
    at = f"@{args.revision}" if args.revision else ""
    repo = hub.parse_repo(Path(f"{args.repository}{at}"))
    if repo is None:
        raise InputError(
            f"{args.repository}: expected ORG/NAME or ORG/NAME/FILE of the hub, not a path"
        )
    print(hub.fetch(repo, wanted=wanted, chooser=chooser))


def _room(model: Path) -> Room | None:
    """Memory of the accelerator here; None without one, as where files are only fetched."""
    with suppress(InputError):  # no backend
        return accelerator_room(ModelOptions(chosen_backend(quiet=True), model))
    return None


def merge_flags(to: Any) -> None:
    def needed(name: str, about: str, metavar: str, **how: Any) -> None:
        to.add_argument(name, help=f"{about} (required)", metavar=metavar, required=True, **how)

    several = {"nargs": "+", "action": "extend"}
    needed("--model", "model file or folder", "PATH", type=Path)
    needed("--lora", "LoRAs to merge", "FILE|FOLDER[:STRENGTH]", **several)
    add_flags(to, ModelOptions, only=("lora_allow_partial",))
    needed("--tensor", "official names of tensors to write", "NAME", **several)
    needed("--output", "file to write", "FILE", type=Path)
    about = "dtype of the tensors (default: float32)"
    add_choice(to, "--dtype", ("bfloat16", "float32"), about, default="float32")


def merge(args: argparse.Namespace) -> None:
    specs = [parse_lora(text) for text in args.lora]
    loras = [open_lora(spec.path, spec.strength) for spec in specs]
    partial = given_flags(args, ModelOptions).get("lora_allow_partial", False)
    checkpoint = open_checkpoint(args.model)
    for merge in merge_to_file(checkpoint, loras, args.tensor, args.output, args.dtype, partial):
        print(merge.line())
