"""Sparse video self-attention in a denoising stage: every step is the masked formula, dense steps
are those of a run without it, and `plan` counts what runs."""

from dataclasses import replace

import numpy as np
import pytest

from ltx2rt.errors import InputError
from ltx2rt.graph.interpret import interpret
from ltx2rt.models import guided_step
from ltx2rt.models.token_blocks import DENSE_FROM
from ltx2rt.pipelines import make_request, pipeline
from ltx2rt.run.plan import make_plan
from ltx2rt.run.run import produce, warm_up
from ltx2rt.stages.frames import Frames
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.stages.sound import Sound
from ltx2rt.testing import random_params, relative_l2

CLOSE = 2e-5  # float32 rounding over four steps
# 5 x 4 x 5 tokens in 13 blocks of 8, of which each sees 4 of itself and its neighbours.
SIZE = {"width": 160, "height": 128, "num_frames": 33, "steps": 4, "seed": 5}
SPARSE = {"attention_density": 0.3, "attention_block": 8}
SIGMAS = shifted_sigmas(4)
DENSE_STEPS = int((SIGMAS[:-1] >= DENSE_FROM).sum())


def planned(session, **more):
    """A run up to its decoders."""
    plan = make_plan(session, pipeline("one-stage")("a red fox", **SIZE | more))
    return replace(plan, stages=tuple(s for s in plan.stages if not isinstance(s, (Frames, Sound))))


def denoising(plan):
    return next(stage for stage in plan.stages if stage.name == "stage1")


@pytest.mark.long
def test_backends_agree_and_dense_steps_are_those_of_a_dense_run(sessions):
    assert 0 < DENSE_STEPS < 4
    ours, theirs = (
        produce(sessions[name], planned(sessions[name], **SPARSE), keep=True)[0].record
        for name in ("cuda", "tpu")
    )
    exact = produce(sessions["cuda"], planned(sessions["cuda"]), keep=True)[0].record
    for name, value in ours.items():
        assert relative_l2(theirs[name], value) <= CLOSE, name
    for kind in ("x0", "steps"):
        found, dense = (run[f"stage1.video.{kind}"] for run in (ours, exact))
        assert relative_l2(found[:DENSE_STEPS], dense[:DENSE_STEPS]) <= CLOSE
        assert relative_l2(found[DENSE_STEPS], dense[DENSE_STEPS]) > 100 * CLOSE


@pytest.mark.parametrize("images", [0, 2])
def test_a_step_is_dense_attention_under_the_mask_of_its_blocks(sessions, images, tmp_path):
    """In the interpreter, of the tokens in their own order; with an image at frame 0, and one
    beside the clip. A layer that sees all has no mask, so every layer is sparse here."""
    session = sessions["cuda"]
    given = [(str(_image(tmp_path, n)), frame, 1.0) for n, frame in enumerate((0, 9)[:images])]
    more = SPARSE | {"attention_dense": (), "image": given, "image_crf": 0}
    stage = denoising(make_plan(session, make_request("one-stage", prompt="fox", **SIZE | more)))
    plan = stage.block_plan
    assert plan.blocks.ends == (0 if not images else 5)
    shape, feeds = stage.shape(session.config, stage.blank)
    small = {"text_tokens": 3, "branches": guided_step.Branches()}
    shape = replace(shape, stg_blocks=(), **small)
    count, size, ends = shape.video_tokens, plan.blocks.size, plan.blocks.ends
    block = plan.inverse // size  # of each token
    rows = np.array(
        [np.isin(block, plan.table[b - ends]) if b >= ends else block >= 0 for b in block]
    )
    config = session.config.transformer
    masked = guided_step.trace(config, replace(shape, masked=True), "float32")
    sparse = guided_step.trace(config, replace(shape, blocks=plan.blocks), "float32")
    rng = np.random.default_rng(3)
    x = {"sigmas": np.float32([0.7, 0.5])} | feeds
    for name, v in masked.inputs.items():
        if name not in x:
            x[name] = rng.standard_normal(v.type.shape).astype(np.float32)
    x["video_attention_mask"] = rows.astype(np.float32)
    assert rows.shape == (count, count) and not rows.all()
    params = random_params(masked)
    expected = interpret(masked, params, x)
    ordered = dict(x, video_blocks=plan.table)
    for name, v in sparse.inputs.items():
        if "tokens" in v.type.axes:
            ordered[name] = np.take(x[name], plan.order, v.type.axes.index("tokens"))
    found = interpret(sparse, params, ordered)
    for name, value in expected.items():
        ours = found[name][:, plan.inverse] if name.startswith("video") else found[name]
        assert relative_l2(ours, value) <= CLOSE, name


def _image(folder, number):
    from PIL import Image

    path = folder / f"{number}.png"
    noise = np.random.default_rng(number).integers(0, 256, (128, 160, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


def test_density_1_is_a_run_without_it(sessions):
    session = sessions["cuda"]
    calls, same = (
        list(denoising(planned(session, **more)).needs(session.config))
        for more in ({}, {"attention_density": 1.0, "attention_block": 8})
    )
    assert calls == same


def test_programs_are_kept_and_costs_are_those_of_the_parts(sessions):
    """One row for the steps that see all, which run the program of a dense run, and one for the
    others; work falls."""
    session = sessions["cuda"]
    dense, plan = planned(session), planned(session, **SPARSE)
    (exact,) = (c for c in session.costs(dense.stages) if c.name == "stage1")
    warm_up(session, plan)
    built = session.backend.num_built
    for one in (plan, dense, planned(session, **SPARSE | {"seed": 6})):
        produce(session, one)
    assert session.backend.num_built == built
    rows = [c for c in session.costs(plan.stages) if c.name == "stage1"]
    assert [c.steps for c in rows] == [DENSE_STEPS, 4 - DENSE_STEPS]
    assert [c.label for c in rows] == ["stage1, 4 branches", "stage1, 4 branches, sparse"]
    assert rows[0].flops == exact.flops > rows[1].flops


REFUSED = [
    ("one-stage", {"attention_density": 0}, "--attention-density: 0"),
    ("one-stage", {"attention_density": 1.5}, "--attention-density: 1.5"),
    ("one-stage", {"attention_density": float("nan")}, "--attention-density: nan"),
    ("one-stage", {"attention_block": 12}, "--attention-block: 12, expected a power of two"),
    ("one-stage", {"attention_block": 1024}, "--attention-block: 1024"),
    ("one-stage", {"attention_dense": "x"}, "--attention-dense: 'x', expected block numbers"),
    ("t2a", {"attention_density": 0.5}, "unknown keyword|does not read"),
]


@pytest.mark.parametrize(("name", "more", "says"), REFUSED, ids=str)
def test_what_no_clip_could_have_is_refused(name, more, says):
    with pytest.raises(InputError, match=says):
        make_request(name, prompt="fox", **more)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"attention_block": 32}, "the clip has 100 video tokens, expected at least 256"),
        (
            {"attention_dense": (0, 9)},
            "--attention-dense: block 9, but the model has blocks 0 to 2",
        ),
    ],
)
def test_what_this_clip_cannot_have_is_refused(sessions, more, says):
    with pytest.raises(InputError, match=says):
        planned(sessions["cuda"], **SPARSE | more)
