"""The text context of each modality from Gemma's states: feature extraction, registers, 1-D
transformer blocks.

Decides both feature extractors (2.0: one shared projection of range-normalised states; 2.3: one
projection per modality of RMS-normalised states) and the embeddings connectors. Leaves the states
to `gemma`, and the 2.0 caption projection to `transformer`. Padding never reaches an output:
registers take its place, so it need not be zeroed.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from ltx2rt.config import ConnectorConfig, TextConfig
from ltx2rt.errors import InputError
from ltx2rt.graph import Ops, Term, traced
from ltx2rt.models.attention import attention, feed_forward
from ltx2rt.models.gemma import check_mask
from ltx2rt.models.positions import axis_angles, frequency_grid

RANGE = 8.0  # 2.0: features span this after normalisation
EPS = 1e-6  # epsilon of both feature normalisations
BEYOND = 1e30  # further from zero than any state


@traced("connectors")
def trace(o: Ops, config: TextConfig, batch: int, tokens: int) -> dict[str, Term]:
    """The graph of `connectors`; its input is hidden_states (B, text, D, states)."""
    sizes = {"text": tokens, "D": config.gemma_hidden, "states": config.num_states}
    return connectors(o, config, o.input("hidden_states", B=batch, **sizes))


@traced("text-connectors")
def trace_contexts(o: Ops, config: TextConfig, batch: int, tokens: int) -> dict[str, Term]:
    """The graph of the connectors without the feature extractor; its inputs are the features,
    video_features and audio_features (B, text, D)."""
    widths = {"video_features": config.video.width, "audio_features": config.audio.width}
    features = (o.input(name, B=batch, text=tokens, D=n) for name, n in widths.items())
    return contexts(o, config, *features)


def connectors(o: Ops, config: TextConfig, states: Term) -> dict[str, Term]:
    """`contexts` of Gemma's states (B, text, D, states)."""
    features = per_token_features if config.per_token_norm else shared_features
    return contexts(o, config, *features(o, config, states))


def contexts(o: Ops, config: TextConfig, video: Term, audio: Term) -> dict[str, Term]:
    """video_context and audio_context (B, text, D) of features of the same shapes."""
    batch, tokens = video.type.shape[:2]
    order = o.input("order", "int32", B=batch, text=tokens)
    is_token = o.input("is_token", "int32", B=batch, text=tokens)
    return {
        f"{name}_context": connector(o, name, x, order, is_token, own, config)
        for name, x, own in (("video", video, config.video), ("audio", audio, config.audio))
    }


def per_token_features(o: Ops, config: TextConfig, states: Term) -> tuple[Term, Term]:
    """2.3: each token's and layer's state by its RMS, rescaled to the width, projected."""
    unit = o.rms_norm(states, over=("D",), eps=EPS)

    def project(name: str, width: int) -> Term:
        scaled = unit * math.sqrt(width / config.gemma_hidden)
        name = f"text_embedding_projection.{name}_aggregate_embed"
        return o.linear(
            scaled, name, {"D": width}, contract=("D", "states"), bias=config.projection_bias
        )

    return project("video", config.video.width), project("audio", config.audio.width)


def shared_features(o: Ops, config: TextConfig, states: Term) -> tuple[Term, Term]:
    """2.0: 8 (x - mean) / (max - min) over tokens and channels of a layer, in float32."""
    batch, tokens = states.type.shape[:2]
    valid = o.cast(o.input("mask", "int32", B=batch, text=tokens), dtype="float32")
    outside = o.affine(valid, scale=BEYOND, offset=-BEYOND)  # 0 on tokens, -BEYOND on padding
    x, over = o.cast(states, dtype="float32"), ("text", "D")
    count = o.affine(o.sum(valid, over=("text",)), scale=config.gemma_hidden, offset=EPS)
    mean = o.sum(x * valid, over=over) / count
    span = o.max(x + outside, over=over) - o.min(x - outside, over=over)
    x = (x - mean) / (span + EPS) * RANGE
    shared = o.linear(
        o.cast(x, dtype=o.dtype),
        "text_embedding_projection.aggregate_embed",
        {"D": config.gemma_hidden},
        contract=("D", "states"),
        bias=config.projection_bias,
    )
    return shared, shared


def connector(
    o: Ops,
    modality: str,
    x: Term,
    order: Term,
    is_token: Term,
    config: ConnectorConfig,
    text: TextConfig,
) -> Term:
    """x (B, text, D) in the tokenizer's order -> context (B, text, D): tokens, then registers."""
    tokens, width = x.type.shape[1:]
    if tokens % config.num_registers:
        raise InputError(
            f"the text is {tokens} tokens long, expected a multiple of the {config.num_registers} "
            "registers"
        )
    if width != config.width:
        raise InputError(f"the {modality} connector is {config.width} wide, its features {width}")
    sizes = {"text": tokens, "heads": config.num_heads, "pairs": config.head_dim // 2}
    rope = {table: o.input(f"{modality}_{table}", "float32", **sizes) for table in ("cos", "sin")}

    o = o.under(f"model.diffusion_model.{modality}_embeddings_connector")
    registers = o.param("learnable_registers", registers=config.num_registers, D=width)
    copies = o.expand(
        registers, axis="copies", size=tokens // config.num_registers, before="registers"
    )
    found = o.take(x, order, axis="text")
    x = o.select(is_token, found, o.merge(copies, axes=("copies", "registers"), into="text"))

    def block(o: Ops, carry: dict, invariant: dict, data: dict) -> tuple[dict, dict]:
        x, eps = carry["x"], text.norm_eps
        h = o.rms_norm(x, over=("D",), eps=eps)
        rope = invariant["cos"], invariant["sin"]
        how: dict[str, Any] = {"eps": eps, "gated": config.gated_attention, "rope": rope}
        x += attention(o.under("attn1"), h, h, config.num_heads, config.head_dim, **how)
        h = o.rms_norm(x, over=("D",), eps=eps)
        return {"x": x + feed_forward(o.under("ff"), h, config.ff_bias)}, {}

    carry, _ = o.repeat(block, config.num_layers, {"x": x}, rope, prefix="transformer_1d_blocks.*.")
    return o.rms_norm(carry["x"], over=("D",), eps=text.norm_eps)


def feeds(config: TextConfig, mask: np.ndarray) -> dict[str, np.ndarray]:
    """Inputs, hidden_states apart, for mask (B, text): 1 token, 0 padding on either side. order:
    the tokens' columns, then padding's; is_token: whether a place is a token."""
    mask = np.asarray(mask)
    check_mask(mask)
    tokens = mask.shape[1]
    inputs = {
        "order": np.argsort(mask == 0, axis=1, kind="stable").astype(np.int32),
        "is_token": (np.arange(tokens) < mask.sum(axis=1, keepdims=True)).astype(np.int32),
    }
    if not config.per_token_norm:
        inputs["mask"] = mask.astype(np.int32)
    for modality, connector in (("video", config.video), ("audio", config.audio)):
        cos, sin = _angles(config, connector, tokens)
        inputs |= {f"{modality}_cos": cos, f"{modality}_sin": sin}
    return inputs


@lru_cache(4)
def _angles(config: TextConfig, connector: ConnectorConfig, tokens: int) -> list[np.ndarray]:
    """cos and sin of every position, (text, heads, pairs): the same for all prompts, 30 ms to make."""
    grid = frequency_grid(connector.width, 1, config.rope_theta, config.rope_float64_grid)
    return [
        table.reshape(tokens, connector.num_heads, -1)
        for table in axis_angles(np.arange(tokens), config.rope_max_pos, grid)
    ]
