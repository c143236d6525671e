"""A replica: one session that runs the jobs it is sent, one at a time.

One JSON object a line. It reads `{"do": "run", "id", "epoch", "stem", "pipeline", "clip", "n",
"images", "files", "loras"}`, `{"do": "cancel"}` and `{"do": "watch"}` with the `id`, and ends at
once when there is no more to read. It writes `{"event": "ready", "device", "mesh"}` when it is
warm; of each job `progress` after every step, of a watched one `preview` after every fourth, then
`done` with its result, `cancelled`, or `failed` with code and message. With `"ends"` it ends after
the failure, which may have left the device in disorder.

The first of several ranks talks to the server and hands each job out. A failure on one of them ends
them all, for the others may wait for it in a collective; who fails says so.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain, count, islice
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, BinaryIO

import numpy as np

from ltx2rt.errors import Cancelled, InputError
from ltx2rt.media.hdr import HighRange, as_frames, to_srgb
from ltx2rt.media.mp4 import to_rgb8
from ltx2rt.media.output import zipped
from ltx2rt.notes import note
from ltx2rt.pipelines import make_request
from ltx2rt.pipelines.earlier import require_known
from ltx2rt.pipelines.request import Request
from ltx2rt.ranks.crew import Crew
from ltx2rt.ranks.environment import FAILED
from ltx2rt.run.files import Marks
from ltx2rt.run.plan import enhanced_prompt
from ltx2rt.run.preview import EVERY, fitted, picture_of
from ltx2rt.run.recording import high_range
from ltx2rt.run.run import MARKED, Run, warm_up
from ltx2rt.run.segments import discard
from ltx2rt.serve.folder import CLIP, FRAMES, STORAGE, publish, segments_of, writing_problem
from ltx2rt.serve.shapes import Shape
from ltx2rt.session.options import LoraSpec
from ltx2rt.session.session import Session
from ltx2rt.session.stopwatch import Progress

THUMBNAIL_PX = 320
DEVICE_WAIT_S = 10.0  # until a driver has taken back the memory of a process that was killed
FOLDERS = re.compile(r"/(?:[^\s/:'\"]+/)+")  # before a file's name


class Pipe:
    """Reads `inbox` in a thread of its own. inbox: None on a rank that is handed its jobs."""

    def __init__(self, inbox: BinaryIO | None, outbox: BinaryIO):
        self.outbox = outbox
        self.jobs: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.cancelled: set[str] = set()
        self.watched: set[str] = set()
        self._lock = Lock()
        if inbox is not None:
            Thread(target=self._read, args=(inbox,), daemon=True).start()

    def _read(self, inbox: BinaryIO) -> None:
        for line in inbox:
            message = json.loads(line)
            if message["do"] == "run":
                self.jobs.put(message)
            else:
                {"cancel": self.cancelled, "watch": self.watched}[message["do"]].add(message["id"])
        os._exit(0)  # the server is gone, and with it every reader of this run

    def tell(self, event: str, **facts: Any) -> None:
        with self._lock:
            self.outbox.write(json.dumps({"event": event, **facts}).encode() + b"\n")
            self.outbox.flush()


def work(
    session: Session, warm: Sequence[Shape], pipe: Pipe, crew: Crew | None = None,
    previews: bool = False, enhancer: Path | None = None, marks: Marks = MARKED,
) -> int:  # fmt: skip
    """Run jobs for ever; the exit status after a failure that only a new process mends. crew: of
    several ranks; enhancer: a Gemma that writes prompts out; marks: of all clips."""
    first = crew is None or crew.rank == 0
    projection = None
    if previews:
        with suppress(InputError):  # without a video encoder there are none
            projection = fitted(session)
    places = session.backend.mesh.get("data", 1)
    for shape in warm:
        clip = dict(prompt="a warm-up", seed=0, num_videos=places, **shape.clip)
        warm_up(session, Run(session, make_request(shape.pipeline, **clip)).plan)
    if first:
        pipe.tell("ready", device=room(session), mesh=dict(session.backend.mesh))
    own = session.options.loras
    for number in count():
        job = next_job(session, pipe, enhancer) if first else {}
        if crew is not None:
            job = json.loads(crew.handed_out("job", number, json.dumps(job)))
        event, facts = attempt(session, own, job, pipe if first else None, projection, marks)
        pipe.cancelled.discard(job["id"])
        pipe.watched.discard(job["id"])
        alone = ("out_of_memory", STORAGE)  # what one rank meets while the others wait for it
        lost = facts.get("code") == "internal" or (crew is not None and facts.get("code") in alone)
        if first or lost:
            ends = {"ends": True} if lost else {}
            pipe.tell(event, id=job["id"], epoch=job["epoch"], **facts, **ends)
        if lost and crew is not None:
            crew.fail(facts["message"], FAILED)
        if lost:
            return FAILED
        if facts.get("code") == "out_of_memory":
            gc.collect()
            session.backend.trim()
    raise AssertionError("jobs never end")


def next_job(session: Session, pipe: Pipe, enhancer: Path | None) -> dict[str, Any]:
    """The next job, after writing out its prompt if asked to; one that cannot be has failed."""
    while True:
        job = pipe.jobs.get()
        clip, named = job["clip"], {"id": job["id"], "epoch": job["epoch"]}
        if not clip.get("enhance_prompt") or clip.get("enhanced_prompt"):
            return job
        pipe.tell("progress", **named, stage="prompt", step=0, of=0, fraction=0.0, eta_s=None)
        try:
            asked = replace(request_of(job), prompt_enhancer=enhancer)
            written = enhanced_prompt(asked, session.checkpoint, session.options)
        except Exception as error:
            print(f"ltx2rt: {job['id']}: {type(error).__name__}: {error}", file=sys.stderr)
            code = "input_changed" if isinstance(error, InputError) else "enhancing"
            pipe.tell("failed", **named, code=code, message=FOLDERS.sub("", str(error)[:500]))
            continue
        clip["enhanced_prompt"] = written
        pipe.tell("enhanced", **named, prompt=written)
        return job


def request_of(job: dict[str, Any], **more: Any) -> Request:
    """The request of a job's message. Raises InputError."""
    if images := job["images"]:
        more["images"] = [(Path(path), frame, strength) for path, frame, strength in images]
    require_known("this job", job["pipeline"], job["clip"])
    return make_request(job["pipeline"], **job["clip"], **job.get("files", {}), **more)


def room(session: Session) -> dict[str, Any]:
    """The device as a request finds it that lets go of all that earlier ones have left there."""
    device = session.backend.device()
    free_bytes = device.free_bytes + device.recorded_bytes + session.weights.held_bytes
    return asdict(replace(device, free_bytes=free_bytes, recorded_bytes=0))


def attempt(
    session: Session, own: tuple[LoraSpec, ...], job: dict[str, Any], pipe: Pipe | None,
    projection: np.ndarray | None = None, marks: Marks = MARKED,
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """Make the job's files: the event that ends it, and its facts. own: the LoRAs of every job;
    pipe: of rank 0; projection: of `preview`."""
    named = {"id": job["id"], "epoch": job["epoch"]}
    steps = count(1)

    def progress(now: Progress) -> None:
        if pipe is not None:
            pipe.tell("progress", **named, **asdict(now))

    def look(latents: Callable[[], np.ndarray], _: Any) -> None:
        number = next(steps)
        watched = pipe is not None and job["id"] in pipe.watched
        if pipe and projection is not None and watched and number % EVERY == 0:
            picture = picture_of(latents()[0], projection)
            pipe.tell("preview", **named, number=number, jpeg=b64encode(picture).decode())

    def cancelled() -> bool:
        return pipe is not None and job["id"] in pipe.cancelled

    try:
        made, result = planned(session, own, job), {}
        made.marks = marks
        with made.kept_in(segments_of(job), Path(job["stem"] + CLIP), own=True):
            made.make(on_progress=progress, cancelled=cancelled, look=look)
            if made.is_main:
                result = _published(made, job)
                discard(segments_of(job))
            else:
                made.follow()
        return "done", {"result": result}
    except Cancelled:
        ended: tuple[str, dict[str, Any]] = "cancelled", {}
    except InputError as error:
        code = "too_large_for_memory" if str(error).startswith("no room") else "input_changed"
        ended = "failed", {"code": code, "message": FOLDERS.sub("", str(error))}
    except Exception as error:
        folder = Path(job["stem"]).parent
        if isinstance(error, OSError) and (reason := writing_problem(folder, error)):
            return "failed", {"code": STORAGE, "message": f"the clip cannot be written: {reason}"}
        print(f"ltx2rt: {job['id']}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = "out_of_memory" if ran_out_of_memory(error) else "internal"
        message = FOLDERS.sub("", f"{type(error).__name__}: {error}"[:500])
        ended = "failed", {"code": code, "message": message}
    discard(segments_of(job))  # no other run goes on from it
    return ended


def ran_out_of_memory(error: Exception) -> bool:
    """As torch and XLA say it."""
    text = f"{type(error).__name__} {error}".lower()
    said = "out of memory" in text or "resource_exhausted" in text
    return said or isinstance(error, MemoryError)


def _published(made: Run, job: dict[str, Any]) -> dict[str, Any]:
    first: list[np.ndarray] = []
    hdr = high_range(made.session, made.clip)

    def write(number: int, path: Path) -> None:
        frames = next(made.state.frames)
        if not first:
            begin = next(frames)
            first.append(first_frame(begin, hdr))
            frames = chain([begin], frames)
        if job.get("frames") and hdr:
            waveform = made.waveform(number)
            frames = zipped(frames, path.with_suffix(FRAMES), hdr, waveform, made.sample_rate)
        if made.recorded is None:
            made.save(number, [path], frames)
        else:
            made.recorded.finish(path)
            deque(frames if job.get("frames") else islice(frames, 1), maxlen=0)

    def told() -> dict[str, Any]:
        """The report with the names of files alone: clients read it."""
        full, settings = made.report(), made.comment()["settings"]
        lora = [{**one, "file": Path(one["file"]).name} for one in full["lora"]]
        return full | {"settings": settings, "lora": lora}

    stem, count = Path(job["stem"]), len(made.clip.seeds)
    return publish(stem, write, lambda path: thumbnail(first[0], path), told, count)


def planned(session: Session, own: tuple[LoraSpec, ...], job: dict[str, Any]) -> Run:
    """The run of a job whose memory is there. Raises InputError, on all ranks if on one. A job that
    runs again is tried twice: the device may still hold the memory of its killed worker."""
    if job["epoch"] > 1:
        with suppress(InputError):
            return _planned(session, own, job)
        time.sleep(DEVICE_WAIT_S)
    return _planned(session, own, job)


def _planned(session: Session, own: tuple[LoraSpec, ...], job: dict[str, Any]) -> Run:
    refused = run = None
    try:
        session.use_loras((*own, *(LoraSpec(Path(path), *rest) for path, *rest in job["loras"])))
        request = request_of(job, num_videos=job.get("n", 1))
        if request.in_segments:
            request = request.kept_in(segments_of(job))
        run = Run(session, request)
        if (line := session.memory.line(run.plan.stages)) and session.backend.is_main:
            note(f"{job['id']}: {line}")
    except InputError as error:
        refused = error
    if session.backend.agree(refused is not None) or run is None:
        reason = "another rank refuses it, where a file is missing or there is no room"
        raise refused or InputError(reason)
    return run


def first_frame(chunk: np.ndarray, hdr: HighRange | None) -> np.ndarray:
    """u8[H, W, 3] of a chunk as `write_clip` takes it."""
    one = chunk[:, :1] if chunk.dtype == np.float32 else chunk[:1]
    return to_srgb(as_frames(one)[0], hdr) if hdr else to_rgb8(one)[0]


def thumbnail(frame: np.ndarray, path: Path) -> None:
    """frame: u8[H, W, 3]."""
    from PIL import Image

    image = Image.fromarray(frame)
    image.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    image.save(path, "WEBP")
