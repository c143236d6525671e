"""Jobs move by compare-and-set, whoever dies between two of their moves."""

import json
import os
import random
import sqlite3
import subprocess
import sys
import time

import pytest

from ltx2rt.errors import InputError
from ltx2rt.serve import queue as module
from ltx2rt.serve.jobs import JOB_ID, failure
from ltx2rt.serve.queue import MAX_ATTEMPTS, Queue
from ltx2rt.serve.refusal import Refusal


@pytest.fixture
def queue(tmp_path):
    return Queue(tmp_path / "jobs.db", most=400)


JOB = {"pipeline": "hq", "clip": {}, "images": [], "loras": []}


def add(queue, user="a", digest="d", **more):
    return queue.add(user, digest, {"prompt": "p"}, JOB, **more)


def test_a_job_goes_through_the_queue_once_and_an_earlier_epoch_changes_nothing(queue):
    made = add(queue)
    assert JOB_ID.fullmatch(made.id) and made.status == "queued" and not made.over
    claimed = queue.claim()
    assert (claimed.id, claimed.status) == (made.id, "in_progress")
    assert claimed.epoch == claimed.attempts == 1
    assert queue.claim() is None
    assert queue.give_back(made.id, 1).status == "queued"
    queue.claim()
    assert not queue.finish(made.id, 1, "completed", result={})
    assert queue.give_back(made.id, 1).status == "in_progress"
    assert queue.finish(made.id, 2, "completed", result={"file": "f.mp4"})
    assert not queue.finish(made.id, 2, "failed") and queue.get(made.id).result == {"file": "f.mp4"}


def test_a_job_that_replicas_die_under_fails_the_third_time(queue):
    """And before that it is tried after the others."""
    made, other = add(queue), add(queue)
    for status in ("queued", "queued", "failed"):
        claimed = queue.claim()
        if claimed.deaths == 0 and claimed.id == other.id:
            assert queue.get(made.id).deaths == 2
            claimed = queue.claim()
        after = queue.give_back(made.id, claimed.epoch, failure("worker_died", "it died"))
        assert after.status == status
    assert queue.get(other.id).status == "in_progress"
    assert queue.get(made.id).error["code"] == "worker_died"


def test_the_least_served_user_then_his_highest_priority_then_the_oldest(queue):
    many = [add(queue, "a").id for _ in range(200)]
    assert queue.claim().id == many[0]
    few = [add(queue, "b").id for _ in range(5)]
    urgent = add(queue, "a", priority=5).id
    late = queue.get(few[4])
    assert queue.ahead("b", 0, late.seq)[0] == 4 + 5  # of 200 as many as are served by then
    order = [queue.claim().id for _ in range(12)]
    assert next(id for id in order if id not in few) == urgent
    assert set(few) <= set(order[:11]) and [id for id in order if id in few] == few
    assert [id for id in order if id not in few][1:] == many[1 : 1 + 12 - 6]


def test_a_priority_takes_nothing_from_other_users(queue):
    for _ in range(10):
        add(queue, "a", priority=9)
    add(queue, "b")
    assert "b" in [queue.claim().user for _ in range(2)]


def test_work_is_shared_not_jobs(queue):
    """b's jobs are four times as long: a has four of his between two of them."""
    for _ in range(8):
        add(queue, "a", work=1.0)
        add(queue, "b", work=4.0)
    users = [queue.claim().user for _ in range(10)]
    assert users.count("a") == 8 and users.count("b") == 2


def test_a_user_who_comes_back_has_saved_nothing_up(queue):
    add(queue, "b")
    queue.claim()
    for _ in range(20):
        add(queue, "a")
    for _ in range(10):
        queue.claim()
    for _ in range(5):
        add(queue, "b")
    users = "".join(queue.claim().user for _ in range(8))
    assert "bbb" not in users


def test_loaded_loras_are_preferred_for_a_while(queue):
    for loras in ("x", "y", "x", "x", "x", "x", "x"):
        add(queue, loras=loras)
    assert queue.claim().loras == "x"
    claimed = [queue.claim("x", in_a_row).loras for in_a_row in range(5)]
    assert claimed == ["x", "x", "x", "x", "y"]


def test_limits_count_videos_and_say_who_has_too_many(tmp_path):
    queue = Queue(tmp_path / "jobs.db", most=15, most_of_user=10)

    def refused(user, code, words, n=1):
        with pytest.raises(Refusal, match=words) as full:
            queue.add(user, "d", {}, {**JOB, "n": n})
        assert full.value.code == code

    queue.add("a", "d", {}, {**JOB, "n": 8})
    refused("a", "user_queue_full", "8 videos wait, at most 10 may", n=4)
    add(queue, "a"), add(queue, "a")
    refused("a", "user_queue_full", "10 videos wait")
    queue.add("b", "d", {}, {**JOB, "n": 5})
    refused("m", "queue_full", "15 videos wait, at most 15 may")
    queue.claim()
    add(queue, "m")


def test_a_key_is_one_job(queue):
    made = add(queue, key="k")
    assert add(queue, key="k").id == made.id
    assert add(queue, "b", key="k").id != made.id
    with pytest.raises(Refusal, match="this Idempotency-Key was used"):
        add(queue, digest="other", key="k")
    assert queue.repeated("a", "d").id == made.id and queue.repeated("a", "e") is None


def test_cancel_ends_what_waits_and_asks_what_runs(queue):
    runs, waits = add(queue, "a"), add(queue, "b")
    queue.claim()
    assert queue.cancel(waits.id).status == "cancelled"
    assert queue.get(waits.id).error["code"] == "cancelled"
    asked = queue.cancel(runs.id)
    assert asked.status == "in_progress" and asked.cancel
    assert queue.cancel(runs.id).cancel == asked.cancel
    assert not queue.delete(runs.id)
    assert queue.give_back(runs.id, 1, failure("worker_died", "it died")).status == "cancelled"
    assert queue.delete(runs.id) and queue.get(runs.id) is None and queue.cancel(runs.id) is None


def test_pages_follow_the_order_of_arrival(queue):
    ids = [add(queue).id for _ in range(45)]
    add(queue, "b")
    seen, after = [], None
    while True:
        jobs, more = queue.page("a", after=after)
        seen += [job.id for job in jobs]
        if not more:
            break
        after = seen[-1]
    assert seen == ids[::-1]
    assert [job.id for job in queue.page("a", after=ids[3], newest=False, limit=2)[0]] == ids[4:6]
    with pytest.raises(Refusal, match="no such video"):
        queue.page("b", after=ids[0])


def test_ids_sort_by_arrival_and_runs_have_their_length_whatever_the_clock_says(
    tmp_path, monkeypatch
):
    queue, ids, now = Queue(tmp_path / "jobs.db"), [], 2e9
    for leap_s in (0, 9e5, -9e5, 0, -1e9, 0):
        now += leap_s
        monkeypatch.setattr(module.time, "time", lambda now=now: now)
        ids.append(add(queue).id)
    assert ids == sorted(ids) and all(JOB_ID.fullmatch(id) for id in ids)
    assert [job.id for job in queue.page("a")[0]] == ids[::-1]
    assert [queue.claim().id for _ in ids[1:]] == ids[:-1]
    job = queue.claim()
    monkeypatch.setattr(module.time, "time", lambda: 1e9)
    time.sleep(0.01)
    queue.finish(job.id, job.epoch, "completed", result={"file": "f"})
    assert 0.01 <= queue.get(job.id).run_s < 10


def test_uptime_goes_on_where_it_was_and_old_rows_count_from_the_upgrade(tmp_path, monkeypatch):
    """Whatever the clock says."""
    queue = Queue(tmp_path / "jobs.db")
    queue._before_s = 500.0
    job = add(queue)
    queue.cancel(job.id)
    queue.close()
    monkeypatch.setattr(module.time, "time", lambda: 1e12)
    queue = Queue(tmp_path / "jobs.db")
    assert 500 <= queue.get(job.id).end_uptime_s <= queue.uptime() < 510
    queue.forget(400)
    assert queue.get(job.id)
    queue.forget(600)
    assert queue.get(job.id) is None
    job = add(queue)
    queue.cancel(job.id)
    for column in ("start_uptime_s", "end_uptime_s"):  # a file of an earlier version
        queue._db.execute(f"ALTER TABLE jobs DROP COLUMN {column}")
    queue._db.execute("DROP TABLE uptime")
    queue.close()
    queue = Queue(tmp_path / "jobs.db")
    assert queue.get(job.id).end_uptime_s == 0 and queue.uptime() < 10


NO_JOBS = (
    "{", "{}", "[]", "7", '{"pipeline": "hq", "clip": {}, "images": [null], "loras": []}',
    '{"pipeline": "hq", "clip": {}, "images": [], "loras": [], "files": []}',
    '{"pipeline": "hq", "clip": {}, "images": [], "loras": [], "n": "two"}', "[" * 100_000,
)  # fmt: skip


def test_a_damaged_file_is_refused_and_a_damaged_row_fails_alone(tmp_path):
    path = tmp_path / "jobs.db"
    queue = Queue(path)
    jobs = [add(queue) for _ in (*NO_JOBS, 0)]
    for job, text in zip(jobs, NO_JOBS, strict=False):
        queue._db.execute("UPDATE jobs SET job=? WHERE id=?", (text, job.id))
    queue.close()
    queue = Queue(path)
    assert [queue.get(job.id).status for job in jobs] == ["failed"] * len(NO_JOBS) + ["queued"]
    assert "damaged" in queue.get(jobs[1].id).error["message"]
    other = sqlite3.connect(path, isolation_level=None)
    queue.close()
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(InputError, match="another program holds it"):
        Queue(path, wait_s=0.1)
    other.close()
    queue = Queue(path)
    for number in range(200):
        add(queue, f"user {number}")
    queue.close()
    data = bytearray(path.read_bytes())
    data[4096 : 4096 * 6] = os.urandom(4096 * 5)
    path.write_bytes(data)
    with pytest.raises(
        InputError, match=r"^--data: .*jobs.db cannot be opened as a queue \(.*good copy"
    ):
        Queue(path)


def test_a_file_that_is_no_queue_is_left_alone(tmp_path):
    text, other, empty = (tmp_path / name for name in ("text", "other", "empty"))
    text.write_text("a text that is long enough to be looked at " * 9)
    foreign = sqlite3.connect(other)
    foreign.execute("CREATE TABLE jobs(id)")
    foreign.commit()
    for path in (text, other):
        with pytest.raises(InputError, match=r"--data: .*queue"):
            Queue(path)
    empty.touch()
    add(Queue(empty))
    newer = sqlite3.connect(empty)
    newer.execute("PRAGMA user_version=99")
    newer.close()
    with pytest.raises(InputError, match=r"queue of a newer ltx2rt .*; start that one, or name"):
        Queue(empty)


# --- death at every point -------------------------------------------------------------------------


SCENARIO = """
import os, pathlib, sqlite3, sys, json
from ltx2rt.serve import queue as module
from ltx2rt.serve.folder import Folder, publish

base = pathlib.Path(sys.argv[1])
for last in range(1, 200, int(sys.argv[2])):
    (root := base / str(last)).mkdir()
    for attempt in range(8):
        if (child := os.fork()) == 0:
            break
        if (status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) == 0:
            break
    if child == 0:
        last = last if attempt < 2 else 10**9
        break
    if attempt == status == 0:
        sys.exit(0)
passed = 0
def point(*_):  # every statement of SQLite, every rename, removal and opened file
    global passed
    passed += 1
    if passed == last:
        os._exit(9)
sys.addaudithook(lambda event, args: point() if event in ("os.rename", "os.remove") else None)

def fsync(descriptor, real=os.fsync):
    point()
    real(descriptor)
os.fsync = fsync
queue = module.Queue(root / "jobs.db")
queue._db.set_trace_callback(point)
folder = Folder(root)
jobs = queue.waiting()
if not jobs and not (root / "began").exists():
    (root / "began").touch()
    for n in range(2):
        job = {"pipeline": "", "clip": {}, "images": [], "loras": [], "n": n}
        made = queue.add("a", "d", {}, job)
        with open(root / "accepted", "a") as accepted:
            accepted.write(made.id + "\\n")
queue.recover(folder.published)
folder.sweep([*queue.finished(), *queue.waiting()], queue.ids())
while (job := queue.claim()) is not None:
    with open(root / "runs", "a") as runs:
        runs.write(job.id + "\\n")
    stem = folder.outputs / job.stem
    made = publish(stem, lambda _, p: p.write_text(str(job.job["n"])), lambda p: p.write_text("t"), lambda: {"n": 1})
    assert queue.finish(job.id, job.epoch, "completed", result=made)
print(passed)
"""


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.long)])
def test_death_at_every_commit_rename_and_sync_loses_nothing_and_doubles_nothing(stride, tmp_path):
    """One process is worker and server. It dies at every point of two runs, or every seventh."""
    driver = tmp_path / "driver.py"
    driver.write_text(SCENARIO)
    ran = subprocess.run(
        [sys.executable, driver, tmp_path, str(stride)], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    roots = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(roots) > 30 // stride, ran.stderr
    reruns = 0
    for root in roots:
        jobs = sqlite3.connect(root / "jobs.db").execute("SELECT id, status, job, result FROM jobs")
        rows, files = jobs.fetchall(), [root / name for name in ("accepted", "runs")]
        accepted, runs = (file.read_text().split() if file.exists() else [] for file in files)
        assert {row[0] for row in rows} >= set(accepted), root.name
        for id, status, job, result in rows:
            assert status == "completed", root.name
            made = (root / "out" / json.loads(result)["file"]).read_text()
            assert made == str(json.loads(job)["n"])
            assert len(list((root / "out").glob(f"{id}*.mp4"))) == 1
        assert not list((root / "out").glob(".*"))
        reruns += len(runs) > len(rows)
    # some died before their file had its name, some after: those were adopted
    assert 0 < reruns < len(roots)


def test_a_delete_that_races_the_end_has_one_outcome(queue):
    chance = random.Random(int(os.environ.get("LTX2RT_TEST_SEED", "11")))
    for _ in range(40):
        job = add(queue)
        claimed = queue.claim()
        moves = [
            lambda id=job.id: queue.cancel(id),
            lambda c=claimed: queue.finish(c.id, c.epoch, "completed", result={"file": "x"}),
            lambda id=job.id: queue.delete(id),
        ]
        chance.shuffle(moves)
        for move in moves:
            move()
        left = queue.get(job.id)
        assert left is None or left.status == "completed"
        assert queue.claim() is None


def test_a_pause_outlives_the_server(tmp_path):
    queue = Queue(tmp_path / "jobs.db")
    made = add(queue, "ann")
    queue.pause(True)
    queue.pause(True)
    assert queue.claim() is None
    queue.close()
    queue = Queue(tmp_path / "jobs.db")
    assert queue.paused() and queue.claim() is None
    queue.pause(False)
    assert queue.claim().id == made.id


def test_a_quota_counts_what_was_sent_and_forgets_it_after_a_day(tmp_path, monkeypatch):
    queue, now = Queue(tmp_path / "jobs.db", most_sent=3), 1000.0
    monkeypatch.setattr(queue, "uptime", lambda: now)

    def send(user, n=1):
        return queue.add(user, "d", {}, {**JOB, "n": n})

    send("ann", 2)
    now += 3600
    last = send("ann")
    queue.cancel(last.id)
    queue.delete(last.id)
    with pytest.raises(Refusal, match="3 videos were sent in 24 hours") as full:
        send("ann")
    assert full.value.code == "user_quota" and full.value.retry_after_s == 86400 - 3600
    send("bob", 3)
    now += full.value.retry_after_s
    send("ann", 2)
    with pytest.raises(Refusal):
        send("ann")


def test_a_written_prompt_is_the_jobs_own(queue):
    """Of the run that wrote it, for all later ones."""
    add(queue)
    job = queue.claim()
    queue.written_out(job.id, job.epoch - 1, "late")
    queue.written_out(job.id, job.epoch, 'a "fox"')
    queue.give_back(job.id, job.epoch, None, False)
    assert queue.claim().job["clip"]["enhanced_prompt"] == 'a "fox"'


def test_a_job_that_goes_on_is_given_as_many_runs_as_it_takes(queue):
    """Runs that end without a part of their own count; one that has made a part begins anew."""
    add(queue)
    for _ in range(2 * MAX_ATTEMPTS):
        job = queue.claim()
        queue.went_on(job.id, job.epoch - 1)  # late, of another run
        queue.went_on(job.id, job.epoch)
        assert queue.give_back(job.id, job.epoch).status == "queued"
    ends = [queue.give_back(job.id, queue.claim().epoch) for _ in range(MAX_ATTEMPTS - 1)]
    assert {end.status for end in ends[:-1]} == {"queued"} and ends[-1].status == "failed"
    assert "without a result" in ends[-1].error["message"]
