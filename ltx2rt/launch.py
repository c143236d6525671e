"""One process per device or per host: how ranks are started, how they agree, and how they end together.

`start` is the launcher of `--num-gpus`; torchrun and accelerate do the same by the same variables (RANK, LOCAL_RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Processes of the JAX backend are launched by what runs a command on every host.
`Crew` is one rank's view of the others, whoever launched it. A thread of every rank watches the others' processes
(through pidfds, so Linux only, and on this host only), the launcher's, signals and the store that all ranks share: the
main thread may be inside a collective that never returns. The first rank that knows why a run ends claims the key
`failed` and says so; the others leave in silence.

How ranks reach the store is the backend's business, and so are collectives.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Protocol

from ltx2rt.errors import InputError
from ltx2rt.partial import partial_path

LAUNCHER = "LTX2RT_LAUNCHER"  # pid of the `start` that launched this rank: it reports what no rank can
FAILED, SIGNALLED = 1, 128  # exit statuses; a signal's is 128 + its number
GRACE_S = 5.0  # for ranks to end by themselves, then again after SIGTERM
EXPLAIN_S = 1.0  # how long an exception waits for the death of the rank that may have caused it
POLL_S = 0.2
HEAD_BYTES = 1 << 20  # of a file without a header, what its digest covers besides the size
HOST_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
SLURM_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_PROCID")  # of srun


def ranks(environment: Mapping[str, str]) -> tuple[int, int]:
    """(this rank, how many there are) of torchrun, accelerate or `start`.

    Raises InputError unless the environment says where they meet.
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if size == 1:
        return 0, 1
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]:
        raise InputError(f"WORLD_SIZE is {size} without {', '.join(missing)}; start ranks by torchrun or --num-gpus")
    return int(environment["RANK"]), size


def hosts(environment: Mapping[str, str]) -> tuple[int, int]:
    """(this process, how many there are) of the JAX backend: by HOST_VARIABLES, in a SLURM step, or on a TPU slice.

    In the latter two JAX itself finds where they meet. Raises InputError if HOST_VARIABLES are not complete.
    """
    workers = environment.get("TPU_WORKER_HOSTNAMES", "").split(",")
    if given := [name for name in HOST_VARIABLES if name in environment]:
        if missing := [name for name in HOST_VARIABLES if name not in environment]:
            raise InputError(f"{', '.join(given)} without {', '.join(missing)}; set all three, or none")
        rank, size = environment["JAX_PROCESS_ID"], environment["JAX_NUM_PROCESSES"]
    elif all(name in environment for name in SLURM_VARIABLES):
        rank, size = environment["SLURM_PROCID"], environment["SLURM_NTASKS"]
    elif len(workers) > 1:
        rank, size = environment.get("TPU_WORKER_ID", ""), str(len(workers))
    else:
        return 0, 1
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise InputError(f"process {rank!r} of {size!r}: expected numbers, the first below the second")
    return int(rank), int(size)


POSITIONS = {"cuda": ranks, "tpu": hosts}  # by backend, what the environment says of a launch


# ---- the launcher ---------------------------------------------------------------------------------------------------


def start(argv: Sequence[str], count: int, outputs: Sequence[Path]) -> int:
    """Run `ltx2rt argv` as `count` ranks on this host and return the exit status; no process and no part of `outputs`
    is left behind, however it ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # one process of torchrun may start ranks too; torchrun's store is not theirs
    shared = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), LAUNCHER: str(os.getpid())}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store that goes down with its rank is no news
    shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    ranks: list[subprocess.Popen] = []
    try:
        for rank in range(count):
            env = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # a session of its own: Ctrl-C reaches the launcher alone, which then ends the ranks
            command = [sys.executable, "-m", "ltx2rt", *argv]
            ranks.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True))
        while not (ended := {i: code for i, r in enumerate(ranks) if (code := r.poll())}):
            if all(r.poll() == 0 for r in ranks):
                return 0
            time.sleep(POLL_S / 4)
        signals = {i: -code if code < 0 else code - SIGNALLED for i, code in ended.items() if not 0 < code < SIGNALLED}
        for rank, number in list(signals.items())[:1]:
            name = signal.Signals(number).name
            print(f"\nltx2rt: error: rank {rank} was ended by {name}: killed, or out of memory", file=sys.stderr)
            return FAILED
        _wait(ranks, GRACE_S)
        return next(iter(ended.values()))
    except BaseException:
        print(file=sys.stderr)  # below a progress bar that nobody closes
        raise
    finally:
        _end(ranks)
        for output in outputs if ranks else ():
            partial_path(output, ranks[0].pid).unlink(missing_ok=True)


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


# ---- the ranks ------------------------------------------------------------------------------------------------------


class Store(Protocol):
    """What all ranks see: text by key. torch.distributed.Store is one."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes:
        """Waits for the key."""
        ...

    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """With expected "": set the key unless it exists. Returns its value."""
        ...


class Crew:
    """All ranks of a launch, as one of them sees them. Made before anything that can fail on one rank alone.

    connect: a new connection to the store; one serves the watching thread, which must not queue behind the other.
    outputs: the files that rank 0 writes.
    """

    def __init__(self, rank: int, size: int, connect: Callable[[], Store], outputs: Sequence[Path]):
        self.rank, self.size, self._outputs = rank, size, outputs
        self._launched = os.environ.get(LAUNCHER) == str(os.getppid())
        self._store, self._watched = connect(), connect()
        self._processes: dict[int, int] = {}  # pidfd -> rank; -1 is the launcher
        self._main_pid: int | None = None
        self._over, self._ending = threading.Event(), threading.Lock()
        self._wake, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)  # written even while the main thread is in C++
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        if self._launched or "TORCHELASTIC_RUN_ID" in os.environ:
            self._processes[os.pidfd_open(os.getppid())] = -1
        self._watcher = threading.Thread(target=self._watch, name="crew", daemon=True)
        self._watcher.start()
        here = socket.gethostname()
        for other, place in enumerate(self._gather("process", [here, os.getpid()])):
            if other == 0 and place[0] == here:
                self._main_pid = place[1]
            if other != rank and place[0] == here:
                self._processes[self._open(other, place[1])] = other

    def _open(self, other: int, pid: int) -> int:
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            self.end(f"rank {other} died at the start", FAILED)

    def _gather(self, topic: str, mine: object) -> list:
        self._store.set(f"{topic}/{self.rank}", json.dumps(mine))
        return [json.loads(self._store.get(f"{topic}/{other}")) for other in range(self.size)]

    def agree(self, topic: str, facts: Mapping[str, str]) -> None:
        """Raise InputError on every rank if one rank's facts are not rank 0's. topic: of this comparison, used once."""
        main, *others = self._gather(topic, dict(facts))
        for other, theirs in enumerate(others, 1):
            if unlike := [name for name in sorted(main.keys() | theirs.keys()) if main.get(name) != theirs.get(name)]:
                name, more = unlike[0], f" (and {', '.join(unlike[1:])})" if unlike[1:] else ""
                raise InputError(
                    f"ranks 0 and {other} have different {topic}: {name}{more} is {main.get(name)} on rank 0, "
                    f"{theirs.get(name)} on rank {other}; start every rank with the same arguments and files"
                )

    def from_main(self, topic: str, draw: Callable[[], int]) -> int:
        """Rank 0's draw, on every rank."""
        if self.rank == 0:
            self._store.set(topic, str(draw()))
        return int(self._store.get(topic))

    def _finished(self) -> bool:
        try:
            return self._watched.check(["finished"])
        except RuntimeError:  # with rank 0, which goes last
            return False

    def leave(self) -> None:
        """Wait until rank 0 has written its files, and rank 0 until the others know: it may hold the store."""
        if self.rank == 0:
            self._store.set("finished", "")
        while not self._store.check(["finished"]):
            time.sleep(POLL_S)
        self._over.set()
        self._watcher.join()
        self._store.set(f"left/{self.rank}", "")
        for other in range(self.size) if self.rank == 0 else ():
            self._store.get(f"left/{other}")

    def fail(self, message: str, status: int, bad_input: bool = False) -> NoReturn:
        """End every rank because of an exception on this one, unless another rank's end is what caused it."""
        if not bad_input:
            time.sleep(EXPLAIN_S)  # the watching thread ends this process first if it finds the cause
        self.end(f"rank {self.rank}: {message}", status)

    def end(self, message: str, status: int, by_signal: bool = False) -> NoReturn:
        """Leave at once, from any thread, with a line on stderr if this rank is the first to end.

        by_signal: a rank was ended from outside; its launcher, if it is ours, says so.
        """
        with self._ending:
            first, status = self._claim(status)
            if first and not (by_signal and self._launched):
                below = "\n" * by_signal  # of a progress bar that nobody closes
                print(f"{below}ltx2rt: error: {message}", file=sys.stderr, flush=True)
            for output in self._outputs if self._main_pid else ():
                partial_path(output, self._main_pid or 0).unlink(missing_ok=True)
            with suppress(RuntimeError):  # the store may be what went down
                self._watched.set(f"ended/{self.rank}", "")
                if self.rank == 0:
                    self._outlive()
            os._exit(status)

    def _claim(self, status: int) -> tuple[bool, int]:
        """Whether no rank ended before this one, and the exit status of the first that did."""
        mine = f"{self.rank} {status}"
        try:
            found = self._watched.compare_set("failed", "", mine).decode()
        except RuntimeError:  # the store went down with rank 0: the lowest of the others speaks
            return all(rank > self.rank for fd, rank in self._processes.items() if rank >= 0 and not _ended(fd)), status
        theirs = int(found.split()[1])
        if found == mine:
            return True, status
        return False, theirs if theirs < SIGNALLED else FAILED  # this one was not ended by that signal

    def _outlive(self) -> None:
        """Give the others time to read `failed` in the store that this process may hold."""
        deadline = time.monotonic() + GRACE_S
        here = {rank: fd for fd, rank in self._processes.items() if rank > 0}
        elsewhere = [f"ended/{rank}" for rank in range(1, self.size) if rank not in here]
        while time.monotonic() < deadline:
            if all(map(_ended, here.values())) and self._watched.check(elsewhere):
                return
            time.sleep(POLL_S / 4)

    def _watch(self) -> None:
        while not self._over.is_set():
            ready = _ended(self._wake, *list(self._processes), wait_s=POLL_S)
            if self._wake in ready:
                number = os.read(self._wake, 1)[0]
                self.end(
                    f"rank {self.rank} was ended by {signal.Signals(number).name}", SIGNALLED + number, by_signal=True
                )
            if self._over.is_set() or (ready and self._finished()):
                return
            for fd in ready:
                rank = self._processes[fd]
                name = "the launcher" if rank < 0 else f"rank {rank}"
                self.end(f"{name} died: killed, or out of memory", FAILED, by_signal=True)
            try:
                if self._watched.check(["failed"]):
                    self.end("", FAILED)
            except RuntimeError as error:
                time.sleep(POLL_S)  # a death shows as one, if it is why
                if not _ended(*list(self._processes)):
                    self.end(f"the rendezvous store is gone: {error}", FAILED)


def _ended(*fds: int, wait_s: float = 0.0) -> list[int]:
    """Those that are ready: a pidfd once its process has ended, a pipe once it holds something."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(wait_s * 1000)]


# ---- what ranks compare ---------------------------------------------------------------------------------------------


def digests(paths: Sequence[Path]) -> dict[str, str]:
    """Size and digest of the header of every file, and of every file in every folder; no tensor data is read."""
    files: list[Path] = []
    for path in paths:
        files += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return {str(file): _digest(file) for file in files}


def _digest(path: Path) -> str:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = min(size, HEAD_BYTES)
            if path.suffix == ".safetensors":
                length = min(size, 8 + int.from_bytes(file.read(8), "little"))
                file.seek(0)
            digest = hashlib.sha256()
            while length > 0 and (data := file.read(min(length, HEAD_BYTES))):
                digest.update(data)
                length -= len(data)
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return f"{size} bytes, header {digest.hexdigest()[:12]}"
