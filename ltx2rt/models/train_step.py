"""One training step of the transformer as a graph: clean latents and noise in, one loss for each
sample and stream out.

Flow matching as the official trainer has it: x = clean + level (noise - clean) of every token; the
target is the velocity noise - clean. A given token (a first frame, a frozen stream) has level
0 and no loss. The draws, the weights of losses and the trained parameters are inputs, or other
modules' business: changing them compiles nothing.
"""

from __future__ import annotations

from ltx2rt.config import TransformerConfig
from ltx2rt.graph import Ops, Term, traced
from ltx2rt.models.modulation import Levels
from ltx2rt.models.transformer import (
    ForwardShape,
    declare_context,
    declare_keyframes,
    declare_tables,
    present,
    transformer,
)


@traced("train-step")
def trace(o: Ops, config: TransformerConfig, s: ForwardShape) -> dict[str, Term]:
    """Every token has one of two levels, whatever the shape says: given or noised.

    Inputs of a stream m, float32 unless said: m_clean and m_noise (B, tokens, C), m_sigma (B),
    m_noised int32 (B, tokens): 1 where a token is noised and its loss counts, 0 where it is given;
    m_context (B, text, C'); the RoPE tables; video_keyframes_mask (B, tokens) if the model has its
    vector.

    Outputs: m_loss (B), the mean over noised tokens and channels of the squared error, 0 if there
    are none.
    """
    clean, noise, latents, levels, sigmas, contexts, counted = {}, {}, {}, {}, {}, {}, {}
    for stream, axes in present(config, s):
        n = stream.name
        clean[n] = o.input(f"{n}_clean", "float32", **axes, C=stream.channels)
        noise[n] = o.input(f"{n}_noise", "float32", **axes, C=stream.channels)
        sigmas[n] = o.input(f"{n}_sigma", "float32", B=s.batch)
        index = o.input(f"{n}_noised", "int32", **axes)
        contexts[n] = declare_context(o, config, stream, B=s.batch, text=s.text_tokens)
        counted[n] = o.cast(index, dtype="float32")
        latents[n] = clean[n] + (noise[n] - clean[n]) * (counted[n] * sigmas[n])
        rows = o.stack(o.full(0.0, "float32", B=s.batch), sigmas[n], axis="levels", dim=1)
        levels[n] = Levels(rows, index)
    v = transformer(
        o, config, latents=latents, levels=levels, sigmas=sigmas, contexts=contexts,
        tables=declare_tables(o, config, s), keeps={}, bias=None, rule=s.rule,
        keyframes=declare_keyframes(o, config, s.streams, B=s.batch, tokens=s.video_tokens),
    )  # fmt: skip
    losses = {}
    for stream, _ in present(config, s):
        n = stream.name
        error = (v[n] - (noise[n] - clean[n])) * counted[n]
        total = o.sum_squares(error, over=(stream.tokens, "C"))
        tokens = o.clamp(o.sum_squares(counted[n], over=(stream.tokens,)), low=1.0)
        losses[f"{n}_loss"] = total / (tokens * stream.channels)
    return losses
