"""Prompts for either Gemma, and comparisons with transformers' states."""

import numpy as np
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    SiglipVisionConfig,
)

from ltx2rt.testing import relative_l2

BATCH, TOKENS = 4, 13
# Left padding, none, right padding, and a prompt of one token; longer than the window, so that
# padding rows of a sliding layer may see nothing where those of a full layer see the prompt.
MASK = np.ones((BATCH, TOKENS), np.int32)
MASK[0, :4], MASK[2, 6:], MASK[3, :-1] = 0, 0, 0
IDS = np.where(MASK, np.random.default_rng(5).integers(3, 61, MASK.shape), 0)


def gemma_3(pattern: int, **sizes) -> tuple[Gemma3Config, Gemma3ForConditionalGeneration]:
    """transformers' model, every `pattern`-th of its layers a full one; its weights are not drawn."""
    text = Gemma3TextConfig(
        **sizes, sliding_window_pattern=pattern, pad_token_id=0, eos_token_id=1, bos_token_id=2,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )  # fmt: skip
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        image_size=16, patch_size=4,
    )  # fmt: skip
    image = {"mm_tokens_per_image": 4, "image_token_index": sizes["vocab_size"] - 1}
    config = Gemma3Config(text_config=text, vision_config=vision, **image)
    return config, Gemma3ForConditionalGeneration(config).eval()


@torch.inference_mode()
def reference(model: torch.nn.Module) -> np.ndarray:
    """All states (B, text, D, layers + 1)."""
    ids, mask = torch.from_numpy(IDS), torch.from_numpy(MASK)
    out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    return torch.stack(out.hidden_states, -1).float().numpy()


def check_each(states: np.ndarray, expected: np.ndarray, layers: int) -> None:
    """Contract: 1e-4. Reached: 1e-6, float32 rounding through the layers."""
    assert states.shape == (BATCH, TOKENS, 42, layers + 1)
    for i in range(layers + 1):
        for kept in (1, 0):
            found = relative_l2(states[kept == MASK][..., i], expected[kept == MASK][..., i])
            assert found < 1e-5, (i, "tokens" if kept else "padding")


def check_rounded(states, own, expected, layers) -> None:
    """States in bfloat16 err at most twice as much as transformers' `own` in bfloat16."""
    for i in layers:
        ours, theirs = (
            relative_l2(a[MASK == 1][..., i], expected[MASK == 1][..., i]) for a in (states, own)
        )
        assert ours < 2 * theirs, f"state {i}: {ours} against {theirs}"
