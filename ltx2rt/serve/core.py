"""The server's state, and the answers that its routes have in common."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

from starlette.requests import Request
from starlette.responses import Response

from ltx2rt.serve.admission import Admission
from ltx2rt.serve.answers import Json
from ltx2rt.serve.apart import Apart
from ltx2rt.serve.board import Board
from ltx2rt.serve.folder import DISK_FULL, Folder, clip_names
from ltx2rt.serve.gate import RETRY_S
from ltx2rt.serve.jobs import COMPLETED, JOB_ID, QUEUED, RUNNING, Job
from ltx2rt.serve.metrics import Metrics
from ltx2rt.serve.options import Serving
from ltx2rt.serve.pace import Pace
from ltx2rt.serve.refusal import Refusal, misfit
from ltx2rt.serve.supervisor import QueueThread, Supervisor, in_thread
from ltx2rt.serve.video import as_video

PACE_S = 2
DISK_ANSWERS_S, DISK_HANGS_S = 0.05, 5.0  # waited for each time; after that the disk is at fault
POLL_MS = {QUEUED: 1000, RUNNING: 250}


@dataclass
class Core:
    how: Serving
    admission: Admission
    store: QueueThread
    folder: Folder
    board: Board
    supervisor: Supervisor
    metrics: Metrics

    def __post_init__(self) -> None:
        self.queue, self.closing = self.store.queue, False
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="plan")
        self._apart = Apart(self.admission)
        self._known_pace, self._pace_until = Pace(), 0.0
        self._disk: asyncio.Future[tuple[str, str] | None] | None = None
        self._problem: tuple[str, str] | None = None
        self._disk_since = 0.0
        self._encoding = asyncio.Lock()  # segments and sprite sheets, one at a time

    async def _job(self, request: Request, named: str | None = None) -> Job:
        """The job of the path, or of this id. Raises Refusal unless it is the user's own."""
        id = request.path_params["id"] if named is None else named
        job = await self.store(self.queue.get, id) if JOB_ID.fullmatch(id) else None
        if job is None or job.user != request.state.user:
            raise Refusal(404, "not_found", f"no video is named {id[:80]!r}", "video_id")
        return job

    async def _video(self, job: Job) -> dict[str, Any]:
        position = eta_s = None
        if job.status == QUEUED:
            position, wait_s = await self._wait(job.user, job.priority, job.seq)
            took_s, _ = (await self._pace()).of(job.work)
            eta_s = None if took_s is None or wait_s is None else round(wait_s + took_s, 1)
        live, preview = self.board.live.get(job.id), self.board.previews.get(job.id)
        shown, keep_s = preview and preview[0], self.how.keep_s
        return as_video(job, self.admission.model, keep_s, live, shown, position, eta_s)

    async def _pace(self) -> Pace:
        """The pace of the latest runs, at most PACE_S old."""
        if (now := time.monotonic()) > self._pace_until:
            self._known_pace = Pace(await self.store(self.queue.runs))
            self._pace_until = now + PACE_S
        return self._known_pace

    async def _wait(self, user: str, *place: int) -> tuple[int, float | None]:
        """Jobs that come before one of the user's, and their seconds, None if unknown."""
        position, work = await self.store(self.queue.ahead, user, *place)
        if (position_s := (await self._pace()).of(work)[0]) is None:
            return position, None if position else 0.0
        live = [progress.get("eta_s") or 0.0 for progress in self.board.live.values()]
        replicas = len(self.supervisor.replicas)
        running_s = 0.0 if len(live) < replicas else sum(live)
        return position, (position_s + running_s) / replicas

    def _answer(self, video: dict[str, Any], status: int = 200) -> Response:
        wait_ms = POLL_MS.get(video["status"])
        return Json(video, status, {"openai-poll-after-ms": str(wait_ms)} if wait_ms else {})

    async def _storage(self) -> tuple[str, str] | None:
        """`Folder.problem` as last found, by one probe at a time, which nothing waits for long."""
        if self._disk is None:
            self._disk, self._disk_since = in_thread(self.folder.problem), time.monotonic()
        asked = self._disk
        await asyncio.wait({asked}, timeout=DISK_ANSWERS_S)
        if asked.done():
            self._problem = asked.result()
            self._disk = None if self._disk is asked else self._disk
        elif (hangs_s := time.monotonic() - self._disk_since) > DISK_HANGS_S:
            return "unavailable", f"the disk has not answered for {hangs_s:.0f} s"
        return self._problem

    def _require_running(self) -> None:
        if self.supervisor.draining:
            raise Refusal(503, "draining", "the server is about to stop", retry_after_s=60)

    async def _require_accepting(self) -> None:
        self._require_running()
        full = await asyncio.to_thread(self.folder.full)
        if (problem := DISK_FULL if full else self.supervisor.problem) is not None:
            raise Refusal(503, *problem, retry_after_s=RETRY_S)

    def _clip(self, job: Job, number: Any) -> BinaryIO:
        """A finished clip of a job, opened. Raises Refusal."""
        require_video(job, str(number))
        name = clip_names(job.stem, job.job.get("n", 1))[int(number)]
        try:
            return (self.folder.outputs / name).open("rb")
        except FileNotFoundError:
            raise expired() from None


def expired() -> Refusal:
    return Refusal(410, "expired", "the file was deleted after its time; send the request again")


def require_video(job: Job, number: str) -> None:
    """Raises Refusal unless the job is completed and has the video."""
    if job.status != COMPLETED:
        text = f"the video is {job.status}; ask again when it is completed"
        raise Refusal(409, "not_ready", text)
    if number not in map(str, range(n := job.job.get("n", 1))):
        raise misfit("video", number, f"0 to {n - 1}")
