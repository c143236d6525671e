"""The jobs that run now, and the readers of their events.

Progress lives in memory: a reader is sent the state of a job, never its history, so that a reader
that comes late or reads slowly gets the latest one and nothing piles up."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ltx2rt.stages.segments import SEGMENT

REMEMBERED = 10_000  # jobs whose latest event is sent to a reader that comes back
# stage, step, of, fraction, eta_s: `session.stopwatch.Progress` as JSON has it
Progress = Mapping[str, Any]


def log(event: str, **facts: Any) -> None:
    """One JSON line on stderr, if that can be written."""
    line = {"time": round(time.time(), 3), "event": event, **facts}
    with suppress(OSError):
        print(json.dumps(line), file=sys.stderr, flush=True)


@dataclass(eq=False)
class Watcher:
    """Events of the jobs that a reader may see since the last look: one kind of event for each, the
    latest. previews: whether he wants pictures of those that run."""

    wants: Callable[[str, str], bool]
    previews: bool = False
    news: dict[str, str] = field(default_factory=dict)
    _some: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, id: str, kind: str) -> None:
        # a segment says all that a step or a stage says
        if kind not in ("step", "stage") or self.news.get(id) != SEGMENT:
            self.news[id] = kind
        self._some.set()

    async def take(self, timeout_s: float) -> dict[str, str]:
        """Kinds by job; nothing if nothing happens in time."""
        try:
            await asyncio.wait_for(self._some.wait(), timeout_s)
        except TimeoutError:
            return {}
        self._some.clear()
        taken, self.news = self.news, {}
        return taken


class Board:
    """live: progress of running jobs; previews: number and JPEG of the latest picture."""

    def __init__(self, log: Callable[..., None] = log):
        self.run = f"{time.time_ns():x}"  # begins the ids of this board's events
        # number, user, kind by job
        self._latest: OrderedDict[str, tuple[int, str, str]] = OrderedDict()
        self._number = 0  # number of the latest event
        self.live: dict[str, Progress] = {}
        self.previews: dict[str, tuple[int, bytes]] = {}
        self.watchers: set[Watcher] = set()
        self.log = log

    @contextmanager
    def watch(
        self, wants: Callable[[str, str], bool], previews: bool = False, after: str | None = None
    ):
        """wants(job, user): whether the reader gets its events. after: the id of the latest event
        that it had; what happened since is sent first."""
        watcher = Watcher(wants, previews)
        self.watchers.add(watcher)
        if after is not None:
            run, _, number = after.rpartition("-")
            seen = int(number) if run == self.run and number.isascii() and number.isdecimal() else 0
            for id, (at, user, kind) in self._latest.items():
                if at > seen and wants(id, user):
                    watcher.put(id, kind)
        try:
            yield watcher
        finally:
            self.watchers.discard(watcher)

    @property
    def event_id(self) -> str:
        """The id of the latest event, for `watch`."""
        return f"{self.run}-{self._number}"

    def previewed(self, id: str, user: str) -> bool:
        """Whether somebody wants pictures of the job."""
        return any(watcher.previews and watcher.wants(id, user) for watcher in self.watchers)

    def show(self, id: str, user: str, number: int, picture: bytes) -> None:
        """A new picture of a job; those who want none are not told."""
        self.previews[id] = number, picture
        for watcher in self.watchers:
            if watcher.previews and watcher.wants(id, user):
                watcher.put(id, "preview")

    def tell(
        self, kind: str, id: str, user: str, progress: Progress | None = None, **facts: Any
    ) -> None:
        """kind: queued, started, stage, step, segment, cancelling, completed, failed, deleted."""
        if progress is not None:
            self.live[id] = progress
        elif kind in ("queued", "completed", "failed", "deleted"):
            self.live.pop(id, None)
            self.previews.pop(id, None)
        if kind != "step":
            self.log(kind, job=id, **facts)
        self._number += 1
        self._latest[id] = self._number, user, kind
        self._latest.move_to_end(id)
        if len(self._latest) > REMEMBERED:
            self._latest.popitem(last=False)
        for watcher in self.watchers:
            if watcher.wants(id, user):
                watcher.put(id, kind)
