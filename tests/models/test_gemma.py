"""Gemma 3 in graph form against transformers, on the interpreter and both backends."""

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import Gemma3ForConditionalGeneration

from ltx2rt.config import GemmaConfig
from ltx2rt.models import gemma
from ltx2rt.testing import run_graph
from ltx2rt.weights import configs
from ltx2rt.weights.names import gemma_to_canonical
from ltx2rt.weights.presets import preset
from tests.conftest import refused
from tests.models.gemma_cases import (
    BATCH,
    IDS,
    MASK,
    TOKENS,
    check_each,
    check_rounded,
    gemma_3,
    reference,
)


def build(dtype: torch.dtype = torch.float32) -> Gemma3ForConditionalGeneration:
    """7 layers, the 6th full; 6 heads on 2; weights representable in bfloat16."""
    _, model = gemma_3(
        6, vocab_size=61, hidden_size=42, intermediate_size=72, num_hidden_layers=7,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=20,
        sliding_window=5, rms_norm_eps=1e-6,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    for _, p in sorted(model.model.language_model.named_parameters()):
        scale = 0.3 if p.ndim == 1 else p.shape[1] ** -0.5
        # Only parameters change dtype: `model.to` would round the RoPE frequencies too, which
        # loading does not.
        p.data = (scale * torch.randn(p.shape, generator=generator)).bfloat16().to(dtype)
    return model


def config_of(model: Gemma3ForConditionalGeneration) -> GemmaConfig:
    return configs.gemma(configs.Keys(model.config.to_dict(), "config.json"))


def params_of(model: Gemma3ForConditionalGeneration) -> dict[str, np.ndarray]:
    weights = model.model.language_model.state_dict()
    return {gemma_to_canonical(name): tensor.float().numpy() for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def expected(model):
    return reference(model.model)


def states_of(kind: str, model: Gemma3ForConditionalGeneration, dtype: str) -> np.ndarray:
    config = config_of(model)
    graph, feeds = gemma.trace(config, BATCH, TOKENS, dtype), gemma.feeds(config, IDS, MASK)
    return run_graph(kind, graph, params_of(model), feeds)["hidden_states"]


@pytest.mark.parametrize("kind", ["numpy", "cuda", "tpu"])
def test_every_state_equals_transformers_on_tokens_and_padding(model, expected, kind):
    check_each(states_of(kind, model, "float32"), expected, 7)


@pytest.mark.parametrize("kind", ["numpy", "cuda", "tpu"])
def test_bfloat16_is_at_most_twice_as_far_as_transformers_own(model, expected, kind):
    own = reference(build(torch.bfloat16).model)
    check_rounded(states_of(kind, model, "bfloat16"), own, expected, (3, 7))


def test_the_graph_reads_exactly_the_text_branch(model):
    parameters = gemma.trace(config_of(model), 1, 4, "float32").parameters()
    expected = {n: a.shape for n, a in params_of(model).items()}
    assert {n: s.shape for n, s in parameters.items()} == expected


def test_the_embedding_is_scaled_in_the_graphs_dtype():
    config = preset("ltx-2.3").config.gemma
    assert gemma.embedding_scale(config, "bfloat16") == 62.0
    assert gemma.embedding_scale(config, "float32") == np.float32(np.sqrt(3840))


def test_masked_scores_stay_finite_in_bfloat16():
    assert np.isfinite(ml_dtypes.bfloat16(2 * gemma.MASKED))


@pytest.mark.parametrize("ids, mask, message", [
    ([[2, 61]], [[1, 1]], "61 tokens"),
    ([[2, -1]], [[1, 1]], "61 tokens"),
    ([[2, 3]], [[1, 2]], "expected 1"),
    ([[2, 3], [2, 3]], [[1, 1], [0, 0]], "row 1 has no token"),
    ([[2, 3]], [[1, 1, 1]], "same"),
])  # fmt: skip
def test_bad_prompts_are_refused(model, ids, mask, message):
    with refused(message):
        gemma.feeds(config_of(model), np.array(ids), np.array(mask))
