"""The nodes in a real ComfyUI without a screen: COMFYUI_DIR is its checkout, COMFYUI_PYTHON a Python
that can run it."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path

import av
import httpx
import psutil
import pytest

from tests.serve.serving import wait_for

ROOT = Path(__file__).parents[1]
FOLDER = os.environ.get("COMFYUI_DIR")
MODEL = ROOT / "examples/tiny-trained"
TOKEN = "a-token-of-sixteen-characters"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="COMFYUI_DIR names no checkout of ComfyUI"),
]


def ask(address, body=None):
    answer = httpx.request("POST" if body else "GET", address, json=body, timeout=30)
    assert answer.is_success, answer.text
    return answer.json() if answer.content else None


def until(condition, seconds=120):
    """The first value of the condition that is true, once its server answers."""

    def found():
        with contextlib.suppress(httpx.HTTPError):
            return condition()

    return wait_for(found, seconds)


@contextlib.contextmanager
def running(words, folder, name, **how):
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, **how)
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """ComfyUI's folders, with the nodes, a clip and a picture."""
    base = tmp_path_factory.mktemp("comfyui")
    for name in ("custom_nodes", "input", "output", "models"):
        (base / name).mkdir()
    (base / "custom_nodes/ltx2rt").symlink_to(ROOT / "examples/comfyui")
    words = "generate --backend cuda --device cpu --width 128 --height 128 --num-frames 25".split()
    words += ["--model", MODEL, "--prompt", "a red circle grows", "--seed", "1"]
    words += ["--output", base / "input/clip.mp4"]
    subprocess.run([sys.executable, "-m", "ltx2rt", *words], check=True, cwd=ROOT)
    with av.open(str(base / "input/clip.mp4")) as file:
        next(file.decode(video=0)).to_image().save(base / "input/example.png")
    return base


@pytest.fixture(scope="module")
def server(folder):
    """The server's address, and a function that starts it again after it was killed."""
    port = free_port()
    (tokens := folder / "tokens").write_text(f"ann {TOKEN}\n")
    (folder / "token").write_text(f"{TOKEN}\n")
    tokens.chmod(0o600)
    words = [
        sys.executable, "-m", "ltx2rt", "serve", "--backend", "cuda", "--device", "cpu", "--model", MODEL,
        "--port", str(port), "--token-file", tokens, "--data", folder / "data",
    ]  # fmt: skip
    with contextlib.ExitStack() as processes:

        def start():
            process = processes.enter_context(running(words, folder, "serve", cwd=ROOT))
            until(lambda: httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=9).is_success)
            return process

        yield f"http://127.0.0.1:{port}", start


@pytest.fixture(scope="module")
def comfy(folder):
    port = free_port()
    words = [
        os.environ.get("COMFYUI_PYTHON", sys.executable), "main.py", "--cpu", "--disable-auto-launch",
        "--port", str(port), "--base-directory", folder,
    ]  # fmt: skip
    with running(words, folder, "comfyui", cwd=FOLDER):
        address = f"http://127.0.0.1:{port}"
        until(lambda: ask(f"{address}/system_stats"))
        yield address


class Queue:
    """Workflows of a ComfyUI, sent to one server."""

    def __init__(self, comfy, address, folder):
        self.comfy, self.address, self.folder = comfy, address, folder

    def send(self, name, **changed):
        """changed: widgets of the workflow's task, or of its server node."""
        graph = json.loads((ROOT / f"examples/comfyui/workflows/{name}_api.json").read_text())
        own = {"address": self.address, "token": str(self.folder / "token")} | changed
        for node in graph.values():
            if node["class_type"].startswith("LTX2RT"):
                node["inputs"] |= {key: own[key] for key in own if key in node["inputs"]}
        return ask(f"{self.comfy}/prompt", {"prompt": graph})["prompt_id"]

    def ended(self, job):
        """Status, the red node's message or "", and the files."""
        found = until(lambda: ask(f"{self.comfy}/history/{job}"), 400)[job]
        messages = dict(found["status"]["messages"])
        failed = messages.get("execution_error", {}).get("exception_message", "").strip()
        files = [file for out in found["outputs"].values() for file in out.get("images", ())]
        paths = [self.folder / "output" / file["subfolder"] / file["filename"] for file in files]
        return found["status"]["status_str"], failed, paths, messages


@pytest.fixture(scope="module")
def queue(comfy, server, folder):
    server[1]()
    return Queue(comfy, server[0], folder)


def shape(path):
    with av.open(str(path)) as file:
        frames = [frame for frame in file.decode(video=0)]
        sound = file.streams.audio
        return len(frames), frames[0].width, frames[0].height, bool(sound)


@pytest.mark.parametrize(
    "name", ["text", "redo", "sound", "text_only", "frames", "continue", "region"]
)
def test_each_workflow_makes_its_clip(queue, name):
    status, failed, paths, _ = queue.ended(queue.send(name, width=128, height=128))
    assert (status, failed) == ("success", "")
    assert shape(paths[0]) == (73 if name == "continue" else 25, 128, 128, True)
    with av.open(str(paths[0])) as file:  # Save Video keeps the workflow
        assert "LTX2RT" in file.metadata["prompt"]
    written = [path for path in queue.folder.rglob("*") if path.is_file()]
    holding = [path.name for path in written if TOKEN.encode() in path.read_bytes()]
    assert sorted(holding) == ["token", "tokens"]


READY = "window.app?.graph && window.app.extensionManager"
SEEN = """async (workflow) => {
  await app.loadGraphData(workflow)
  await new Promise(done => setTimeout(done, 3000))  // nodes grow by what they load
  const scale = app.canvas.ds.scale, drawn = id => document.querySelector(`[data-node-id="${id}"]`)
  const size = (node, box) => box ? [box.width / scale, box.height / scale] : [...node.size]
  const place = node => [...node.pos, ...size(node, drawn(node.id)?.getBoundingClientRect())]
  return [(await app.graphToPrompt()).output, app.graph._nodes.map(place)]
}"""


@pytest.mark.parametrize("nodes_2", [False, True])
def test_the_page_reads_each_workflow_file(comfy, folder, nodes_2):
    """Its widgets get the values of the API's file, and no node lies over another."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not (browser := shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("there is no chromium here")
    files = sorted((ROOT / "examples/comfyui/workflows").glob("*_api.json"))
    with playwright.sync_playwright() as play:
        page = play.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page()
        for _ in range(2):  # the setting holds from the next start on
            page.goto(comfy)
            page.wait_for_function(READY)
            page.evaluate(
                f"app.ui.settings.setSettingValueAsync('Comfy.VueNodes.Enabled', {int(nodes_2)}==1)"
            )
        for file in files:
            saved = json.loads(file.with_name(file.name.replace("_api", "")).read_text())
            graph, places = page.evaluate(SEEN, saved)
            for key, node in json.loads(file.read_text()).items():
                assert graph[key]["inputs"] == graph[key]["inputs"] | node["inputs"], file.name
            for (x, y, wide, high), (x2, y2, wide2, high2) in combinations(places, 2):
                apart = x + wide <= x2 or x2 + wide2 <= x or y + high <= y2 or y2 + high2 <= y
                assert apart, (file.name, places)


def test_an_equal_task_is_not_made_again(queue):
    for _ in range(2):
        *_, messages = queue.ended(queue.send("text", width=128, height=128))
    assert "3" in messages["execution_cached"]["nodes"]


OWN = {
    "command": str(Path(sys.executable).with_name("ltx2rt")), "arguments": "--backend cuda --device cpu",
    "token": "", "width": 128, "height": 128,
}  # fmt: skip


@pytest.mark.parametrize("changed, words", [
    ({"advanced": "video_cgf = 2.0"}, ("video_cgf", "video_cfg")),
    ({"token": "another-token-of-sixteen", "seed": 8}, ("token file", "LTX2RT_TOKEN")),
    ({**OWN, "model": "/no/such/model", "seed": 12}, ("/no/such/model",)),
])  # fmt: skip
def test_a_refusal_is_the_servers_sentence(queue, changed, words):
    status, failed, *_ = queue.ended(queue.send("text", **changed))
    assert status == "error" and all(word in failed for word in words)


def running_job(queue, seed, **changed):
    """A job that was sent and runs on the server."""
    job = queue.send("text", seed=seed, **changed)
    until(lambda: (first(queue)["status"], first(queue)["x"]["seed"]) == ("in_progress", seed))
    return job


def first(queue):
    """The server's latest job."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return httpx.get(f"{queue.address}/v1/videos", headers=headers, timeout=30).json()["data"][0]


def test_cancel_cancels_the_job(queue):
    job = running_job(queue, seed=9, steps=300)
    httpx.post(f"{queue.comfy}/interrupt", json={})
    status, _, _, messages = queue.ended(job)
    assert (status, "execution_interrupted" in messages) == ("error", True)
    last = until(lambda: (one := first(queue))["status"] == "failed" and one)
    assert last["error"]["code"] == "cancelled"


def test_a_killed_server_that_comes_back_goes_on(queue, server):
    job = running_job(queue, seed=10, steps=60, width=128, height=128)
    for process in psutil.process_iter(["cmdline"]):
        if str(queue.folder / "tokens") in (process.info["cmdline"] or ()):
            process.kill()
    time.sleep(1)
    server[1]()
    status, failed, paths, _ = queue.ended(job)
    assert (status, failed) == ("success", "")
    assert shape(paths[0])[0] == 25


def test_a_node_starts_a_server_of_its_own(queue):
    status, failed, paths, _ = queue.ended(queue.send("text", seed=11, **OWN, model=str(MODEL)))
    assert (status, failed) == ("success", "")
    assert shape(paths[0]) == (25, 128, 128, True)
