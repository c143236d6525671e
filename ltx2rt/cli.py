"""The command line: flags in, exit status out.

Decides spelling, help and how failures are reported: 2 for bad input, 1 for any other failure, 130 when interrupted,
one line on stderr each time. Flags stand on the dataclasses of the commands and pipelines; handlers import what they
need, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from ltx2rt import __version__
from ltx2rt.errors import InputError
from ltx2rt.notes import LOGGER, note
from ltx2rt.ranks import facts
from ltx2rt.ranks.crew import Crew
from ltx2rt.ranks.start import start

Handler = Callable[[argparse.Namespace], int | None]  # the exit status; None: 0
BAD_INPUT, FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143
PRESETS = ("tiny-2.0", "tiny-2.3", "ltx-2.0", "ltx-2.3")


class Parser(argparse.ArgumentParser):
    """argparse, with its errors in one line and no guessing of abbreviated flags.

    fill: adds the command's flags, when they are needed.
    """

    def __init__(self, *args: Any, fill: Callable[[Parser], None] | None = None, **kwargs: Any):
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self.fill = fill

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.fill is not None:
            fill, self.fill = self.fill, None
            fill(self)
        known, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:  # else the parser of all commands would say so
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        if not _first():  # all ranks have the same flags
            self.exit(BAD_INPUT)
        self.exit(BAD_INPUT, f"ltx2rt: error: {message}; see `{self.prog} --help`\n")


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    args.keep = executables_folder(os.environ) if argv is None else None
    if argv is None:  # a process of its own: let `kill` unwind, so that no partial file stays behind
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as `nohup` has it
            signal.signal(signal.SIGHUP, lambda *_: sys.exit(TERMINATED))
    LOGGER.setLevel(logging.ERROR if getattr(args, "quiet", False) else logging.NOTSET)
    crew = None
    try:
        crew = _join(args)
        status = args.handler(args) or 0
        sys.stdout.flush()
        if crew:
            crew.leave()
        return status
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED if crew is None else crew.fail("nobody reads its output", FAILED)
    except KeyboardInterrupt:
        status = _fail("interrupted", INTERRUPTED, crew)
        return status if argv is not None else _leave(status)
    except SystemExit as end:
        if argv is None and end.code == TERMINATED:
            _leave(TERMINATED)
        raise
    except InputError as error:
        return _fail(str(error), BAD_INPUT, crew)
    except Exception as error:
        return _fail(f"{type(error).__name__}: {error}", FAILED, crew)


def _leave(status: int) -> NoReturn:
    """End this process at once, its files cleaned up: a compiler's threads that still work crash a slower end."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _fail(message: str, status: int, crew: Crew | None) -> int:
    if os.environ.get("LTX2RT_TRACEBACK") == "1":
        import traceback

        traceback.print_exc()
    message = " ".join(message.split())
    if crew:
        crew.fail(message, status, bad_input=status == BAD_INPUT)
    print(f"ltx2rt: error: {message}", file=sys.stderr)
    return status


def _join(args: argparse.Namespace) -> Crew | None:
    """The other ranks, if this process is one of several; all were given the same arguments and files."""
    if not hasattr(args, "backend"):
        return None
    from ltx2rt.backend import backend_names, get_factory, get_rendezvous

    if args.backend not in backend_names():
        return None
    factory = get_factory(args.backend)
    rank, size = factory.rank_and_size(os.environ)
    if size == 1:
        return None
    inputs, outputs = _files(args)
    try:
        crew = Crew(rank, size, get_rendezvous(args.backend), outputs)
    except InputError as error:
        if rank == 0 or not isinstance(error.__cause__, ImportError):
            raise
        sys.exit(BAD_INPUT)  # all ranks run one installation
    try:
        crew.agree("versions", facts.versions(factory.packages))
        given = {name: value for name, value in vars(args).items() if name not in ("handler", "argv", "keep")}
        crew.agree("arguments", {f"--{name.replace('_', '-')}": str(value) for name, value in given.items()})
        crew.agree("files", facts.digests(inputs))
        if hasattr(args, "output") and not hasattr(args, "seed"):
            from ltx2rt.pipelines.request import draw_seed

            args.seed = crew.from_main("seed", draw_seed)
    except InputError as error:
        _fail(str(error), BAD_INPUT, crew)
    return crew


def _files(args: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    """What generate or probe reads, and what it writes."""
    if hasattr(args, "outputs"):
        options, probe = probe_request(args)
        return options.files + [path for path in (probe.inputs,) if path], [probe.outputs]
    options, request, files = generate_request(args)
    seeds = range(request.seed or 0, (request.seed or 0) + request.num_videos)
    return options.files + request.files, files.all(seeds)


def _start_ranks(args: argparse.Namespace, options: Any, outputs: Sequence[Path]) -> int | None:
    """Run the command as a process for each device, if this process is not one of them; the exit status, or None."""
    from ltx2rt.backend import get_factory

    factory, count = get_factory(options.backend), prod(options.mesh.values())
    if count == 1 or not factory.process_per_device or factory.rank_and_size(os.environ)[1] > 1:
        return None
    return start(args.argv, count, outputs, factory.most_processes(options.device))


def parser() -> Parser:
    top = Parser(prog="ltx2rt", description="Generate video with sound by LTX-2, with PyTorch or JAX.")
    top.add_argument("--version", action="version", version=f"ltx2rt {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def command(to: Any, name: str, handler: Handler, help: str, fill: Any = None) -> Parser:
        added = to.add_parser(name, help=help, description=help, fill=fill)
        added.set_defaults(handler=handler)
        return added

    command(commands, "generate", generate, "turn a prompt into one MP4 with sound", generate_flags)
    command(commands, "probe", probe, "run one network on given tensors", probe_flags)

    weights = commands.add_parser("weights", help="make, inspect or merge checkpoints")
    weights_commands = weights.add_subparsers(metavar="COMMAND", required=True)
    make = command(weights_commands, "make", weights_make, "write a random checkpoint in a real layout")
    make.add_argument("directory", type=Path, metavar="DIR")
    make.add_argument("--preset", choices=PRESETS, required=True)
    make.add_argument("--layout", choices=("official", "diffusers"), required=True)
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--dry-run", action="store_true", help="print the manifest, write nothing")
    inspect = command(weights_commands, "inspect", weights_inspect, "say what a file or folder is")
    inspect.add_argument("path", type=Path)
    inspect.add_argument("--json", action="store_true")
    merge = command(weights_commands, "merge", weights_merge, "write tensors with LoRAs merged")
    merge.add_argument("--model", type=Path, required=True)
    merge.add_argument("--lora", nargs="+", action="extend", required=True, metavar="FILE[:STRENGTH]")
    merge.add_argument("--tensor", nargs="+", action="extend", required=True, metavar="OFFICIAL_NAME")
    merge.add_argument("--output", type=Path, required=True, metavar="FILE")
    merge.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="default: float32")

    compare_ = command(commands, "compare", compare, "measure how close two clips are")
    compare_.add_argument("a", type=Path, metavar="A.mp4")
    compare_.add_argument("b", type=Path, metavar="B.mp4")
    compare_.add_argument("--json", action="store_true")

    command(commands, "graph", graph, "print the graph of a network, placed on a mesh if asked", graph_flags)
    command(commands, "plan", plan, "say what a run costs on devices that need not be here", plan_flags)
    about = "compile a run's networks for TPUs that need not be here"
    command(commands, "compile", compile_, about, compile_flags)
    command(commands, "devices", devices, "list the backends and their devices")
    return top


# ---- generate, probe ------------------------------------------------------------------------------------------------


def generate_flags(to: Parser) -> None:
    from ltx2rt.commands.files import Files
    from ltx2rt.flags import add_flags
    from ltx2rt.pipelines import FIRST, pipelines
    from ltx2rt.session.options import ModelOptions

    to.epilog = (
        "With --backend tpu, compiled programs are kept in JAX_COMPILATION_CACHE_DIR (default: ltx2rt under "
        "XDG_CACHE_HOME or ~/.cache); a later run of the same sizes starts from them and compiles nothing."
    )
    known = pipelines()
    about = "; ".join(f"{name}: {type_.summary}" for name, type_ in known.items())
    to.add_argument("--pipeline", default=FIRST, metavar="NAME", help=f"{about} (default: {FIRST})")
    add_flags(to, ModelOptions)
    add_flags(to, *known.values())
    add_flags(to, Files)


def generate_request(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Model options on their mesh, the request and the files. Raises InputError."""
    from ltx2rt.commands.files import Files
    from ltx2rt.flags import given_flags
    from ltx2rt.pipelines import pipeline

    type_ = pipeline(args.pipeline)
    return model_options(args), type_(**given_flags(args, type_)), Files(**given_flags(args, Files))


def model_options(args: argparse.Namespace) -> Any:
    from ltx2rt.flags import given_flags
    from ltx2rt.session.open import with_mesh
    from ltx2rt.session.options import ModelOptions

    return with_mesh(ModelOptions(**given_flags(args, ModelOptions)), os.environ)


def generate(args: argparse.Namespace) -> int | None:
    from ltx2rt.commands import generate
    from ltx2rt.pipelines.request import draw_seed

    options, request, files = generate_request(args)
    if request.seed is None:  # ranks that this one starts need the same
        request = replace(request, seed=draw_seed())
        args.argv = [*args.argv, "--seed", str(request.seed)]
    checkpoint, request = generate.prepared(options, request, files)  # torch and jax take seconds to import
    if (status := _start_ranks(args, options, files.all(request.seeds))) is not None:
        return status
    if unread := _unread(args) if _first() else []:
        note(f"the {args.pipeline} pipeline does not read {', '.join(unread)}")
    if args.keep:
        from ltx2rt.backend import keep_compiled

        keep_compiled(options.backend, args.keep)
    generate.run(options, request, files, checkpoint)


def _unread(args: argparse.Namespace) -> list[str]:
    """Flags that were given and belong to other pipelines."""
    from ltx2rt.flags import flagged, spelling
    from ltx2rt.pipelines import pipeline, pipelines

    own = flagged(pipeline(args.pipeline))
    every = flagged(*pipelines().values())
    return [spelling(f) for name, f in every.items() if hasattr(args, name) and name not in own]


def _first() -> bool:
    """Whether this process speaks for all ranks of a launch."""
    return {os.environ.get(name, "0") for name in ("RANK", "JAX_PROCESS_ID")} == {"0"}


def executables_folder(environment: Mapping[str, str]) -> Path:
    """Where compiled programs are kept: JAX_COMPILATION_CACHE_DIR, else ltx2rt under XDG_CACHE_HOME or ~/.cache."""
    if asked_for := environment.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(asked_for)
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ltx2rt"


def probe_flags(to: Parser) -> None:
    from ltx2rt.commands.probe import ProbeRequest
    from ltx2rt.flags import add_flags
    from ltx2rt.session.options import ModelOptions

    add_flags(to, ModelOptions)
    add_flags(to, ProbeRequest)


def probe_request(args: argparse.Namespace) -> tuple[Any, Any]:
    from ltx2rt.commands.probe import ProbeRequest
    from ltx2rt.flags import given_flags

    return model_options(args), ProbeRequest(**given_flags(args, ProbeRequest))


def probe(args: argparse.Namespace) -> int | None:
    options, request = probe_request(args)
    options.check()
    request.check()
    if (status := _start_ranks(args, options, [request.outputs])) is not None:
        return status
    from ltx2rt.commands import probe

    probe.run(options, request)


# ---- weights, compare -----------------------------------------------------------------------------------------------


def weights_make(args: argparse.Namespace) -> None:
    from ltx2rt.weights.random.make import make_checkpoint

    print(make_checkpoint(args.preset, args.layout, args.directory, seed=args.seed, dry_run=args.dry_run))


def weights_inspect(args: argparse.Namespace) -> None:
    from ltx2rt.weights.inspect import format_inspection, inspect_path

    found = inspect_path(args.path)
    print(json.dumps(found, indent=1) if args.json else format_inspection(found))


def weights_merge(args: argparse.Namespace) -> None:
    from ltx2rt.session.options import parse_lora
    from ltx2rt.weights.checkpoint import open_checkpoint
    from ltx2rt.weights.lora import merge_to_file, open_lora

    specs = [parse_lora(text) for text in args.lora]
    loras = [open_lora(spec.path, spec.strength) for spec in specs]
    for merge in merge_to_file(open_checkpoint(args.model), loras, args.tensor, args.output, args.dtype):
        print(merge.line())


def compare(args: argparse.Namespace) -> None:
    from ltx2rt.media.compare import compare, format_comparison

    result = compare(args.a, args.b)
    print(json.dumps(result, indent=1, allow_nan=False) if args.json else format_comparison(result))


# ---- graph, plan, compile, devices: nothing is run ------------------------------------------------------------------

PLACED = ("profile", "mesh", "weights_dtype")
SIZED = ("width", "height", "num_frames")


def _model_or_preset(to: Parser) -> None:
    model = to.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, metavar="PATH", help="a checkpoint: a file or a folder")
    model.add_argument("--preset", choices=PRESETS, help="the sizes of a released or a tiny model")


def _options(args: argparse.Namespace) -> Any:
    """The model options of a command that runs nothing: the backend is the device kind's, or none."""
    from ltx2rt.flags import given_flags
    from ltx2rt.session.options import ModelOptions

    given = given_flags(args, ModelOptions) | {"backend": "", "model": args.model or Path()}
    options = ModelOptions(**given)
    return replace(options, mesh=options.on_mesh(1), tp_size=None)


def graph_flags(to: Parser) -> None:
    from ltx2rt.commands.graph import NAMES, Asked
    from ltx2rt.flags import add_flags
    from ltx2rt.pipelines.one_stage import OneStage
    from ltx2rt.session.options import ModelOptions

    to.add_argument("component", metavar="COMPONENT", help=", ".join(NAMES))
    _model_or_preset(to)
    add_flags(to, OneStage, only=SIZED)
    add_flags(to, Asked)
    add_flags(to, ModelOptions, only=(*PLACED, "tp_size"))


def graph(args: argparse.Namespace) -> None:
    from ltx2rt.commands.graph import Asked, component_graph
    from ltx2rt.flags import given_flags
    from ltx2rt.graph.show import show
    from ltx2rt.pipelines.one_stage import OneStage
    from ltx2rt.weights.checkpoint import open_checkpoint
    from ltx2rt.weights.random.presets import preset

    options, asked = _options(args), Asked(args.component, **given_flags(args, Asked))
    clip = OneStage("a graph", **given_flags(args, OneStage))
    config = open_checkpoint(args.model).config if args.model else preset(args.preset).config
    placed = {name: getattr(options, name) for name in PLACED}
    print(show(component_graph(config, asked.component, clip, asked.branches, **placed), asked.format), end="")


def plan_flags(to: Parser) -> None:
    from ltx2rt.commands.plan import Devices
    from ltx2rt.flags import add_flags
    from ltx2rt.pipelines import FIRST, pipelines
    from ltx2rt.session.options import ModelOptions

    _model_or_preset(to)
    to.add_argument("--pipeline", default=FIRST, metavar="NAME", help=f"{', '.join(pipelines())} (default: {FIRST})")
    add_flags(to, Devices)
    parts = ("text_encoder", "upsampler", "distilled_lora", "dtype")
    add_flags(
        to,
        ModelOptions,
        only=(*parts, *PLACED, "stage_weights", "text_encoder_offload", "vae_tiling"),
        dtype="bfloat16",
    )
    add_flags(to, pipelines()[FIRST], only=(*SIZED, "fps", "steps", "audio"))
    to.add_argument("--json", action="store_true")


def plan(args: argparse.Namespace) -> None:
    from ltx2rt.commands import plan
    from ltx2rt.flags import given_flags
    from ltx2rt.pipelines import pipeline

    type_ = pipeline(args.pipeline)
    options = _options(args)
    options = replace(options, dtype=options.dtype or "bfloat16")
    if args.model:
        options.check()
    request = type_(prompt="a plan", seed=0, **given_flags(args, type_))
    request.check()
    found = plan.estimate(options, request, plan.Devices(**given_flags(args, plan.Devices)), args.preset)
    print(json.dumps(plan.to_json(found), indent=1) if args.json else plan.to_text(found).rstrip())


def compile_flags(to: Parser) -> None:
    from ltx2rt.commands.compile import Target
    from ltx2rt.flags import add_flags
    from ltx2rt.pipelines import FIRST, pipelines
    from ltx2rt.session.options import ModelOptions

    to.epilog = (
        "Figures are of the compiled programs, per device and call; nothing is run and no weight is read. Needs "
        "libtpu, which is best installed into an environment of its own. XLA_FLAGS are honoured, dumps included."
    )
    _model_or_preset(to)
    to.add_argument("--pipeline", default=FIRST, metavar="NAME", help=f"{', '.join(pipelines())} (default: {FIRST})")
    add_flags(to, Target)
    add_flags(to, ModelOptions, only=("text_encoder", "upsampler", "vae_tiling", *PLACED))
    add_flags(to, pipelines()[FIRST], only=SIZED)
    to.add_argument("--json", action="store_true", help="an array of objects, one for each program")


def compile_(args: argparse.Namespace) -> None:
    from ltx2rt.commands import compile
    from ltx2rt.flags import given_flags
    from ltx2rt.pipelines import pipeline

    type_, target = pipeline(args.pipeline), compile.Target(**given_flags(args, compile.Target))
    options = replace(_options(args), dtype="bfloat16")
    job = compile.plan_job(options, type_(prompt="compiled", seed=0, **given_flags(args, type_)), target, args.preset)
    found, results = [], compile.compile_job(job)
    if not args.json:
        print(compile.header(job), flush=True)
    try:
        for cell, compiled in results:
            found.append(compile.to_json(job, cell, compiled))
            if not args.json:
                print(compile.row(job, cell, compiled), flush=True)
    finally:  # an interrupt loses nothing that is compiled
        if args.json:
            print(json.dumps(found, indent=1))


def devices(args: argparse.Namespace) -> None:
    from ltx2rt.backend import backend_names, get_backend, get_factory

    for name in backend_names():
        try:
            backend = get_backend(name)
        except InputError as error:
            print(f"{name}: not available ({error})")
            continue
        found, versions = backend.device(), ", ".join(f"{k} {v}" for k, v in backend.versions.items())
        free, total = found.free_bytes / 2**30, found.total_bytes / 2**30
        memory = f"{free:.1f} of {total:.1f} GiB free{' on each' * (found.count > 1 and found.kind != 'cpu')}"
        split = _profile_for(get_factory(name).profile_key(found), found.count)
        if backend.is_main:
            print(f"{name}: {found.count} x {found.name} ({found.kind}), {memory}, {split}, {versions}")


def _profile_for(kind: str, count: int) -> str:
    """How networks are split over so many devices unless another way is asked for; kind: as `resolve` has it."""
    from ltx2rt.placement.profiles import resolve

    try:
        profile, mesh = resolve(None, kind, {}, count)
    except InputError as error:
        return str(error)
    return f"profile {profile.name}" + (f" with --mesh {','.join(f'{a}={n}' for a, n in mesh.items())}" if mesh else "")


if __name__ == "__main__":
    sys.exit(main())
