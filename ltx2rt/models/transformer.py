"""The audio-video diffusion transformer of LTX-2.0 and 2.3.

Two token streams, video (tokens, D) and audio (audio_tokens, audio_D), go through the same blocks: self-attention,
attention to their text context, attention to each other, feed-forward; every part under AdaLN.

Cross-modal timestep rules ("own" = the stream's per-token timesteps, "other" = the other stream's sigma):
  C (default): scale and shift own, gate other.   B: both other.   A: both own.
They agree when every token of both streams has the same timestep.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ltx2rt.config import TransformerConfig
from ltx2rt.graph import Graph, Ops, Value
from ltx2rt.graph import trace as trace_graph
from ltx2rt.models.attention import Rope, attention, feed_forward
from ltx2rt.models.modulation import Levels, Modulation, adaln
from ltx2rt.models.positions import coordinate_table, frequency_grid, gather_tables

PREFIX = "model.diffusion_model."
TABLES = ("video_time", "video_rows", "video_columns", "video_cross", "audio_time", "audio_cross")


@dataclass(frozen=True)
class Structure:
    """What shapes a transformer graph besides its config. Hashable: the key under which programs are kept.

    coordinates: distinct coordinates per table of TABLES. batched_positions: positions differ between samples.
    perturbed: per-layer, per-sample keep masks are inputs. masked: a video self-attention mask is an input.
    """

    batch: int
    video_tokens: int
    audio_tokens: int
    text_tokens: int
    coordinates: tuple[int, ...]
    video_levels: int = 1
    audio_levels: int = 1
    batched_positions: bool = False
    perturbed: bool = False
    masked: bool = False
    rule: str = "C"


@dataclass(frozen=True)
class Stream:
    """One modality's values on their way through the blocks, and the names the checkpoint gives its parts."""

    name: str  # "video" or "audio"
    prefix: str  # "" or "audio_"
    axis: str  # "D" or "audio_D"
    width: int
    heads: int
    head_dim: int
    ff_bias: bool


def streams(config: TransformerConfig) -> tuple[Stream, Stream]:
    c = config
    return (
        Stream("video", "", "D", c.width, c.num_heads, c.head_dim, c.ff_bias),
        Stream("audio", "audio_", "audio_D", c.audio_width, c.audio_num_heads, c.audio_head_dim, c.audio_ff_bias),
    )


# --- host side: positions to tables, timesteps to levels --------------------------------------------------------


def position_feeds(config: TransformerConfig, video: np.ndarray, audio: np.ndarray) -> dict[str, np.ndarray]:
    """RoPE inputs of video positions [(B,) 3, T, 2] (s, px, px; start, end) and audio positions [(B,) 1, Ta, 2] (s)."""
    c = config
    f64 = c.rope_float64_grid
    grid = frequency_grid(c.width, 3, c.rope_theta, f64)
    audio_grid = frequency_grid(c.audio_width, 1, c.rope_theta, f64)
    cross_max = max(c.rope_max_pos[0], c.audio_rope_max_pos)
    cross_grid = frequency_grid(c.audio_num_heads * c.audio_head_dim, 1, c.rope_theta, f64)
    feeds = {}
    for i, name in enumerate(TABLES[:3]):
        feeds |= coordinate_table(name, video[..., i, :, :], c.rope_max_pos[i], grid)
    feeds |= coordinate_table("video_cross", video[..., 0, :, :], cross_max, cross_grid)
    feeds |= coordinate_table("audio_time", audio[..., 0, :, :], c.audio_rope_max_pos, audio_grid)
    feeds |= coordinate_table("audio_cross", audio[..., 0, :, :], cross_max, cross_grid)
    return feeds


def coordinate_counts(feeds: dict[str, np.ndarray]) -> tuple[int, ...]:
    return tuple(feeds[f"{name}_cos"].shape[0] for name in TABLES)


def level_feeds(name: str, timesteps: np.ndarray) -> dict[str, np.ndarray]:
    """`{name}_levels` [B, K] and, if K > 1, `{name}_level_index` [B, T] from timesteps [B, T]."""
    per_sample = [np.unique(t, return_inverse=True) for t in np.asarray(timesteps, np.float32)]
    count = max(len(values) for values, _ in per_sample)
    levels = np.stack([np.pad(values, (0, count - len(values)), mode="edge") for values, _ in per_sample])
    feeds = {f"{name}_levels": levels}
    if count > 1:
        feeds[f"{name}_level_index"] = np.stack([index for _, index in per_sample]).astype(np.int32)
    return feeds


# --- graph side -------------------------------------------------------------------------------------------------


def declare_tables(o: Ops, config: TransformerConfig, s: Structure) -> dict[str, dict[str, Value]]:
    """The RoPE inputs: per table of TABLES its cos and sin (coordinates, frequencies) and index ((B,) tokens)."""
    video, cross = config.width // 6, config.audio_width // 2
    frequencies = (video, video, video, cross, cross, cross)
    tables = {}
    for name, count, n in zip(TABLES, s.coordinates, frequencies, strict=True):
        sizes = {"B": s.batch} if s.batched_positions else {}
        sizes |= {"tokens": s.video_tokens} if name.startswith("video") else {"audio_tokens": s.audio_tokens}
        tables[name] = {
            "cos": o.input(f"{name}_cos", "float32", coordinates=count, frequencies=n),
            "sin": o.input(f"{name}_sin", "float32", coordinates=count, frequencies=n),
            "index": o.input(f"{name}_index", "int32", **sizes),
        }
    return tables


def rope_tables(o: Ops, config: TransformerConfig, tables: dict[str, dict[str, Value]]) -> dict[str, Value]:
    """cos and sin of the four attentions that rotate, as named values."""
    video = gather_tables(o, [tables[name] for name in TABLES[:3]], config.num_heads, config.head_dim)
    found = {"video": video}
    for name, table in (("video_cross", "video_cross"), ("audio", "audio_time"), ("audio_cross", "audio_cross")):
        found[name] = gather_tables(o, [tables[table]], config.audio_num_heads, config.audio_head_dim)
    return {f"{name}_{kind}": x for name, pair in found.items() for kind, x in zip(("cos", "sin"), pair, strict=True)}


def mask_bias(o: Ops, mask: Value) -> Value:
    """Additive bias of a multiplicative attention mask in [0, 1]: its logarithm, -1e30 where it is 0."""
    return o.select(mask, o.log(o.clamp(mask, low=1e-30)), o.affine(mask, scale=0.0, offset=-1e30))


def _block(o: Ops, config: TransformerConfig, carry, invariant, data):
    """One transformer block: carry video and audio; invariant modulations, contexts, tables; data the keep masks."""
    eps = config.norm_eps
    video, audio = streams(config)
    x = dict(carry)

    def mod(name: str, table: str, start: int = 0) -> list[Value]:
        rows, count = invariant[name], table_rows[table]
        stream, _, _ = name.partition("_")
        index = invariant[f"{stream}_index"] if rows.type.size("levels") > 1 else None
        width = rows.type.shape[-1]
        parameter = o.param(table, rows=count, **{rows.type.axes[-1]: width})
        return Modulation(rows, index).with_table(o, parameter, start)

    def rope(name: str) -> Rope:
        return invariant[f"{name}_cos"], invariant[f"{name}_sin"]

    n = 9 if config.text_modulation else 6
    table_rows = {
        "scale_shift_table": n,
        "audio_scale_shift_table": n,
        "prompt_scale_shift_table": 2,
        "audio_prompt_scale_shift_table": 2,
        "scale_shift_table_a2v_ca_video": 5,
        "scale_shift_table_a2v_ca_audio": 5,
    }
    rows = {s.name: mod(f"{s.name}_mod", f"{s.prefix}scale_shift_table") for s in (video, audio)}
    gated = config.gated_attention
    for s in (video, audio):
        m = rows[s.name]
        h = o.modulate(o.rms_norm(x[s.name], over=(s.axis,), eps=eps), m[1], m[0])
        y = attention(
            o.under(f"{s.prefix}attn1"), h, h, s.heads, s.head_dim, eps=eps, gated=gated, rope=rope(s.name),
            bias=invariant.get(f"{s.name}_bias"), keep=data.get(f"{s.name}_self_keep"),
        )  # fmt: skip
        x[s.name] = o.add(x[s.name], o.mul(y, m[2]))
        q, context = o.rms_norm(x[s.name], over=(s.axis,), eps=eps), invariant[f"{s.name}_context"]
        if config.text_modulation:
            q = o.modulate(q, m[7], m[6])
            p = _prompt_rows(o, config, s, invariant, mod)
            context = o.modulate(context, p[1], p[0])
        y = attention(o.under(f"{s.prefix}attn2"), q, context, s.heads, s.head_dim, eps=eps, gated=gated)
        x[s.name] = o.add(x[s.name], o.mul(y, m[8]) if config.text_modulation else y)

    nv = o.rms_norm(x["video"], over=("D",), eps=eps)
    na = o.rms_norm(x["audio"], over=("audio_D",), eps=eps)
    # Rows of the cross-modal tables are scale first: 0,1 scale and shift for a2v; 2,3 for v2a; 4 the gate.
    cv, ca = (mod(f"{s}_cross_mod", f"scale_shift_table_a2v_ca_{s}") for s in ("video", "audio"))
    (gv,), (ga,) = (mod(f"{s}_gate_mod", f"scale_shift_table_a2v_ca_{s}", start=4) for s in ("video", "audio"))
    heads = (config.audio_num_heads, config.audio_head_dim)
    dv = attention(
        o.under("audio_to_video_attn"), o.modulate(nv, cv[0], cv[1]), o.modulate(na, ca[0], ca[1]),
        *heads, eps=eps, gated=gated, rope=rope("video_cross"), context_rope=rope("audio_cross"),
    )  # fmt: skip
    da = attention(
        o.under("video_to_audio_attn"), o.modulate(na, ca[2], ca[3]), o.modulate(nv, cv[2], cv[3]),
        *heads, eps=eps, gated=gated, rope=rope("audio_cross"), context_rope=rope("video_cross"),
    )  # fmt: skip
    for name, delta, gate, keep in (("video", dv, gv, "a2v_keep"), ("audio", da, ga, "v2a_keep")):
        delta = o.mul(delta, gate)
        if keep in data:
            delta = o.mul(delta, o.cast(data[keep], dtype=o.dtype))
        x[name] = o.add(x[name], delta)
    for s in (video, audio):
        m = rows[s.name]
        h = o.modulate(o.rms_norm(x[s.name], over=(s.axis,), eps=eps), m[4], m[3])
        x[s.name] = o.add(x[s.name], o.mul(feed_forward(o.under(f"{s.prefix}ff"), h, s.ff_bias), m[5]))
    return x, {}


def _prompt_rows(o: Ops, config: TransformerConfig, s: Stream, invariant, mod) -> list[Value]:
    """shift, scale of the text context: the block's table, plus the prompt MLP's rows if there is one."""
    name = f"{s.prefix}prompt_scale_shift_table"
    if config.prompt_adaln:
        return mod(f"{s.name}_prompt_mod", name)
    table = o.param(name, rows=2, **{s.axis: s.width})
    return [o.at(table, axis="rows", index=i) for i in range(2)]


def transformer(
    o: Ops,
    config: TransformerConfig,
    *,
    latents: dict[str, Value],
    levels: dict[str, Levels],
    sigmas: dict[str, Value],
    contexts: dict[str, Value],
    tables: dict[str, dict[str, Value]],
    keeps: dict[str, Value],
    bias: Value | None,
    rule: str,
) -> dict[str, Value]:
    """Velocities {"video": (B, tokens, C), "audio": (B, audio_tokens, C)} in float32.

    latents: (B, tokens, C). levels: timesteps in [0,1]. sigmas (B). contexts (B, text, C').
    keeps: any of video_self_keep, audio_self_keep, a2v_keep, v2a_keep (layers, B). bias: video self-attention.
    """
    o = o.under(PREFIX.rstrip("."))
    video, audio = pair = streams(config)
    x, invariant, embedded = {}, {}, {}

    def scaled(level: Levels, factor: float = 1.0) -> Levels:
        values = o.affine(level.values, scale=config.timestep_scale)
        return Levels(values if factor == 1.0 else o.affine(values, scale=factor), level.index)

    scalar = {s.name: Levels(o.expand(sigmas[s.name], axis="levels", size=1), None) for s in pair}
    cross_rows = {"A": ("own", "own"), "B": ("other", "other"), "C": ("own", "other")}[rule]
    gate_factor = config.av_gate_scale / config.timestep_scale
    for s, other in ((video, audio), (audio, video)):
        p, axis = s.prefix, s.axis
        x[s.name] = o.linear(o.cast(latents[s.name], dtype=o.dtype), f"{p}patchify_proj", {axis: s.width})
        own = levels[s.name]
        modulation, embedded[s.name] = adaln(
            o.under(f"{p}adaln_single"), scaled(own), s.width, 9 if config.text_modulation else 6, axis
        )
        invariant[f"{s.name}_mod"] = modulation.rows
        if own.index is not None:
            invariant[f"{s.name}_index"] = own.index
        sources = {"own": own, "other": scalar[other.name]}
        cross, _ = adaln(
            o.under(f"av_ca_{s.name}_scale_shift_adaln_single"), scaled(sources[cross_rows[0]]), s.width, 4, axis
        )
        invariant[f"{s.name}_cross_mod"] = cross.rows
        gate_name = "av_ca_a2v_gate_adaln_single" if s is video else "av_ca_v2a_gate_adaln_single"
        gate, _ = adaln(o.under(gate_name), scaled(sources[cross_rows[1]], gate_factor), s.width, 1, axis)
        invariant[f"{s.name}_gate_mod"] = gate.rows
        if config.text_modulation and config.prompt_adaln:
            prompt, _ = adaln(o.under(f"{p}prompt_adaln_single"), scaled(scalar[s.name]), s.width, 2, axis)
            invariant[f"{s.name}_prompt_mod"] = prompt.rows
        context = o.cast(contexts[s.name], dtype=o.dtype)
        if config.caption_projection:
            under = o.under(f"{p}caption_projection")
            context = under.gelu(under.linear(context, "linear_1", {axis: s.width}))
            context = under.linear(context, "linear_2", {axis: s.width})
        invariant[f"{s.name}_context"] = context
    invariant |= rope_tables(o, config, tables)
    if bias is not None:
        invariant["video_bias"] = bias

    x, _ = o.repeat(
        lambda o, c, i, d: _block(o, config, c, i, d),
        config.num_layers,
        carry=x,
        invariant=invariant,
        data=keeps,
        prefix="transformer_blocks.*.",
    )
    outputs = {}
    for s in pair:
        rows = o.expand(embedded[s.name], axis="rows", size=2, before=s.axis)
        table = o.param(f"{s.prefix}scale_shift_table", rows=2, **{s.axis: s.width})
        shift, scale = Modulation(rows, levels[s.name].index).with_table(o, table)
        y = o.modulate(o.layer_norm(x[s.name], over=s.axis, eps=1e-6), scale, shift)
        channels = config.video_channels if s is video else config.audio_channels
        outputs[s.name] = o.cast(o.linear(y, f"{s.prefix}proj_out", {"C": channels}), dtype="float32")
    return outputs


def declare_levels(o: Ops, name: str, levels: int, **axes: int) -> Levels:
    """Inputs `{name}_levels` (B, levels) and, if there are several, `{name}_level_index` ((B,) tokens)."""
    batch = {"B": axes["B"]} if "B" in axes else {}
    values = o.input(f"{name}_levels", "float32", **batch, levels=levels)
    return Levels(values, o.input(f"{name}_level_index", "int32", **axes) if levels > 1 else None)


def declare_context(o: Ops, config: TransformerConfig, s: Stream, **axes: int) -> Value:
    """Input `{stream}_context` (*axes, width of the connector's output)."""
    width = {"caption": config.caption_channels} if config.caption_projection else {s.axis: s.width}
    return o.input(f"{s.name}_context", "float32", **axes, **width)


def trace(config: TransformerConfig, s: Structure, dtype: str) -> Graph:
    """One forward. Inputs per stream: *_latent, *_levels, *_level_index, *_sigma, *_context; tables, keeps, mask.

    Outputs: video_velocity, audio_velocity.
    """

    def model(o: Ops) -> dict[str, Value]:
        video, audio = streams(config)
        tokens = {"video": {"tokens": s.video_tokens}, "audio": {"audio_tokens": s.audio_tokens}}
        channels = {"video": config.video_channels, "audio": config.audio_channels}
        latents, levels, sigmas, contexts = {}, {}, {}, {}
        for stream, k in ((video, s.video_levels), (audio, s.audio_levels)):
            n, axes = stream.name, {"B": s.batch, **tokens[stream.name]}
            latents[n] = o.input(f"{n}_latent", "float32", **axes, C=channels[n])
            levels[n] = declare_levels(o, n, k, **axes)
            sigmas[n] = o.input(f"{n}_sigma", "float32", B=s.batch)
            contexts[n] = declare_context(o, config, stream, B=s.batch, text=s.text_tokens)
        keeps, bias = {}, None
        if s.perturbed:
            names = ("video_self_keep", "audio_self_keep", "a2v_keep", "v2a_keep")
            keeps = {n: o.input(n, "float32", layers=config.num_layers, B=s.batch) for n in names}
        if s.masked:
            mask = o.input("video_attention_mask", "float32", B=s.batch, tokens=s.video_tokens, keys=s.video_tokens)
            bias = mask_bias(o, mask)
        tables = declare_tables(o, config, s)
        v = transformer(
            o, config, latents=latents, levels=levels, sigmas=sigmas, contexts=contexts, tables=tables, keeps=keeps,
            bias=bias, rule=s.rule,
        )  # fmt: skip
        return {"video_velocity": v["video"], "audio_velocity": v["audio"]}

    return trace_graph("transformer", model, dtype)
