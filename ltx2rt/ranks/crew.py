"""One rank's view of the others, however it was launched.

A thread of every rank watches the others' processes (through pidfds, so Linux only, and on this
host only), the launcher's, signals and the store that all ranks share: the main thread may be
inside a collective that never returns. The first rank that knows why a run ends claims the key
`failed` and says so; the others leave in silence.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import NoReturn, Protocol

from ltx2rt.atomic_file import remove_partial
from ltx2rt.errors import InputError
from ltx2rt.ranks.environment import FAILED, GRACE_S, LAUNCHER, POLL_S, SIGNALLED
from ltx2rt.system import ENDING, on_fatal, require_linux

EXPLAIN_S = 1.0  # how long an exception waits for the death of the rank that may have caused it
HANDED_S = 0.01  # between two looks for what rank 0 hands out


class Store(Protocol):
    """Storage that all ranks see: text by key. torch.distributed.Store is one."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes:
        """Waits for the key."""
        ...

    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set the key if it has the expected value ("": if it is missing). Returns its value."""
        ...


class Crew:
    """All ranks of a launch, as one of them sees them. Made before anything that can fail on only
    one rank. connect: a new connection to the store; one serves the watching thread, which must not
    queue behind the other. outputs: the files that rank 0 writes."""

    def __init__(self, rank: int, size: int, connect: Callable[[], Store], outputs: Sequence[Path]):
        """Raises InputError on a system other than Linux."""
        require_linux("a run of several processes")
        self.rank, self.size, self._outputs = rank, size, outputs
        self._launched = os.environ.get(LAUNCHER) == str(os.getppid())
        self._store, self._watched = connect(), connect()
        self._processes: dict[int, int] = {}  # pidfd -> rank; -1 is the launcher
        self._main_pid: int | None = None
        # a list takes the first request to end, and the run decides when
        self.asked: list[int] | None = None
        self._over, self._ending, self._speaking = Event(), Lock(), Lock()
        self._wake, woken = os.pipe()
        os.set_blocking(woken, False)
        # written even while the main thread is in C++
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        for number in (signal.SIGINT, *ENDING):
            if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # `nohup`
                signal.signal(number, lambda *_: None)
        on_fatal("SIGABRT", self._aborted)
        if self._launched or "TORCHELASTIC_RUN_ID" in os.environ:
            self._processes[os.pidfd_open(os.getppid())] = -1
        self._watcher = Thread(target=self._watch, name="crew", daemon=True)
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
        """Raise InputError on all ranks if one's facts are not rank 0's. topic: used once."""
        main, *others = self._gather(topic, dict(facts))
        for other, theirs in enumerate(others, 1):
            named = sorted(main.keys() | theirs.keys())
            if unlike := [name for name in named if main.get(name) != theirs.get(name)]:
                name, more = unlike[0], f" (and {', '.join(unlike[1:])})" if unlike[1:] else ""
                raise InputError(
                    f"ranks 0 and {other} have different {topic}: {name}{more} is "
                    f"{main.get(name)} on rank 0, {theirs.get(name)} on rank {other}; start every "
                    "rank with the same arguments and files"
                )

    def from_main(self, topic: str, draw: Callable[[], int]) -> int:
        """Rank 0's draw, on every rank."""
        if self.rank == 0:
            self._store.set(topic, str(draw()))
        return int(self._store.get(topic))

    def handed_out(self, topic: str, number: int, text: str) -> str:
        """Rank 0's text, on every rank, however long it takes to come. number: of this text within
        the topic; every rank has taken one before rank 0 hands out the next."""
        if self.rank == 0:
            self._store.set(topic, f"{number} {text}")
            return text
        while True:
            if self._store.check([topic]):
                found, _, text = self._store.get(topic).decode().partition(" ")
                if int(found) == number:
                    return text
            time.sleep(HANDED_S)

    def _finished(self) -> bool:
        try:
            return self._watched.check(["finished"])
        except RuntimeError:  # with rank 0, which goes last
            return False

    def leave(self) -> None:
        """Wait until rank 0 has written its files; rank 0 waits for all, since it may hold the
        store."""
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
        """End every rank because of an exception here, unless another rank's end caused it."""
        if not bad_input:
            # the watching thread ends this process first if it finds the cause
            time.sleep(EXPLAIN_S)
        self.end(
            f"{message} (rank {self.rank})" if bad_input else f"rank {self.rank}: {message}", status
        )

    def end(self, message: str, status: int, by_signal: bool = False) -> NoReturn:
        """Leave at once, from any thread, with a line on stderr if this rank is the first to end.
        by_signal: a rank was ended from outside; its launcher, if it is ours, says so."""
        with self._ending:
            first, status = self._claim(status)
            if first and not (by_signal and self._launched):
                self._say(message, "\n" * by_signal)  # below a progress bar that is still open
            self._remove_partials()
            with suppress(RuntimeError):  # the store may be what went down
                self._watched.set(f"ended/{self.rank}", "")
                if self.rank == 0:
                    self._outlive()
            os._exit(status)

    def _say(self, message: str, below: str = "") -> None:
        # once: two threads may find what ends this process
        if self._speaking.acquire(blocking=False):
            print(f"{below}ltx2rt: error: {message}", file=sys.stderr, flush=True)

    def _remove_partials(self) -> None:
        for output in self._outputs if self._main_pid else ():
            remove_partial(output, self._main_pid or 0)

    def _lowest(self) -> bool:
        """Whether no rank below this one lives here."""
        return all(
            rank > self.rank for fd, rank in self._processes.items() if rank >= 0 and not _ended(fd)
        )

    def _claim(self, status: int) -> tuple[bool, int]:
        """Return whether this rank failed first, and the exit status of the rank that did."""
        mine = f"{self.rank} {status}"
        try:
            found = self._watched.compare_set("failed", "", mine).decode()
        except RuntimeError:  # the store went down with rank 0: the lowest of the others speaks
            return self._lowest(), status
        if found == mine:
            return True, status
        # no failure is 0, and this rank was not ended by that signal
        theirs = found.rpartition(" ")[2]
        return False, int(theirs) if theirs.isdecimal() and 0 < int(theirs) < SIGNALLED else FAILED

    def _outlive(self) -> None:
        """Wait until the other ranks have read `failed`, since the store may be in this process."""
        deadline = time.monotonic() + GRACE_S
        here = {rank: fd for fd, rank in self._processes.items() if rank > 0}
        elsewhere = [f"ended/{rank}" for rank in range(1, self.size) if rank not in here]
        while time.monotonic() < deadline:
            if all(map(_ended, here.values())) and self._watched.check(elsewhere):
                return
            time.sleep(POLL_S / 4)

    def _aborted(self) -> None:
        """End this rank after C++ called abort(), as JAX does when it loses the process that holds
        the store, or one on another host. Its locks are never released, so the store is not
        asked."""
        here = {rank: bool(_ended(fd)) for fd, rank in self._processes.items() if rank >= 0}
        if dead := [rank for rank, ended in here.items() if ended]:
            message = f"rank {dead[0]} died: killed, or out of memory"
        elif len(here) < self.size - 1:
            message = "another rank died or cannot be reached; see above"
        else:
            return  # SIGABRT ends this rank, which the others see
        if self._lowest():
            self._say(message)
        self._remove_partials()
        os._exit(FAILED)

    def _watch(self) -> None:
        while not self._over.is_set():
            ready = _ended(self._wake, *list(self._processes), wait_s=POLL_S)
            if self._wake in ready:
                number = os.read(self._wake, 1)[0]
                if self.asked is not None and not self.asked and number != signal.SIGHUP:
                    self.asked.append(number)
                    continue
                self.end(
                    f"rank {self.rank} was ended by {signal.Signals(number).name}",
                    SIGNALLED + number,
                    by_signal=True,
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
                time.sleep(POLL_S)  # if a rank's death is the cause, it shows by then
                if not _ended(*list(self._processes)):
                    self.end(f"the rendezvous store is gone: {error}", FAILED)


def _ended(*fds: int, wait_s: float = 0.0) -> list[int]:
    """Return the ready descriptors: a pidfd is once its process has ended, a pipe once it holds
    something."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(wait_s * 1000)]
