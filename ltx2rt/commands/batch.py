"""`ltx2rt batch`: the clips of a file of jobs, one JSON object a line; what is done already is not
made again."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ltx2rt.atomic_file import check_outputs, remove_abandoned
from ltx2rt.commands import serve
from ltx2rt.commands.options import model_options, run_flags
from ltx2rt.commands.serve import ServeOptions
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, flag_like, flags_of, given_flags, groups, words_of
from ltx2rt.notes import note
from ltx2rt.pipelines import FIRST
from ltx2rt.run.files import Marks
from ltx2rt.serve.users import read_tokens
from ltx2rt.session.options import ModelOptions
from ltx2rt.system import require_posix

flag = flags_of("jobs")

if TYPE_CHECKING:
    from ltx2rt.serve.batch import Line, Results, Shard

SOME_FAILED, TERMINATED = 3, 143
EXAMPLE = """\
A job is a line of JOBS.jsonl, with the fields of POST /v1/videos and paths of files here:
  {"id": "fox", "prompt": "a red fox", "images": [{"path": "fox.png", "frame": 0}]}

examples:
  ltx2rt batch jobs.jsonl --model MODEL_DIR --output-dir clips
  ltx2rt batch jobs.jsonl --model MODEL_DIR --output-dir clips --shard 1/8

For --shard: $((SLURM_ARRAY_TASK_ID + 1))/N; JOB_COMPLETION_INDEX in an indexed Job of Kubernetes,
SKYPILOT_NODE_RANK of SkyPilot.
"""


@dataclass(frozen=True, kw_only=True)
class BatchOptions(Marks):
    """The flags of `batch` itself."""

    output_dir: Path = flag(
        MISSING, "folder for the clips, ID.mp4, and results.jsonl", group="output", metavar="DIR"
    )
    shard: str = flag("1/1", "run the I-th of N parts of the jobs", metavar="I/N")
    pipeline: str = flag(FIRST, "pipeline for jobs that name none", metavar="NAME")
    replicas: int = flag_like(ServeOptions, "replicas")
    lora_folder: Path | None = flag_like(
        ServeOptions, "lora_folder", help="folder of LoRAs that jobs may name"
    )
    retries: int = flag(1, "number of retries of a job that fails for no fault of its own", least=0)
    server: str | None = flag(
        None, "server that runs the jobs, in place of --model here", group="server", metavar="URL"
    )
    token_file: Path | None = flag(
        None, "file whose first line is `NAME TOKEN`, for --server", group="server"
    )
    limit: int | None = flag(None, "number of jobs to run at most", least=1)
    step_timeout: float = flag_like(ServeOptions, "step_timeout")


def flags(to: argparse.ArgumentParser) -> None:
    to.epilog = EXAMPLE
    about = "file of jobs, a JSON object a line"
    groups(to)["jobs"].add_argument("jobs", type=Path, metavar="JOBS.jsonl", help=about)
    run_flags(to, model=None)
    add_flags(to, BatchOptions)


def main(args: argparse.Namespace) -> int:
    own = BatchOptions(**given_flags(args, BatchOptions))
    serve.check_lora_folder(own.lora_folder)
    own.check_marks()
    if own.server and (given := words_of(args, Marks)):
        raise InputError(f"{given[0]}: with --server, the server's flags mark the files; omit it")
    if (own.server is None) != hasattr(args, "model"):
        raise InputError(
            "--model: expected either --model, for a model here, or --server, which has one"
        )
    options = None if own.server else checked_options(args)
    require_posix("batch")
    try:
        from ltx2rt.serve import batch
    except ImportError as error:
        raise InputError(f"{error}; in the clone: pip install '.[serve]'") from error

    shard, lines = batch.parse_shard(own.shard), batch.read_lines(args.jobs)
    if not own.output_dir.is_dir():
        raise InputError(f"--output-dir: {own.output_dir} is no folder; create it first")
    results = batch.Results(own.output_dir, shard)
    check_outputs([("--output-dir", results.path)], options.files if options else ())
    if options is None:
        return on_server(own, lines, shard, results, args.jobs.parent)
    return here(own, args, options, lines, shard, results)


def here(
    own: BatchOptions,
    args: argparse.Namespace,
    options: ModelOptions,
    lines: list[Line],
    shard: Shard,
    results: Results,
) -> int:
    """The jobs on this machine's devices; exit status. Raises InputError."""
    from ltx2rt.serve import batch
    from ltx2rt.serve.admission import Admission
    from ltx2rt.serve.folder import Folder

    folder = Folder(
        own.output_dir / f".{Path(shard.results).stem}", "--output-dir", batch.MIN_FREE_BYTES
    )
    try:
        folder.clear()
        admission = Admission(
            options, folder.inputs, default=own.pipeline, lora_folder=own.lora_folder
        )
        check_outputs([("--output-dir", results.path)], admission.checkpoint.files)
        admitted = batch.admit(lines, admission, folder, args.jobs.parent)
        mine = [(line, a) for line, a in admitted if shard.has(line.id)]
        model = batch.made_by(admission)
        loras = {l.id: batch.loras_of(admission, a) for l, a in mine}
        done = results.done(model, loras)
        jobs = [(line, a) for line, a in mine if done.get(line.id) != a.digest][: own.limit]
        made_of = ((line.id, a.job["clip"].get("seed"), a.job["n"]) for line, a in jobs)
        there = results.replaced(name for one in made_of for name in results.names(*one))
        note(f"{len(lines)} jobs, {len(jobs)} to make here{there}", prefix="")
        if not jobs:
            batch.clean(folder)
            return 0
        made = batch.Batch(
            folder, results, [*serve.worker_command(args), "--no-previews"],
            facts={id: {"model": model, "loras": named} for id, named in loras.items()},
            environments=serve.device_environments(options, own.replicas),
            lora_folder=own.lora_folder and own.lora_folder.resolve(),
            step_timeout_s=own.step_timeout,
            retries=own.retries, say=lambda text: note(text, prefix=""),
        )  # fmt: skip
        counts = asyncio.run(made.run(jobs))
        if sum(counts.values()) < len(jobs):
            return TERMINATED
        batch.clean(folder)
        return 0 if counts.keys() == {"completed"} else SOME_FAILED
    except InputError:
        batch.clean(folder)
        raise
    finally:
        folder.close()


def checked_options(args: argparse.Namespace) -> ModelOptions:
    """Raises InputError."""
    options = model_options(args)
    options.check()
    serve.require_first(options)
    return options


def on_server(
    own: BatchOptions, lines: list[Line], shard: Shard, results: Results, beside: Path
) -> int:
    from ltx2rt.serve import batch, remote
    from ltx2rt.serve.folder import frames_of

    token = next(iter(read_tokens(own.token_file)), None) if own.token_file else None
    server = remote.RemoteServer(own.server or "", token)
    admitted = remote.admit(server, lines, beside)
    mine = [(line, given) for line, given in admitted if shard.has(line.id)]
    done = results.done(server.model(), dict.fromkeys(line.id for line, _ in mine))
    jobs = [(line, g) for line, g in mine if done.get(line.id) != batch.digest_of(g)][: own.limit]
    made_of = [(line.id, int(g["seed"]), server.count(g)) for line, g in jobs]
    names = [name for one in made_of for name in results.names(*one)]
    remove_abandoned(results.output, {*names, *map(frames_of, names)})
    note(f"{len(lines)} jobs, {len(jobs)} to make{results.replaced(names)}", prefix="")
    counts = remote.make(server, jobs, results, own.retries, lambda text: note(text, prefix=""))
    return 0 if counts.keys() <= {"completed"} else SOME_FAILED
