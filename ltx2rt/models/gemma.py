"""Gemma 3 as a prompt encoder: token ids to the states of every layer.

Decides the text branch's mathematics and, on the host, its masks and RoPE tables. Leaves
tokenisation to the pipeline and the use of the states to `connectors`. No vision tower, no
logits, no cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from ltx2rt.config import Gemma4Config, GemmaConfig
from ltx2rt.errors import InputError
from ltx2rt.graph import Ops, Term, traced

PREFIX = "language_model.model"
# added to a score: exp gives 0, and it stays finite in bfloat16, unlike float32's own minimum
MASKED = -1e30


@traced("gemma")
def trace(o: Ops, config: GemmaConfig, batch: int, tokens: int) -> dict[str, Term]:
    """The graph of `gemma`; its only output is hidden_states."""
    return {"hidden_states": gemma(o, config, batch, tokens)}


def gemma(o: Ops, config: GemmaConfig, batch: int, tokens: int) -> Term:
    """All states (B, text, D, states), states = layers + 1.

    State 0 is the scaled embedding, state i the output of layer i, the last one passed through the
    final norm; the last layer's output before that norm is not among them.
    """
    token_ids = o.input("token_ids", "int32", B=batch, text=tokens)
    is_sliding = o.input("is_sliding", "int32", layers=config.num_layers)
    kinds = layer_inputs(o, token_ids, config.head_dim, config.head_dim)
    o = o.under(PREFIX)

    def layer(o: Ops, carry: dict, invariant: dict, data: dict) -> tuple[dict, dict]:
        x, sliding = carry["x"], data["is_sliding"]
        here = {
            name: o.select(sliding, invariant[f"sliding_{name}"], invariant[f"full_{name}"])
            for name in ("bias", "sees", "cos", "sin")
        }
        h = norm(o, x, "input_layernorm", "D", config)
        y = attention(o.under("self_attn"), h, here, config)
        h = x + norm(o, y, "post_attention_layernorm", "D", config)
        y = mlp(o.under("mlp"), norm(o, h, "pre_feedforward_layernorm", "D", config), config)
        return {"x": h + norm(o, y, "post_feedforward_layernorm", "D", config)}, {"entering": x}

    start, data = {"x": embedded(o, config, token_ids)}, {"is_sliding": is_sliding}
    carry, stacked = o.repeat(layer, config.num_layers, start, kinds, data, "layers.*.")
    return all_states(o, stacked["entering"], norm(o, carry["x"], "norm", "D", config))


def layer_inputs(o: Ops, token_ids: Term, full: int, sliding: int) -> dict[str, Term]:
    """The values that layers of either kind read: bias, RoPE tables of a head of so many numbers, and `sees`
    (B, text): 0 for a row of padding that sees no token."""
    (batch, tokens), found = token_ids.type.shape, {}
    for kind, head_dim in (("full", full), ("sliding", sliding)):
        sizes = {"B": batch, "text": tokens, "context": tokens}
        bias = found[f"{kind}_bias"] = o.input(f"{kind}_bias", "float32", **sizes)
        found[f"{kind}_sees"] = o.cast(o.exp(o.max(bias, over=("context",))), dtype=o.dtype)
        for name in (f"{kind}_cos", f"{kind}_sin"):
            found[name] = o.input(name, "float32", text=tokens, pairs=head_dim // 2)
    return found


def embedded(o: Ops, config: GemmaConfig | Gemma4Config, token_ids: Term) -> Term:
    """The scaled embedding (B, text, D)."""
    weight = o.param("embed_tokens.weight", vocab=config.vocab_size, D=config.hidden_size)
    return o.take(weight, token_ids, axis="vocab") * embedding_scale(config, o.dtype)


def all_states(o: Ops, entering: Term, last: Term) -> Term:
    """(B, text, D, states) of what enters each layer (layers, B, text, D), and the last state."""
    last = o.expand(last, axis="layers", size=1, before="B")
    states = o.concat(entering, last, axis="layers")
    states = o.transpose(states, axes=("B", "text", "D", "layers"))
    return o.rename(states, names={"layers": "states"})


def norm(o: Ops, x: Term, name: str, axis: str, config: GemmaConfig) -> Term:
    """RMSNorm times (1 + weight), float32 in any graph: bfloat16 would lose the sum."""
    weight = o.param(f"{name}.weight", dtype="float32", **{axis: x.type.size(axis)})
    return o.emit("rms_norm", x, 1 + weight, over=(axis,), eps=config.norm_eps)


def attention(o: Ops, x: Term, here: dict[str, Term], config: GemmaConfig) -> Term:
    """Grouped-query attention; a row that sees no token (padding) gets zero, as in torch's SDPA."""
    kv = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    q = o.linear(x, "q_proj", {"heads": config.num_heads, "head_dim": config.head_dim}, bias=False)
    k, v = o.linear(x, "k_proj", kv, bias=False), o.linear(x, "v_proj", kv, bias=False)
    q = o.rope(norm(o, q, "q_norm", "head_dim", config), here["cos"], here["sin"])
    k = o.rope(norm(o, k, "k_norm", "head_dim", config), here["cos"], here["sin"])
    return attended(o, (q, k, v), here, config.hidden_size, config.query_scale)


def attended(o: Ops, qkv: Sequence[Term], here: dict[str, Term], width: int, scale: float) -> Term:
    """The attention (B, text, D) to the tokens that a row sees."""
    q, *kv = qkv
    k, v = (o.rename(a, names={"text": "context"}) for a in kv)
    y = o.attention(q, k, v, here["bias"], scale=scale) * here["sees"]
    heads = ("heads", "head_dim")
    return o.linear(y, "o_proj", {"D": width}, contract=heads, bias=False)


def mlp(o: Ops, x: Term, config: GemmaConfig | Gemma4Config) -> Term:
    ff = {"ff": config.intermediate_size}
    gate, up = o.linear(x, "gate_proj", ff, bias=False), o.linear(x, "up_proj", ff, bias=False)
    return o.linear(o.gelu(gate) * up, "down_proj", {"D": config.hidden_size}, bias=False)


def embedding_scale(config: GemmaConfig | Gemma4Config, dtype: str) -> float:
    """sqrt(D) rounded to the graph's dtype: 62.0 for D = 3840 in bfloat16."""
    return float(np.dtype(getattr(ml_dtypes, dtype, dtype)).type(math.sqrt(config.hidden_size)))


def feeds(config: GemmaConfig, token_ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """The graph's inputs for token_ids (B, text) and mask (B, text), 1 for a token and 0 for
    padding on either side. Positions count padding: the i-th column is position i. Raises
    InputError as `token_feeds` does."""
    size = np.shape(token_ids)[-1], config.head_dim
    return {
        **token_feeds(config, token_ids, mask),
        "is_sliding": np.array(config.layer_is_sliding, np.int32),
        **rope_tables("full", *size, config.rope_theta, config.rope_scaling_factor),
        **rope_tables("sliding", *size, config.rope_local_theta, 1.0),
    }


def token_feeds(
    config: GemmaConfig | Gemma4Config, token_ids: np.ndarray, mask: np.ndarray
) -> dict[str, np.ndarray]:
    """token_ids int32 and the attention bias of both kinds of layers, float32 (B, text, context).

    Raises InputError for ids outside the vocabulary, a mask that is not of zeros and ones, and a
    prompt without a token.
    """
    token_ids, mask = np.asarray(token_ids), np.asarray(mask)
    if token_ids.ndim != 2 or mask.shape != token_ids.shape:
        raise InputError(
            f"token_ids {token_ids.shape} and mask {mask.shape}: expected the same [B,S] for both"
        )
    if token_ids.min() < 0 or token_ids.max() >= config.vocab_size:
        raise InputError(
            f"token_ids reach from {token_ids.min()} to {token_ids.max()}, the text encoder has "
            f"{config.vocab_size} tokens; use the tokenizer in its own folder"
        )
    check_mask(mask)
    columns = np.arange(token_ids.shape[1])
    back = columns[:, None] - columns  # how far column j lies behind row i
    seen = (back >= 0) & (mask[:, None, :] != 0)
    return {
        "token_ids": token_ids.astype(np.int32),
        "full_bias": additive(seen),
        "sliding_bias": additive(seen & (back < config.sliding_window)),
    }


def check_mask(mask: np.ndarray) -> None:
    """Raise InputError unless mask (B, text) is of zeros and ones, with a one in every row."""
    if not np.isin(mask, (0, 1)).all():
        raise InputError(
            f"mask holds values from {mask.min()} to {mask.max()}, expected 1 (token) and 0 "
            "(padding)"
        )
    if not mask.any(axis=1).all():
        raise InputError(
            f"mask row {int(np.argmin(mask.any(axis=1)))} has no token; an empty prompt is one "
            "BOS token"
        )


def additive(seen: np.ndarray) -> np.ndarray:
    """float32 attention bias: 0 where seen, MASKED elsewhere."""
    return np.where(seen, np.float32(0), np.float32(MASKED))


def rope_tables(
    kind: str, tokens: int, head_dim: int, theta: float, scaling: float
) -> dict[str, np.ndarray]:
    """cos and sin (text, pairs) of position * theta^(-2i/head_dim) / scaling, in float32."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1) / np.float32(theta) ** exponents / np.float32(scaling)
    angles = np.arange(tokens, dtype=np.float32)[:, None] * frequencies
    return {f"{kind}_cos": np.cos(angles), f"{kind}_sin": np.sin(angles)}
