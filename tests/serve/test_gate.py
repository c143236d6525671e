"""Who may ask, how much at once, and for how long."""

import asyncio
import contextlib
import time
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from ltx2rt.errors import InputError
from ltx2rt.serve.board import Board
from ltx2rt.serve.gate import MAX_OF_USER, Gate, refused
from ltx2rt.serve.metrics import Metrics
from ltx2rt.serve.options import parse_origin
from ltx2rt.serve.refusal import Refusal
from ltx2rt.serve.server import MAX_SILENT
from ltx2rt.serve.users import User
from tests.serve.serving import SMALL, TOKENS, USERS, wait_for

ANN, BOB, _ = USERS.values()


@pytest.fixture
def server(guarded):
    return guarded


@pytest.fixture
def connect():
    """connect(server, text) -> socket that has sent the text; all are closed in the end."""
    with contextlib.ExitStack() as opened:

        def call(server, text=b""):
            made = opened.enter_context(server.socket(timeout=10))
            made.sendall(text)
            return made

        yield call


def asked(path, user, method="GET", more=""):
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: {user['authorization']}"
    return f"{head}\r\n{more}\r\n".encode()


def as_user(server, user, method="GET", path="/v1/videos", **how):
    return server.http.request(method, path, headers=user, **how)


def test_one_users_streams_leave_room_for_the_others(server, connect):
    streams = [connect(server, asked("/v1/events", ANN)) for _ in range(MAX_OF_USER + 20)]
    answers = [stream.recv(12) for stream in streams]
    assert answers.count(b"HTTP/1.1 200") == MAX_OF_USER
    assert answers.count(b"HTTP/1.1 429") == 20
    assert as_user(server, BOB).status_code == 200
    assert server.http.get("/healthz").status_code == 200
    for stream in streams:
        stream.close()
    wait_for(lambda: as_user(server, ANN).status_code != 429, 30)


def test_large_bodies_at_once_leave_room_for_the_others(monkeypatch):
    """One is read, however long; of a user who sends more the next is refused, not the others'."""
    monkeypatch.setattr("ltx2rt.serve.gate.MAX_BYTES_OF_USER", 1000)
    users = {name: User(name, False) for name in ("ann", "bob")}
    known = SimpleNamespace(of=users.get, tokens=dict)

    async def route(request):
        size = len(await request.body())
        for _ in range(20):  # it is at work
            await asyncio.sleep(0)
        return Response(str(size))

    async def refuse(request, error):
        return await refused(request, error, board)

    board, metrics = Board(lambda *_, **__: None), Metrics(frozenset())
    app = Starlette(routes=[Route("/v1/videos", route, methods=["POST"])])
    app.add_exception_handler(Refusal, refuse)
    gate = Gate(app, known, board, metrics)

    async def ask(*sent):
        transport = httpx.ASGITransport(app=gate)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            asks = [
                client.post("/v1/videos", headers={"authorization": f"bearer {name}"}, content=size * b"a")
                for name, size in sent
            ]  # fmt: skip
            return [(found.status_code, found.text) for found in await asyncio.gather(*asks)]

    assert asyncio.run(ask(("ann", 9000))) == [(200, "9000")]
    first, again, other = asyncio.run(ask(("ann", 900), ("ann", 200), ("bob", 800)))
    assert (first, other) == ((200, "900"), (200, "800"))
    assert again[0] == 503 and "other large requests" in again[1]
    assert asyncio.run(ask(("ann", 900), ("bob", 900)))[1] == (200, "900")  # nothing is left


def test_connections_that_ask_nothing_go_where_there_are_too_many(server, connect):
    silent = [connect(server, b"GET /") for _ in range(MAX_SILENT + 50)]
    # a connection of its own: a client's idle one is among those that go, perhaps while it asks
    assert httpx.get(f"{server.url}/healthz", timeout=5).status_code == 200
    assert as_user(server, BOB).status_code == 200
    with contextlib.suppress(ConnectionResetError):
        assert silent[0].recv(1) == b""
    silent[-1].sendall(b"healthz HTTP/1.1\r\nhost: x\r\n\r\n")
    assert silent[-1].recv(12) == b"HTTP/1.1 200"


def read(stream):
    """All that comes until the other side ends it."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := stream.recv(2**16):
            found += data
    return found


def test_what_is_open_ends_when_its_token_is_revoked(server, connect):
    """Streams of events and clips, a DELETE that waits, a body that comes in parts."""
    segments = {**SMALL, "segment_frames": 17, "num_frames": 33, "overlap": 9}
    made = as_user(server, BOB, "POST", "/v1/videos", json={"prompt": "900:0.02", **segments})
    job = f"/v1/videos/{made.json()['id']}"
    lasting = [
        connect(server, asked("/v1/events", BOB)),
        connect(server, asked(f"{job}/events", BOB)),
        connect(server, asked(f"{job}/stream", BOB)),
        connect(server, asked("/v1/videos", BOB, "POST", "content-length: 900\r\n") + b"{"),
    ]
    kept = connect(server, asked("/v1/events", ANN))
    assert all(one.recv(12) == b"HTTP/1.1 200" for one in (*lasting[:3], kept))
    server.tokens.write_text(TOKENS.replace(" bob-", " another-bob-"))
    begun = time.monotonic()
    ends = [read(one) for one in lasting]
    assert time.monotonic() - begun < 9  # a connection without a token is closed after 10 s
    assert ends[3].startswith(b"HTTP/1.1 401")
    as_user(server, {"authorization": "Bearer another-bob-token-0123456789"}, "DELETE", job)
    assert as_user(server, BOB).status_code == 401
    with pytest.raises(TimeoutError):
        kept.settimeout(0.5)
        while kept.recv(2**16):
            pass


def test_requests_that_a_stop_cuts_off_leave_lines_and_no_traceback(server, connect):
    """The last test: it ends the server."""
    stream = connect(server, asked("/v1/videos", ANN, "POST", "content-length: 900\r\n") + b"{")
    httpx.get(f"{server.url}/healthz")
    assert server.kill(15) == 143
    assert read(stream).startswith(b"HTTP/1.1 503")
    assert "Traceback" not in server.log.read_text()


def test_another_origin_may_ask_where_the_server_names_it():
    """As browsers do: a preflight, then the request with its token."""

    async def route(request):
        return Response(request.state.user)

    board, metrics = Board(lambda *_, **__: None), Metrics(frozenset())
    routes = [Route("/v1/videos", route, methods=["GET", "POST"])]
    page = "http://localhost:5173"
    gate = Gate(Starlette(routes=routes), None, board, metrics, [parse_origin(f"{page}/")])

    async def ask(method, origin, **headers):
        transport = httpx.ASGITransport(app=gate)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, "/v1/videos", headers={"origin": origin, **headers})

    asking = {"access-control-request-method": "POST"}
    found = asyncio.run(ask("OPTIONS", page, **asking))
    assert found.status_code == 204 and found.headers["access-control-allow-origin"] == page
    assert "authorization" in found.headers["access-control-allow-headers"]
    for method in ("GET", "POST"):
        found = asyncio.run(ask(method, page))
        assert found.status_code == 200 and found.headers["access-control-allow-origin"] == page
        assert "access-control-allow-credentials" not in found.headers
    for origin in ("http://localhost:5174", "http://evil.example", "null"):
        for method, how in (("OPTIONS", asking), ("POST", {})):
            found = asyncio.run(ask(method, origin, **how))
            assert found.status_code in (403, 405)
            assert "access-control-allow-origin" not in found.headers
    for wrong in ("*", "localhost:5173", "http://a/b", "ftp://a"):
        with pytest.raises(InputError, match="--allow-origin"):
            parse_origin(wrong)
