"""Trajectories of the samplers equal float64 references, on the x0 of the real model."""

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ltx2rt.models.geometry import pack_audio, pack_video
from ltx2rt.models.samplers import trajectory
from ltx2rt.pipelines import pipeline
from ltx2rt.run.plan import make_plan
from ltx2rt.run.run import produce
from ltx2rt.session.call import Call
from ltx2rt.session.open import open_session
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.denoise import Denoise, standardised
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, shifted_sigmas
from tests.parity import relative_l2

# float32 latents against float64 ones over 7 to 9 evaluations of a float32 model.
CLOSE = 5e-6
SIZE = {"width": 128, "height": 64, "num_frames": 17}


def mixed(x, x0, sigma, target, noise):
    """An SDE step of share 1/2: x0 as the deterministic step to `target` points."""
    up = min(0.5 * target, 0.9999 * target)
    rest = math.sqrt(target**2 - up**2)
    scale = (1 - target) + rest
    down = rest / scale
    slope = (x - x0) / (sigma - target)
    return scale * ((x - sigma * slope) + down * slope) + up * noise


def res2s(x, sigmas, x0_of, noise, masked):
    """As published: 100 rounds of the anchor, exponential integrator, noise at both points."""
    levels = [*map(float, sigmas[:-1]), float(np.float32(0.0011))]
    for i, (sigma, target) in enumerate(pairwise(levels)):
        h, middle = -math.log(target / sigma), math.sqrt(sigma * target)
        phi1 = lambda z: (math.exp(z) - 1) / z  # noqa: E731
        a21, b2 = 0.5 * phi1(-h / 2), 2 * (math.exp(-h) - 1 + h) / h**2
        b1 = phi1(-h) - b2
        anchor, first = x, x0_of(x, sigma)
        direction = {m: first[m] - anchor[m] for m in x}
        mid = {m: anchor[m] + h * a21 * direction[m] for m in x}
        drawn = {m: noise(m, "substep", i) for m in x}
        mid = masked({m: mixed(anchor[m], mid[m], sigma, middle, drawn[m]) for m in x})
        if h < 0.5 and sigma > 0.03:
            for _ in range(100):
                anchor = {m: mid[m] - h * a21 * direction[m] for m in x}
                direction = {m: first[m] - anchor[m] for m in x}
        second = x0_of(mid, middle)
        new = {m: anchor[m] + h * (b1 * direction[m] + b2 * (second[m] - anchor[m])) for m in x}
        x = masked({m: mixed(anchor[m], new[m], sigma, target, noise(m, "step", i)) for m in x})
    return x0_of(x, levels[-1])


def ancestral(x, sigmas, x0_of, noise, masked, eta=1.0):
    for i, (sigma, target) in enumerate(pairwise(map(float, sigmas))):
        x0 = x0_of(x, sigma)
        if target == 0:
            x = masked(x0)
            continue
        down = target * (1 + (target / sigma - 1) * eta)
        again = math.sqrt(target**2 - down**2 * (1 - target) ** 2 / (1 - down) ** 2)
        moved = {m: down / sigma * x[m] + (1 - down / sigma) * x0[m] for m in x}
        scale, drawn = (1 - target) / (1 - down), {m: noise(m, "ancestral", i) for m in x}
        x = masked({m: scale * moved[m] + again * drawn[m] for m in x})
    return x


@pytest.fixture(scope="module", params=["cuda", pytest.param("tpu", marks=pytest.mark.long)])
def session(tiny, request):
    return open_session(ModelOptions(request.param, tiny("tiny-2.3", "official"), device="cpu"))


def images(tmp_path):
    from PIL import Image

    Image.linear_gradient("L").resize((200, 100)).convert("RGB").save(tmp_path / "image.png")
    return (f"{tmp_path}/image.png", 0, 0.6), (f"{tmp_path}/image.png", 9, 0.7)


@pytest.mark.parametrize("sampler", ["res2s", "ancestral"])
def test_a_trajectory_equals_its_reference(session, sampler, tmp_path):
    """Guided, an image at strength 0.6 in the first frame, one of 0.7 appended."""
    from ltx2rt.pipelines.groups.images import parse_image

    given = tuple(map(parse_image, images(tmp_path)))
    request = pipeline("one-stage")("a fox", steps=4, seed=3, images=given, image_crf=0, **SIZE)
    plan = make_plan(session, request)
    (stage,) = (s for s in plan.stages if isinstance(s, Denoise))
    sigmas = shifted_sigmas(4) if sampler == "res2s" else DISTILLED_SIGMAS
    euler, stage = stage, replace(stage, sampler=sampler, sigmas=sigmas)
    stages = tuple(stage if isinstance(s, Denoise) else s for s in plan.stages)
    state, *_ = produce(session, replace(plan, stages=stages), keep=True)
    states = stage._states(state.given["stage1"], {})
    kind = "x0" if sampler == "res2s" else "steps"
    found = {m: state.record[f"stage1.{m}.{kind}"] for m in states}

    shape, feeds = euler.shape(session.config, states)
    call = Call("guided-step", shape, steps=1, loras=euler.loras)
    feeds |= {f"{m}_context": state.contexts[m] for m in states} | {"guidance": euler.guidance[0]}

    def x0_of(x, sigma):
        now = {f"{m}_latent": x[m].astype(np.float32) for m in x}
        pair = {"sigmas": np.array([[sigma, 0]], np.float32)}
        (out,) = session.denoise(call, feeds | now, pair)
        return {m: session.backend.to_host(out[f"{m}_x0"]).astype(np.float64) for m in x}

    def masked(x):
        masks = {m: states[m].mask.astype(np.float64) for m in x}
        return {m: x[m] * masks[m] + states[m].clean * (1 - masks[m]) for m in x}

    def noise(m, stream, row):
        drawn = state.record[f"stage1.{m}.{stream}"][row][None]
        return standardised(drawn).astype(np.float64) if sampler == "res2s" else drawn

    start = {m: state.record[f"stage1.{m}.start"].astype(np.float64) for m in states}
    walk = {"res2s": res2s, "ancestral": ancestral}[sampler]
    expected = walk(start, sigmas, x0_of, noise, masked)
    final = {"video": pack_video(state.video), "audio": pack_audio(state.audio)}
    for m in expected:
        assert relative_l2(final[m], states[m].clear(expected[m])) <= CLOSE, m
        assert np.isfinite(found[m]).all()


@pytest.mark.parametrize("title", ["A sampler", "A guidance variant"])
def test_a_checklist_names_the_places_that_there_are(title):
    root = Path(__file__).parents[2]
    text = (root / "docs/extending.md").read_text().partition(f"## {title}\n")[2]
    text = text.partition("\n## ")[0]
    named = re.findall("`(.+?)`", text)
    files = [root / name for name in named if "/" in name] + [root / "ltx2rt/pipelines/hq.py"]
    files.append(root / "tests/models/test_guided_step.py")
    there = "".join(file.read_text() for file in files)
    names = {name for name in named if "/" not in name and not name.endswith((".py", "="))}
    assert len(names) >= 5 and all(re.search(rf"\b{name}\b", there) for name in names), names


def test_evaluations_of_a_stage():
    """15 steps are 31 evaluations, 3 are 7; noise in the last step, too; none after it."""
    plan = trajectory("res2s", shifted_sigmas(15))
    assert len(plan) == 31 and plan.streams == {"substep": 15, "step": 15}
    assert plan.sigmas[-1].tolist() == [np.float32(0.0011), 0] and plan.draws[-1] is None
    assert trajectory("ancestral", DISTILLED_SIGMAS).streams == {"ancestral": 7}
    plain = trajectory("ancestral", DISTILLED_SIGMAS, eta=0)
    sigma, target = plain.sigmas[3]
    expected = [target / sigma, 1 - target / sigma, 0]
    np.testing.assert_allclose(plain.coefficients[3], expected, atol=1e-7)


def test_res2s_moves_its_anchor_at_small_steps_above_a_sigma():
    """Where `res2s` above refines it: h < 0.5 and sigma > 0.03."""
    sigmas = np.array([0.5, 0.4, 0.0305, 0.0295, 0.02, 0.0], np.float32)
    rows = trajectory("res2s", sigmas).coefficients
    moved = [not np.array_equal(row[-3:], [1, 0, 0]) for row in rows[:-1:2]]
    expected = [np.log(s / t) < 0.5 and s > 0.03 for s, t in pairwise([*sigmas[:-1], 0.0011])]
    assert moved == expected == [True, False, True, False, False]
