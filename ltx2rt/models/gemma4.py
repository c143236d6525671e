"""Gemma 4 as a prompt encoder: token ids to the states of every layer.

Decides the differences from Gemma 3 (masks, feed-forward and embedding scale are the same): norms
times their weight itself, unlike heads in sliding and full-attention layers, values that are
normalised too, scores that are not scaled, and a factor on the whole residual stream at the end of
every layer. The reference is transformers' Gemma4UnifiedTextModel.
"""

from __future__ import annotations

import numpy as np

from ltx2rt.config import Gemma4Config
from ltx2rt.graph import Ops, Term, traced
from ltx2rt.models.gemma import (
    PREFIX,
    all_states,
    attended,
    embedded,
    layer_inputs,
    mlp,
    rope_tables,
    token_feeds,
)


@traced("gemma4")
def trace(o: Ops, config: Gemma4Config, batch: int, tokens: int) -> dict[str, Term]:
    """The graph of `gemma4`; its only output is hidden_states."""
    return {"hidden_states": gemma4(o, config, batch, tokens)}


def gemma4(o: Ops, config: Gemma4Config, batch: int, tokens: int) -> Term:
    """All states (B, text, D, states), states = layers + 1, as `gemma.gemma` has them.

    The layers repeat in groups (five sliding ones and one full), so that the weights of a place in
    the group stack.
    """
    token_ids = o.input("token_ids", "int32", B=batch, text=tokens)
    kinds = layer_inputs(o, token_ids, config.full_head_dim, config.head_dim)
    o = o.under(PREFIX)
    period = config.period

    def group(o: Ops, carry: dict, invariant: dict, data: dict) -> tuple[dict, dict]:
        x, entering = carry["x"], []
        for place, sliding in enumerate(config.layer_is_sliding[:period]):
            entering.append(x)
            x = layer(o.under(f"layers.{period}*+{place}"), x, sliding, invariant, config)
        return {"x": x}, {"entering": o.stack(*entering, axis="places", dim=0)}

    start = {"x": embedded(o, config, token_ids)}
    carry, stacked = o.repeat(group, config.num_layers // period, start, kinds)
    entering = o.merge(stacked["entering"], axes=("layers", "places"), into="layers")
    last = o.rms_norm(carry["x"], "norm", over=("D",), eps=config.norm_eps)
    return all_states(o, entering, last)


def layer(o: Ops, x: Term, sliding: bool, kinds: dict[str, Term], config: Gemma4Config) -> Term:
    """((x + norm(attention(norm(x)))) + norm(mlp(norm(.)))) times the layer's scalar."""

    def norm(x: Term, name: str) -> Term:
        return o.rms_norm(x, name, over=("D",), eps=config.norm_eps)

    y = attention(o.under("self_attn"), norm(x, "input_layernorm"), sliding, kinds, config)
    x += norm(y, "post_attention_layernorm")
    y = mlp(o.under("mlp"), norm(x, "pre_feedforward_layernorm"), config)
    x += norm(y, "post_feedforward_layernorm")
    return x * o.at(o.param("layer_scalar", scalar=1), axis="scalar", index=0)


def attention(o: Ops, x: Term, sliding: bool, kinds: dict[str, Term], config: Gemma4Config) -> Term:
    """Grouped-query attention without a scale; a row that sees no token (padding) gets zero. Full
    layers: values are the keys as projected, before norm and rotation."""
    kind, norm = "sliding" if sliding else "full", {"over": ("head_dim",), "eps": config.norm_eps}
    here = {name: kinds[f"{kind}_{name}"] for name in ("bias", "sees", "cos", "sin")}
    head_dim = config.head_dim if sliding else config.full_head_dim
    kv_heads = config.num_kv_heads if sliding else config.full_num_kv_heads
    kv = {"kv_heads": kv_heads, "head_dim": head_dim}
    q = o.linear(x, "q_proj", {"heads": config.num_heads, "head_dim": head_dim}, bias=False)
    k = o.linear(x, "k_proj", kv, bias=False)
    v = o.linear(x, "v_proj", kv, bias=False) if sliding else k
    q = o.rope(o.rms_norm(q, "q_norm", **norm), here["cos"], here["sin"])
    k = o.rope(o.rms_norm(k, "k_norm", **norm), here["cos"], here["sin"])
    return attended(o, (q, k, o.rms_norm(v, **norm)), here, config.hidden_size, 1.0)


def feeds(config: Gemma4Config, token_ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """The graph's inputs as `gemma.feeds` has them; tokens that stand for an image or sound, of
    which there is none, become padding's, and are still attended to. Raises InputError as
    `token_feeds` does. Of a full layer's pairs only the first are rotated, by angles of the whole
    head's exponents."""
    tokens = np.shape(token_ids)[-1]
    token_ids = np.where(np.isin(token_ids, config.placeholder_ids), config.pad_token_id, token_ids)
    full = rope_tables("full", tokens, config.full_head_dim, config.rope_theta, 1.0)
    rotated = int(config.rope_fraction * config.full_head_dim // 2)
    full["full_cos"][:, rotated:], full["full_sin"][:, rotated:] = 1, 0
    sliding = rope_tables("sliding", tokens, config.head_dim, config.rope_local_theta, 1.0)
    return {**token_feeds(config, token_ids, mask), **full, **sliding}
