"""NAG: the formula in float64, and every step over diffusers' transformer that has it."""

import numpy as np
import pytest
import torch

from ltx2rt.graph import trace
from ltx2rt.models.attention import away
from ltx2rt.pipelines import make_request
from ltx2rt.run.plan import make_plan
from ltx2rt.session.options import NO_LORA
from ltx2rt.stages.schedule import DISTILLED_SIGMAS
from tests.conftest import denoised, refused
from tests.parity import relative_l2, run_graph
from tests.reference import assert_stage, positions_of, stored_module

SIZE = {"width": 64, "height": 64, "num_frames": 17, "seed": 5}


def formula(y, other, scale, tau, alpha):
    """As the paper has it: f64[tokens, heads * head_dim], and where the norm is cut."""
    z = scale * y + (1 - scale) * other
    norm, own = (np.abs(x).sum(-1, keepdims=True) for x in (z, y))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.nan_to_num(norm / own, nan=10)
    cut = ratio > tau
    z = np.where(cut, z * tau * own / (norm + 1e-7), z)
    return alpha * z + (1 - alpha) * y, cut


@pytest.mark.parametrize("kind", ["numpy", "cuda", "tpu"])
@pytest.mark.parametrize("terms", [(11, 2.5, 0.25), (1.5, 3.0, 0.5), (3, 1.2, 1), (1, 2.5, 0.7)])
def test_the_formula(kind, terms):
    """Tokens whose norm is cut and others; one that attends to nothing but zeros."""
    rng = np.random.default_rng(0)
    y, other = (rng.standard_normal((2, 5, 3, 4)).astype(np.float32) for _ in range(2))
    other = np.where(rng.uniform(size=(2, 5, 1, 1)) > 0.5, y + 0.1 * other, other)
    y[0, 0] = 0

    def model(o):
        sizes = {"B": 2, "tokens": 5, "heads": 3, "head_dim": 4}
        a, b = o.input("y", "float32", **sizes), o.input("other", "float32", **sizes)
        return {"z": away(o, a, b, o.input("nag", "float32", terms=3))}

    graph = trace("away", model, "float32")
    feeds = {"y": y, "other": other, "nag": np.array(terms, np.float32)}
    found = run_graph(kind, graph, {}, feeds)["z"]
    flat = [x.reshape(2, 5, 12).astype(np.float64) for x in (y, other)]
    expected, cut = formula(*flat, *terms)
    np.testing.assert_allclose(found.reshape(2, 5, 12), expected, rtol=1e-5, atol=1e-6)
    if terms[0] == 11:
        assert cut.any() and not cut.all()
    if terms[0] == 1:
        np.testing.assert_array_equal(found, y)


class Moved:
    """In place of diffusers' processor: the context is two texts, one behind the other."""

    def __init__(self, terms):
        self.terms, self.cut = terms, []

    def __call__(self, attn, hidden_states, encoder_hidden_states, *_):
        x, texts = hidden_states, encoder_hidden_states.chunk(2, dim=1)
        q = attn.norm_q(attn.to_q(x)).unflatten(2, (attn.heads, -1)).transpose(1, 2).double()
        found = []
        for text in texts:
            k, v = attn.norm_k(attn.to_k(text)), attn.to_v(text)
            k, v = (t.unflatten(2, (attn.heads, -1)).transpose(1, 2).double() for t in (k, v))
            y = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
            found.append(y.transpose(1, 2).flatten(2).numpy())
        z, cut = formula(*found, *self.terms)
        self.cut.append(cut.mean())
        z = torch.from_numpy(z).float()
        if attn.to_gate_logits is not None:
            gates = 2 * torch.sigmoid(attn.to_gate_logits(x))
            z = (z.unflatten(2, (attn.heads, -1)) * gates[..., None]).flatten(2)
        return attn.to_out[0](z)


@pytest.fixture(scope="module")
def both(on_both, generation):
    return on_both(f"tiny-{generation}", distilled_lora=NO_LORA, assume="distilled")


def run(session, name="distilled", **more):
    size = SIZE | {"width": 128, "height": 128} | more
    return denoised(session, make_request(name, prompt="a fox in the snow", **size))


@pytest.mark.parametrize(
    "generation", [pytest.param("2.0", marks=pytest.mark.long), "2.3"], indirect=True
)
def test_every_step_is_the_formula_over_diffusers(both, tiny, generation):
    """Of stage 1, on both backends; sound reads the prompt alone."""
    given = {"nag": "11:1.1:0.5", "negative_prompt": "a grey day"}
    runs = {name: run(session, **given) for name, session in both.items()}
    plan, state = runs["cuda"]
    module = stored_module(tiny(f"tiny-{generation}", "diffusers"))
    processor = Moved((11, 1.1, 0.5))
    for block in module.transformer_blocks:
        block.attn2.processor = processor
    texts = state.contexts["video"]
    both_texts = np.concatenate([texts[:1], texts[1:]], axis=1)
    contexts = {"video": both_texts, "audio": state.contexts["audio"][:1]}
    places = positions_of(plan.clip.geometry(both["cuda"].config, 2))
    assert_stage(runs, "stage1", module, places, DISTILLED_SIGMAS, contexts=contexts)
    assert 0 < np.mean(processor.cut) < 1


def test_a_scale_of_one_is_the_plain_clip(both):
    """Bit for bit, in both stages; a greater one is not."""
    _, plain = run(both["cuda"])
    _, neutral = run(both["cuda"], nag=1)
    _, moved = run(both["cuda"], nag=11)
    for stage in ("stage1", "stage2"):
        name = f"{stage}.video.steps"
        np.testing.assert_array_equal(neutral.record[name], plain.record[name])
        assert relative_l2(moved.record[name][-1], plain.record[name][-1]) > 1e-4


def test_given_clips_take_it_without_guidance(both, film):
    more = {"video_path": film, "noise_level": 0.725, "nag": 5}
    plan = make_plan(both["cuda"], make_request("v2v", prompt="fox", seed=1, **more))
    assert plan.clip.request.negative_prompt and len(plan.clip.prompts) == 2
    assert plan.clip.request.nag == (5, 2.5, 0.25)
    with refused("--nag: for steps without guidance"):
        make_request("v2v", prompt="fox", guided=True, steps=2, **more)


def test_noise_levels_of_each_stage_are_those_that_are_given(sessions):
    def stages(**flags):
        plan = make_plan(sessions["cuda"], make_request("two-stage", prompt="x", **SIZE, **flags))
        return {s.name: s for s in plan.stages if s.name in ("stage1", "stage2")}

    own = stages(sigmas=("1,0.8,0.3,0", "stage2=0.5"))
    np.testing.assert_array_equal(own["stage1"].sigmas, np.array([1, 0.8, 0.3, 0], np.float32))
    np.testing.assert_array_equal(own["stage2"].sigmas, np.array([0.5, 0], np.float32))
    one_by_one = stages(sigmas=[1, 0.8, 0.3, "stage2=0.5"])
    np.testing.assert_array_equal(one_by_one["stage1"].sigmas, own["stage1"].sigmas)
    usual, shifted = stages(steps=5), stages(steps=5, sigmas=("shift=2.05",))
    np.testing.assert_array_equal(usual["stage1"].sigmas, shifted["stage1"].sigmas)
    less = stages(steps=5, sigmas=("shift=1",))["stage1"].sigmas
    assert (less[1:-2] < usual["stage1"].sigmas[1:-2]).all()
    np.testing.assert_array_equal(usual["stage2"].sigmas, DISTILLED_SIGMAS[5:])
