"""`ltx2rt` in a process of its own, whose workers are `fake_replica.py`.

FAKE_OPENED: a file that is told what files it opens. FAKE_DISK: while this file exists, no write
reaches the disk.
"""

import os
import sys
import time
from pathlib import Path

from ltx2rt import cli
from ltx2rt.commands import serve

WORKER = [sys.executable, str(Path(__file__).with_name("fake_replica.py"))]
serve.worker_command = lambda args: WORKER


def line_of(name):
    return f"{name}\n".encode(errors="replace")


if told := os.environ.get("FAKE_OPENED"):
    log = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.addaudithook(lambda event, args: event == "open" and os.write(log, line_of(args[0])))

if disk := os.environ.get("FAKE_DISK"):
    fsync = os.fsync

    def slow_fsync(file: int) -> None:
        while Path(disk).exists():
            time.sleep(0.05)
        fsync(file)

    os.fsync = slow_fsync

if __name__ == "__main__":
    sys.exit(cli.main())
