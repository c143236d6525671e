"""Prompts to context in one graph: Gemma's states, then the connectors. A batch holds every prompt of a request."""

from __future__ import annotations

import numpy as np

from ltx2rt.config import GemmaConfig, TextConfig
from ltx2rt.graph import Graph, Ops, Term
from ltx2rt.graph import trace as trace_graph
from ltx2rt.models import connectors, gemma


def trace(gemma_config: GemmaConfig, text_config: TextConfig, batch: int, tokens: int, dtype: str) -> Graph:
    """Outputs hidden_states (B, text, D, states), video_context and audio_context (B, text, D)."""

    def model(o: Ops) -> dict[str, Term]:
        states = gemma.gemma(o, gemma_config, batch, tokens)
        return {"hidden_states": states, **connectors.connectors(o, text_config, states)}

    return trace_graph("text_encoder", model, dtype)


def feeds(
    gemma_config: GemmaConfig, text_config: TextConfig, token_ids: np.ndarray, mask: np.ndarray
) -> dict[str, np.ndarray]:
    """The graph's inputs for token_ids and mask (B, text), mask 1 for a token and 0 for padding on either side."""
    return gemma.feeds(gemma_config, token_ids, mask) | connectors.feeds(text_config, mask)
