"""Steps of the guided stage: how many, which are evaluated, and which are guided."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import CLIP, flags_of, spelling
from ltx2rt.models.step_plan import StepPlan
from ltx2rt.pipelines.groups.group import Group
from ltx2rt.stages.denoise import within
from ltx2rt.stages.schedule import shifted_sigmas

if TYPE_CHECKING:
    from ltx2rt.pipelines.clip import Draft
    from ltx2rt.pipelines.request import Request

flag = flags_of("sampling")

MAX_STEPS = 10_000


def parse_interval(text: str | Sequence[float]) -> tuple[float, float]:
    """Two numbers, or text with a space or a comma between them. Raises TypeError or ValueError."""
    parts = re.split(r"[\s,]+", text.strip()) if isinstance(text, str) else text
    start, stop = (float(part) for part in parts)
    if not 0 <= start < stop <= 1:
        raise ValueError
    return start, stop


def parse_step_plan(text: str) -> str:
    """A list of steps. Raises ValueError."""
    if StepPlan.parse(text) is None:
        raise ValueError
    return text


@dataclass(frozen=True)
class Steps(Group):
    steps: int | None = flag(
        None,
        "guided steps (default: 40 for LTX-2.0, else 30)",
        least=1,
        most=MAX_STEPS,
        common=CLIP,
    )

    def into(self, draft: Draft, model: ModelConfig) -> None:
        if not self.steps and draft.request.is_guided:
            draft.fill(steps=model.release.steps)


@dataclass(frozen=True)
class Skips(Group):
    """Steps to leave out, in one way at a time."""

    step_plan: str | None = flag(
        None,
        "steps to evaluate, such as 0,4,8,9; between them x0 goes on in a straight line, after 1: "
        "it stays",
        parse_step_plan,
        metavar="PLAN",
        expects="a list of steps such as 0,4,8,9 or 1:0,4,8,9",
        json="string",
    )
    skip_step: int | None = flag(
        None, "guided steps to leave out after each evaluated one", least=0, most=MAX_STEPS
    )

    def given(self) -> list[str]:
        """The flags that leave steps out."""
        return [spelling(f) for f in fields(self) if getattr(self, f.name) is not None]

    def check(self, request: Request) -> None:
        given = self.given()
        if len(given) > 1:
            raise InputError(
                f"{given[1]}: given beside {given[0]}, which says for all steps which are left out; "
                "leave one of the two out"
            )
        if given and request.guidance_interval:
            raise InputError(
                f"--guidance-interval: given beside {given[0]}, whose steps go on from guided ones; "
                "leave one of the two out"
            )

    def into(self, draft: Draft, model: ModelConfig) -> None:
        if draft.request.is_guided:
            draft.plan = self.plan(draft.request.steps)

    def plan(self, steps: int) -> StepPlan | None:
        """The steps that are evaluated; None for all. Raises InputError."""
        if self.step_plan is not None:
            plan = StepPlan.parse(self.step_plan)
            assert plan, "the parser has read it"
            plan.check(steps, "--step-plan", shifted_sigmas(steps))
            return plan
        skip = self.skip_step or 0
        if skip >= steps > 1:
            raise InputError(f"--skip-step: {skip}, expected below --steps, which are {steps}")
        return StepPlan(tuple(range(0, steps, skip + 1))) if skip else None


@dataclass(frozen=True)
class Interval(Group):
    guidance_interval: tuple[float, float] | None = flag(
        None,
        "part of the steps that are guided, as shares of them (default: 0 1, all)",
        parse_interval,
        group="guidance",
        metavar=("START", "STOP"),
        expects="START STOP, two shares of the steps with 0 <= START < STOP <= 1",
        json="string",
    )

    def into(self, draft: Draft, model: ModelConfig) -> None:
        interval, steps = self.guidance_interval, draft.request.steps
        if not (interval and draft.request.is_guided):
            return
        if not within(steps, interval).any():
            raise InputError(
                f"--guidance-interval: {interval[0]:g} {interval[1]:g} holds none of the {steps} "
                "steps; widen it"
            )
        draft.interval = interval
