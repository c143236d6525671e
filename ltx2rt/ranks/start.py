"""The launcher of `--num-gpus`, by the variables of torchrun and accelerate."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ltx2rt.atomic_file import remove_partial
from ltx2rt.errors import InputError
from ltx2rt.ranks.environment import (
    FAILED,
    GRACE_S,
    LAUNCHER,
    POLL_S,
    SIGNALLED,
    SLEEPING,
    STORE,
    TOKEN,
)
from ltx2rt.system import require_linux


def start(
    argv: Sequence[str],
    count: int,
    outputs: Sequence[Path],
    most: int,
    fed: bool = False,
    patient: bool = False,
) -> int:
    """Run `ltx2rt argv` as `count` ranks on this host and return the exit status; no process and no
    part of `outputs` is left behind, however it ends. fed: rank 0 reads this process's stdin.
    patient: the first request to end is passed on, and the ranks end by themselves. InputError if
    more than `most`, the number that can work here, are asked for.
    """
    if count > most:
        raise InputError(
            f"{count} processes are asked for, this host has devices for {most}; ask for at most "
            f"{most}"
        )
    require_linux("a run of several processes")
    ranks: list[subprocess.Popen] = []
    try:
        _spawn(argv, count, ranks, fed)
        try:
            ended = _failed(ranks)
        except (KeyboardInterrupt, SystemExit):
            if not patient:
                raise
            for rank in ranks:
                rank.send_signal(signal.SIGINT)
            ended = _failed(ranks)
        if not ended:
            return 0
        if 0 < next(iter(ended.values())) < SIGNALLED:
            _wait(ranks, GRACE_S)  # another rank that a signal ended may have been seen first
        for rank, code in enumerate(r.poll() or 0 for r in ranks):
            if code and not 0 < code < SIGNALLED:
                name = signal.Signals(-code if code < 0 else code - SIGNALLED).name
                why = ": killed, or out of memory" if name == "SIGKILL" else ""
                text = f"\nltx2rt: error: rank {rank} was ended by {name}{why}"
                print(text, file=sys.stderr)
                return FAILED
        return next(iter(ended.values()))
    except BaseException:
        print(file=sys.stderr)  # below a progress bar that is still open
        raise
    finally:
        _end(ranks)
        for output in outputs if ranks else ():
            remove_partial(output, ranks[0].pid)


def _spawn(argv: Sequence[str], count: int, ranks: list[subprocess.Popen], fed: bool) -> None:
    """Append the started ranks. Rank 0 gets the socket of its store, only on this host."""
    # one process of torchrun may start ranks too; torchrun's store is not theirs
    own = {name: x for name, x in os.environ.items() if not name.startswith("TORCHELASTIC")}
    shared = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # a store that goes down with its rank is no news
    shared["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // count))
    shared |= dict([SLEEPING]) | own  # the ranks share the cores
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), LAUNCHER: str(os.getpid())}
    with socket.create_server(("127.0.0.1", 0)) as store:
        address, port = store.getsockname()
        shared |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), TOKEN: secrets.token_hex(16)}
        for rank in range(count):
            kept = (store.fileno(),) if rank == 0 else ()
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), STORE: "".join(map(str, kept))}
            # a separate session: Ctrl-C reaches only the launcher, which then ends the ranks
            process = subprocess.Popen(
                [sys.executable, "-m", "ltx2rt", *argv],
                env=shared | own,
                stdin=None if fed and rank == 0 else subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=kept,
            )
            ranks.append(process)


def _failed(ranks: Sequence[subprocess.Popen]) -> dict[int, int]:
    """Exit statuses of ranks that failed, as soon as one has; none once all have ended well."""
    while not (failed := {i: code for i, r in enumerate(ranks) if (code := r.poll())}):
        if all(r.poll() == 0 for r in ranks):
            return {}
        time.sleep(POLL_S / 4)
    return failed


def _wait(ranks: Sequence[subprocess.Popen], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(r.poll() is None for r in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S / 4)


def _end(ranks: Sequence[subprocess.Popen]) -> None:
    for ask in (subprocess.Popen.terminate, subprocess.Popen.kill):
        for rank in ranks:
            if rank.poll() is None:
                ask(rank)
        _wait(ranks, GRACE_S)
