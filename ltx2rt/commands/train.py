"""`ltx2rt train prepare`, `run` and `export`."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from ltx2rt.atomic_file import check_outputs
from ltx2rt.backend import EMA, get_factory, keep_compiled
from ltx2rt.commands.generate import compiled_folder
from ltx2rt.commands.options import model_options, start_ranks
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, flagged, given_flags, spelling
from ltx2rt.notes import note
from ltx2rt.ranks.crew import Crew
from ltx2rt.run.validation import with_validation
from ltx2rt.session.open import located, open_session
from ltx2rt.session.options import ModelOptions, existing_file
from ltx2rt.suggest import hint
from ltx2rt.train.prepare import MANIFEST, PrepareRequest
from ltx2rt.train.prepare import prepare as fill
from ltx2rt.train.request import TrainRequest
from ltx2rt.train.run import Run, described, start
from ltx2rt.train.state import FORMATS, read_state, states, write_lora
from ltx2rt.train.step import in_words

READ = (  # flags of a model that training reads
    "backend", "model", "text_encoder", "video_vae", "audio_vae", "config_from", "offline", "dtype",
    "device", "mesh",
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
    to.add_argument(
        "clips_folder", nargs="?", type=Path, metavar="DATA", help="the same as --data DATA"
    )
    add_flags(to, PrepareRequest)
    for action in to._actions:
        if action.dest == "data":
            action.required = False


def prepare(args: argparse.Namespace) -> None:
    if args.clips_folder is not None:
        if hasattr(args, "data"):
            raise InputError("--data: the clips are named twice; give DATA once")
        args.data = args.clips_folder
    if not hasattr(args, "data"):
        raise InputError("DATA: no clips were given; pass a folder, or a CSV, JSON or JSONL table")
    request = PrepareRequest(**given_flags(args, PrepareRequest))
    report = fill(open_session(located(_options(args))), request, note)
    if request.json:
        print(json.dumps(report))


RUN_READ = (*READ, "profile", "weights_dtype", "assume", "num_gpus", "memory", "max_memory")


def run_flags(to: Any) -> None:
    to.epilog = EXAMPLE
    add_flags(to, ModelOptions, backend="auto", only=RUN_READ)
    to.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML file with flags by name, dashes as underscores; those of the command line win",
    )
    add_flags(to, TrainRequest)
    for action in to._actions:  # the file may have them
        action.required = False


def configured(args: argparse.Namespace) -> argparse.Namespace:
    """`args` with the flags of `--config` that the command line lacks. Raises InputError."""
    known = {n: f for n, f in flagged(ModelOptions).items() if n in RUN_READ} | flagged(
        TrainRequest
    )
    if (path := args.config) is not None:
        existing_file("--config", path)
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InputError(f"--config: {path} is no TOML file ({error}); correct it") from None
        for name, value in found.items():
            if name not in known:
                raise InputError(
                    f"--config: {path} has {name!r}, which is no flag of `train "
                    f"run`{hint(name, known)}"
                )
            if not hasattr(args, name):
                setattr(args, name, _of_toml(known[name], value))
    for name in ("model", "data", "output"):
        if not hasattr(args, name):
            raise InputError(
                f"{spelling(known[name])}: none was given; pass it, or put it into --config"
            )
    return args


def _of_toml(field: Any, value: Any) -> Any:
    """The value as the command line gives it: text but for switches and lists."""
    if isinstance(value, list):
        return [str(x) for x in value]
    if isinstance(value, bool) or field.metadata["flag"].repeat:
        return value
    return str(value)


def run_files(args: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    """The files that all processes must have alike: those of the model, the cache's list, and the
    state to go on from; none is removed when a process dies."""
    request = TrainRequest(**given_flags(configured(args), TrainRequest))
    lists = [data.cache / MANIFEST for data in request.data]
    more = [path for path in (request.init,) if path]
    return [*_run_options(args).files, *lists, *more, *states(request.output)[-1:]], []


def run(args: argparse.Namespace) -> int | None:
    request = TrainRequest(**given_flags(configured(args), TrainRequest))
    options = _run_options(args)
    options.check()
    options = located(options)
    if (status := start_ranks(args, options, [], patient=True)) is not None:
        return status
    if args.own_process:
        keep_compiled(options.backend, compiled_folder(os.environ))
    made = with_validation(start(open_session(options), request))
    say = note if made.session.backend.is_main else lambda text: None
    if request.dry_run:
        return _dry_run(made, say)
    for line in _sizes(made):
        say(line)

    def show(row: dict[str, Any]) -> None:
        if request.json and made.session.backend.is_main:
            print(json.dumps(row), flush=True)
        if row["step"] % 10 == 0:
            losses = ", ".join(
                f"{name} {row[f'{name}_loss']:.4f}"
                for name in made.trained
                if row.get(f"{name}_loss") is not None
            )
            say(f"step {row['step']}: loss {losses}; {row['seconds']:.2f} s")

    with stopping(args.crew) as stopped:
        path = made.train(say, show, stopped)
    if made.session.backend.is_main:
        print(json.dumps({"lora": str(path)}) if request.json else path)
    return None


def _sizes(made: Run) -> Iterator[str]:
    for group, count in made.step.groups().items():
        yield f"trains {group}: {count:,} numbers"
    r, g = made.request, made.step.geometry
    size = (
        f"{g.size_px[1]}x{g.size_px[0]}, {g.frames} latent frames"
        if "video" in made.streams
        else "sound alone"
    )
    more = f", and {len(made.kinds) - 1} other kinds" if len(made.kinds) > 1 else ""
    apart = f" ({len(made.held_out)} more are measured alone)" if made.held_out else ""
    yield (
        f"{len(made.items)} samples{apart} of {size}{more}, batch {made.batch} x {r.accumulate}, "
        f"{r.steps} steps"
    )


def _dry_run(made: Run, say: Callable[[str], None]) -> None:
    """Groups, sizes, memory and the shapes of the first batch, as text on stderr or as JSON."""
    memory, feeds = made.step.memory, made.feeds(made.drawn(0, 0))
    shapes = {name: list(x.shape) for name, x in feeds.items()}
    for line in _sizes(made):
        say(line)
    say(f"memory {memory.total / 1e9:.3g} GB of a device: {in_words(memory)}")
    say("first batch: " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))
    if made.request.json and made.session.backend.is_main:
        found = {
            "groups": made.step.groups(),
            "samples": len(made.items),
            "steps": made.request.steps,
        }
        found |= {"held_out": len(made.held_out), "batch": made.batch * made.request.accumulate}
        print(json.dumps(found | {"memory_bytes": memory.total, "first_batch": shapes}))


@contextmanager
def stopping(crew: Crew | None) -> Iterator[list[int]]:
    """A list that is not empty once this process was asked to end. The first request does not end
    it otherwise."""
    asked: list[int] = []
    if crew:
        crew.asked = asked
        try:
            yield asked
        finally:
            crew.asked = None
        return
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, lambda number, _: asked.append(number)) for kind in kinds}
    try:
        yield asked
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


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
    to.add_argument(
        "--format",
        choices=FORMATS,
        metavar="|".join(FORMATS),
        default=FORMATS[0],
        help="names of the tensors (default: official, which ComfyUI and diffusers read, too)",
    )
    to.add_argument(
        "--ema", action="store_true", help="write the average that the run kept by --ema"
    )


def export(args: argparse.Namespace) -> None:
    match = re.fullmatch(r"(.+?)(?::(\d+))?", args.run)
    assert match is not None
    folder = Path(match[1])
    kept = {int(path.name): path for path in states(folder)}
    if not kept:
        raise InputError(
            f"{folder}: no state of a training run was found; pass the --output of `ltx2rt train "
            "run`"
        )
    step = int(match[2]) if match[2] else max(kept)
    if step not in kept:
        raise InputError(
            f"{folder}: no state of step {step} was kept; there are "
            f"{', '.join(map(str, sorted(kept)))}"
        )
    if args.output.suffix != ".safetensors":
        raise InputError(f"--output: {args.output}, expected a name that ends in .safetensors")
    check_outputs([("--output", args.output)], [folder / "state"])
    about, arrays = read_state(kept[step])
    request = about["request"]
    scale = request["alpha"] / request["rank"]
    kind = EMA if args.ema else "parameters"
    if kind not in arrays:
        raise InputError(
            f"--ema: {folder} kept no average; train with --ema, or leave the flag out"
        )
    facts = described(about, step)
    write_lora(args.output, arrays[kind], scale, facts, args.dtype, args.format)
    print(args.output)


def _options(args: argparse.Namespace) -> ModelOptions:
    """Raises InputError for a mesh of several processes, of which only one may prepare."""
    options = model_options(args)
    options.check()
    factory = get_factory(options.backend)
    if factory.process_per_device and (
        prod(options.mesh.values()) > 1 or factory.rank_and_size(os.environ)[1] > 1
    ):
        raise InputError(
            f"--mesh: `train prepare` runs one process of {factory.name}; leave the flag out"
        )
    return options


def _run_options(args: argparse.Namespace) -> ModelOptions:
    """Without a flag for the mesh, each process has its own samples. Raises InputError."""
    options = model_options(args)
    return replace(options, mesh={"data": options.num_gpus}) if options.num_gpus else options
