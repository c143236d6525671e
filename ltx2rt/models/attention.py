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
    nag: Term | None = None,
) -> Term:
    """x (B, tokens, D) attends to context (B, tokens or text, D'); returns x's type.

    bias: additive (B, tokens, keys). keep (B): where 0 the attention's result is replaced by the
    values (self-attention only). nag: (terms) of `away`, from the second half of the context, which
    is another text; the bias belongs to the first half.
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
    if nag is None:
        y = o.attention(q, k, seen, bias, scale=head_dim**-0.5)
    else:
        axis, size = k.type.axes[1], k.type.shape[1] // 2
        (k, other), (seen, theirs) = (
            (o.slice(t, axis=axis, stop=size), o.slice(t, axis=axis, start=size, stop=2 * size))
            for t in (k, seen)
        )
        y = o.attention(q, k, seen, bias, scale=head_dim**-0.5)
        y = away(o, y, o.attention(q, other, theirs, scale=head_dim**-0.5), nag)
    if keep is not None:
        y = o.select(keep, y, v)
    if gated:
        y *= 2 * o.sigmoid(o.linear(x, "to_gate_logits", {"heads": heads}))
    axis = x.type.axes[-1]
    return o.linear(y, "to_out.0", {axis: x.type.size(axis)}, contract=("heads", "head_dim"))


def away(o: Ops, y: Term, other: Term, nag: Term) -> Term:
    """Attention to a text, moved away from that to a negative one (normalised attention guidance,
    arXiv 2505.21179); y, other (B, tokens, heads, head_dim), in float32.

        z  = y + (scale - 1) (y - other), scaled down where its L1 norm over heads and head_dim is
             over tau times that of y
        y' = y + alpha (z - y)

    nag (terms): scale, tau, alpha. A scale of 1 gives y itself.
    """
    scale, tau, alpha = o.each(nag, "terms")

    def norm(x: Term) -> Term:
        return o.sum(o.leaky_relu(x, slope=-1.0), over=("heads", "head_dim"))

    a, b = (o.cast(x, dtype="float32") for x in (y, other))
    far = a + (a - b) * (scale - 1)
    limit, found = norm(a) * tau, norm(far)
    over = o.clamp(limit - found, high=0.0)
    far *= o.select(over, limit / (found + 1e-7), o.full(1.0, "float32"))
    return o.cast(a + (far - a) * alpha, dtype=o.dtype)


def feed_forward(o: Ops, x: Term, bias: bool) -> Term:
    """Linear, tanh-GELU, Linear: D -> 4 D -> D."""
    axis = x.type.axes[-1]
    width = x.type.size(axis)
    h = o.gelu(o.linear(x, "net.0.proj", {"ff": 4 * width}, bias=bias))
    return o.linear(h, "net.2", {axis: width}, bias=bias)
