"""The audio-video transformer of both generations equals diffusers'."""

from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2AdaLayerNormSingle

from ltx2rt.graph import trace
from ltx2rt.models import transformer
from ltx2rt.models.modulation import adaln, with_table
from tests.conftest import assert_near
from tests.parity import relative_l2, run_graph
from tests.reference import GENERATIONS, KINDS, NAMES, build, config_of, draw, ours, params_of
from tests.reference import reference as diffusers

CLOSE = 1e-5  # contract: 1e-4; float32 rounding over 3 blocks reaches 1e-6


assert_close = partial(assert_near, close=CLOSE)


def all_kept(config, batch: int) -> dict[str, np.ndarray]:
    ones = np.ones((config.num_layers, batch), np.float32)
    return {name: ones.copy() for name in transformer.keep_names(NAMES)}


# A rule is a matter of the graph, not of its lowering: JAX, which takes seconds to compile, runs
# two of the six.
CASES = [(g, r, k) for g in GENERATIONS for r in "ABC" for k in KINDS[:2]]
CASES += [pytest.param("2.0", "B", "tpu", marks=pytest.mark.long), ("2.3", "C", "tpu")]


@pytest.mark.parametrize("generation,rule,kind", CASES)
def test_mixed_batch_equals_diffusers_run_branch_by_branch(generation, rule, kind):
    """Per-token timesteps, sigma_v != sigma_a; plain, perturbed, isolated samples."""
    config = config_of(generation)
    module, feeds, keeps = build(config), draw(config, batch=3), all_kept(config, 3)
    perturbed = torch.tensor([1.0, 0.0, 1.0])
    stg = {"spatio_temporal_guidance_blocks": [0, 2], "perturbation_mask": perturbed}
    branches = {}, stg, {"isolate_modalities": True}
    expected = [diffusers(module, feeds, rule, **how) for how in branches]
    for name in ("video_self_keep", "audio_self_keep"):
        keeps[name][[0, 2], 1] = 0
    for name in ("a2v_keep", "v2a_keep"):
        keeps[name][:, 2] = 0
    actual = ours(kind, config, feeds, rule, keeps=keeps)
    for row, branch in enumerate(expected):
        assert_close({n: v[row] for n, v in actual.items()}, {n: v[row] for n, v in branch.items()})
    for row in (1, 2):  # the branches differ by far more than the tolerance
        one, plain = (expected[i]["video_velocity"][row] for i in (row, 0))
        assert relative_l2(one, plain) > 100 * CLOSE


@pytest.mark.parametrize("generation", GENERATIONS)
def test_rules_differ_per_token_and_agree_on_uniform_timesteps(generation):
    config = config_of(generation)
    feeds = draw(config)
    a, b, c = (ours("cuda", config, feeds, rule)["video_velocity"] for rule in "ABC")
    assert min(relative_l2(a, b), relative_l2(b, c), relative_l2(a, c)) > 100 * CLOSE
    sigma = feeds["video_sigma"]
    for name in NAMES:
        feeds[f"{name}_sigma"] = sigma
        feeds[f"{name}_timesteps"] = 0 * feeds[f"{name}_timesteps"] + sigma[:, None]
    expected = diffusers(build(config), feeds, "B")
    for rule in "ABC":
        assert_close(ours("cuda", config, feeds, rule), expected)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_clip_of_twenty_seconds_reaches_beyond_the_position_range(kind):
    """61 latent frames at 24 fps: the last midpoint lies past 20 s."""
    config = config_of("2.3", num_layers=1)
    feeds = draw(config, batch=1, grid=(61, 1, 2), audio_tokens=501, text_tokens=13)
    assert feeds["video_positions"][0, 0, -1].mean() > 19.8 and feeds["audio_positions"].max() > 20
    assert_close(ours(kind, config, feeds), diffusers(build(config), feeds))


@pytest.mark.parametrize("kind", KINDS)
def test_self_attention_mask_equals_diffusers(kind):
    """A fraction m weighs exp(score) by m. diffusers adds -10000 (1 - m), so it is given
    1 + ln(m) / 10000, in float64, which carries that difference."""
    config = config_of("2.3")
    feeds, rng = draw(config), np.random.default_rng(2)
    tokens = feeds["video_latent"].shape[1]
    mask = rng.choice(np.array([0, 0.03, 0.6, 1], np.float32), (2, tokens, tokens))
    mask[:, np.arange(tokens), np.arange(tokens)] = 1
    mask[0] = mask[0] > 0.5
    with np.errstate(divide="ignore"):
        theirs = np.where(mask > 0, 1 + np.log(mask.astype(np.float64)) / 10000, 0)
    module = deepcopy(build(config)).double()
    expected = diffusers(module, feeds, video_self_attention_mask=torch.from_numpy(theirs))
    assert_close(ours(kind, config, feeds, mask=mask), expected)
    plain = diffusers(build(config), feeds)["video_velocity"]
    assert relative_l2(plain, expected["video_velocity"]) > 100 * CLOSE


@pytest.mark.parametrize("changes", [
    {"ff_bias": False, "prompt_adaln": False},
    {"num_heads": 5, "audio_num_heads": 5, "av_gate_scale": 1.0},
    {"num_heads": 2, "audio_num_heads": 2, "rope_max_pos": (16, 1024, 512),
     "audio_rope_max_pos": 30},
    {"num_layers": 1, "rope_float64_grid": False},
])  # fmt: skip
@pytest.mark.parametrize("kind", ["numpy", "cuda"])
def test_every_configured_variant_equals_diffusers(kind, changes):
    config = config_of("2.3", **changes)
    feeds = draw(config)
    assert_close(ours(kind, config, feeds), diffusers(build(config), feeds))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_graph_declares_exactly_the_checkpoint_of_diffusers(generation):
    config = config_of(generation)
    shape = transformer.ForwardShape(1, 6, 3, 5, (1, 2, 3, 1, 3, 3))
    graph = transformer.trace(config, shape, "float32")
    expected = {name: array.shape for name, array in params_of(build(config)).items()}
    assert {name: spec.shape for name, spec in graph.parameters().items()} == expected


@pytest.mark.parametrize("generation, kind", [("2.0", "cuda"), ("2.3", "cuda"), ("2.3", "tpu")])
def test_bfloat16_is_at_most_twice_as_far_as_diffusers_own(generation, kind):
    config = config_of(generation, head_dim=16, audio_head_dim=8)
    module, feeds = build(config), draw(config)
    exact = diffusers(module, feeds)
    theirs = diffusers(deepcopy(module).bfloat16(), feeds)
    actual = ours(kind, config, feeds, dtype="bfloat16")
    for name in (f"{n}_velocity" for n in NAMES):
        assert relative_l2(actual[name], exact[name]) <= 2 * relative_l2(theirs[name], exact[name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_levels", [1, 2])
def test_modulation_by_levels_equals_modulation_per_token(num_levels, kind):
    """Three rows of two samples, against diffusers' module on every token."""
    rng, tokens, width, rows = np.random.default_rng(3), 7, 12, 3
    module = LTX2AdaLayerNormSingle(
        width, num_mod_params=rows, use_additional_conditions=False
    ).eval()
    params = {f"a.{name}": t.detach().numpy() for name, t in module.named_parameters()}
    table = params["table"] = rng.standard_normal((rows, width), np.float32)
    picked = np.arange(tokens) % num_levels
    timesteps = rng.random((2, num_levels), np.float32)[:, picked]
    timesteps[0] = timesteps[0, 0]  # one sample has fewer levels than the other
    feeds = transformer.level_feeds("video", timesteps)
    assert feeds["video_levels"].shape == (2, num_levels)

    def model(o):
        levels = transformer.declare_levels(o, "video", num_levels, B=2, tokens=tokens)
        scaled = type(levels)(o.affine(levels.values, scale=1000.0), levels.index)
        made, _ = adaln(o.under("a"), scaled, width, rows)
        made = with_table(o, made, levels.index, o.param("table", rows=rows, D=width))
        return {f"row{i}": v for i, v in enumerate(made)}

    actual = run_graph(kind, trace("adaln", model, "float32"), params, feeds)
    with torch.inference_mode():
        expected = module(
            torch.from_numpy(timesteps * np.float32(1000)).flatten(), hidden_dtype=torch.float32
        )[0]
    expected = expected.numpy().reshape(2, tokens, rows, width) + table
    for i in range(rows):
        row = actual[f"row{i}"] if num_levels > 1 else actual[f"row{i}"][:, None]
        row = np.broadcast_to(row, expected[:, :, i].shape)
        assert relative_l2(row, expected[:, :, i]) <= 1e-6  # one rounding of each sum
