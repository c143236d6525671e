"""Prompts to context in one graph: Gemma's states, then the connectors. A batch holds every prompt
of a request."""

from __future__ import annotations

import numpy as np

from ltx2rt.config import Gemma4Config, GemmaConfig, TextConfig
from ltx2rt.graph import Graph, Ops, Term
from ltx2rt.graph import trace as trace_graph
from ltx2rt.models import connectors, gemma, gemma4

LanguageModel = GemmaConfig | Gemma4Config


def trace(
    gemma_config: LanguageModel, text_config: TextConfig, batch: int, tokens: int, dtype: str
) -> Graph:
    """Outputs hidden_states (B, text, D, states), video_context and audio_context (B, text, D)."""

    def model(o: Ops) -> dict[str, Term]:
        states = states_of(o, gemma_config, batch, tokens)
        return {"hidden_states": states, **connectors.connectors(o, text_config, states)}

    return trace_graph("text_encoder", model, dtype)


def trace_states(config: LanguageModel, batch: int, tokens: int, dtype: str) -> Graph:
    """The graph of either Gemma."""
    return (
        gemma4.trace(config, batch, tokens, dtype)
        if isinstance(config, Gemma4Config)
        else (gemma.trace(config, batch, tokens, dtype))
    )


def states_of(o: Ops, config: LanguageModel, batch: int, tokens: int) -> Term:
    """hidden_states (B, text, D, states) of either Gemma."""
    if isinstance(config, Gemma4Config):
        return gemma4.gemma4(o, config, batch, tokens)
    return gemma.gemma(o, config, batch, tokens)


def feeds(
    gemma_config: LanguageModel, text_config: TextConfig, token_ids: np.ndarray, mask: np.ndarray
) -> dict[str, np.ndarray]:
    """The graph's inputs for token_ids and mask (B, text), 1: token, 0: padding, either side."""
    if isinstance(gemma_config, Gemma4Config):
        own = gemma4.feeds(gemma_config, token_ids, mask)
    else:
        own = gemma.feeds(gemma_config, token_ids, mask)
    return own | connectors.feeds(text_config, mask)
