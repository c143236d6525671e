"""A worker on some node of a Ray cluster, with the pipes of one that runs here.

    server -- stdin, stdout -- this process, a Ray driver -- an actor -- stdin, stdout -- `ltx2rt
    worker`

Ray finds a node with the devices. If the worker, its actor, its node or this process ends, all end,
and the supervisor starts another. Ray knows nothing of a job, so that none is lost with it or run
twice. Files go by the folder `--data`, which all nodes must see under its name. The cluster is that
of RAY_ADDRESS, or the one that runs here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from threading import Event, Thread
from typing import Any

from ltx2rt.ranks.environment import die_with_parent

ENDED = 1  # exit status


class Worker:
    """The actor: the process, whose lines it passes on."""

    def __init__(self, words: list[str]):
        self._started = Event()
        Thread(target=self._run, args=(words,), daemon=True).start()
        self._started.wait()

    def _run(self, words: list[str]) -> None:
        """In a thread that lasts as long as the process, which the kernel ends with it."""
        self.process: Any = subprocess.Popen(words, stdin=-1, stdout=-1)
        self._started.set()
        self.process.wait()

    def put(self, line: bytes) -> None:
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def lines(self) -> Iterator[bytes]:
        # Ray sends into the generator, which a file does not take.
        for line in self.process.stdout:  # noqa: UP028
            yield line

    def status(self) -> int:
        return self.process.wait()


def resources(kind: str, count: int) -> dict[str, Any]:
    """Resources that an actor asks of its node: `count` devices that Ray calls `kind`."""
    devices = {"num_gpus": count} if kind == "GPU" else {"resources": {kind: count}}
    return {"num_cpus": 1, **(devices if count else {})}


def lacking(nodes: Iterable[Mapping[str, Any]], kind: str, count: int) -> str | None:
    """A sentence if no node of `ray.nodes()` has the devices, busy ones included."""
    most = max((node["Resources"].get(kind, 0) for node in nodes if node["Alive"]), default=0)
    if most >= count:
        return None
    return f"no node of the Ray cluster has {count} {kind}s, at most {most:g}; waiting for one"


def main(kind: str, count: int, words: list[str]) -> int:
    """Run a worker until it ends, or there is no more to read; its exit status."""
    die_with_parent()
    ray: Any = import_module("ray")

    outbox = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Ray prints must not get among the events
    ray.init(configure_logging=False)
    if said := lacking(ray.nodes(), kind, count):
        print(f"ltx2rt: {said}", file=sys.stderr, flush=True)
    actor = ray.remote(max_concurrency=3, **resources(kind, count))(Worker).remote(words)

    def feed() -> None:
        for line in sys.stdin.buffer:
            actor.put.remote(line)
        os._exit(ENDED)  # the server is gone; Ray ends what this driver has started

    Thread(target=feed, daemon=True).start()
    try:
        for line in actor.lines.options(num_returns="streaming").remote():
            outbox.write(ray.get(line))
            outbox.flush()
        return ray.get(actor.status.remote())
    except ray.exceptions.RayError as error:
        print(f"ltx2rt: the worker on Ray ended: {type(error).__name__}", file=sys.stderr)
        return ENDED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
