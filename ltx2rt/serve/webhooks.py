"""Webhooks: a POST to a user's address when one of the user's jobs is over.

Signed as Standard Webhooks says, with OpenAI's event types, so that `client.webhooks.unwrap` of
OpenAI's client reads them. An event is kept in the queue's file from the end of its job until the
receiver has taken it, so that each arrives at least once, also over restarts.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import sqlite3
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from ltx2rt.errors import InputError
from ltx2rt.serve.board import Board
from ltx2rt.serve.jobs import EVERYBODY
from ltx2rt.serve.metrics import Metrics
from ltx2rt.serve.queue import WebhookEvent
from ltx2rt.serve.supervisor import QueueThread
from ltx2rt.text_files import flag_rows
from ltx2rt.version import VERSION

SECRET = "whsec_"  # Standard Webhooks: the prefix of a secret, before its base64
SECRET_BYTES = (24, 64)  # Standard Webhooks: how long a secret is
ANSWER_S = 10  # for the whole exchange
LOOK_S = 0.5  # between two looks for events that are due
WAITS_S = (5, 30, 120, 600, 1800, 3600, 6 * 3600)  # after each failure; the last one repeats
GIVE_UP_S = 72 * 3600  # as OpenAI does
tls = cache(ssl.create_default_context)  # it reads every authority of this machine


@dataclass(frozen=True)
class Hook:
    url: str
    secret: bytes

    def signature(self, id: str, timestamp: str, body: bytes) -> str:
        """HMAC-SHA256 over `id.timestamp.body`, in base64, with its version (Standard Webhooks)."""
        signed = b".".join((id.encode(), timestamp.encode(), body))
        digest = hmac.new(self.secret, signed, hashlib.sha256).digest()
        return "v1," + base64.b64encode(digest).decode()


def read_hooks(path: Path) -> dict[str, Hook]:
    """Hooks by user, of a file with a line `NAME URL SECRET` for each. Raises InputError."""
    hooks: dict[str, Hook] = {}
    for where, words in flag_rows("--webhooks", path):
        if len(words) != 3:
            raise InputError(f"{where} has {len(words)} words, expected `NAME URL SECRET`")
        name, url, secret = words
        if name in hooks:
            raise InputError(f"{where} names {name} again; a user has one address")
        _check_url(where, url)
        hooks[name] = Hook(url, _secret(where, secret))
    if not hooks:
        raise InputError(
            f"--webhooks: {path} names no address; write a line `NAME URL SECRET`, with "
            f"{EVERYBODY} as NAME for all users without one"
        )
    return hooks


def _check_url(where: str, url: str) -> None:
    """Raises InputError."""
    if not (url.isascii() and url.isprintable()):
        reason = "has characters that an address has not; write them as %XX, a host as xn--..."
        raise InputError(f"{where}: {url[:80]!r} {reason}")
    right, parts = False, None
    with suppress(ValueError):
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    if parts is None or not right:
        raise InputError(f"{where}: {url[:80]!r}, expected http://HOST/PATH or https://HOST/PATH")
    if "@" in parts.netloc:
        reason = "its address has a user name; leave it out, the signature tells who sends"
        raise InputError(f"{where}: {reason}")


def _secret(where: str, text: str) -> bytes:
    """Raises InputError."""
    (least, most), secret = SECRET_BYTES, b""
    with suppress(ValueError):
        secret = base64.b64decode(text.removeprefix(SECRET), validate=True)
    if not text.startswith(SECRET) or not least <= len(secret) <= most:
        raise InputError(
            f"{where}: its secret is not {SECRET} and the base64 of {least} to {most} random bytes"
        )
    return secret


class Webhooks:
    """Sends what the queue keeps for the users of `hooks`: one event at a time for each
    address."""

    def __init__(
        self, hooks: Mapping[str, Hook], store: QueueThread, board: Board, metrics: Metrics
    ):
        self.hooks, self.store, self.board, self.metrics = hooks, store, board, metrics
        self._sending: dict[Hook, asyncio.Task[None]] = {}
        self._look = asyncio.Event()

    async def run(self) -> None:
        while True:
            self._look.clear()
            try:
                for event in await self.store(self.store.queue.due):
                    hook = self.hooks.get(event.user) or self.hooks[EVERYBODY]
                    if hook not in self._sending:
                        self._sending[hook] = asyncio.create_task(self.deliver(event))
                        self._sending[hook].add_done_callback(partial(self._sent, hook))
            except sqlite3.Error as error:
                self.board.log("queue_error", error=str(error))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), LOOK_S)

    def _sent(self, hook: Hook, task: asyncio.Task[None]) -> None:
        del self._sending[hook]
        if task.cancelled() or (error := task.exception()) is None:
            self._look.set()
        else:
            self.board.log("queue_error", error=f"{type(error).__name__}: {error}")

    async def deliver(self, event: WebhookEvent) -> None:
        """Send it once; then it is forgotten, or due again later."""
        problem, gone = await send(self.hooks.get(event.user) or self.hooks[EVERYBODY], event)
        late = event.waited_s > GIVE_UP_S
        outcome = "delivered" if problem is None else "dropped" if gone or late else "failed"
        wait_s = WAITS_S[min(event.tries, len(WAITS_S) - 1)] if outcome == "failed" else None
        await self.store.insist(self.store.queue.sent, event.id, wait_s)
        self.metrics.webhooks.labels(outcome).inc()
        facts = {"job": event.job, "outcome": outcome, "error": problem, "again_in_s": wait_s}
        self.board.log("webhook", **{k: v for k, v in facts.items() if v is not None})


async def send(hook: Hook, event: WebhookEvent) -> tuple[str | None, bool]:
    """The error, None if it was taken, and whether the receiver wants no more of it (410)."""
    about = {"object": "event", "id": event.id, "type": f"video.{event.kind}"}
    about |= {"created_at": int(event.created), "data": {"id": event.job}}
    body, timestamp = json.dumps(about).encode(), str(int(time.time()))
    headers = {
        "content-type": "application/json",
        "user-agent": f"ltx2rt/{VERSION}",
        "webhook-id": event.id,
        "webhook-timestamp": timestamp,
        "webhook-signature": hook.signature(event.id, timestamp, body),
    }
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            httpx.AsyncClient(verify=tls(), timeout=None) as client,
            client.stream("POST", hook.url, content=body, headers=headers) as answer,
        ):
            if answer.is_success:
                return None, False
            return f"HTTP {answer.status_code}", answer.status_code == HTTPStatus.GONE
    except TimeoutError:
        return f"no answer in {ANSWER_S} s", False
    except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # no name of a host
        return f"{type(error).__name__}: {error}"[:200], False
