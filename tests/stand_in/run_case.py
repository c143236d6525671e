"""A session on the stand-in: python tests/stand_in/run_case.py JSON prints one line of JSON.

JSON: preset; options, of `ModelOptions`; requests, a list of {pipeline, field: value, ...}, which
run in turn; runs, of each (1); at most one of cancel_after (checks of the first request until it
is cancelled), full (the device is full in the middle of the first recording) and tight (each run
has what its plan says and a slack).
Each request's line has `planned_bytes`, what its plan and what earlier recordings keep come to, and
`reserved_bytes`, the most that PyTorch took of the device meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import device  # first: it decides what other modules see of the host
import torch
from ltx2rt_cuda.device.cuda import Pool

from benchmarks.random_weights import RepeatingSession, random_session
from ltx2rt.errors import Cancelled, InputError
from ltx2rt.pipelines import pipeline
from ltx2rt.pipelines.request import Request
from ltx2rt.placement.plan import peak
from ltx2rt.run.plan import Plan, make_plan
from ltx2rt.run.run import produce
from ltx2rt.session.options import NO_LORA, LoraSpec
from ltx2rt.stages.conditioning import ImageSpec, ReferenceSpec

# What PyTorch takes of the device beyond the tensors of a plan: it takes memory in blocks, and keeps
# some for streams and sizes of their own. A plan leaves 3 GB + 2 % free for it and for CUDA.
SLACK, SLACK_BYTES = 1.03, 10**9
FRAMES = SimpleNamespace(name="frames")  # they are decoded when they are taken
PATHS = ("video_path", "audio_path", "voice")
USERS_LORA = (
    "ic-lora",
    "dubit",
    "hdr-ic-lora",
    "upscale",
)  # pipelines of a LoRA that the user gives


def allowed(planned: int) -> int:
    """The most bytes that may be reserved where so many are planned."""
    return int(SLACK * planned) + SLACK_BYTES


def request_of(fields: dict[str, Any]) -> Request:
    fields = dict(fields)
    type_ = pipeline(fields.pop("pipeline", "two-stage"))
    for name in PATHS:
        if name in fields:
            fields[name] = Path(fields[name])
    if "images" in fields:
        fields["images"] = tuple(ImageSpec(Path(path), at) for path, at in fields["images"])
    if "reference" in fields:
        fields["video_conditioning"] = (ReferenceSpec(Path(fields.pop("reference")), 1.0),)
    return type_("a red fox", seed=0, **fields)


def use_loras(session: RepeatingSession, request: Request) -> None:
    """The checkpoint's LoRA stands for all that a pipeline wants; random weights are distilled
    ones."""
    lora = LoraSpec(next(session.checkpoint.path.glob("*distilled-lora.safetensors")))
    loras = (lora,) if request.name in USERS_LORA else ()
    needs = request.distilled != "optional" and not loras
    options = replace(session.asked, loras=loras, distilled_lora=lora if needs else NO_LORA)
    session.use(options)


@contextmanager
def watched(session: RepeatingSession, stages: dict[str, int]) -> Iterator[None]:
    """Enters the most bytes that were reserved during each stage."""
    leave = session.leave

    def left(stage: Any) -> None:
        stages[stage.name] = max(torch.cuda.max_memory_reserved(), stages.get(stage.name, 0))
        if stage is not FRAMES:
            leave(stage)
        torch.cuda.reset_peak_memory_stats()

    with patch.object(session, "leave", left):
        yield
        left(FRAMES)


def run(session: RepeatingSession, plan: Plan, **how: Any) -> None:
    state, *_ = produce(session, plan, **how)
    for frames in state.frames:
        deque(frames, maxlen=0)
    session.backend.synchronize()


def cancelled_after(checks: int) -> Callable[[], bool]:
    left = iter(range(checks))
    return lambda: next(left, None) is None


@contextmanager
def room(size_bytes: int | None = None) -> Iterator[Any]:
    """The device has so much memory; None: all of it. Yields its counter."""
    size = device.counter("total_bytes")
    whole, size.value = size.value, size.value if size_bytes is None else size_bytes
    try:
        yield size
    finally:
        size.value = whole


@contextmanager
def full_device() -> Iterator[None]:
    """The device has not a byte left once the first step is being recorded."""
    recording, pending = Pool.recording, [True]

    @contextmanager
    def full(pool: Pool, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        with recording(pool, graph):
            if pending and graph is not pool.kept:
                pending.clear()
                size.value = 1
            yield

    with room() as size, patch.object(Pool, "recording", full):
        yield


def one(session: RepeatingSession, fields: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    request, stages, planned, found = request_of(fields), {}, 0, dict(fields)
    use_loras(session, request)
    try:
        plan = make_plan(session, request)
        session.memory.require(plan.stages)
        if case.get("cancel_after"):
            with suppress(Cancelled):
                run(session, plan, cancelled=cancelled_after(case.pop("cancel_after")))
                found["ended"] = True
        if case.pop("full", False):
            try:
                with full_device():
                    run(session, plan)
            except torch.OutOfMemoryError:
                found["out_of_memory"] = True
        for _ in range(case.get("runs", 1)):
            session.memory.require(plan.stages)
            kept = session.backend.device().recorded_bytes
            held = session.weights.held_bytes
            costs = session.memory.costs(plan.stages, session.memory._held(), kept)
            planned = max(planned, peak(costs).peak_bytes + kept)
            torch.cuda.reset_peak_memory_stats()
            # What PyTorch keeps for later must be given back for the rest to fit.
            least = device.CONTEXT_BYTES + allowed(planned) if case.get("tight") else None
            with watched(session, stages), room(least):
                run(session, plan)
    except InputError as error:
        return found | {"refused": str(error)}
    costs = session.memory.costs(plan.stages)
    return found | {
        "mode": session.memory.mode,
        "memory": session.memory.line(plan.stages),
        "held_bytes": held,
        "planned_bytes": planned,
        "allowed_bytes": allowed(planned),
        "reserved_bytes": max(stages.values()),
        "stages": stages,
        "costs": {c.label: [c.weights_bytes, c.activation_bytes] for c in costs},
    }


def main(case: dict[str, Any]) -> dict[str, Any]:
    options = {"device": "cuda", "mesh": case.get("mesh", {}), **case.get("options", {})}
    with random_session(case["preset"], **options) as session:
        requests = [one(session, fields, case) for fields in case["requests"]]
        session.close()
    return {"requests": requests, "rank": os.environ.get("RANK", "0"), **device.counts()}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
