"""The routes: OpenAI's `/v1/videos` and what it lacks, as one ASGI application."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ltx2rt.serve.answers import Json
from ltx2rt.serve.batch import made_by
from ltx2rt.serve.files import EVENT_GAP_S, FileRoutes
from ltx2rt.serve.form import HungUp, fields_of
from ltx2rt.serve.gate import COOKIE, PAGE, RETRY_S, nothing_here, refused
from ltx2rt.serve.jobs import Job
from ltx2rt.serve.openapi import Answer, openapi
from ltx2rt.serve.options import KEEP_S
from ltx2rt.serve.orders import Orders
from ltx2rt.serve.refusal import Refusal
from ltx2rt.serve.videos import VideoRoutes
from ltx2rt.weights.digests import digest

KEEP_ALIVE_S = 15
UNUSED_S = 3600  # for so long what was sent stays if no job reads it
PAGE_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE_TYPES |= {".svg": "image/svg+xml"}  # those of this machine are its own
NO_SYNC = (
    "no request waits for a clip here: POST it to /v1/videos, GET /v1/videos/ID until its status is "
    "completed, then GET /v1/videos/ID/content"
)
NOT_HERE = "editing and characters are not supported here; send a new prompt with images instead"


class App(Orders, VideoRoutes, FileRoutes):
    """The docstrings of its routes are the text of /docs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = (Refusal, HTTPException, HungUp, sqlite3.OperationalError, OSError, Exception)
        handlers = dict.fromkeys(kinds, self._refused)
        routes = [Route(path, call, methods=[method]) for method, path, call in self._routes()]
        self.starlette = Starlette(routes=routes, exception_handlers=handlers)

    def _routes(self) -> list[Answer]:
        return [
            ("POST", "/v1/videos", self.create),
            ("GET", "/v1/videos", self.list),
            *(("POST", f"/v1/videos/{name}", self.not_here) for name in ("edits", "characters")),
            ("POST", "/v1/videos/sync", self.no_sync),
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
            ("GET", "/{name:path}", self.page),
        ]

    async def _refused(self, request: Request, error: Exception) -> Response:
        return await refused(request, error, self.board)

    async def not_here(self, request: Request) -> Response:
        raise Refusal(501, "not_supported", NOT_HERE)

    async def no_sync(self, request: Request) -> Response:
        raise Refusal(501, "not_supported", NO_SYNC)

    no_sync.__name__ = "not_here"  # no route of the description

    # --- events -----------------------------------------------------------------------------------

    async def events(self, request: Request) -> Response:
        """Follow a video, or all of yours, as server-sent events: each has the latest state of one
        video. With `previews=1` there are pictures while it is made."""
        job = await self._job(request) if "id" in request.path_params else None
        previews = request.query_params.get("previews") == "1"
        after = request.headers.get("last-event-id")
        events = self._stream(request.state.user, job, previews, after)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

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
                    yield (
                        f"id: {event_id}\nevent: {kind if job else 'deleted'}\ndata: "
                        f"{json.dumps(video)}\n\n"
                    )
                    if only is not None and (job is None or job.over):
                        return
                if told:
                    await asyncio.sleep(EVENT_GAP_S)

    # --- the server -------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """List the model under each of its names; `x` has the digests of its files."""
        return Json({"object": "list", "data": list((await self._models()).values())})

    async def one_model(self, request: Request) -> Response:
        """Return the model, by one of its names."""
        if (id := request.path_params["id"]) not in (found := await self._models()):
            text = f"no model is named {id[:80]!r}; here is {self.admission.model!r}"
            raise Refusal(404, "not_found", text, "model")
        return Json(found[id])

    async def _models(self) -> dict[str, dict[str, Any]]:
        fixed = {"object": "model", "created": 0, "owned_by": "local"}
        about = await asyncio.to_thread(made_by, self.admission)
        return {name: {"id": name, **fixed, "x": about} for name in self.admission.names}

    async def loras(self, request: Request) -> Response:
        """List the LoRAs that requests may name."""
        folder, files = self.admission.lora_folder or Path(), self.admission.lora_files()
        found = {n: await asyncio.to_thread(digest, folder / file) for n, file in files.items()}
        data = [{"id": name, "object": "lora", "x": {"digest": x}} for name, x in found.items()]
        return Json({"object": "list", "data": data})

    async def limits(self, request: Request) -> Response:
        """Return the pipelines, their fields with defaults and bounds, and all other limits."""
        return Json({**self.admission.limits(), "upload_bytes": self.how.flags.max_upload})

    async def status(self, request: Request) -> Response:
        """Return the states of the replicas, the number of your videos by status, and free disk."""
        whose = None if request.state.operator else request.state.user
        counts, now = await self.store(self.queue.counts, whose), time.monotonic()
        replicas = [
            {"state": r.state, "for_s": round(now - r.since, 1)} for r in self.supervisor.replicas
        ]
        return Json({
            "replicas": replicas, "jobs": counts, "draining": self.supervisor.draining,
            "paused": await self.store(self.queue.paused),
            "disk_free_bytes": await asyncio.to_thread(self.folder.free_bytes),
        })  # fmt: skip

    async def pause(self, request: Request) -> Response:
        """Pause or resume the queue, as an operator. While it is paused, no video starts; those
        that run go on, and new ones are accepted."""
        on = request.url.path.endswith("/pause")
        await self.store(self.queue.pause, on)
        self.board.log("paused" if on else "resumed")
        self.supervisor.woken()
        return Json({"object": "queue", "paused": on})

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(self, request: Request) -> Response:
        self._require_running()
        if not self.supervisor.ready:
            raise Refusal(503, "starting", "no replica is ready yet", retry_after_s=RETRY_S)
        if (problem := await self._storage()) is not None:
            raise Refusal(503, *problem, retry_after_s=RETRY_S)
        return PlainTextResponse("ready\n")

    async def measure(self, request: Request) -> Response:
        for status, count in (await self.store(self.queue.counts)).items():
            self.metrics.jobs.labels(status).set(count)
        for replica in self.supervisor.replicas:
            self.metrics.up.labels(replica.number).set(replica.state in ("idle", "busy"))
            if replica.process is not None:
                rss = self.metrics.rss.labels(f"replica {replica.number}")
                rss.set(rss_bytes(replica.process.pid))
        self.metrics.paused.set(await self.store(self.queue.paused))
        self.metrics.rss.labels("server").set(rss_bytes())
        self.metrics.disk.labels("clips").set(await asyncio.to_thread(self.folder.used_bytes))
        self.metrics.disk.labels("free").set(await asyncio.to_thread(self.folder.free_bytes))
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def openapi(self, request: Request) -> Response:
        return Json(openapi(self.admission, self._routes()))

    # --- the page ---------------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        """A file of the page, by its exact name; never a path that is put together."""
        if (path := PAGE.get(request.path_params["name"])) is None:
            raise nothing_here()
        kind = PAGE_TYPES[path.suffix]
        return FileResponse(path, media_type=kind, headers={"cache-control": "no-cache"})

    async def login(self, request: Request) -> Response:
        """A token as a cookie, for the page: neither <video> nor EventSource can send a header."""
        given = await fields_of(request, 10_000)
        token, users = str(given.get("token", "")), self.how.users
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
        """Delete clips after their time, and the oldest where they take too much room."""
        while True:
            try:
                await self.expire()
            except (OSError, sqlite3.Error) as error:
                self.board.log("queue_error", error=str(error))
            await asyncio.sleep(min(60.0, max(1.0, self.how.keep_s)))

    async def expire(self) -> None:
        await self.store.insist(self.queue.keep_uptime)
        now_s = self.queue.uptime()
        jobs = await self.store(self.queue.finished)
        excess = sum((job.result or {}).get("bytes", 0) for job in jobs) - self.how.flags.disk
        for job in jobs:
            if (job.result or {}).get("pinned"):
                continue
            if excess > 0 or (job.end_uptime_s or 0.0) + self.how.keep_s < now_s:
                await self.store.insist(self.queue.note, job.id, file=None)
                await asyncio.to_thread(self.folder.remove, job)
                excess -= (job.result or {}).get("bytes", 0)
        await self.store.insist(self.queue.forget, now_s - 10 * min(self.how.keep_s, KEEP_S))
        needed = await self.store(self.queue.waiting) + await self.store(self.queue.finished)
        await asyncio.to_thread(self.folder.sweep_inputs, needed, UNUSED_S)


def rss_bytes(pid: int | None = None) -> int:
    """Resident memory of a process, by default of this one; 0 if it is gone."""
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0
