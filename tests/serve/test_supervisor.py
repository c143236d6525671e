"""Replicas that die, hang, lie or run out of memory, played by a worker without a model
(`fake_replica.py`)."""

import asyncio
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ltx2rt.serve.board import Board
from ltx2rt.serve.folder import Folder
from ltx2rt.serve.metrics import Metrics
from ltx2rt.serve.queue import Queue
from ltx2rt.serve.supervisor import QueueThread, Supervisor

pytestmark = pytest.mark.anyio
FAKE = [sys.executable, str(Path(__file__).with_name("fake_replica.py"))]


class Running:
    """A supervisor with its queue, in this process."""

    def __init__(self, root, replicas=1, environment=(), step_timeout_s=60.0):
        self.folder = Folder(root, min_free_bytes=0)
        self.queue, self.lines = Queue(self.folder.queue), []
        self.store = QueueThread(self.queue)
        self.board = Board(lambda event, **facts: self.lines.append((event, facts)))
        self.supervisor = Supervisor(
            FAKE, self.store, self.folder, self.board, Metrics(), environments=[dict(environment)] * replicas,
            step_timeout_s=step_timeout_s, back_off_s=0.01,
        )  # fmt: skip

    async def add(self, prompt, user="a", seed=7):
        job = {"pipeline": "p", "clip": {"prompt": prompt, "seed": seed}, "images": [], "loras": []}
        made = await self.store(self.queue.add, user, "d", {"prompt": prompt}, job)
        self.supervisor.woken()
        return made.id

    async def over(self, *ids):
        """The jobs, once all are over."""
        await self.until(lambda: all(self.queue.get(id).over for id in ids))
        return [self.queue.get(id) for id in ids]

    async def begun(self, id):
        await self.until(lambda: self.board.live.get(id, {"step": 0})["step"] > 0)

    async def until(self, condition):
        end = time.monotonic() + 30
        while not await self.store(condition):
            assert time.monotonic() < end, self.lines[-5:]
            await asyncio.sleep(0.01)


@pytest.fixture
def running(tmp_path):
    @asynccontextmanager
    async def start(**how):
        made = Running(tmp_path, **how)
        task = made.task = asyncio.create_task(made.supervisor.run())
        try:
            yield made
        finally:
            await made.supervisor.stop(0)
            await asyncio.gather(task, return_exceptions=True)
            made.store.close()
            made.folder.close()

    return start


async def test_every_job_has_its_file(running):
    async with running(replicas=2) as run:
        ids = [await run.add("2:0.01", seed=n) for n in range(6)]
        for n, job in enumerate(await run.over(*ids)):
            assert (job.status, job.attempts) == ("completed", 1)
            assert (run.folder.outputs / job.result["file"]).read_text() == f"{job.id} {n}"
        assert [replica.restarts for replica in run.supervisor.replicas] == [0, 0]
        assert not run.board.live


@pytest.mark.parametrize("what, code, attempts, restarts", [
    ("once-die", None, 2, 1), ("oom", "out_of_memory", 1, 0), ("internal", "internal", 1, 1), ("lie", None, 1, 0),
])  # fmt: skip
async def test_a_replica_is_replaced_where_the_failure_may_be_its_own(
    running, what, code, attempts, restarts
):
    """A job that it died under runs again; what it says of another epoch is not believed."""
    async with running() as run:
        first, second = await run.over(await run.add(f"2:0.01:{what}"), await run.add("2:0.01"))
        assert (first.error and first.error["code"], first.attempts) == (code, attempts)
        assert first.deaths == attempts - 1 and second.status == "completed"
        assert run.supervisor.replicas[0].restarts == restarts
        assert code or first.result["file"] == f"{first.stem}.mp4"
        assert any(event == "replica_error" for event, _ in run.lines) == (what == "lie")


async def test_a_job_that_kills_every_replica_fails_and_the_others_are_made(running):
    async with running() as run:
        bad = await run.add("2:0.01:die")
        rest = [await run.add("1:0.01") for _ in range(5)]
        poisoned, *others = await run.over(bad, *rest)
        assert (poisoned.error["code"], poisoned.attempts) == ("worker_died", 3)
        assert "SIGKILL" in poisoned.error["message"]
        left = {path.name for path in run.folder.outputs.iterdir()}
        assert left == {job.stem + end for job in others for end in (".mp4", ".webp", ".json")}
        assert {job.status for job in others} == {"completed"}


async def test_a_job_that_does_not_move_loses_its_replica(running):
    async with running(step_timeout_s=1.0) as run:
        (job,) = await run.over(await run.add("6:0.01:once-hang"))
        assert (job.status, job.attempts) == ("completed", 2)
        (job,) = await run.over(await run.add("6:0.01:once-stop"))  # SIGSTOP
        assert (job.status, job.attempts) == ("completed", 2)
        (job,) = await run.over(await run.add("6:0.01:hang"))
        assert (job.status, job.error["code"]) == ("failed", "step_timeout")


async def test_a_folder_that_cannot_be_written_stops_the_queue_until_it_can(running):
    """The job that runs then goes on later, too, and none fails."""
    async with running() as run:
        ids = [await run.add("20:0.02") for _ in range(3)]
        await run.begun(ids[0])
        run.folder.outputs.rename(away := run.folder.root / "away")
        await run.until(lambda: run.supervisor.problem)
        jobs = [await run.store(run.queue.get, id) for id in ids]
        assert {job.status for job in jobs} == {"queued"}
        assert [job.attempts for job in jobs] == [1, 0, 0]
        assert "cannot be written" in run.supervisor.problem[1]
        away.rename(run.folder.outputs)
        for job in await run.over(*ids):
            assert (job.status, job.deaths) == ("completed", 0) and run.folder.published(job)
        assert run.supervisor.problem is None and run.supervisor.replicas[0].restarts == 0
        told = [facts for event, facts in run.lines if event == "storage" and "job" not in facts]
        assert len(told) == 2 and told[1]["message"] == "the folder can be written again"


@pytest.mark.parametrize(("prompt", "status", "files"), [
    ("400:0.02", "cancelled", 0), ("10:0.02:late", "completed", 3),
])  # fmt: skip
async def test_a_running_job_is_cancelled_at_its_next_step_unless_it_ends_first(
    running, prompt, status, files
):
    async with running() as run:
        id, after = await run.add(prompt), await run.add("1:0.01")
        await run.begun(id)
        start = time.monotonic()
        await run.store(run.queue.cancel, id)
        run.supervisor.cancel(id)
        (job,) = await run.over(id)
        assert job.status == status and (job.error or {}).get("code") == (None if files else status)
        assert time.monotonic() - start < 5
        (job,) = await run.over(after)
        assert job.status == "completed"
        assert len([*run.folder.outputs.glob(f"{id}*")]) == files


async def test_a_server_that_stops_lets_jobs_end_or_queues_them_again(running):
    async with running(replicas=2) as run:
        short = await run.add("20:0.02")
        long = await run.add("4000:0.02")
        waits = await run.add("1:0")
        await run.begun(short), await run.begun(long)
        await run.supervisor.stop(2.0)
        short, long, waits = [await run.store(run.queue.get, id) for id in (short, long, waits)]
        assert short.status == "completed"
        assert long.status == waits.status == "queued" and long.deaths == waits.attempts == 0
        assert all(replica.process.returncode is not None for replica in run.supervisor.replicas)


@pytest.mark.parametrize(
    "turns",
    [
        0,
        pytest.param(1, marks=pytest.mark.long),
        *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 6)),
    ],
)
async def test_a_server_stops_at_the_moment_at_which_a_replica_ends(running, turns):
    """turns: of the event loop between the two. A cancellation that `asyncio.wait_for` loses would
    start another replica, which nothing ends."""
    async with running() as run:
        await run.begun(await run.add("4:0.1:internal"))
        process = run.supervisor.replicas[0].process
        while process.returncode is None:
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(run.supervisor.stop(0), 5)


async def test_readers_get_the_latest_state_however_slow_they_are(running):
    async with running() as run:
        with (
            run.board.watch(lambda id, user: user == "a") as mine,
            run.board.watch(lambda id, user: user == "b") as other,
        ):
            id = await run.add("30:0.005")
            await run.over(id)
            assert await mine.take(1.0) == {id: "completed"}
            assert await other.take(0.01) == {} == await mine.take(0.01)
