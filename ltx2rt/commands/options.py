"""Parts that commands share: their model and pipeline flags, and the processes that they start."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from ltx2rt.backend import chosen_backend, get_factory
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, flagged, given_flags, groups, marked, spelling, typed
from ltx2rt.pipelines import FIRST, chosen, pipeline, pipelines, sound_alone, unread
from ltx2rt.pipelines.groups.group import Group
from ltx2rt.pipelines.groups.seeds import NoiseFile, Seed
from ltx2rt.pipelines.groups.size import Pixels, with_sides
from ltx2rt.pipelines.groups.text import Enhancing, NegativePrompt, Prompt
from ltx2rt.pipelines.request import Request
from ltx2rt.ranks.start import start
from ltx2rt.session.open import located, with_mesh
from ltx2rt.session.options import ModelOptions, existing_file, parse_backend, parse_part
from ltx2rt.text_files import flag_lines, parse

PRESETS = ("tiny-2.0", "tiny-2.3", "tiny-2.5", "ltx-2.0", "ltx-2.3", "ltx-2.5")
MAX_PROMPT_BYTES = 2**20
NO_PROMPTS = (".csv", ".tsv", ".yaml", ".yml", ".toml", ".xml", ".html")
WORDS = (Prompt, Enhancing, NegativePrompt, Seed, NoiseFile)  # decide nothing that costs


def choose_backend(args: argparse.Namespace, quiet: bool = False) -> None:
    """Fill in `--backend`, also for processes that this one starts. Raises InputError."""
    if getattr(args, "backend", "auto") == "auto":
        args.backend = chosen_backend(quiet=quiet)
        args.argv = [*getattr(args, "argv", []), "--backend", args.backend]
    args.backend = parse_backend(args.backend)


def model_options(args: argparse.Namespace) -> ModelOptions:
    """The options of a command that runs, on the mesh of this launch. Raises InputError."""
    choose_backend(args)
    return with_mesh(ModelOptions(**given_flags(args, ModelOptions)), os.environ)


def planned_options(args: argparse.Namespace) -> ModelOptions:
    """The options of a command that runs and downloads nothing. Raises InputError."""
    given = given_flags(args, ModelOptions) | {"backend": "", "model": args.model or Path()}
    options = ModelOptions(**given)
    return located(replace(options, mesh=options.on_mesh(1), offline=True))


def model_or_preset(to: Any) -> None:
    model = groups(to)["model"].add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=parse_part, metavar="PATH", help="model file or folder")
    about = f"sizes of a model in place of one: {', '.join(PRESETS)}"
    add_choice(model, "--preset", PRESETS, about, metavar="NAME")


def run_flags(to: Any, **defaults: Any) -> None:
    """The model flags of a command that runs on a backend of this machine."""
    add_flags(to, ModelOptions, backend="auto", **defaults)


def given_fields(words: Sequence[str], *types: type) -> set[str]:
    """The fields of pipelines and of these types that the words give, and `SOUND_ALONE`."""
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    reader.add_argument("--output", nargs="*", action="extend", default=[])
    outputs = reader.parse_known_args(words)[0].output
    return typed(words, *types, *pipelines().values()) | sound_alone(outputs)


def pipeline_flags(to: Any, *but: type[Group]) -> type[Request]:
    """Add `--pipeline` and the flags of the pipeline that it names or, without it, that the inputs
    choose. Flags that other pipelines read are refused with these. but: groups of flags to leave
    out. Returns that pipeline. Raises InputError if it is unknown."""
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    reader.add_argument("--pipeline", nargs="?", const=FIRST)
    name, because, known = reader.parse_known_args(to.words)[0].pipeline, "", pipelines()
    if name is None:
        name = FIRST
        if {"--help", "-h", "--help-all"}.isdisjoint(to.words):
            try:
                name, because = chosen(given_fields(to.words))
            except InputError as error:  # said once every flag is known
                to.together = str(error)
    shown = pipeline(name)
    wide = max(map(len, known))
    group = groups(to)["pipeline"]
    head = f"Flags and defaults are shown for {shown.name}. For another pipeline:"
    lines = (f"  {name:<{wide}}  {type_.summary}" for name, type_ in known.items())
    group.description = "\n".join([head, f"{to.prog} --pipeline NAME --help-all", "", *lines])
    about = f"one of the above (default: as the inputs ask, else {FIRST})"
    group.add_argument("--pipeline", default=name, metavar="NAME", help=about)
    add_flags(to, shown, but=flagged(*but))
    if shown.has(Pixels) and "width" in flagged(shown):
        about = {"help": "width and height in one", "default": argparse.SUPPRESS}
        groups(to)["clip"].add_argument("--size", action=SetSize, metavar="WxH", **about)
    to.set_defaults(because=because)
    for field, f in flagged(*known.values()).items():
        if field not in flagged(*but, shown):
            for one in (spelling(f), *f.metadata["flag"].also):
                to.elsewhere[one] = str(unread(name, one, field))
    return shown


class SetSize(argparse.Action):
    """WIDTHxHEIGHT as --width and --height."""

    def __call__(self, parser: Any, to: Any, value: Any, flag: str | None = None) -> None:
        try:
            vars(to).update(with_sides({"size": value}))
        except InputError as error:
            parser.error(str(error))


def read_prompts(path: Path) -> list[str]:
    """The lines of --prompts, empty ones left out, or a list of JSON. Raises InputError."""
    existing_file("--prompts", path)
    lines, kind = flag_lines("--prompts", path, MAX_PROMPT_BYTES), path.suffix.lower()
    found = [line.strip() for line in lines if line.strip()]
    if kind in NO_PROMPTS:
        wrong = f"is a table or markup (*{kind})"
        raise InputError(f"--prompts: {path} {wrong}; write a prompt on each line of *.txt")
    if kind in (".json", ".jsonl") or (found and found[0][0] + found[-1][-1] == "[]"):
        text = "[" + ",".join(found) + "]" if kind == ".jsonl" else "\n".join(lines)
        try:
            listed = parse(text, ([(str, {"prompt": str})], {"prompts": [str]}))
        except ValueError as error:
            if kind in (".json", ".jsonl"):
                wrong = f"{path} is no list of texts ({error})"
                raise InputError(f'--prompts: {wrong}; write ["a fox", "a hare"]') from None
        else:
            listed = listed["prompts"] if isinstance(listed, dict) else listed
            texts = (x["prompt"] if isinstance(x, dict) else x for x in listed)
            found = [text.strip() for text in texts if text.strip()]
    if not found:
        raise InputError(f"--prompts: {path} is empty; write a prompt on each line")
    return found


def add_choice(to: Any, name: str, choices: Sequence[str], help: str, **how: Any) -> None:
    """A flag whose help shows its choices."""
    to.add_argument(name, **{"choices": choices, "metavar": "|".join(choices), "help": help} | how)


def json_flag(to: Any) -> None:
    about = "print JSON in place of text"
    groups(to)["output"].add_argument("--json", action="store_true", help=about)


def planned_flags(to: Any, mark: str) -> None:
    """Flags of a model or preset, those with the mark, and pipelines' without `WORDS`."""
    model_or_preset(to)
    add_flags(to, ModelOptions, only=marked(mark, ModelOptions), dtype="bfloat16")
    pipeline_flags(to, *WORDS)
    add_flags(to, Prompt, only=["context"])


def start_ranks(
    args: argparse.Namespace,
    options: ModelOptions,
    outputs: Sequence[Path],
    fed: bool = False,
    patient: bool = False,
) -> int | None:
    """Run the command as a process for each device, if this process is not one of them. fed: the
    first of them reads this process's stdin. patient: they end by themselves when they are asked
    to. Returns the exit status, or None."""
    factory, count = get_factory(options.backend), prod(options.mesh.values())
    if count == 1 or not factory.process_per_device or factory.rank_and_size(os.environ)[1] > 1:
        return None
    return start(args.argv, count, outputs, factory.most_processes(options.device), fed, patient)
