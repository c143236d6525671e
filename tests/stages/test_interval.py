"""Guidance in an interval, and by noise level: every step is the formula over diffusers, on both
backends."""

from dataclasses import replace

import numpy as np
import pytest
from diffusers import ClassifierFreeGuidance

from ltx2rt.models.guided_step import Branches
from ltx2rt.models.step_plan import StepPlan
from ltx2rt.pipelines import make_request, pipeline
from ltx2rt.pipelines.clip import resolve
from ltx2rt.pipelines.groups.steps import parse_interval
from ltx2rt.run.plan import make_plan
from ltx2rt.run.run import produce, warm_up
from ltx2rt.stages.denoise import Denoise, within
from ltx2rt.stages.frames import Frames
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.stages.sound import Sound
from ltx2rt.weights.presets import preset
from tests.conftest import refused
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


BY_LEVEL = {"video_cfg": "4,0.98:2,0.7:1", "audio_cfg": "7,0.7:1", "audio_rescale": "0.7,0.98:0.2"}
BY_LEVEL |= {f"{m}_stg": "1,0.7:0" for m in ("video", "audio")}
BY_LEVEL |= {f"{m}_modality": "3,0.7:1" for m in ("video", "audio")}


@pytest.mark.long
def test_scales_by_noise_level_are_the_formula_over_diffusers(sessions, folder):
    """Two stretches of one program, then the conditional branch alone."""
    records = {}
    for name, session in sessions.items():
        plan = planned(session, **BY_LEVEL)
        (stage,) = (s for s in plan.stages if isinstance(s, Denoise))
        every = Branches(True, True, True)
        assert stage.parts == [
            (every, slice(0, 1), 0),
            (every, slice(1, 2), 1),
            (Branches(), slice(2, 4), 2),
        ]
        built = session.backend.num_built
        state, *_ = produce(session, plan, keep=True)
        made = session.backend.num_built - built
        records[name] = state.record
        produce(session, planned(session, **BY_LEVEL | {"video_cfg": "5,0.95:3,0.7:1"}))
        assert session.backend.num_built - built == made
    places = positions_of(plan.clip.geometry(session.config)), state.contexts
    module, (x, *given) = stored_module(folder), made_whole(records["cuda"], "stage1")
    scales = np.array([[[4, 1, 3, 0.7], [7, 1, 3, 0.7]], [[2, 1, 3, 0.7], [7, 1, 3, 0.2]]])
    blocks = plan.clip.guiding.stg_blocks
    for start, stop, how in ((0, 1, scales[0]), (1, 2, scales[1]), (2, 4, None)):
        steps = euler_steps(module, *places, x, *given, SIGMAS[start : stop + 1], how, blocks)
        x = assert_follows(records, "stage1", steps, first=start)


def test_a_scale_changes_from_its_level_on_for_every_sampler():
    """At a level that a step has to the bit; of hq at the middles of steps, too."""
    request = make_request("hq", prompt="fox", video_cfg="3, 0.725:2", video_stg=1, seed=1)
    assert request.settings()["video_cfg"] == "3,0.725:2"
    clip = resolve(request, preset("ltx-2.3").config)
    levels = np.float32([1, 0.9, 0.725, 0.2, 0])
    stage = Denoise("s", None, levels, (), None, **vars(clip.guiding), sampler="res2s")  # type: ignore[arg-type]
    at = stage.trajectory.sigmas[:, 0] <= np.float32(0.725)
    assert [part.steps.start for part in stage.parts] == [0, int(np.argmax(at))] and at[4:].all()
    assert [part.scales for part in stage.parts] == [0, 1]
    plan = StepPlan.parse("0,2,3")
    assert [p.steps for p in replace(stage, plan=plan).parts] == [slice(0, 1), slice(1, 3)]


@pytest.mark.parametrize(
    "scale", ["7,", "7,0.9", "7,0.5:3,0.9:1", "7,0.9:3,0.9:1", "7,1.5:3", "7,0:3", "7,0.5:1e9", "7,0.9:3:2",
    "7,nan:3", "7,0.9:inf", "", "7;0.9:3", "x", ",0.9:3", True, [7, 3]]
)  # fmt: skip
def test_a_wrong_scale_is_refused(scale):
    with refused("--video-cfg: .*, expected a number, or one and others from noise levels down"):
        make_request("one-stage", prompt="fox", video_cfg=scale)


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
    stage = Denoise("s", None, SIGMAS, (), None, np.array([[[1, 0, 1, 0]] * 2]), interval=MIDDLE)  # type: ignore[arg-type]
    assert stage.parts == [(Branches(), slice(0, 4), 0)]
    guided = replace(stage, guidance=np.array([[[3, 0, 1, 0]] * 2]), interval=(0.0, 0.5))
    assert [part.steps for part in guided.parts] == [slice(0, 2), slice(2, 4)]


def test_it_is_read_back_from_its_settings():
    settings = make_request("one-stage", prompt="fox", guidance_interval="0.1, 0.7").settings()
    assert settings["guidance_interval"] == [0.1, 0.7]
    assert parse_interval(settings["guidance_interval"]) == (0.1, 0.7)
