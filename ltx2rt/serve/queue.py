"""The queue: every accepted job in one SQLite file, and how it moves.

    queued -> in_progress -> completed | failed | cancelled
       ^-----------'  its replica or the server died

Decides what is durable and when: a call that returns has reached the disk (WAL, synchronous FULL).
A move is one compare-and-set on status and epoch; each claim begins an epoch, so that work on an
earlier one changes nothing. One process has the file open, one thread at a time uses it.

How long jobs run and results are kept is counted in the seconds that servers have had this file
open, which no change of the machine's clock moves.
"""

from __future__ import annotations

import json
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError

QUEUED, RUNNING, COMPLETED, FAILED = "queued", "in_progress", "completed", "failed"
CANCELLED = "cancelled"
STATUSES = (QUEUED, RUNNING, COMPLETED, FAILED, CANCELLED)
# deaths of replicas under one job; runs, with those that a dying server ended
MAX_DEATHS, MAX_ATTEMPTS = (3, 10)
LAST = 10**12  # added to the place of a job that goes after the others
MAX_SAME_SET = 4  # jobs in a row that may overtake others because their LoRAs are loaded
RUNS = 50  # that estimates are made from
USER_SHARE = 10  # parts of a shared queue; a user may fill one
RETRY_S = 60  # for so long a client's retry with the same body is the same job
VERSION, APPLICATION = 1, 0x6C747832  # PRAGMA user_version; application_id, "ltx2"
ULID = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
JOB_ID = re.compile(r"video_[0-9A-HJKMNP-TV-Z]{26}")
JSON = ("given", "job", "error", "result")
NO_JOB = dict(pipeline="", clip={}, images=[], loras=[])
SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs(
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, user TEXT NOT NULL, key TEXT,
    digest TEXT NOT NULL, status TEXT NOT NULL, priority INTEGER NOT NULL, work REAL NOT NULL,
    loras TEXT NOT NULL, given TEXT NOT NULL, job TEXT NOT NULL, remixed_from TEXT,
    attempts INTEGER NOT NULL DEFAULT 0, deaths INTEGER NOT NULL DEFAULT 0,
    progressed INTEGER NOT NULL DEFAULT 0,
    epoch INTEGER NOT NULL DEFAULT 0, cancel REAL, created REAL NOT NULL, started REAL,
    finished REAL, error TEXT,
    result TEXT, start_uptime_s REAL, end_uptime_s REAL, UNIQUE(user, key));
CREATE TABLE IF NOT EXISTS uptime(seconds REAL NOT NULL);
CREATE TABLE IF NOT EXISTS paused(since REAL NOT NULL);
CREATE TABLE IF NOT EXISTS hooked(user TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events(
    id TEXT PRIMARY KEY, user TEXT NOT NULL, job TEXT NOT NULL, kind TEXT NOT NULL, created REAL NOT NULL,
    since_s REAL NOT NULL, due_s REAL NOT NULL, tries INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS waiting ON jobs(status, priority, seq);
CREATE INDEX IF NOT EXISTS recent ON jobs(user, digest);
"""
EVERYBODY = "*"  # in `hooked`: users without a line of their own
ENDED = f"""
CREATE TRIGGER IF NOT EXISTS ended AFTER UPDATE OF status ON jobs
WHEN NEW.status<>OLD.status AND NEW.status IN ('{COMPLETED}', '{FAILED}', '{CANCELLED}')
    AND EXISTS (SELECT * FROM hooked WHERE user IN (NEW.user, '{EVERYBODY}'))
BEGIN
    INSERT INTO events(id, user, job, kind, created, since_s, due_s)
    SELECT 'evt_' || lower(hex(randomblob(16))), NEW.user, NEW.id,
        CASE NEW.status WHEN '{COMPLETED}' THEN '{COMPLETED}' ELSE '{FAILED}' END,
        COALESCE(NEW.finished, NEW.created), seconds, seconds FROM uptime;
END
"""


class QueueFull(Exception):
    """code: `queue_full` or `user_queue_full`."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


class Conflict(Exception):
    """An idempotency key came again with another body."""


@dataclass(frozen=True)
class Job:
    """A row. given: the fields as the client sent them; job: what a worker is sent, resolved. work:
    of the run, in any unit; loras: the set that it needs loaded. cancel, created, started,
    finished: seconds since 1970. result: what the worker told of the finished file; its `file` is
    None once that has expired. start_uptime_s, end_uptime_s: `uptime` when its latest run began,
    and when it was over."""

    id: str
    seq: int
    user: str
    status: str
    priority: int
    work: float
    loras: str
    given: dict[str, Any]
    job: dict[str, Any]
    remixed_from: str | None
    attempts: int
    deaths: int
    progressed: int
    epoch: int
    cancel: float | None
    created: float
    started: float | None
    finished: float | None
    error: dict[str, str] | None
    result: dict[str, Any] | None
    start_uptime_s: float | None
    end_uptime_s: float | None

    @property
    def over(self) -> bool:
        return self.status not in (QUEUED, RUNNING)

    @property
    def stem(self) -> str:
        """Stem of the files of this epoch."""
        return f"{self.id}.{self.epoch}"

    @property
    def run_s(self) -> float | None:
        """How long the latest run took, once it is over."""
        if self.start_uptime_s is None or self.end_uptime_s is None:
            return None
        return self.end_uptime_s - self.start_uptime_s


@dataclass(frozen=True)
class WebhookEvent:
    """The end of a job, to be sent to its user's webhook. kind: completed or failed; created:
    seconds since 1970; tries: that failed; waited_s: how long servers have tried it."""

    id: str
    user: str
    job: str
    kind: str
    created: float
    tries: int
    waited_s: float


COLUMNS = ", ".join(f.name for f in fields(Job))


def new_id(last: str = "") -> str:
    """`video_` and a ULID: milliseconds in 48 bits, 80 random ones. last: the id before; one that
    sorts after it is made even if the clock went back."""
    number = (int(time.time() * 1000) << 80) | secrets.randbits(80)
    if JOB_ID.fullmatch(last):
        before = 0
        for letter in last.removeprefix("video_"):
            before = before << 5 | ULID.index(letter)
        if before >= number:
            number = before + 1 + secrets.randbits(64)
    return "video_" + "".join(ULID[number >> shift & 31] for shift in range(125, -1, -5))


def failure(code: str, message: str) -> dict[str, str]:
    return {"code": code, "message": message}


def _whole(given: str, job: str, error: str | None, result: str | None) -> bool:
    """Whether the JSON of a row is a job's, as its readers take it."""
    try:
        read = [json.loads(text) if text else None for text in (given, job, error, result)]
    except (ValueError, TypeError, RecursionError):
        return False
    match read:
        case [
            dict(),
            {"pipeline": str(), "clip": dict(), "images": list(images), "loras": list(loras)},
            None | {"code": str(), "message": str()},
            None | dict(),
        ]:
            files = read[1].get("files", {})
            named = isinstance(files, dict) and all(isinstance(one, list) for one in files.values())
            kept = (
                [*images, *loras, *(file for one in files.values() for file in one)]
                if named
                else [0]
            )
            counts = isinstance(read[1].get("n", 1), int)
            return counts and all(isinstance(x, list) and x and isinstance(x[0], str) for x in kept)
    return False


class Queue:
    """path: of the file, or ":memory:". most: videos that may wait. shared: among several users.
    wait_s: for another program's lock."""

    def __init__(
        self, path: Path | str, most: int = 1000, shared: bool = False, wait_s: float = 5.0
    ):
        self.most, self.most_of_user = most, max(1, most // USER_SHARE) if shared else most
        # work given to each user; who comes back begins at the clock
        self._served: dict[str, float] = {}
        self._waited: set[str] = set()  # users who had jobs in the queue at the latest claim
        self._clock = 0.0
        self._opened = time.monotonic()
        try:
            self._db = sqlite3.connect(path, wait_s, isolation_level=None, check_same_thread=False)
            self._db.row_factory = sqlite3.Row
            found = (
                self._db.execute("PRAGMA application_id").fetchone()[0],
                self._pragma("user_version"),
            )
            if found[0] == APPLICATION and found[1] > VERSION:
                raise InputError(
                    f"--data: {path} is the queue of a newer ltx2rt (version {found[1]}, this one "
                    f"reads {VERSION}); start that one, or name another folder"
                )
            if found not in ((0, 0), (APPLICATION, VERSION)) or (
                found == (0, 0) and self._tables()
            ):
                raise InputError(
                    f"--data: {path} is another program's database; name another folder"
                )
            if (state := self._pragma("quick_check(1)")) != "ok":
                raise sqlite3.DatabaseError(str(state).splitlines()[-1])
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            with self._write():
                for statement in (*filter(str.strip, SCHEMA.split(";")), ENDED):
                    self._db.execute(statement)
                self._upgrade()
                self._db.execute(f"PRAGMA application_id={APPLICATION}")
                self._db.execute(f"PRAGMA user_version={VERSION}")
            self._before_s = self._db.execute("SELECT seconds FROM uptime").fetchone()[0]
        except sqlite3.Error as error:
            if "locked" in str(error):
                reason = "another program holds it; end that one"
                raise InputError(f"--data: {path} is locked: {reason}") from error
            raise InputError(
                f"--data: {path} cannot be opened as a queue ({error}); put a good copy of it "
                "there, or name another folder; finished clips are files beside it"
            ) from error

    def _upgrade(self) -> None:
        """Bring a file of an earlier ltx2rt up to date, and fail jobs whose rows are damaged."""
        columns = {row["name"] for row in self._db.execute("PRAGMA table_info(jobs)")}
        if "progressed" not in columns:
            self._db.execute("ALTER TABLE jobs ADD COLUMN progressed INTEGER NOT NULL DEFAULT 0")
        if "end_uptime_s" not in columns:
            self._db.execute("ALTER TABLE jobs ADD COLUMN start_uptime_s REAL")
            self._db.execute("ALTER TABLE jobs ADD COLUMN end_uptime_s REAL")
            self._db.execute("UPDATE jobs SET end_uptime_s=0 WHERE finished IS NOT NULL")
        self._db.execute("INSERT INTO uptime SELECT 0 WHERE NOT EXISTS (SELECT * FROM uptime)")
        rows = self._db.execute(f"SELECT id, {', '.join(JSON)} FROM jobs").fetchall()
        damaged = [(row["id"],) for row in rows if not _whole(*map(row.__getitem__, JSON))]
        error = json.dumps(failure("internal", "its row in the queue was damaged; send it again"))
        self._db.executemany(
            f"UPDATE jobs SET status='{FAILED}', error='{error}', given='{{}}', "
            f"job='{json.dumps(NO_JOB)}', result=NULL, end_uptime_s=0 WHERE id=?",
            damaged,
        )

    def uptime(self) -> float:
        """Seconds that servers have had this file open, all together."""
        return self._before_s + time.monotonic() - self._opened

    def keep_uptime(self) -> None:
        with self._write() as db:
            self._keep_uptime(db)

    def _keep_uptime(self, db: sqlite3.Connection) -> float:
        db.execute("UPDATE uptime SET seconds=?", (now := self.uptime(),))
        return now

    def _pragma(self, name: str) -> Any:
        return self._db.execute(f"PRAGMA {name}").fetchone()[0]

    def _tables(self) -> int:
        return self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        """One transaction: on the disk when the body has ended, or not begun."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _jobs(self, where: str, *values: Any) -> list[Job]:
        rows = self._db.execute(f"SELECT {COLUMNS} FROM jobs WHERE {where}", values)
        return [
            Job(**{n: json.loads(x) if n in JSON and x else x for n, x in dict(row).items()})
            for row in rows
        ]

    def _count(self, where: str, *values: Any) -> int:
        return self._db.execute(f"SELECT COUNT(*) FROM jobs WHERE {where}", values).fetchone()[0]

    def _videos(self, where: str, *values: Any) -> int:
        videos = "SELECT COALESCE(SUM(COALESCE(json_extract(job, '$.n'), 1)), 0)"
        return self._db.execute(f"{videos} FROM jobs WHERE {where}", values).fetchone()[0]

    # --- clients ----------------------------------------------------------------------------------

    def add(
        self, user: str, digest: str, given: Mapping[str, Any], job: Mapping[str, Any], *,
        work: float = 1.0,
        loras: str = "", priority: int = 0, key: str | None = None, remixed_from: str | None = None,
        id: str | None = None,
    ) -> Job:  # fmt: skip
        """A new job, or the user's job with this key and digest. Raises Conflict, QueueFull."""
        with self._write() as db:
            if key and (known := self.keyed(user, key)):
                return self._same(known, digest)
            self._require_room(user, job.get("n", 1))
            latest = db.execute("SELECT id FROM jobs ORDER BY seq DESC LIMIT 1").fetchone()
            made = id or new_id(latest[0] if latest else "")
            row = {
                "id": made, "user": user, "key": key, "digest": digest, "status": QUEUED,
                "priority": priority,
                "work": work, "loras": loras, "given": json.dumps(given), "job": json.dumps(job),
                "remixed_from": remixed_from, "created": time.time(),
            }  # fmt: skip
            marks = ", ".join("?" * len(row))
            db.execute(f"INSERT INTO jobs({', '.join(row)}) VALUES({marks})", tuple(row.values()))
        return self._jobs("id=?", made)[0]

    def _require_room(self, user: str, videos: int) -> None:
        """Raises QueueFull."""
        own = self._videos("status=? AND user=?", QUEUED, user)
        for code, most, count in (
            ("queue_full", self.most, self._videos("status=?", QUEUED)),
            ("user_queue_full", self.most_of_user, own),
        ):
            if count + videos > most:
                text = f"{count} videos wait, at most {most} may; try again when some are done"
                raise QueueFull(code, text)

    def _same(self, known: Job, digest: str) -> Job:
        if self._count("id=? AND digest=?", known.id, digest):
            return known
        raise Conflict("this Idempotency-Key was used for another request; send a new one")

    def uses(self, user: str, digest: str) -> bool:
        """Whether a job of the user has an input with this digest."""
        return self._count("user=? AND instr(job, ?)", user, digest) > 0

    def keyed(self, user: str, key: str) -> Job | None:
        return next(iter(self._jobs("user=? AND key=?", user, key)), None)

    def repeated(self, user: str, digest: str) -> Job | None:
        """The latest job with this digest that the user has sent within RETRY_S."""
        found = self._jobs(
            "user=? AND digest=? AND created>? ORDER BY seq DESC",
            user,
            digest,
            time.time() - RETRY_S,
        )
        return found[0] if found else None

    def get(self, id: str) -> Job | None:
        return next(iter(self._jobs("id=?", id)), None)

    def page(
        self, user: str | None, *, after: str | None = None, limit: int = 20, newest: bool = True,
        statuses: tuple[str, ...] = STATUSES,
    ) -> tuple[list[Job], bool]:  # fmt: skip
        """Jobs of a user (None: of all) in the order of their arrival, and whether there are more.
        KeyError if there is no job `after`."""
        where, values = f"status IN ({', '.join('?' * len(statuses))})", list(statuses)
        if user is not None:
            where, values = f"{where} AND user=?", [*values, user]
        if after is not None:
            job = self.get(after)
            if job is None or user not in (None, job.user):
                raise KeyError(after)
            where, values = f"{where} AND seq{'<' if newest else '>'}?", [*values, job.seq]
        order = "DESC" if newest else "ASC"
        found = self._jobs(f"{where} ORDER BY seq {order} LIMIT ?", *values, limit + 1)
        return found[:limit], len(found) > limit

    def ahead(self, user: str, priority: int = 0, seq: int = LAST) -> tuple[int, float]:
        """Estimated queue position of a job under fair sharing, and the work before it. By default
        of a job that the user would send now."""
        order = "ORDER BY priority DESC, seq"
        rows = self._db.execute(
            "SELECT user, work, priority, seq, "
            f"ROW_NUMBER() OVER (PARTITION BY user {order}) AS place FROM jobs WHERE status=?",
            (QUEUED,),
        ).fetchall()
        own = [
            row["work"]
            for row in rows
            if row["user"] == user and (-row["priority"], row["seq"]) < (-priority, seq)
        ]
        others = [
            row["work"] for row in rows if row["user"] != user and row["place"] <= len(own) + 1
        ]
        return len(own) + len(others), sum(own) + sum(others)

    def runs(self) -> list[tuple[float, float]]:
        """Work and seconds of the latest completed runs, the latest first."""
        rows = self._db.execute(
            "SELECT work, end_uptime_s-start_uptime_s FROM jobs WHERE status=? "
            "AND end_uptime_s>start_uptime_s ORDER BY finished DESC LIMIT ?",
            (COMPLETED, RUNS),
        )
        return [tuple(row) for row in rows]

    def counts(self, user: str | None = None) -> dict[str, int]:
        """Jobs by status, of a user or of all."""
        where = "WHERE user=?" if user is not None else ""
        rows = self._db.execute(
            f"SELECT status, COUNT(*) FROM jobs {where} GROUP BY status",
            () if user is None else (user,),
        )
        return dict.fromkeys(STATUSES, 0) | {status: count for status, count in rows}

    def cancel(self, id: str) -> Job | None:
        """A queued job is cancelled when this returns; of a running one the wish is noted."""
        with self._write() as db:
            now = time.time()
            error = json.dumps(failure("cancelled", "cancelled before it began"))
            db.execute(
                "UPDATE jobs SET status=?, cancel=?, finished=?, end_uptime_s=?, error=? WHERE "
                "id=? AND status=?",
                (CANCELLED, now, now, self._keep_uptime(db), error, id, QUEUED),
            )
            db.execute(
                "UPDATE jobs SET cancel=? WHERE id=? AND status=? AND cancel IS NULL",
                (now, id, RUNNING),
            )
        return self.get(id)

    def retry(self, id: str) -> Job | None:
        """Queue a job again that failed or was cancelled, in its old place, with all its attempts.
        Another job stays as it is. Raises QueueFull."""
        with self._write() as db:
            if (job := self.get(id)) is not None and job.status in (FAILED, CANCELLED):
                self._require_room(job.user, job.job.get("n", 1))
                none = "cancel, started, finished, error, result, start_uptime_s, end_uptime_s"
                db.execute(
                    "UPDATE jobs SET status=?, attempts=0, deaths=0, progressed=0, "
                    f"{none.replace(',', '=NULL,')}=NULL WHERE id=?",
                    (QUEUED, id),
                )
        return self.get(id)

    def pause(self, on: bool) -> None:
        """Claim nothing, also after a restart, until it is called again with on=False."""
        with self._write() as db:
            db.execute("DELETE FROM paused")
            if on:
                db.execute("INSERT INTO paused VALUES(?)", (time.time(),))

    def paused(self) -> bool:
        return self._db.execute("SELECT 1 FROM paused").fetchone() is not None

    def delete(self, id: str) -> bool:
        """Forget a job that is over."""
        with self._write() as db:
            return (
                db.execute(
                    "DELETE FROM jobs WHERE id=? AND status NOT IN (?, ?)", (id, QUEUED, RUNNING)
                ).rowcount
                == 1
            )

    # --- replicas ---------------------------------------------------------------------------------

    def claim(self, loaded: str | None = None, in_a_row: int = 0) -> Job | None:
        """The next job, in progress from now on: of the user who was given the least, the one with
        the highest priority, then the oldest, those last that two replicas died under; one whose
        LoRAs are `loaded` goes first, MAX_SAME_SET times. Priorities of different users are never
        compared."""
        with self._write() as db:
            waiting = {
                row[0]
                for row in db.execute("SELECT DISTINCT user FROM jobs WHERE status=?", (QUEUED,))
            }
            for user in waiting - self._waited:
                self._served[user] = max(self._served.get(user, 0.0), self._clock)
            self._waited = waiting
            rows = db.execute(
                "SELECT user, MIN(seq + (deaths>1) * ?) FROM jobs WHERE status=? GROUP BY user",
                (LAST, QUEUED),
            ).fetchall()
            if not rows or self.paused():
                return None
            user, _ = min(rows, key=lambda row: (self._served[row[0]], row[1]))
            first = "status=? AND user=? ORDER BY deaths>1, priority DESC, seq LIMIT 1"
            (job,) = self._jobs(first, QUEUED, user)
            if loaded is not None and in_a_row < MAX_SAME_SET and job.loras != loaded:
                same = (
                    "status=? AND user=? AND priority=? AND loras=? ORDER BY deaths>1, seq LIMIT 1"
                )
                job = next(iter(self._jobs(same, QUEUED, user, job.priority, loaded)), job)
            db.execute(
                "UPDATE jobs SET status=?, epoch=epoch+1, attempts=attempts+1, started=?, "
                "start_uptime_s=? WHERE id=? AND status=? AND epoch=?",
                (RUNNING, time.time(), self._keep_uptime(db), job.id, QUEUED, job.epoch),
            )  # fmt: skip
            self._clock = self._served[user]
            self._served[user] += job.work
        return self.get(job.id)

    def finish(
        self, id: str, epoch: int, status: str, *, error: Mapping[str, str] | None = None,
        result: Mapping[str, Any] | None = None,
    ) -> bool:  # fmt: skip
        """End the run of this epoch; whether it was still the job's."""
        with self._write() as db:
            moved = db.execute(
                "UPDATE jobs SET status=?, finished=?, end_uptime_s=?, error=?, result=? "
                "WHERE id=? AND status=? AND epoch=?",
                (
                    *(
                        status,
                        time.time(),
                        self._keep_uptime(db),
                        json.dumps(error),
                        json.dumps(result),
                    ),
                    *(id, RUNNING, epoch),
                ),
            )
            return moved.rowcount == 1

    def give_back(
        self, id: str, epoch: int, error: Mapping[str, str] | None = None, blamed: bool = True
    ) -> Job | None:
        """The run of this epoch has ended without a result: queued again in its old place,
        cancelled if that was asked, failed after too many. error: why, if that is known; blamed:
        whether the job may have caused it."""
        with self._write() as db:
            job = self.get(id)
            if job is None or (job.status, job.epoch) != (RUNNING, epoch):
                return job
            deaths = job.deaths + (error is not None and blamed)
            status, said, finished, ended = QUEUED, None, None, None
            if job.cancel is not None:
                status, said = CANCELLED, failure("cancelled", "cancelled while it ran")
            elif deaths >= MAX_DEATHS or job.attempts - job.progressed >= MAX_ATTEMPTS:
                status, said = (
                    FAILED,
                    error or failure("worker_died", f"ended {job.attempts} times without a result"),
                )
            if status != QUEUED:
                finished, ended = time.time(), self._keep_uptime(db)
            db.execute(
                "UPDATE jobs SET status=?, deaths=?, finished=?, end_uptime_s=?, error=? "
                "WHERE id=? AND status=? AND epoch=?",
                (status, deaths, finished, ended, json.dumps(said), id, RUNNING, epoch),
            )
        return self.get(id)

    # --- start and upkeep -------------------------------------------------------------------------

    def recover(self, published: Callable[[Job], Mapping[str, Any] | None]) -> None:
        """After a start: a run that left its file is completed, another is queued again. published:
        tells of a job the result of its epoch's file, None if there is none."""
        for job in self._jobs("status=?", RUNNING):
            if (result := published(job)) is not None:
                self.finish(job.id, job.epoch, COMPLETED, result=result)
            else:
                self.give_back(job.id, job.epoch)

    def waiting(self) -> list[Job]:
        """The jobs that are not over."""
        return self._jobs("status IN (?, ?)", QUEUED, RUNNING)

    def finished(self) -> list[Job]:
        """Completed jobs that still have a file, the oldest first, fetched ones before others."""
        fetched = "json_extract(result, '$.fetched') IS NULL"
        return self._jobs(
            f"status=? AND json_extract(result, '$.file') IS NOT NULL ORDER BY {fetched}, finished",
            COMPLETED,
        )

    def written_out(self, id: str, epoch: int, prompt: str) -> None:
        """Keep the text that this run's prompt was made into, for every later run of the job."""
        with self._write() as db:
            db.execute(
                "UPDATE jobs SET job=json_set(job, '$.clip.enhanced_prompt', ?) "
                "WHERE id=? AND status=? AND epoch=?",
                (prompt, id, RUNNING, epoch),
            )

    def went_on(self, id: str, epoch: int) -> None:
        """This run has made a part that later ones need not make: the runs before it, and what
        ended them, do not count against the job any more."""
        with self._write() as db:
            db.execute(
                "UPDATE jobs SET progressed=attempts-1, deaths=0 WHERE id=? AND status=? AND epoch=?",
                (id, RUNNING, epoch),
            )

    def note(self, id: str, **facts: Any) -> None:
        """Enter facts into the result of a completed job."""
        with self._write() as db:
            db.execute(
                "UPDATE jobs SET result=json_patch(result, ?) WHERE id=? AND status=?",
                (json.dumps(facts), id, COMPLETED),
            )

    # --- webhooks ---------------------------------------------------------------------------------

    def keep_events(self, users: Iterable[str], forgotten_s: float = 0.0) -> int:
        """Keep an event from now on for each job of these users (EVERYBODY: of all) that ends.
        Events of other users wait until they have a line again, at most `forgotten_s`; returns how
        many wait."""
        without = "NOT EXISTS (SELECT * FROM hooked WHERE hooked.user IN (events.user, ?))"
        with self._write() as db:
            db.execute("DELETE FROM hooked")
            db.executemany("INSERT INTO hooked VALUES(?)", [(user,) for user in users])
            db.execute(
                f"DELETE FROM events WHERE since_s<? AND {without}",
                (self.uptime() - forgotten_s, EVERYBODY),
            )
            found = db.execute(f"SELECT COUNT(*) FROM events WHERE {without}", (EVERYBODY,))
            return found.fetchone()[0]

    def due(self) -> list[WebhookEvent]:
        """The oldest event that is to be sent now, of each user with an address."""
        rows = self._db.execute(
            "SELECT id, user, job, kind, created, tries, :now-since_s AS waited_s, MIN(due_s) FROM "
            "events WHERE due_s<=:now AND EXISTS (SELECT * FROM hooked WHERE hooked.user IN "
            "(events.user, :all)) GROUP BY user ORDER BY due_s",
            {"now": self.uptime(), "all": EVERYBODY},
        )
        return [WebhookEvent(*tuple(row)[:-1]) for row in rows]

    def sent(self, event: str, again_in_s: float | None) -> None:
        """It was sent; again_in_s: when it is to be sent once more, None if never."""
        with self._write() as db:
            if again_in_s is None:
                db.execute("DELETE FROM events WHERE id=?", (event,))
            else:
                due_s = self._keep_uptime(db) + again_in_s
                db.execute("UPDATE events SET tries=tries+1, due_s=? WHERE id=?", (due_s, event))

    def ids(self) -> set[str]:
        return {row[0] for row in self._db.execute("SELECT id FROM jobs")}

    def forget(self, before_s: float) -> None:
        """Delete the rows of jobs that were over at that `uptime` and have no file."""
        with self._write() as db:
            db.execute(
                "DELETE FROM jobs WHERE end_uptime_s<? AND (status<>? OR json_extract(result, "
                "'$.file') IS NULL)",
                (before_s, COMPLETED),
            )
