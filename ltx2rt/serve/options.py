"""Settings of a server: the flags of `serve`, and facts that they do not state."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.flags import flags_of, parse_seconds
from ltx2rt.pipelines import FIRST
from ltx2rt.serve.board import log
from ltx2rt.serve.users import Users
from ltx2rt.session.options import MEMORY

flag, job_flag = flags_of("server"), flags_of("jobs")
front_flag = partial(flag, common="server")
ORIGIN = re.compile(r"https?://[\w.-]+(:\d{1,5})?|https?://\[[0-9a-f:]+\](:\d{1,5})?")


def parse_origin(text: str) -> str:
    """Raises InputError unless browsers would send it."""
    origin = text.lower().removesuffix("/")
    if not ORIGIN.fullmatch(origin):
        raise InputError(
            f"--allow-origin: {text[:80]!r}, expected an origin such as http://localhost:5173"
        )
    return origin


PLACES = ("here", "ray")
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
USER_SHARE = 10  # parts of a shared queue; a user may fill one
KEEP_S = 7 * 86400.0  # for clips where others reach the server; rows stay ten times longer


def parse_bytes(text: str | float) -> int:
    """Bytes, with a unit of `UNITS`. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([A-Za-z]*)", str(text))
    if match is None or match[2] not in UNITS:
        raise ValueError
    return int(float(match[1]) * UNITS[match[2]])


@dataclass(frozen=True)
class ServeOptions:
    """The flags of `serve` itself."""

    data: Path = front_flag(
        Path("ltx2rt-serve"), "folder of queue and clips (default: ltx2rt-serve)", metavar="DIR"
    )
    queue: Path | None = flag(
        None, "file of the queue, on a disk of this machine (default: jobs.db in --data)"
    )
    host: str = front_flag(
        "127.0.0.1", "address to listen on; a public one needs --token-file", metavar="ADDRESS"
    )
    port: int = front_flag(8000, "port to listen on, 0 for any free one", least=0, most=65535)
    token_file: Path | None = front_flag(
        None, "file with a line `NAME TOKEN` or `NAME TOKEN operator` for each user"
    )
    webhooks: Path | None = flag(
        None,
        "file with a line `NAME URL SECRET` for each user (* for all others): when a job is over, "
        "a signed event is posted to URL",
    )
    pipeline: str = job_flag(
        FIRST, "pipeline for requests that name none", metavar="NAME", common="server"
    )
    allow_origin: tuple[str, ...] = front_flag(
        (), "other origins whose pages may use the server", parse_origin, metavar="URL", repeat=True
    )
    served_name: tuple[str, ...] = front_flag(
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
    max_queue: int = job_flag(1000, "number of videos that may wait", least=1)
    max_user_queue: int | None = job_flag(
        None,
        "number of videos of one user that may wait (default: a tenth of --max-queue with "
        "--token-file, else all)",
        least=1,
    )
    user_quota: int | None = job_flag(
        None, "number of videos that a user may send in 24 hours (default: any)", least=1
    )
    max_work: float | None = job_flag(
        None, "TFLOP of a request at most, as `plan` counts (default: any)", above=0
    )
    max_upload: int = flag(
        100_000_000,
        "bytes of a request at most (default: 100MB, for the largest file in JSON)",
        parse_bytes,
        metavar="SIZE[KB|MB|GB]",
    )
    keep: float | None = front_flag(
        None,
        "time after which clips are deleted, in seconds (default: 7d with --token-file, else when "
        "--disk is full)",
        parse_seconds,
        metavar="TIME[s|m|h|d]",
        least=0,
    )
    disk: int = front_flag(
        50 * 10**9,
        "size of all clips above which the oldest are deleted, in bytes (default: 50GB)",
        parse_bytes,
        metavar="SIZE[KB|MB|GB]",
    )
    step_timeout: float = job_flag(
        120.0, "seconds without a step that end a worker", parse_seconds, above=0
    )
    drain: float = job_flag(600.0, "seconds for running jobs when it stops", parse_seconds, least=0)
    log_prompts: bool = flag(False, "write prompts to the log", group="log")
    quiet: bool = flag(False, "write no log", group="log")


@dataclass(frozen=True)
class Serving:
    """command: starts a worker; environments: of each replica; users: None: everybody who reaches
    the server is one user; hooks: of users, by name. work: a batch, given the address of its own
    server, which ends with it and keeps nothing."""

    flags: ServeOptions
    command: Sequence[str]
    environments: Sequence[Mapping[str, str]] = ({},)
    users: Users | None = None
    hooks: Mapping[str, Any] = field(default_factory=dict)
    log: Callable[..., None] = log
    announce: Callable[[str], None] = field(default=lambda url: None)
    work: Callable[[str], int] | None = None

    @property
    def most_of_user(self) -> int | None:
        """Videos of one user that may wait; None for any number."""
        shared = max(1, self.flags.max_queue // USER_SHARE) if self.users else None
        return self.flags.max_user_queue or shared

    @property
    def keep_s(self) -> float:
        """How long clips stay."""
        if self.flags.keep is None:
            return KEEP_S if self.users else math.inf
        return self.flags.keep
