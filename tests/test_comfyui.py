"""The nodes in a real ComfyUI without a screen: COMFYUI_DIR is its checkout, COMFYUI_PYTHON a Python
that can run it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import av
import pytest

ROOT = Path(__file__).parents[1]
FOLDER = os.environ.get("COMFYUI_DIR")
MODEL = ROOT / "examples/tiny-trained"
TOKEN = "a-token-of-sixteen-characters"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="COMFYUI_DIR names no checkout of ComfyUI"),
]


def ask(address, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = Request(address, data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=30) as answer:
        found = answer.read()
    return json.loads(found) if found else None


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if (found := condition()) not in (None, False, {}):
                return found
        time.sleep(0.2)
    raise TimeoutError(f"not within {seconds} s")


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
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """ComfyUI's folders, with the nodes, a clip and a picture."""
    base = tmp_path_factory.mktemp("comfyui")
    for name in ("custom_nodes", "input", "output", "models"):
        (base / name).mkdir()
    (base / "custom_nodes/ltx2rt").symlink_to(ROOT / "examples/comfyui")
    command = [
        sys.executable,
        *["-m", "ltx2rt", "generate", "--backend", "cuda", "--device", "cpu", "--model"],
        MODEL,
    ]
    clip = ["--prompt", "a red circle grows", *"--width 128 --height 128 --num-frames 25".split()]
    subprocess.run(
        [*command, *clip, "--seed", "1", "--output", base / "input/clip.mp4"], check=True, cwd=ROOT
    )
    with av.open(str(base / "input/clip.mp4")) as file:
        next(file.decode(video=0)).to_image().save(base / "input/example.png")
    return base


@pytest.fixture(scope="module")
def server(folder):
    """The server's address, and a function that starts it again after it was killed."""
    port = free_port()
    (tokens := folder / "tokens").write_text(f"ann {TOKEN}\n")
    tokens.chmod(0o600)
    words = [
        sys.executable, "-m", "ltx2rt", "serve", "--backend", "cuda", "--device", "cpu", "--model", MODEL,
        "--port", str(port), "--token-file", tokens, "--data", folder / "data",
    ]  # fmt: skip
    with contextlib.ExitStack() as processes:

        def start():
            process = processes.enter_context(running(words, folder, "serve", cwd=ROOT))
            until(lambda: urlopen(f"http://127.0.0.1:{port}/readyz", timeout=9).status == 200)
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
        own = {"address": self.address, "token": TOKEN} | changed
        for node in graph.values():
            if node["class_type"].startswith("LTX2RT"):
                node["inputs"] |= {key: own[key] for key in own if key in node["inputs"]}
        try:
            return ask(f"{self.comfy}/prompt", {"prompt": graph})["prompt_id"]
        except HTTPError as error:
            raise AssertionError(error.read()) from None

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


@pytest.mark.parametrize("name", ["text", "redo", "sound"])
def test_each_workflow_makes_its_clip(queue, name):
    status, failed, paths, _ = queue.ended(queue.send(name, width=128, height=128))
    assert (status, failed) == ("success", "")
    assert shape(paths[0]) == (25, 128, 128, True)
    with av.open(str(paths[0])) as file:  # Save Video keeps the workflow
        assert "LTX2RT" in file.metadata["prompt"]


def test_an_equal_task_is_not_made_again(queue):
    for _ in range(2):
        *_, messages = queue.ended(queue.send("text", width=128, height=128))
    assert "3" in messages["execution_cached"]["nodes"]


def test_a_refusal_is_the_servers_sentence(queue):
    status, failed, *_ = queue.ended(queue.send("text", advanced="video_cgf = 2.0"))
    assert status == "error"
    assert "video_cgf" in failed
    assert "video_cfg" in failed


def test_a_wrong_token_is_said(queue):
    status, failed, *_ = queue.ended(queue.send("text", token="another-token-of-sixteen", seed=8))
    assert status == "error"
    assert "token" in failed


def jobs(queue):
    request = Request(f"{queue.address}/v1/videos", headers={"Authorization": f"Bearer {TOKEN}"})
    with urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())["data"]


def test_cancel_cancels_the_job(queue):
    job = queue.send("text", seed=9, steps=300)
    until(lambda: jobs(queue)[0]["status"] == "in_progress" and jobs(queue)[0]["x"]["seed"] == 9)
    ask(f"{queue.comfy}/interrupt", {})
    status, _, _, messages = queue.ended(job)
    assert (status, "execution_interrupted" in messages) == ("error", True)
    last = until(lambda: jobs(queue)[0]["status"] == "failed" and jobs(queue)[0])
    assert last["error"]["code"] == "cancelled"


def test_a_killed_server_that_comes_back_goes_on(queue, server):
    job = queue.send("text", seed=10, steps=60, width=128, height=128)
    until(lambda: jobs(queue)[0]["status"] == "in_progress" and jobs(queue)[0]["x"]["seed"] == 10)
    found = subprocess.run(
        ["pgrep", "-f", str(queue.folder / "tokens")], capture_output=True, text=True
    )
    for pid in found.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    time.sleep(1)
    server[1]()
    status, failed, paths, _ = queue.ended(job)
    assert (status, failed) == ("success", "")
    assert shape(paths[0])[0] == 25


def test_a_node_starts_a_server_of_its_own(queue):
    command = f"{sys.executable} -m ltx2rt"
    started = {
        "model": str(MODEL),
        "command": command,
        "arguments": "--backend cuda --device cpu",
        "token": "",
        "width": 128,
        "height": 128,
    }
    status, failed, paths, _ = queue.ended(queue.send("text", seed=11, **started))
    assert (status, failed) == ("success", "")
    assert shape(paths[0]) == (25, 128, 128, True)


def test_a_model_that_is_none_is_said(queue):
    command = shutil.which("ltx2rt") or f"{sys.executable} -m ltx2rt"
    started = {
        "model": "/no/such/model",
        "command": command,
        "arguments": "--backend cuda --device cpu",
    }
    status, failed, *_ = queue.ended(queue.send("text", seed=12, **started))
    assert status == "error"
    assert "/no/such/model" in failed
