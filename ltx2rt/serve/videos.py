"""Routes of the videos that are there: list, cancel, run again, pin, delete."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response

from ltx2rt.serve.answers import Json
from ltx2rt.serve.core import Core
from ltx2rt.serve.folder import inputs_of
from ltx2rt.serve.gate import RETRY_S
from ltx2rt.serve.jobs import CANCELLED, COMPLETED, FAILED, QUEUED, RUNNING, STATUSES, Job
from ltx2rt.serve.refusal import Refusal, conflict, misfit

DELETE_WAIT_S = 30


class VideoRoutes(Core):
    async def list(self, request: Request) -> Response:
        """List your videos, the newest first: at most `limit` (1 to 100), those that come `after`
        an id, in `order` asc or desc, with one `status`."""
        asked = request.query_params
        limit, order = asked.get("limit", "20"), asked.get("order", "desc")
        if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= 100:
            raise misfit("limit", limit, "1 to 100")
        if order not in ("asc", "desc"):
            raise misfit("order", order, "asc or desc")
        if (status := asked.get("status")) not in (None, QUEUED, RUNNING, COMPLETED, FAILED):
            raise misfit("status", status, "one of OpenAI's four")
        alike = {None: STATUSES, FAILED: (FAILED, CANCELLED)}
        jobs, more = await self.store(
            self.queue.page, request.state.user, after=asked.get("after") or None,
            limit=int(limit), newest=order == "desc", statuses=alike.get(status, (status,)),
        )  # fmt: skip
        ids = [job.id for job in jobs] or [None]
        return Json({
            "object": "list", "data": [await self._video(job) for job in jobs],
            "first_id": ids[0], "last_id": ids[-1], "has_more": more,
        })  # fmt: skip

    async def retrieve(self, request: Request) -> Response:
        """Return the state of a video: status, progress, settings, addresses of its files."""
        return self._answer(await self._video(await self._job(request)))

    async def cancel(self, request: Request) -> Response:
        """Cancel a video that waits or runs."""
        job = await self._cancelled(await self._job(request))
        if job.status == COMPLETED:
            raise conflict("the video is completed; delete it instead")
        return self._answer(await self._video(job), 202)

    async def _cancelled(self, job: Job) -> Job:
        """The job once its wish to end is on the disk; its replica gets the message."""
        after = _there(await self.store(self.queue.cancel, job.id))
        if after.status == RUNNING:
            self.supervisor.cancel(after.id)
            self.board.tell("cancelling", after.id, after.user)
        elif not job.over:
            self.board.tell("failed", after.id, after.user, code="cancelled")
        return after

    async def retry(self, request: Request) -> Response:
        """Queue a video again that failed or was cancelled: it keeps its id, settings and seed."""
        await self._require_accepting()
        job = await self._job(request)
        if job.status == COMPLETED:
            raise conflict("the video is completed; send its settings again instead")
        if not job.job["pipeline"]:
            raise conflict("its row in the queue was damaged; send it again instead")
        if not self.folder.keep_longer(inputs_of(job.job)):
            text = "the files sent with it were deleted; send it again instead"
            raise Refusal(410, "expired", text)
        after = _there(await self.store(self.queue.retry, job.id))
        if job.over and after.status == QUEUED:
            self.board.tell("queued", after.id, after.user, why="retry")
            self.supervisor.woken()
        return self._answer(await self._video(after), 202)

    async def pin(self, request: Request) -> Response:
        """Keep a clip until you delete it (POST), or let it expire again (DELETE)."""
        job = await self._job(request)
        if job.status != COMPLETED or not (job.result or {}).get("file"):
            raise Refusal(409, "not_ready", f"the video is {job.status} and has no clip to keep")
        await self.store(self.queue.note, job.id, pinned=request.method == "POST")
        return self._answer(await self._video(await self._job(request)))

    async def delete(self, request: Request) -> Response:
        """Delete a video and its files; one that waits or runs is cancelled first."""
        job, end = await self._job(request), time.monotonic() + DELETE_WAIT_S
        with self.board.watch(lambda id, user: id == job.id) as watcher:
            job = await self._cancelled(job)
            while not job.over:
                if time.monotonic() > end:
                    raise conflict("the video is still being cancelled; ask again", RETRY_S)
                await watcher.take(1.0)
                job = await self._job(request)
        await asyncio.to_thread(self.folder.remove, job)  # first: a clip without its row would stay
        if await self.store(self.queue.delete, job.id):
            self.board.tell("deleted", job.id, job.user)
        return Json({"id": job.id, "object": "video.deleted", "deleted": True})


def _there(job: Job | None) -> Job:
    """Raises Refusal for a job that was deleted meanwhile."""
    if job is None:
        raise Refusal(404, "not_found", "the video was deleted", "video_id")
    return job
