"""The nodes and their client where no ComfyUI is: its API is a stand-in, the server is real."""

import contextlib
import json
import pickle
import re
import sys
import time
from threading import Thread

import pytest

from tests.serve.comfyui_stand_in import NODES, ComfyUI, Interrupted
from tests.serve.hostile import ANSWERS, answer, answering, redirect
from tests.serve.serving import SMALL, wait_for

TOKEN = "a-token-of-sixteen-characters"


@pytest.fixture
def comfy(tmp_path, monkeypatch):
    monkeypatch.delenv("LTX2RT_TOKEN", raising=False)
    before = set(sys.modules)
    yield ComfyUI(tmp_path / "comfyui")
    for name in sys.modules.keys() - before:
        if name.partition(".")[0] in (
            "comfy",
            "comfy_api",
            "folder_paths",
            "ltx2rt_nodes",
            "server",
        ):
            del sys.modules[name]


@pytest.fixture
def nodes(comfy):
    return comfy.nodes()


def connection(nodes, address="http://127.0.0.1:8000", token="", model=""):
    """What the server node returns."""
    (found,) = nodes.ServerNode.execute(address, token, model, "ltx2rt", "").result
    return found


def test_a_token_is_in_nothing_that_a_node_returns(nodes, tmp_path, monkeypatch):
    (tmp_path / "file").write_text(f"# mine\nann {TOKEN}\n")
    (tmp_path / "alone").write_text(f"{TOKEN}\n")
    monkeypatch.setenv("LTX2RT_TOKEN", TOKEN)
    for widget in (str(tmp_path / "file"), str(tmp_path / "alone"), ""):
        server = connection(nodes, token=widget)
        assert server._request("GET", "/").get_header("Authorization") == f"Bearer {TOKEN}"
        assert TOKEN not in repr(server)
        assert TOKEN.encode() not in pickle.dumps(server)


@pytest.mark.parametrize("content", [None, "", "# ann\n", "ann tökenökenökenöken\n"])
def test_a_token_in_the_widget_is_refused_and_never_repeated(nodes, tmp_path, content):
    """Workflows of earlier versions hold one in this widget."""
    widget = TOKEN
    if content is not None:
        (tmp_path / "file").write_text(content)
        widget = str(tmp_path / "file")
    with pytest.raises(nodes.ServerError, match=r"token file: .*") as error:
        connection(nodes, token=widget)
    assert TOKEN not in str(error.value) and "öken" not in str(error.value)
    assert content is not None or "LTX2RT_TOKEN" in str(error.value)


def test_no_workflow_file_holds_a_token(nodes):
    """The widget keeps its name and place, so that earlier files load: there it holds ""."""
    widgets = [one.id for one in nodes.ServerNode.define_schema().inputs]
    assert widgets == ["address", "token", "model", "command", "arguments"]
    for path in (NODES / "workflows").glob("*.json"):
        graph = json.loads(path.read_text())
        if path.stem.endswith("_api"):
            (values,) = [n["inputs"] for n in graph.values() if n["class_type"] == "LTX2RTServer"]
            assert list(values) == widgets and values["token"] == ""
        else:
            (node,) = [n for n in graph["nodes"] if n["type"] == "LTX2RTServer"]
            assert node["widgets_values"] == ["http://127.0.0.1:8000", "", "", "ltx2rt", ""]


JOB = {"id": "v", "status": "queued"}
CALLS = {
    "send": lambda server: server.send({"prompt": "x"}, []),
    "limits": lambda server: server.limits(),
    "follow": lambda server: list(server.follow(JOB)),
    "cancel": lambda server: server.cancel(JOB),
    "content": lambda server: server.content(JOB),
}


@pytest.fixture
def client(nodes, monkeypatch):
    """The nodes' client, with little patience."""
    found = sys.modules["ltx2rt_nodes.client"]
    limits = {"AWAY_S": 0.3, "ANSWER_S": 0.5, "POLL_S": 0.02, "CANCEL_S": 1.0}
    for name, value in limits.items() | {("MOST_CLIP_BYTES", 2**24)}:
        monkeypatch.setattr(found, name, value)
    return found


@pytest.mark.parametrize("name", ANSWERS)
def test_a_hostile_answer_is_a_sentence(client, name):
    with answering(ANSWERS[name]) as hostile:
        server = client.Server(hostile.url, TOKEN)
        for call in CALLS.values():
            start = time.monotonic()
            try:
                call(server)
            except client.ServerError as error:
                assert str(error).isprintable() and TOKEN not in str(error)
            assert time.monotonic() - start < 5


def test_a_redirect_gets_no_token(client):
    """Another host, port or scheme may be a stranger's."""
    with answering(answer(body=b"{}")) as other, answering(redirect(other.url)) as first:
        server = client.Server(first.url, TOKEN)
        for call in CALLS.values():
            with contextlib.suppress(client.ServerError):
                call(server)
        with pytest.raises(client.ServerError, match=f"sends this to '{other.url}'"):
            server.limits()
        wait_for(lambda: any(b"/events" in one for one in first.asked))
    assert not other.asked and TOKEN.encode() in first.asked[0]


@pytest.mark.parametrize("address, root", [
    ("127.0.0.1:8000", "http://127.0.0.1:8000"),
    (" https://here/video/ ", "https://here/video"),
    ("file:///etc/passwd", None),
    ("http://", None),
    ("http://a b", None),
    ("http://höst", None),
])  # fmt: skip
def test_an_address_may_lack_its_scheme(client, address, root):
    if root:
        assert client.Server(address).root == root
    else:
        with pytest.raises(client.ServerError, match="address: "):
            client.Server(address).limits()


@pytest.mark.parametrize("address", ["http://a:b", "http://127.0.0.1:99999", "http://[::1"])
def test_a_wrong_port_is_refused_at_once(client, monkeypatch, address):
    monkeypatch.setattr(client, "AWAY_S", 60)
    with pytest.raises(client.ServerError, match="address"):
        client.Server(address).send({}, [])


def test_a_wait_for_a_server_says_so_and_ends_with_cancel(comfy, nodes, client, monkeypatch):
    """Before, 120 s without a word, deaf to Cancel."""
    monkeypatch.setattr(client, "AWAY_S", 60)
    server = client.Server("127.0.0.1:9")
    node, ended = nodes.TextNode, []

    def task():
        try:
            node.execute(server, prompt="fox", seed=1)
        except Interrupted:
            ended.append(True)

    thread = Thread(target=task)
    thread.start()
    wait_for(lambda: any("no answer from 127.0.0.1:9" in line for line in comfy.said))
    assert re.search(r"; \d+ s left$", comfy.said[-1])
    comfy.cancelled = True
    thread.join(5)
    assert ended == [True]


def test_cancel_ends_the_wait_for_a_silent_server(comfy, nodes, client, monkeypatch):
    monkeypatch.setattr(client, "ANSWER_S", 60)
    comfy.cancelled = True
    with answering(lambda connection: time.sleep(9)) as silent, pytest.raises(Interrupted):
        nodes.TextNode.execute(client.Server(silent.url), prompt="fox", seed=1)


def test_a_task_is_sent_followed_and_fetched(client, server, monkeypatch):
    monkeypatch.setattr(client, "ANSWER_S", 30)
    monkeypatch.setattr(client, "AWAY_S", 30)
    sent = client.Server(server.url).send({"prompt": "2:0.01", **SMALL}, [])
    *_, video = client.Server(server.url).follow(sent)
    assert video["status"] == "completed"
    assert client.Server(server.url).content(video) == server.content(sent["id"]).content
