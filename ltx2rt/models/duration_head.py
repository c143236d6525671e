"""The duration head of LTX-2.5: how long the shot that a prompt describes lasts.

Decides the network, text contexts to seconds, and how seconds become a number of frames. It runs on
the contexts of the positive prompt only, and in float32: rounding of its logarithm to bfloat16
would move a clip's length by frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ltx2rt.errors import InputError
from ltx2rt.graph import Ops, Term, traced

PREFIX = "duration_head"
DEFAULT_WINDOW_S = (1.0, 20.0)


@dataclass(frozen=True)
class DurationHeadConfig:
    """Text contexts to the seconds of a clip."""

    width: int  # width of the pooling attention
    num_queries: int
    num_heads: int
    mlp_hidden: int
    video_width: int  # width of the contexts
    audio_width: int


@traced("duration_head")
def trace(o: Ops, config: DurationHeadConfig, batch: int, tokens: int) -> dict[str, Term]:
    """video_context and audio_context (B, text, D), all tokens valid -> seconds (B,).

    Learned queries attend to both contexts; an MLP makes the logarithm of seconds.
    """
    contexts = {
        "video": o.input("video_context", B=batch, text=tokens, D=config.video_width),
        "audio": o.input("audio_context", B=batch, text=tokens, audio_D=config.audio_width),
    }
    o, width = o.under(PREFIX), {"P": config.width}
    parts = (
        o.linear(c, f"{m}_input_proj", width) + o.param(f"{m}_modality_emb", **width)
        for m, c in contexts.items()
    )
    x = o.concat(*parts, axis="text")
    pooler = o.under("attention_pooler")
    queries = pooler.param("query_tokens", queries=config.num_queries, **width)
    queries = o.expand(queries, axis="B", size=batch, before="queries")
    y = attend(pooler.under("cross_attn"), queries, x, config)
    y = o.gelu(o.linear(y, "mlp_hidden", {"hidden": config.mlp_hidden}, contract=("queries", "P")))
    return {"seconds": o.exp(o.at(o.linear(y, "mlp_out", {"one": 1}), axis="one", index=0))}


def attend(o: Ops, queries: Term, x: Term, config: DurationHeadConfig) -> Term:
    """Multi-head attention, the three projections rows of one matrix. Returns the queries' type."""
    heads = {"heads": config.num_heads, "head_dim": config.width // config.num_heads}
    rows = {"rows": 3 * config.width}
    weight = o.param("in_proj_weight", **rows, P=config.width)
    bias = o.param("in_proj_bias", **rows)

    def project(x: Term) -> list[Term]:
        y = o.emit("linear", x, weight, bias, contract=("P",), out={"parts": 3, **heads})
        return o.each(y, "parts")

    (q, _, _), (_, k, v) = project(queries), project(x)
    y = o.attention(q, k, v, scale=heads["head_dim"] ** -0.5)
    return o.linear(y, "out_proj", {"P": config.width}, contract=("heads", "head_dim"))


def frames_of(
    seconds: float,
    fps: Fraction,
    window_s: tuple[float, float] = DEFAULT_WINDOW_S,
    time_factor: int = 8,
) -> int:
    """Frames of a clip of `seconds`: rounded, within the window, then down to k * time_factor + 1,
    or up to stay within it. Raises InputError if it holds no such number."""
    low, high = (round(bound * float(fps)) for bound in window_s)
    least = max(0, -(-(low - 1) // time_factor)) * time_factor + 1
    if least > high:
        raise InputError(
            f"--auto-duration: {window_s[0]:g} to {window_s[1]:g} s at {float(fps):g} fps hold no "
            f"{time_factor}k+1 frames; {least} are {least / float(fps):.2f} s"
        )
    frames = min(max(round(seconds * float(fps)), low), high)
    return max((frames - 1) // time_factor * time_factor + 1, least)
