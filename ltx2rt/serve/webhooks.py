"""Webhooks: a POST to a user's address when one of the user's jobs is over.

Signed as Standard Webhooks says, with OpenAI's event types, so that `client.webhooks.unwrap` of
OpenAI's client reads them. An event is kept in the queue's file from the moment at which its job
is over until it was taken, so that each arrives at least once, also over restarts.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from ltx2rt.errors import InputError
from ltx2rt.serve.board import Board
from ltx2rt.serve.metrics import Metrics
from ltx2rt.serve.queue import EVERYBODY, WebhookEvent
from ltx2rt.serve.supervisor import QueueThread
from ltx2rt.version import VERSION

SECRET = "whsec_"  # Standard Webhooks: the prefix of a secret, before its base64
SECRET_BYTES = (24, 64)  # Standard Webhooks: how long a secret is
ANSWER_S = 10  # time for the receiver's answer
LOOK_S = 0.5  # between two looks for events that are due
AT_ONCE = 8
WAITS_S = (5, 30, 120, 600, 1800, 3600, 6 * 3600)  # after each failure; the last one repeats
GIVE_UP_S = 72 * 3600  # as OpenAI does


@dataclass(frozen=True)
class Hook:
    url: str
    secret: bytes

    def signature(self, id: str, timestamp: str, body: bytes) -> str:
        """HMAC-SHA256 over `id.timestamp.body`, in base64, after its version (Standard
        Webhooks)."""
        signed = b".".join((id.encode(), timestamp.encode(), body))
        digest = hmac.new(self.secret, signed, hashlib.sha256).digest()
        return "v1," + base64.b64encode(digest).decode()


def read_hooks(path: Path) -> dict[str, Hook]:
    """Hooks by user, of a file with a line `NAME URL SECRET` for each. Raises InputError."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeError) as error:
        raise InputError(f"--webhooks: {path} cannot be read ({error})") from None
    hooks: dict[str, Hook] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        where = f"--webhooks: line {number} of {path}"
        if len(words := line.split()) != 3:
            raise InputError(f"{where} has {len(words)} words, expected `NAME URL SECRET`")
        name, url, secret = words
        if name in hooks:
            raise InputError(f"{where} names {name} again; a user has one address")
        _check_url(where, url)
        hooks[name] = Hook(url, _secret(where, secret))
    if not hooks:
        raise InputError(
            f"--webhooks: {path} names no address; write a line `NAME URL SECRET`, "
            f"with {EVERYBODY} as NAME for all users without one"
        )
    return hooks


def _check_url(where: str, url: str) -> None:
    """Raises InputError."""
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        right = False
    if not right:
        raise InputError(f"{where}: {url[:80]!r}, expected http://HOST/PATH or https://HOST/PATH")


def _secret(where: str, text: str) -> bytes:
    """Raises InputError."""
    least, most = SECRET_BYTES
    try:
        secret = base64.b64decode(text.removeprefix(SECRET), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if not text.startswith(SECRET) or not least <= len(secret) <= most:
        raise InputError(
            f"{where}: its secret is not {SECRET} and the base64 of {least} to {most} random bytes"
        )
    return secret


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """A signed event goes to the address of the file alone."""

    def redirect_request(self, *_) -> None:  # pyrefly: ignore[bad-override]
        return None


SEND = urllib.request.build_opener(NoRedirects).open


class Webhooks:
    """Sends what the queue keeps for the users of `hooks`."""

    def __init__(
        self, hooks: Mapping[str, Hook], store: QueueThread, board: Board, metrics: Metrics
    ):
        self.hooks, self.store, self.board, self.metrics = hooks, store, board, metrics

    async def run(self) -> None:
        while True:
            try:
                due = await self.store(self.store.queue.due, AT_ONCE)
                await asyncio.gather(*map(self.deliver, due))
            except sqlite3.Error as error:
                self.board.log("queue_error", error=str(error))
            await asyncio.sleep(LOOK_S)

    async def deliver(self, event: WebhookEvent) -> None:
        """Send it once; then it is forgotten, or due again later."""
        hook = self.hooks.get(event.user) or self.hooks[EVERYBODY]
        problem, gone = await asyncio.to_thread(send, hook, event)
        late = event.waited_s > GIVE_UP_S
        outcome = "delivered" if problem is None else "dropped" if gone or late else "failed"
        wait_s = WAITS_S[min(event.tries, len(WAITS_S) - 1)] if outcome == "failed" else None
        await self.store(self.store.queue.sent, event.id, wait_s)
        self.metrics.webhooks.labels(outcome).inc()
        facts = {"outcome": outcome, "error": problem, "again_in_s": wait_s}
        self.board.log(
            "webhook", job=event.job, **{k: v for k, v in facts.items() if v is not None}
        )


def send(hook: Hook, event: WebhookEvent) -> tuple[str | None, bool]:
    """The error, None if it was taken, and whether the receiver wants no more of it (410)."""
    body = json.dumps(
        {
            "object": "event",
            "id": event.id,
            "type": f"video.{event.kind}",
            "created_at": int(event.created),
            "data": {"id": event.job},
        }
    ).encode()
    timestamp = str(int(time.time()))
    headers = {
        "content-type": "application/json",
        "user-agent": f"ltx2rt/{VERSION}",
        "webhook-id": event.id,
        "webhook-timestamp": timestamp,
        "webhook-signature": hook.signature(event.id, timestamp, body),
    }
    try:
        with SEND(urllib.request.Request(hook.url, body, headers), timeout=ANSWER_S):
            return None, False
    except urllib.error.HTTPError as error:
        error.close()
        return f"HTTP {error.code}", error.code == HTTPStatus.GONE
    except (OSError, HTTPException, ValueError) as error:  # ValueError: no name of a host
        return f"{type(error).__name__}: {error}"[:200], False
