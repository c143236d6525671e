"""Time that a server adds to its model: per job, between jobs, per request, after a death, after a
cancel.

job      the same jobs by `ltx2rt serve` and by a loop over one session in this process, in turns:
from the start of the
         first to the end of the last, and a gap; their ratio with a 95 % interval of its median
cpu      the same work by the worker's code and by that loop, both in this process, in turns and in
CPU time: what other
         processes do disturbs both alike. added: what the worker does more, with the gap, as a
         share of the job
gap      from the end of a job to the start of the next that waited for it
server   CPU time of the server's own process per job, the requests of this benchmark included
post     from sending a request to its answer, on a connection of its own, the disk included
kept     the same for the state of a video, on one connection for all
cancel   of a running job, until it is over; beyond: what that is more than two of its steps
restart  from the death of the replica until another one takes jobs, loading and warm-up included

  python -m benchmarks.serve --model MODEL_DIR --backend cuda --output benchmarks/results/serve.json
  python -m benchmarks.serve --model examples/tiny-trained --device cpu --width 128 --height 64
  --num-frames 17
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np

import ltx2rt
from benchmarks.measure import Spread, interleaved, machine, ratios, record
from ltx2rt.ranks.environment import die_with_parent
from ltx2rt.serve import worker

POLL_S = 0.02
BOOTSTRAPS = 10_000


def sizes(args: argparse.Namespace) -> list[tuple[int, ...]]:
    """Width, height and frames of the jobs, which take them in turns."""
    return [
        (args.width, args.height, args.num_frames),
        *(tuple(map(int, text.split("x"))) for text in args.others),
    ]


class Server:
    """`ltx2rt serve` on a free port, warm."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        shapes = ["x".join(map(str, size)) + f":{args.pipeline}" for size in sizes(args)]
        words = [
            "serve",
            "--model",
            args.model,
            "--backend",
            args.backend,
            "--device",
            args.device,
            "--data",
            folder,
        ]
        # a job that still runs at the end has 2000 steps, and is not waited for
        words += ["--port", "0", "--drain", "0", "--warm", *shapes]
        self.log = folder.with_suffix(".log")
        with self.log.open("w") as log:
            argv = [sys.executable, "-m", "ltx2rt", *map(str, words)]
            # a time limit that ends the benchmark ends its server
            how: dict = {"start_new_session": True, "preexec_fn": die_with_parent}
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, **how)
        self.until(lambda: "serving at " in self.log.read_text())
        self.url = self.log.read_text().partition("serving at ")[2].split()[0]
        self.until(self.ready)

    def until(self, condition: Any, most_s: float = 1800) -> float:
        """Seconds until it holds."""
        start = time.perf_counter()
        while not condition():
            if self.process.poll() is not None or time.perf_counter() - start > most_s:
                raise RuntimeError(self.log.read_text()[-2000:])
            time.sleep(POLL_S)
        return time.perf_counter() - start

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(
            self.url + path, data, {"content-type": "application/json"}, method=method
        )
        with urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def ready(self) -> bool:
        try:
            with urlopen(self.url + "readyz", timeout=60):
                return True
        except HTTPError:
            return False

    def over(self, id: str) -> bool:
        return self.ask("GET", f"v1/videos/{id}")["status"] in ("completed", "failed")

    def wait(self, id: str) -> None:
        """Until the job's events end, without a poll."""
        with urlopen(f"{self.url}v1/videos/{id}/events", timeout=3600) as stream:
            stream.read()

    def step_s(self) -> float:
        """The mean of the first stage's steps, of all jobs."""
        with urlopen(f"{self.url}metrics", timeout=60) as answer:
            lines = [
                line.split()
                for line in answer.read().decode().splitlines()
                if 'stage="stage1"' in line
            ]
        found = {name.partition("{")[0]: float(value) for name, value in lines}
        return found["ltx2rt_step_seconds_sum"] / found["ltx2rt_step_seconds_count"]

    @property
    def worker(self) -> int:
        return int(
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            .read_text()
            .split()[0]
        )

    def events(self, *names: str) -> list[dict[str, Any]]:
        lines = [
            json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")
        ]
        return [line for line in lines if line["event"] in names]


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    fixed = {"pipeline": args.pipeline} | ({"steps": args.steps} if args.steps else {})
    names = "width", "height", "num_frames"

    def clip(n: int) -> dict[str, Any]:
        size = sizes(args)[n % len(sizes(args))]
        words = {"prompt": f"a red fox, {n}", "seed": n}
        return words | dict(zip(names, size, strict=True)) | fixed

    server = Server(args, folder)
    try:
        with ltx2rt.open(args.model, backend=args.backend, device=args.device) as session:

            def loop() -> None:
                for n in range(args.jobs):
                    session.generate(**clip(n)).save(folder.with_suffix(".mp4"))

            def serve() -> None:
                for n in range(args.jobs):
                    ids.append(server.ask("POST", "v1/videos", clip(n))["id"])
                server.wait(ids[-1])

            def work() -> None:
                for n in range(args.jobs):
                    fields = {name: x for name, x in clip(n).items() if name != "pipeline"}
                    job = {
                        "id": "j",
                        "epoch": 1,
                        "stem": str(folder.with_name(f"j{n}")),
                        "pipeline": args.pipeline,
                    }
                    job |= {"clip": fields, "images": [], "loras": []}
                    event, facts = worker.attempt(session.resident, (), job, pipe)
                    assert event == "done", facts

            ids: list[str] = []
            before_s = cpu_s(server.process.pid)
            seconds = interleaved({"loop": loop, "serve": serve}, args.rounds)
            server_s = (cpu_s(server.process.pid) - before_s) / len(ids)
            with open(os.devnull, "wb") as nowhere:
                pipe = worker.Pipe(None, nowhere)
                cpu = interleaved(
                    {"loop": loop, "work": work}, args.rounds, clock=time.process_time
                )
        rounds = served(server, ids, args.jobs)
        gaps = [
            after["started"] - job["completed"] for jobs in rounds for job, after in pairwise(jobs)
        ]
        spans = [
            jobs[-1]["completed"] - jobs[0]["started"] + float(np.median(gaps))
            for jobs in rounds[-args.rounds :]
        ]
        seconds["serve"] = spans
        gap_share = float(np.median(gaps)) * args.jobs / float(np.median(seconds["loop"]))
        added = [a / b - 1 + gap_share for a, b in zip(cpu["work"], cpu["loop"], strict=True)]

        posts = []
        for n in range(args.posts):
            start = time.perf_counter()
            ids.append(server.ask("POST", "v1/videos", clip(0) | {"seed": n, "steps": 2000})["id"])
            posts.append(time.perf_counter() - start)
        kept, gets = HTTPConnection(urlsplit(server.url).netloc, timeout=60), []
        for _ in range(args.posts):
            start = time.perf_counter()
            kept.request("GET", f"/v1/videos/{ids[-1]}")
            kept.getresponse().read()
            gets.append(time.perf_counter() - start)
        kept.close()
        cancels = []
        for id in ids[-args.posts :][: args.rounds]:
            server.until(lambda id=id: (server.ask("GET", f"v1/videos/{id}")["x"]["step"] or 0) > 4)
            server.ask("POST", f"v1/videos/{id}/cancel")
            cancels.append(server.until(lambda id=id: server.over(id)))
        step_s = server.step_s()
        os.kill(server.worker, signal.SIGKILL)
        server.until(lambda: not server.ready())
        restart = server.until(server.ready)
    finally:
        server.process.terminate()
        server.process.wait()
    return {
        "job_s": {
            name: Spread.of([one / args.jobs for one in taken]) for name, taken in seconds.items()
        },
        "serve_to_loop": ratios(seconds, "serve", "loop"),
        "serve_to_loop_95": interval([a / b for a, b in zip(spans, seconds["loop"], strict=True)]),
        "cpu_s": {
            name: Spread.of([one / args.jobs for one in taken]) for name, taken in cpu.items()
        },
        "cpu_work_to_loop": ratios(cpu, "work", "loop"),
        "added": Spread.of(added),
        "added_95": interval(added),
        "server_cpu_s": server_s,
        "gap_s": Spread.of(gaps),
        "post_s": Spread.of(posts),
        "post_p99_s": float(np.quantile(posts, 0.99)),
        "kept_s": Spread.of(gets),
        "kept_p99_s": float(np.quantile(gets, 0.99)),
        "cancel_s": Spread.of(cancels),
        "step_s": step_s,
        "cancel_beyond_two_steps_s": Spread.of([one - 2 * step_s for one in cancels]),
        "restart_s": restart,
    }


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def served(server: Server, ids: list[str], jobs: int) -> list[list[dict[str, Any]]]:
    """By round, of every job its id and when it was started and completed, by the server's log."""
    found: dict[str, dict[str, Any]] = {id: {"id": id} for id in ids}
    for line in server.events("started", "completed"):
        found[line["job"]][line["event"]] = line["time"]
    told = list(found.values())
    return [told[start : start + jobs] for start in range(0, len(told), jobs)]


def interval(values: list[float]) -> tuple[float, float]:
    """The interval that holds the median with 95 %, by drawing again from the values."""
    drawn = np.random.default_rng(0).choice(values, (BOOTSTRAPS, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pipeline", default="two-stage")
    numbers = {"width": 768, "height": 512, "num-frames": 121, "jobs": 5, "rounds": 8, "posts": 200}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int)
    parser.add_argument(
        "--others",
        nargs="+",
        default=[],
        metavar="WxHxF",
        help="other sizes, which jobs take in turns",
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if args.jobs < 2:
        parser.error(f"--jobs: {args.jobs}, expected at least 2, since a gap is between two jobs")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder) / "serve")
    for name, value in found.items():
        shown = (
            ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        )
        print(f"{name:<14} {shown}")
    clip = ", ".join("x".join(map(str, size)) for size in sizes(args))
    facts = {
        "benchmark": "serve", **machine("starlette", "uvicorn"), "model": args.model.name,
        "backend": args.backend,
        "clip": f"{clip}, {args.pipeline}, steps {args.steps or 'default'}",
        "jobs": args.jobs, "rounds": args.rounds, **found,
    }  # fmt: skip
    record(args.output, facts)
    return facts


if __name__ == "__main__":
    main()
