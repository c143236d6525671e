"""Queues that earlier releases left, served by today's server: each job ends as it should."""

import contextlib
import json
import os
import random
import shutil
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from ltx2rt.pipelines import pipelines
from ltx2rt.serve.fields import as_given
from ltx2rt.serve.jobs import COMPLETED, QUEUED
from ltx2rt.serve.queue import Queue
from ltx2rt.serve.worker import request_of
from tests.pipelines.test_earlier import EARLIER, LOST, MODEL, RELEASES
from tests.serve.serving import Server, children, wait_for

# A checkout of an earlier release, and the number of jobs of the test that is begun by it
OLD, NUM_JOBS = os.environ.get("LTX2RT_TEST_EARLIER"), int(os.environ.get("LTX2RT_TEST_JOBS", 500))
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


@pytest.mark.slow
@pytest.mark.skipif(OLD is None, reason="LTX2RT_TEST_EARLIER names no checkout")
def test_jobs_end_once_over_kills_with_an_upgrade_in_the_middle(tmp_path, request):
    """A kill of server, worker or both after every ten jobs; the first half of the kills are of the
    earlier release. Each clip is one of an undisturbed server of the release that ended it."""
    chance, logs, undisturbed = random.Random(OLD and NUM_JOBS), [], {}
    paths = ":".join(f"{OLD}{part}" for part in ("", "/backends", "/kernels"))
    releases = {"old": {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}, "new": {}}
    asked = [{"seed": n % 5, "num_frames": 1 + 8 * (n % 2), "steps": 1} for n in range(10)]

    def start(release, data="data"):
        more = ("--max-queue", "5000", "--distilled-lora", LORA)
        made = Server(MODEL, tmp_path / data, *more, replicas="real", env=releases[release])
        request.addfinalizer(made.kill)  # whatever fails
        logs.append(made)
        return made

    for release in releases:
        server = start(release, f"alone-{release}")
        ids = [server.add("circle", **fields) for fields in asked]
        for number, id in enumerate(ids):
            assert server.until(id, timeout_s=300)["status"] == "completed"
            undisturbed[release, number] = server.content(id).content
        server.kill()
    logs.clear()
    server, jobs, kills = start("old"), {}, NUM_JOBS // 10
    for kill in range(kills):
        while len(jobs) < 10 * (kill + 2):  # some wait always
            jobs[server.add("circle", **asked[len(jobs) % 10])] = len(jobs) % 10
        least = 10 * kill + chance.randrange(1, 10)
        wait_for(partial(completed, server, least), 300)
        victim = chance.choice(("server", "worker", "both"))
        workers = children(server.process.pid)
        for pid in workers if victim != "server" else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if victim != "worker" or kill + 1 == kills // 2:
            before = completed(server)
            server.kill()
            wait_for(lambda pids=workers: not any(map(alive, pids)), 30)
            server = start("old" if kill + 1 < kills // 2 else "new")
            assert completed(server) >= before
    ended = {id: server.until(id, timeout_s=300) for id in jobs}
    assert {video["status"] for video in ended.values()} == {"completed"}
    ends = Counter(line["job"] for one in logs for line in one.lines("completed"))
    assert not [id for id, count in ends.items() if count > 1]
    for id, number in jobs.items():
        clip = server.content(id).content
        assert clip in [undisturbed[release, number] for release in releases], ended[id]
    clips = Counter(path.name.partition(".")[0] for path in (tmp_path / "data/out").glob("*.mp4"))
    assert clips == dict.fromkeys(jobs, 1)
    print(len(jobs), "jobs,", kills, "kills,", len(logs), "servers,", ends.total(), "told")


def completed(server, least=0):
    """Number of jobs that are done, or 0 while these are fewer."""
    found = server.http.get("/v1/status").json()["jobs"]["completed"]
    return found if found >= least else 0


def alive(pid):
    return Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()
