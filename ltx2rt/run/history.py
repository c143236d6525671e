"""Times of earlier runs on this machine, by which a run says how long it will take.

Decides which runs are alike. A file that cannot be read or written changes no run.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.pipelines.request import Request
from ltx2rt.placement.devices import known_kind
from ltx2rt.run.plan import Plan, make_plan
from ltx2rt.session.session import Session
from ltx2rt.system import AT_ONCE, WRITE, opened_at_once
from ltx2rt.text_files import parse

LONG_S = 120  # a run that takes longer says what a draft would take
LAST, READ_BYTES, MOST_BYTES = 3, 2**16, 2**20


def alike(session: Session, plan: Plan, warm: bool) -> list[Any]:
    """The facts that runs of about the same time share."""
    clip, options, backend = plan.clip, session.options, session.backend
    how = [options.backend, str(session.dtype), str(options.weights_dtype), options.memory, warm]
    where = [backend.device().name, dict(backend.mesh), str(session.checkpoint.path.resolve())]
    steps = clip.guiding and clip.request.steps
    made = [list(clip.size_px), clip.clip_frames, steps, len(clip.seeds)]
    kept = [options.compile, options.max_memory, options.lora_mode, len(plan.loras.user)]
    kept += [options.attention] * (options.attention != "auto")
    return [clip.request.name, *where, *made, *how, *kept]


def expected(file: Path, key: list[Any]) -> str | None:
    """A sentence with the time of the last runs alike; None if there is none."""
    found = []
    with suppress(OSError):
        with open(file, "rb", opener=opened_at_once) as lines:
            lines.seek(max(0, file.stat().st_size - READ_BYTES))
            text = lines.read()
        for line in text.splitlines():
            with suppress(ValueError):
                run = parse(line.decode(), {"run": list, "seconds": float})
                found += [run["seconds"]] if run["run"] == key else []
    if not found:
        return None
    last = found[-LAST:]
    *early, latest = (f"{seconds:.0f}" for seconds in last)
    took = f"{', '.join(early)} and {latest}" if early else latest
    runs = f"the last {len(last)} runs like this one" if early else "one run like this one"
    return f"about {sum(last) / len(last):.0f} s ({runs} took {took} s here)"


def planned_s(session: Session, plan: Plan) -> float | None:
    """Seconds of a run by the plan; None without a data sheet."""
    info = session.backend.device()
    if (kind := known_kind(info.kind, info.name, info.total_bytes)) is None:
        return None
    return session.memory.request_s(plan.stages, kind.loaded())


def of_draft(session: Session, plan: Plan, draft: Request | None) -> str:
    """Words about how long the same as a draft takes, where the run takes over `LONG_S` by the plan
    and the draft is faster."""
    seconds = planned_s(session, plan) or 0
    if seconds <= LONG_S or draft is None:
        return ""
    with suppress(InputError):
        less = planned_s(session, make_plan(session, draft)) or seconds
        return f"; --preset draft: about {less:.0f} s" if less < seconds else ""
    return ""


def by_plan(session: Session, plan: Plan) -> str | None:
    """A sentence with the planned time and its basis; None without a data sheet."""
    info = session.backend.device()
    kind, seconds = known_kind(info.kind, info.name, info.total_bytes), planned_s(session, plan)
    if kind is None or seconds is None:
        return None
    basis, kind = kind.basis(prod(session.backend.mesh.values())), kind.loaded()
    if basis == "bound" or kind.sustained is None:
        return f"at least {seconds:.0f} s (by the data sheet of {kind.name})"
    if basis == "compiled":
        return f"about {seconds:.0f} s (by the compiler's code for {kind.name}, not run)"
    on = kind.sustained.on
    how = f"as measured on {on}" if basis == "measured" else f"scaled from what {on} took"
    return f"about {seconds:.0f} s ({how}, without the first load)"


def keep(file: Path, key: list[Any], seconds: float) -> None:
    """Append a run, in one write, so that several processes may; a full file begins again."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and file.stat().st_size > MOST_BYTES:
            file.unlink(missing_ok=True)
        line = json.dumps({"run": key, "seconds": round(seconds, 1)}) + "\n"
        descriptor = os.open(file, WRITE | os.O_APPEND | AT_ONCE, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
