"""Both Gemmas in graph form against transformers, on the interpreter and both backends."""

from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import Gemma3ForConditionalGeneration

from ltx2rt.models import gemma
from ltx2rt.weights.presets import preset
from tests.conftest import refused
from tests.models import test_gemma4
from tests.models.gemma_cases import (
    BATCH,
    MASK,
    TOKENS,
    config_of,
    gemma_3,
    params_of,
    reference,
    states_of,
)
from tests.parity import relative_l2


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


BUILDERS = {"3": build, "4": test_gemma4.build}


@cache
def built(family: str, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, np.ndarray]:
    """transformers' model, and its states."""
    model = BUILDERS[family](dtype)
    return model, reference(model)


@pytest.mark.parametrize("kind", ["numpy", "cuda", "tpu"])
@pytest.mark.parametrize("family", BUILDERS)
def test_every_state_equals_transformers_on_tokens_and_padding(family, kind):
    """Contract: 1e-4. Reached: 1e-6, float32 rounding through the layers."""
    model, expected = built(family)
    states = states_of(kind, model)
    assert states.shape == expected.shape == (BATCH, TOKENS, 42, {"3": 8, "4": 7}[family])
    for i in range(states.shape[-1]):
        for kept in (1, 0):
            found = relative_l2(states[kept == MASK][..., i], expected[kept == MASK][..., i])
            assert found < 1e-5, (i, "tokens" if kept else "padding")


@pytest.mark.parametrize("kind", ["numpy", "cuda", "tpu"])
@pytest.mark.parametrize("family", BUILDERS)
def test_bfloat16_is_at_most_twice_as_far_as_transformers_own(family, kind):
    (model, exact), (_, own) = built(family), built(family, torch.bfloat16)
    states = states_of(kind, model, "bfloat16")
    for i in (3, states.shape[-1] - 1):
        ours, theirs, right = (a[MASK == 1][..., i] for a in (states, own, exact))
        ours, theirs = relative_l2(ours, right), relative_l2(theirs, right)
        assert ours < 2 * theirs, f"state {i}: {ours} against {theirs}"


def test_the_graph_reads_exactly_the_text_branch():
    model, _ = built("3")
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
def test_bad_prompts_are_refused(ids, mask, message):
    with refused(message):
        gemma.feeds(config_of(built("3")[0]), np.array(ids), np.array(mask))
