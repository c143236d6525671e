"""Jobs of a file, made by the workers of a server, without a server.

Decides what is done already: a job whose result line says `completed` for the same digest, and whose clip is there. A
result line is written, and on the disk, after the clip has its name.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.serve.admission import Admission, Admitted
from ltx2rt.serve.board import Board
from ltx2rt.serve.folder import Folder, sync
from ltx2rt.serve.metrics import Metrics
from ltx2rt.serve.queue import COMPLETED, Job, Queue
from ltx2rt.serve.refusal import Refusal
from ltx2rt.serve.supervisor import Store, Supervisor

ID = re.compile(r"[\w][\w.-]{0,99}")
WINDOW = 64  # lines within which jobs of one shape are made after one another
LINE_LIMIT = 10**6


@dataclass(frozen=True)
class Line:
    """One job: number is its line's."""

    number: int
    id: str
    given: dict[str, Any]


@dataclass(frozen=True)
class Shard:
    """The number-th of `count` parts of the jobs, by their ids: lines that are added move none to another part."""

    number: int = 1
    count: int = 1

    def has(self, id: str) -> bool:
        return int(hashlib.sha256(id.encode()).hexdigest(), 16) % self.count == self.number - 1

    @property
    def results(self) -> str:
        return "results.jsonl" if self.count == 1 else f"results.{self.number}-of-{self.count}.jsonl"


def parse_shard(text: str | Shard) -> Shard:
    """`I/N`, I from 1 on. Raises InputError."""
    if isinstance(text, Shard):
        return text
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise InputError(f"--shard: {text[:80]!r}, expected I/N such as 1/8 to 8/8")
    return Shard(int(match[1]), int(match[2]))


def read_lines(path: Path) -> list[Line]:
    """Raises InputError with a line for each line that is no job."""
    try:
        text = path.read_text()
    except (OSError, UnicodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    lines, wrong, seen = [], [], dict[str, int]()
    for number, one in enumerate(text.splitlines(), 1):
        if not one.strip():
            continue
        try:
            given = json.loads(one[:LINE_LIMIT])
            if not isinstance(given, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError) as error:
            wrong.append(f"line {number}: no JSON object ({str(error)[:80]})")
            continue
        id = given.pop("id", None)
        if not isinstance(id, str) or not ID.fullmatch(id):
            wrong.append(f"line {number}: id {str(id)[:80]!r}, expected letters, digits, '.', '_' and '-'")
        elif id in seen:
            wrong.append(f"line {number}: id {id!r} is that of line {seen[id]}")
        else:
            seen[id] = number
            lines.append(Line(number, id, given))
    if wrong:
        raise InputError(f"{path}: " + "; ".join(wrong))
    return lines


def admit(lines: Iterable[Line], admission: Admission, folder: Folder, beside: Path) -> list[tuple[Line, Admitted]]:
    """Check every line as a server checks its requests. beside: where the paths of images begin. Raises InputError."""
    found, wrong = [], []
    for line in lines:
        try:
            given = {**line.given, "images": [_kept(image, folder, beside) for image in line.given.get("images", ())]}
            digest = hashlib.sha256(json.dumps([line.id, given], sort_keys=True).encode()).hexdigest()
            seed = {"seed": int(digest[:8], 16)} if given.get("seed") is None else {}  # the same when it is made again
            found.append((line, admission.admit({**given, **seed})))
        except (Refusal, InputError) as error:
            wrong.append(f"line {line.number} ({line.id}): {error}")
        except (TypeError, AttributeError):
            wrong.append(f"line {line.number} ({line.id}): images: expected a list of objects")
    if wrong:
        raise InputError("; ".join(wrong))
    return found


def _kept(image: Mapping[str, Any], folder: Folder, beside: Path) -> dict[str, Any]:
    rest = {name: value for name, value in image.items() if name != "path"}
    if "path" not in image:
        return rest
    try:
        return {**rest, "file_id": folder.keep_input((beside / str(image["path"])).read_bytes())}
    except (OSError, ValueError) as error:
        raise InputError(f"images: {str(image['path'])[:200]} cannot be read ({error})") from None


def done_before(output: Path) -> dict[str, str]:
    """Digests of the completed jobs by id, as all result files of the folder tell."""
    found: dict[str, str] = {}
    for path in sorted(output.glob("results*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                result = json.loads(line)
            except ValueError:  # cut off when its writer died
                continue
            if result.get("status") == COMPLETED and (output / f"{result['id']}.mp4").exists():
                found[result["id"]] = result["digest"]
    return found


def in_order(jobs: Sequence[tuple[Line, Admitted]]) -> list[tuple[Line, Admitted]]:
    """Jobs of one shape after one another, within a window."""

    def shape(entry: tuple[Line, Admitted]) -> str:
        clip = entry[1].job["clip"]
        return json.dumps([entry[1].loras, entry[1].job["pipeline"], *map(clip.get, ("width", "height", "num_frames"))])

    return [job for start in range(0, len(jobs), WINDOW) for job in sorted(jobs[start : start + WINDOW], key=shape)]


class Batch:
    """command: starts a worker. say: told of every job that is over."""

    def __init__(
        self, folder: Folder, output: Path, shard: Shard, command: Sequence[str], *,
        environments: Sequence[Mapping[str, str]] = ({},), lora_folder: Path | None = None,
        step_timeout_s: float = 120.0, say: Callable[[str], None] = print,
    ):  # fmt: skip
        self.folder, self.output, self.results, self.say = folder, output, output / shard.results, say
        self.board = Board(lambda *_, **__: None)
        self.store = Store(Queue(":memory:", most=10**9, most_of_user=10**9))
        self.supervisor = Supervisor(
            command, self.store, folder, self.board, Metrics(), environments=environments, lora_folder=lora_folder,
            step_timeout_s=step_timeout_s,
        )  # fmt: skip

    async def run(self, jobs: Sequence[tuple[Line, Admitted]]) -> dict[str, int]:
        """How many jobs ended with each status; fewer in all than there are jobs if a signal ended it."""
        ids, counts, start = {}, dict[str, int](), time.monotonic()
        for line, admitted in in_order(jobs):
            given, job = admitted.given, admitted.job
            made = await self.store(
                self.store.queue.add, "", admitted.digest, given, job, work=admitted.work, loras=admitted.loras
            )
            ids[made.id] = line, admitted
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        with self.board.watch(lambda id, user: True) as news:
            replicas = asyncio.create_task(self.supervisor.run())
            try:
                while ids and not stopped.is_set() and not replicas.done():
                    for id in [id for id, kind in (await news.take(0.2)).items() if kind in ("completed", "failed")]:
                        job = await self.store(self.store.queue.get, id)
                        if id in ids and job is not None:
                            line, admitted = ids.pop(id)
                            self._keep(line, admitted, job)
                            counts[job.status] = counts.get(job.status, 0) + 1
                            each_s = (time.monotonic() - start) / sum(counts.values())
                            self.say(f"{line.id}: {job.status}, {len(ids)} left, about {each_s * len(ids):.0f} s")
            finally:
                await self.supervisor.stop(0)
                ended = await asyncio.gather(replicas, return_exceptions=True)
                self.store.close()
        if isinstance(ended[0], InputError):
            raise ended[0]
        return counts

    def _keep(self, line: Line, admitted: Admitted, job: Job) -> None:
        """The clip under its own name, then its line among the results."""
        if job.status == COMPLETED and job.result:
            os.replace(self.folder.outputs / job.result["file"], self.output / f"{line.id}.mp4")
            sync(self.output)
            self.folder.remove(job.stem)
        report = (job.result or {}).get("report", {})
        result = {
            "id": line.id, "status": job.status, "digest": admitted.digest, "seed": job.job["clip"].get("seed"),
            "file": f"{line.id}.mp4" if job.status == COMPLETED else None, "error": job.error,
            "run_s": (job.finished or 0) - (job.started or 0), "attempts": job.attempts,
            "stages": {stage["name"]: stage["time_s"] for stage in report.get("stages", ())},
        }  # fmt: skip
        with self.results.open("a") as file:
            if file.tell() and not self._ends_a_line():
                file.write("\n")
            file.write(json.dumps(result) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _ends_a_line(self) -> bool:
        with self.results.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"


def clean(folder: Folder) -> None:
    """Remove what a batch that is done no longer needs."""
    folder.close()
    shutil.rmtree(folder.root, ignore_errors=True)
