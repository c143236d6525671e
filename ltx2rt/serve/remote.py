"""Jobs of a file, made by a server somewhere.

Decides nothing that the server knows: it checks every line before the first is sent, its queue
holds them, and a key for each makes one that is sent again the same job, so that a client which was
killed finds what it had ordered.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ltx2rt.atomic_file import replacing
from ltx2rt.errors import InputError
from ltx2rt.notes import note
from ltx2rt.serve.batch import RETRIED, Line, Results, clashes, digest_of, read, seeded, with_files
from ltx2rt.serve.folder import frames_of
from ltx2rt.serve.queue import COMPLETED, FAILED, failure
from ltx2rt.serve.upload import MAX_BYTES

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
        self, method: str, path: str, body: Any = None, key: str | None = None
    ) -> dict[str, Any]:
        with self._open(method, path, body, key) as answer:
            return json.loads(answer.read())

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
        with (
            replacing(to) as partial,
            self._open("GET", path) as answer,
            partial.open("wb") as file,
        ):
            while chunk := answer.read(CHUNK_BYTES):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def _open(self, method: str, path: str, body: Any = None, key: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = self.headers | ({"idempotency-key": key} if key else {})
        deadline, told = time.monotonic() + self.patience_s, False
        while True:
            try:
                answer = urlopen(
                    Request(f"{self.url}/{path.lstrip('/')}", data, headers, method=method),
                    timeout=TIMEOUT_S,
                )
                self.patience_s = SILENT_S
                return answer
            except HTTPError as error:
                self.patience_s = SILENT_S
                said = error.read().decode(errors="replace")
                if error.code not in (429, 503):
                    raise InputError(_message(said) or f"{method} {path}: {error.code}") from None
                time.sleep(float(error.headers.get("retry-after", AGAIN_S)))
                deadline = time.monotonic() + SILENT_S  # it lives
            except (URLError, OSError) as error:
                if time.monotonic() > deadline:
                    raise InputError(
                        f"--server: {self.url} does not answer ({error}); start it, or wait"
                    ) from None
                if not told:
                    note(f"{self.url} does not answer; trying for {self.patience_s:.0f} s")
                told = True
                time.sleep(min(AGAIN_S, self.patience_s / 4))


def _message(said: str) -> str:
    try:
        return str(json.loads(said)["error"]["message"])
    except (ValueError, KeyError, TypeError):
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
            kept = server.ask("POST", "/v1/videos?check=1", with_files(line.given, sent))["given"]
            found.append((line, seeded(line, kept)))
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
