"""One process: the socket, the application, the supervisor, and how they start and stop
together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ltx2rt.errors import InputError
from ltx2rt.serve.admission import Admission
from ltx2rt.serve.app import UNUSED_S, App
from ltx2rt.serve.board import Board
from ltx2rt.serve.folder import MIN_FREE_BYTES, Folder
from ltx2rt.serve.gate import MAX_REQUESTS, UNREAD_S, Gate, is_local
from ltx2rt.serve.metrics import Metrics
from ltx2rt.serve.options import Serving
from ltx2rt.serve.queue import Queue
from ltx2rt.serve.refusal import invalid
from ltx2rt.serve.supervisor import QueueThread, Supervisor, in_thread
from ltx2rt.serve.webhooks import GIVE_UP_S, Webhooks
from ltx2rt.system import allow_open_files

HEAD_S, IDLE_S, GRACE_S = 10, 75, 2
MAX_SILENT = 500  # connections that ask nothing; the one that does so longest goes first
TERMINATED, INTERRUPTED = 143, 130
BATCH_FREE_BYTES = 10**8  # a batch waits while its disk has less


class Patient(H11Protocol):
    """Ends a connection whose request line and headers take too long, and that was silent for the
    longest time where there are too many."""

    _late: asyncio.TimerHandle | None = None
    _refused = False

    def __init__(self, *args: Any, silent: dict[H11Protocol, None], **how: Any):
        """silent: the connections that ask nothing, in the order of time."""
        super().__init__(*args, **how)
        self.silent = silent

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._sort()
        self._expect()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._late is None and not self._busy:
            self._expect()
        super().data_received(data)
        if self._busy:
            self.silent.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._sort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        self.silent.pop(self, None)
        super().connection_lost(exc)

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _sort(self) -> None:
        self.silent.pop(self, None)
        if not self._busy and not self.transport.is_closing():
            self.silent[self] = None
        if len(self.silent) > MAX_SILENT:
            first = next(iter(self.silent))
            del self.silent[first]
            first.transport.abort()

    def _expect(self) -> None:
        self._late = self.loop.call_later(HEAD_S, self._check)

    def _check(self) -> None:
        self._late = None
        if self.cycle is None or (self.cycle.response_complete and self.conn.trailing_data[0]):
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer, then read on for a while: a connection closed on unread bytes may lose it."""
        body = json.dumps(invalid(msg).body)
        head = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        self.transport.write_eof()
        self._refused = True
        self.loop.call_later(UNREAD_S, self.transport.close)


class Lines(logging.Handler):
    """Writes what uvicorn has to say as lines of the server's own log."""

    def __init__(self, board: Board):
        super().__init__(logging.WARNING)
        self.board = board

    def emit(self, record: logging.LogRecord) -> None:
        self.board.log("connection", message=record.getMessage().strip()[:200])


class HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        """Ours are `serve`'s business."""
        yield


def serve(how: Serving, admission: Callable[[Path], Admission]) -> int:
    """Serve until a signal; the exit status. admission: made once the folder of images is there.
    Raises InputError."""
    check_address(how.flags.host, how.users is not None)
    flag, free = ("--output-dir", BATCH_FREE_BYTES) if how.work else ("--data", MIN_FREE_BYTES)
    folder = Folder(how.flags.data, flag, free, how.flags.queue)
    try:
        folder.clear() if how.work else folder.require_queue()
        sock = bind(how.flags.host, how.flags.port)
        with sock:
            return asyncio.run(_serve(how, sock, folder, admission(folder.inputs)))
    finally:
        folder.remove_folder() if how.work else folder.close()


def check_address(host: str, has_tokens: bool) -> None:
    """Raises InputError."""
    if not has_tokens and not is_local(_in_url(host)):
        raise InputError(
            f"--host: {host} can be reached by others; give --token-file, or leave --host out"
        )


def bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=512)
        # accepted sockets take it over; asyncio does not set it on those of `create_server`
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except (OSError, OverflowError) as error:
        raise InputError(
            f"--port: {host}:{port} cannot be listened on ({error}); choose another"
        ) from None


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _recovered(how: Serving, folder: Folder, board: Board) -> Queue:
    """Open the queue as the last server left it, and sweep the folders of files without a job."""
    queue = Queue(folder.queue, how.flags.max_queue, how.most_of_user, how.flags.user_quota)
    if waiting := queue.keep_events(how.hooks, GIVE_UP_S):
        board.log("webhooks_without_address", count=waiting)
    queue.recover(folder.published)
    if queue.paused():
        board.log("paused")
    kept = [*queue.waiting(), *queue.finished()]
    if unknown := folder.sweep(kept, queue.ids()):
        board.log("unknown_clips", count=len(unknown), first=unknown[0], folder=str(folder.outputs))
    folder.sweep_inputs(kept, UNUSED_S)  # from now on unused ones have this long
    return queue


async def _serve(how: Serving, sock: socket.socket, folder: Folder, admission: Admission) -> int:
    board = Board(how.log)
    store = QueueThread(_recovered(how, folder, board))
    metrics = Metrics(frozenset(str(shape).partition(":")[0] for shape in admission.warm))
    supervisor = Supervisor(
        how.command, store, folder, board, metrics, environments=how.environments,
        lora_folder=admission.lora_folder, step_timeout_s=how.flags.step_timeout,
    )  # fmt: skip
    app = App(how, admission, store, folder, board, supervisor, metrics)
    gate = Gate(app.starlette, how.users, board, metrics, how.flags.allow_origin)
    server = HttpServer(uvicorn.Config(
        gate, http=partial(Patient, silent={}),  # pyrefly: ignore[bad-argument-type]
        ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        timeout_keep_alive=IDLE_S, timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=2**16, proxy_headers=False,
    ))  # fmt: skip
    heard = logging.getLogger("uvicorn.error")
    heard.addHandler(Lines(board))
    heard.propagate = False
    allow_open_files(3 * (MAX_REQUESTS + MAX_SILENT))
    stopped, status, loop = asyncio.Event(), TERMINATED, asyncio.get_running_loop()

    def stop(number: int) -> None:
        nonlocal status
        status = INTERRUPTED if number == signal.SIGINT else TERMINATED
        if stopped.is_set():
            board.log("stopping_now")
            supervisor.hurry()
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    answering = asyncio.create_task(server.serve([sock]))
    replicas = asyncio.create_task(supervisor.run(at_once=how.work is None))
    house = [asyncio.create_task(app.keep_house()), asyncio.create_task(gate.watch())]
    if how.hooks:
        house.append(asyncio.create_task(Webhooks(how.hooks, store, board, metrics).run()))
    stopping = asyncio.create_task(stopped.wait())
    port = sock.getsockname()[1]
    how.announce(url := f"http://{_in_url(how.flags.host)}:{port}/")
    board.log("serving", pid=os.getpid(), port=port)
    working = in_thread(how.work, url) if how.work else None
    try:
        ends: list[Any] = [*filter(None, (answering, replicas, stopping, working))]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if stopped.is_set():
            board.log("draining", at_most_s=how.flags.drain)
            await supervisor.stop(how.flags.drain)
            board.log("stopped")
    finally:
        app.closing, server.should_exit = True, True
        for task in (*house, stopping):
            task.cancel()
        await supervisor.stop(0)
        await asyncio.gather(answering, *house, stopping, return_exceptions=True)
        await app.close()
        store.close()
    if replicas.done() and not replicas.cancelled() and (error := replicas.exception()) is not None:
        raise error
    return working.result() if working and working.done() else status
