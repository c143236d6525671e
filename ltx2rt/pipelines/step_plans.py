"""The flags of steps that are left out or not guided: what they may hold, and the plan that they
make of a schedule."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.models.step_plan import StepPlan
from ltx2rt.session.options import existing_file
from ltx2rt.stages.denoise import within
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.text_files import read_json
from ltx2rt.weights.checkpoint import Checkpoint

FORMAT = 1  # version of a file of plans
SHAPE = {
    "format": int, "steps": int, "sigmas": [float],
    "plans": [{"evaluations": int, "evaluate": [int], "order": int}],
}  # fmt: skip
PLAN, SKIP, VIDEO_SKIP, AUDIO_SKIP = FIELDS = (
    "step_plan",
    "skip_step",
    "video_skip_step",
    "audio_skip_step",
)
INTERVAL = "guidance_interval"


@dataclass(frozen=True)
class PlanFile:
    """A file of plans, and which one of it by its number of evaluations; None for the first."""

    path: Path
    evaluations: int | None = None


def parse_step_plan(text: str | Path | PlanFile) -> str | PlanFile:
    """A list of steps, FILE or FILE:EVALUATIONS."""
    if isinstance(text, PlanFile):
        return text
    text = str(text)
    if StepPlan.parse(text):
        return text
    match = re.fullmatch(r"(.+):(\d{1,5})", text, re.DOTALL)
    return PlanFile(Path(match[1]), int(match[2])) if match else PlanFile(Path(text))


def parse_interval(text: str | Sequence[float]) -> tuple[float, float]:
    """Two numbers, or text with a space or a comma between them. Raises InputError."""
    parts = re.split(r"[\s,]+", text.strip()) if isinstance(text, str) else text
    try:
        start, stop = (float(part) for part in parts)
        if not 0 <= start < stop <= 1:
            raise ValueError
    except (TypeError, ValueError):
        given = text if isinstance(text, str) else " ".join(map(str, text))
        raise InputError(
            f"{spelled(INTERVAL)}: {given[:80]!r}, expected START STOP, two shares of the steps "
            "with 0 <= START < STOP <= 1"
        ) from None
    return start, stop


def spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check(request: Any, refused: str = "") -> None:
    """One way to leave steps out at a time. refused: why the pipeline has none. Raises
    InputError."""
    given = [name for name in FIELDS if getattr(request, name, None) is not None]
    interval = getattr(request, INTERVAL, None) is not None
    if refused and (given or interval):
        raise InputError(f"{spelled(given[0] if given else INTERVAL)}: {refused}")
    if given and interval:
        raise InputError(
            f"{spelled(INTERVAL)}: given beside {spelled(given[0])}, whose steps go on from "
            "guided ones; leave one of the two out"
        )
    if len(given) > 1 and given != [VIDEO_SKIP, AUDIO_SKIP]:
        raise InputError(
            f"{spelled(given[1])}: given beside {spelled(given[0])}, which says for all steps "
            "which are left out; leave one of the two out"
        )


def files(request: Any) -> list[Path]:
    """The file that it names, if any."""
    return [request.step_plan.path] if isinstance(request.step_plan, PlanFile) else []


def check_files(request: Any) -> None:
    for path in files(request):
        existing_file("--step-plan", path)


def remarks(request: Any, checkpoint: Checkpoint) -> Iterator[str]:
    """A sentence about a file of plans that were not calibrated on this model."""
    if isinstance(plan := getattr(request, "step_plan", None), PlanFile):
        model = read_json(plan.path, dict).get("model")
        made_on = model if isinstance(model, dict) else {}
        if made_on.get("digest") != checkpoint.digest():
            which = str(made_on.get("name", "a model that it does not name"))[:80]
            yield f"{plan.path} was calibrated on {which}: what its plans cost here is not known"


def resolved(request: Any) -> Any:
    """With the steps themselves in place of a file. The request has its steps. Raises InputError."""
    if isinstance(request.step_plan, PlanFile):
        request = replace(request, step_plan=str(read(request.step_plan, request.steps)))
    plan_of(request)
    interval = getattr(request, INTERVAL)
    if interval and not within(request.steps, interval).any():
        raise InputError(
            f"{spelled(INTERVAL)}: {interval[0]:g} {interval[1]:g} holds none of the "
            f"{request.steps} steps; widen it"
        )
    return request


def plan_of(request: Any) -> StepPlan | None:
    """Which steps of the guided stage are evaluated; None for all. Of a request with its steps.
    Raises InputError."""
    steps, sigmas = request.steps, shifted_sigmas(request.steps)
    if request.step_plan is not None:
        plan = StepPlan.parse(request.step_plan)
        assert plan is not None, "the request is not resolved"
        plan.check(steps, "--step-plan", sigmas)
        return plan
    skips = {name: getattr(request, name, None) or 0 for name in (SKIP, VIDEO_SKIP, AUDIO_SKIP)}
    for name, skip in skips.items():
        if skip >= steps > 1:
            raise InputError(f"{spelled(name)}: {skip}, expected below --steps, which are {steps}")
    video, audio = (skips[name] or skips[SKIP] for name in (VIDEO_SKIP, AUDIO_SKIP))
    return StepPlan.skipping(steps, video, audio) if video or audio else None


def read(given: PlanFile, steps: int) -> StepPlan:
    """The plan of the file for a schedule of so many steps. Raises InputError."""
    flag, path = "--step-plan", given.path
    try:
        found = read_json(path, SHAPE, "docs/pipelines.md shows a file of plans")
        if any(p["order"] not in (1, 2) for p in found["plans"]):
            raise InputError(f"{path} is damaged (an order other than 1 and 2); calibrate again")
    except InputError as error:
        raise InputError(f"{flag}: {error}") from None
    form, theirs = found["format"], found["steps"]
    made = {p["evaluations"]: StepPlan.of(p["evaluate"], p["order"]) for p in found["plans"]}
    table = np.array(found["sigmas"], np.float32)
    if form != FORMAT:
        raise InputError(
            f"{flag}: {path} has format {form}, expected {FORMAT}; write it anew as in "
            "docs/pipelines.md"
        )
    if theirs != steps or not np.array_equal(table, shifted_sigmas(steps)):
        raise InputError(
            f"{flag}: {path} is for {theirs} steps, the clip has {steps}; pass --steps {theirs}"
        )
    wanted = given.evaluations if given.evaluations is not None else next(iter(made), None)
    if wanted not in made:
        raise InputError(
            f"{flag}: {path} has plans of {', '.join(map(str, made)) or 'no'} evaluations, not "
            f"{wanted}"
        )
    made[wanted].check(steps, flag, table)
    return made[wanted]
