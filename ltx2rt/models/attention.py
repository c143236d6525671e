"""The attention module shared by the transformer and the connectors, in graph form.

q and k are normalised over all heads together (one RMSNorm over heads x head_dim), then rotated;
optional per-head gate 2*sigmoid of the query-side input; optional per-sample pass-through of the
values (spatio-temporal guidance).
"""

from __future__ import annotations

from ltx2rt.graph import Ops, Term

Rope = tuple[Term, Term]  # cos, sin: (..., tokens, heads, pairs)


def attention(
    o: Ops,
    x: Term,
    context: Term,
    heads: int,
    head_dim: int,
    *,
    eps: float,
    gated: bool,
    rope: Rope | None = None,
    context_rope: Rope | None = None,
    bias: Term | None = None,
    keep: Term | None = None,
) -> Term:
    """x (B, tokens, D) attends to context (B, tokens or text, D'); returns x's type.

    bias: additive (B, tokens, keys). keep (B): where 0 the attention's result is replaced by the
    values (self-attention only).
    """
    inner = {"heads": heads, "head_dim": head_dim}
    q = o.rms_norm(o.linear(x, "to_q", inner), "q_norm", over=("heads", "head_dim"), eps=eps)
    k = o.rms_norm(o.linear(context, "to_k", inner), "k_norm", over=("heads", "head_dim"), eps=eps)
    v = o.linear(context, "to_v", inner)
    if rope is not None:
        q = o.rope(q, *rope)
        k = o.rope(k, *(context_rope or rope))
    seen = v
    # A bias's last axis names the keys, which in self-attention are not the queries.
    if bias is not None and bias.type.axes[-1] != k.type.axes[1]:
        k, seen = (o.rename(a, names={a.type.axes[1]: bias.type.axes[-1]}) for a in (k, v))
    y = o.attention(q, k, seen, bias, scale=head_dim**-0.5)
    if keep is not None:
        y = o.select(keep, y, v)
    if gated:
        y *= 2 * o.sigmoid(o.linear(x, "to_gate_logits", {"heads": heads}))
    axis = x.type.axes[-1]
    return o.linear(y, "to_out.0", {axis: x.type.size(axis)}, contract=("heads", "head_dim"))


def feed_forward(o: Ops, x: Term, bias: bool = True, multiple: int = 4) -> Term:
    """Linear, tanh-GELU, Linear: D -> 4 D -> D."""
    axis = x.type.axes[-1]
    width = x.type.size(axis)
    h = o.gelu(o.linear(x, "net.0.proj", {"ff": multiple * width}, bias=bias))
    return o.linear(h, "net.2", {axis: width}, bias=bias)
