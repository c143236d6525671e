"""The end of a job reaches its user's address, signed, also when that is down for a while."""

import asyncio
import base64
import contextlib
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import openai
import pytest

from ltx2rt.errors import InputError
from ltx2rt.serve import queue as queue_module
from ltx2rt.serve import webhooks
from ltx2rt.serve.board import Board
from ltx2rt.serve.jobs import NO_JOB
from ltx2rt.serve.metrics import Metrics
from ltx2rt.serve.queue import Queue
from ltx2rt.serve.supervisor import QueueThread
from tests.serve.serving import TOKENS, USERS, wait_for

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()


class Receiver(HTTPServer):
    """Answers with `statuses`, one after another, the last one for ever."""

    def __init__(self, *statuses):
        super().__init__(("127.0.0.1", 0), Answer)
        self.statuses, self.got = list(statuses), []
        self.url = f"http://127.0.0.1:{self.server_port}/hook"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        self._thread.start()

    def __exit__(self, *_):
        self.shutdown()
        self._thread.join()
        self.server_close()


class Answer(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        self.server.got.append((self.path, dict(self.headers), body))
        statuses = self.server.statuses
        status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        self.send_response(status)
        self.send_header("location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_):
        pass


def unwrapped(got):
    """The event as OpenAI's client reads it, which checks its signature."""
    _, headers, body = got
    with openai.OpenAI(api_key="none") as client:
        return client.webhooks.unwrap(body, headers, secret=SECRET)


def ended(queue, status="completed", user="ann"):
    job = queue.add(user, "d", {"prompt": "p"}, NO_JOB)
    queue.claim()
    queue.finish(job.id, 1, status, result={"file": "f"})
    return job.id


@pytest.fixture
def hook(monkeypatch, tmp_path):
    """hook(receiver, rounds) sends what is due so many times; its `queue` is in a file."""
    now, right = [0.0], time.monotonic
    monkeypatch.setattr(queue_module.time, "monotonic", lambda: now[0] + right())
    file = tmp_path / "hooks"

    class Hooks:
        def __init__(self):
            self.queue, self.lines = Queue(tmp_path / "jobs.db"), []
            self.queue.keep_events(["ann"])

        def reopen(self):
            self.queue.close()
            self.queue = Queue(tmp_path / "jobs.db")

        def later(self, seconds):
            now[0] += seconds

        def send(self, receiver):
            file.write_text(f"# addresses\n\nann {receiver.url} {SECRET}\n")
            hooks = webhooks.read_hooks(file)
            self.queue.keep_events(hooks)
            log = Board(lambda event, **facts: self.lines.append(facts["outcome"]))
            sender = webhooks.Webhooks(hooks, QueueThread(self.queue), log, Metrics())

            async def once():
                while due := self.queue.due():
                    await sender.deliver(due[0])

            asyncio.run(once())
            return self.lines.pop() if self.lines else None

    made = Hooks()
    yield made
    made.queue.close()


def test_openais_client_reads_the_event_of_each_end(hook):
    with Receiver(200) as receiver:
        for status in ("completed", "failed", "cancelled"):
            id = ended(hook.queue, status)
            assert hook.send(receiver) == "delivered"
            path, headers, body = receiver.got.pop()
            event = unwrapped((path, headers, body))
            kind = "completed" if status == "completed" else "failed"
            assert (event.type, event.data.id) == (f"video.{kind}", id)
            with pytest.raises(openai.InvalidWebhookSignatureError):  # it is of the body
                unwrapped((path, headers, body.replace(kind, "elsewhere")))
        assert hook.send(receiver) is None and receiver.got == []
        id = hook.queue.add("ann", "d", {}, {}).id
        for _ in range(2):
            hook.queue.cancel(id)
        assert [(event.job, event.kind) for event in hook.queue.due()] == [(id, "failed")]
        hook.queue.sent(hook.queue.due()[0].id, None)
        ended(hook.queue, user="bob")  # no address of bob's is known
        assert hook.send(receiver) is None


def test_an_event_waits_for_an_address_that_fails_also_over_a_restart(hook):
    ended(hook.queue)
    with Receiver(500, 302, 200) as receiver:
        assert hook.send(receiver) == "failed" and hook.send(receiver) is None
        hook.later(webhooks.WAITS_S[0])
        assert hook.send(receiver) == "failed"  # a redirect is not followed
        hook.reopen()
        assert hook.send(receiver) is None
        hook.later(webhooks.WAITS_S[1])
        assert hook.send(receiver) == "delivered"
    assert [path for path, *_ in receiver.got] == ["/hook"] * 3
    assert len({json.loads(body)["id"] for *_, body in receiver.got}) == 1


def test_events_are_dropped_when_nobody_takes_them(hook, unused_address):
    ended(hook.queue)
    with Receiver(410) as receiver:
        assert hook.send(receiver) == "dropped" and hook.queue.due() == []
    ended(hook.queue)
    assert hook.send(SimpleNamespace(url="http://a..b/hook")) == "failed"  # no resolver takes it
    assert hook.queue.due() == []
    hook.later(webhooks.WAITS_S[0])
    assert hook.send(unused_address) == "failed"
    hook.later(webhooks.GIVE_UP_S + 1)
    assert hook.send(unused_address) == "dropped" and hook.queue.due() == []
    ended(hook.queue)
    assert hook.queue.keep_events(["bob"], webhooks.GIVE_UP_S) == 1
    assert hook.queue.due() == []  # but the event waits for a line
    assert hook.queue.keep_events(["ann"], webhooks.GIVE_UP_S) == 0 and hook.queue.due()
    hook.later(webhooks.GIVE_UP_S + 1)
    assert hook.queue.keep_events(["bob"], webhooks.GIVE_UP_S) == 0
    hook.queue.keep_events(["ann"])
    assert hook.queue.due() == []


class Stalling(Receiver):
    """Never ends an answer: sends a byte of its head now and then, or nothing."""

    def __init__(self, every_s):
        super().__init__(200)
        self.every_s, self.ended = every_s, threading.Event()
        self.RequestHandlerClass = Stall

    def __exit__(self, *_):
        self.ended.set()
        super().__exit__()


class Stall(Answer):
    def do_POST(self):
        self.server.got.append(self.path)
        with contextlib.suppress(OSError):
            while not self.server.ended.wait(self.server.every_s):
                self.wfile.write(b"H")


def test_a_receiver_that_does_not_end_its_answer_holds_up_nobody(start, tmp_path):
    """Neither other users' events, nor anything that the server is asked, nor its end."""
    hooks, (ann, bob, eve) = tmp_path / "hooks", USERS.values()
    with Stalling(0.1) as stalling, Stalling(60) as silent, Receiver(200) as receiver:
        (tmp_path / "tokens").write_text(TOKENS)
        lines = ("ann", stalling), ("eve", silent), ("*", receiver)
        hooks.write_text("".join(f"{name} {to.url} {SECRET}\n" for name, to in lines))
        server = start("--webhooks", hooks, "--token-file", tmp_path / "tokens")
        for user in (ann, eve) * 6:
            made = server.post(headers=user)
            server.http.post(f"/v1/videos/{made.json()['id']}/cancel", headers=user)
        made = server.post(headers=bob)
        wait_for(lambda: receiver.got)
        assert unwrapped(receiver.got[0]).data.id == made.json()["id"]
        assert (len(stalling.got), len(silent.got)) == (1, 1)  # one at a time
        assert server.http.get("/readyz", timeout=5).status_code == 200
        told = wait_for(lambda: server.lines("webhook"))
        assert told[0]["outcome"] == "delivered"
        assert "ltx2rt_webhooks_total" in server.http.get("/metrics", headers=eve).text
        assert server.http.delete(f"/v1/videos/{made.json()['id']}", headers=bob).is_success
        assert server.kill(15) == 143


def test_an_exchange_ends_however_slowly_its_answer_comes(hook, monkeypatch):
    monkeypatch.setattr(webhooks, "ANSWER_S", 0.3)
    ended(hook.queue)
    before = threading.active_count()
    with Stalling(0.1) as stalling:
        assert hook.send(stalling) == "failed"
    wait_for(lambda: threading.active_count() <= before)  # the threads of both ends are over


@pytest.fixture
def unused_address():
    with Receiver(200) as receiver:
        pass
    return receiver  # closed


@pytest.mark.parametrize("line, said", [
    ("ann http://a/b", "2 words"),
    (f"ann ftp://a/b {SECRET}", "expected http://HOST"),
    (f"ann http:///b {SECRET}", "expected http://HOST"),
    (f"ann http://a:99999/b {SECRET}", "expected http://HOST"),
    (f"ann http://me:word@a/b {SECRET}", "has a user name"),
    (f"ann http://a/b\x07 {SECRET}", "write them as %XX"),
    (f"ann http://b\u00fccher.de/b {SECRET}", "xn--"),
    ("ann http://a/b whsec_c2hvcnQ=", "24 to 64 random bytes"),
    (f"ann http://a/b {SECRET[6:]}", "24 to 64 random bytes"),
    (f"ann http://a/b {SECRET}\nann http://a/c {SECRET}", "names ann again"),
    ("# nobody", "names no address"),
])  # fmt: skip
def test_a_wrong_file_is_refused(line, said, tmp_path):
    (tmp_path / "hooks").write_text("\ufeff" + line)
    with pytest.raises(InputError, match=said) as refused:
        webhooks.read_hooks(tmp_path / "hooks")
    assert "\n" not in str(refused.value) and os.fspath(tmp_path) in str(refused.value)
