"""Steps of the guided stage: how many, which are evaluated, and which are guided."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import CLIP, flags_of, spelling
from ltx2rt.models.geometry import Geometry
from ltx2rt.models.step_plan import StepPlan
from ltx2rt.pipelines.groups.group import Added, Group
from ltx2rt.stages.denoise import within
from ltx2rt.stages.schedule import shifted_sigmas

if TYPE_CHECKING:
    from ltx2rt.pipelines.clip import Clip, Draft
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


def parse_sigmas(given: str | float) -> str:
    """`NAME=NUMBERS` of a stage's noise levels, which several may give, or of the shift. Raises
    ValueError."""
    name, equals, numbers = str(given).rpartition("=")
    name, found = name if equals else "stage1", [float(x) for x in numbers.split(",")]
    if name == "shift":
        fits = len(found) == 1 and abs(found[0]) <= 20
    else:
        fits = name in ("stage1", "stage2") and all(0 <= x <= 1 for x in found)
    if not fits or len(found) > MAX_STEPS:
        raise ValueError
    return f"{name}={','.join(map(repr, found))}"


def levels(request: Request, stage: str) -> np.ndarray | None:
    """f32[steps + 1], the noise levels that --sigmas gives a stage, the last 0; None without."""
    given = [text.split("=") for text in request.sigmas]
    if own := [float(x) for name, texts in given if name == stage for x in texts.split(",")]:
        return np.array(own if own[-1] == 0 else [*own, 0], np.float32)
    shift = [float(number) for name, number in given if name == "shift"]
    if stage == "stage1" and shift:
        return shifted_sigmas(request[Steps].steps or 1, shift=shift[0])
    return None


@dataclass(frozen=True)
class Sigmas(Group):
    """Noise levels in place of the released ones."""

    sigmas: tuple[str, ...] = flag(
        (),
        "noise levels from 1 down, such as 1,0.9,0.7,0.4; stage2=0.9,0.5 for the second stage; "
        "shift=MU moves the levels of guided steps (default: as released, MU 2.05)",
        parse_sigmas,
        metavar="[STAGE=]LEVELS",
        repeat=True,
        expects="levels from 1 to 0, [stage1=]1,0.9,0.4 or stage2=0.9,0.4, or shift=MU of -20 to 20",
    )

    def check(self, request: Request) -> None:
        names = [text.partition("=")[0] for text in self.sigmas]
        if names.count("shift") > 1 or {"stage1", "shift"} <= {*names}:
            raise InputError(
                f"--sigmas: {' and '.join(names)} are both of one stage; leave one of the two out"
            )
        for name in {*names} - {"shift"}:
            own = levels(request, name)
            if own is None or len(own) < 2 or not (np.diff(own) < 0).all():
                raise InputError(
                    f"--sigmas: {name} has {' '.join(self.sigmas)}, expected levels that fall from "
                    "at most 1, such as 1,0.9,0.4"
                )
        if "stage2" in names and request.scale == 1:
            raise InputError(f"--sigmas: stage2, but the {request.name} pipeline has one stage")

    def into(self, draft: Draft, model: ModelConfig) -> None:
        request, own = draft.request, None
        shifted = any(text.startswith("shift") for text in self.sigmas)
        if not request.is_guided and shifted:
            raise InputError(
                "--sigmas: shift, but distilled steps take no shift; give their levels as a list"
            )
        if request.is_guided and not shifted and (own := levels(request, "stage1")) is not None:
            usual = next(group.steps for group in request.groups if isinstance(group, Steps))
            if draft.asked[Steps].steps not in (None, usual, len(own) - 1):
                raise InputError(
                    f"--steps: {draft.asked[Steps].steps}, but --sigmas has {len(own) - 1} levels; "
                    "leave one of the two out"
                )
            draft.fill(steps=len(own) - 1)

    def stages(self, clip: Clip, name: str, geometry: Geometry, tiling: str) -> Added:
        own = levels(clip.request, name)
        return Added() if own is None else Added({"sigmas": own})


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
            draft.plan = self.plan(draft.request.steps, levels(draft.request, "stage1"))

    def plan(self, steps: int, sigmas: np.ndarray | None = None) -> StepPlan | None:
        """The steps that are evaluated; None for all. Raises InputError."""
        if self.step_plan is not None:
            plan = StepPlan.parse(self.step_plan)
            assert plan, "the parser has read it"
            own = shifted_sigmas(steps) if sigmas is None else sigmas
            plan.check(steps, "--step-plan", own)
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
        if interval and draft.request.is_guided and not within(steps, interval).any():
            raise InputError(
                f"--guidance-interval: {interval[0]:g} {interval[1]:g} holds none of the {steps} "
                "steps; widen it"
            )
