"""`ltx2rt weights make`, `inspect`, `fetch` and `merge`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ltx2rt.commands.options import PRESETS, wanted_files
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, given_flags
from ltx2rt.pipelines import FIRST, pipeline, pipelines
from ltx2rt.session.options import ModelOptions, parse_lora
from ltx2rt.weights import hub
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.inspect import format_inspection, inspect_path
from ltx2rt.weights.lora import merge_to_file, open_lora
from ltx2rt.weights.random.make import make_checkpoint
from ltx2rt.weights.random.presets import UPSAMPLERS


def make_flags(to: Any) -> None:
    to.add_argument("directory", type=Path, metavar="DIR")
    to.add_argument("--preset", choices=PRESETS, required=True)
    to.add_argument("--layout", choices=("official", "diffusers"), required=True)
    to.add_argument("--seed", type=int, default=0)
    to.add_argument("--upsampler", choices=tuple(UPSAMPLERS), default="x2", help="its kind (default: x2)")
    to.add_argument("--fp8", action="store_true", help="most blocks in float8 with scales (official layout)")
    to.add_argument("--dry-run", action="store_true", help="print the manifest, write nothing")


def make(args: argparse.Namespace) -> None:
    more = {"seed": args.seed, "dry_run": args.dry_run, "upsampler": args.upsampler, "fp8": args.fp8}
    print(make_checkpoint(args.preset, args.layout, args.directory, **more))


def inspect_flags(to: Any) -> None:
    to.add_argument("path", type=Path)
    to.add_argument("--json", action="store_true")


def inspect(args: argparse.Namespace) -> None:
    found = inspect_path(args.path)
    print(json.dumps(found, indent=1) if args.json else format_inspection(found))


def fetch_flags(to: Any) -> None:
    to.add_argument("repository", type=Path, metavar="ORG/NAME[/FILE]")
    names = ", ".join(pipelines())
    to.add_argument("--pipeline", default=FIRST, metavar="NAME", help=f"whose files: {names} (default: {FIRST})")
    add_flags(to, ModelOptions, only=("video_decoder",))
    to.add_argument("--revision", metavar="R", help="a branch, a tag or a commit (default: main)")


def fetch(args: argparse.Namespace) -> None:
    decoder = given_flags(args, ModelOptions).get("video_decoder")
    wanted = (*hub.parts(decoder), *wanted_files(pipeline(args.pipeline)))
    repo = hub.parse_repo(Path(f"{args.repository}@{args.revision}" if args.revision else args.repository))
    if repo is None:
        raise InputError(f"{args.repository}: expected ORG/NAME or ORG/NAME/FILE of the hub, not a path")
    print(hub.fetch(repo, wanted=wanted))


def merge_flags(to: Any) -> None:
    to.add_argument("--model", type=Path, required=True)
    to.add_argument("--lora", nargs="+", action="extend", required=True, metavar="FILE[:STRENGTH]")
    to.add_argument("--tensor", nargs="+", action="extend", required=True, metavar="OFFICIAL_NAME")
    to.add_argument("--output", type=Path, required=True, metavar="FILE")
    to.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="default: float32")


def merge(args: argparse.Namespace) -> None:
    specs = [parse_lora(text) for text in args.lora]
    loras = [open_lora(spec.path, spec.strength) for spec in specs]
    for merge in merge_to_file(open_checkpoint(args.model), loras, args.tensor, args.output, args.dtype):
        print(merge.line())
