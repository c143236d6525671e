"""The rows of the queue's file: jobs, and the table that keeps them.

A call that returns has reached the disk (WAL, synchronous FULL). How long jobs run and results are
kept is counted in the seconds that servers have had the file open, which no change of the machine's
clock moves.
"""

from __future__ import annotations

import json
import re
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.pipelines.earlier import current
from ltx2rt.text_files import parse

QUEUED, RUNNING, COMPLETED, FAILED = "queued", "in_progress", "completed", "failed"
CANCELLED = "cancelled"
STATUSES = (QUEUED, RUNNING, COMPLETED, FAILED, CANCELLED)
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
CREATE TABLE IF NOT EXISTS sent(user TEXT NOT NULL, at_uptime_s REAL NOT NULL, videos INTEGER NOT NULL);
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


JOB = {
    "pipeline": str, "clip": dict, "images": [list], "loras": [list], "files?": {str: [list]},
    "n?": int,
}  # fmt: skip


def _whole(given: str, job: str, error: str | None, result: str | None) -> bool:
    """Whether the JSON of a row is a job's, as its readers take it."""
    try:
        parse(given, dict)
        parse(error or "null", ({"code": str, "message": str}, None))
        parse(result or "null", (dict, None))
        read = parse(job, JOB)
    except (ValueError, TypeError):
        return False
    kept = [*read["images"], *read["loras"], *chain(*read.get("files", {}).values())]
    return all(one and isinstance(one[0], str) for one in kept)


def _current(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with the settings of this release. The file keeps them as they were written,
    since a server may be put back to the release before."""
    job = row["job"]
    if "clip" not in job:  # it fails by its own sentence when it is run
        return row
    clip, given = (current(job["pipeline"], found) for found in (job["clip"], row["given"]))
    return row | {"given": given, "job": job | {"clip": clip}}


class JobFile:
    """path: of the file, or ":memory:". wait_s: for another program's lock."""

    def __init__(self, path: Path | str, wait_s: float = 5.0):
        self._opened = time.monotonic()
        try:
            self._db = sqlite3.connect(path, wait_s, isolation_level=None, check_same_thread=False)
            self._db.row_factory = sqlite3.Row
            application = self._one("PRAGMA application_id")
            version = self._one("PRAGMA user_version")
            if application == APPLICATION and version > VERSION:
                raise InputError(
                    f"--data: {path} is the queue of a newer ltx2rt (version {version}, this one "
                    f"reads {VERSION}); start that one, or name another folder"
                )
            empty = not self._one("SELECT COUNT(*) FROM sqlite_master")
            if (application, version) != ((0, 0) if empty else (APPLICATION, VERSION)):
                reason = "is another program's database; name another folder"
                raise InputError(f"--data: {path} {reason}")
            if (state := self._one("PRAGMA quick_check(1)")) != "ok":
                raise sqlite3.DatabaseError(str(state).splitlines()[-1])
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            with self._write():
                for statement in (*filter(str.strip, SCHEMA.split(";")), ENDED):
                    self._db.execute(statement)
                self._upgrade()
                self._db.execute(f"PRAGMA application_id={APPLICATION}")
                self._db.execute(f"PRAGMA user_version={VERSION}")
            self._before_s = self._one("SELECT seconds FROM uptime")
        except sqlite3.Error as error:
            reason = "is locked: another program holds it; end that one"
            if "locked" not in str(error):
                reason = (
                    f"cannot be opened as a queue ({error}); put a good copy of it there, or "
                    "name another folder; finished clips are files beside it"
                )
            raise InputError(f"--data: {path} {reason}") from error

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
        damaged = [id for id, *texts in rows if not _whole(*texts)]
        error = json.dumps(failure("internal", "its row in the queue was damaged; send it again"))
        what = "status=?, error=?, given='{}', job=?, result=NULL, end_uptime_s=0"
        for id in damaged:
            self._set(what, "id=?", FAILED, error, json.dumps(NO_JOB), id)

    def uptime(self) -> float:
        """Seconds that servers have had this file open, all together."""
        return self._before_s + time.monotonic() - self._opened

    def keep_uptime(self) -> None:
        with self._write() as db:
            self._keep_uptime(db)

    def _keep_uptime(self, db: sqlite3.Connection) -> float:
        db.execute("UPDATE uptime SET seconds=?", (now := self.uptime(),))
        return now

    def _one(self, question: str, *values: Any) -> Any:
        return self._db.execute(question, values).fetchone()[0]

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
        rows = map(dict, self._db.execute(f"SELECT {COLUMNS} FROM jobs WHERE {where}", values))
        texts = [row | {n: json.loads(row[n]) for n in JSON if row[n]} for row in rows]
        return [Job(**_current(row)) for row in texts]

    def _job(self, where: str, *values: Any) -> Job | None:
        return next(iter(self._jobs(f"{where} LIMIT 1", *values)), None)

    def _set(self, what: str, where: str, *values: Any) -> int:
        """Set columns of jobs; how many."""
        return self._db.execute(f"UPDATE jobs SET {what} WHERE {where}", values).rowcount

    def _count(self, where: str, *values: Any) -> int:
        return self._one(f"SELECT COUNT(*) FROM jobs WHERE {where}", *values)

    def _videos(self, where: str, *values: Any) -> int:
        return self._one(
            "SELECT COALESCE(SUM(COALESCE(json_extract(job, '$.n'), 1)), 0) FROM jobs WHERE "
            f"{where}",
            *values,
        )
