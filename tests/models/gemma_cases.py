"""Prompts for either Gemma, and comparisons with transformers' states."""

import numpy as np
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    SiglipVisionConfig,
)

from ltx2rt.config import Gemma4Config, GemmaConfig
from ltx2rt.models import gemma, gemma4
from ltx2rt.weights import configs
from ltx2rt.weights.names import gemma_to_canonical
from tests.parity import run_graph

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


def config_of(model: torch.nn.Module) -> GemmaConfig | Gemma4Config:
    return configs.gemma(configs.Keys(model.config.to_dict(), "config.json"))


def params_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Of the language model."""
    text = model.model.language_model if hasattr(model, "model") else model
    named = text.state_dict().items()
    return {gemma_to_canonical(f"model.{n}"): tensor.float().numpy() for n, tensor in named}


def states_of(kind: str, model: torch.nn.Module, dtype="float32", layers="scan") -> np.ndarray:
    config = config_of(model)
    own = gemma4 if isinstance(config, Gemma4Config) else gemma
    graph, feeds = own.trace(config, BATCH, TOKENS, dtype), own.feeds(config, IDS, MASK)
    return run_graph(kind, graph, params_of(model), feeds, layers)["hidden_states"]


@torch.inference_mode()
def reference(model: torch.nn.Module) -> np.ndarray:
    """All states (B, text, D, layers + 1)."""
    model = getattr(model, "model", model)
    ids, mask = torch.from_numpy(IDS), torch.from_numpy(MASK)
    out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    return torch.stack(out.hidden_states, -1).float().numpy()
