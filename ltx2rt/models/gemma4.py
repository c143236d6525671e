"""Gemma 4 as a prompt encoder: token ids to the states of every layer.

Decides the differences from Gemma 3 (masks, feed-forward and embedding scale are the same): norms
times their weight itself, unlike heads in sliding and full-attention layers, values that are
normalised too, scores that are not scaled, and a factor on the whole residual stream at the end of
every layer. The reference is transformers' Gemma4UnifiedTextModel.
"""

from __future__ import annotations

import numpy as np

from ltx2rt.config import Gemma4Config
from ltx2rt.graph import Graph, Ops, Term
from ltx2rt.graph import trace as trace_graph
from ltx2rt.models.gemma import PREFIX, embedding_scale, mlp, rope_tables, token_feeds


def trace(config: Gemma4Config, batch: int, tokens: int, dtype: str) -> Graph:
    """The graph of `gemma4`; its only output is hidden_states."""
    return trace_graph(
        "gemma4", lambda o: {"hidden_states": gemma4(o, config, batch, tokens)}, dtype
    )


def gemma4(o: Ops, config: Gemma4Config, batch: int, tokens: int) -> Term:
    """All states (B, text, D, states), states = layers + 1, as `gemma.gemma` has them.

    The layers repeat in groups (five sliding ones and one full), so that the weights of a place in
    the group stack.
    """
    token_ids = o.input("token_ids", "int32", B=batch, text=tokens)
    kinds = {}
    for kind, head_dim in (("full", config.full_head_dim), ("sliding", config.head_dim)):
        bias = kinds[f"{kind}_bias"] = o.input(
            f"{kind}_bias", "float32", B=batch, text=tokens, context=tokens
        )
        kinds[f"{kind}_sees"] = o.cast(o.exp(o.max(bias, over=("context",))), dtype=o.dtype)
        for table in ("cos", "sin"):
            kinds[f"{kind}_{table}"] = o.input(
                f"{kind}_{table}", "float32", text=tokens, pairs=head_dim // 2
            )

    o = o.under(PREFIX)
    embedding = o.param("embed_tokens.weight", vocab=config.vocab_size, D=config.hidden_size)
    x = o.take(embedding, token_ids, axis="vocab") * embedding_scale(config, o.dtype)
    period = config.period

    def group(o: Ops, carry: dict, invariant: dict, data: dict) -> tuple[dict, dict]:
        x, entering = carry["x"], []
        for place, sliding in enumerate(config.layer_is_sliding[:period]):
            entering.append(x)
            x = layer(o.under(f"layers.{period}*+{place}"), x, sliding, invariant, config)
        return {"x": x}, {"entering": o.stack(*entering, axis="places", dim=0)}

    carry, stacked = o.repeat(group, config.num_layers // period, {"x": x}, kinds)
    states = o.merge(stacked["entering"], axes=("layers", "places"), into="layers")
    last = o.expand(
        o.rms_norm(carry["x"], "norm", over=("D",), eps=config.norm_eps),
        axis="layers",
        size=1,
        before="B",
    )
    states = o.concat(states, last, axis="layers")
    return o.rename(
        o.transpose(states, axes=("B", "text", "D", "layers")), names={"layers": "states"}
    )


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
    kind, over, eps = "sliding" if sliding else "full", ("head_dim",), config.norm_eps
    head_dim = config.head_dim if sliding else config.full_head_dim
    kv = {
        "kv_heads": config.num_kv_heads if sliding else config.full_num_kv_heads,
        "head_dim": head_dim,
    }
    rope = kinds[f"{kind}_cos"], kinds[f"{kind}_sin"]
    q = o.linear(x, "q_proj", {"heads": config.num_heads, "head_dim": head_dim}, bias=False)
    k = o.linear(x, "k_proj", kv, bias=False)
    v = o.linear(x, "v_proj", kv, bias=False) if sliding else k
    q = o.rope(o.rms_norm(q, "q_norm", over=over, eps=eps), *rope)
    k = o.rope(o.rms_norm(k, "k_norm", over=over, eps=eps), *rope)
    k, v = (o.rename(a, names={"text": "context"}) for a in (k, o.rms_norm(v, over=over, eps=eps)))
    y = o.attention(q, k, v, kinds[f"{kind}_bias"], scale=1.0) * kinds[f"{kind}_sees"]
    return o.linear(
        y, "o_proj", {"D": config.hidden_size}, contract=("heads", "head_dim"), bias=False
    )


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
