"""The nodes and their client where no ComfyUI is: its API is a stand-in, the server is real."""

import json
import pickle
import sys

import pytest

from tests.serve.comfyui_stand_in import NODES, ComfyUI

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
