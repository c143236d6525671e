"""`plan --trace`: the planned steps as trace events, which Perfetto and chrome://tracing show.

Decides how a `placement.timeline.Timeline` is written: a process for each stage, which is one step
of it on one device, a thread for the device, for each link and for each kind of copy. Format:
"Trace Event Format" of the Chromium project, complete events ("X") and metadata ("M"); times in
microseconds, whole nanoseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ltx2rt.atomic_file import replacing
from ltx2rt.placement.devices import DeviceKind
from ltx2rt.placement.plan import StageCost
from ltx2rt.placement.timeline import DEVICE, Event
from ltx2rt.run.estimate import Estimate


def write_trace(found: Estimate, path: Path) -> None:
    """Write one step of every stage. Raises OSError if the file cannot be written."""
    stages = enumerate(found.costs, 1)
    events = [event for number, c in stages for event in stage_events(c, found.kind, number)]
    mesh, devices = dict(found.session.backend.mesh), f"{found.devices} x {found.kind.name}"
    trace: dict[str, Any] = {"traceEvents": events, "displayTimeUnit": "ms"}
    trace["otherData"] = {"devices": devices, "mesh": mesh}
    with replacing(path) as partial:
        partial.write_text(json.dumps(trace))


def stage_events(stage: StageCost, kind: DeviceKind, process: int) -> Iterator[dict[str, Any]]:
    """A step of a stage: a slice of its length, and in it the device's and links' work."""
    timeline = stage.timeline(kind)
    threads: dict[str, int] = {}
    about = f"{stage.label}, one of {stage.steps} steps"
    step = Event(DEVICE, "step", about, 0.0, timeline.clock_s, stage.flops)
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": stage.label}}
    for event in (step, *timeline.flat()):
        if event.track not in threads:
            threads[event.track] = len(threads)
            facts = {"ph": "M", "name": "thread_name", "pid": process, "tid": threads[event.track]}
            yield {**facts, "args": {"name": event.track}}
        start, end = _microseconds(event.start_s), _microseconds(event.start_s + event.length_s)
        amounts = {"TFLOP": event.flops / 1e12, "received_bytes": event.received_bytes}
        where = {"pid": process, "tid": threads[event.track]}
        when = {"ts": start, "dur": round(end - start, 3)}
        args = {name: amount for name, amount in amounts.items() if amount}
        yield {"ph": "X", "name": event.name, "cat": event.kind, **where, **when, "args": args}


def _microseconds(time_s: float) -> float:
    return round(1e6 * time_s, 3)
