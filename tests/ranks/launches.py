"""Commands as several ranks, under a launcher or by hand, and what becomes of them."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.virtual import xla_flags

TIME_LIMIT_S = 30  # for all ranks to end after one has


class Launch:
    """A started command and what it said."""

    def __init__(self, words, **environment):
        env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        # a background job and its children ignore it
        heard = signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.process = subprocess.Popen(
            [sys.executable, *words], env=env, start_new_session=True, **pipes
        )
        signal.signal(signal.SIGINT, heard)
        self.pid = self.process.pid

    def end(self):
        """(exit status, stdout, lines of stderr that start as errors)"""
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, [x for x in err.splitlines() if "ltx2rt: error: " in x]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def by_hand(words, second=None, **environment):
    """Two ranks under torchrun's variables, without torchrun; words of rank 1 can differ."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    each = enumerate((words, second or words))
    return [Launch(w, RANK=str(i), LOCAL_RANK=str(i), **where | environment) for i, w in each]


def hosts_by_hand(*commands, devices=2):
    """A JAX process with its CPU devices for each command, like a slice's hosts."""
    where = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}"}
    where |= {"JAX_NUM_PROCESSES": str(len(commands)), "XLA_FLAGS": xla_flags(devices)}
    return [Launch(words, JAX_PROCESS_ID=str(i), **where) for i, words in enumerate(commands)]


def said_once(launches, status=2):
    """The one line of all ranks, which end with this status."""
    ended = [launch.end() for launch in launches]
    assert [found for found, *_ in ended] == [status] * len(ended), ended
    (line,) = [line for *_, lines in ended for line in lines]
    return line


def ranks_of(launcher_pid):
    """Process ids by rank of a launcher's children."""
    found = {}
    for child in Path(f"/proc/{launcher_pid}/task/{launcher_pid}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found |= {int(x[5:]): int(child) for x in environment if x.startswith(b"RANK=")}
    return found


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def alive(pid):
    return Path(f"/proc/{pid}").exists()


def written(folder, text):
    script = folder / "script.py"
    script.write_text(text)
    return script


BROKEN = """
import os, sys, time
from ltx2rt.cli import main
from ltx2rt.stages import frames
rank, how = int(os.environ.get("RANK") or os.environ["JAX_PROCESS_ID"]), sys.argv.pop(1)
Call, calls = frames.Call, []
def broken(*args, **more):
    if more:
        return Call(*args, **more)
    if how == "raise" and rank == 1:
        raise RuntimeError("a bad day")
    calls.append(how)
    if how == "hang" and rank == 0 and len(calls) == 3:
        print("hanging", flush=True)
        time.sleep(600)
    return Call(*args)
frames.Call = broken
sys.exit(main())
"""

LOADING = """
import os, sys, time
from ltx2rt.cli import main
from ltx2rt.session.weights import WeightStore
of = WeightStore.of
def slow(self, *args):
    if "1" in (os.environ.get("RANK"), os.environ.get("JAX_PROCESS_ID")):
        print("loading", flush=True)
        time.sleep(600)
    return of(self, *args)
WeightStore.of = slow
sys.exit(main())
"""
