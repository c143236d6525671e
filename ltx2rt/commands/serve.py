"""`ltx2rt serve`: OpenAI's video routes and a page; the model runs in workers that it starts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from math import prod
from pathlib import Path

from ltx2rt.backend import get_factory
from ltx2rt.commands.options import model_options, run_flags
from ltx2rt.commands.worker import Warm
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, given_flags, words_of
from ltx2rt.notes import note
from ltx2rt.serve.board import log
from ltx2rt.serve.options import ServeOptions, Serving
from ltx2rt.serve.users import Users
from ltx2rt.session.options import ModelOptions
from ltx2rt.system import require_posix

EXAMPLE = """\
example:
  ltx2rt serve --model MODEL_DIR --warm 768x512x121
  then open http://127.0.0.1:8000, or send requests to its /v1/videos
"""


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
    with installed():
        from ltx2rt.serve.admission import Admission
        from ltx2rt.serve.server import serve
        from ltx2rt.serve.webhooks import read_hooks

    def admission(inputs: Path) -> Admission:
        found = Admission(
            options, inputs, default=own.pipeline, warm=ready.warm, names=own.served_name,
            lora_folder=own.lora_folder and own.lora_folder.resolve(),
            enhancer=ready.prompt_enhancer,
        )  # fmt: skip
        found.check_warm()
        return found

    here = own.workers == "here"
    how = Serving(
        flags=own,
        command=[*bridge(own.workers, options), *worker_command(args)],
        environments=device_environments(options, own.replicas) if here else [{}] * own.replicas,
        users=users,
        hooks=read_hooks(own.webhooks) if own.webhooks else {},
        log=hears,
        announce=lambda url: note(f"serving at {url}", prefix=""),
    )
    return serve(how, admission)


@contextmanager
def installed() -> Iterator[None]:
    """Raise InputError if an import of the block lacks a package of the server."""
    try:
        yield
    except ImportError as error:
        raise InputError(f"{error}; in the clone: pip install '.[serve]'") from error


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
