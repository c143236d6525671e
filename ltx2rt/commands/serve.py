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
from typing import Any

from ltx2rt.backend import backend_names, get_factory
from ltx2rt.commands.options import model_options
from ltx2rt.commands.worker import Warm
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, flag, given_flags, words_of
from ltx2rt.notes import note
from ltx2rt.pipelines import FIRST
from ltx2rt.session.options import ModelOptions

PLACES = ("here", "ray")
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_amount(text: str | float) -> float:
    """Bytes or seconds, with a unit of `UNITS`."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([A-Za-z]*)", str(text))
    if match is None or match[2] not in UNITS:
        raise InputError(f"{str(text)[:80]!r}, expected a number with one of {', '.join(filter(None, UNITS))}")
    return float(match[1]) * UNITS[match[2]]


@dataclass(frozen=True)
class ServeOptions:
    """The flags of `serve` itself."""

    data: Path = flag(
        Path("ltx2rt-serve"), "the folder of queue and clips (default: ltx2rt-serve)", Path, metavar="DIR"
    )
    host: str = flag("127.0.0.1", "beyond this machine only with --token-file")
    port: int = flag(8000, "0: any free one", int)
    token_file: Path | None = flag(None, "a line `NAME TOKEN` for each user", Path, metavar="FILE")
    pipeline: str = flag(FIRST, "of requests that name none", metavar="NAME")
    replicas: int = flag(1, "workers, each on a device of its own", int, metavar="N")
    workers: str = flag("here", "where workers run: on this machine, or on nodes of a Ray cluster", choices=PLACES)
    lora_folder: Path | None = flag(None, "LoRAs that requests may name", Path, name="--loras", metavar="DIR")
    max_queue: int = flag(1000, "videos that may wait", int, metavar="N")
    max_user_queue: int = flag(100, "videos of one user that may wait", int, metavar="N")
    max_upload: float = flag(32e6, "of one request (default: 32MB)", parse_amount, metavar="SIZE")
    keep: float = flag(7 * 86400.0, "how long clips stay (default: 7d)", parse_amount, metavar="TIME")
    disk: float = flag(50e9, "how much clips may take (default: 50GB)", parse_amount, metavar="SIZE")
    step_timeout: float = flag(120.0, "seconds without a step before a worker is replaced", float, metavar="S")
    drain: float = flag(600.0, "seconds that running jobs get when the server stops", float, metavar="S")
    log_prompts: bool = flag(False, "write prompts to the log", bool)
    quiet: bool = flag(False, "no log", bool)

    def check(self) -> None:
        """Raises InputError."""
        check_shared(self, replicas=1, max_queue=1, max_user_queue=1, port=0)
        if self.port > 65535:
            raise InputError(f"--port: {self.port}, expected at most 65535")
        if not self.drain >= 0:
            raise InputError(f"--drain: {self.drain:g}, expected 0 seconds or more")


def check_shared(options: Any, **least: int) -> None:
    """Check the flags that `serve` and `batch` share, and numbers by their least values.

    Raises InputError.
    """
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            raise InputError(f"--{name.replace('_', '-')}: {value}, expected at least {bound}")
    if not 0 < options.step_timeout < math.inf:
        raise InputError(f"--step-timeout: {options.step_timeout:g}, expected seconds above 0")
    if options.lora_folder and not options.lora_folder.is_dir():
        what_to_do = "create it, or leave the flag out"
        raise InputError(f"--loras: {options.lora_folder} is no folder; {what_to_do}")


def flags(to: argparse.ArgumentParser) -> None:
    add_flags(to, ModelOptions, backend="")
    add_flags(to, Warm, ServeOptions)


def main(args: argparse.Namespace) -> int:
    if not hasattr(args, "backend"):
        args.backend = installed_backend()
    options, own = model_options(args), ServeOptions(**given_flags(args, ServeOptions))
    warm = Warm(**given_flags(args, Warm)).warm
    own.check()
    options.check()
    require_first(options)
    tokens = read_tokens(own.token_file) if own.token_file else {}
    try:
        from ltx2rt.serve.admission import Admission
        from ltx2rt.serve.app import Settings
        from ltx2rt.serve.server import Serving, serve
    except ImportError as error:
        raise InputError(f"{error}; install what serving needs with: pip install 'ltx2rt[serve]'") from error

    def admission(inputs: Path) -> Admission:
        found = Admission(options, inputs, default=own.pipeline, lora_folder=own.lora_folder, warm=warm)
        found.check_warm()
        return found

    settings = Settings(tokens, int(own.max_upload), own.keep, int(own.disk), own.log_prompts)
    return serve(
        Serving(
            data=own.data,
            host=own.host,
            port=own.port,
            command=[*bridge(own.workers, options), *worker_command(args)],
            settings=settings,
            environments=device_environments(options, own.replicas) if own.workers == "here" else [{}] * own.replicas,
            lora_folder=own.lora_folder and own.lora_folder.resolve(),
            max_queue=own.max_queue,
            max_user_queue=own.max_user_queue,
            step_timeout_s=own.step_timeout,
            drain_s=own.drain,
            quiet=own.quiet,
            announce=lambda url: note(f"serving at {url}", prefix=""),
        ),
        admission,
    )


def worker_command(args: argparse.Namespace) -> list[str]:
    return [sys.executable, "-m", "ltx2rt", "worker", *words_of(args, ModelOptions, Warm)]


def bridge(workers: str, options: ModelOptions) -> list[str]:
    """What starts a worker somewhere else, before the words that start it here. Raises InputError."""
    if workers == "here":
        return []
    if find_spec("ray") is None:
        raise InputError("--workers: ray is not installed; install it with: pip install 'ltx2rt[ray]'")
    factory = get_factory(options.backend)
    each = prod(options.mesh.values()) if factory.process_per_device else 1
    return [sys.executable, "-m", "ltx2rt.serve.on_ray", str(0 if options.device == "cpu" else each)]


def installed_backend() -> str:
    """The first whose packages are all there. Raises InputError if none is."""
    for name in backend_names():
        if all(find_spec(package) for package in get_factory(name).packages):
            return name
    raise InputError("--backend: none is installed; install one with: pip install 'ltx2rt[cuda]' or 'ltx2rt[tpu]'")


def require_first(options: ModelOptions) -> None:
    """Raises InputError in a launch of several processes, unless this is the first."""
    rank, size = get_factory(options.backend).rank_and_size(os.environ)
    if rank:
        raise InputError(f"process {rank} of {size}: the first one serves; start `ltx2rt worker` here, with its flags")


def device_environments(options: ModelOptions, replicas: int) -> list[dict[str, str]]:
    """What each of several replicas must find in its environment to have devices of its own. Raises InputError."""
    if replicas == 1 or options.device == "cpu":
        return [{}] * replicas
    factory = get_factory(options.backend)
    each = prod(options.mesh.values()) if factory.process_per_device else 1
    if factory.rank_and_size(os.environ)[1] > 1:
        raise InputError(f"--replicas: {replicas}, but all processes of this launch are one replica")
    if replicas * each > (most := factory.most_processes(options.device)):
        raise InputError(f"--replicas: {replicas} with {each} devices each, but {most} can be had here")
    devices = [factory.one_device(n, os.environ) for n in range(replicas * each)]
    groups = [devices[start : start + each] for start in range(0, len(devices), each)]
    return [{name: ",".join(one[name] for one in group) for name in group[0]} for group in groups]


def read_tokens(path: Path) -> dict[str, str]:
    """Users by token. Raises InputError."""
    try:
        lines = [line.split() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    except (OSError, UnicodeError) as error:
        raise InputError(f"--token-file: {path} cannot be read ({error})") from None
    tokens: dict[str, str] = {}
    for number, words in enumerate(lines, 1):
        if len(words) != 2 or len(words[1]) < 16 or words[1] in tokens:
            raise InputError(
                f"--token-file: line {number} of {path} is no `NAME TOKEN` with a new token of at least 16 characters"
            )
        tokens[words[1]] = words[0]
    if not tokens:
        raise InputError(f"--token-file: {path} names no user; write a line `NAME TOKEN` for each")
    return tokens
