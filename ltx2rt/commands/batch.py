"""`ltx2rt batch`: the clips of a file of jobs, one JSON object a line; what is done already is not
made again."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltx2rt.atomic_file import check_outputs, remove_abandoned
from ltx2rt.commands import serve as serving
from ltx2rt.commands.options import model_options, run_flags
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, flag_like, flags_of, given_flags, groups, words_of
from ltx2rt.notes import note
from ltx2rt.pipelines import FIRST
from ltx2rt.run.files import Marks
from ltx2rt.serve.options import ServeOptions, Serving
from ltx2rt.serve.users import OneUser, read_tokens
from ltx2rt.session.options import ModelOptions
from ltx2rt.system import require_posix

flag = flags_of("jobs")

if TYPE_CHECKING:
    from ltx2rt.serve.batch import Line, Results, Shard
    from ltx2rt.serve.remote import RemoteServer

SOME_FAILED = 3
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
    step_timeout: float = flag_like(ServeOptions, "step_timeout")


def flags(to: argparse.ArgumentParser) -> None:
    to.epilog = EXAMPLE
    about = "file of jobs, a JSON object a line"
    groups(to)["jobs"].add_argument("jobs", type=Path, metavar="JOBS.jsonl", help=about)
    run_flags(to, model=None)
    add_flags(to, BatchOptions)


def main(args: argparse.Namespace) -> int:
    own = BatchOptions(**given_flags(args, BatchOptions))
    serving.check_lora_folder(own.lora_folder)
    own.check_marks()
    if own.server and (given := words_of(args, Marks)):
        raise InputError(f"{given[0]}: with --server, the server's flags mark the files; omit it")
    if (own.server is None) != hasattr(args, "model"):
        raise InputError(
            "--model: expected either --model, for a model here, or --server, which has one"
        )
    options = None
    if own.server is None:
        options = model_options(args)
        options.check()
        serving.require_first(options)
    require_posix("batch")
    with serving.installed():
        from ltx2rt.serve import batch, remote

    shard, lines = batch.parse_shard(own.shard), batch.read_lines(args.jobs)
    try:
        own.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--output-dir: the folder {own.output_dir} cannot be made ({error.strerror}); "
            "choose another one"
        ) from error
    results = batch.Results(own.output_dir, shard)
    check_outputs([("--output-dir", results.path)], options.files if options else ())
    make = partial(made_by, own, lines, shard, results, args.jobs.parent)
    if options is None:
        token = next(iter(read_tokens(own.token_file)), None) if own.token_file else None
        return make(remote.RemoteServer(own.server or "", token))
    return here(own, args, options, results, make)


def here(
    own: BatchOptions, args: argparse.Namespace, options: ModelOptions, results: Results,
    make: Callable[[RemoteServer], int],
) -> int:  # fmt: skip
    """Have a server of this process `make` the jobs; exit status. Raises InputError."""
    from ltx2rt.serve import remote
    from ltx2rt.serve.admission import Admission
    from ltx2rt.serve.server import INTERRUPTED, TERMINATED, serve

    user, loras = OneUser(), own.lora_folder and own.lora_folder.resolve()

    def admission(inputs: Path) -> Admission:
        found = Admission(options, inputs, default=own.pipeline, lora_folder=loras)
        check_outputs([("--output-dir", results.path)], found.checkpoint.files)
        return found

    def log(event: str, **facts: Any) -> None:
        if event == "storage":  # tell the user why a batch waits
            note(f"{own.output_dir}: {facts['message']}", prefix="")

    how = Serving(
        flags=ServeOptions(
            data=own.output_dir / f".{results.path.stem}", port=0, max_upload=2**30,
            step_timeout=own.step_timeout, drain=0,
        ),
        command=[*serving.worker_command(args), "--no-previews"],
        environments=serving.device_environments(options, own.replicas),
        users=user,
        log=log,
        work=lambda url: make(remote.RemoteServer(url, user.token, own=True)),
    )  # fmt: skip
    return TERMINATED if (status := serve(how, admission)) == INTERRUPTED else status


def made_by(
    own: BatchOptions, lines: list[Line], shard: Shard, results: Results, beside: Path,
    server: RemoteServer,
) -> int:  # fmt: skip
    """Have a server make the jobs; exit status. beside: where paths of files begin."""
    from ltx2rt.serve import remote
    from ltx2rt.serve.folder import frames_of

    mine = [order for order in remote.admit(server, lines, beside) if shard.has(order.line.id)]
    loras = {o.line.id: server.loras_of(o.given) for o in mine}
    done = results.done(model := server.model(), loras)
    orders = [o for o in mine if done.get(o.line.id) != o.digest]
    made_of = [(o.line.id, int(o.given["seed"]), server.count(o.given)) for o in orders]
    names = [name for one in made_of for name in results.names(*one)]
    remove_abandoned(results.output, {*names, *map(frames_of, names)})
    where = " here" if server.own else ""
    note(f"{len(lines)} jobs, {len(orders)} to make{where}{results.replaced(names)}", prefix="")
    facts = {id: {"model": model, "loras": named} for id, named in loras.items()}
    say = partial(note, prefix="")
    counts = remote.make(server, orders, results, beside, own.retries, say, facts)
    return 0 if counts.keys() <= {"completed"} else SOME_FAILED
