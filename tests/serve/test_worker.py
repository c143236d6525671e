"""A real replica, `ltx2rt worker`, on the tiny checkpoint: what comes through its pipe."""

import base64
import errno
import gc
import io
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ltx2rt
import ltx2rt.serve.worker
from ltx2rt.backend import DeviceInfo
from ltx2rt.errors import InputError
from ltx2rt.instruments.compare import compare
from ltx2rt.ranks.environment import FAILED
from ltx2rt.serve.folder import STORAGE
from ltx2rt.serve.worker import DEVICE_WAIT_S, Pipe, attempt, next_job, room, work
from ltx2rt.stages.enhance import Enhancer, enhance

CLIP = {"prompt": "a red fox", "width": 64, "height": 64, "num_frames": 9, "fps": "24", "seed": 3, "steps": 2,
        "image_crf": 0}  # fmt: skip


class Worker:
    def __init__(self, model, *flags, backend="cuda"):
        words = ["worker", "--backend", backend, "--device", "cpu", "--model", str(model), *flags]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ltx2rt", *words], stdin=-1, stdout=-1, stderr=-1, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def send(self, **message):
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def run(self, folder, number, epoch=1, pipeline="one-stage", n=1, **clip):
        job = {"pipeline": pipeline, "clip": CLIP | clip, "n": n, "images": [], "loras": []}
        stem = str(folder / f"j{number}.{epoch}")
        self.send(do="run", id=f"j{number}", epoch=epoch, stem=stem, **job)

    def end(self):
        """Close its input: it ends as it should."""
        self.process.stdin.close()
        assert self.process.wait(20) == 0
        self.process.stdout.close(), self.process.stderr.close()

    def events(self, *last):
        """Events up to the first of a kind in `last`."""
        seen = []
        while not seen or seen[-1]["event"] not in last:
            seen.append(json.loads(self.process.stdout.readline()) | {"at": time.monotonic()})
        return seen


@pytest.mark.parametrize("backend", [
    pytest.param("cuda", marks=pytest.mark.long), pytest.param("tpu", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_worker_makes_the_clips_of_the_command_line_until_its_input_ends(tiny, tmp_path, backend):
    model = tiny("tiny-2.3", "official")
    worker = Worker(model, "--warm", "64x64x9:one-stage", backend=backend)
    # of the 32 that the loop is made for, as for the 30 of the warm-up
    worker.run(tmp_path, 1, steps=25)
    worker.run(tmp_path, 2, seed=3, n=2)
    worker.run(tmp_path, 3, steps=9000)
    ready, *progress, done = worker.events("done")
    assert ready["event"] == "ready" and ready["device"]["kind"] == "cpu"
    assert {event["stage"] for event in progress} >= {"text", "audio", "decode"}
    fractions = [event["fraction"] for event in progress]
    assert fractions == sorted(fractions) and fractions[-1] == pytest.approx(1)
    assert done["result"]["file"] == "j1.1.mp4" and done["result"]["report"]["loaded_bytes"] == 0
    assert done["result"]["report"]["programs_built"] == 0  # it was warm for this shape
    assert {path.name for path in tmp_path.glob("j1*")} == {"j1.1.json", "j1.1.mp4", "j1.1.webp"}
    with ltx2rt.open(model, backend=backend, device="cpu") as session:
        clip = session.generate(**CLIP | {"pipeline": "one-stage", "steps": 25})
    clip.save(tmp_path / "direct.mp4")
    same = compare(tmp_path / "j1.1.mp4", tmp_path / "direct.mp4")
    assert same["identical"] and same["audio_corr"] == pytest.approx(1, abs=1e-6)
    several = worker.events("done")[-1]["result"]
    assert several["files"] == ["j2.1.mp4", "j2.1.1.mp4"]
    sizes = [(tmp_path / name).stat().st_size for name in several["files"]]
    assert sum(sizes) == several["bytes"]
    assert (tmp_path / "j2.1.mp4").read_bytes() != (tmp_path / "j2.1.1.mp4").read_bytes()
    worker.send(do="watch", id="j3")
    preview = worker.events("preview")[-1]
    assert preview["id"] == "j3" and base64.b64decode(preview["jpeg"]).startswith(b"\xff\xd8\xff")
    worker.send(do="cancel", id="j3")
    assert worker.events("cancelled", "done")[-1]["event"] == "cancelled"
    worker.run(tmp_path, 4, num_frames=0)
    assert "--num-frames: 0" in worker.events("failed")[-1]["message"]
    worker.end()
    assert not list(tmp_path.glob("j3*")) + list(tmp_path.glob(".*"))


def test_a_replica_has_the_room_of_what_it_may_let_go():
    """Of weights, and of recorded steps, which the server's planner could not let go."""
    device = DeviceInfo("cuda", "a GPU", 100, 30, reserve_bytes=5, recorded_bytes=7)
    session = SimpleNamespace(
        backend=SimpleNamespace(device=lambda: device), weights=SimpleNamespace(held_bytes=40)
    )
    told = DeviceInfo(**room(session))  # type: ignore[arg-type]
    assert (told.free_bytes, told.recorded_bytes, told.reserve_bytes) == (77, 0, 5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cuda", "tpu"])
def test_a_hundred_cancels_leave_nothing_and_change_nothing(tiny, tmp_path, backend):
    """At random events of a run, of whatever stage; within two steps; what runs after them is what
    ran before."""
    chance = random.Random(int(os.environ.get("LTX2RT_TEST_SEED", "11")))
    worker = Worker(tiny("tiny-2.3", "official"), "--warm", "64x64x9:one-stage", backend=backend)
    worker.run(tmp_path, 0, steps=8)
    events = worker.events("done")
    steps = [event["at"] for event in events if event.get("stage") == "stage1"]
    step_s = float(np.median(np.diff(steps)))
    count, after, seconds, beyond = len(events) - 2, [], [], []
    for number in range(1, int(os.environ.get("LTX2RT_CANCELS", "100")) + 1):
        worker.run(tmp_path, number, steps=8)
        stage = None
        for _ in range(chance.randrange(count)):
            stage = worker.events("progress")[-1]["stage"]
        start = time.monotonic()
        worker.send(do="cancel", id=f"j{number}")
        *more, last = worker.events("cancelled", "done")
        seconds.append(last["at"] - start)
        after += [len(more)] if last["event"] == "cancelled" else []
        beyond += [seconds[-1] - 2 * step_s] if stage == "stage1" else []
        # the end came first
        assert last["event"] == "cancelled" or not more or more[-1]["stage"] == "decode", last
    worker.run(tmp_path, 999, steps=8)
    assert worker.events("done", "failed")[-1]["event"] == "done"
    first, last = ((tmp_path / f"j{number}.1.mp4").read_bytes() for number in (0, 999))
    assert first == last
    print(f"{backend}: {len(after)} of {number} cancelled, after {max(after)} more events")
    print(f"at most {max(seconds):.2f} s; two steps and {np.median(beyond):+.3f} s")
    assert len(after) > number / 2 and sorted(after)[len(after) // 2] <= 2
    assert np.median(beyond) < 0.5  # what is promised of each, where nothing else runs
    worker.end()
    assert not list(tmp_path.glob(".*"))


@pytest.fixture(scope="module")
def session(tiny):
    with ltx2rt.open(tiny("tiny-2.3", "official"), backend="cuda", device="cpu") as opened:
        yield opened.resident


def job(folder):
    named = {"id": "j", "epoch": 1, "stem": str(folder / "j.1")}
    return named | {"pipeline": "one-stage", "clip": CLIP, "images": [], "loras": []}


@pytest.fixture(scope="module")
def undisturbed(session, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert attempt(session, (), job(folder), None)[0] == "done"
    return (folder / "j.1.mp4").read_bytes()


class Fails:
    """A function that fails once, at its n-th call."""

    def __init__(self, real, error, at):
        self.real, self.error, self.left = real, error, at

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.real(*args, **kwargs)


def test_a_job_that_runs_again_waits_once_for_the_memory_of_its_dead_worker(
    session, tmp_path, monkeypatch
):
    refused, waits, real = InputError("no room on a GPU: 9 GB"), [], session.memory.require
    monkeypatch.setattr(ltx2rt.serve.worker.time, "sleep", waits.append)
    monkeypatch.setattr(session.memory, "require", Fails(real, refused, 1))
    assert attempt(session, (), job(tmp_path), None)[0] == "failed" and not waits
    monkeypatch.setattr(session.memory, "require", Fails(real, refused, 1))
    assert attempt(session, (), job(tmp_path) | {"epoch": 2}, None)[0] == "done"
    assert waits == [DEVICE_WAIT_S]


PLACES = [("weights", "of", 2), ("backend", "to_host", 1), ("backend", "each", 1)]


def without_memory(session, monkeypatch, where, name, at, asked):
    """How a job ends whose memory runs out at the n-th call of a method."""
    owner, error = getattr(session, where), RuntimeError("CUDA out of memory")
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, Fails(getattr(owner, name), error, at))
        return attempt(session, (), asked, None)


@pytest.mark.parametrize("where, name, at", PLACES)
def test_out_of_memory_anywhere_fails_one_job(
    session, undisturbed, tmp_path, monkeypatch, where, name, at
):
    """While it loads, after the steps, before the decoder; the next job is right."""
    event, facts = without_memory(session, monkeypatch, where, name, at, job(tmp_path))
    assert (event, facts["code"]) == ("failed", "out_of_memory") and not list(tmp_path.iterdir())
    assert attempt(session, (), job(tmp_path), None)[0] == "done"
    assert (tmp_path / "j.1.mp4").read_bytes() == undisturbed


def test_what_is_said_of_a_failure_names_files_without_their_folders(
    session, tmp_path, monkeypatch
):
    gone = job(tmp_path) | {"images": [[str(tmp_path / "gone.png"), 0, 1.0]]}
    event, facts = attempt(session, (), gone, None)
    assert (event, facts["code"]) == ("failed", "input_changed")
    assert str(tmp_path) not in facts["message"]
    assert "gone.png" in facts["message"]
    error = OSError(errno.EACCES, "Permission denied", str(tmp_path / "jobs" / "x.mp4"))
    monkeypatch.setattr("ltx2rt.serve.worker.Run", Fails(None, error, 1))
    event, facts = attempt(session, (), job(tmp_path), None)
    said = "PermissionError: [Errno 13] Permission denied: 'x.mp4'"
    assert facts == {"code": "internal", "message": said}


def test_a_cancel_while_it_decodes_takes_one_tile_more_at_most(session, tmp_path, monkeypatch):
    monkeypatch.setattr("ltx2rt.stages.tiling.TILE_FRAMES", 24)
    monkeypatch.setattr("ltx2rt.stages.tiling.OVERLAP_FRAMES", 8)
    begun, at = [], []

    class Outbox(io.BytesIO):
        """Whoever reads it cancels when the first frames are there."""

        def write(self, line):
            event = json.loads(line)
            if event.get("stage") == "decode" and event["step"] and not at:
                at.append(len(begun))
                pipe.cancelled.add("j")

    pipe, each = Pipe(None, Outbox()), session.each

    def counted(calls, output):
        return each((begun.append(call) or call for call in calls), output)

    monkeypatch.setattr(session, "each", counted)
    asked = job(tmp_path)
    # 10 latents, in tiles of three that share one
    asked["clip"] = CLIP | {"num_frames": 73, "audio": False}
    assert attempt(session, (), asked, pipe) == ("cancelled", {})
    assert 1 <= at[0] <= 2 and len(begun) - at[0] <= 1 and len(begun) < 5
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize("count", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_out_of_memory_again_and_again_leaves_nothing_behind(session, tmp_path, monkeypatch, count):
    """Neither tensors nor open files nor memory, wherever it happens."""

    def held():
        gc.collect()
        found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
        # What a compiler left of other tests has symbols for sizes.
        tensors = sum(one.nbytes for one in found if not one._has_symbolic_sizes_strides)
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        return tensors, len(os.listdir("/proc/self/fd")), threading.active_count(), rss

    seen = []
    for number in range(count):
        asked = job(tmp_path) | {"clip": CLIP | {"audio": False}}
        event, facts = without_memory(session, monkeypatch, *PLACES[number % 3], asked)
        assert facts["code"] == "out_of_memory", (event, facts)
        seen.append(held())
    assert not list(tmp_path.iterdir())
    early, last = seen[min(2, count - 1)], seen[-1]
    assert last[:3] == early[:3], seen
    # an allocator's breath; one job's arrays take 50 MB and more
    assert last[3] - early[3] < 20e6, seen


@pytest.mark.parametrize("code", ["out_of_memory", "internal"])
@pytest.mark.parametrize("ranks", [True, False])
def test_a_failure_that_others_may_wait_for_ends_the_ranks(
    session, monkeypatch, tmp_path, code, ranks
):
    """And on one device only one that may have left it in disorder: after the other the worker goes
    on."""
    said = {"code": code, "message": "first"}, {"code": "internal", "message": "second"}
    failures, failed, out = iter(said), [], io.BytesIO()
    crew = SimpleNamespace(
        rank=0, handed_out=lambda _, __, text: text, fail=lambda *said: failed.append(said)
    )
    attempts = "ltx2rt.serve.worker.attempt"
    monkeypatch.setattr(attempts, lambda *_: ("failed", next(failures)))
    pipe = Pipe(None, out)
    for _ in range(2):
        pipe.jobs.put(job(tmp_path / "out"))
    assert work(session, (), pipe, crew if ranks else None) == FAILED
    ends = [json.loads(line).get("ends", False) for line in out.getvalue().splitlines()[1:]]
    assert ends == ([True] if ranks or code == "internal" else [False, True])
    assert failed == ([("first", FAILED)] if ranks else [])


def test_files_that_cannot_be_written_are_not_the_fault_of_the_job(session, tmp_path, monkeypatch):
    """A full disk, and a file in place of the folder; the supervisor queues such a job again."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("ltx2rt.serve.worker.Run.save", full)
        event, facts = attempt(session, (), job(tmp_path), None)
    assert (event, facts["code"]) == ("failed", STORAGE) and "No space left" in facts["message"]
    (tmp_path / "gone").write_bytes(b"")
    event, facts = attempt(session, (), job(tmp_path / "gone"), None)
    assert (event, facts["code"]) == ("failed", STORAGE) and "Not a directory" in facts["message"]


@pytest.mark.long
def test_a_prompt_is_written_out_before_its_job(session, monkeypatch, tmp_path):
    """The text is the job's from then on; a job whose prompt cannot be written out has failed."""
    monkeypatch.setattr("ltx2rt.stages.enhance.MAX_TOKENS", 20)
    gemma, told = session.checkpoint.source("gemma").where, []
    jobs, clip = SimpleQueue(), CLIP | {"enhance_prompt": True}
    for more in ({"pipeline": "one-stage"}, {"pipeline": "none"}, {"clip": clip | {"seed": 4}}):
        jobs.put(job(tmp_path) | {"clip": dict(clip)} | more)
    jobs.put(job(tmp_path) | {"clip": clip | {"enhanced_prompt": "a fox that is written out"}})
    pipe = SimpleNamespace(jobs=jobs, tell=lambda event, **facts: told.append((event, facts)))
    first, second, third = (next_job(session, pipe, gemma) for _ in range(3))
    texts = [one["clip"]["enhanced_prompt"] for one in (first, second, third)]
    assert texts[2] == "a fox that is written out" and len({*texts}) == 3
    assert [event for event, _ in told] == [
        *("progress", "enhanced"), *("progress", "failed"), *("progress", "enhanced"),
    ]  # fmt: skip
    assert told[1][1]["prompt"] == texts[0] and told[3][1]["code"] == "input_changed"
    expected = enhance(Enhancer.of(session.checkpoint, gemma), "a red fox", None, 3, "auto", False)
    assert texts[0] == expected
