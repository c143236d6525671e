"""One process for each replica: started, fed from the queue, watched, and started again.

A job fails after several replicas died or hung under it; a server that stops does not count, and
while the folder cannot be written no job is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sqlite3
import time
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from ltx2rt.errors import InputError
from ltx2rt.serve.board import Board, log
from ltx2rt.serve.fields import as_given
from ltx2rt.serve.folder import CLIP, STORAGE, Folder
from ltx2rt.serve.jobs import CANCELLED, COMPLETED, FAILED, QUEUED, Job, failure
from ltx2rt.serve.metrics import Metrics
from ltx2rt.serve.queue import Queue
from ltx2rt.stages.segments import SEGMENT

T = TypeVar("T")
BAD_INPUT = 2  # the exit status of a worker that cannot ever start
FIRST_STEP = 10  # times the step time-out: what may compile or load
MAX_BACK_OFF_S, RETRY_S = 60, 2
MAX_LINE_BYTES = 2**24
LAST_WORDS_S = 2
# back-offs after a run that could not write its files though the folder can be written
STORAGE_WAITS = 30


def in_thread(call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """Call in a daemon thread: neither the loop nor the interpreter waits for it at the end."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def tell(end: Callable[[Any], None], found: Any) -> None:
        if not answer.done():
            end(found)

    def run() -> None:
        try:
            ended = answer.set_result, call(*args)
        except Exception as error:
            ended = answer.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, *ended)

    Thread(target=run, daemon=True, name=call.__name__).start()
    return answer


class QueueThread:
    """The queue in a thread of its own, so that only the caller waits for the disk."""

    def __init__(self, queue: Queue):
        self.queue, self._thread = queue, ThreadPoolExecutor(1, thread_name_prefix="queue")

    def __call__(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> asyncio.Future[T]:
        """The call is made even if its caller goes away."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._thread, partial(call, *args, **kwargs))

    async def insist(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """As `__call__`, again and again while the disk is full."""
        while True:
            try:
                return await self(call, *args, **kwargs)
            except sqlite3.OperationalError as error:
                log("queue_error", error=str(error))
                await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        self._thread.shutdown()
        self.queue.close()


@dataclass
class Replica:
    """state: starting, idle, busy, down. since: when it began, by the monotonic clock."""

    number: int
    state: str = "down"
    since: float = field(default_factory=time.monotonic)
    restarts: int = 0
    process: asyncio.subprocess.Process | None = None
    claim: asyncio.Future[Job | None] | None = None  # claim of the job it runs, or will run
    free: asyncio.Event = field(default_factory=asyncio.Event)
    heard: float = 0.0
    step: int = 0
    loaded: str | None = None  # the LoRAs of its latest job
    in_a_row: int = 0
    pause_s: float = 0.0  # before its next job
    lost: dict[str, str] | None = None  # why its job is taken from it

    def become(self, state: str) -> None:
        self.state, self.since = state, time.monotonic()

    @property
    def job(self) -> Job | None:
        if self.claim and self.claim.done() and not self.claim.cancelled():
            return self.claim.result()
        return None


@dataclass
class Supervisor:
    """command: starts a worker; environments: of each replica, besides. step_timeout_s: for a step
    that is not the first of its stage. device: what a replica has told of it, and its mesh.
    problem: why no job is started, as of `Folder.problem`."""

    command: Sequence[str]
    store: QueueThread
    folder: Folder
    board: Board
    metrics: Metrics
    environments: Sequence[Mapping[str, str]] = ({},)
    lora_folder: Path | None = None
    step_timeout_s: float = 120.0
    back_off_s: float = 1.0
    device: tuple[dict[str, Any], dict[str, int]] | None = None
    problem: tuple[str, str] | None = None
    draining: bool = False

    def __post_init__(self) -> None:
        self.replicas = [Replica(n) for n in range(len(self.environments))]
        self._ended_once, self._drained = False, math.inf
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> bool:
        return not self.draining and any(r.state in ("idle", "busy") for r in self.replicas)

    async def run(self, at_once: bool = True) -> None:
        """Keep the replicas alive until `stop`; not at once: from the first job on. Raises InputError
        if a worker refuses its flags."""
        await (asyncio.sleep(0) if at_once else self._work.wait())
        self._tasks = [asyncio.create_task(self._live(replica)) for replica in self.replicas]
        try:
            await asyncio.gather(*self._tasks)
        except asyncio.CancelledError:
            if not self.draining:
                raise
        finally:
            await self._end()

    async def stop(self, drain_s: float) -> None:
        """Let running jobs end, at most so long; what still runs then is queued again."""
        self.draining = True
        self.woken()
        self._drained = min(self._drained, time.monotonic() + drain_s)
        while time.monotonic() < self._drained and any(r.state == "busy" for r in self.replicas):
            await asyncio.sleep(0.05)
        await self._end()

    def hurry(self) -> None:
        """`stop` waits no longer."""
        self._drained = 0.0

    async def _end(self) -> None:
        """Twice is as once: a task that buries its replica is not cancelled again."""
        self.draining = True
        for task in [] if self._ended_once else self._tasks:
            task.cancel()
        self._ended_once = True
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def woken(self) -> None:
        """There is a new job."""
        self._work.set()
        self._work = asyncio.Event()

    def cancel(self, id: str) -> None:
        """Tell the replica that runs the job."""
        for replica in self.replicas:
            if replica.job is not None and replica.job.id == id:
                self._send(replica, do="cancel", id=id)

    def watch(self) -> None:
        """Have pictures made of the running jobs that somebody wants them of, to their end."""
        for replica in self.replicas:
            if replica.job is not None and self.board.previewed(replica.job.id, replica.job.user):
                self._send(replica, do="watch", id=replica.job.id)

    # --- one replica ------------------------------------------------------------------------------

    async def _live(self, replica: Replica) -> None:
        wait_s = self.back_off_s
        while not self.draining:
            environment = {**os.environ, **self.environments[replica.number]}
            replica.become("starting")
            replica.heard, replica.lost, replica.loaded = time.monotonic(), None, None
            replica.process = process = await asyncio.create_subprocess_exec(
                *self.command, stdin=-1, stdout=-1, env=environment, start_new_session=True,
                limit=MAX_LINE_BYTES,
            )  # fmt: skip
            was_ready = asyncio.Event()
            listens = self._listen(replica, process, was_ready)
            alive = listens, self._feed(replica, was_ready), self._guard(replica)
            talk = list(map(asyncio.create_task, alive))
            try:
                await asyncio.wait(talk, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await self._bury(replica, process, talk)
            for task in talk:
                if not task.cancelled() and (error := task.exception()) is not None:
                    self._log(replica, "error", error=f"{type(error).__name__}: {error}")
            if process.returncode == BAD_INPUT and not was_ready.is_set() and replica.restarts == 0:
                raise InputError("the worker refused what it was started with, as it says above")
            wait_s = self.back_off_s if was_ready.is_set() else min(MAX_BACK_OFF_S, 2 * wait_s)
            replica.restarts += 1
            self.metrics.restarts.inc()
            self._log(replica, "down", status=process.returncode, again_in_s=wait_s)
            await asyncio.sleep(wait_s)

    def _log(self, replica: Replica, event: str, **facts: Any) -> None:
        self.board.log(f"replica_{event}", replica=replica.number, **facts)

    async def _bury(
        self, replica: Replica, process: asyncio.subprocess.Process, talk: list[asyncio.Task]
    ) -> None:
        """End a replica's process and give its job back."""
        replica.become("down")
        for task in talk:
            task.cancel()
        # it has closed its pipe: let it say how it ends
        if talk[0].done() and not talk[0].cancelled():
            # `asyncio.wait_for` loses a cancellation that comes as the process ends.
            await asyncio.wait([asyncio.create_task(process.wait())], timeout=LAST_WORDS_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.gather(*talk, return_exceptions=True)
        status = await process.wait()
        if replica.claim is None or (job := await replica.claim) is None:
            return
        replica.claim = None
        died = failure("worker_died", f"the process that ran it ended ({ending(status)})")
        blame = None if self.draining else replica.lost or died
        if (result := self.folder.published(job)) is not None:  # it died after the file was whole
            finish = self.store.queue.finish
            await self.store.insist(finish, job.id, job.epoch, COMPLETED, result=result)
        with contextlib.suppress(OSError):  # `_cannot_write` says why
            self.folder.remove_unfinished(job)
        await self._give_back(job, blame)

    async def _give_back(
        self, job: Job, blame: Mapping[str, str] | None, blamed: bool = True
    ) -> None:
        """Queue a job again that ended without a result, or let it fail. blamed: as in `Queue`."""
        give_back = self.store.queue.give_back
        after = await self.store.insist(give_back, job.id, job.epoch, blame, blamed)
        if after is None:
            return
        if after.status == QUEUED:
            self.metrics.retries.labels("stopped" if blame is None else blame["code"]).inc()
            self.board.tell("queued", job.id, job.user, why=blame and blame["code"])
            self.woken()
        else:
            self._over(job, after.status, after.error)

    async def _feed(self, replica: Replica, was_ready: asyncio.Event) -> None:
        await was_ready.wait()
        queue = self.store.queue
        while not self.draining:
            work = self._work
            if await self._cannot_write():
                await asyncio.sleep(RETRY_S)
                replica.pause_s = 0.0  # the reason is known
                continue
            await asyncio.sleep(replica.pause_s)
            replica.pause_s = 0.0
            replica.claim = asyncio.ensure_future(
                self.store.insist(queue.claim, replica.loaded, replica.in_a_row)
            )
            job = await asyncio.shield(replica.claim)
            if job is None:
                replica.claim = None
                await work.wait()
                continue
            replica.in_a_row = replica.in_a_row + 1 if job.loras == replica.loaded else 0
            replica.loaded, replica.step, replica.heard = job.loras, 0, time.monotonic()
            replica.become("busy")
            self.metrics.waited.observe(max(0.0, time.time() - job.created))
            self.board.tell(
                "started", job.id, job.user, replica=replica.number, attempt=job.attempts
            )
            replica.free.clear()
            if self.board.previewed(job.id, job.user):
                self._send(replica, do="watch", id=job.id)
            self._send(replica, do="run", **self._message(job))
            now = await self.store(queue.get, job.id)
            if now and now.cancel is not None:  # since it was claimed
                self.cancel(job.id)
            await replica.free.wait()
        await asyncio.Event().wait()  # until the others end

    async def _cannot_write(self) -> bool:
        """Whether a clip could not be kept now; the log says when that changes."""
        before, self.problem = self.problem, await in_thread(self.folder.problem)
        if self.problem != before:
            said = self.problem[1] if self.problem else "the folder can be written again"
            self.board.log("storage", message=said)
        return self.problem is not None

    def _message(self, job: Job) -> dict[str, Any]:
        """The message that starts a job in a worker, with names as paths."""
        kept, folder, loras = job.job, self.folder.inputs.resolve(), self.lora_folder or Path()
        named = {"id": job.id, "epoch": job.epoch}
        return kept | named | {
            "stem": str(self.folder.outputs.resolve() / job.stem),
            "loras": [[str(loras / name), *rest] for name, *rest in kept["loras"]],
            "images": [[str(folder / name), *rest] for name, *rest in kept["images"]],
            "files": as_given(kept.get("files", {}), folder),
        }  # fmt: skip

    def _send(self, replica: Replica, **message: Any) -> None:
        if replica.process is not None and replica.process.stdin is not None:
            replica.process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _listen(
        self, replica: Replica, process: asyncio.subprocess.Process, was_ready: asyncio.Event
    ) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            message, replica.heard = json.loads(line), time.monotonic()
            event, job = message.pop("event"), replica.job
            if event == "ready":
                self.device = message["device"], message["mesh"]
                self._log(replica, "ready", after_s=round(time.monotonic() - replica.since, 1))
                replica.become("idle")
                was_ready.set()
            elif job is None or (message.pop("id"), message.pop("epoch")) != (job.id, job.epoch):
                self._log(replica, "error", error=f"{event} of no job that it runs")
            elif event == "enhanced":
                keep = self.store.queue.written_out
                await self.store.insist(keep, job.id, job.epoch, message["prompt"])
            elif event == "preview":
                self.board.show(job.id, job.user, message["number"], b64decode(message["jpeg"]))
            elif event == "progress":
                kinds = ("step", SEGMENT) if message["stage"] == SEGMENT else ("stage", "step")
                if (kind := kinds[message["step"] > 0]) == SEGMENT:
                    await self.store.insist(self.store.queue.went_on, job.id, job.epoch)
                replica.step = message["step"]
                known = self.board.live.get(job.id) if kind == "step" else None
                if known and known["stage"] == message["stage"]:
                    name = message["stage"].split(" ")[0]  # the same for stages of all videos
                    step = self.metrics.step.labels(name)
                    step.observe(replica.heard - known["at"])
                facts = {"stage": message["stage"]} if kind == "stage" else {}
                self.board.tell(kind, job.id, job.user, {**message, "at": replica.heard}, **facts)
            else:
                await self._ended(replica, job, event, message)
                if message.get("ends"):
                    return

    async def _ended(self, replica: Replica, job: Job, event: str, message: dict[str, Any]) -> None:
        ends: dict[str, tuple[str, Any]] = {
            "done": (COMPLETED, None),
            "failed": (FAILED, {name: message.get(name) for name in ("code", "message")}),
            "cancelled": (CANCELLED, failure("cancelled", "cancelled while it ran")),
        }
        status, error = ends[event]
        result = message.get("result")
        if error is not None and error["code"] == STORAGE:
            self.board.log("storage", job=job.id, message=error["message"])
            await self._give_back(job, error, blamed=False)
            replica.pause_s = STORAGE_WAITS * self.back_off_s
        elif await self.store.insist(
            self.store.queue.finish, job.id, job.epoch, status, error=error, result=result
        ):
            self._over(job, status, error, result)
        elif event == "done":
            with contextlib.suppress(OSError):  # else the next start removes it
                (self.folder.outputs / (job.stem + CLIP)).unlink()
        replica.claim = None
        if not message.get("ends"):  # else it takes no other job
            replica.become("idle")
            replica.free.set()

    def _over(
        self, job: Job, status: str, error: Mapping[str, str] | None, result: Mapping | None = None
    ) -> None:
        self.metrics.over(job, status, result)
        facts: dict[str, Any] = {"code": error["code"]} if error else {}
        self.board.tell("completed" if status == COMPLETED else "failed", job.id, job.user, **facts)

    async def _guard(self, replica: Replica) -> None:
        """Returns, which ends the process, when a job has not moved for too long."""
        while True:
            await asyncio.sleep(min(1.0, self.step_timeout_s / 4))
            limit_s = self.step_timeout_s * (1 if replica.step > 1 else FIRST_STEP)
            if replica.state == "busy" and time.monotonic() - replica.heard > limit_s:
                replica.lost = failure("step_timeout", f"nothing happened for {limit_s:g} s")
                return


def ending(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
