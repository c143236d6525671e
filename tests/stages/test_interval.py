"""Guidance in an interval: every step is the formula over diffusers, on both backends."""

from dataclasses import replace

import numpy as np
from diffusers import ClassifierFreeGuidance

from ltx2rt.models.guided_step import Branches
from ltx2rt.pipelines import make_request, pipeline
from ltx2rt.pipelines.groups.steps import parse_interval
from ltx2rt.run.plan import make_plan
from ltx2rt.run.run import produce, warm_up
from ltx2rt.stages.denoise import Denoise, within
from ltx2rt.stages.frames import Frames
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.stages.sound import Sound
from tests.reference import (
    assert_follows,
    euler_steps,
    guiding,
    made_whole,
    positions_of,
    stored_module,
)

SIGMAS = shifted_sigmas(4)
SIZE = {"width": 64, "height": 64, "num_frames": 17, "steps": 4, "seed": 5}
MIDDLE = (0.25, 0.75)  # steps 1 and 2 of 4


def planned(session, **more):
    """A run up to its decoders."""
    plan = make_plan(session, pipeline("one-stage")("a red fox", **SIZE | more))
    return replace(plan, stages=tuple(s for s in plan.stages if not isinstance(s, (Frames, Sound))))


def test_every_step_is_the_formula_over_diffusers(sessions, folder):
    records = {}
    for name, session in sessions.items():
        plan = planned(session, guidance_interval=MIDDLE)
        state, *_ = produce(session, plan, keep=True)
        records[name] = state.record
    places = positions_of(plan.clip.geometry(session.config)), state.contexts
    module, (x, *given) = stored_module(folder), made_whole(records["cuda"], "stage1")
    for start, stop, how in ((0, 1, {}), (1, 3, guiding(plan.clip)), (3, 4, {})):
        steps = euler_steps(module, *places, x, *given, SIGMAS[start : stop + 1], **how)
        x = assert_follows(records, "stage1", steps, first=start)


def test_programs_are_kept_for_other_intervals_and_a_warm_up_builds_both(sessions):
    """The guided one is that of a run without an interval, the clip of an interval over all."""
    for session in sessions.values():
        exact = produce(session, planned(session), keep=True)[0].record
        plan = planned(session, guidance_interval=(0.0, 1.0))
        whole = produce(session, plan, keep=True)[0].record
        assert all(np.array_equal(whole[name], exact[name]) for name in exact)
        warm_up(session, planned(session, guidance_interval=MIDDLE))
        built = session.backend.num_built
        for interval in ((0, 0.5), (0.5, 1), MIDDLE):
            produce(session, planned(session, guidance_interval=interval))
        assert session.backend.num_built == built


def test_costs_are_those_of_the_parts(sessions):
    """`plan` has a row for each."""
    session = sessions["cuda"]
    (exact,) = (c for c in session.memory.costs(planned(session).stages) if c.name == "stage1")
    stages = planned(session, guidance_interval=MIDDLE).stages
    rows = [c for c in session.memory.costs(stages) if c.name == "stage1"]
    labels = [f"stage1, {part}" for part in ("one branch", "4 branches", "one branch")]
    assert [c.label for c in rows] == labels and [c.steps for c in rows] == [1, 2, 1]
    assert rows[0].flops == rows[2].flops < rows[1].flops == exact.flops


def test_steps_on_the_border_and_nothing_to_guide():
    assert within(4, MIDDLE).tolist() == [False, True, True, False]
    for steps in (7, 30):
        for start, stop in ((0, 1), (0.1, 0.8), (0.34, 0.35)):
            guider = ClassifierFreeGuidance(start=start, stop=stop)
            guided = []
            for step in range(steps):
                guider.set_state(step, steps, None)
                guided.append(guider._is_cfg_enabled())
            assert within(steps, (start, stop)).tolist() == guided
    stage = Denoise("s", None, SIGMAS, (), None, np.array([[1, 0, 1, 0]] * 2), interval=MIDDLE)  # type: ignore[arg-type]
    assert stage.parts == [(Branches(), slice(0, 4))]
    guided = replace(stage, guidance=np.array([[3, 0, 1, 0]] * 2), interval=(0.0, 0.5))
    assert [part.steps for part in guided.parts] == [slice(0, 2), slice(2, 4)]


def test_it_is_read_back_from_its_settings():
    settings = make_request("one-stage", prompt="fox", guidance_interval="0.1, 0.7").settings()
    assert settings["guidance_interval"] == [0.1, 0.7]
    assert parse_interval(settings["guidance_interval"]) == (0.1, 0.7)
