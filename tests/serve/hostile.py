"""Servers that answer anything, for every client of ours."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Thread

WRONG = {
    "id": 5, "status": [], "x": 3, "given": {}, "resolved": {}, "estimate": {}, "data": 5,
    "videos": 1, "error": "x",
}  # fmt: skip


def answer(status: str = "200 OK", body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, f"content-length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def redirect(to: str) -> bytes:
    return answer("302 Found", b"", f"location: {to}")


def busy(retry_after: str, status: str = "503 no") -> bytes:
    return answer(status, b"", f"retry-after: {retry_after}")


def dripping(connection: socket.socket) -> None:
    """A body that never ends, slowly."""
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    for _ in range(600):
        connection.sendall(b"a")
        time.sleep(0.1)


def endless(connection: socket.socket) -> None:
    """A body that never ends, fast."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(10**6):
        connection.sendall(bytes(2**20))


ANSWERS: dict[str, bytes | Callable[[socket.socket], None]] = {
    "text": answer(body=b"hello"),
    "a list": answer(body=b"[]"),
    "an empty object": answer(body=b"{}"),
    "null": answer(body=b"null"),
    "deep": answer(body=b"[" * 10**5 + b"]" * 10**5),
    "no UTF-8": answer(body=b"\xff\xfe{}"),
    "wrong types": answer(body=json.dumps(WRONG).encode()),
    "a path as id": answer(body=b'{"id": "../../x", "status": "queued", "progress": 0, "x": {}}'),
    "no HTTP": b"\0\xff\x1b[2J" * 999 + b"\r\n\r\n",
    "nothing": b"",
    "cut off": b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{",
    "an error that is a list": answer("500 no", b"[1]"),
    "an error without a sentence": answer("400 no", b'{"error": [1]}'),
    "a redirect in circles": redirect("/v1/videos"),
    "a redirect to a file": redirect("file:///etc/passwd"),
    "drip": dripping,
    "endless": endless,
}


@dataclass
class Hostile:
    """url: of a server that sends one answer to everything, and keeps what it was asked."""

    url: str
    asked: list[bytes] = field(default_factory=list)


@contextlib.contextmanager
def answering(reply: bytes | Callable[[socket.socket], None]) -> Iterator[Hostile]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    found = Hostile(f"http://127.0.0.1:{listener.getsockname()[1]}")

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            data = b""
            while b"\r\n\r\n" not in data and (more := connection.recv(2**16)):
                data += more
            found.asked.append(data)
            if callable(reply):
                reply(connection)
            else:
                connection.sendall(reply)

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    thread = Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
