"""The queue: every accepted job in one SQLite file, and how it moves.

    queued -> in_progress -> completed | failed | cancelled
       ^-----------'  its replica or the server died

Decides how jobs move, and whose is next; `jobs` has their rows. A move is one compare-and-set on
status and epoch; each claim begins an epoch, so that work on an earlier one changes nothing. One
process has the file open, one thread at a time uses it.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltx2rt.serve.jobs import (
    CANCELLED,
    COMPLETED,
    EVERYBODY,
    FAILED,
    QUEUED,
    RUNNING,
    STATUSES,
    Job,
    JobFile,
    failure,
    new_id,
)
from ltx2rt.serve.refusal import Refusal, conflict, invalid

# deaths of replicas under one job; runs, with those that a dying server ended
MAX_DEATHS, MAX_ATTEMPTS = (3, 10)
LAST = 10**12  # added to the place of a job that goes after the others
MAX_SAME_SET = 4  # jobs in a row that may overtake others because their LoRAs are loaded
RUNS = 50  # the latest, which estimates go by
QUOTA_S = 86400.0  # the time for which `most_sent` counts
RETRY_S = 60  # within it the same body of a client is a retry of the same job
FULL_S = 10  # until there may be room again


@dataclass(frozen=True)
class WebhookEvent:
    """The end of a job, to be sent to its user's webhook. kind: completed or failed; created:
    seconds since 1970; tries: failed ones; waited_s: how long servers have tried to send it."""

    id: str
    user: str
    job: str
    kind: str
    created: float
    tries: int
    waited_s: float


class Queue(JobFile):
    """most, most_of_user: videos that may wait. most_sent: videos that a user may send in QUOTA_S.
    The others: as of `JobFile`."""

    def __init__(
        self, path: Path | str, most: int = 1000, most_of_user: int | None = None,
        most_sent: int | None = None, wait_s: float = 5.0,
    ):  # fmt: skip
        super().__init__(path, wait_s)
        self.most, self.most_of_user, self.most_sent = most, most_of_user or most, most_sent
        # work given to each user; a returning user begins at the clock
        self._served: dict[str, float] = {}
        self._waited: set[str] = set()  # users who had jobs in the queue at the latest claim
        self._clock = 0.0

    # --- clients ----------------------------------------------------------------------------------

    def add(
        self, user: str, digest: str, given: Mapping[str, Any], job: Mapping[str, Any], *,
        work: float = 1.0,
        loras: str = "", priority: int = 0, key: str | None = None, remixed_from: str | None = None,
        id: str | None = None,
    ) -> Job:  # fmt: skip
        """A new job, or the user's job with this key and digest. Raises Refusal if there is no
        room, or the key came with another body."""
        with self._write() as db:
            if key and (known := self._job("user=? AND key=?", user, key)):
                if self._count("id=? AND digest=?", known.id, digest):
                    return known
                raise conflict("this Idempotency-Key was used for another request; send a new one")
            self._require_room(user, videos := job.get("n", 1))
            self._count_sent(db, user, videos)
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
        """Raises Refusal."""
        own = self._videos("status=? AND user=?", QUEUED, user)
        for code, most, count in (
            ("queue_full", self.most, self._videos("status=?", QUEUED)),
            ("user_queue_full", self.most_of_user, own),
        ):
            if count + videos > most:
                text = f"{count} videos wait, at most {most} may; try again when some are done"
                raise Refusal(429, code, text, retry_after_s=FULL_S)

    def _count_sent(self, db: sqlite3.Connection, user: str, videos: int) -> None:
        """Raises Refusal if the user has sent too many; deleted videos count."""
        if self.most_sent is None:
            return
        now = self.uptime()
        db.execute("DELETE FROM sent WHERE at_uptime_s<=?", (now - QUOTA_S,))
        count, first = db.execute(
            "SELECT COALESCE(SUM(videos), 0), MIN(at_uptime_s) FROM sent WHERE user=?", (user,)
        ).fetchone()
        if count + videos > self.most_sent:
            sent = f"{count} videos were sent in 24 hours, at most {self.most_sent} may be"
            after_s = math.ceil(QUOTA_S if first is None else first + QUOTA_S - now)
            raise Refusal(429, "user_quota", f"{sent}; send it later", retry_after_s=after_s)
        db.execute("INSERT INTO sent VALUES(?, ?, ?)", (user, now, videos))

    def uses(self, user: str, digest: str) -> bool:
        """Whether a job of the user has an input with this digest."""
        return self._count("user=? AND instr(job, ?)", user, digest) > 0

    def repeated(self, user: str, digest: str) -> Job | None:
        """The latest job with this digest that the user has sent within RETRY_S."""
        latest, since = "user=? AND digest=? AND created>? ORDER BY seq DESC", time.time() - RETRY_S
        return self._job(latest, user, digest, since)

    def get(self, id: str) -> Job | None:
        return self._job("id=?", id)

    def page(
        self, user: str, *, after: str | None = None, limit: int = 20, newest: bool = True,
        statuses: tuple[str, ...] = STATUSES,
    ) -> tuple[list[Job], bool]:  # fmt: skip
        """Jobs of a user in the order of their arrival, and whether there are more. Raises Refusal
        if there is no job `after`."""
        where = f"user=? AND status IN ({', '.join('?' * len(statuses))})"
        values = [user, *statuses]
        if after is not None:
            job = self.get(after)
            if job is None or job.user != user:
                raise invalid("after: no such video", "after")
            where, values = f"{where} AND seq{'<' if newest else '>'}?", [*values, job.seq]
        order = "DESC" if newest else "ASC"
        found = self._jobs(f"{where} ORDER BY seq {order} LIMIT ?", *values, limit + 1)
        return found[:limit], len(found) > limit

    def ahead(self, user: str, priority: int = 0, seq: int = LAST) -> tuple[int, float]:
        """Return the estimated queue position of a job under fair sharing, and the work before it;
        by default, of a job that the user would send now."""
        order = "ORDER BY priority DESC, seq"
        rows = self._db.execute(
            "SELECT work, user=?, (-priority, seq) < (?, ?), "
            f"ROW_NUMBER() OVER (PARTITION BY user {order}) FROM jobs WHERE status=?",
            (user, -priority, seq, QUEUED),
        ).fetchall()
        own = [work for work, is_own, before, _ in rows if is_own and before]
        others = [work for work, is_own, _, place in rows if not is_own and place <= len(own) + 1]
        return len(own) + len(others), sum(own) + sum(others)

    def runs(self) -> list[tuple[float, float]]:
        """Work and seconds of the latest completed runs, the latest first."""
        rows = self._db.execute(
            "SELECT work, end_uptime_s-start_uptime_s FROM jobs WHERE status=? "
            "AND end_uptime_s>start_uptime_s ORDER BY finished DESC LIMIT ?",
            (COMPLETED, RUNS),
        )
        return list(map(tuple, rows))

    def counts(self, user: str | None = None) -> dict[str, int]:
        """Jobs by status, of a user or of all."""
        counted = "SELECT status, COUNT(*) FROM jobs WHERE user=? OR ? IS NULL GROUP BY status"
        found = self._db.execute(counted, (user, user))
        return dict.fromkeys(STATUSES, 0) | dict(map(tuple, found))

    def cancel(self, id: str) -> Job | None:
        """Cancel a queued job at once; note the wish for a running one."""
        with self._write() as db:
            now = time.time()
            error = json.dumps(failure("cancelled", "cancelled before it began"))
            self._set(
                "status=?, cancel=?, finished=?, end_uptime_s=?, error=?", "id=? AND status=?",
                CANCELLED, now, now, self._keep_uptime(db), error, id, QUEUED,
            )  # fmt: skip
            self._set("cancel=?", "id=? AND status=? AND cancel IS NULL", now, id, RUNNING)
        return self.get(id)

    def retry(self, id: str) -> Job | None:
        """Queue a failed or cancelled job again, in its old place, with all its attempts. Any other
        job stays as it is. Raises Refusal if there is no room."""
        with self._write():
            if (job := self.get(id)) is not None and job.status in (FAILED, CANCELLED):
                self._require_room(job.user, job.job.get("n", 1))
                none = "cancel, started, finished, error, result, start_uptime_s, end_uptime_s"
                nothing = f"{none.replace(',', '=NULL,')}=NULL"
                what = f"status=?, attempts=0, deaths=0, progressed=0, {nothing}"
                self._set(what, "id=?", QUEUED, id)
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
            over = "DELETE FROM jobs WHERE id=? AND status NOT IN (?, ?)"
            return db.execute(over, (id, QUEUED, RUNNING)).rowcount == 1

    # --- replicas ---------------------------------------------------------------------------------

    def claim(self, loaded: str | None = None, in_a_row: int = 0) -> Job | None:
        """Start the next job and return it; None if there is none.

        The user who was given the least work comes first. Of this user's jobs the highest priority
        wins, then the oldest job. Jobs that crashed two replicas go last. A job with the LoRAs
        `loaded` goes first up to MAX_SAME_SET times in a row. Priorities of different users are
        never compared."""
        with self._write() as db:
            rows = db.execute(
                "SELECT user, MIN(seq + (deaths>1) * ?) FROM jobs WHERE status=? GROUP BY user",
                (LAST, QUEUED),
            )
            waiting = dict(map(tuple, rows))
            for user in waiting.keys() - self._waited:
                self._served[user] = max(self._served.get(user, 0.0), self._clock)
            self._waited = set(waiting)
            if not waiting or self.paused():
                return None
            user = min(waiting, key=lambda user: (self._served[user], waiting[user]))
            first = "status=? AND user=? ORDER BY deaths>1, priority DESC, seq LIMIT 1"
            (job,) = self._jobs(first, QUEUED, user)
            if loaded is not None and in_a_row < MAX_SAME_SET and job.loras != loaded:
                same = "status=? AND user=? AND priority=? AND loras=? ORDER BY deaths>1, seq"
                job = self._job(same, QUEUED, user, job.priority, loaded) or job
            self._set(
                "status=?, epoch=epoch+1, attempts=attempts+1, started=?, start_uptime_s=?",
                "id=? AND status=? AND epoch=?",
                RUNNING, time.time(), self._keep_uptime(db), job.id, QUEUED, job.epoch,
            )  # fmt: skip
            self._clock = self._served[user]
            self._served[user] += job.work
        return self.get(job.id)

    def finish(
        self, id: str, epoch: int, status: str, *, error: Mapping[str, str] | None = None,
        result: Mapping[str, Any] | None = None,
    ) -> bool:  # fmt: skip
        """End the run of this epoch; return whether it was still the job's."""
        with self._write() as db:
            return self._change(
                id, epoch, "status=?, finished=?, end_uptime_s=?, error=?, result=?",
                status, time.time(), self._keep_uptime(db), json.dumps(error), json.dumps(result),
            )  # fmt: skip

    def _change(self, id: str, epoch: int, what: str, *values: Any) -> bool:
        """Set columns of a job if it is in this epoch's run; return whether it is."""
        return self._set(what, "id=? AND status=? AND epoch=?", *values, id, RUNNING, epoch) == 1

    def give_back(
        self, id: str, epoch: int, error: Mapping[str, str] | None = None, blamed: bool = True
    ) -> Job | None:
        """End the run of this epoch without a result: queue the job again in its old place, cancel
        it if its user asked for that, or fail it after too many runs. error: the reason, if it is
        known; blamed: whether the job may have caused it."""
        with self._write() as db:
            job = self.get(id)
            if job is None or (job.status, job.epoch) != (RUNNING, epoch):
                return job
            deaths = job.deaths + (error is not None and blamed)
            status, said, finished, ended = QUEUED, None, None, None
            if job.cancel is not None:
                status, said = CANCELLED, failure("cancelled", "cancelled while it ran")
            elif deaths >= MAX_DEATHS or job.attempts - job.progressed >= MAX_ATTEMPTS:
                ended_so = f"ended {job.attempts} times without a result"
                status, said = FAILED, error or failure("worker_died", ended_so)
            if status != QUEUED:
                finished, ended = time.time(), self._keep_uptime(db)
            what = "status=?, deaths=?, finished=?, end_uptime_s=?, error=?"
            self._change(id, epoch, what, status, deaths, finished, ended, json.dumps(said))
        return self.get(id)

    # --- start and upkeep -------------------------------------------------------------------------

    def recover(self, published: Callable[[Job], Mapping[str, Any] | None]) -> None:
        """Complete each running job that left its file, and queue the others again, after a start.
        published: returns the result in the file of a job's epoch, None if there is no file."""
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
        there = "status=? AND json_extract(result, '$.file') IS NOT NULL"
        order = "ORDER BY json_extract(result, '$.fetched') IS NULL, finished"
        return self._jobs(f"{there} {order}", COMPLETED)

    def written_out(self, id: str, epoch: int, prompt: str) -> None:
        """Keep the enhanced prompt of this run for every later run of the job."""
        with self._write():
            self._change(id, epoch, "job=json_set(job, '$.clip.enhanced_prompt', ?)", prompt)

    def went_on(self, id: str, epoch: int) -> None:
        """A segment is finished: reset the job's retry count."""
        with self._write():
            self._change(id, epoch, "progressed=attempts-1, deaths=0")

    def note(self, id: str, **facts: Any) -> None:
        """Enter facts into the result of a completed job."""
        patch = "result=json_patch(result, ?)"
        with self._write():
            self._set(patch, "id=? AND status=?", json.dumps(facts), id, COMPLETED)

    # --- webhooks ---------------------------------------------------------------------------------

    def keep_events(self, users: Iterable[str], forgotten_s: float = 0.0) -> int:
        """From now on, keep an event for each job of these users (EVERYBODY: of all) that ends.
        Events of users without a line wait at most `forgotten_s` for one; return how many wait."""
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
        """Return the oldest event that is due, of each user with an address."""
        rows = self._db.execute(
            "SELECT id, user, job, kind, created, tries, :now-since_s AS waited_s, MIN(due_s) FROM "
            "events WHERE due_s<=:now AND EXISTS (SELECT * FROM hooked WHERE hooked.user IN "
            "(events.user, :all)) GROUP BY user ORDER BY due_s",
            {"now": self.uptime(), "all": EVERYBODY},
        )
        return [WebhookEvent(*tuple(row)[:-1]) for row in rows]

    def sent(self, event: str, again_in_s: float | None) -> None:
        """Send an event again after `again_in_s`; None: forget it."""
        with self._write() as db:
            if again_in_s is None:
                db.execute("DELETE FROM events WHERE id=?", (event,))
            else:
                due_s = self._keep_uptime(db) + again_in_s
                db.execute("UPDATE events SET tries=tries+1, due_s=? WHERE id=?", (due_s, event))

    def ids(self) -> set[str]:
        return {row[0] for row in self._db.execute("SELECT id FROM jobs")}

    def forget(self, before_s: float) -> None:
        """Delete the rows of jobs that ended before that `uptime` and have no file."""
        with self._write() as db:
            db.execute(
                "DELETE FROM jobs WHERE end_uptime_s<? AND (status<>? OR json_extract(result, "
                "'$.file') IS NULL)",
                (before_s, COMPLETED),
            )
