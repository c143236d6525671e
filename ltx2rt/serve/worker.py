"""A replica: one session that runs the jobs it is sent, one at a time.

One JSON object a line. It reads `{"do": "run", "id", "epoch", "stem", "pipeline", "clip", "images", "loras"}` and
`{"do": "cancel", "id"}`, and ends at once when there is no more to read. It writes `{"event": "ready", "device",
"mesh"}` when it is warm; of each job `progress` after every step, then `done` with its result, `cancelled`, or `failed`
with code and message. After a failure that may have left the device in disorder it ends, to be started again.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, BinaryIO

import numpy as np

from ltx2rt.commands.generate import make_plan, produce, sample_rate, save, timed, warm_up
from ltx2rt.errors import Cancelled, InputError
from ltx2rt.media.mp4 import to_rgb8
from ltx2rt.pipelines import make_request
from ltx2rt.serve.folder import publish
from ltx2rt.serve.shapes import Shape
from ltx2rt.session.options import LoraSpec
from ltx2rt.session.session import Session
from ltx2rt.session.stopwatch import Progress

THUMBNAIL_PX = 320


class Pipe:
    """inbox, outbox: as the module says. Reads in a thread of its own."""

    def __init__(self, inbox: BinaryIO, outbox: BinaryIO):
        self.inbox, self.outbox = inbox, outbox
        self.jobs: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.cancelled: set[str] = set()
        self._lock = Lock()
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.inbox:
            message = json.loads(line)
            if message["do"] == "run":
                self.jobs.put(message)
            else:
                self.cancelled.add(message["id"])
        os._exit(0)  # the server is gone, and with it whoever waits for this run

    def tell(self, event: str, **facts: Any) -> None:
        with self._lock:
            self.outbox.write(json.dumps({"event": event, **facts}).encode() + b"\n")
            self.outbox.flush()


def work(session: Session, warm: Sequence[Shape], pipe: Pipe) -> int:
    """Run jobs for ever; returns the exit status after a failure that only a new process mends."""
    for shape in warm:
        plan = make_plan(session, make_request(shape.pipeline, prompt="a warm-up", seed=0, **shape.clip))
        session.require_memory(plan.stages)
        warm_up(session, plan)
    device = asdict(session.backend.device())
    device["free_bytes"] += session.weights.held_bytes
    pipe.tell("ready", device=device, mesh=dict(session.backend.mesh))
    own = session.options.loras
    while True:
        job = pipe.jobs.get()
        event, facts = attempt(session, own, job, pipe)
        pipe.cancelled.discard(job["id"])
        pipe.tell(event, id=job["id"], epoch=job["epoch"], **facts)
        if facts.get("code") == "internal":
            return 1
        if facts.get("code") == "out_of_memory":
            gc.collect()
            session.backend.trim()


def attempt(session: Session, own: tuple[LoraSpec, ...], job: dict[str, Any], pipe: Pipe) -> tuple[str, dict[str, Any]]:
    """The event that ends a job, with its facts."""

    def progress(now: Progress) -> None:
        pipe.tell("progress", id=job["id"], epoch=job["epoch"], **asdict(now))

    try:
        return "done", {"result": run(session, own, job, progress, lambda: job["id"] in pipe.cancelled)}
    except Cancelled:
        return "cancelled", {}
    except InputError as error:
        code = "too_large_for_memory" if str(error).startswith("no room") else "input_changed"
        return "failed", {"code": code, "message": str(error)}
    except Exception as error:
        print(f"ltx2rt: {job['id']}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = "out_of_memory" if ran_out_of_memory(error) else "internal"
        return "failed", {"code": code, "message": f"{type(error).__name__}: {error}"[:500]}


def ran_out_of_memory(error: Exception) -> bool:
    """As torch and XLA say it."""
    text = f"{type(error).__name__} {error}".lower()
    return isinstance(error, MemoryError) or any(words in text for words in ("out of memory", "resource_exhausted"))


def run(
    session: Session,
    own: tuple[LoraSpec, ...],
    job: dict[str, Any],
    progress: Callable[[Progress], None],
    cancelled: Callable[[], bool],
) -> dict[str, Any]:
    """Make the job's files; its result. own: the LoRAs of every job."""
    session.use_loras((*own, *(LoraSpec(Path(path), *rest) for path, *rest in job["loras"])))
    images = [(Path(path), frame, strength) for path, frame, strength in job["images"]]
    plan = make_plan(session, make_request(job["pipeline"], **job["clip"], images=images))
    session.require_memory(plan.stages)
    plan = timed(session, plan)
    state, _, report = produce(session, plan, on_progress=progress, cancelled=cancelled)
    first: list[np.ndarray] = []

    def noted(frames: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        for chunk in frames:
            if not first:
                first.append(to_rgb8(chunk[:, :1])[0])
            yield chunk

    waveform = None if state.waveforms is None else state.waveforms[0]
    frames = next(state.frames)
    return publish(
        Path(job["stem"]),
        lambda path: save(session, plan.request, 0, path, noted(frames), waveform, sample_rate(session, state)),
        lambda path: thumbnail(first[0], path),
        report,
    )


def thumbnail(frame: np.ndarray, path: Path) -> None:
    """frame: u8[H, W, 3]."""
    from PIL import Image

    image = Image.fromarray(frame)
    image.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    image.save(path, "WEBP")
