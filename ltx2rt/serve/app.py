"""The routes: OpenAI's `/v1/videos` and what it lacks, as one ASGI application.

Decides who may ask what, and how each question is answered.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from ltx2rt.backend import DeviceInfo
from ltx2rt.errors import InputError
from ltx2rt.media.mp4 import whole_fragments
from ltx2rt.pipelines import make_request
from ltx2rt.run.recording import STREAM, write_segment
from ltx2rt.serve.admission import MAX_PRIORITY, Admission, Admitted, number, uploads
from ltx2rt.serve.answers import Json, Opened
from ltx2rt.serve.apart import Apart
from ltx2rt.serve.board import Board
from ltx2rt.serve.folder import (
    CLIP,
    FRAMES,
    SEGMENTS,
    THUMBNAIL,
    Folder,
    clip_names,
    frames_of,
    inputs_of,
)
from ltx2rt.serve.form import Gone, fields_of
from ltx2rt.serve.gate import COOKIE, RETRY_S, nothing_here, refused
from ltx2rt.serve.metrics import Metrics
from ltx2rt.serve.openapi import openapi
from ltx2rt.serve.pace import Pace
from ltx2rt.serve.queue import (
    CANCELLED,
    COMPLETED,
    FAILED,
    JOB_ID,
    QUEUED,
    RUNNING,
    STATUSES,
    Conflict,
    Job,
    QueueFull,
)
from ltx2rt.serve.refusal import Refusal
from ltx2rt.serve.supervisor import QueueThread, Supervisor
from ltx2rt.serve.upload import IMAGE, SUFFIX, VIDEO
from ltx2rt.serve.users import Users
from ltx2rt.serve.video import as_video, in_segments, settings
from ltx2rt.stages.segments import stops

KEEP_ALIVE_S, EVENT_GAP_S = 15, 0.2
STREAM_BYTES = 2**18  # bytes of a stream at once
DELETE_WAIT_S, PACE_S = 30, 2
UNUSED_S = 3600  # for so long what was sent stays if no job reads it
POLL_MS = {QUEUED: 1000, RUNNING: 250}
KEEP_S = 7 * 86400.0  # for clips where others reach the server; rows stay ten times longer
PAGE = Path(__file__).with_name("page")
PAGE_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
NOT_HERE = "editing and characters are not supported here; send a new prompt with images instead"


MAX_EXTENSION_S = 20  # the model's limit


@dataclass(frozen=True)
class Settings:
    """users: None: everybody who reaches the server is one user. keep_s: how long clips stay;
    disk_bytes: how much they may take;
    max_work: TFLOP of a request at most."""

    users: Users | None
    max_upload_bytes: int = 32 * 2**20
    keep_s: float = KEEP_S
    disk_bytes: int = 50 * 10**9
    log_prompts: bool = False
    max_work: float | None = None


class App:
    def __init__(
        self,
        settings: Settings,
        admission: Admission,
        store: QueueThread,
        folder: Folder,
        board: Board,
        supervisor: Supervisor,
        metrics: Metrics,
    ):
        self.settings, self.admission, self.store, self.folder = settings, admission, store, folder
        self.board, self.supervisor, self.metrics, self.queue = (
            board,
            supervisor,
            metrics,
            store.queue,
        )
        self.closing = False
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="plan")
        self._apart = Apart(admission)
        self._known_pace, self._pace_until = Pace(), 0.0
        self._encoding = asyncio.Lock()  # segments, one at a time
        kinds = (Refusal, HTTPException, Gone, sqlite3.OperationalError, OSError, Exception)
        routes = [Route(path, call, methods=[method]) for method, path, call in self._routes()]
        self.starlette = Starlette(
            routes=routes, exception_handlers=dict.fromkeys(kinds, self._refused)
        )

    def _routes(self) -> list[tuple[str, str, Callable[[Request], Awaitable[Response]]]]:
        return [
            ("POST", "/v1/videos", self.create),
            ("GET", "/v1/videos", self.list),
            *(("POST", f"/v1/videos/{name}", self.not_here) for name in ("edits", "characters")),
            ("POST", "/v1/videos/extensions", self.extension),
            ("GET", "/v1/videos/characters/{id}", self.not_here),
            ("GET", "/v1/videos/{id}", self.retrieve),
            ("DELETE", "/v1/videos/{id}", self.delete),
            ("POST", "/v1/videos/{id}/cancel", self.cancel),
            ("POST", "/v1/videos/{id}/pin", self.pin),
            ("DELETE", "/v1/videos/{id}/pin", self.pin),
            ("POST", "/v1/videos/{id}/remix", self.remix),
            ("POST", "/v1/videos/{id}/extend", self.extend),
            ("POST", "/v1/videos/{id}/retry", self.retry),
            ("POST", "/v1/queue/pause", self.pause),
            ("POST", "/v1/queue/resume", self.pause),
            ("GET", "/v1/videos/{id}/content", self.content),
            ("GET", "/v1/videos/{id}/stream", self.stream),
            ("GET", "/v1/videos/{id}/segments", self.segments),
            ("GET", "/v1/videos/{id}/segments/{index}", self.segment),
            ("GET", "/v1/videos/{id}/events", self.events),
            ("GET", "/v1/events", self.events),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{id:path}", self.one_model),
            ("GET", "/v1/loras", self.loras),
            ("GET", "/v1/limits", self.limits),
            ("GET", "/v1/status", self.status),
            ("GET", "/healthz", self.health),
            ("GET", "/readyz", self.ready),
            ("GET", "/metrics", self.measure),
            ("GET", "/openapi.json", self.openapi),
            ("POST", "/login", self.login),
            ("GET", "/", self.page),
            ("GET", "/{name:path}", self.page),
        ]

    async def _refused(self, request: Request, error: Exception) -> Response:
        return await refused(request, error, self.board)

    # --- jobs from outside ------------------------------------------------------------------------

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
        shown = preview and preview[0]
        keep_s = self.settings.keep_s
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
        free = len(live) < replicas
        return position, (position_s + (0.0 if free else sum(live))) / replicas

    def _answer(self, video: dict[str, Any], status: int = 200) -> Response:
        wait_ms = POLL_MS.get(video["status"])
        return Json(video, status, {"openai-poll-after-ms": str(wait_ms)} if wait_ms else {})

    # --- videos -----------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        """With `check=1` the request is checked, and its files are kept, but it is not queued."""
        self._require_accepting()
        most = self.settings.max_upload_bytes
        given = await fields_of(request, most, self.folder, uploads())
        return await self._add(request, given)

    async def remix(self, request: Request) -> Response:
        """A new video of the settings and the seed of another, with another prompt."""
        self._require_accepting()
        job = await self._job(request)
        given = await fields_of(request, self.settings.max_upload_bytes)
        if unknown := sorted(given.keys() - {"prompt"}):
            raise Refusal(
                400,
                "unknown_field",
                f"{unknown[0][:80]!r}: a remix changes the prompt alone",
                unknown[0][:80],
            )
        settings = {**job.given, "seed": job.job["clip"].get("seed"), "prompt": given.get("prompt")}
        return await self._add(request, settings, remixed_from=job.id)

    async def extend(self, request: Request) -> Response:
        """A new video that goes on from a finished one: fields of the extend pipeline, by default
        the
        same prompt."""
        self._require_accepting()
        job, most = await self._job(request), self.settings.max_upload_bytes
        given = await fields_of(request, most, self.folder, uploads())
        return await self._extended(request, job, given, given.pop("video", "0"))

    async def extension(self, request: Request) -> Response:
        """As `extend`, in OpenAI's shape: `video` is the finished video, by its id or as an object
        that has one, and `seconds` how much is added."""
        self._require_accepting()
        given = await fields_of(request, self.settings.max_upload_bytes, self.folder, uploads())
        video, seconds = given.pop("video", None), given.pop("seconds", None)
        id = video.get("id") if isinstance(video, dict) else video
        if not isinstance(id, str):
            text = (
                "video: expected the id of a finished one; POST /v1/videos extends a file, "
                "by its pipeline extend"
            )
            raise Refusal(400, "invalid_value", text, "video")
        job = await self._job(request, id)
        if seconds is not None:
            added, fps = number(seconds), job.job["clip"].get("fps")
            if added is None or not 0 < added <= MAX_EXTENSION_S or fps is None:
                limit = (
                    f"expected above 0 and at most {MAX_EXTENSION_S}, or extend_frames in its place"
                )
                raise Refusal(
                    400, "invalid_value", f"seconds: {str(seconds)[:80]!r}, {limit}", "seconds"
                )
            step = self.admission.checkpoint.config.video_vae.time_factor
            frames = max(round(added * Fraction(str(fps)) / step), 1) * step
            given = {"extend_frames": frames} | given
        return await self._extended(request, job, given, "0")

    async def _extended(
        self, request: Request, job: Job, given: dict[str, Any], number: str
    ) -> Response:
        for field in ("pipeline", "video_path"):
            if field in given:
                text = f"{field}: the video that is extended is named already; leave it out"
                raise Refusal(400, "invalid_value", text, field)
        if job.job["clip"].get("hdr"):
            text = "the clip is in high dynamic range, and extend starts from 8 bits; ask for more segments"
            raise Refusal(409, "conflict", text)
        with self._clip(job, number) as file:
            data = await asyncio.to_thread(file.read)
        kept = await asyncio.to_thread(self.folder.keep_input, data, SUFFIX[VIDEO], job.user)
        fixed = {"pipeline": "extend", "video_path": [{"file_id": kept}]}
        given = {"prompt": job.job["clip"].get("prompt")} | given | fixed
        return await self._add(request, given, remixed_from=job.id)

    async def _add(
        self, request: Request, given: dict[str, Any], remixed_from: str | None = None
    ) -> Response:
        user, key = request.state.user, request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= 255:
            raise Refusal(400, "invalid_value", "Idempotency-Key: expected 1 to 255 characters")
        admitted = await self._admitted(request, given)
        if request.query_params.get("check") == "1":
            return await self._checked(user, admitted)
        retried = (
            request.headers.get("x-stainless-retry-count", "0") != "0"
        )  # the answer may have been lost
        if (
            retried
            and (known := await self.store(self.queue.repeated, user, admitted.digest)) is not None
        ):
            return self._answer(await self._video(known))
        self._require_accepting()  # planning takes time
        try:
            job = await self.store(
                self.queue.add, user, admitted.digest, admitted.given, admitted.job,
                work=admitted.work,
                loras=admitted.loras, priority=int(number(given.get("priority")) or 0), key=key,
                remixed_from=remixed_from,
            )  # fmt: skip
        except QueueFull as full:
            raise _too_many(full) from None
        except Conflict as error:
            raise Refusal(409, "conflict", str(error)) from None
        if job.status == QUEUED:  # else it was sent before
            self.board.tell(
                "queued",
                job.id,
                user,
                **({"prompt": given.get("prompt")} if self.settings.log_prompts else {}),
            )
            self.supervisor.woken()
        return self._answer(await self._video(job))

    async def _checked(self, user: str, admitted: Admitted) -> Response:
        """The clip that the request would make, and its time; nothing is queued."""
        job, priority = admitted.job, number(admitted.given.get("priority"))
        seconds, basis = (await self._pace()).of(admitted.work, admitted.least_s)
        _, wait_s = await self._wait(user, int(priority or 0))
        estimate = {
            "seconds": seconds, "work_tflop": admitted.work, "wait_s": wait_s, "basis": basis,
        }  # fmt: skip
        resolved = {**settings(job), "size": job["size"], "seconds": job["seconds"]}
        return Json(
            {"object": "check", "given": admitted.given, "resolved": resolved, "estimate": estimate}
        )

    async def _admitted(self, request: Request, given: dict[str, Any]) -> Admitted:
        """Raises Refusal."""
        await self._require_own_files(request.state.user, given)
        priority = number(given.get("priority", 0))
        if priority is None or priority not in range(MAX_PRIORITY + 1):
            raise Refusal(
                400, "invalid_value", f"priority: expected 0 to {MAX_PRIORITY}", "priority"
            )
        if given.keys() & uploads().keys():
            admitted = await self._apart.admit(given, self.supervisor.device)
        else:
            loop = asyncio.get_running_loop()
            admitted = await loop.run_in_executor(self._planner, self._admit, given)
        most = self.settings.max_work
        if most is not None and admitted.work > most:
            raise Refusal(
                400,
                "too_much_work",
                f"this takes {admitted.work:.4g} TFLOP, here a request may take {most:.4g}; "
                "ask for a smaller size, or fewer frames, steps or videos",
            )
        return admitted

    async def _require_own_files(self, user: str, given: Mapping[str, Any]) -> None:
        """Refuse a `file_id` of somebody else as one that does not exist. Raises Refusal."""
        for name, kind in ({"images": IMAGE} | uploads()).items():
            items = given.get(name)
            for item in items if isinstance(items, list) else []:
                id = item.get("file_id") if isinstance(item, dict) else None
                if not isinstance(id, str) or self.folder.sent_by(user, id):
                    continue
                if not await self.store(self.queue.uses, user, id):
                    text = f"{name}: file_id names no {kind} that was sent here"
                    raise Refusal(400, "invalid_value", text, name)

    def _admit(self, given: dict[str, Any]) -> Admitted:
        """With the memory of the replicas, once one has told of it."""
        if self.supervisor.device is not None:
            device, mesh = self.supervisor.device
            self.admission.plan_for(DeviceInfo(**device), mesh)
        return self.admission.admit(given)

    def _require_accepting(self) -> None:
        if self.supervisor.draining:
            raise Refusal(503, "draining", "the server is about to stop", retry_after_s=60)
        problem = (
            ("disk_full", "the disk is full") if self.folder.full() else self.supervisor.problem
        )
        if problem is not None:
            raise Refusal(503, *problem, retry_after_s=RETRY_S)

    async def list(self, request: Request) -> Response:
        asked = request.query_params
        limit, order, status = (
            asked.get("limit", "20"),
            asked.get("order", "desc"),
            asked.get("status"),
        )
        if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= 100:
            raise Refusal(
                400, "invalid_value", f"limit: {limit[:80]!r}, expected 1 to 100", "limit"
            )
        if order not in ("asc", "desc"):
            raise Refusal(
                400, "invalid_value", f"order: {order[:80]!r}, expected asc or desc", "order"
            )
        if status not in (None, QUEUED, RUNNING, COMPLETED, FAILED):
            raise Refusal(
                400,
                "invalid_value",
                f"status: {status[:80]!r}, expected one of OpenAI's four",
                "status",
            )
        statuses = (
            STATUSES if status is None else (FAILED, CANCELLED) if status == FAILED else (status,)
        )
        try:
            jobs, more = await self.store(
                self.queue.page, request.state.user, after=asked.get("after") or None,
                limit=int(limit),
                newest=order == "desc", statuses=statuses,
            )  # fmt: skip
        except KeyError:
            raise Refusal(400, "invalid_value", "after: no such video", "after") from None
        data = [await self._video(job) for job in jobs]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return Json(
            {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}
        )

    async def retrieve(self, request: Request) -> Response:
        return self._answer(await self._video(await self._job(request)))

    async def cancel(self, request: Request) -> Response:
        job = await self._cancelled(await self._job(request))
        if job.status == COMPLETED:
            raise Refusal(409, "conflict", "the video is completed; delete it instead")
        return self._answer(await self._video(job), 202)

    async def _cancelled(self, job: Job) -> Job:
        """The job once its wish to end is on the disk; its replica gets the message."""
        after = await self.store(self.queue.cancel, job.id)
        if after is None:
            raise Refusal(404, "not_found", "the video was deleted", "video_id")
        if after.status == RUNNING:
            self.supervisor.cancel(after.id)
            self.board.tell("cancelling", after.id, after.user)
        elif not job.over:
            self.board.tell("failed", after.id, after.user, code="cancelled")
        return after

    async def retry(self, request: Request) -> Response:
        """Run a job again that failed or was cancelled: the same video, by the same id."""
        self._require_accepting()
        job = await self._job(request)
        if job.status == COMPLETED:
            raise Refusal(
                409, "conflict", "the video is completed; send its settings again instead"
            )
        if not job.job["pipeline"]:
            raise Refusal(
                409, "conflict", "its row in the queue was damaged; send it again instead"
            )
        if not self.folder.keep_longer(inputs_of(job.job)):
            raise Refusal(
                410, "expired", "the files sent with it were deleted; send it again instead"
            )
        try:
            after = await self.store(self.queue.retry, job.id)
        except QueueFull as full:
            raise _too_many(full) from None
        if after is None:
            raise Refusal(404, "not_found", "the video was deleted", "video_id")
        if job.over and after.status == QUEUED:
            self.board.tell("queued", after.id, after.user, why="retry")
            self.supervisor.woken()
        return self._answer(await self._video(after), 202)

    async def pin(self, request: Request) -> Response:
        """Keep a clip until it is deleted by hand; DELETE ends that."""
        job = await self._job(request)
        if job.status != COMPLETED or not (job.result or {}).get("file"):
            raise Refusal(409, "not_ready", f"the video is {job.status} and has no clip to keep")
        await self.store(self.queue.note, job.id, pinned=request.method == "POST")
        return self._answer(await self._video(await self._job(request)))

    async def delete(self, request: Request) -> Response:
        job, end = await self._job(request), time.monotonic() + DELETE_WAIT_S
        with self.board.watch(lambda id, user: id == job.id) as watcher:
            job = await self._cancelled(job)
            while not job.over:
                if time.monotonic() > end:
                    raise Refusal(
                        409,
                        "conflict",
                        "the video is still being cancelled; ask again",
                        retry_after_s=RETRY_S,
                    )
                await watcher.take(1.0)
                job = await self._job(request)
        await asyncio.to_thread(self.folder.remove, job)  # first: a clip without its row would stay
        if await self.store(self.queue.delete, job.id):
            self.board.tell("deleted", job.id, job.user)
        return Json({"id": job.id, "object": "video.deleted", "deleted": True})

    async def content(self, request: Request) -> Response:
        job, variant = await self._job(request), request.query_params.get("variant", "video")
        if variant not in ("video", "frames", "thumbnail", "report", "preview"):
            text = (
                f"variant: {variant[:80]!r}, expected video, frames, thumbnail, report or preview"
            )
            raise Refusal(400, "invalid_value", text, "variant")
        if variant == "preview":
            if (shown := self.board.previews.get(job.id)) is None:
                raise Refusal(
                    404,
                    "not_found",
                    "there is no preview; listen to /v1/events?previews=1 while it runs",
                )
            return Response(
                shown[1], media_type="image/jpeg", headers={"cache-control": "no-store"}
            )
        if job.status != COMPLETED or job.result is None:
            raise Refusal(
                409, "not_ready", f"the video is {job.status}; ask again when it is completed"
            )
        if variant == "report":
            return Json(job.result.get("report", {}))
        number, n = request.query_params.get("video", "0"), job.job.get("n", 1)
        _require_video(job, number)
        try:
            if variant == "thumbnail":
                return Opened(self.folder.outputs / (job.stem + THUMBNAIL), media_type="image/webp")
            clip = self.folder.outputs / clip_names(job.stem, n)[int(number)]
            name = job.id + (f"-{number}" if number != "0" else "")
            if variant == "frames":
                if not job.job.get("frames"):
                    text = (
                        "the clip has no frames of high dynamic range; ask for it with hdr_frames"
                    )
                    raise Refusal(404, "not_found", text)
                frames = clip.with_name(frames_of(clip.name))
                return Opened(frames, media_type="application/zip", filename=f"{name}{FRAMES}")
            noted = None
            if request.method == "GET" and "fetched" not in job.result:
                noted = BackgroundTask(
                    self.store.insist, self.queue.note, job.id, fetched=int(time.time())
                )
            return Opened(
                clip, media_type="video/mp4", background=noted, filename=f"{name}.mp4",
                content_disposition_type="inline",
            )  # fmt: skip
        except FileNotFoundError:
            raise Refusal(
                410, "expired", "the file was deleted after its time; send the request again"
            ) from None

    def _clip(self, job: Job, number: Any) -> BinaryIO:
        """A finished clip of a job, opened. Raises Refusal."""
        if job.status != COMPLETED:
            text = f"the video is {job.status}; ask again when it is completed"
            raise Refusal(409, "not_ready", text)
        _require_video(job, str(number))
        name = clip_names(job.stem, job.job.get("n", 1))[int(number)]
        try:
            return (self.folder.outputs / name).open("rb")
        except FileNotFoundError:
            text = "the file was deleted after its time; send the request again"
            raise Refusal(410, "expired", text) from None

    async def stream(self, request: Request) -> Response:
        """A clip in segments while it is made, as fragmented MP4, from its byte `from` on; when the
        job
        is over, the finished file."""
        job, start = await self._job(request), request.query_params.get("from", "0")
        if not (start.isascii() and start.isdecimal() and len(start) < 16):
            raise Refusal(400, "invalid_value", f"from: {start[:80]!r}, expected a byte", "from")
        if job.over and int(start):
            text = "the stream is over; fetch the content instead"
            raise Refusal(409, "stream_over", text, "from")
        if job.over:
            return await self.content(request)
        return StreamingResponse(
            self._followed(job, int(start)),
            media_type="video/mp4",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    async def _in_segments(self, request: Request) -> tuple[Job, Any]:
        """The job of the path and its clip, which knows its parts. Raises Refusal."""
        job = await self._job(request)
        if not in_segments(job):
            text = "the clip is not made in segments; ask for it with `segments` or `length`"
            raise Refusal(409, "no_segments", text)
        clip: Any = make_request(job.job["pipeline"], **job.job["clip"])
        return job, clip.kept_in(self.folder.outputs / f"{job.id}{SEGMENTS}")

    async def segment(self, request: Request) -> Response:
        """A segment that is made, as a file that plays, while the job is not over. It is encoded
        once, and kept beside the segment."""
        (job, clip), number = await self._in_segments(request), request.path_params["index"]
        parts = list(stops(clip.parts))
        if number not in map(str, range(1, len(parts) + 1)):
            text = f"segment: {number[:80]!r}, expected 1 to {len(parts)}"
            raise Refusal(400, "invalid_value", text)
        if job.status == COMPLETED:
            text = "the clip is whole, and its segments are deleted; fetch the content instead"
            raise Refusal(409, "stream_over", text)
        part, stop = parts[int(number) - 1]
        path = part.path.with_suffix(CLIP)
        try:
            async with self._encoding:
                if not path.exists():
                    hdr = self.admission.high_range(clip, job.job["loras"])
                    await asyncio.to_thread(write_segment, path, part, stop, hdr)
            return Opened(path, media_type="video/mp4", filename=f"{job.id}-segment{number}.mp4")
        except (OSError, InputError) as error:
            over = (await self._job(request)).over  # it may have been deleted meanwhile
            if not over and not isinstance(error, (FileNotFoundError, InputError)):
                raise
            text = f"segment {number} is not there; ask again when it is made, or for the content"
            raise Refusal(409, "not_ready", text) from None

    async def segments(self, request: Request) -> Response:
        """The segments of a clip: which frames of it each has, by which prompt, and whether it is
        made."""
        job, clip = await self._in_segments(request)
        prompts, found = (clip.positive, *clip.segment_prompts), []
        for i, (part, stop) in enumerate(stops(clip.parts), 1):
            try:
                size = part.path.stat().st_size
            except FileNotFoundError:
                size = None
            made = job.status == COMPLETED or size is not None
            found.append({
                "index": i, "start": part.start, "frames": stop - part.start,
                "start_s": float(part.start / clip.fps), "made": made, "bytes": size,
                "prompt": prompts[min(i, len(prompts)) - 1],
            })  # fmt: skip
        return Json({"object": "list", "data": found})

    async def _followed(self, job: Job, start: int) -> AsyncIterator[bytes]:
        """Whole fragments, so that what is cut off plays. A job without any ends in its finished
        file."""
        path, border, file = self.folder.outputs / f"{job.id}{SEGMENTS}" / STREAM, 0, None
        try:
            while not self.closing:
                now = await self.store(self.queue.get, job.id)
                if file is None:
                    with suppress(FileNotFoundError):
                        file = path.open("rb")
                if file is not None:
                    size = os.fstat(file.fileno()).st_size
                    border = await asyncio.to_thread(whole_fragments, file, border, size)
                    while start < border:
                        file.seek(start)
                        data = file.read(min(border - start, STREAM_BYTES))
                        start += len(data)
                        yield data
                if now is None or now.over:
                    break
                await asyncio.sleep(EVENT_GAP_S)
            if not start and now is not None and now.status == COMPLETED and file is None:
                file = self._clip(now, "0")
                while data := await asyncio.to_thread(file.read, STREAM_BYTES):
                    yield data
        finally:
            if file is not None:
                file.close()

    async def not_here(self, request: Request) -> Response:
        raise Refusal(501, "not_supported", NOT_HERE)

    # --- events -----------------------------------------------------------------------------------

    async def events(self, request: Request) -> Response:
        """Events of one job until it is over, or of all of the user's; with `previews=1` pictures
        are made of what runs."""
        job = await self._job(request) if "id" in request.path_params else None
        return StreamingResponse(
            self._stream(
                request.state.user,
                job,
                request.query_params.get("previews") == "1",
                request.headers.get("last-event-id"),
            ),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    async def _stream(
        self, me: str, only: Job | None, previews: bool, after: str | None
    ) -> AsyncIterator[str]:
        """Only the latest event of each job is sent, with the id of the latest of all."""

        def wants(id: str, user: str) -> bool:
            return user == me if only is None else id == only.id

        with self.board.watch(wants, previews, after) as news:
            if previews:
                self.supervisor.watch()
            yield "retry: 1000\n\n"
            if only is not None:
                news.put(only.id, "state")
            quiet_since = time.monotonic()
            while not self.closing:
                told, event_id = await news.take(1.0), self.board.event_id
                if not told and time.monotonic() - quiet_since > KEEP_ALIVE_S:
                    quiet_since = time.monotonic()
                    yield ": keep-alive\n\n"
                for id, kind in told.items():
                    job = await self.store(self.queue.get, id)
                    video = await self._video(job) if job else {"id": id}
                    event = f"id: {event_id}\nevent: {kind if job else 'deleted'}\n"
                    yield f"{event}data: {json.dumps(video)}\n\n"
                    if only is not None and (job is None or job.over):
                        return
                if told:
                    await asyncio.sleep(EVENT_GAP_S)

    # --- the server -------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return Json({"object": "list", "data": [_model(name) for name in self.admission.names]})

    async def one_model(self, request: Request) -> Response:
        if (id := request.path_params["id"]) not in self.admission.names:
            text = f"no model is named {id[:80]!r}; here is {self.admission.model!r}"
            raise Refusal(404, "not_found", text, "model")
        return Json(_model(id))

    async def loras(self, request: Request) -> Response:
        data = [{"id": name, "object": "lora"} for name in self.admission.lora_files()]
        return Json({"object": "list", "data": data})

    async def limits(self, request: Request) -> Response:
        return Json({**self.admission.limits(), "upload_bytes": self.settings.max_upload_bytes})

    async def status(self, request: Request) -> Response:
        whose = None if request.state.operator else request.state.user
        counts, now = await self.store(self.queue.counts, whose), time.monotonic()
        replicas = [
            {"state": r.state, "for_s": round(now - r.since, 1)} for r in self.supervisor.replicas
        ]
        return Json({
            "replicas": replicas, "jobs": counts, "draining": self.supervisor.draining,
            "paused": await self.store(self.queue.paused),
            "disk_free_bytes": self.folder.free_bytes(),
        })  # fmt: skip

    async def pause(self, request: Request) -> Response:
        """Start no job until `resume`; those that run end, and new ones are accepted."""
        on = request.url.path.endswith("/pause")
        await self.store(self.queue.pause, on)
        self.board.log("paused" if on else "resumed")
        self.supervisor.woken()
        return Json({"object": "queue", "paused": on})

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(self, request: Request) -> Response:
        if self.supervisor.draining:
            raise Refusal(503, "draining", "the server is about to stop", retry_after_s=60)
        if not self.supervisor.ready:
            raise Refusal(503, "starting", "no replica is ready yet", retry_after_s=RETRY_S)
        if (problem := await asyncio.to_thread(self.folder.problem)) is not None:
            raise Refusal(503, *problem, retry_after_s=RETRY_S)
        return PlainTextResponse("ready\n")

    async def measure(self, request: Request) -> Response:
        for status, count in (await self.store(self.queue.counts)).items():
            self.metrics.jobs.labels(status).set(count)
        for replica in self.supervisor.replicas:
            self.metrics.up.labels(replica.number).set(replica.state in ("idle", "busy"))
            if replica.process is not None:
                self.metrics.rss.labels(f"replica {replica.number}").set(
                    rss_bytes(replica.process.pid)
                )
        self.metrics.paused.set(await self.store(self.queue.paused))
        self.metrics.rss.labels("server").set(rss_bytes("self"))
        self.metrics.disk.labels("clips").set(await asyncio.to_thread(self.folder.used_bytes))
        self.metrics.disk.labels("free").set(self.folder.free_bytes())
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def openapi(self, request: Request) -> Response:
        return Json(openapi(self.admission))

    # --- the page ---------------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        """A file of the page, by its exact name; never a path that is put together."""
        name = request.path_params.get("name", "index.html")
        name = "docs.html" if name == "docs" else name
        files = {path.name: path for path in PAGE.iterdir() if path.suffix in PAGE_TYPES}
        if name not in files:
            raise nothing_here()
        path = files[name]
        return FileResponse(
            path, media_type=PAGE_TYPES[path.suffix], headers={"cache-control": "no-cache"}
        )

    async def login(self, request: Request) -> Response:
        """A token as a cookie, for the page: neither <video> nor EventSource can send a header."""
        given = await fields_of(request, 10_000)
        token, users = str(given.get("token", "")), self.settings.users
        if users is None or users.of(token) is None:
            raise Refusal(401, "bad_token", "this token is not known")
        answer = PlainTextResponse("welcome\n")
        secure = request.headers.get("x-forwarded-proto", request.url.scheme) == "https"
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=secure)
        return answer

    async def close(self) -> None:
        await self._apart.stop()

    # --- upkeep -----------------------------------------------------------------------------------

    async def keep_house(self) -> None:
        """Delete clips after their time, and the oldest where they take too much room; fetched ones
        first."""
        while True:
            try:
                await self.expire()
            except (OSError, sqlite3.Error) as error:
                self.board.log("queue_error", error=str(error))
            await asyncio.sleep(min(60.0, max(1.0, self.settings.keep_s)))

    async def expire(self) -> None:
        await self.store.insist(self.queue.keep_uptime)
        now_s = self.queue.uptime()
        jobs = await self.store(self.queue.finished)
        excess = sum((job.result or {}).get("bytes", 0) for job in jobs) - self.settings.disk_bytes
        for job in jobs:
            if (job.result or {}).get("pinned"):
                continue
            if excess > 0 or (job.end_uptime_s or 0.0) + self.settings.keep_s < now_s:
                await self.store.insist(self.queue.note, job.id, file=None)
                await asyncio.to_thread(self.folder.remove, job)
                excess -= (job.result or {}).get("bytes", 0)
        await self.store.insist(self.queue.forget, now_s - 10 * min(self.settings.keep_s, KEEP_S))
        needed = await self.store(self.queue.waiting) + await self.store(self.queue.finished)
        await asyncio.to_thread(self.folder.sweep_inputs, needed, UNUSED_S)


def _require_video(job: Job, number: str) -> None:
    """Raises Refusal."""
    n = job.job.get("n", 1)
    if number not in map(str, range(n)):
        text = f"video: {number[:80]!r}, expected 0 to {n - 1}"
        raise Refusal(400, "invalid_value", text, "video")


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "local"}


def _too_many(full: QueueFull) -> Refusal:
    return Refusal(429, full.code, str(full), retry_after_s=max(1, math.ceil(full.after_s)))


def rss_bytes(pid: int | str) -> int:
    """Resident memory of a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0
