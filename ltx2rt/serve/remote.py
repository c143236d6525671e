"""Jobs of a file, made by a server, one somewhere or the batch's own.

Every line is checked before the first is sent. A key for each makes one that is sent again the same
job, so that a client which was killed finds what it had ordered.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from ltx2rt.atomic_file import DISK_ERRORS, replacing
from ltx2rt.errors import InputError
from ltx2rt.notes import note
from ltx2rt.serve.admission import digest_of
from ltx2rt.serve.batch import Line, Results, clashes, seeded, with_files
from ltx2rt.serve.folder import frames_of
from ltx2rt.serve.jobs import COMPLETED, FAILED, failure
from ltx2rt.serve.upload import EXR, IMAGE, MAX_BYTES
from ltx2rt.text_files import parse, read_bytes

T = TypeVar("T")

IN_FLIGHT, POLL_S, AGAIN_S, TIMEOUT_S = 32, 0.5, 5.0, 120.0
AT_ONCE = 4  # lines are checked
RETRIED = ("worker_died", "step_timeout", "internal")  # what another attempt may mend
WINDOW = 64  # lines within which jobs of one shape are made after one another
# how long a server may not answer: from the start on, and once it has
ABSENT_S, SILENT_S = 15.0, 600.0
MOST_WAIT_S = 60.0  # that a busy server may ask for
MOST_BYTES, MOST_CLIP_BYTES, SLOWEST_BYTES_PER_S = 2**26, 2**36, 1000
VIDEO = {
    "id": str, "status": str, "error": ({"code": str, "message": str}, None),
    "x": {
        "seed": int, "attempts": int, "run_s": (float, None), "timings": object,
        "urls": {"videos?": [str], "frames?": [str]},
    },
}  # fmt: skip


class NotThere(InputError):
    """The server has nothing of that name, or not any more."""


class RemoteServer:
    """url: of its root. Raises InputError for what it refuses, and when it does not answer for
    ABSENT_S, or, once it has, for SILENT_S."""

    def __init__(self, url: str, token: str | None = None, own: bool = False):
        """own: it serves this batch only."""
        self.patience_s, self.own = ABSENT_S, own
        self.left = threading.Event()  # set: no thread waits for it any longer
        if not url.startswith(("http://", "https://")):
            raise InputError(f"--server: {url[:80]!r}, expected http://HOST:PORT")
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            headers={"content-type": "application/json"}
            | ({"authorization": f"Bearer {token}"} if token else {}),
            timeout=TIMEOUT_S,
            limits=httpx.Limits(max_keepalive_connections=0),  # a kept one may be closed meanwhile
            verify=ssl.create_default_context(), follow_redirects=True,
            event_hooks={"response": [_stay]},
        )  # fmt: skip

    def ask(
        self, method: str, path: str, body: Any = None, key: str | None = None, shape: Any = dict
    ) -> dict[str, Any]:
        """Return the object of an answer, which is of that shape. Raises InputError."""
        text = self._exchange(method, path, _read, body, key)
        try:
            return parse(text, shape)
        except ValueError as error:
            raise InputError(
                f"--server: {self.url}/{path.lstrip('/')} gives another answer ({error}); pass "
                "a server"
            ) from None

    def count(self, given: Mapping[str, Any]) -> int:
        """Number of videos of a job."""
        return int(float(given.get("n", self._usual)))

    @cached_property
    def _usual(self) -> int:
        shape = {"videos": {"multiple_of": int}}
        return self.ask("GET", "/v1/limits", shape=shape)["videos"]["multiple_of"]

    def model(self) -> dict[str, Any]:
        """The server's model as results state it; empty from a server that does not tell."""
        models = self.ask("GET", "/v1/models", shape={"data": [{"x?": dict}]})["data"]
        return models[0].get("x", {}) if models else {}

    @cached_property
    def _loras(self) -> dict[str, str | None]:
        shape = {"data": [{"id": str, "x?": {"digest?": (str, None)}}]}
        found = self.ask("GET", "/v1/loras", shape=shape)["data"]
        return {one["id"]: one.get("x", {}).get("digest") for one in found}

    def loras_of(self, given: Mapping[str, Any]) -> list[list[str | None]]:
        """Name and digest of each LoRA that a job names; None from a server that does not tell."""
        named = [lora["name"] for lora in given.get("loras", ())]
        return [[name, self._loras.get(name)] for name in named]

    def fetch(self, path: str, to: Path) -> None:
        """An answer's body as a file, whole and on the disk."""
        with replacing(to) as whole:
            self._exchange("GET", path, partial(_save, to=whole))

    def _exchange(
        self, method: str, path: str, take: Callable[[Any], T], body: Any = None,
        key: str | None = None,
    ) -> T:  # fmt: skip
        """Return what `take` makes of the answer, asking again after one that was cut off."""
        headers = {"idempotency-key": key} if key else {}
        data = None if body is None else json.dumps(body)  # httpx's own has no half surrogates
        url = f"{self.url}/{path.lstrip('/')}"
        deadline, told = time.monotonic() + self.patience_s, False
        while True:
            try:
                with self._http.stream(method, url, content=data, headers=headers) as answer:
                    self.patience_s = SILENT_S
                    if answer.is_success:
                        return take(answer)
                    text = _message(_read(answer)) or f"{method} {path}: {answer.status_code}"
                if answer.status_code not in (429, 503):
                    raise (NotThere if answer.status_code in (404, 410) else InputError)(text)
                if self.left.wait(retry_after_s(answer.headers.get("retry-after", ""))):
                    raise InputError(f"--server: {self.url} is busy; run it again")
                deadline = time.monotonic() + SILENT_S  # it lives
            except (OSError, httpx.HTTPError, httpx.InvalidURL) as error:
                if getattr(error, "errno", None) in DISK_ERRORS:
                    raise
                if self.left.is_set() or time.monotonic() > deadline:
                    raise InputError(
                        f"--server: {self.url} does not answer ({error}); start it, or wait"
                    ) from None
                if not told:
                    note(f"{self.url} does not answer; trying for {self.patience_s:.0f} s")
                told = True
                self.left.wait(min(AGAIN_S, self.patience_s / 4))


def retry_after_s(text: str) -> float:
    """Return the seconds that `retry-after` asks for, as a number or a date (RFC 9110, 10.2.3);
    within POLL_S and MOST_WAIT_S."""
    try:
        asked_s = float(text)
    except ValueError:
        try:
            asked_s = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError):
            asked_s = AGAIN_S
    return max(POLL_S, min(MOST_WAIT_S, asked_s))  # min gives MOST_WAIT_S for nan


def _stay(answer: httpx.Response) -> None:
    """Refuse a redirect to another host or port, which would get the user's files; https in place
    of http is the same host. Raises InputError."""
    if not answer.has_redirect_location:
        return
    to = answer.url.join(answer.headers["location"])
    secured = (answer.url.scheme, to.scheme) == ("http", "https") and to.port is None
    same = (answer.url.scheme, answer.url.port) == (to.scheme, to.port)
    if to.host != answer.url.host or not (same or secured):
        raise InputError(
            f"--server: {answer.url.copy_with(path='/', query=None)} sends this to "
            f"{str(to)[:200]!r}; name the server that answers itself"
        )


def _chunks(answer: httpx.Response, most_bytes: int) -> Iterator[bytes]:
    """Yield the parts of a body. Raises InputError for a longer one, and httpx's timeout for one
    that comes more slowly than SLOWEST_BYTES_PER_S."""
    start, size = time.monotonic(), 0
    for chunk in answer.iter_bytes():
        size += len(chunk)
        if size > most_bytes:
            raise InputError(f"--server: an answer of more than {most_bytes} bytes; pass a server")
        if time.monotonic() - start > TIMEOUT_S + size / SLOWEST_BYTES_PER_S:
            raise httpx.ReadTimeout(f"{size} bytes in {TIMEOUT_S:.0f} s")
        yield chunk


def _read(answer: httpx.Response) -> str:
    return b"".join(_chunks(answer, MOST_BYTES)).decode(errors="replace")


def _save(answer: httpx.Response, to: Path) -> None:
    with to.open("wb") as file:
        file.writelines(_chunks(answer, MOST_CLIP_BYTES))
        file.flush()
        os.fsync(file.fileno())


def _message(text: str) -> str:
    with suppress(ValueError):
        return parse(text, {"error": {"message": str}})["error"]["message"]
    return ""


@dataclass(frozen=True)
class Order:
    """A line that the server has checked. given: all that it asks for, files by their digests, with
    a seed. shape: LoRAs and work; jobs of equal shape run the fastest one after another."""

    line: Line
    given: dict[str, Any]
    shape: str

    @property
    def digest(self) -> str:
        return digest_of(self.given)

    def body(self, beside: Path) -> dict[str, Any]:
        """The request, with its files: the server forgets those of a check after a while."""
        return with_files(self.line.given, partial(_sent, beside)) | {"seed": self.given["seed"]}


def _sent(beside: Path, path: str, kind: str) -> dict[str, str]:
    data = read_bytes(beside / path, MAX_BYTES[EXR if kind == IMAGE else kind])
    return {"url": f"data:{kind}/any;base64,{base64.b64encode(data).decode()}"}


def admit(server: RemoteServer, lines: Sequence[Line], beside: Path) -> list[Order]:
    """Have every line checked. beside: where paths of files begin. Raises InputError."""

    def checked(line: Line) -> tuple[Order, int, int] | str:
        """The order, its seed and its number of videos."""
        shape = {"given": {"loras?": [{"name": str}]}, "resolved": dict, "estimate": dict}
        try:
            asked = with_files(line.given, partial(_sent, beside))
            kept = server.ask("POST", "/v1/videos?check=1", asked, shape=shape)
            like = json.dumps([kept["resolved"].get("loras"), kept["estimate"].get("work_tflop")])
            order = Order(line, seeded(line, kept["given"]), like)
            return order, int(order.given["seed"]), server.count(order.given)
        except (ValueError, TypeError) as error:
            return f"line {line.number} ({line.id}): {error}"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            found = list(pool.map(checked, lines))
        except BaseException:  # a signal: the pool's threads end first
            server.left.set()
            raise
    fine = [one for one in found if not isinstance(one, str)]
    wrong = [one for one in found if isinstance(one, str)]
    wrong += clashes((order.line, seed, count) for order, seed, count in fine)
    if wrong:
        raise InputError("; ".join(wrong))
    return [order for order, *_ in fine]


def in_order(orders: Sequence[Order]) -> Iterator[Order]:
    """Jobs of one shape after one another, within a window."""
    for start in range(0, len(orders), WINDOW):
        yield from sorted(orders[start : start + WINDOW], key=lambda order: order.shape)


def make(
    server: RemoteServer, orders: Sequence[Order], results: Results, beside: Path, retries: int,
    say: Callable[[str], None], facts: Mapping[str, Mapping[str, Any]],
) -> dict[str, int]:  # fmt: skip
    """Number of jobs that ended with each status. facts: more that a result states, by id."""
    waiting = [(o, results.failures(o.line.id, o.digest), retries) for o in in_order(orders)]
    running: dict[str, tuple[Order, int, int]] = {}
    counts, start = dict[str, int](), time.monotonic()
    while waiting or running:
        while waiting and len(running) < IN_FLIGHT:
            order, attempt, left = waiting.pop(0)
            key = f"{order.line.id}/{attempt}/{order.digest}"
            job = server.ask("POST", "/v1/videos", order.body(beside), key, VIDEO)
            running[job["id"]] = order, attempt, left
        time.sleep(POLL_S)
        for id in list(running):
            try:
                video: dict[str, Any] = server.ask("GET", f"/v1/videos/{id}", shape=VIDEO)
            except NotThere:  # somebody deleted it
                x = {"attempts": 0, "run_s": None, "timings": None, "urls": {}}
                x |= {"seed": int(running[id][0].given["seed"])}
                error = failure("expired", "it was deleted on the server")
                video = {"id": id, "status": FAILED, "error": error, "x": x}
            if video["status"] not in (COMPLETED, FAILED):
                continue
            order, attempt, left = running.pop(id)
            if left and video["error"] and video["error"]["code"] in RETRIED:
                waiting.insert(0, (order, attempt + 1, left - 1))
                continue
            status = _keep(server, order, video, results, facts[order.line.id])
            if server.own:
                with suppress(NotThere):
                    server.ask("DELETE", f"/v1/videos/{id}")
            counts[status] = counts.get(status, 0) + 1
            more = len(waiting) + len(running)
            left_s = (time.monotonic() - start) / sum(counts.values()) * more
            say(f"{order.line.id}: {status}, {more} left, about {left_s:.0f} s")
    return counts


def _keep(
    server: RemoteServer, order: Order, video: dict[str, Any], results: Results,
    facts: Mapping[str, Any],
) -> str:  # fmt: skip
    status, error, x = video["status"], video["error"], video["x"]
    urls = x["urls"].get("videos", [])
    names = results.names(order.line.id, x["seed"], len(urls))
    try:
        frames = x["urls"].get("frames", [])  # only clips in high dynamic range have them
        files = [*zip(names, urls, strict=bool(urls))]
        files += zip(map(frames_of, names), frames, strict=bool(frames))
        for name, url in files:
            server.fetch(url, results.output / name)
        if status == COMPLETED and not urls:
            raise InputError("its file was deleted on the server")
    except InputError as gone:
        status, error = FAILED, failure("expired", str(gone))
    results.keep(
        order.line.id, status, order.digest, names, seed=x["seed"], error=error,
        attempts=x["attempts"], run_s=x["run_s"], stages=x["timings"], **facts,
    )  # fmt: skip
    return status
