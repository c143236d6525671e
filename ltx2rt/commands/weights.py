"""`ltx2rt weights make`, `inspect`, `fetch` and `merge`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ltx2rt.commands.options import PRESETS, json_flag
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, given_flags
from ltx2rt.instruments.make import make_checkpoint
from ltx2rt.pipelines import FIRST, pipeline, pipelines
from ltx2rt.session.options import ModelOptions, parse_lora
from ltx2rt.weights import hub
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.inspect import format_inspection, inspect_path
from ltx2rt.weights.lora import merge_to_file, open_lora
from ltx2rt.weights.part_table import files_beside, wanted_by
from ltx2rt.weights.presets import UPSAMPLERS


def make_flags(to: Any) -> None:
    to.add_argument("directory", type=Path, metavar="DIR", help="folder to write")
    names = ", ".join(PRESETS)
    to.add_argument(
        "--preset",
        choices=PRESETS,
        metavar="NAME",
        required=True,
        help=f"sizes: {names} (required)",
    )
    layouts = ("official", "diffusers")
    to.add_argument(
        "--layout",
        choices=layouts,
        metavar="|".join(layouts),
        required=True,
        help="layout (required)",
    )
    to.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    kinds = tuple(UPSAMPLERS)
    to.add_argument(
        "--upsampler",
        choices=kinds,
        metavar="|".join(kinds),
        default="x2",
        help="kind of upsampler (default: x2)",
    )
    to.add_argument(
        "--fp8",
        action="store_true",
        help="write most blocks with scales, as released fp8 files have them (official layout)",
    )
    to.add_argument("--dry-run", action="store_true", help="print the manifest and write nothing")


def make(args: argparse.Namespace) -> None:
    more = {
        "seed": args.seed,
        "dry_run": args.dry_run,
        "upsampler": args.upsampler,
        "fp8": args.fp8,
    }
    print(make_checkpoint(args.preset, args.layout, args.directory, **more))


def inspect_flags(to: Any) -> None:
    to.add_argument("path", type=Path, metavar="PATH", help="model file or folder")
    json_flag(to)


def inspect(args: argparse.Namespace) -> None:
    found = inspect_path(args.path)
    print(json.dumps(found, indent=1) if args.json else format_inspection(found))


def fetch_flags(to: Any) -> None:
    to.add_argument(
        "repository", type=Path, metavar="ORG/NAME[/FILE]", help="repository of the hub"
    )
    names = ", ".join(pipelines())
    about = f"pipeline to fetch the files of: {names} (default: {FIRST})"
    to.add_argument("--pipeline", default=FIRST, metavar="NAME", help=about)
    add_flags(to, ModelOptions, only=("video_decoder",))
    to.add_argument("--revision", metavar="R", help="branch, tag or commit (default: main)")


def fetch(args: argparse.Namespace) -> None:
    decoder = given_flags(args, ModelOptions).get("video_decoder")
    wanted = (*files_beside(decoder), *wanted_by(pipeline(args.pipeline)))
    repo = hub.parse_repo(
        Path(f"{args.repository}@{args.revision}" if args.revision else args.repository)
    )
    if repo is None:
        raise InputError(
            f"{args.repository}: expected ORG/NAME or ORG/NAME/FILE of the hub, not a path"
        )
    print(hub.fetch(repo, wanted=wanted))


def merge_flags(to: Any) -> None:
    several = {"nargs": "+", "action": "extend", "required": True}
    to.add_argument(
        "--model", type=Path, required=True, metavar="PATH", help="model file or folder (required)"
    )
    to.add_argument(
        "--lora", **several, metavar="FILE|FOLDER[:STRENGTH]", help="LoRAs to merge (required)"
    )
    to.add_argument(
        "--lora-allow-partial",
        action="store_true",
        help="merge what fits of a LoRA of another release, or with keys that the model lacks",
    )
    to.add_argument(
        "--tensor", **several, metavar="NAME", help="official names of tensors to write (required)"
    )
    to.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="file to write (required)"
    )
    dtypes = ("bfloat16", "float32")
    about = "dtype of the tensors (default: float32)"
    to.add_argument(
        "--dtype", choices=dtypes, metavar="|".join(dtypes), default="float32", help=about
    )


def merge(args: argparse.Namespace) -> None:
    specs = [parse_lora(text) for text in args.lora]
    loras = [open_lora(spec.path, spec.strength) for spec in specs]
    to = (args.output, args.dtype, args.lora_allow_partial)
    for merge in merge_to_file(open_checkpoint(args.model), loras, args.tensor, *to):
        print(merge.line())
