"""`ltx2rt train prepare`, `run` and `export`."""

from __future__ import annotations

import argparse
import os
import re
from math import prod
from pathlib import Path
from typing import Any

from ltx2rt.atomic_file import check_outputs
from ltx2rt.backend import get_factory
from ltx2rt.commands.options import model_options
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, given_flags
from ltx2rt.notes import note
from ltx2rt.session.open import located, open_session
from ltx2rt.session.options import ModelOptions
from ltx2rt.train.prepare import PrepareRequest
from ltx2rt.train.prepare import prepare as fill
from ltx2rt.train.run import TrainRequest, described, start
from ltx2rt.train.state import read_state, states, write_lora

READ = (  # flags of a model that training reads
    "backend", "model", "text_encoder", "video_vae", "audio_vae", "config_from", "offline", "dtype", "device", "mesh",
    "profile", "cross_timestep_rule", "vae_tiling",
)  # fmt: skip
EXAMPLE = """\
example:
  ltx2rt train prepare --model MODEL_DIR --data clips/ --buckets 768x512x49 --output cache
  ltx2rt train run --model MODEL_DIR --data cache --output run
  ltx2rt generate --model MODEL_DIR --lora run/lora-002000.safetensors --prompt "..." --output clip.mp4
"""


def prepare_flags(to: Any) -> None:
    to.epilog = EXAMPLE
    add_flags(to, ModelOptions, backend="auto", only=READ)
    add_flags(to, PrepareRequest)


def prepare(args: argparse.Namespace) -> None:
    request = PrepareRequest(**given_flags(args, PrepareRequest))
    options = located(_options(args))
    fill(open_session(options), request, _say)


def run_flags(to: Any) -> None:
    to.epilog = EXAMPLE
    add_flags(to, ModelOptions, backend="auto", only=READ)
    add_flags(to, TrainRequest)


def run(args: argparse.Namespace) -> None:
    request = TrainRequest(**given_flags(args, TrainRequest))
    options = located(_options(args))
    made = start(open_session(options), request)
    for group, count in made.groups().items():
        _say(f"trains {group}: {count:,} numbers")
    r, g = made.request, made.geometry
    size = (
        f"{g.size_px[1]}x{g.size_px[0]}, {g.frames} latent frames"
        if "video" in made.streams
        else "sound alone"
    )
    _say(
        f"{len(made.samples)} samples of {size}, batch {made.batch} x {r.accumulate}, {r.steps} steps"
    )
    if request.dry_run:
        return

    def show(row: dict[str, Any]) -> None:
        if row["step"] % 10 == 0:
            losses = ", ".join(
                f"{name} {row[f'{name}_loss']:.4f}"
                for name in made.trained
                if row.get(f"{name}_loss") is not None
            )
            _say(f"step {row['step']}: loss {losses}; {row['seconds']:.2f} s")

    print(made.train(_say, show))


def export_flags(to: Any) -> None:
    to.add_argument(
        "run",
        metavar="RUN[:STEP]",
        help="folder of a run, and a step whose state was kept (default: the last)",
    )
    to.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="safetensors file to write (required)",
    )
    to.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        metavar="bfloat16|float32",
        default="bfloat16",
        help="dtype of the tensors (default: bfloat16)",
    )


def export(args: argparse.Namespace) -> None:
    match = re.fullmatch(r"(.+?)(?::(\d+))?", args.run)
    assert match is not None
    folder = Path(match[1])
    kept = {int(path.name): path for path in states(folder)}
    if not kept:
        raise InputError(
            f"{folder}: no state of a training run was found; pass the --output of `ltx2rt train run`"
        )
    step = int(match[2]) if match[2] else max(kept)
    if step not in kept:
        raise InputError(
            f"{folder}: no state of step {step} was kept; there are {', '.join(map(str, sorted(kept)))}"
        )
    if args.output.suffix != ".safetensors":
        raise InputError(f"--output: {args.output}, expected a name that ends in .safetensors")
    check_outputs([("--output", args.output)], [folder / "state"])
    about, arrays = read_state(kept[step])
    request = about["request"]
    scale = request["alpha"] / request["rank"]
    write_lora(args.output, arrays["parameters"], scale, described(about, step), args.dtype)
    print(args.output)


def _options(args: argparse.Namespace) -> ModelOptions:
    """Raises InputError for a mesh of several processes, which only one may prepare or train yet."""
    options = model_options(args)
    options.check()
    factory = get_factory(options.backend)
    if factory.process_per_device and (
        prod(options.mesh.values()) > 1 or factory.rank_and_size(os.environ)[1] > 1
    ):
        raise InputError(
            f"--mesh: `train` runs one process of {factory.name} so far; leave the flag out, or use --backend tpu"
        )
    return options


def _say(text: str) -> None:
    note(text)
