"""A real replica, `ltx2rt worker`, on the tiny checkpoint: what comes through its pipe."""

import base64
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import ltx2rt
from ltx2rt.media.mp4 import opened

CLIP = {"prompt": "a red fox", "width": 64, "height": 64, "num_frames": 9, "fps": "48", "seed": 3, "steps": 2,
        "image_crf": 0}  # fmt: skip


class Worker:
    def __init__(self, model, *flags):
        words = ["worker", "--backend", "cuda", "--device", "cpu", "--model", str(model), *flags]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ltx2rt", *words], stdin=-1, stdout=-1, stderr=-1, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def send(self, **message):
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def run(self, folder, number, epoch=1, pipeline="one-stage", n=1, **clip):
        job = {"pipeline": pipeline, "clip": CLIP | clip, "n": n, "images": [], "loras": []}
        self.send(do="run", id=f"j{number}", epoch=epoch, stem=str(folder / f"j{number}.{epoch}"), **job)

    def events(self, *last):
        """Events up to the first of a kind in `last`."""
        seen = []
        while not seen or seen[-1]["event"] not in last:
            seen.append(json.loads(self.process.stdout.readline()))
        return seen


def test_a_worker_makes_the_clips_of_the_command_line_until_its_input_ends(tiny, tmp_path):
    model = tiny("tiny-2.3", "official")
    worker = Worker(model, "--warm", "64x64x9:one-stage")
    worker.run(tmp_path, 1)
    worker.run(tmp_path, 2, seed=3, n=2)
    worker.run(tmp_path, 3, steps=9000)
    ready, *progress, done = worker.events("done")
    assert ready["event"] == "ready" and ready["device"]["kind"] == "cpu"
    assert {event["stage"] for event in progress} >= {"text", "audio", "decode"}
    fractions = [event["fraction"] for event in progress]
    assert fractions == sorted(fractions) and fractions[-1] == pytest.approx(1)
    assert done["result"]["file"] == "j1.1.mp4" and done["result"]["report"]["loaded_bytes"] == 0
    assert {path.name for path in tmp_path.glob("j1*")} == {"j1.1.json", "j1.1.mp4", "j1.1.webp"}
    with ltx2rt.open(model, backend="cuda", device="cpu") as session:
        clip = session.generate(**{**CLIP, "pipeline": "one-stage", "image_crf": 0})
    clip.save(tmp_path / "direct.mp4")
    with opened(tmp_path / "j1.1.mp4") as served, opened(tmp_path / "direct.mp4") as direct:
        for a, b in zip(served.decode(video=0), direct.decode(video=0), strict=True):
            np.testing.assert_array_equal(a.to_ndarray(), b.to_ndarray())
    several = worker.events("done")[-1]["result"]
    assert several["files"] == ["j2.1.mp4", "j2.1.1.mp4"]
    sizes = [(tmp_path / name).stat().st_size for name in several["files"]]
    assert (
        sum(sizes) == several["bytes"]
        and (tmp_path / "j2.1.mp4").read_bytes() != (tmp_path / "j2.1.1.mp4").read_bytes()
    )
    worker.send(do="watch", id="j3")
    preview = worker.events("preview")[-1]
    assert preview["id"] == "j3" and base64.b64decode(preview["jpeg"]).startswith(b"\xff\xd8\xff")
    worker.send(do="cancel", id="j3")
    assert worker.events("cancelled", "done")[-1] == {"event": "cancelled", "id": "j3", "epoch": 1}
    worker.run(tmp_path, 4, num_frames=10)
    assert "--num-frames: 10" in worker.events("failed")[-1]["message"]
    worker.process.stdin.close()
    assert worker.process.wait(20) == 0 and not list(tmp_path.glob("j3*")) + list(tmp_path.glob(".*"))
    worker.process.stdout.close(), worker.process.stderr.close()
