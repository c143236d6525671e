"""Files of step plans."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.errors import InputError, concerning
from ltx2rt.models.step_plan import StepPlan
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.text_files import read_json
from ltx2rt.weights.checkpoint import Checkpoint

FORMAT = 1  # version of a file of plans
SHAPE = {
    "format": int, "steps": int, "sigmas": [float],
    "plans": [{"evaluations": int, "evaluate": [int], "order": int}],
}  # fmt: skip


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


def remarks(request: Any, checkpoint: Checkpoint) -> Iterator[str]:
    """A sentence about a file of plans that were not calibrated on this model."""
    if isinstance(plan := getattr(request, "step_plan", None), PlanFile):
        model = read_json(plan.path, dict).get("model")
        made_on = model if isinstance(model, dict) else {}
        if made_on.get("digest") != checkpoint.digest():
            which = str(made_on.get("name", "a model that it does not name"))[:80]
            yield f"{plan.path} was calibrated on {which}: what its plans cost here is not known"


def read(given: PlanFile, steps: int) -> StepPlan:
    """The plan of the file for a schedule of so many steps. Raises InputError."""
    flag, path = "--step-plan", given.path
    with concerning(flag):
        found = read_json(path, SHAPE, "docs/pipelines.md shows a file of plans")
        if any(p["order"] not in (1, 2) for p in found["plans"]):
            raise InputError(f"{path} is damaged (an order other than 1 and 2); calibrate again")
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
