"""Jobs of a file, made by a server somewhere.

Decides nothing that the server knows: it checks every line before the first is sent, its queue
holds them, and a key for each makes one that is sent again the same job, so that a client which was
killed finds what it had ordered.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ltx2rt.atomic_file import DISK_ERRORS, replacing
from ltx2rt.errors import InputError
from ltx2rt.notes import note
from ltx2rt.serve.batch import RETRIED, Line, Results, clashes, digest_of, read, seeded, with_files
from ltx2rt.serve.folder import frames_of
from ltx2rt.serve.queue import COMPLETED, FAILED, failure
from ltx2rt.serve.upload import MAX_BYTES
from ltx2rt.text_files import parse

T = TypeVar("T")

IN_FLIGHT, POLL_S, AGAIN_S, TIMEOUT_S = 32, 1.0, 5.0, 120.0
# how long a server may not answer: from the start on, and once it has
ABSENT_S, SILENT_S = (15.0, 600.0)
CHUNK_BYTES = 2**20


class RemoteServer:
    """url: of its root. Raises InputError for what it refuses, and when it does not answer for
    ABSENT_S, or, once it has, for SILENT_S."""

    def __init__(self, url: str, token: str | None = None):
        self.patience_s = ABSENT_S
        if not url.startswith(("http://", "https://")):
            raise InputError(f"--server: {url[:80]!r}, expected http://HOST:PORT")
        self.url = url.rstrip("/")
        self.headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {token}"} if token else {}
        )

    def ask(
        self, method: str, path: str, body: Any = None, key: str | None = None, shape: Any = dict
    ) -> dict[str, Any]:
        text = self._exchange(method, path, lambda answer: answer.read(), body, key)
        try:
            return parse(text.decode(), shape)
        except ValueError as error:
            where = f"--server: {self.url}/{path.lstrip('/')}"
            raise InputError(f"{where} gives another answer ({error}); pass a server") from None

    def count(self, given: Mapping[str, Any]) -> int:
        """Number of videos of a job."""
        return int(float(given.get("n", self._usual)))

    @cached_property
    def _usual(self) -> int:
        return self.ask("GET", "/v1/limits")["videos"]["multiple_of"]

    def model(self) -> dict[str, Any]:
        """The server's model as results state it; empty from a server that does not tell."""
        return self.ask("GET", "/v1/models")["data"][0].get("x", {})

    def fetch(self, path: str, to: Path) -> None:
        """An answer's body as a file, whole and on the disk."""
        with replacing(to) as partial:
            self._exchange("GET", path, lambda answer: _save(answer, partial))

    def _exchange(
        self, method: str, path: str, take: Callable[[Any], T], body: Any = None,
        key: str | None = None,
    ) -> T:  # fmt: skip
        """Return what `take` makes of the answer, asking again after one that was cut off."""
        data = None if body is None else json.dumps(body).encode()
        headers = self.headers | ({"idempotency-key": key} if key else {})
        request = Request(f"{self.url}/{path.lstrip('/')}", data, headers, method=method)
        deadline, told = time.monotonic() + self.patience_s, False
        while True:
            try:
                with urlopen(request, timeout=TIMEOUT_S) as answer:
                    self.patience_s = SILENT_S
                    return take(answer)
            except HTTPError as error:
                self.patience_s = SILENT_S
                said = error.read().decode(errors="replace")
                if error.code not in (429, 503):
                    raise InputError(_message(said) or f"{method} {path}: {error.code}") from None
                time.sleep(float(error.headers.get("retry-after", AGAIN_S)))
                deadline = time.monotonic() + SILENT_S  # it lives
            except (OSError, HTTPException) as error:
                if getattr(error, "errno", None) in DISK_ERRORS:
                    raise
                if time.monotonic() > deadline:
                    raise InputError(
                        f"--server: {self.url} does not answer ({error}); start it, or wait"
                    ) from None
                if not told:
                    note(f"{self.url} does not answer; trying for {self.patience_s:.0f} s")
                told = True
                time.sleep(min(AGAIN_S, self.patience_s / 4))


def _save(answer: HTTPResponse, to: Path) -> None:
    """Raises ConnectionError for a body that is cut off, which `read` of a part does not."""
    with to.open("wb") as file:
        shutil.copyfileobj(answer, file, CHUNK_BYTES)
        if answer.length:
            raise ConnectionError(f"{answer.length} bytes are missing")
        file.flush()
        os.fsync(file.fileno())


def _message(said: str) -> str:
    with suppress(ValueError):
        return parse(said, {"error": {"message": str}})["error"]["message"]
    return ""


def admit(
    server: RemoteServer, lines: Sequence[Line], beside: Path
) -> list[tuple[Line, dict[str, Any]]]:
    """Have every line checked; with what is to be sent of it, its files by their digests. Raises
    InputError."""

    def sent(path: str, kind: str) -> dict[str, str]:
        data = read(beside / path, path[:300], MAX_BYTES[kind])
        return {"url": f"data:{kind}/any;base64,{base64.b64encode(data).decode()}"}

    found, wrong = [], []
    for line in lines:
        try:
            asked = with_files(line.given, sent)
            kept = server.ask("POST", "/v1/videos?check=1", asked, shape={"given": dict})
            found.append((line, seeded(line, kept["given"])))
        except InputError as error:
            wrong.append(f"line {line.number} ({line.id}): {error}")
    wrong += clashes((line, int(g["seed"]), server.count(g)) for line, g in found)
    if wrong:
        raise InputError("; ".join(wrong))
    return found


def make(
    server: RemoteServer, jobs: Sequence[tuple[Line, dict[str, Any]]], results: Results,
    retries: int,
    say: Callable[[str], None],
) -> dict[str, int]:  # fmt: skip
    """How many jobs ended with each status; clips and results are where a batch without a server
    puts them."""
    waiting = [
        (line, given, results.failures(line.id, digest_of(given)), retries) for line, given in jobs
    ]
    running: dict[str, tuple[Line, dict[str, Any], int, int]] = {}
    counts: dict[str, int] = {}
    while waiting or running:
        while waiting and len(running) < IN_FLIGHT:
            line, given, attempt, left = waiting.pop(0)
            key = f"{line.id}/{attempt}/{digest_of(given)}"
            running[server.ask("POST", "/v1/videos", given, key)["id"]] = line, given, attempt, left
        time.sleep(POLL_S)
        for id in list(running):
            video = server.ask("GET", f"/v1/videos/{id}")
            if video["status"] not in (COMPLETED, FAILED):
                continue
            line, given, attempt, left = running.pop(id)
            if left and video["error"] and video["error"]["code"] in RETRIED:
                waiting.insert(0, (line, given, attempt + 1, left - 1))
                continue
            status = _keep(server, line, given, video, results)
            counts[status] = counts.get(status, 0) + 1
            say(f"{line.id}: {status}, {len(waiting) + len(running)} left")
    return counts


def _keep(
    server: RemoteServer,
    line: Line,
    given: Mapping[str, Any],
    video: dict[str, Any],
    results: Results,
) -> str:
    status, error, x = video["status"], video["error"], video["x"]
    urls = x["urls"].get("videos", [])
    names = results.names(line.id, x["seed"], len(urls))
    try:
        for name, url in zip(names, urls, strict=bool(urls)):
            server.fetch(url, results.output / name)
        frames = x["urls"].get("frames", [])  # only clips in high dynamic range have them
        for name, url in zip(names, frames, strict=bool(frames)):
            server.fetch(url, results.output / frames_of(name))
        if status == COMPLETED and not urls:
            raise InputError("its file was deleted on the server")
    except InputError as gone:
        status, error = FAILED, failure("expired", str(gone))
    results.keep(
        line.id, status, digest_of(given), names, seed=x["seed"], error=error,
        attempts=x["attempts"],
        run_s=x["run_s"], model=server.model(), stages=x["timings"],
    )  # fmt: skip
    return status
