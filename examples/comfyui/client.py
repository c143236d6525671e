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
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException, IncompleteRead, InvalidURL
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import HTTPErrorProcessor, Request, build_opener

POLL_S = 0.5
ANSWER_S = 30.0  # for one answer, and the time that its bytes may take
CANCEL_S = 5.0
LIST_S = 2.0  # for the names in the lists of a page, which waits for them
CHECKED = 4  # times as long for a request with files, which the server decodes
ABSENT_S = 10.0  # before the first answer of a task
AWAY_S = 120.0  # a server that is back within this time goes on with its jobs
SLOWEST_BYTES_PER_S = 64_000
MOST_BYTES, MOST_CLIP_BYTES, CHUNK_BYTES = 2**24, 2**30, 2**16
START_S = 900.0  # to load a model
OVER = ("completed", "failed")
TOKEN_FILE_CHARS = 2**16
LOOPBACK = ("127.0.0.1", "localhost", "::1")
KEEP_TOKEN = (
    "put the token into a file and name the file, or into LTX2RT_TOKEN, where ComfyUI starts: "
    "every file that ComfyUI saves holds a workflow's widgets"
)
GONE = (OSError, HTTPException)
NUMBER, TEXT, NOTHING = (int, float), (str,), (type(None),)
VIDEO = {  # types of the fields that the nodes read, in `x` as well
    "id": TEXT, "status": TEXT, "progress": NUMBER, "seed": NUMBER,
    "stage": TEXT + NOTHING, "preview": TEXT + NOTHING,
    **dict.fromkeys(("step", "steps", "eta_s", "queue_position"), NUMBER + NOTHING),
}  # fmt: skip


class AsTheyAre(HTTPErrorProcessor):
    """Answers of every status: none is followed to another address, which would get the token."""

    def http_response(self, request: Request, response: Any) -> Any:
        return response

    https_response = http_response


OPENER = build_opener(AsTheyAre)


class ServerError(Exception):
    """A sentence for the user: the server's, where it gave one, of printable characters."""

    def __init__(self, text: str):
        super().__init__("".join(c if c.isprintable() or c == "\n" else "?" for c in text))


@dataclass(frozen=True)
class Upload:
    """A file of a request: the field's or the image's name, its own name, and its bytes."""

    field: str
    name: str
    data: bytes


def read_token(file: str, address: str) -> str:
    """The token for a server, from a file, or without one from LTX2RT_TOKEN: the last word of the
    line that begins with its address; of a line without an address only for this machine's servers.
    "" if there is none in LTX2RT_TOKEN. Raises ServerError, which never quotes the token."""
    text, where = os.environ.get("LTX2RT_TOKEN", ""), "LTX2RT_TOKEN"
    if file:
        if not (path := Path(file).expanduser()).is_file():
            raise ServerError(f"token file: no such file; {KEEP_TOKEN}")
        with path.open(errors="replace") as lines:
            text, where = lines.read(TOKEN_FILE_CHARS), f"token file: {file}"
    named = [one.split() for one in text.splitlines() if one.split("#")[0].strip()]
    if not named and not file:
        return ""
    if not named or not all(re.fullmatch("[!-~]+", words[:2][-1]) for words in named):
        raise ServerError(f"{where} holds no token of printable ASCII; write one")
    server = urlsplit(root_of(address))
    for first, *rest in named:
        if rest and "://" in first and origin(first) == origin(server.geturl()):
            return rest[0]
    plain = [words for words in named if len(words) == 1 or "://" not in words[0]]
    if plain and server.hostname in LOOPBACK:
        return plain[0][:2][-1]
    if plain or file:
        meant = f"{server.scheme}://{server.netloc}"
        advice = f"for this server write a line `{meant} TOKEN`, if you trust it with the token"
        raise ServerError(f"{where} does not name {meant}; {advice}")
    return ""


def root_of(address: str) -> str:
    """A server's address with its scheme. Raises ServerError."""
    text = address.strip()
    root = (text if "://" in text else f"http://{text}").rstrip("/")
    with suppress(ValueError):
        parts = urlsplit(root)
        plain = re.fullmatch("[!-~]+", root) and parts.scheme in ("http", "https")
        if plain and parts.hostname and parts.port != 0:
            return root
    raise ServerError(f"address: {text[:80]!r}, expected one such as http://127.0.0.1:8000")


def origin(root: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port. Raises ServerError."""
    parts = urlsplit(root_of(root))
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme]


def quiet(text: str) -> None:
    """Hear of a wait, and do nothing."""


Wait = Callable[[str], None]  # is called in every wait: "", or a line for the user; may raise


@dataclass
class Exchange:
    """A request, sent in a thread, so that its caller is free to leave. Its answer, of at most
    `most_bytes`, has to be whole within `answer_s` and the time that its bytes may take."""

    request: Request
    answer_s: float
    most_bytes: int = MOST_BYTES
    status: int = 0
    reason: str = ""
    location: str = ""
    body: bytearray = field(default_factory=bytearray)
    error: Exception | None = None
    left: Event = field(default_factory=Event)
    over: Event = field(default_factory=Event)

    def run(self, wait: Wait) -> None:
        """Raises what the connection raises, and what `wait` raises."""
        sent_bytes = len(self.request.data or b"")  # type: ignore[arg-type]
        start = time.monotonic()
        Thread(target=self._read, daemon=True).start()
        try:
            while not self.over.wait(POLL_S):
                wait("")
                moving_s = (sent_bytes + len(self.body)) / SLOWEST_BYTES_PER_S
                if time.monotonic() - start > self.answer_s + moving_s:
                    raise TimeoutError(f"no whole answer in {self.answer_s + moving_s:.0f} s")
        finally:
            self.left.set()
        if self.error:
            raise self.error

    def _read(self) -> None:
        try:
            with OPENER.open(self.request, timeout=self.answer_s) as answer:
                self.status, self.reason = answer.status, answer.reason
                self.location = answer.headers.get("location", "")
                while not self.left.is_set() and (chunk := answer.read1(CHUNK_BYTES)):
                    self.body += chunk
                    if len(self.body) > self.most_bytes:
                        raise ServerError(f"an answer of more than {self.most_bytes} bytes")
                if answer.length:  # the connection ended before
                    raise IncompleteRead(b"", answer.length)
        except Exception as error:  # raised where the caller waits
            self.error = error
        finally:
            self.over.set()


@dataclass(frozen=True)
class Server:
    """address: such as http://127.0.0.1:8000, with a path prefix if there is one. token: itself, or
    a function that reads it whenever it is sent, so that no node returns it."""

    address: str
    token: str | Callable[[], str] = field(default="", repr=False)

    def send(
        self, fields: Mapping[str, Any], uploads: Sequence[Upload], wait: Wait = quiet
    ) -> dict[str, Any]:
        """Queue a job; returns the video. fields: values of JSON. Raises ServerError."""
        self._ask("GET", "/readyz", wait=wait, absent_s=ABSENT_S)  # one small question first
        border = secrets.token_hex(16)
        parts = [
            (f'name="{quote(name, safe="[]")}"', _text(value).encode("utf-8", "replace"))
            for name, value in fields.items()
        ]
        parts += [
            (f'name="{quote(u.field)}"; filename="{quote(u.name, errors="replace")}"', u.data)
            for u in uploads
        ]
        body = b"".join(
            f"--{border}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode()
            + data
            + b"\r\n"
            for head, data in parts
        )
        # a repeated request is the same job
        headers = {
            "Content-Type": f"multipart/form-data; boundary={border}",
            "Idempotency-Key": secrets.token_hex(16),
        }
        answer_s = ANSWER_S * (CHECKED if uploads else 1)
        body += f"--{border}--\r\n".encode()
        sent = self._ask("POST", "/v1/videos", body, headers, wait=wait, answer_s=answer_s)
        return self._video(sent)

    def follow(self, video: dict[str, Any], wait: Wait = quiet) -> Iterator[dict[str, Any]]:
        """The video after each change, up to its end. Raises ServerError if it fails."""
        over = Event()
        Thread(target=self._watch, args=(video["id"], over), daemon=True).start()
        try:
            while True:
                yield video
                if video["status"] in OVER:
                    break
                time.sleep(POLL_S)
                video = self._video(self._ask("GET", f"/v1/videos/{video['id']}", wait=wait))
        finally:
            over.set()
        if video["status"] == "failed":
            raise ServerError(_message(video) or "the job failed")

    def _watch(self, id: str, over: Event) -> None:
        """Read the job's events until it is over: the server makes previews only for readers."""
        while not over.is_set():
            with suppress(*GONE, ServerError, ValueError):
                request = self._request("GET", f"/v1/videos/{id}/events?previews=1")
                with OPENER.open(request, timeout=ANSWER_S) as events:
                    while events.status == 200 and not over.is_set() and events.read1(CHUNK_BYTES):
                        pass
            over.wait(POLL_S)

    def preview(self, video: dict[str, Any], wait: Wait = quiet) -> bytes | None:
        """A JPEG of the latest step, if there is one."""
        if not video["x"].get("preview"):
            return None
        path = f"/v1/videos/{video['id']}/content?variant=preview"
        try:
            return self._ask("GET", path, wait=wait, away_s=0)
        except ServerError:  # the job ended meanwhile
            return None

    def content(self, video: dict[str, Any], wait: Wait = quiet) -> bytes:
        path = f"/v1/videos/{video['id']}/content"
        return self._ask("GET", path, wait=wait, most_bytes=MOST_CLIP_BYTES)

    def cancel(self, video: dict[str, Any]) -> None:
        """Ask once; a server that does not answer goes on with the job."""
        with suppress(ServerError):
            path = f"/v1/videos/{video['id']}/cancel"
            self._ask("POST", path, b"", away_s=0, answer_s=CANCEL_S)

    def limits(self) -> dict[str, Any]:
        return self._object(self._ask("GET", "/v1/limits", away_s=0, answer_s=LIST_S))

    def is_ready(self, wait: Wait = quiet) -> bool:
        try:
            self._ask("GET", "/readyz", wait=wait, away_s=0)
        except ServerError:
            return False
        return True

    @property
    def root(self) -> str:
        """The address with its scheme. Raises ServerError."""
        return root_of(self.address)

    def _request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}
    ) -> Request:
        token = self.token() if callable(self.token) else self.token
        own = {"Authorization": f"Bearer {token}"} if token else {}
        return Request(self.root + path, body, {**headers, **own}, method=method)

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] = {},
        *,
        wait: Wait = quiet,
        away_s: float | None = None,
        absent_s: float | None = None,
        answer_s: float | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> bytes:
        """One answer's body; asks again while the server is away, or for less time while there is
        no connection at all, if `absent_s` says so. Raises ServerError."""
        request, start = self._request(method, path, body, headers), time.monotonic()
        away_s = AWAY_S if away_s is None else away_s
        while True:
            asked = Exchange(request, answer_s or ANSWER_S, most_bytes)
            try:
                asked.run(wait)
            except (InvalidURL, ValueError) as error:
                raise ServerError(f"address: {self.address[:80]!r}: {error}") from None
            except GONE as error:
                reason = str(getattr(error, "reason", None) or error)[:200]
                end = start + (away_s if absent_s is None else min(away_s, absent_s))
            else:
                if asked.status in range(200, 300):
                    return bytes(asked.body)
                if asked.status != 503:
                    raise ServerError(self._sentence(asked))
                reason, end = _message(_json(asked.body)) or "HTTP 503", start + away_s
            if (left_s := end - time.monotonic()) <= 0:
                hint = "is `ltx2rt serve` running?"
                raise ServerError(f"no answer from {self.address}: {reason}; {hint}")
            wait(f"no answer from {self.address} ({reason}); {left_s:.0f} s left")
            time.sleep(POLL_S)

    def _sentence(self, asked: Exchange) -> str:
        """The server's own words, if it has any."""
        if asked.status in range(300, 400) and asked.location:
            to = asked.location[:200]
            return f"{self.address} sends this to {to!r}; give the address that answers itself"
        plain = f"{self.address} answers {asked.status} {asked.reason[:80]}"
        return _message(_json(asked.body)) or plain

    def _object(self, body: bytes) -> dict[str, Any]:
        """Raises ServerError for another answer than a JSON object."""
        if isinstance(found := _json(body), dict):
            return found
        raise ServerError(f"{self.address} is no `ltx2rt serve`: it answers {body[:60]!r}")

    def _video(self, body: bytes) -> dict[str, Any]:
        """Raises ServerError for another answer than a job."""
        found = self._object(body)
        x = found.get("x")
        facts = (x | found) if isinstance(x, dict) else {}
        wrong = [name for name, kinds in VIDEO.items() if type(facts.get(name)) not in kinds]
        if wrong or not re.fullmatch(
            r"[A-Za-z0-9_-]{1,200}", found["id"]
        ):  # it becomes a file's name
            named = wrong[0] if wrong else "id"
            raise ServerError(f"{self.address} is no `ltx2rt serve`: its job has a wrong {named!r}")
        return found


def _json(body: bytes | bytearray) -> Any:
    """The value of an answer, None of another one."""
    with suppress(ValueError, RecursionError):
        return json.loads(body)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _message(answer: Any) -> str:
    """The sentence of an error, "" without one."""
    error = answer.get("error") if isinstance(answer, dict) else None
    text = error.get("message") if isinstance(error, dict) else None
    return text[:2000] if isinstance(text, str) else ""


@dataclass
class Started:
    """`ltx2rt serve` on this machine, which ends with this process."""

    process: subprocess.Popen[bytes]
    server: Server
    log: Path

    def wait(self, say: Wait) -> Server:
        """Return once the server takes jobs. Raises ServerError."""
        end = time.monotonic() + START_S
        while not self.server.is_ready(say):
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

    def serving(self, command: str, model: str, arguments: str, say: Wait) -> Server:
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
    words = [command] if Path(command).is_file() else shlex.split(command)
    plain = len(words) == 1 and Path(words[0]).stem == "ltx2rt"
    if not plain and command != os.environ.get("LTX2RT_COMMAND"):  # it may be a stranger's workflow
        advice = "other commands are taken only from LTX2RT_COMMAND, where ComfyUI starts"
        raise ServerError(f"command: {command!r}, expected `ltx2rt` or its path; {advice}")
    if shutil.which(words[0]) is None:
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
