"""A client of `ltx2rt serve`: send a job, follow it, fetch its clip; and a server that it starts.

Uses only Python's standard library, and nothing of ComfyUI. Decides how long a server may be away.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

POLL_S = 0.5
ANSWER_S = 30.0  # for one answer
AWAY_S = 120.0  # a server that is back within this time goes on with its jobs
START_S = 900.0  # to load a model
OVER = ("completed", "failed")
TOKEN_FILE_CHARS = 2**16
KEEP_TOKEN = (
    "put the token into a file and name the file, or into LTX2RT_TOKEN, where ComfyUI starts: "
    "every file that ComfyUI saves holds a workflow's widgets"
)
GONE = (URLError, HTTPException, TimeoutError, ConnectionError)


class ServerError(Exception):
    """A sentence for the user: the server's, where it gave one."""


@dataclass(frozen=True)
class Upload:
    """A file of a request: the field's or the image's name, its own name, and its bytes."""

    field: str
    name: str
    data: bytes


def read_token(file: str) -> str:
    """The token in a file, alone or as in `NAME TOKEN`; without a file, that of LTX2RT_TOKEN.
    Raises ServerError, which never quotes the token."""
    text, where = os.environ.get("LTX2RT_TOKEN", ""), "LTX2RT_TOKEN"
    if file:
        if not (path := Path(file).expanduser()).is_file():
            raise ServerError(f"token file: no such file; {KEEP_TOKEN}")
        with path.open(errors="replace") as lines:
            text, where = lines.read(TOKEN_FILE_CHARS), f"token file: {file}"
    named = [one.split() for one in text.splitlines() if one.split("#")[0].strip()]
    if not named and not file:
        return ""
    if not named or not re.fullmatch("[!-~]+", found := named[0][:2][-1]):
        raise ServerError(f"{where} holds no token of printable ASCII; write one")
    return found


@dataclass(frozen=True)
class Server:
    """address: such as http://127.0.0.1:8000, with a path prefix if there is one. token: itself, or
    a function that reads it whenever it is sent, so that no node returns it."""

    address: str
    token: str | Callable[[], str] = field(default="", repr=False)

    def send(self, fields: Mapping[str, Any], uploads: Sequence[Upload]) -> dict[str, Any]:
        """Queue a job; returns the video. fields: values of JSON. Raises ServerError."""
        border = secrets.token_hex(16)
        parts = [
            (f'name="{name}"', (value if isinstance(value, str) else json.dumps(value)).encode())
            for name, value in fields.items()
        ]
        parts += [(f'name="{u.field}"; filename="{u.name}"', u.data) for u in uploads]
        body = b"".join(
            f"--{border}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode()
            + data
            + b"\r\n"
            for head, data in parts
        )
        kind = {"Content-Type": f"multipart/form-data; boundary={border}"}
        # a repeated request is the same job
        once = {"Idempotency-Key": secrets.token_hex(16)}
        return json.loads(
            self._ask("POST", "/v1/videos", body + f"--{border}--\r\n".encode(), kind | once)
        )

    def follow(self, video: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The video after each change, up to its end. Raises ServerError if it fails."""
        over = Event()
        Thread(target=self._watch, args=(video["id"], over), daemon=True).start()
        try:
            while True:
                yield video
                if video["status"] in OVER:
                    break
                time.sleep(POLL_S)
                video = json.loads(self._ask("GET", f"/v1/videos/{video['id']}"))
        finally:
            over.set()
        if video["status"] == "failed":
            raise ServerError((video["error"] or {}).get("message") or "the job failed")

    def _watch(self, id: str, over: Event) -> None:
        """Read the job's events until it is over: the server makes previews only for readers."""
        while not over.is_set():
            try:
                with urlopen(self._request("GET", f"/v1/videos/{id}/events?previews=1")) as events:
                    for _ in events:
                        if over.is_set():
                            return
            except (*GONE, OSError):
                pass
            over.wait(POLL_S)

    def preview(self, video: dict[str, Any]) -> bytes | None:
        """A JPEG of the latest step, if there is one."""
        if not (video.get("x") or {}).get("preview"):
            return None
        try:
            return self._ask("GET", f"/v1/videos/{video['id']}/content?variant=preview", away_s=0)
        except ServerError:  # the job ended meanwhile
            return None

    def content(self, video: dict[str, Any]) -> bytes:
        return self._ask("GET", f"/v1/videos/{video['id']}/content")

    def cancel(self, video: dict[str, Any]) -> None:
        self._ask("POST", f"/v1/videos/{video['id']}/cancel", b"", away_s=0)

    def limits(self) -> dict[str, Any]:
        return json.loads(self._ask("GET", "/v1/limits", away_s=0))

    def is_ready(self) -> bool:
        try:
            self._ask("GET", "/readyz", away_s=0)
        except ServerError:
            return False
        return True

    def _request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}
    ) -> Request:
        token = self.token() if callable(self.token) else self.token
        own = {"Authorization": f"Bearer {token}"} if token else {}
        return Request(self.address.rstrip("/") + path, body, {**headers, **own}, method=method)

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] = {},
        away_s: float = AWAY_S,
    ) -> bytes:
        """One answer's body; asks again while there is no answer. Raises ServerError."""
        request = self._request(method, path, body, headers)
        end = time.monotonic() + away_s
        while True:
            try:
                with urlopen(request, timeout=ANSWER_S) as answer:
                    return answer.read()
            except HTTPError as error:
                if error.code == 503 and time.monotonic() < end:
                    time.sleep(POLL_S)
                    continue
                raise ServerError(_sentence(error)) from None
            except GONE as error:
                if time.monotonic() >= end:
                    reason = getattr(error, "reason", error)
                    text = f"no answer from {self.address}: {reason}; is `ltx2rt serve` running?"
                    raise ServerError(text) from None
                time.sleep(POLL_S)


def _sentence(error: HTTPError) -> str:
    """The server's own words."""
    try:
        return json.loads(error.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the server answers {error.code} {error.reason}"


@dataclass
class Started:
    """`ltx2rt serve` on this machine, which ends with this process."""

    process: subprocess.Popen[bytes]
    server: Server
    log: Path

    def wait(self, say: Callable[[str], None]) -> Server:
        """Return once the server takes jobs. say(text): shows its last line. Raises ServerError."""
        end = time.monotonic() + START_S
        while not self.server.is_ready():
            if self.process.poll() is not None:
                raise ServerError(f"ltx2rt serve ended: {self._tail(3)}")
            if time.monotonic() > end:
                raise ServerError(
                    f"ltx2rt serve is not ready after {START_S:.0f} s: {self._tail(3)}"
                )
            say(f"starting: {self._tail(1)}")
            time.sleep(POLL_S)
        return self.server

    def _tail(self, lines: int) -> str:
        return " ".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@dataclass
class Servers:
    """The servers that this process started, by their command."""

    started: dict[tuple[str, ...], Started] = field(default_factory=dict)

    def serving(
        self, command: str, model: str, arguments: str, say: Callable[[str], None]
    ) -> Server:
        """A server of the model, started unless it runs. Raises ServerError."""
        key = (command, model, arguments)
        found = self.started.get(key)
        if found is None or found.process.poll() is not None:
            found = self.started[key] = _start(*key)
        return found.wait(say)

    def stop(self) -> None:
        for one in self.started.values():
            one.process.terminate()
        for one in self.started.values():
            try:
                one.process.wait(10)
            except subprocess.TimeoutExpired:
                one.process.kill()


def _start(command: str, model: str, arguments: str) -> Started:
    words = shlex.split(command)
    if not words or shutil.which(words[0]) is None:
        raise ServerError(f"command: {command!r} is no program; give the path of ltx2rt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="ltx2rt-"))
    log = folder / "serve.log"
    own = ["serve", "--model", model, "--port", str(port), "--data", str(folder / "data")]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*words, *own, *shlex.split(arguments)], stdout=file, stderr=subprocess.STDOUT
        )
    return Started(process, Server(f"http://127.0.0.1:{port}"), log)


SERVERS = Servers()
atexit.register(SERVERS.stop)
