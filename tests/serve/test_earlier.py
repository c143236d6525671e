"""Queues that earlier releases left, served by today's server: each job ends as it should."""

import json
import shutil
from pathlib import Path

import pytest

from ltx2rt.pipelines import pipelines
from ltx2rt.serve.fields import as_given
from ltx2rt.serve.jobs import COMPLETED, QUEUED
from ltx2rt.serve.queue import Queue
from ltx2rt.serve.worker import request_of
from tests.pipelines.test_earlier import EARLIER, LOST, MODEL, RELEASES
from tests.serve.serving import Server

LORA = MODEL / "tiny-trained-2.3-distilled-lora.safetensors"


def names_of(release):
    """The jobs of a stored queue by the names of what they ask for."""
    return json.loads((EARLIER / release / "queue.json").read_text())


@pytest.mark.parametrize("release", RELEASES)
def test_every_job_of_a_stored_queue_is_claimed_and_read(release, tmp_path):
    """As the server starts it and its worker reads it; no device is asked."""
    data, read = tmp_path / "data", {}
    shutil.copytree(EARLIER / release / "queue", data)
    queue, names = Queue(data / "jobs.db"), names_of(release)
    assert queue.get(names["done"]).status == COMPLETED
    while job := queue.claim():
        sent, folder = job.job, data / "in"
        images = [[str(folder / name), *rest] for name, *rest in sent["images"]]
        files = as_given(sent["files"], folder)
        assert all(Path(path).is_file() for path, *_ in images)
        try:
            read[job.id] = request_of(sent | {"images": images, "files": files}).name
        except ValueError as error:
            read[job.id] = str(error)
        queue.finish(job.id, job.epoch, COMPLETED, result={})
    assert not queue.counts()[QUEUED]
    queue.close()
    for name in names.keys() - {"done"}:
        said = read[names[name]]
        assert LOST.get(name, "") in said and (said in pipelines()) == (name not in LOST), said


@pytest.mark.long
@pytest.mark.parametrize("release", RELEASES)
def test_every_job_of_a_stored_queue_ends(release, tmp_path):
    """A clip, or one sentence about what is gone; the clip that was done stays."""
    data = tmp_path / "data"
    shutil.copytree(EARLIER / release / "queue", data)
    ids = names_of(release)
    (clip,) = (data / "out").glob("*.mp4")
    before = clip.read_bytes()
    server = Server(MODEL, data, "--distilled-lora", LORA, replicas="real")
    try:
        ended = {name: server.until(id, timeout_s=150) for name, id in ids.items()}
        clips = {name: server.content(id) for name, id in ids.items()}
    finally:
        server.kill()
    for name, video in ended.items():
        if lost := LOST.get(name):
            assert lost in video["error"]["message"]
        else:
            assert (video["status"], video["error"]) == ("completed", None), name
            assert clips[name].is_success and clips[name].content[4:8] == b"ftyp"
    assert clips["done"].content == before
    assert len(ended) >= 8 and {"half", "extend", "pad"} <= ended.keys()
