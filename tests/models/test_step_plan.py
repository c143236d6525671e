"""Step plans: their coefficients against Euler written step by step, and whole runs."""

import numpy as np
import pytest

from ltx2rt.models.samplers import planned, trajectory
from ltx2rt.models.step_plan import MAX_GAIN, StepPlan, gain
from ltx2rt.pipelines import pipeline
from ltx2rt.pipelines.groups.steps import Skips
from ltx2rt.session.open import open_session
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.schedule import shifted_sigmas
from tests.conftest import denoised, refused
from tests.parity import relative_l2

EXACT = 1e-12  # float64 on both sides
CLOSE = 1e-5  # float32 latents: of both backends, and against float64 over the same x0
STEPS = 6
SIZE = {"width": 128, "height": 64, "num_frames": 17, "steps": STEPS, "seed": 3}


def euler(x, s, i, j, x0, h=None, x0_before=None):
    """The steps i to j, where x0 stays, or goes on in a straight line over sigma from that of h."""
    for step in range(i, j):
        now = x0
        if h is not None:
            now = x0 + (x0 - x0_before) * (s[step] - s[i]) / (s[i] - s[h])
        x = x + (x - now) / s[step] * (s[step + 1] - s[step])
    return x


@pytest.mark.parametrize("steps", [8, 30, pytest.param(40, marks=pytest.mark.long)])
def test_a_jump_equals_its_euler_steps(steps):
    s, rng = shifted_sigmas(steps).astype(np.float64), np.random.default_rng(0)
    x, x0, before = rng.normal(size=(3, 5))
    for i in range(steps):
        for j in range(i + 1, steps + 1):
            r = s[j] / s[i]
            np.testing.assert_allclose(r * x + (1 - r) * x0, euler(x, s, i, j, x0), atol=EXACT)
            for h in range(i):
                g = gain(s, h, i, j)
                found = r * x + (1 - r + g) * x0 - g * before
                expected = euler(x, s, i, j, x0, h, before)
                np.testing.assert_allclose(found, expected, atol=EXACT * max(1, abs(g)))


def test_skipped_steps_are_those_of_the_reference():
    """A step is skipped if skip_step != 0 and step % (skip_step + 1) != 0."""
    for steps in range(1, 41):
        for skip in range(6):
            due = tuple(i for i in range(steps) if not (skip != 0 and i % (skip + 1) != 0))
            group = Skips(skip_step=skip)
            if skip >= steps > 1:
                with refused("expected below --steps"):
                    group.plan(steps)
            else:
                plan = group.plan(steps)
                assert (plan.evaluate if plan else tuple(range(steps))) == due


def test_every_step_is_no_plan():
    sigmas = shifted_sigmas(30)
    for order in (1, 2):
        rows = StepPlan(tuple(range(30)), order).coefficients(sigmas)
        assert not rows[:, 2].any(), "nothing is extrapolated over one step"
    found, plain = planned(StepPlan(tuple(range(30))), sigmas), trajectory("euler", sigmas)
    assert found.sigmas.tobytes() == plain.sigmas.tobytes() and found.coefficients is None


def test_refusals():
    sigmas = shifted_sigmas(30)
    assert abs(gain(sigmas.astype(float), 11, 12, 30)) > MAX_GAIN * 10
    for text, message in (
        ("1,2", "0 first"),
        ("0,4,4", "ascending"),
        ("0,30", "below 30"),
        ("0,12,9", "ascending"),
        ("0,11,12", "from step 12 reaches too far"),
    ):
        with refused(message):
            StepPlan.parse(text).check(30, "--step-plan", sigmas)
    StepPlan.parse("1:0,11,12").check(30, "--step-plan", sigmas)


@pytest.fixture(scope="module")
def sessions(tiny):
    model = tiny("tiny-2.3", "official")
    opened = {b: open_session(ModelOptions(b, model, device="cpu")) for b in ("cuda", "tpu")}
    yield opened
    for session in opened.values():
        session.close()


def run(session, name="one-stage", **more):
    plan, state = denoised(session, pipeline(name)("a red fox", **SIZE | more))
    (stage,) = (s for s in plan.stages if isinstance(s, Denoise))
    return state.record, stage


@pytest.mark.parametrize(("given", "backends"), [
    pytest.param({"skip_step": 1}, ["cuda", "tpu"], marks=pytest.mark.long),
    pytest.param({"step_plan": "0,2,4,5"}, ["cuda", "tpu"], marks=pytest.mark.long),
    ({"step_plan": "0,2,4,5"}, ["cuda"]),
])  # fmt: skip
def test_a_run_takes_the_steps_left_out_one_by_one(sessions, given, backends):
    """Against float64 Euler steps over the x0 that the run recorded, and the other backend."""
    (ours, stage), *others = (run(sessions[backend], **given) for backend in backends)
    plan, s = stage.plan, shifted_sigmas(STEPS).astype(np.float64)
    for stream in ("video", "audio"):
        steps, x0 = (ours[f"stage1.{stream}.{kind}"].astype(np.float64) for kind in ("steps", "x0"))
        for name in (f"stage1.{stream}.steps", f"stage1.{stream}.x0"):
            assert all(relative_l2(theirs[name], ours[name]) <= CLOSE for theirs, _ in others), name
        x = ours[f"stage1.{stream}.start"][0].astype(np.float64)
        for n, i in enumerate(plan.evaluate):
            h = plan.evaluate[n - 1] if plan.order == 2 and n else None
            j = [*plan.evaluate, STEPS][n + 1]
            x = euler(x, s, i, j, x0[n], h, None if h is None else x0[n - 1])
            assert relative_l2(steps[n], x) <= CLOSE, (stream, i)


@pytest.mark.long
def test_equal_skips_build_nothing_after_the_exact_run(sessions):
    for session in sessions.values():
        exact, _ = run(session)
        built = session.backend.num_built
        for given in ({"skip_step": 1}, {"skip_step": 4}, {"step_plan": "1:0,3,5"}):
            run(session, **given)
        assert session.backend.num_built == built
        full, _ = run(session, step_plan="1:" + ",".join(map(str, range(STEPS))))
        assert all(np.array_equal(full[key], exact[key]) for key in exact)
        run(session, step_plan="0,2,4,5")
        built = session.backend.num_built
        run(session, step_plan="0,3,5")
        assert session.backend.num_built == built, "a second plan of order 2"
