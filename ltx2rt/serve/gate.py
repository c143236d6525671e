"""In front of the routes: who may ask, how much at once, and for how long.

A request that lasts (a stream, a long poll, a slow body) ends within `WATCH_S` after the token that
it came with is revoked.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
import traceback
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ltx2rt.serve.answers import Json
from ltx2rt.serve.board import Board
from ltx2rt.serve.form import HungUp, close_unread
from ltx2rt.serve.metrics import Metrics
from ltx2rt.serve.refusal import NO_SPACE, Refusal, invalid
from ltx2rt.serve.users import LOCAL, OPERATOR, STRANGER, User, Users

MAX_REQUESTS, MAX_OF_USER = 1000, 250  # at once, of all users and of one
MAX_BYTES_OF_USER = 2**29  # in bodies of open requests; a single body may be longer
WATCH_S = 1.0
RETRY_S = 10
UNREAD_S = 1.0  # a refused body is read to get the answer through
UNREAD_BYTES, UNREAD_BYTES_TOO_LARGE = 2**25, 2**20
LOCAL_HOST = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?")
COOKIE = "ltx2rt_token"
PROBES = ("/healthz", "/readyz", "/metrics")  # answered above every limit
PAGE = {path.name: path for path in Path(__file__).with_name("page").iterdir()}
PAGE |= {"": PAGE["index.html"], "docs": PAGE["docs.html"]}
OPEN = ("/healthz", "/readyz", "/login", *map("/{}".format, PAGE))  # to everybody
OPERATORS = ("/metrics", "/v1/queue/pause", "/v1/queue/resume")  # need an operator's token
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob:; media-src 'self' blob:; "
    "frame-ancestors 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, DELETE",
    "access-control-allow-headers": "authorization, content-type, idempotency-key, range",
    "access-control-max-age": "600",  # seconds
}


@dataclass
class Asked:
    """A request in progress. body_bytes: size of the part of its body that has arrived. revoked: its
    user is known no more."""

    request: Request
    user: User
    body_bytes: int = 0
    revoked: bool = False


class Gate:
    """users: None: everybody who reaches the server is one user. origins: others that may ask."""

    def __init__(
        self, app: Starlette, users: Users | None, board: Board, metrics: Metrics,
        origins: Collection[str] = (),
    ):  # fmt: skip
        self.app, self.users, self.board, self.metrics = app, users, board, metrics
        self.origins = origins
        self._asked: dict[asyncio.Task[Any], Asked] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, code, shared = time.monotonic(), 0, dict[str, str]()

        async def answered(message: Any) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                more = MutableHeaders(raw=[*message["headers"]])
                more.update(HEADERS | shared)
                if two_lengths(Headers(scope=scope)):
                    more["connection"] = "close"
                message = {**message, "headers": more.raw}
            await send(message)

        async def reading() -> Any:
            message = await receive()
            more = message["type"] == "http.request" and message.get("more_body", False)
            scope["state"]["read"] = not more
            self._require_memory(task, len(message.get("body", b"")))
            return message

        scope["state"] = {"read": False}
        request, task = Request(scope, reading), asyncio.current_task()
        assert task is not None
        origin = request.headers.get("origin")
        if origin in self.origins:  # by token, never by cookie
            shared = {"access-control-allow-origin": str(origin), "vary": "origin"}
            shared["access-control-expose-headers"] = "retry-after, content-disposition"
        asked = Asked(request, STRANGER)
        try:
            if shared and "access-control-request-method" in request.headers:
                return await Response(status_code=204, headers=PREFLIGHT)(scope, reading, answered)
            asked.user = self._user(request)
            scope["state"] |= {"user": asked.user.name, "operator": asked.user.operator}
            self._require_place(request, asked.user)
            self._asked[task] = asked
            await self.app(scope, reading, answered)
        except Refusal as refusal:
            await (await with_body_read(request, answer_of(refusal)))(scope, reading, answered)
        except asyncio.CancelledError:  # revoked, or the server stops and waits no longer
            if not code:
                known = Refusal(503, "draining", "the server stops", retry_after_s=RETRY_S)
                refusal = _bad_token() if asked.revoked else known
                with suppress(OSError):
                    await close_unread(answer_of(refusal))(scope, reading, answered)
        except Exception as error:  # starlette has answered 500
            frame = traceback.extract_tb(error.__traceback__)[-1]
            said, at = f"{type(error).__name__}: {error}"[:500], f"{frame.name}:{frame.lineno}"
            self.board.log("error", error=said, at=at)
        finally:
            self._asked.pop(task, None)
        route = getattr(scope.get("route"), "path", "other")
        self.metrics.requests.labels(route, code or 500).inc()
        if route not in PROBES:
            took_ms = round(1000 * (time.monotonic() - start), 1)
            asked = {"method": scope["method"], "path": scope["path"][:100]}
            self.board.log("http", **asked, code=code, ms=took_ms)

    def _require_place(self, request: Request, user: User) -> None:
        """Raises Refusal."""
        if request.url.path in PROBES:
            return
        if [asked.user.name for asked in self._asked.values()].count(user.name) >= MAX_OF_USER:
            raise Refusal(
                429,
                "too_many_requests",
                f"{MAX_OF_USER} requests of yours are open, streams included; close some",
                retry_after_s=RETRY_S,
            )
        if len(self._asked) >= MAX_REQUESTS:
            raise Refusal(
                503,
                "busy",
                f"{MAX_REQUESTS} requests are open; try again later",
                retry_after_s=RETRY_S,
            )

    def _require_memory(self, task: Any, more_bytes: int) -> None:
        """Count more of a body. Raises Refusal, once: the rest is read without being kept."""
        if (asked := self._asked.get(task)) is None:
            return
        asked.body_bytes += more_bytes
        own = [one.body_bytes for one in self._asked.values() if one.user == asked.user]
        if asked.body_bytes < sum(own) and sum(own) > MAX_BYTES_OF_USER:
            del self._asked[task]
            raise Refusal(
                503,
                "busy",
                "other large requests are being read; send this one again later",
                retry_after_s=RETRY_S,
            )

    async def watch(self) -> None:
        """End the requests of users whose token is revoked."""
        if (users := self.users) is None:
            return
        seen = users.tokens()
        while True:
            await asyncio.sleep(WATCH_S)
            if (now := users.tokens()) is seen:
                continue
            seen = now
            for task, asked in list(self._asked.items()):
                named = self._named(asked.request)
                if asked.user != STRANGER and (named is None or named.name != asked.user.name):
                    asked.revoked = True
                    task.cancel()

    def _named(self, request: Request) -> User | None:
        """The user whose token the request has."""
        assert self.users is not None
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        bearer = scheme.lower() == "bearer"
        return self.users.of(token.strip() if bearer else request.cookies.get(COOKIE, ""))

    def _user(self, request: Request) -> User:
        """Raises Refusal."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self.users is None and not is_local(host):
            raise Refusal(
                403,
                "bad_host",
                f"host: {host[:80]!r}, expected localhost; give the server a token file",
            )
        reads = request.method in ("GET", "HEAD")
        foreign = origin is not None and origin.partition("://")[2] != host
        if not reads and foreign and origin not in self.origins:
            text = (
                f"origin: {str(origin)[:80]!r}, expected this server's own pages, or --allow-origin"
            )
            raise Refusal(403, "bad_origin", text)
        if two_lengths(request.headers):
            raise invalid("content-length and transfer-encoding: expected one of them")
        if self.users is None:
            return LOCAL
        if request.url.path in OPEN:
            return STRANGER
        if (user := self._named(request)) is None:
            raise _bad_token()
        if request.url.path in OPERATORS and not user.operator:
            raise Refusal(
                403,
                "not_operator",
                f"this needs a token whose line in the token file ends in `{OPERATOR}`",
            )
        return user


async def refused(request: Request, error: Exception, board: Board) -> Response:
    """The answer to a request that a route has refused, or failed on."""
    headers = getattr(error, "headers", None) or {}  # starlette says Allow
    if isinstance(error, HTTPException):
        codes = {404: "not_found", 405: "method_not_allowed"}
        if error.status_code == 405 and request.scope.get("path_params", {}).get("name"):
            return await refused(request, nothing_here(), board)
        code = codes.get(error.status_code, "invalid_value")
        error = Refusal(error.status_code, code, str(error.detail))
    elif isinstance(error, (sqlite3.OperationalError, OSError)):
        board.log("disk_error", error=str(error))
        database = isinstance(error, sqlite3.Error)
        full = "readonly" not in str(error) if database else error.errno in NO_SPACE
        code, why = ("disk_full", "disk is full") if full else ("unavailable", "log says why")
        text = f"the server cannot do this now; its {why}"
        error = Refusal(503, code, text, retry_after_s=RETRY_S)
    elif isinstance(error, HungUp):
        error = Refusal(400, "gone", "the client has left")
    elif not isinstance(error, Refusal):
        error = Refusal(500, "internal", "the server failed; its log says why")
    answer = answer_of(error)
    answer.headers.update(headers)
    return await with_body_read(request, answer)


def answer_of(refusal: Refusal) -> Response:
    headers = {}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    if refusal.status in (409, 429, 501, 503):
        headers["x-should-retry"] = "true" if refusal.status in (429, 503) else "false"
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Json(refusal.body, refusal.status, headers)


async def with_body_read(request: Request, answer: Response) -> Response:
    """Read some of a body that is left: closing a connection on it may lose the answer."""
    size, end = 0, time.monotonic() + UNREAD_S
    most = UNREAD_BYTES_TOO_LARGE if answer.status_code == 413 else UNREAD_BYTES
    while not request.state.read and size < most:
        try:
            message = await asyncio.wait_for(request.receive(), max(0.0, end - time.monotonic()))
        except TimeoutError:
            break
        size += len(message.get("body", b""))
    return answer if request.state.read else close_unread(answer)


def nothing_here() -> Refusal:
    return Refusal(404, "not_found", "nothing is here")


def _bad_token() -> Refusal:
    return Refusal(401, "bad_token", "no known token; send `Authorization: Bearer TOKEN`")


def two_lengths(headers: Headers) -> bool:
    """Whether a proxy may see another end of the body than this server (RFC 9112, 6.1)."""
    return "content-length" in headers and "transfer-encoding" in headers


def is_local(host: str) -> bool:
    """Whether a Host header names this machine by its loopback."""
    return LOCAL_HOST.fullmatch(host.lower()) is not None
