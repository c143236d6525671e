"""`ltx2rt generate`: from a request to a clip, the same on every backend and in Python.

    check -> plan (headers only: sizes, audits, LoRAs, memory) -> the stages in order -> files

Everything that can be refused is refused in the plan. What the stages are stands in `pipelines`, what they do in
`stages`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from math import prod
from pathlib import Path
from typing import Any, TextIO

import numpy as np

import ltx2rt
from ltx2rt.atomic_file import require_space
from ltx2rt.backend import Backend, get_factory, keep_compiled
from ltx2rt.commands.files import Files, video_files, write_report
from ltx2rt.commands.options import model_options, start_ranks, wanted_files
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, flagged, given_flags, spelling
from ltx2rt.media.mp4 import AAC_BITS_PER_S
from ltx2rt.media.output import FileState, check_encoders, check_streams, remove_made, write_clip
from ltx2rt.notes import note
from ltx2rt.pipelines import FIRST, make_request, pipeline, pipelines
from ltx2rt.pipelines.request import Loras, Request, distilled_lora, draw_seed
from ltx2rt.session.open import located, open_session, opened_checkpoint
from ltx2rt.session.options import LoraSpec, ModelOptions, PlannedLora, plain
from ltx2rt.session.session import Session
from ltx2rt.session.stopwatch import Progress, Stopwatch
from ltx2rt.stages.denoise import RECORDED, noise_name
from ltx2rt.stages.duration import Duration
from ltx2rt.stages.enhance import check as check_enhancer
from ltx2rt.stages.enhance import enhance
from ltx2rt.stages.frames import Frames
from ltx2rt.stages.sound import Sound
from ltx2rt.stages.stage import Stage, State
from ltx2rt.weights.checkpoint import Checkpoint
from ltx2rt.weights.files import TensorFile, digest, identity, write_arrays
from ltx2rt.weights.lora import STORED, Merge

BYTES_PER_PIXEL = 1  # at most: black and white noise takes 0.66 as H.264 and 0.98 as VP9
PNG_BYTES_PER_PIXEL = 3.1  # at most: uncompressed


@dataclass(frozen=True)
class Plan:
    """A resolved request, its stages, the LoRAs, and what they merge by stage."""

    request: Request
    stages: tuple[Stage, ...]
    loras: Loras
    merges: dict[str, list[Merge]]

    @property
    def all_merges(self) -> list[Merge]:
        found: list[Merge] = []
        for merges in self.merges.values():
            found += [merge for merge in merges if merge not in found]
        return found

    def merge_lines(self) -> Iterator[str]:
        """One for each LoRA of each stage, with its role."""
        distilled = self.loras.distilled and str(self.loras.distilled.path)
        for stage, merges in self.merges.items():
            yield from (merge.line(stage, "distilled" if merge.file == distilled else "") for merge in merges)
        if self.request.distilled in ("optional", "default") and not distilled:
            yield f"{self.request.name}: on the weights as they are, with no distilled LoRA"


def prepared(options: ModelOptions, request: Request, files: Files) -> tuple[Checkpoint, Request]:
    """The opened checkpoint and the resolved request, once everything is checked that needs no framework.

    The request has a seed. Raises InputError.
    """
    options.check()
    request.check()
    request.check_options(options)
    request.check_files()
    files.check(request.seeds, [*options.files, *request.files])
    checkpoint = opened_checkpoint(options)
    files.check(request.seeds, checkpoint.files)
    _check_enhancing(request, checkpoint)
    request = request.resolved(checkpoint.config)
    check_encoders(files.output)  # last: its import takes as long as all the rest
    return checkpoint, request


def resolved(
    checkpoint: Checkpoint, options: ModelOptions, request: Request
) -> tuple[Request, Loras, tuple[Stage, ...]]:
    """The request against the model, its LoRAs and its stages. Raises InputError."""
    request.check_options(options)
    request.check_files()
    request = request.resolved(checkpoint.config)
    distilled = distilled_lora(request, options, checkpoint.distilled_lora)
    loras = Loras(tuple(map(_planned, options.loras)), distilled and _planned(distilled))
    return request, loras, tuple(request.stages(checkpoint.config, options, loras))


def _planned(lora: LoraSpec) -> LoraSpec:
    """The LoRA with the file that has its name now; as it is if there is none, which loading refuses."""
    with suppress(OSError):
        return PlannedLora(lora.path, lora.strength, lora.stage, identity(lora.path))
    return lora


def resolved_stages(checkpoint: Checkpoint, options: ModelOptions, request: Request) -> tuple[Stage, ...]:
    return resolved(checkpoint, options, request)[2]


def usual_stages(checkpoint: Checkpoint, options: ModelOptions) -> tuple[Stage, ...]:
    """Of a clip of default size, by the first pipeline that makes one of this model from a prompt alone."""
    for name in pipelines():
        with suppress(InputError):
            return resolved_stages(checkpoint, options, make_request(name, prompt="a clip", seed=0))
    return ()


def make_plan(session: Session, request: Request) -> Plan:
    """Resolve the request against the model and check everything that headers tell but memory. Raises InputError."""
    request, loras, stages = resolved(session.checkpoint, session.options, request)
    for stage in stages:
        stage.check(session)
    merges = session.audit(stages)
    _check_noise(request.noise_in, [draw for stage in stages for draw in stage.draws(session.config).items()])
    return Plan(request, stages, loras, merges)


def make_enhanced_plan(session: Session, request: Request) -> Plan:
    """As `make_plan`, with the prompt written out if that is asked for, once nothing but memory can be refused."""
    _check_enhancing(request, session.checkpoint)
    plan = make_plan(session, request)
    enhanced = with_enhanced_prompt(plan.request, session.checkpoint, session.options)
    return plan if enhanced is plan.request else make_plan(session, enhanced)


def with_enhanced_prompt(request: Request, checkpoint: Checkpoint, options: ModelOptions) -> Request:
    """The request with its `enhanced_prompt`, if it asks for one and has none yet. Its seed is known."""
    if not _to_enhance(request):
        return request
    seed = request.seed if request.enhance_seed is None else request.enhance_seed
    assert seed is not None, "the request is not resolved"
    note("Gemma 3 writes the prompt out ...", prefix="")
    on_gpu = get_factory(options.backend).process_per_device and options.device != "cpu"
    text = enhance(checkpoint, request.prompt, request.first_image, seed, options.dtype or "auto", on_gpu)
    note(f"enhanced prompt: {text}", prefix="")
    return replace(request, enhanced_prompt=text)


def _to_enhance(request: Request) -> bool:
    return request.enhance_prompt and request.enhanced_prompt is None


def _check_enhancing(request: Request, checkpoint: Checkpoint) -> None:
    """Raises InputError, from headers alone."""
    if request.enhance_seed is not None and not 0 <= request.enhance_seed < 2**63:
        raise InputError(f"--enhance-seed: {request.enhance_seed}, expected 0 or more and below 2^63")
    if _to_enhance(request):
        check_enhancer(checkpoint, request.first_image)


def _check_noise(path: Path | None, draws: list[tuple[str, tuple[int, ...]]]) -> None:
    """Every tensor that the run draws is in --noise-in, in its shape, and nothing else but other records of a run."""
    if path is None:
        return
    file, expected = TensorFile(path), dict(draws)
    names = {stream: noise_name(file, stream) for stream in expected}
    for stream, shape in expected.items():
        if (name := names[stream]) is None:
            raise InputError(f"--noise-in: {path} has no tensor {stream}; it must hold {', '.join(expected)}")
        info = file.info(name)
        if tuple(info.shape) != shape or info.dtype not in STORED:
            raise InputError(
                f"--noise-in: {name} in {path} is {info.dtype} {list(info.shape)}, expected float32 {list(shape)}"
            )
    if extra := sorted(n for n in file.names() if n not in names.values() and not RECORDED.fullmatch(n)):
        raise InputError(f"--noise-in: {path} holds {', '.join(extra)}, which this run does not read")
    for name in filter(None, names.values()):
        if not np.isfinite(file.read(name).astype(np.float32)).all():
            raise InputError(f"--noise-in: {name} in {path} holds NaN or infinite values; expected N(0, 1)")


def run_stages(session: Session, plan: Plan, watch: Stopwatch, state: State) -> None:
    """The stages in order. The frames are made when they are taken from `state.frames`."""
    session.weights.loading = lambda network: watch.apart("load", f"loading the weights of {network}")
    session.building = watch.building
    with session.compiling_ahead(plan.stages):
        for stage in plan.stages:
            watch.check()
            stage.run(session, state, watch)
            session.leave(stage)


def timed(session: Session, plan: Plan, stream: TextIO | None = None) -> Plan:
    """The plan for as many frames as the model chooses for the prompt, where it is to; it was made for the longest.

    What encodes the prompt has run then, and the session remembers it.
    """
    if plan.request.auto_duration is None:
        return plan
    state, watch = State(), Stopwatch(stream, synchronize=session.backend.synchronize)
    last = next(i for i, stage in enumerate(plan.stages) if isinstance(stage, Duration))
    run_stages(session, replace(plan, stages=plan.stages[: last + 1]), watch, state)
    assert state.num_frames, "the duration stage says how many"
    if session.backend.is_main:
        fps = plan.request.fps
        clip_s = float(state.num_frames / fps)
        note(f"the prompt asks for {state.seconds:.2f} s: {state.num_frames} frames, {clip_s:.2f} s")
    return make_plan(session, replace(plan.request, num_frames=state.num_frames, auto_duration=None))


def warm_up(session: Session, plan: Plan) -> None:
    """Compile and load everything: the same run with one step a stage, its result thrown away."""
    session.weights.again = True
    state, silent = State(max_steps=1), Stopwatch(synchronize=session.backend.synchronize)
    run_stages(session, plan, silent, state)
    for frames in state.frames:
        deque(frames, maxlen=0)


def produce(
    session: Session,
    plan: Plan,
    *,
    keep: bool = False,
    warmup: bool = False,
    stream: TextIO | None = None,
    verbose: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    look: Callable[[Callable[[], np.ndarray]], None] | None = None,
) -> tuple[State, Stopwatch, Callable[[], dict[str, Any]]]:
    """Run the plan, which fits the device, up to its frames: (state, watch, report).

    report() is the dict of `--report`, once the frames are taken.
    """
    work = {c.name: float(c.steps * c.flops) for c in session.costs(plan.stages)} if on_progress else {}
    built, loaded = session.backend.num_built, session.weights.loaded_bytes
    watch = Stopwatch(
        stream,
        synchronize=session.backend.synchronize,
        observer=on_progress,
        cancelled=cancelled or (lambda: False),
        agree=session.backend.agree,
        work=work,
        verbose=verbose,
        look=look or (lambda latents: None),
    )
    if warmup:
        with watch.apart("warmup", "warming up"):
            warm_up(session, plan)
    state = State(keep=keep)
    run_stages(session, plan, watch, state)

    def report() -> dict[str, Any]:
        return watch.report(
            seed=plan.request.seed,
            settings=plan.request.settings() | {"options": plain(session.options)},
            programs_built=session.backend.num_built - built,
            loaded_bytes=session.weights.loaded_bytes - loaded,
            peak_bytes=session.backend.peak_bytes(),
            versions=versions(session.backend),
            device=session.backend.device().name,
            mesh=dict(session.backend.mesh),
            lora=[{"file": m.file, "matched": m.matched, "total": m.total} for m in plan.all_merges],
        )

    return state, watch, report


def run(
    options: ModelOptions, request: Request, files: Files, checkpoint: Checkpoint, unread: Sequence[str] = ()
) -> None:
    """Generate the clip's files and say where they are. What the user can mend raises InputError before any weight is
    read. request, checkpoint: as `prepared` gives them; unread: flags that were given for nothing."""
    stages = partial(resolved_stages, options=options, request=request)
    session = open_session(options, checkpoint=checkpoint, stages=stages)
    plan = make_enhanced_plan(session, request)
    has_video = any(isinstance(stage, Frames) for stage in plan.stages)
    check_streams(files.output, has_video, any(isinstance(stage, Sound) for stage in plan.stages))
    session.require_memory(plan.stages, warm=files.warmup)
    main = session.backend.is_main
    stream = sys.stderr if main and not files.quiet else None
    if main:
        require_space(_sizes(session, plan, files))
        files.announce(plan.request.seeds)
        if unread:
            note(f"the {request.name} pipeline does not read {', '.join(unread)}")
        _announce(session, plan)
    plan = timed(session, plan, stream)
    state, watch, report = produce(
        session,
        plan,
        keep=main and files.latents_out is not None,
        warmup=files.warmup,
        stream=stream,
        verbose=files.verbose,
    )
    if not main:
        for frames in state.frames:
            deque(frames, maxlen=0)
        return
    outputs = video_files(files.output, plan.request.seeds)
    with ExitStack() as undo:  # a failed run leaves none of its files
        videos = state.frames if has_video else repeat(iter(()), len(outputs))
        for i, (output, frames) in enumerate(zip(outputs, videos, strict=True)):
            waveform = None if state.waveforms is None else state.waveforms[i]
            rate = sample_rate(session, state)
            made = save(session, plan.request, i, output, frames, waveform, rate, files.metadata)
            undo.callback(remove_made, made)
        if files.latents_out:
            write_arrays(files.latents_out, state.record)
            undo.callback(files.latents_out.unlink, missing_ok=True)
        if files.report:
            write_report(files.report, report())
        undo.pop_all()
    for output, seed in zip(outputs, plan.request.seeds, strict=True):
        print(watch.closing_line(output, seed))


def _sizes(session: Session, plan: Plan, files: Files) -> dict[Path, int]:
    """Bytes that the run's large files take at most."""
    request = plan.request
    pixels, seconds = prod(request.size_px) * request.clip_frames, float(request.clip_frames / request.clip_fps)
    per_pixel = PNG_BYTES_PER_PIXEL if files.output.suffix.lower() == ".png" else BYTES_PER_PIXEL
    samples = 2 * seconds * session.config.vocoder.sample_rate
    clip = int(pixels * per_pixel + seconds * AAC_BITS_PER_S / 8) + 2**16
    sizes = dict.fromkeys(video_files(files.output, request.seeds), clip)
    if files.latents_out:  # noise, start, result and what is made of it, each step's latents and x0; samplers' noise
        draws = [(s.steps(), name, shape) for s in plan.stages for name, shape in s.draws(session.config).items()]
        copies = [(4 + 2 * steps if name.count(".") == 1 else 1, shape) for steps, name, shape in draws]
        latents = sum(prod(shape) * count for count, shape in copies)
        sizes[files.latents_out] = int(4 * (latents + request.num_videos * samples)) + 2**16
    return sizes


def sample_rate(session: Session, state: State) -> int:
    """Of the state's waveforms in Hz, or of those that the model would make."""
    return state.sample_rate or session.config.vocoder.sample_rate


def save(
    session: Session,
    request: Request,
    video: int,
    output: Path,
    frames: Iterator[np.ndarray],
    waveform: np.ndarray | None,
    rate: int,
    metadata: bool = True,
) -> dict[Path, FileState]:
    """Write one video of a request in the form that its name says; the files that were made."""
    return write_clip(
        output,
        frames,
        num_frames=request.clip_frames,
        fps=request.clip_fps,
        waveform=waveform,
        sample_rate=rate,
        comment=comment(session, request, video) if metadata else None,
    )


def _announce(session: Session, plan: Plan) -> None:
    """What will run, on stderr."""
    options, backend = session.options, session.backend
    weights = ", weights in float8" if options.weights_dtype == "float8" else ""
    lines = [f"seed {plan.request.seed}; {session.dtype}{weights} on {backend.device().name}"]
    if backend.num_processes > 1:
        lines[0] += f", {backend.num_processes} processes"
    if options.device == "auto" and backend.device_kind == "cpu":
        lines.insert(0, f"no {get_factory(options.backend).accelerator} was found: running on the CPU")
    for line in (*lines, *plan.merge_lines(), *plan.request.remarks(session.config)):
        note(line, prefix="")


def versions(backend: Backend) -> dict[str, str]:
    return {"ltx2rt": ltx2rt.__version__, "python": sys.version.split()[0], "numpy": np.__version__, **backend.versions}


def named(path: Path) -> dict[str, str]:
    """A file by name and digest, without the folders of this machine; of what is no file (any more) the name."""
    return {"name": path.name, "digest": digest(path)} if path.exists() else {"name": path.name}


def comment(session: Session, request: Request, video: int) -> dict[str, Any]:
    """What the MP4 says about itself: prompt, seed, model, versions and every setting; of files the names alone."""
    checkpoint = session.checkpoint
    model = {**named(checkpoint.path), "layout": checkpoint.layout, "generation": checkpoint.config.generation}
    options = plain(session.options, named)
    return {
        "prompt": request.prompt,
        "seed": request.seeds[video],
        "model": model,
        "versions": versions(session.backend),
        "settings": request.settings(named) | {"options": options},
    }


def flags(to: Any) -> None:
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


def asked(args: argparse.Namespace) -> tuple[ModelOptions, Request, Files]:
    """Raises InputError."""
    type_ = pipeline(args.pipeline)
    return model_options(args), type_(**given_flags(args, type_)), Files(**given_flags(args, Files))


def files(args: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    """What is read, and what is written."""
    options, request, written = asked(args)
    first = request.seed or 0
    return options.files + request.files, written.all(range(first, first + request.num_videos))


def main(args: argparse.Namespace) -> int | None:
    options, request, written = asked(args)
    if request.seed is None:  # ranks that this one starts need the same
        request = replace(request, seed=draw_seed())
        args.argv = [*args.argv, "--seed", str(request.seed)]
    request.check()
    options = located(options, wanted_files(type(request)))
    checkpoint, request = prepared(options, request, written)  # torch and jax take seconds to import
    factory = get_factory(options.backend)
    if _to_enhance(request) and factory.rank_and_size(os.environ)[1] > 1:
        raise InputError(
            "--enhance-prompt: several processes would write several texts; start them by --num-gpus, or give all of "
            "them one by --enhanced-prompt"
        )
    if _to_enhance(request) and factory.process_per_device and prod(options.mesh.values()) > 1:
        request = with_enhanced_prompt(request, checkpoint, options)  # once for the ranks that this one starts
        args.argv = [*args.argv, "--enhanced-prompt", str(request.enhanced_prompt)]
    if (status := start_ranks(args, options, written.all(request.seeds))) is not None:
        return status
    if args.own_process:
        keep_compiled(options.backend, compiled_folder(os.environ))
    run(options, request, written, checkpoint, _unread(args, request))


def _unread(args: argparse.Namespace, request: Request) -> list[str]:
    """Flags that were given and belong to other pipelines, and to which."""
    own, every = flagged(type(request)), flagged(*pipelines().values())

    def readers(name: str) -> str:
        return " and ".join(kind for kind, pipeline in pipelines().items() if name in flagged(pipeline))

    given = {name: f for name, f in every.items() if hasattr(args, name) and name not in own}
    return [f"{spelling(f)} (--pipeline {readers(name)} would)" for name, f in given.items()]


def compiled_folder(environment: Mapping[str, str]) -> Path:
    """Where compiled programs are kept: JAX_COMPILATION_CACHE_DIR, else ltx2rt under XDG_CACHE_HOME or ~/.cache."""
    if asked_for := environment.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(asked_for)
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ltx2rt"
