"""Servers in processes of their own, by default with replicas that have no model."""

import base64
import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import wave
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import numpy as np
import psutil
from PIL import Image

from ltx2rt.media.mp4 import EXACT, write_mp4
from ltx2rt.weights.files import write_arrays
from ltx2rt.weights.presets import preset

# Fields with the prompt of a fake replica
SMALL = {"pipeline": "one-stage", "size": "64x64", "num_frames": 9}
NAMES = ("ann", "bob", "eve")
TOKENS = "".join(f"{name} {name}-token-0123456789\n" for name in NAMES)[:-1] + " operator\n"
USERS = {name: {"authorization": f"Bearer {name}-token-0123456789"} for name in NAMES}


def context(path, prompt="1:0", negative="", dtype=np.float32):
    """The bytes of a file of contexts for tiny-2.3, which is written there."""
    model = preset("tiny-2.3").config.transformer
    widths = {"video": model.width, "audio": model.audio_width}
    about = {"prompt": prompt, "settings": {"negative_prompt": negative}}
    about["model"] = {"generation": "2.3"}
    arrays = {f"{m}_context": np.ones((2, 1024, width), dtype) for m, width in widths.items()}
    write_arrays(path, arrays, {"ltx2rt": json.dumps(about)})
    return path.read_bytes()


class Server:
    """A server that runs. replicas: its workers are real, not played."""

    def __init__(self, model, data, *flags, replicas="fake", env=(), backend="cuda"):
        fake = [str(Path(__file__).with_name("fake_server.py"))]
        script = fake if replicas == "fake" else ["-m", "ltx2rt"]
        words = ["serve", "--model", model, "--backend", backend, "--device", "cpu", "--data", data]
        words += ["--port", "0", *flags]
        self.data, self.log = Path(data), Path(data).with_suffix(f".{time.monotonic_ns()}.log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *script, *map(str, words)], stderr=log, stdout=log, start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(env),
            )  # fmt: skip
        try:
            self.url = self._url()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def _url(self):
        def said():
            assert self.process.poll() is None, self.log.read_text()
            return re.search(r"serving at (\S+)/", self.log.read_text())

        return wait_for(said, 60)[1]

    def lines(self, event):
        """What the log says of an event."""
        lines = self.log.read_text().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in found if line["event"] == event]

    def add(self, prompt="2:0.01", **more):
        answer = self.http.post("/v1/videos", json={"prompt": prompt, **SMALL, **more})
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    def post(self, given=(), **how):
        """The answer to a small job, of which fields are given."""
        return self.http.post("/v1/videos", json={"prompt": "1:0", **SMALL, **dict(given)}, **how)

    def made(self, *prompt, **more):
        """The id of a job that is over."""
        id = self.add(*prompt, **more)
        self.until(id)
        return id

    def content(self, id, **params):
        return self.http.get(f"/v1/videos/{id}/content", params=params)

    def socket(self, **how):
        """A connection to it."""
        return socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])), **how)

    def get(self, id):
        return self.http.get(f"/v1/videos/{id}").json()

    def until(self, id, *statuses, timeout_s=60):
        statuses = statuses or ("completed", "failed")
        return wait_for(lambda: (v := self.get(id))["status"] in statuses and v, timeout_s)

    def until_step(self, id, least=1):
        wait_for(lambda: (self.get(id)["x"]["step"] or 0) >= least, 30)

    def until_segments(self, id, least):
        wait_for(lambda: sum(one["made"] for one in self.segments(id)) >= least, 60)

    def segments(self, id):
        return self.http.get(f"/v1/videos/{id}/segments").json()["data"]

    def segment_folder(self, id):
        """The folder of a job's segments once it runs, made here: its worker has no model."""
        self.until_step(id)
        folder = self.data / "out" / f"{id}.segments"
        folder.mkdir()
        return folder

    def kill(self, number=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        self.http.close()
        return self.process.wait(30)


def wait_for(condition, timeout_s=30):
    """The first value of the condition that is true."""
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.03)
    return found


def error_of(answer, status):
    assert answer.status_code == status, (answer.status_code, answer.text[:300])
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"} and found["message"]
    return found


def form(fields, **files):
    """Parts of a form: texts, then files."""
    return {name: (None, str(value)) for name, value in fields.items()} | files


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def children(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


@contextlib.contextmanager
def under_a_path(url, prefix="/video/"):
    """A proxy that has the server under a path, and nothing elsewhere; gives the page's address."""

    class Proxy(BaseHTTPRequestHandler):
        def forward(self):
            if not self.path.startswith(prefix):
                return self.send_error(404)
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            to = f"{url}/{self.path.removeprefix(prefix)}"
            with (
                contextlib.suppress(OSError, httpx.HTTPError),
                httpx.stream(
                    self.command, to, headers=dict(self.headers), content=body, timeout=60
                ) as answer,
            ):
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name not in ("transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.end_headers()
                for chunk in answer.iter_raw():
                    self.wfile.write(chunk)

        do_GET = do_POST = do_DELETE = forward

        def log_message(self, *about):
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}{prefix}"
    finally:
        proxy.shutdown()
        proxy.server_close()


def png(width=20, height=10):
    file = io.BytesIO()
    pixels = np.arange(width * height * 3, dtype=np.uint8).reshape(height, width, 3)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def sound(seconds=0.5):
    """A WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setnchannels(1), made.setsampwidth(2), made.setframerate(8000)
        made.writeframes(np.sin(np.arange(int(8000 * seconds)) / 9).astype(np.int16).tobytes())
    return file.getvalue()


def write_segment(folder, frames):
    """The first segment of a job: 25 frames with sound."""
    how = {"num_frames": 25, "fps": Fraction(24), "container": EXACT, "sample_rate": 24000}
    write_mp4(folder / "0000.mov", [frames], waveform=np.full((2, 25000), 0.25, np.float32), **how)


def moving(directory, frames=25, size=64):
    """An MP4 file."""
    path = directory / "moving.mp4"
    black = np.zeros((3, frames, size, size), np.float32)
    write_mp4(path, iter([black]), num_frames=frames, fps=Fraction(24))
    return path.read_bytes()
