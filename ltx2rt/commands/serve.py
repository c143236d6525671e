"""`ltx2rt serve`: OpenAI's video routes and a page; the model runs in workers that it starts."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path

from ltx2rt.backend import get_factory
from ltx2rt.commands.options import model_options, run_flags
from ltx2rt.commands.worker import Warm
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, flags_of, given_flags, words_of
from ltx2rt.notes import note
from ltx2rt.pipelines import FIRST
from ltx2rt.serve.board import log
from ltx2rt.serve.users import Users
from ltx2rt.session.options import MEMORY, ModelOptions
from ltx2rt.system import require_posix

flag = flags_of("server")

PLACES = ("here", "ray")
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "s": 1, "m": 60, "h": 3600, "d": 86400}
EXAMPLE = """\
example:
  ltx2rt serve --model MODEL_DIR --warm 768x512x121
  then open http://127.0.0.1:8000, or send requests to its /v1/videos
"""


def parse_amount(text: str | float) -> float:
    """Bytes or seconds, with a unit of `UNITS`. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([A-Za-z]*)", str(text))
    if match is None or match[2] not in UNITS:
        raise ValueError
    return float(match[1]) * UNITS[match[2]]


@dataclass(frozen=True)
class ServeOptions:
    """The flags of `serve` itself."""

    data: Path = flag(
        Path("ltx2rt-serve"), "folder of queue and clips (default: ltx2rt-serve)", metavar="DIR"
    )
    queue: Path | None = flag(
        None, "file of the queue, on a disk of this machine (default: jobs.db in --data)"
    )
    host: str = flag(
        "127.0.0.1", "address to listen on; a public one needs --token-file", metavar="ADDRESS"
    )
    port: int = flag(8000, "port to listen on, 0 for any free one", least=0, most=65535)
    token_file: Path | None = flag(
        None, "file with a line `NAME TOKEN` or `NAME TOKEN operator` for each user"
    )
    webhooks: Path | None = flag(
        None,
        "file with a line `NAME URL SECRET` for each user (* for all others): when a job is over, "
        "a signed event is posted to URL",
    )
    pipeline: str = flag(
        FIRST, "pipeline for requests that name none", group="jobs", metavar="NAME"
    )
    served_name: tuple[str, ...] = flag(
        (),
        "names for clients, the first answers (default: its file)",
        str,
        metavar="NAME",
        repeat=True,
    )
    replicas: int = flag(1, "number of workers, each with its own devices", group=MEMORY, least=1)
    workers: str = flag(
        "here", "run workers on this machine or on a Ray cluster", group=MEMORY, choices=PLACES
    )
    lora_folder: Path | None = flag(
        None, "folder of LoRAs that requests may name", group="model", name="--loras", metavar="DIR"
    )
    max_queue: int = flag(
        1000, "number of videos that may wait, a tenth of them one user's", group="jobs", least=1
    )
    max_upload: float = flag(
        32e6, "bytes of a request at most (default: 32MB)", parse_amount, metavar="SIZE[KB|MB|GB]"
    )
    keep: float | None = flag(
        None,
        "time after which clips are deleted, in seconds (default: 7d with --token-file, else when "
        "--disk is full)",
        parse_amount,
        metavar="TIME[s|m|h|d]",
    )
    disk: float = flag(
        50e9,
        "size of all clips above which the oldest are deleted, in bytes (default: 50GB)",
        parse_amount,
        metavar="SIZE[KB|MB|GB]",
    )
    step_timeout: float = flag(
        120.0, "seconds without a step that end a worker", group="jobs", metavar="S", above=0
    )
    drain: float = flag(
        600.0, "seconds for running jobs when it stops", group="jobs", metavar="S", least=0
    )
    log_prompts: bool = flag(False, "write prompts to the log", group="log")
    quiet: bool = flag(False, "write no log", group="log")


def check_lora_folder(folder: Path | None) -> None:
    """Raises InputError."""
    if folder and not folder.is_dir():
        raise InputError(f"--loras: {folder} is no folder; create it, or leave the flag out")


def flags(to: argparse.ArgumentParser) -> None:
    to.epilog = EXAMPLE
    run_flags(to)
    add_flags(to, Warm, ServeOptions)


def main(args: argparse.Namespace) -> int:
    options, own = model_options(args), ServeOptions(**given_flags(args, ServeOptions))
    ready = Warm(**given_flags(args, Warm))
    check_lora_folder(own.lora_folder)
    options.check()
    ready.check_marks()
    require_first(options)
    hears = (lambda *_, **__: None) if own.quiet else log
    users = Users(own.token_file, hears) if own.token_file else None
    require_posix("serve")
    try:
        from ltx2rt.serve.admission import Admission
        from ltx2rt.serve.core import KEEP_S, Settings
        from ltx2rt.serve.server import Serving, serve
        from ltx2rt.serve.webhooks import read_hooks
    except ImportError as error:
        raise InputError(f"{error}; in the clone: pip install '.[serve]'") from error

    def admission(inputs: Path) -> Admission:
        found = Admission(
            options,
            inputs,
            default=own.pipeline,
            lora_folder=own.lora_folder,
            warm=ready.warm,
            enhancer=ready.prompt_enhancer,
            names=own.served_name,
        )
        found.check_warm()
        return found

    hooks = read_hooks(own.webhooks) if own.webhooks else {}
    keep_s = (KEEP_S if users else math.inf) if own.keep is None else own.keep
    settings = Settings(users, int(own.max_upload), keep_s, int(own.disk), own.log_prompts)
    return serve(
        Serving(
            data=own.data,
            queue=own.queue,
            host=own.host,
            port=own.port,
            command=[*bridge(own.workers, options), *worker_command(args)],
            settings=settings,
            environments=device_environments(options, own.replicas)
            if own.workers == "here"
            else [{}] * own.replicas,
            lora_folder=own.lora_folder and own.lora_folder.resolve(),
            hooks=hooks,
            max_queue=own.max_queue,
            step_timeout_s=own.step_timeout,
            drain_s=own.drain,
            log=hears,
            announce=lambda url: note(f"serving at {url}", prefix=""),
        ),
        admission,
    )


def worker_command(args: argparse.Namespace) -> list[str]:
    return [sys.executable, "-m", "ltx2rt", "worker", *words_of(args, ModelOptions, Warm)]


def bridge(workers: str, options: ModelOptions) -> list[str]:
    """Words that start a worker elsewhere, before those that start it here. Raises InputError."""
    if workers == "here":
        return []
    if find_spec("ray") is None:
        raise InputError("--workers: ray is not installed; in the clone: pip install '.[ray]'")
    kind = get_factory(options.backend).accelerator
    count = 0 if options.device == "cpu" else prod(options.mesh.values())
    return [sys.executable, "-m", "ltx2rt.serve.on_ray", kind, str(count)]


def require_first(options: ModelOptions) -> None:
    """Raises InputError in a launch of several processes, unless this is the first."""
    rank, size = get_factory(options.backend).rank_and_size(os.environ)
    if rank:
        raise InputError(
            f"process {rank} of {size}: the first one serves; start `ltx2rt worker` here, with "
            "its flags"
        )


def device_environments(options: ModelOptions, replicas: int) -> list[dict[str, str]]:
    """Variables that give each of several replicas its own devices. Raises InputError."""
    if replicas == 1 or options.device == "cpu":
        return [{}] * replicas
    factory = get_factory(options.backend)
    each = prod(options.mesh.values()) if factory.process_per_device else 1
    if factory.rank_and_size(os.environ)[1] > 1:
        raise InputError(
            f"--replicas: {replicas}, but all processes of this launch are one replica"
        )
    if replicas * each > (most := factory.most_processes(options.device)):
        raise InputError(
            f"--replicas: {replicas} with {each} devices each, but {most} can be had here"
        )
    devices = [factory.one_device(n, os.environ) for n in range(replicas * each)]
    groups = [devices[start : start + each] for start in range(0, len(devices), each)]
    return [{name: ",".join(one[name] for one in group) for name in group[0]} for group in groups]
