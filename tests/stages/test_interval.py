"""Guidance in an interval of the steps: every step is the formula over diffusers' transformer,
on both backends."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import refused
from diffusers import ClassifierFreeGuidance, LTX2VideoTransformer3DModel
from reference_transformer import euler_steps

from ltx2rt.models.geometry import audio_positions, video_positions
from ltx2rt.models.guided_step import Branches
from ltx2rt.pipelines import make_request, pipeline
from ltx2rt.pipelines.groups.steps import parse_interval
from ltx2rt.run.plan import make_plan
from ltx2rt.run.run import produce, warm_up
from ltx2rt.stages.denoise import Denoise, within
from ltx2rt.stages.frames import Frames
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.stages.sound import Sound
from ltx2rt.testing import relative_l2

CLOSE = 2e-5  # contract: 1e-3; float32 rounding over four steps
SIGMAS = shifted_sigmas(4)
SIZE = {"width": 128, "height": 64, "num_frames": 17, "steps": 4, "seed": 5}
MIDDLE = (0.25, 0.75)  # steps 1 and 2 of 4


def planned(session, **more):
    """A run up to its decoders."""
    plan = make_plan(session, pipeline("one-stage")("a red fox", **SIZE | more))
    return replace(plan, stages=tuple(s for s in plan.stages if not isinstance(s, (Frames, Sound))))


def test_every_step_is_the_formula_over_diffusers(sessions, folder):
    module = LTX2VideoTransformer3DModel.from_pretrained(
        folder / "transformer", perturbed_attn=True
    ).eval()
    runs = {}
    for name, session in sessions.items():
        plan = planned(session, guidance_interval=MIDDLE)
        runs[name], *_ = produce(session, plan, keep=True)
    request, state = plan.request, runs["cuda"]
    geometry = request.geometry(session.config)
    positions = {"video": video_positions(geometry), "audio": audio_positions(geometry)}
    x = {m: state.record[f"stage1.{m}.start"][0] for m in positions}
    clean = {m: np.zeros_like(value) for m, value in x.items()}
    masks = {m: np.ones(len(value)) for m, value in x.items()}
    guided = {"guidance": request.guidance, "blocks": request.stg_blocks}
    for start, stop, how in ((0, 1, {}), (1, 3, guided), (3, 4, {})):
        steps = euler_steps(
            module, positions, state.contexts, x, masks, clean, SIGMAS[start : stop + 1], **how
        )
        for i, (latents, x0) in enumerate(steps, start):
            x = latents
            for m in positions:
                for name, run in runs.items():
                    for kind, found in (("steps", latents), ("x0", x0)):
                        ours = run.record[f"stage1.{m}.{kind}"][i]
                        assert relative_l2(ours, found[m]) <= CLOSE, (name, m, kind, i)


def test_programs_are_kept_for_other_intervals_and_a_warm_up_builds_both(sessions):
    """The guided one is that of a run without an interval, whose clip is that of an interval over
    all."""
    for session in sessions.values():
        exact = produce(session, planned(session), keep=True)[0].record
        whole = produce(session, planned(session, guidance_interval=(0.0, 1.0)), keep=True)[
            0
        ].record
        assert all(np.array_equal(whole[name], exact[name]) for name in exact)
        warm_up(session, planned(session, guidance_interval=MIDDLE))
        built = session.backend.num_built
        for interval in ((0, 0.5), (0.5, 1), MIDDLE):
            produce(session, planned(session, guidance_interval=interval))
        assert session.backend.num_built == built


def test_costs_are_those_of_the_parts(sessions):
    """`plan` has a row for each."""
    session = sessions["cuda"]
    (exact,) = (c for c in session.costs(planned(session).stages) if c.name == "stage1")
    stages = planned(session, guidance_interval=MIDDLE).stages
    rows = [c for c in session.costs(stages) if c.name == "stage1"]
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


@pytest.mark.parametrize("name, given, says", [
    ("one-stage", {"guidance_interval": "0.1"}, "expected START STOP"),
    ("one-stage", {"guidance_interval": "0.9 0.1"}, "expected START STOP"),
    ("one-stage", {"guidance_interval": "0.1 nan"}, "expected START STOP"),
    ("one-stage", {"guidance_interval": (0.5, 2)}, "expected START STOP"),
    ("one-stage", {"guidance_interval": "0 1", "skip_step": 1}, "given beside --skip-step"),
    ("two-stage", {"guidance_interval": "0 1", "step_plan": "0,4,8"}, "given beside --step-plan"),
    ("hq", {"guidance_interval": "0 1"}, "does not read it"),
    ("extend", {"guidance_interval": "0 1", "video_path": "a.mp4"}, "add --guided"),
    ("distilled", {"guidance_interval": "0 1"}, "distilled pipeline does not read it"),
])  # fmt: skip
def test_refusals(name, given, says):
    with refused(says):
        make_request(name, prompt="fox", **given).check()


def test_an_interval_without_a_step_is_refused(sessions):
    with refused(r"0 0\.05 holds none of the 4 steps"):
        planned(sessions["cuda"], guidance_interval=(0.0, 0.05))


def test_it_is_read_back_from_its_settings():
    settings = make_request("one-stage", prompt="fox", guidance_interval="0.1, 0.7").settings()
    assert settings["guidance_interval"] == [0.1, 0.7]
    assert parse_interval(settings["guidance_interval"]) == (0.1, 0.7)
