"""`ltx2rt generate`: from a request to a clip, the same on every backend and in Python.

    check -> plan (headers only: sizes, audits, LoRAs, memory) -> the stages in order -> files

`ltx2rt.run` does the work; here are the flags, what is printed, and the start of further ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from ltx2rt.atomic_file import remove_abandoned, require_space
from ltx2rt.backend import get_factory, keep_compiled
from ltx2rt.commands.options import (
    given_fields,
    model_options,
    pipeline_flags,
    read_prompts,
    run_flags,
    start_ranks,
)
from ltx2rt.errors import InputError
from ltx2rt.flags import (
    MODEL,
    add_flag,
    add_flags,
    flag,
    flagged,
    given_flags,
    groups,
    shorten,
)
from ltx2rt.graph.encodings import QUANTISED
from ltx2rt.media.output import check_streams
from ltx2rt.notes import note
from ltx2rt.pipelines import FIRST, pipeline, pipelines
from ltx2rt.pipelines.clip import Clip
from ltx2rt.pipelines.groups.seeds import draw_seed
from ltx2rt.pipelines.groups.size import Length, Pixels
from ltx2rt.pipelines.groups.text import Prompt
from ltx2rt.pipelines.kind import wanted_kind
from ltx2rt.pipelines.recipes import PRESETS, drafted, recipe
from ltx2rt.pipelines.request import Request
from ltx2rt.placement.mesh import in_words
from ltx2rt.run import history
from ltx2rt.run.files import Files
from ltx2rt.run.plan import Plan, enhanced_prompt, prepared, resolved_stages, to_enhance
from ltx2rt.run.run import Run
from ltx2rt.run.segments import check_files, check_records, discard, folder_of, seed_of
from ltx2rt.run.write import sizes, write_files
from ltx2rt.session.open import located, open_session
from ltx2rt.session.options import NO_LORA, ModelOptions
from ltx2rt.session.session import Session
from ltx2rt.stages.kept_steps import latest
from ltx2rt.stages.stage import FRAMES, SOUND
from ltx2rt.weights.checkpoint import Checkpoint
from ltx2rt.weights.part_table import wanted_by

COMPILED = """\
With --backend tpu, compiled programs are kept in JAX_COMPILATION_CACHE_DIR (default: ltx2rt under
XDG_CACHE_HOME or ~/.cache); a later run of the same sizes starts from them and compiles nothing.
"""


def run(
    options: ModelOptions,
    clip: Clip,
    files: Files,
    checkpoint: Checkpoint,
    remarks: Sequence[str] = (),
    times: Path | None = None,
    draft: Request | None = None,
) -> None:
    """Generate the clip's files and say where they are. What the user can mend raises InputError
    before any weight is read. clip, checkpoint: as `prepared` gives them; remarks: sentences to
    print before; times: file with the times of earlier runs; draft: the request as a
    draft."""
    from ltx2rt.run.preview import previewing  # imports Pillow

    stages = partial(resolved_stages, options=options, asked=clip)
    session = open_session(options, checkpoint=checkpoint, stages=stages)
    made = Run(session, clip, warm=files.warmup, marks=files)
    plan, main = made.plan, made.is_main
    check_streams(files.outputs, plan.makes(FRAMES), plan.makes(SOUND))
    stream = sys.stderr if main and not files.quiet else None
    if main:
        require_space(sizes(session, plan, files))
        files.announce(plan.clip.seeds)
        _announce(session, plan, remarks)
    run_key = history.alike(session, plan, files.warmup)
    known = history.expected(times, run_key) if times else None
    if main and times and (line := known or history.by_plan(session, plan)):
        note(f"{line}{history.of_draft(session, plan, draft)}", prefix="")
    folder = parts_folder(files, plan.clip.segments is not None)
    beside = files.output if stream is not None and stream.isatty() else None
    with ExitStack() as during:
        during.enter_context(made.kept_in(folder, files.output, steps=files.latents_out is None))
        for path in files.all(plan.clip.seeds) if main else ():
            remove_abandoned(path.parent, {path.name})
        if folder and main and files.latents_out and plan.clip.segments:
            check_records(plan.clip, folder)
        keep = main and files.latents_out is not None
        whole = not (folder and latest(folder)) and not plan.clip.segments
        look = during.enter_context(previewing(session, plan, files.preview, beside))
        made.make(stream, keep=keep, warmup=files.warmup, verbose=files.verbose, look=look)
        if not main:
            if files.output is not None:  # else the main process decodes no frames either
                made.follow()
            return
        outputs = write_files(made, files)
        if times and whole:
            history.keep(times, run_key, made.watch.total_s)
        if folder:
            discard(folder)
    # Latents alone are one output for all seeds; the first stands for them.
    seeds = [seed for seed in made.clip.seeds for _ in files.outputs or (None,)]
    with suppress(OSError):  # the files are there, if nothing reads their names
        for output, seed in zip(outputs, seeds[: len(outputs)], strict=True):
            print(made.watch.closing_line(output, seed))


def parts_folder(files: Files, in_segments: bool) -> Path | None:
    """Where segments and steps are kept until the clip is whole."""
    output = files.output or files.latents_out
    if output is None or (files.latents_out and not in_segments):
        return None
    return folder_of(output, in_segments)


def _announce(session: Session, plan: Plan, remarks: Sequence[str]) -> None:
    """Print on stderr what will run."""
    if line := session.memory.line(plan.stages):
        note(line, prefix="")
    for remark in remarks:
        note(remark)
    options, backend = session.options, session.backend
    encoded = options.weights_dtype in QUANTISED
    weights = f", weights in {options.weights_dtype}" if encoded else ""
    lines = [f"seed {plan.clip.seeds[0]}; {session.dtype}{weights} on {backend.device().name}"]
    if options.attention != "auto":
        lines[0] += f", attention by {options.attention}"
    if (devices := prod(backend.mesh.values())) > 1:
        lines[0] += f"; {devices} devices, --mesh {in_words(backend.mesh, ',')}"
    if backend.num_processes > 1:
        lines[0] += f", {backend.num_processes} processes"
    if options.device == "auto" and backend.device_kind == "cpu":
        absent = get_factory(options.backend).accelerator
        lines.insert(0, f"no {absent} was found: running on the CPU")
    for line in (*lines, *plan.merge_lines(), *plan.clip.remarks(session.config)):
        note(line, prefix="")


@dataclass(frozen=True)
class Sources:
    """Where flags come from that the command line lacks."""

    preset: str | None = flag(
        None,
        "draft: distilled at 768x512; standard: the default; best: hq at 1920x1088, or what distilled "
        "weights can do",
        group="pipeline",
        choices=tuple(PRESETS),
        common=MODEL,
    )
    config: Path | None = flag(
        None, "TOML file of flags; the command line wins", group="pipeline", metavar="FILE"
    )
    like: Path | None = flag(
        None, "take the settings of a clip, but its model", group="pipeline", metavar="CLIP"
    )


def flags(to: Any) -> None:
    found = _from_sources(to)
    run_flags(to)
    add_flags(to, Files, Sources)
    told = bool({"-h", "--help", "--help-all"} & set(to.words))
    # required in the usage: on a command line a word without a flag may be the prompt
    clip = groups(to)["clip"]
    texts = clip.add_mutually_exclusive_group(required=told)
    shown = pipeline_flags(to, Prompt)
    prompt = flagged(shown)["prompt"]
    add_flag(texts, prompt, action="append", help=f"{prompt.metadata['flag'].help} (required)")
    about = (
        "text file with a prompt a line, or a JSON list, one for each segment, as several --prompt"
    )
    how: dict[str, Any] = {"type": Path, "default": argparse.SUPPRESS, "metavar": "FILE"}
    texts.add_argument("--prompts", help=about, **how)
    add_flag(clip, flagged(shown)["context"])
    lines = "\n  ".join(examples(shown))
    to.epilog = f"examples:\n  {lines}\n\n{COMPILED}"
    to.add_argument("--help-all", action="help", help="show every flag of the pipeline")
    if "prompt" in found:
        found["prompt"] = [found["prompt"], *found.pop("segment_prompts", ())]
    to.set_defaults(**found)
    for action in to._actions:
        action.required &= action.dest not in found
    if {"-h", "--help"} & set(to.words):
        _shorten(to, shown)


def _from_sources(to: Any) -> dict[str, Any]:
    """Return flags of --preset, --config and --like; words then name the pipeline."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in (*flagged(Sources), "pipeline"):
        early.add_argument(f"--{name}", nargs="?")
    asked = vars(early.parse_known_args(to.words)[0])
    name = asked.pop("pipeline")
    if not any(asked.values()):
        return {}
    given = given_fields(to.words, ModelOptions, Files)
    if any(re.match("--prompts(=|$)", word) for word in to.words):
        given |= {"prompt"}
    found = recipe(given, ModelOptions, Files, name=name, **asked)
    to.words = [*to.words, "--pipeline", found.pop("pipeline")]
    return found


def _shorten(to: Any, shown: type[Request]) -> None:
    """Let the help have the common flags alone, with those by which an input chooses a pipeline."""
    known = list(pipelines().values())
    own = [type(group) for type_ in known for group in type_.groups]  # help for any pipeline
    every = flagged(ModelOptions, Sources, shown, Files, *own, *known)
    titles = {name: f.metadata["flag"].common for name, f in every.items()}
    there = flagged(ModelOptions, Sources, shown, Files)
    named = any(word.startswith("--pipeline") for word in to.words)
    for name, f in every.items():
        if titles[name] and name not in there and not named:
            chooses = f.metadata["flag"].help.removesuffix(" (required)")
            add_flag(to, f, help=f"{chooses}; chooses its pipeline")
    shorten(to, titles | {"pipeline": MODEL})
    about = f"{', '.join(pipelines())} (default: {shown.name}, or as the inputs ask)"
    to._option_string_actions["--pipeline"].help = about
    to.epilog = to.epilog.partition("\n\n")[0]


def examples(type_: type[Request]) -> list[str]:
    """Commands that show the use of the pipeline."""
    name = "" if type_.name == FIRST else f" --pipeline {type_.name}"
    plain = f'ltx2rt generate --model MODEL_DIR{name} --prompt "a red fox in the snow"'
    if not type_.example.startswith("--latents-out"):
        plain += f" --output fox.{'mp4' if type_.has(Pixels) else 'wav'}"
    several = [plain] if type_.name == FIRST or not type_.example else []
    return [*several, f"{plain} \\\n      {type_.example}"] if type_.example else several


def asked(args: argparse.Namespace) -> tuple[ModelOptions, Request, Files]:
    """Several prompts are the segments'; of one segment the last. Raises InputError."""
    type_, options = pipeline(args.pipeline), model_options(args)
    file = getattr(args, "prompts", None)
    first, *rest = read_prompts(file) if file else getattr(args, "prompt", [""])
    given = given_flags(argparse.Namespace(**vars(args) | {"prompt": first}), type_)
    request = type_(**given)
    if rest and request.in_segments:
        request = replace(request, segment_prompts=tuple(rest))
    elif file and rest:
        raise InputError(
            f"--prompts: {file} has {1 + len(rest)} prompts, and the clip is not made in "
            "segments; give --segment-frames or more --num-frames, or one line"
        )
    elif rest:
        request = replace(request, prompt=rest[-1])
    written = Files(**given_flags(args, Files))
    if written.is_picture and request.has(Pixels):
        request = as_picture(request)
    return options, request, written


def as_picture(request: Request) -> Request:
    """The request of one frame without sound, unless it states more."""
    length, _ = request.length
    if length is None and request.has(Length) and not request.auto_duration:
        length, request = 1, replace(request, num_frames=1)
    return replace(request, audio=False) if length == 1 and request.audio else request


def files(args: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    """The files that a run reads, and those that it writes."""
    options, request, written = asked(args)
    return options.files + request.files, written.all(request.seeds)


def main(args: argparse.Namespace) -> int | None:
    options, request, written = asked(args)
    if request.distilled == "unused" and options.distilled_lora not in (None, NO_LORA):
        raise InputError(
            f"--distilled-lora: the {request.name} pipeline merges none here; leave it out, or "
            "merge it by --lora"
        )
    folder = parts_folder(written, request.in_segments)
    check_files(request, written)
    if request.seed is None:  # ranks that this one starts need the same
        kept = seed_of(folder, request) if folder else None
        request = replace(request, seed=draw_seed() if kept is None else kept)
        args.argv = [*args.argv, "--seed", str(request.seed)]
    named = written.named(".mp4" if request.has(Pixels) else ".wav", request.seeds)
    if unnamed := named != written:
        written, folder = named, parts_folder(named, request.in_segments)
        args.argv = [*args.argv, "--output", *map(str, written.outputs)]
    if folder:
        request = request.kept_in(folder)
    request.check()
    named = any(word.partition("=")[0] == "--pipeline" for word in args.argv)
    options = located(options, wanted_by(type(request)), wanted_kind(request, named))
    draft = drafted(request)
    # torch and jax take seconds to import
    checkpoint, clip = prepared(options, request, written)
    factory = get_factory(options.backend)
    if to_enhance(request) and factory.rank_and_size(os.environ)[1] > 1:
        raise InputError(
            "--enhance-prompt: several processes would write several texts; start them by "
            "--num-gpus, or give all of them one by --enhanced-prompt"
        )
    if to_enhance(clip.request) and factory.process_per_device and prod(options.mesh.values()) > 1:
        # once for the ranks that this one starts
        clip = clip.rewritten(enhanced_prompt(clip.request, checkpoint, options))
        args.argv = [*args.argv, "--enhanced-prompt", clip.prompt]
    if (status := start_ranks(args, options, written.all(clip.seeds))) is not None:
        return status
    if args.own_process:
        keep_compiled(options.backend, compiled_folder(os.environ))
    remarks = []
    if written.is_picture and clip.clip_frames == 1:
        remarks.append(f"{written.output} is one picture: one frame is made, and no sound")
    if unnamed:
        remarks.append(f"--output names no file: the clip will be {written.output}")
    if args.because:
        because = args.because.replace("_", "-").replace("and ", "and --")
        remarks.insert(0, f"pipeline {clip.request.name}, because of --{because}")
    times = cache_folder(os.environ) / "runs.jsonl" if args.own_process else None
    run(options, clip, written, checkpoint, remarks, times, draft)


def compiled_folder(environment: Mapping[str, str]) -> Path:
    """Folder of compiled programs: JAX_COMPILATION_CACHE_DIR, else the cache folder."""
    return Path(environment.get("JAX_COMPILATION_CACHE_DIR") or cache_folder(environment))


def cache_folder(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ltx2rt"
