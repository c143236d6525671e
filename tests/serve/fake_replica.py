"""A worker without a model, for tests: speaks the pipe protocol, sleeps for its steps, fails as it
is told.

What it does stands in the prompt, `STEPS:SECONDS_A_STEP[:WHAT]`. WHAT: die, hang, stop, oom,
internal, lie, late (does not hear of a cancel); with `once-` in front only the first time that the
job runs, with `first-` that any job does.
"""

import json
import os
import signal
import sys
import time
from base64 import b64encode
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from ltx2rt.serve.folder import STORAGE, publish


def made(job: dict, number: int, path: Path) -> None:
    path.write_text(f"{job['id']} {job['clip'].get('seed') + number}")
    if job.get("frames"):
        path.with_suffix(".zip").write_text("frames")


def thumbnail(path: Path) -> None:
    path.write_bytes(b"RIFF")


def main() -> None:
    jobs, cancelled, watched = SimpleQueue(), set(), set()

    def read() -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if message["do"] == "run":
                jobs.put(message)
            else:
                {"cancel": cancelled, "watch": watched}[message["do"]].add(message["id"])
        os._exit(0)

    Thread(target=read, daemon=True).start()

    def tell(event: str, **facts) -> None:
        print(json.dumps({"event": event, **facts}), flush=True)

    time.sleep(float(os.environ.get("FAKE_START_S", "0")))
    memory = int(os.environ.get("FAKE_MEMORY", str(10**15)))
    tell("ready", device={"kind": "cpu", "name": "fake", "total_bytes": memory, "free_bytes": memory,
                          "count": 1, "hosts": 1, "reserve_bytes": 0}, mesh={})  # fmt: skip
    while True:
        job = jobs.get()
        named = {"id": job["id"], "epoch": job["epoch"]}
        steps, seconds, *what = job["clip"]["prompt"].split(":")
        what = what[0] if what else ""
        if what.startswith(("once-", "first-")):
            whose = job["id"] if what.startswith("once-") else "any"
            mark = Path(job["stem"]).parents[1] / f"{what}.{whose}"
            what = "" if mark.exists() else what.partition("-")[2]
            mark.touch()
        for step in range(int(steps) + 1):
            if job["id"] in cancelled and what != "late":
                tell("cancelled", **named)
                break
            fraction = step / int(steps)
            at = {"step": step, "of": int(steps), "fraction": fraction}
            tell("progress", **named, stage="stage1", **at, eta_s=None)
            if step and job["id"] in watched:
                tell("preview", **named, number=step, jpeg=b64encode(b"a picture").decode())
            time.sleep(float(seconds))
            if step == int(steps) // 2:
                if what == "die":  # in the middle of a file
                    stem = Path(job["stem"])
                    made(job, 0, stem.with_name(f".{stem.name}.partial.mp4"))
                    stem.with_name(f"{stem.name}.webp").write_bytes(b"RIFF")
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if what == "hang":
                    time.sleep(1000)
                if what in ("oom", "internal"):
                    code = "out_of_memory" if what == "oom" else "internal"
                    tell("failed", **named, code=code, message=what)
                    if what == "internal":
                        sys.exit(1)
                    break
                if what == "lie":
                    tell("done", id=job["id"], epoch=job["epoch"] - 1, result={})
        else:
            report = {"seed": job["clip"].get("seed"), "programs_built": 0}
            report["stages"] = [{"name": "stage1", "time_s": 0.1}]
            stem, count = Path(job["stem"]), job.get("n", 1)
            try:
                result = publish(stem, partial(made, job), thumbnail, partial(dict, report), count)
            except OSError as error:
                tell("failed", **named, code=STORAGE, message=str(error))
                continue
            tell("done", **named, result=result)


if __name__ == "__main__":
    main()
