"""`ltx2rt train prepare`, `run` and `export`."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, replace
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

from ltx2rt.atomic_file import check_outputs
from ltx2rt.backend import EMA, get_factory, keep_compiled
from ltx2rt.commands.generate import compiled_folder
from ltx2rt.commands.options import add_choice, model_options, start_ranks
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, flagged, given_flags, marked, spelling
from ltx2rt.notes import note
from ltx2rt.pipelines.recipes import check_value
from ltx2rt.ranks.crew import Crew
from ltx2rt.run.validation import with_validation
from ltx2rt.session.open import located, open_session
from ltx2rt.session.options import ModelOptions
from ltx2rt.suggest import hint
from ltx2rt.system import ENDING
from ltx2rt.text_files import read_toml
from ltx2rt.train.manifest import MANIFEST
from ltx2rt.train.prepare import prepare as fill
from ltx2rt.train.prepare_flags import PrepareRequest
from ltx2rt.train.request import TrainRequest
from ltx2rt.train.resume import described
from ltx2rt.train.run import TrainingRun, start
from ltx2rt.train.state import CONFIGURATION, FORMATS, read_state, states, write_lora
from ltx2rt.train.step import in_words

SHOWN = 50  # steps of a mean loss
EXAMPLE = """\
example:
  ltx2rt train prepare --model MODEL_DIR --data clips/ --buckets 768x512x49 --output cache
  ltx2rt train run --model MODEL_DIR --data cache --output run
  ltx2rt generate --model MODEL_DIR --lora run/lora-002000.safetensors --prompt "..." --output clip.mp4
"""


def prepare_flags(to: Any) -> None:
    to.epilog = EXAMPLE
    add_flags(to, ModelOptions, backend="auto", only=marked("prepare", ModelOptions))
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


def run_flags(to: Any) -> None:
    to.epilog = EXAMPLE
    add_flags(to, ModelOptions, backend="auto", only=marked("train", ModelOptions))
    about = "TOML file of flags, dashes as underscores; the command line wins"
    to.add_argument("--config", type=Path, metavar="FILE", help=about).common = "training"
    add_flags(to, TrainRequest)
    for action in to._actions:  # the file may have them
        action.required = False


def configured(args: argparse.Namespace) -> argparse.Namespace:
    """`args` with the flags that the command line lacks, from `--config`, or from the `train.toml`
    of a run that goes on. Raises InputError."""
    known = marked("train", ModelOptions) | flagged(TrainRequest)
    path, run = args.config, Path(getattr(args, "output", ""))
    if path is None and hasattr(args, "output") and states(run) and (run / CONFIGURATION).exists():
        path = run / CONFIGURATION
    if path is not None:
        for name, value in read_toml("--config", path).items():
            if name not in known:
                raise InputError(
                    f"--config: {path} has {name!r}, which is no flag of `train "
                    f"run`{hint(name, known)}"
                )
            check_value("--config", path, name, known[name], value)
            implied = name == "dtype" and hasattr(args, "weights_dtype")  # which decides it
            if not hasattr(args, name) and not implied:
                setattr(args, name, _of_toml(known[name], value))
    for name, f in known.items():
        required = f.default is f.default_factory is MISSING and name != "backend"
        if required and not hasattr(args, name):
            raise InputError(f"{spelling(f)}: none was given; pass it, or put it into --config")
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
    options = located(options, kind="dev")
    if (status := start_ranks(args, options, [], patient=True)) is not None:
        return status
    if args.own_process:
        keep_compiled(options.backend, compiled_folder(os.environ))
    made = with_validation(start(open_session(options), request))
    main, lines = made.session.backend.is_main, progress(made)
    say = note if main else lambda text: None
    for line in _sizes(made):
        say(line)
    if request.dry_run:
        return _dry_run(made, say)

    def show(row: dict[str, Any]) -> None:
        if request.json and main:
            clips = [*map(str, row.get("validation", []))]
            print(json.dumps(row | {"validation": clips}), flush=True)
        if line := lines(row):
            say(line)

    with stopping(args.crew) as stopped:
        path = made.train(say, show, stopped)
    if main:
        print(json.dumps({"lora": str(path)}) if request.json else path)
    return None


def progress(made: TrainingRun) -> Callable[[dict[str, Any]], str | None]:
    """Return a function of a step's metrics: a line every ten steps and after a measurement."""
    recent: deque[dict[str, Any]] = deque(maxlen=SHOWN)
    seconds: deque[float] = deque([time.monotonic()], maxlen=SHOWN + 1)
    steps = made.request.steps or 0

    def line(row: dict[str, Any]) -> str | None:
        recent.append(row)
        seconds.append(time.monotonic())
        done, said = row["step"] + 1, []
        measured = any(name.startswith("held_out") for name in row) or "validation" in row
        if done % 10 and done != steps and not measured:
            return None
        for name in made.samples.trained:
            losses = [x for r in recent if (x := r.get(f"{name}_loss")) is not None]
            held_out = row.get(f"held_out_{name}_loss")
            apart = f" (held out {held_out:.4f})" if held_out is not None else ""
            said += [f"{name} {sum(losses) / len(losses):.4f}{apart}"] if losses else []
        left_s = (seconds[-1] - seconds[0]) / (len(seconds) - 1) * (steps - done)
        said.append(f"{in_time(left_s)} left" if steps > done else "done")
        said += map(str, row.get("validation", []))
        return f"step {done} of {steps}: mean loss of {len(recent)} steps {', '.join(said)}"

    return line


def in_time(seconds: float) -> str:
    """Seconds in the largest unit of which there are two."""
    for name, unit in (("h", 3600), ("min", 60)):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def _sizes(made: TrainingRun) -> Iterator[str]:
    for group, count in made.step.groups().items():
        yield f"trains {group}: {count:,} numbers"
    r, samples, held_out = made.request, made.samples, len(made.samples.held_out)
    buckets = sorted({kind.bucket for kind in samples.kinds})
    rates = sorted({Fraction(kind.fps) for kind in samples.kinds})
    size = ", ".join((*buckets[:4], *["..."][: len(buckets) - 4]))
    seen = f"{size} at {', '.join(f'{float(rate):.5g}' for rate in rates)} fps"
    apart = f" ({held_out} more are measured alone)" if held_out else ""
    yield (
        f"{len(samples.items)} samples{apart} of "
        f"{seen if 'video' in samples.streams else 'sound alone'}, batch {samples.batch} x "
        f"{r.accumulate}, {r.steps} steps"
    )


def _dry_run(made: TrainingRun, say: Callable[[str], None]) -> None:
    """Memory and the shapes of the first batch, as text on stderr, or with groups as JSON."""
    memory, feeds = made.step.memory, made.feeder.feeds(made.samples.drawn(0, 0))
    shapes = {name: list(x.shape) for name, x in feeds.items()}
    say(f"memory {memory.total / 1e9:.3g} GB of a device: {in_words(memory)}")
    say("first batch: " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))
    if made.request.json and made.session.backend.is_main:
        r, samples = made.request, made.samples
        found = {"groups": made.step.groups(), "samples": len(samples.items), "steps": r.steps}
        found |= {"held_out": len(samples.held_out), "batch": samples.batch * r.accumulate}
        print(json.dumps(found | {"memory_bytes": memory.total, "first_batch": shapes}))


@contextmanager
def stopping(crew: Crew | None) -> Iterator[list[int]]:
    """A list that is not empty once this process was asked to end. The first signal has no other
    effect, the second ends the process at once."""
    asked: list[int] = []
    if crew:
        crew.asked = asked
        try:
            yield asked
        finally:
            crew.asked = None
        return
    # as `nohup` has SIGHUP
    kinds = [k for k in (signal.SIGINT, *ENDING) if signal.getsignal(k) != signal.SIG_IGN]
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def put_back() -> None:
        for kind, handler in before.items():
            signal.signal(kind, handler)

    def ask(number: int, _: Any) -> None:
        asked.append(number)
        put_back()

    for kind in kinds:
        signal.signal(kind, ask)
    try:
        yield asked
    finally:
        put_back()


def export_flags(to: Any) -> None:
    about = "folder of a run, and a step whose state was kept (default: the last)"
    to.add_argument("run", metavar="RUN[:STEP]", help=about)
    about = "safetensors file to write (required)"
    to.add_argument("--output", type=Path, required=True, metavar="FILE", help=about)
    about = "dtype of the tensors (default: bfloat16)"
    add_choice(to, "--dtype", ("bfloat16", "float32"), about, default="bfloat16")
    about = "names of the tensors (default: official, which ComfyUI and diffusers also read)"
    add_choice(to, "--format", FORMATS, about, default=FORMATS[0])
    about = "write the average that the run kept by --ema"
    to.add_argument("--ema", action="store_true", help=about)


def export(args: argparse.Namespace) -> None:
    match = re.fullmatch(r"(.+?)(?::(\d+))?", args.run)
    assert match is not None
    folder = Path(match[1])
    kept = {int(path.name): path for path in states(folder)}
    if not kept:
        advice = "pass the --output of `ltx2rt train run`"
        raise InputError(f"{folder}: no state of a training run was found; {advice}")
    step = int(match[2]) if match[2] else max(kept)
    if step not in kept:
        others = ", ".join(map(str, sorted(kept)))
        raise InputError(f"{folder}: no state of step {step} was kept; there are {others}")
    if args.output.suffix != ".safetensors":
        raise InputError(f"--output: {args.output}, expected a name that ends in .safetensors")
    check_outputs([("--output", args.output)], [folder / "state"])
    about, arrays = read_state(kept[step])
    request = about["request"]
    scale = request["alpha"] / request["rank"]
    kind = EMA if args.ema else "parameters"
    if kind not in arrays:
        advice = "train with --ema, or leave the flag out"
        raise InputError(f"--ema: {folder} kept no average; {advice}")
    facts = described(about, step)
    write_lora(args.output, arrays[kind], scale, facts, args.dtype, args.format)
    print(args.output)


def _options(args: argparse.Namespace) -> ModelOptions:
    """Raises InputError for a mesh of several processes, of which only one may prepare."""
    options = model_options(args)
    options.check()
    factory = get_factory(options.backend)
    several = prod(options.mesh.values()) > 1 or factory.rank_and_size(os.environ)[1] > 1
    if factory.process_per_device and several:
        raise InputError(
            f"--mesh: `train prepare` runs one process of {factory.name}; leave the flag out"
        )
    return options


def _run_options(args: argparse.Namespace) -> ModelOptions:
    """Without a flag for the mesh, each process has its own samples. Raises InputError."""
    options = model_options(args)
    return replace(options, mesh={"data": options.num_gpus}) if options.num_gpus else options
