"""Prompts to context in one graph: Gemma's states, then the connectors. A batch holds every prompt
of a request."""

from __future__ import annotations

import numpy as np

from ltx2rt.config import Gemma4Config, GemmaConfig, TextConfig
from ltx2rt.graph import Ops, Term, traced
from ltx2rt.models import connectors, gemma, gemma4

LanguageModel = GemmaConfig | Gemma4Config


@traced("text_encoder")
def trace(
    o: Ops, language: LanguageModel, text: TextConfig, batch: int, tokens: int
) -> dict[str, Term]:
    """Outputs hidden_states (B, text, D, states), video_context and audio_context (B, text, D)."""
    if isinstance(language, Gemma4Config):
        states = gemma4.gemma4(o, language, batch, tokens)
    else:
        states = gemma.gemma(o, language, batch, tokens)
    return {"hidden_states": states, **connectors.connectors(o, text, states)}


def feeds(
    language: LanguageModel, text: TextConfig, token_ids: np.ndarray, mask: np.ndarray
) -> dict[str, np.ndarray]:
    """The graph's inputs for token_ids and mask (B, text), 1: token, 0: padding, either side."""
    if isinstance(language, Gemma4Config):
        own = gemma4.feeds(language, token_ids, mask)
    else:
        own = gemma.feeds(language, token_ids, mask)
    return own | connectors.feeds(text, mask)
