"""Gemma 4 in graph form against transformers, on the interpreter and both backends."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Gemma4UnifiedTextConfig, Gemma4UnifiedTextModel

from ltx2rt.config import Gemma4Config
from ltx2rt.graph import Ops
from ltx2rt.models import gemma4
from ltx2rt.testing import relative_l2, run_graph
from ltx2rt.weights import configs
from ltx2rt.weights.names import gemma_to_canonical

BATCH, TOKENS, LAYERS = 4, 13, 6
# Left padding, none, right padding, and a prompt of one token; longer than the window.
MASK = np.ones((BATCH, TOKENS), np.int32)
MASK[0, :4], MASK[2, 6:], MASK[3, :-1] = 0, 0, 0
IDS = np.where(MASK, np.random.default_rng(5).integers(3, 61, MASK.shape), 0)


def build(dtype: torch.dtype = torch.float32) -> Gemma4UnifiedTextModel:
    """Two groups of two sliding layers (6 heads of 16 on 2) and a full one (6 heads of 24 on 1)."""
    config = Gemma4UnifiedTextConfig(
        vocab_size=61,
        hidden_size=42,
        intermediate_size=72,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=24,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        rms_norm_eps=1e-6,
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )
    model = Gemma4UnifiedTextModel(config).eval()
    generator = torch.Generator().manual_seed(7)
    named = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n.endswith("layer_scalar")}
    for name, p in sorted(named.items()):
        noise = torch.randn(p.shape, generator=generator)
        p.data = (1 + 0.3 * noise if p.ndim == 1 else noise * p.shape[1] ** -0.5).bfloat16().to(dtype)
        assert name.endswith("weight") or p.shape == (1,)
    return model


def config_of(model: Gemma4UnifiedTextModel) -> Gemma4Config:
    return configs.gemma(configs.Keys(model.config.to_dict(), "config.json"))


def params_of(model: Gemma4UnifiedTextModel) -> dict[str, np.ndarray]:
    return {gemma_to_canonical(f"model.{n}"): tensor.float().numpy() for n, tensor in model.state_dict().items()}


@torch.inference_mode()
def reference(model: Gemma4UnifiedTextModel) -> np.ndarray:
    ids, mask = torch.from_numpy(IDS), torch.from_numpy(MASK)
    out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    return torch.stack(out.hidden_states, -1).float().numpy()


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def expected(model):
    return reference(model)


def states_of(kind: str, model: Gemma4UnifiedTextModel, config: Gemma4Config, dtype: str = "float32") -> np.ndarray:
    graph = gemma4.trace(config, BATCH, TOKENS, dtype)
    return run_graph(kind, graph, params_of(model), gemma4.feeds(config, IDS, MASK))["hidden_states"]


@pytest.mark.parametrize("kind", ["numpy", "cuda", "tpu"])
def test_every_state_equals_transformers_on_tokens_and_padding(model, expected, kind):
    states = states_of(kind, model, config_of(model))
    assert states.shape == (BATCH, TOKENS, 42, LAYERS + 1)
    for i in range(LAYERS + 1):
        # Reached: 1e-6, float32 rounding through 6 layers.
        assert relative_l2(states[MASK == 1][..., i], expected[MASK == 1][..., i]) < 1e-5, f"state {i}, tokens"
        assert relative_l2(states[MASK == 0][..., i], expected[MASK == 0][..., i]) < 1e-5, f"state {i}, padding"
