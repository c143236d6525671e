"""The command line: flags in, exit status out.

Decides spelling, help and how failures are reported: 2 for bad input, 1 for any other failure, 130 when interrupted,
one line on stderr each time. Handlers import what they need, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ltx2rt import __version__, flags
from ltx2rt.backend import backend_names, get_backend, get_factory, get_rendezvous, keep_compiled
from ltx2rt.errors import InputError
from ltx2rt.pipeline import request as asked
from ltx2rt.ranks import facts
from ltx2rt.ranks.crew import Crew
from ltx2rt.ranks.start import start

Handler = Callable[[argparse.Namespace], int | None]  # the exit status; None: 0
BAD_INPUT, FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143


class Parser(argparse.ArgumentParser):
    """argparse, with its errors in one line and no guessing of abbreviated flags."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        if {os.environ.get(name, "0") for name in ("RANK", "JAX_PROCESS_ID")} != {"0"}:  # all ranks have the same flags
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
    if getattr(args, "backend", None) not in backend_names():
        return None
    factory = get_factory(args.backend)
    rank, size = factory.rank_and_size(os.environ)
    if size == 1:
        return None
    try:
        crew = Crew(rank, size, get_rendezvous(args.backend), _outputs(args))
    except InputError as error:
        if rank == 0 or not isinstance(error.__cause__, ImportError):
            raise
        sys.exit(BAD_INPUT)  # all ranks run one installation
    try:
        crew.agree("versions", facts.versions(factory.packages))
        given = {name: value for name, value in vars(args).items() if name not in ("handler", "argv", "keep")}
        crew.agree("arguments", {f"--{name.replace('_', '-')}": str(value) for name, value in given.items()})
        crew.agree("files", facts.digests(_inputs(args)))
        if given.get("seed", 0) is None:
            args.seed = crew.from_main("seed", asked.draw_seed)
    except InputError as error:
        _fail(str(error), BAD_INPUT, crew)
    return crew


def _outputs(args: argparse.Namespace) -> list[Path]:
    """The files that generate or probe writes."""
    names = ("latents_out", "report", "outputs")
    found = [path for name in names if (path := getattr(args, name, None)) is not None]
    if not hasattr(args, "num_videos"):
        return found
    seed = args.seed or 0
    return found + asked.video_files(args.output, range(seed, seed + args.num_videos))


def _inputs(args: argparse.Namespace) -> list[Path]:
    """The files and folders that generate or probe reads."""
    names = ("model", "text_encoder", "upsampler", "noise_in", "inputs")
    paths = [path for name in names if (path := getattr(args, name, None)) is not None]
    loras = [*args.lora, *([args.distilled_lora] if args.distilled_lora else [])]
    paths += [asked.parse_lora(text).path for text in loras]
    return paths + [asked.parse_image(text).path for text in getattr(args, "image", [])]


def _ranks_to_start(args: argparse.Namespace) -> int:
    """How many processes this one has to start: 1 if it does the work itself."""
    factory = get_factory(args.backend)
    if not factory.process_per_device or factory.rank_and_size(os.environ)[1] > 1:
        return 1
    return math.prod(mesh_of(args, os.environ).values())


def parser() -> Parser:
    top = Parser(prog="ltx2rt", description="Generate video with sound by LTX-2, with PyTorch or JAX.")
    top.add_argument("--version", action="version", version=f"ltx2rt {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def command(to, name: str, handler: Handler, help: str) -> Parser:
        added = to.add_parser(name, help=help, description=help)
        added.set_defaults(handler=handler)
        return added

    flags.generate(command(commands, "generate", generate, "turn a prompt into one MP4 with sound"))
    flags.probe(command(commands, "probe", probe, "run one network on given tensors"))

    weights = commands.add_parser("weights", help="make, inspect or merge checkpoints")
    weights_commands = weights.add_subparsers(metavar="COMMAND", required=True)
    make = command(weights_commands, "make", weights_make, "write a random checkpoint in a real layout")
    make.add_argument("directory", type=Path, metavar="DIR")
    make.add_argument("--preset", choices=flags.PRESETS, required=True)
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

    flags.graph(command(commands, "graph", graph, "print the graph of a network, placed on a mesh if asked"))
    flags.plan(command(commands, "plan", plan, "say what a run costs on devices that need not be here"))
    flags.compile_(command(commands, "compile", compile_, "compile a run's networks for TPUs that need not be here"))
    command(commands, "devices", devices, "list the backends and their devices")
    return top


def model_options(args: argparse.Namespace) -> asked.ModelOptions:
    distilled = args.distilled_lora
    return asked.ModelOptions(
        backend=args.backend,
        model=args.model,
        text_encoder=args.text_encoder,
        upsampler=args.upsampler,
        distilled_lora=asked.parse_lora(distilled, "--distilled-lora") if distilled else None,
        loras=tuple(map(asked.parse_lora, args.lora)),
        lora_allow_partial=args.lora_allow_partial,
        dtype=args.dtype,
        weights_dtype=args.weights_dtype,
        device=args.device,
        cross_timestep_rule=args.cross_timestep_rule,
        stage_weights=args.stage_weights,
        text_encoder_offload=args.text_encoder_offload,
        vae_tiling=args.vae_tiling,
        layers=args.layers,
        compile=args.compile,
        max_memory_gb=args.max_memory,
        profile=args.profile,
        mesh=mesh_of(args, os.environ),
    )


def mesh_of(args: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, int]:
    """The mesh that the flags ask for; by default tensor takes every process that torchrun or accelerate launched."""
    factory = get_factory(args.backend)
    launched = factory.rank_and_size(environment)[1] if factory.process_per_device else 1
    for flag, value in (("--num-gpus", args.num_gpus), ("--tp-size", args.tp_size)):
        if value is not None and value < 1:
            raise InputError(f"{flag}: {value}, expected at least 1")
    if args.mesh and args.tp_size:
        raise InputError("--mesh and --tp-size say the same; give one of them")
    if launched > 1 and args.num_gpus not in (None, launched):
        raise InputError(f"--num-gpus: {args.num_gpus}, but {launched} processes were launched; leave the flag out")
    mesh = asked.parse_mesh(args.mesh) if args.mesh else {}
    if args.tp_size:
        mesh = {"tensor": args.tp_size}
    devices = args.num_gpus or launched
    if not mesh and devices > 1:
        mesh = {"tensor": devices}
    size = math.prod(mesh.values())
    if devices > 1 and size != devices:
        raise InputError(f"mesh {mesh} is of {size} devices, {devices} are asked for; make the two agree")
    return mesh


def generate_request(args: argparse.Namespace) -> asked.Request:
    return asked.Request(
        options=model_options(args),
        prompt=args.prompt,
        output=args.output,
        pipeline=args.pipeline,
        negative_prompt=args.negative_prompt,
        width=args.width,
        height=args.height,
        num_frames=args.num_frames,
        fps=asked.parse_fps(args.fps),
        steps=args.steps,
        seed=args.seed,
        num_videos=args.num_videos,
        images=tuple(map(asked.parse_image, args.image)),
        image_crf=args.image_crf,
        video_guidance=asked.GuidanceScales(args.video_cfg, args.video_stg, args.video_modality, args.video_rescale),
        audio_guidance=asked.GuidanceScales(args.audio_cfg, args.audio_stg, args.audio_modality, args.audio_rescale),
        stg_blocks=None if args.stg_blocks is None else asked.parse_blocks(args.stg_blocks),
        audio_from=args.audio_from,
        warmup=args.warmup,
        noise_in=args.noise_in,
        latents_out=args.latents_out,
        report=args.report,
        audio=args.audio,
        metadata=args.metadata,
    )


def generate(args: argparse.Namespace) -> int | None:
    request = generate_request(args)
    asked.check(request)  # before torch or jax is imported, which takes seconds
    if (count := _ranks_to_start(args)) > 1:
        if args.num_videos > 1 and args.seed is None:  # it names the files
            args.seed = asked.draw_seed()
            args.argv = [*args.argv, "--seed", str(args.seed)]
        return start(args.argv, count, _outputs(args), get_factory(args.backend).most_processes(args.device))
    if args.keep:
        keep_compiled(request.options.backend, args.keep)
    from ltx2rt.pipeline import generate

    generate.run(request)


def executables_folder(environment: Mapping[str, str]) -> Path:
    """Where compiled programs are kept: JAX_COMPILATION_CACHE_DIR, else ltx2rt under XDG_CACHE_HOME or ~/.cache."""
    if asked_for := environment.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(asked_for)
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ltx2rt"


def probe(args: argparse.Namespace) -> int | None:
    request = asked.ProbeRequest(model_options(args), args.component, args.outputs, args.inputs, tuple(args.prompt))
    asked.check_options(request.options)
    if (count := _ranks_to_start(args)) > 1:
        return start(args.argv, count, _outputs(args), get_factory(args.backend).most_processes(args.device))
    from ltx2rt import probe

    probe.run(request)


def weights_make(args: argparse.Namespace) -> None:
    from ltx2rt.weights.make import make_checkpoint

    print(make_checkpoint(args.preset, args.layout, args.directory, seed=args.seed, dry_run=args.dry_run))


def weights_inspect(args: argparse.Namespace) -> None:
    from ltx2rt.weights.inspect import format_inspection, inspect_path

    found = inspect_path(args.path)
    print(json.dumps(found, indent=1) if args.json else format_inspection(found))


def weights_merge(args: argparse.Namespace) -> None:
    specs = [asked.parse_lora(text) for text in args.lora]
    from ltx2rt.weights.checkpoint import open_checkpoint
    from ltx2rt.weights.lora import merge_to_file, open_lora

    loras = [open_lora(spec.path, spec.strength) for spec in specs]
    for merge in merge_to_file(open_checkpoint(args.model), loras, args.tensor, args.output, args.dtype):
        print(merge.line())


def compare(args: argparse.Namespace) -> None:
    from ltx2rt.media.compare import compare, format_comparison

    result = compare(args.a, args.b)
    print(json.dumps(result, indent=1, allow_nan=False) if args.json else format_comparison(result))


def graph(args: argparse.Namespace) -> None:
    names = ("component", "model", "preset", "width", "height", "num_frames", "branches", "format", "weights_dtype")
    text = args.mesh if args.tp_size is None else f"tensor={args.tp_size}"
    mesh = asked.parse_mesh(text) if text else {}
    given = {name: getattr(args, name) for name in names}
    request = asked.GraphRequest(**given, profile=args.profile, mesh=mesh)
    from ltx2rt.graph.show import show
    from ltx2rt.pipeline.graphs import component_graph
    from ltx2rt.weights.checkpoint import open_checkpoint
    from ltx2rt.weights.presets import preset

    config = open_checkpoint(request.model).config if request.model else preset(request.preset or "").config
    print(show(component_graph(config, request), request.format), end="")


def plan(args: argparse.Namespace) -> None:
    distilled = args.distilled_lora
    options = asked.ModelOptions(
        backend="",  # the device kind's
        model=args.model or Path(),
        text_encoder=args.text_encoder,
        upsampler=args.upsampler,
        distilled_lora=asked.parse_lora(distilled, "--distilled-lora") if distilled else None,
        dtype=args.dtype,
        weights_dtype=args.weights_dtype,
        stage_weights=args.stage_weights,
        text_encoder_offload=args.text_encoder_offload,
        vae_tiling=args.vae_tiling,
        profile=args.profile,
        mesh=asked.parse_mesh(args.mesh) if args.mesh else {},
    )
    names = ("devices", "device_kind", "preset", "pipeline", "width", "height", "num_frames", "steps", "audio")
    given = {name: getattr(args, name) for name in names}
    request = asked.PlanRequest(options, fps=asked.parse_fps(args.fps), **given)
    asked.check(request.clip(options))
    from ltx2rt.pipeline import paper

    found = paper.plan_on_paper(request)
    print(json.dumps(paper.to_json(found), indent=1) if args.json else paper.to_text(found).rstrip())


def compile_request(args: argparse.Namespace) -> asked.CompileRequest:
    names = ("topology", "model", "preset", "text_encoder", "upsampler", "stage", "branches", "vae_tiling")
    more = ("width", "height", "num_frames", "weights_dtype")
    return asked.CompileRequest(
        **{name: getattr(args, name) for name in names + more},
        components=tuple(args.component) or asked.COMPILED,
        profile=args.profile,
        mesh=asked.parse_mesh(args.mesh) if args.mesh else {},
    )


def compile_(args: argparse.Namespace) -> None:
    request = compile_request(args)
    from ltx2rt.pipeline import ahead

    job, found = ahead.plan_job(request), []
    results = ahead.compile_job(job)
    if not args.json:
        print(ahead.header(job), flush=True)
    try:
        for cell, compiled in results:
            found.append(ahead.to_json(job, cell, compiled))
            if not args.json:
                print(ahead.row(job, cell, compiled), flush=True)
    finally:  # an interrupt loses nothing that is compiled
        if args.json:
            print(json.dumps(found, indent=1))


def devices(args: argparse.Namespace) -> None:
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
