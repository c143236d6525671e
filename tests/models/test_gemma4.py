"""Gemma 4 in graph form against transformers, on the interpreter and both backends."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Gemma4UnifiedTextConfig, Gemma4UnifiedTextModel

from ltx2rt.models import gemma, gemma4
from ltx2rt.weights import configs
from ltx2rt.weights.presets import preset
from tests.conftest import refused
from tests.models.gemma_cases import MASK, reference, states_of
from tests.parity import relative_l2

LAYERS = 6


def build(dtype: torch.dtype = torch.float32) -> Gemma4UnifiedTextModel:
    """Two groups of two sliding layers (6 heads of 16 on 2) and a full one (6 heads of 24 on 1)."""
    config = Gemma4UnifiedTextConfig(
        vocab_size=61, hidden_size=42, intermediate_size=72, num_hidden_layers=LAYERS,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, global_head_dim=24,
        num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=5, rms_norm_eps=1e-6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )  # fmt: skip
    model = Gemma4UnifiedTextModel(config).eval()
    generator = torch.Generator().manual_seed(7)
    scalars = (pair for pair in model.named_buffers() if pair[0].endswith("layer_scalar"))
    for name, p in sorted([*model.named_parameters(), *scalars]):
        x = torch.randn(p.shape, generator=generator)
        x = 1 + 0.3 * x if p.ndim == 1 else x * p.shape[1] ** -0.5
        p.data = x.bfloat16().to(dtype)
        assert name.endswith("weight") or p.shape == (1,)
    return model


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def expected(model):
    return reference(model)


def _each(model, change) -> None:
    for layer in model.layers:
        change(layer)


def _scaled_scores(layer) -> None:
    layer.self_attn.scaling = layer.self_attn.head_dim**-0.5


def _no_value_norm(layer) -> None:
    layer.self_attn.v_norm = torch.nn.Identity()


def _raw_keys_normed(layer) -> None:
    """Values made of the keys behind their norm, where the layer has no value projection."""
    own = layer.self_attn
    if own.v_proj is None:
        own.v_norm = torch.nn.Sequential(own.k_norm, own.v_norm)


def _ordinary_partial_rope(model) -> None:
    """Exponents of the rotated dimensions alone."""
    rotary = model.rotary_emb
    rotated = int((rotary.full_attention_inv_freq > 0).sum())
    rotary.full_attention_inv_freq[:rotated] = 1e6 ** -(torch.arange(rotated) / rotated)


MISTAKES = {
    "scores over sqrt(d)": lambda m: _each(m, _scaled_scores),
    "norms times 1 + w": lambda m: [p.data.add_(1) for n, p in m.named_parameters() if p.ndim == 1],
    "no layer scalar": lambda m: _each(m, lambda layer: layer.layer_scalar.fill_(1)),
    "values of normed keys": lambda m: _each(m, _raw_keys_normed),
    "no value norm": lambda m: _each(m, _no_value_norm),
    "rope exponents": _ordinary_partial_rope,
    "embedding scale": lambda m: m.embed_tokens.embed_scale.mul_(1.02),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_known_mistake_shows_in_this_model(expected, mistake):
    """With the mistake the reference is a thousand times as far off as allowed."""
    wrong = build()
    MISTAKES[mistake](wrong)
    assert relative_l2(reference(wrong)[MASK == 1], expected[MASK == 1]) > 0.01


RELEASED = preset("ltx-2.5").config.gemma


def test_full_size_has_666_tensors_in_stacks_of_8():
    graph = gemma4.trace(RELEASED, 2, 1024, "bfloat16")
    found = graph.parameters()
    assert len(found) == 666 and RELEASED.period == 6
    assert found["language_model.model.layers.47.self_attn.q_proj.weight"].shape == (8192, 3840)
    assert found["language_model.model.layers.46.self_attn.k_proj.weight"].shape == (2048, 3840)
    assert "language_model.model.layers.47.self_attn.v_proj.weight" not in found
    assert {count for name, (_, count) in graph.all_params().items() if "*" in name} == {8}
    assert gemma.embedding_scale(RELEASED, "bfloat16") == 62.0


def test_rotated_pairs_have_the_whole_heads_exponents():
    """256 pairs of 512 dimensions: the first 64 by 1e6^(-2j/512), the others not at all."""
    feeds = gemma4.feeds(RELEASED, np.full((1, 3), 5), np.ones((1, 3), np.int32))
    assert feeds["full_cos"].shape == (3, 256) and feeds["sliding_cos"].shape == (3, 128)
    expected = np.sin(1e6 ** (-np.arange(64) / 256))
    np.testing.assert_allclose(feeds["full_sin"][1, :64], expected, rtol=1e-6)
    assert (feeds["full_cos"][:, 64:] == 1).all() and (feeds["full_sin"][:, 64:] == 0).all()


def test_layers_without_a_common_pattern_are_one_group():
    assert replace(RELEASED, layer_is_sliding=(True, False, False)).period == 3
    assert replace(RELEASED, layer_is_sliding=(False, False)).period == 1


def test_what_is_no_dense_gemma_4_is_refused(model):
    keys = model.config.to_dict()
    for change, says in [
        ({"attention_k_eq_v": False}, "attention_k_eq_v"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ]:
        with refused(says):
            configs.gemma(configs.Keys(keys | change, "config.json"))


def test_layers_written_out_give_the_same(model, expected):
    states = states_of("cuda", model, layers="unrolled")
    assert relative_l2(states[MASK == 1], expected[MASK == 1]) < 1e-5


def test_placeholders_of_what_a_prompt_cannot_hold_embed_as_padding():
    """As the multimodal class does: a prompt that spells one out."""
    ids = np.array([[2, 258880, 7, 258884, 258881]])
    feeds = gemma4.feeds(RELEASED, ids, np.ones((1, 5), np.int32))
    assert feeds["token_ids"].tolist() == [[2, 0, 7, 0, 0]]
    assert (feeds["full_bias"][0, 4] == 0).all()
