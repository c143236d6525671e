"""Steps of the guided stage: how many, which are evaluated, and which are guided."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.flags import CLIP, flags_of, spelling
from ltx2rt.models.step_plan import StepPlan
from ltx2rt.pipelines.groups.group import Group
from ltx2rt.pipelines.step_plans import PlanFile, parse_step_plan, read
from ltx2rt.stages.denoise import within
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.stages.stage import MODALITIES

flag = flags_of("sampling")

MAX_STEPS = 10_000


def parse_interval(text: str | Sequence[float]) -> tuple[float, float]:
    """Two numbers, or text with a space or a comma between them. Raises TypeError or ValueError."""
    parts = re.split(r"[\s,]+", text.strip()) if isinstance(text, str) else text
    start, stop = (float(part) for part in parts)
    if not 0 <= start < stop <= 1:
        raise ValueError
    return start, stop


@dataclass(frozen=True)
class Steps(Group):
    steps: int | None = flag(
        None,
        "guided steps (default: 40 for LTX-2.0, else 30)",
        least=1,
        most=MAX_STEPS,
        common=CLIP,
    )

    def resolved(self, request: Any, model: ModelConfig) -> dict[str, Any]:
        return {} if self.steps or not request.is_guided else {"steps": model.release.steps}


@dataclass(frozen=True)
class Skips(Group):
    """Steps to leave out, in one way at a time; a resolved request has the steps that its plan
    evaluates in place of a file."""

    step_plan: str | PlanFile | None = flag(
        None, "steps to evaluate: 0,4,8,9, or a file", parse_step_plan, metavar="PLAN", file="plan"
    )
    skip_step: int | None = flag(
        None, "guided steps to leave out after each evaluated one", least=0, most=MAX_STEPS
    )

    def given(self) -> list[str]:
        """The flags that leave steps out."""
        return [spelling(f) for f in fields(self) if getattr(self, f.name) is not None]

    def check(self, request: Any) -> None:
        given = self.given()
        both = "--video-skip-step", "--audio-skip-step"
        if len(given) > 1 and tuple(given) != both:
            raise InputError(
                f"{given[1]}: given beside {given[0]}, which says for all steps which are left out; "
                "leave one of the two out"
            )

    def resolved(self, request: Any, model: ModelConfig) -> dict[str, Any]:
        if not request.is_guided:
            return {}
        full, given = self, self.step_plan
        if isinstance(given, PlanFile):
            full = replace(self, step_plan=str(read(given, request.steps)))
        full.plan(request.steps)
        return {"step_plan": full.step_plan}

    def plan(self, steps: int) -> StepPlan | None:
        """The steps of a resolved request that are evaluated; None for all. Raises InputError."""
        if self.step_plan is not None:
            plan = StepPlan.parse(str(self.step_plan))
            assert plan is not None, "the request is not resolved"
            plan.check(steps, "--step-plan", shifted_sigmas(steps))
            return plan
        skips = {f.name: getattr(self, f.name) or 0 for f in fields(self) if "skip" in f.name}
        for name, skip in skips.items():
            if skip >= steps > 1:
                raise InputError(
                    f"--{name.replace('_', '-')}: {skip}, expected below --steps, which are {steps}"
                )
        every = skips["skip_step"]
        video, audio = (skips.get(f"{m}_skip_step", 0) or every for m in MODALITIES)
        return StepPlan.skipping(steps, video, audio) if video or audio else None


@dataclass(frozen=True)
class VideoSkips(Skips):
    video_skip_step: int | None = flag(
        None, "steps of video to leave out after each one (default: 0)", least=0, most=MAX_STEPS
    )


@dataclass(frozen=True)
class SoundSkips(Skips):
    audio_skip_step: int | None = flag(
        None, "steps of sound to leave out after each one (default: 0)", least=0, most=MAX_STEPS
    )


@dataclass(frozen=True)
class AllSkips(SoundSkips, VideoSkips):
    """Skips for a clip of which video and sound are both made."""


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

    def check(self, request: Any) -> None:
        skips = request[Skips].given() if request.has(Skips) else []
        if self.guidance_interval and skips:
            raise InputError(
                f"--guidance-interval: given beside {skips[0]}, whose steps go on from guided ones; "
                "leave one of the two out"
            )

    def resolved(self, request: Any, model: ModelConfig) -> dict[str, Any]:
        interval, steps = self.guidance_interval, request.steps
        if request.is_guided and interval and not within(steps, interval).any():
            raise InputError(
                f"--guidance-interval: {interval[0]:g} {interval[1]:g} holds none of the {steps} "
                "steps; widen it"
            )
        return {}
