"""The nodes and their client where no ComfyUI is: its API is a stand-in, the server is real."""

import contextlib
import io
import json
import pickle
import re
import sys
import time
from threading import Thread

import av
import numpy as np
import pytest
import torch

from tests.serve.comfyui_stand_in import (
    NODES,
    ComfyUI,
    Interrupted,
    VideoFromComponents,
    VideoFromFile,
    write,
)
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


@pytest.fixture
def real_server(nodes, server):
    """What the server node returns for one with replicas that have no model."""
    return connection(nodes, server.url)


def clip_of(comfy, name="clip.mp4", frames=24):
    """A VIDEO of a file: a second of 64x64."""
    path = comfy.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, [np.full((64, 64, 3), i * 9, np.uint8) for i in range(frames)], 24)
    return VideoFromFile(str(path))


def frames_in(data):
    with av.open(io.BytesIO(data)) as file:
        return sum(1 for _ in file.decode(video=0))


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


@pytest.mark.parametrize("line, address, sent", [
    ("{}", "http://127.0.0.1:8000", True),
    ("ann {}", "localhost:8000", True),
    ("{}", "http://stranger:8000", None),
    ("ann {}", "https://stranger", None),
    ("http://gpu:8000 {}", "gpu:8000/video/", True),
    ("https://gpu {}", "https://gpu:443", True),
    ("http://gpu:8000 {}", "http://gpu:8001", None),
    ("http://gpu:8000 {}", "https://gpu:8000", None),
    ("http://gpu:8000 {}", "http://gpu.stranger:8000", None),
    ("http://gpu:8000 {}", "http://gpu:8000@stranger", None),
    ("http://gpu:8000 {}", "http://127.0.0.1:8000", None),
    ("http://other:1 another-token\nhttp://gpu:8000 {}", "http://gpu:8000", True),
])  # fmt: skip
@pytest.mark.parametrize("by_file", [False, True])
def test_a_token_goes_to_the_server_that_it_names(
    client, tmp_path, monkeypatch, line, address, sent, by_file
):
    """A stranger's workflow names the stranger's server."""
    text = line.format(TOKEN)
    (tmp_path / "token").write_text(text)
    monkeypatch.setenv("LTX2RT_TOKEN", "" if by_file else text)
    file = str(tmp_path / "token") if by_file else ""
    if sent:
        assert client.read_token(file, address) == TOKEN
    elif not by_file and text.startswith("http://"):
        assert client.read_token(file, address) == ""  # its server may need none
    else:
        with pytest.raises(client.ServerError, match=r"does not name http.* write a line") as error:
            client.read_token(file, address)
        assert TOKEN not in str(error.value)


@pytest.mark.parametrize("command", [
    "sh -c 'touch owned'", "python -m ltx2rt", "ltx2rt; touch owned", "/bin/sh", "", "ltx2rt serve",
])  # fmt: skip
def test_a_workflow_starts_no_other_program(nodes, monkeypatch, command):
    with pytest.raises(nodes.ServerError, match=r"command: .*LTX2RT_COMMAND"):
        nodes.ServerNode.execute("", "", "a-model", command, "")
    monkeypatch.setenv("LTX2RT_COMMAND", "/no/such/ltx2rt")
    with pytest.raises(nodes.ServerError, match="is no program"):
        nodes.ServerNode.execute("", "", "a-model", "/no/such/ltx2rt", "")


def test_the_seconds_that_the_user_sees_are_sent(comfy, nodes):
    """A trimmed VIDEO and one that is made of frames are written first; a file is sent as it is."""
    whole = clip_of(comfy)
    path = whole.get_stream_source()
    name, data = nodes.encoded(whole)
    with open(path, "rb") as file:
        assert (name, data) == ("clip.mp4", file.read())
    trimmed = VideoFromFile(path, start_time=0.25, duration=0.5)
    frames = VideoFromComponents([np.zeros((64, 64, 3), np.uint8)] * 7)
    assert [frames_in(nodes.encoded(one)[1]) for one in (whole, trimmed, frames)] == [24, 12, 7]


def test_a_widget_is_left_out_only_at_a_default_that_says_automatic(nodes):
    given = {"prompt": "x", "seed": 0, "advanced": "", "loras": None, "width": 0, "steps": 0}
    fields, _ = nodes.ReferencesNode.request(given | {"conditioning_attention_strength": 0.0})
    assert fields["conditioning_attention_strength"] == 0.0
    assert not {"width", "steps", "enhance_prompt"} & fields.keys()
    fields, _ = nodes.ContinueNode.request(given | {"extend_frames": 48, "before": False})
    assert fields["extend_frames"] == 48 and "before" not in fields
    fields, _ = nodes.TextNode.request(given | {"pipeline": "default", "enhance_prompt": True})
    assert fields["enhance_prompt"] is True and "pipeline" not in fields


def test_pictures_are_placed_and_a_batch_is_refused(nodes):
    picture, batch = torch.zeros(1, 8, 8, 3), torch.zeros(3, 8, 8, 3)
    fields, uploads = nodes.TextNode.request({"image": picture, "last_frame": picture, "seed": 1})
    assert [one["frame"] for one in fields["images"]] == [0, "last"] and len(uploads) == 2
    for given in ({"image": batch}, {"last_frame": batch}):
        with pytest.raises(nodes.ServerError, match=r"3 pictures in one batch.*Image From Batch"):
            nodes.TextNode.request(given)
    with pytest.raises(nodes.ServerError, match="3 pictures"):
        nodes.ImageNode.execute(batch, "0", 1.0)


def test_a_sheet_is_the_reference_and_a_clip_is_upscaled(comfy, nodes):
    sheet = torch.zeros(1, 8, 8, 3)
    fields, uploads = nodes.ReferencesNode.request({"sheet": sheet, "video_conditioning": None})
    assert fields["pipeline"] == "ic-lora" and "images" not in fields
    assert [(one.field, one.name) for one in uploads] == [("video_conditioning", "sheet.png")]
    fields, uploads = nodes.UpscaleNode.request({"upscale": clip_of(comfy), "prompt": "a fox"})
    assert fields == {"pipeline": "upscale", "prompt": "a fox"}
    assert [one.field for one in uploads] == ["upscale"]


def test_frames_are_read_only_where_they_are_connected(comfy, nodes, real_server, monkeypatch):
    """A minute of 1536x1088 takes 29 GB; a clip that is there is not made again for them."""
    sent, played = [], clip_of(comfy, "made.mp4")
    with open(played.get_stream_source(), "rb") as file:
        data = file.read()
    monkeypatch.setattr(nodes.Server, "content", lambda *about: data)
    monkeypatch.setattr(nodes, "follow", lambda *about: sent.append(about[2]) or about[2])
    task = {"class_type": "LTX2RTText", "inputs": {}}
    given, states = {"prompt": "1:0", "seed": 3, "width": 64, "height": 64, "seconds": 0.3}, []
    for output in (0, 1, 2):
        comfy.running = {"3": task, "4": {"inputs": {"video": ["3", output], "other": 1}}}
        states.append(nodes.TextNode.fingerprint_inputs(**given))
        video, frames, sound, seed = nodes.TextNode.execute(real_server, **given).result
        assert video.get_duration() == 1.0 and seed == 3 and sound is None
        assert (frames is not None) == (output == 1)
    assert len(sent) == 1 and states == [[], [1], [2]]


def test_a_clip_is_saved_as_made(comfy, nodes):
    whole = clip_of(comfy)
    path = whole.get_stream_source()
    with open(path, "rb") as file:
        data = file.read()
    nodes.SaveNode.execute(whole, "video/ltx2rt")
    saved = comfy.folder / "output/video/ltx2rt_00001_.mp4"
    assert saved.read_bytes() == data
    nodes.SaveNode.execute(VideoFromFile(path, duration=0.5), "video/part")
    assert frames_in((comfy.folder / "output/video/part_00001_.mp4").read_bytes()) == 12


def test_lists_are_of_the_servers_that_graphs_have_named(nodes, real_server, server):
    assert "style" in nodes.names("loras")
    pipelines = nodes.names("pipelines")
    assert pipelines[0] == "default" and {"two-stage", "keyframes"} <= {*pipelines}
    assert not {"retake", "a2v", "ic-lora"} & {*pipelines}
    assert nodes.LoraNode.validate_inputs("any") and nodes.TextNode.validate_inputs("any")


def test_a_page_gets_lists_with_the_nodes_and_asks_for_none(nodes, real_server, monkeypatch):
    """A list that the page fetched moved the values of every saved file by two widgets."""
    asked, limits = [], nodes.Server.limits
    monkeypatch.setattr(nodes.Server, "limits", lambda one: asked.append(one) or limits(one))
    for _ in range(2):
        (name,) = [one for one in nodes.LoraNode.define_schema().inputs if one.id == "name"]
        assert "style" in name.how["options"] and "remote" not in name.how
    assert len(asked) == 1  # and not for each node
    monkeypatch.setattr(nodes, "FRESH_S", 0)
    assert "style" in nodes.names("loras") and len(asked) == 2


def test_a_page_does_not_wait_for_a_silent_server(nodes):
    with answering(lambda connection: time.sleep(9)) as silent:
        connection(nodes, silent.url)
        start = time.monotonic()
        assert nodes.names("loras") == nodes.names("loras") == []
        assert time.monotonic() - start < 5


WORKFLOWS = sorted(path.stem for path in (NODES / "workflows").glob("*_api.json"))


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_file_runs(comfy, nodes, real_server, name):
    """Its task on a real server, at a small size; widgets and sockets are the node's."""
    graph = json.loads((NODES / f"workflows/{name}.json").read_text())
    kinds = {
        node.define_schema().node_id: node for node in vars(nodes).values() if has_schema(node)
    }
    (task,) = [one for one in graph.values() if "prompt" in one["inputs"]]
    node, inputs = kinds[task["class_type"]], {**task["inputs"]}
    assert not inputs.keys() - {one.id for one in node.define_schema().inputs}
    stands = {
        "LoadImage": torch.zeros(1, 64, 64, 3), "LoadImageMask": torch.ones(1, 64, 64),
        "LoadVideo": clip_of(comfy, frames=25), "LTX2RTServer": real_server,
        "GetVideoComponents": {"waveform": torch.zeros(1, 2, 48000), "sample_rate": 48000},
        "LTX2RTLoRA": ({"name": "style", "strength": 1.0},),
    }  # fmt: skip
    for key, value in inputs.items():
        inputs[key] = stands[graph[value[0]]["class_type"]] if isinstance(value, list) else value
    comfy.running = {"3": task}
    small = {"width": 64, "height": 64, "seconds": 0.3} if "width" in inputs else {}
    widgets = inputs | small | {"prompt": "1:0"}
    assert node.execute(**widgets).result[1:3] == (None, None)


def has_schema(node):
    return isinstance(node, type) and hasattr(node, "define_schema") and node.__name__ != "Task"


def test_earlier_workflows_still_load(nodes):
    """Widgets stay in their order, new ones come last and may be absent; sockets keep their names."""
    ids = {one.id: one for one in nodes.TextNode.define_schema().inputs}
    old = ["prompt", "negative_prompt", "image", "images", "pipeline", "fps", "width", "height"]
    old += ["seconds", "steps", "seed", "advanced", "loras"]
    assert [name for name in ids if name in old] == old
    assert all(ids[name].optional for name in ids.keys() - {*old, "server"})
