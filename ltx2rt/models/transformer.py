"""The audio-video diffusion transformer of LTX-2.0, 2.3 and 2.5.

Two token streams, video (tokens, D) and audio (audio_tokens, audio_D), go through the same blocks:
self-attention, attention to their text context, attention to each other, feed-forward; every part
under AdaLN.

Cross-modal timestep rules ("own" = the stream's per-token timesteps, "other" = the other stream's
sigma):
  C (default): scale and shift own, gate other.   B: both other.   A: both own.
They agree when every token of both streams has the same timestep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ltx2rt.config import TransformerConfig
from ltx2rt.graph import Graph, Ops, Term
from ltx2rt.graph import trace as trace_graph
from ltx2rt.models.attention import Rope, attention, feed_forward
from ltx2rt.models.modulation import Levels, Modulation, adaln
from ltx2rt.models.positions import coordinate_table, frequency_grid, gather_tables

PREFIX = "model.diffusion_model."
CROSS_TABLE = "scale_shift_table_a2v_ca_"  # and the stream
TABLES = ("video_time", "video_rows", "video_columns", "video_cross", "audio_time", "audio_cross")


@dataclass(frozen=True)
class ForwardShape:
    """The sizes of a transformer graph, in addition to its config. Hashable: the key under which
    programs are kept.

    coordinates: distinct coordinates per table of TABLES, 0 of those that are not read.
    batched_positions: positions differ between samples. perturbed: per-layer, per-sample keep masks
    are inputs. masked: a video self-attention mask is an input. streams: those that are computed;
    an absent one has 0 tokens.
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
    streams: tuple[str, ...] = ("video", "audio")


@dataclass(frozen=True)
class Stream:
    """One modality's values in the blocks, and the checkpoint's names of its parts."""

    name: str  # "video" or "audio"
    prefix: str  # "" or "audio_"
    axis: str  # "D" or "audio_D"
    tokens: str  # "tokens" or "audio_tokens"
    channels: int
    width: int
    heads: int
    head_dim: int
    ff_bias: bool


def streams(config: TransformerConfig) -> tuple[Stream, Stream]:
    """Video and audio, in the order of a block."""
    c = config
    return (
        Stream("video", "", "D", "tokens", c.video_channels, c.width, c.num_heads, c.head_dim,
        c.ff_bias),
        Stream(
            "audio", "audio_", "audio_D", "audio_tokens", c.audio_channels, c.audio_width,
            c.audio_num_heads,
            c.audio_head_dim, c.audio_ff_bias,
        ),
    )  # fmt: skip


# --- host side: positions to tables, timesteps to levels ------------------------------------------


def table_names(streams: Sequence[str]) -> list[str]:
    """The tables of TABLES that attentions within and between these streams read."""
    return [
        n
        for n in TABLES
        if n.split("_")[0] in streams and (len(streams) > 1 or not n.endswith("cross"))
    ]


def position_feeds(
    config: TransformerConfig, video: np.ndarray | None, audio: np.ndarray | None
) -> dict[str, np.ndarray]:
    """RoPE inputs of video positions [(B,) 3, T, 2] (s, px, px; start, end) and audio positions
    [(B,) 1, Ta, 2] (s); None where a stream is absent."""
    c = config
    f64 = c.rope_float64_grid
    grid = frequency_grid(c.width, 3, c.rope_theta, f64)
    audio_grid = frequency_grid(c.audio_width, 1, c.rope_theta, f64)
    cross_max = max(c.rope_max_pos[0], c.audio_rope_max_pos)
    cross_grid = frequency_grid(c.audio_num_heads * c.audio_head_dim, 1, c.rope_theta, f64)
    feeds = {}
    if video is not None:
        for i, name in enumerate(TABLES[:3]):
            feeds |= coordinate_table(name, video[..., i, :, :], c.rope_max_pos[i], grid)
        if audio is not None:
            feeds |= coordinate_table("video_cross", video[..., 0, :, :], cross_max, cross_grid)
    if audio is not None:
        feeds |= coordinate_table(
            "audio_time", audio[..., 0, :, :], c.audio_rope_max_pos, audio_grid
        )
        if video is not None:
            feeds |= coordinate_table("audio_cross", audio[..., 0, :, :], cross_max, cross_grid)
    return feeds


def coordinate_counts(feeds: dict[str, np.ndarray]) -> tuple[int, ...]:
    return tuple(len(feeds.get(f"{name}_cos", ())) for name in TABLES)


def level_feeds(name: str, timesteps: np.ndarray) -> dict[str, np.ndarray]:
    """`{name}_levels` [B, K] and, if K > 1, `{name}_level_index` [B, T] from timesteps [B, T]."""
    per_sample = [np.unique(t, return_inverse=True) for t in np.asarray(timesteps, np.float32)]
    count = max(len(values) for values, _ in per_sample)
    levels = np.stack(
        [np.pad(values, (0, count - len(values)), mode="edge") for values, _ in per_sample]
    )
    feeds = {f"{name}_levels": levels}
    if count > 1:
        feeds[f"{name}_level_index"] = np.stack([index for _, index in per_sample]).astype(np.int32)
    return feeds


def keep_names(streams: Sequence[str]) -> list[str]:
    """The masks that take attention out of layers."""
    return [f"{name}_self_keep" for name in streams] + (
        ["a2v_keep", "v2a_keep"] if len(streams) > 1 else []
    )


# --- graph side -----------------------------------------------------------------------------------


def declare_tables(
    o: Ops, config: TransformerConfig, s: ForwardShape
) -> dict[str, dict[str, Term]]:
    """RoPE inputs per table: cos, sin (coordinates, frequencies) and index ((B,) tokens)."""
    video, cross = config.width // 6, config.audio_width // 2
    frequencies = (video, video, video, cross, cross, cross)
    tables = {}
    read = table_names(s.streams)
    for name, count, n in zip(TABLES, s.coordinates, frequencies, strict=True):
        if name not in read:
            continue
        sizes = {"B": s.batch} if s.batched_positions else {}
        sizes |= (
            {"tokens": s.video_tokens}
            if name.startswith("video")
            else {"audio_tokens": s.audio_tokens}
        )
        tables[name] = {
            "cos": o.input(f"{name}_cos", "float32", coordinates=count, frequencies=n),
            "sin": o.input(f"{name}_sin", "float32", coordinates=count, frequencies=n),
            "index": o.input(f"{name}_index", "int32", **sizes),
        }
    return tables


def rope_tables(
    o: Ops, config: TransformerConfig, tables: dict[str, dict[str, Term]]
) -> dict[str, Term]:
    """cos and sin of the attentions that rotate, as named values."""
    found = {}
    if "video_time" in tables:
        found["video"] = gather_tables(
            o, [tables[n] for n in TABLES[:3]], config.num_heads, config.head_dim
        )
    for name, table in (
        ("video_cross", "video_cross"),
        ("audio", "audio_time"),
        ("audio_cross", "audio_cross"),
    ):
        if table in tables:
            found[name] = gather_tables(
                o, [tables[table]], config.audio_num_heads, config.audio_head_dim
            )
    return {
        f"{name}_{kind}": x
        for name, pair in found.items()
        for kind, x in zip(("cos", "sin"), pair, strict=True)
    }


def mask_bias(o: Ops, mask: Term) -> Term:
    """Additive bias of a multiplicative mask in [0, 1]: its logarithm, -1e30 for 0."""
    return o.select(
        mask, o.log(o.clamp(mask, low=1e-30)), o.full(-1e30, "float32", **mask.type.sizes)
    )


class Rows(NamedTuple):
    """Modulation rows of one part of a block."""

    shift: Term
    scale: Term


def _block(config: TransformerConfig, o: Ops, carry, invariant, data):
    """One transformer block: carry video and audio; invariant modulations, contexts, tables; data
    the keep masks.

    For each stream x, its text context c, the other stream y, RMSNorm n and m(h) = h (1 + scale) +
    shift of each part:

        x += gate attention(m(n(x)))
        x += gate attention(m(n(x)), m(c))          2.0: x += attention(n(x), c)
        x += gate attention(m(n(x)), m(n(y)))       both streams at once
        x += gate feed_forward(m(n(x)))

    A single stream has no third line.
    """
    x = dict(carry)
    pair = [s for s in streams(config) if s.name in x]

    def norm(s: Stream) -> Term:
        return o.rms_norm(x[s.name], over=(s.axis,), eps=config.norm_eps)

    modulated, attend = partial(_modulated, o), partial(_attend, o, config)
    own = {s.name: _own_rows(o, config, invariant, s) for s in pair}
    for s in pair:
        rows, gate = own[s.name]["self"]
        h, bias, keep = (
            modulated(norm(s), rows),
            invariant.get(f"{s.name}_bias"),
            data.get(f"{s.name}_self_keep"),
        )
        more: dict[str, Any] = {"rope": _rope(invariant, s.name), "bias": bias, "keep": keep}
        x[s.name] += attend(f"{s.prefix}attn1", h, h, s, **more) * gate
        h, context = norm(s), invariant[f"{s.name}_context"]
        if config.text_modulation:
            rows, gate = own[s.name]["text"]
            h, context = (
                modulated(h, rows),
                modulated(context, _prompt_rows(o, config, invariant, s)),
            )
        more = {"bias": invariant.get(f"{s.name}_relay"), "nag": invariant.get(f"{s.name}_nag")}
        y = attend(f"{s.prefix}attn2", h, context, s, **more)
        x[s.name] += y * gate if config.text_modulation else y
    if len(pair) == 2:
        normed = {s.name: norm(s) for s in pair}
        for name, delta in _between(o, config, invariant, data, pair, normed):
            x[name] += delta
    for s in pair:
        rows, gate = own[s.name]["ff"]
        x[s.name] += (
            feed_forward(o.under(f"{s.prefix}ff"), modulated(norm(s), rows), s.ff_bias) * gate
        )
    return x, {}


def _modulated(o: Ops, h: Term, rows: Rows) -> Term:
    return o.modulate(h, rows.scale, rows.shift)


def _attend(
    o: Ops, config: TransformerConfig, name: str, h: Term, context: Term, s: Stream, **more
) -> Term:
    norm_and_gate = {"eps": config.norm_eps, "gated": config.gated_attention}
    return attention(o.under(name), h, context, s.heads, s.head_dim, **norm_and_gate, **more)


def _rope(invariant, name: str) -> Rope:
    return invariant[f"{name}_cos"], invariant[f"{name}_sin"]


def _between(
    o: Ops, config: TransformerConfig, invariant, data, pair: list[Stream], normed: dict[str, Term]
) -> Iterator[tuple[str, Term]]:
    """Name of each stream, and its input from the other one. normed: both, normalised."""
    video, audio = pair
    cross, gates = _cross_rows(o, invariant, pair)
    deltas = {}
    for name, s, other in (
        ("audio_to_video_attn", video, audio),
        ("video_to_audio_attn", audio, video),
    ):
        h, context = (_modulated(o, normed[t.name], cross[t.name][name]) for t in (s, other))
        rope, context_rope = (_rope(invariant, f"{t.name}_cross") for t in (s, other))
        bias = invariant.get("audio_bias") if other is audio else None
        more = {"bias": bias, "rope": rope, "context_rope": context_rope}
        deltas[s.name] = _attend(o, config, name, h, context, audio, **more)
    for s, keep in ((video, "a2v_keep"), (audio, "v2a_keep")):
        y = deltas[s.name]
        yield s.name, (y * o.cast(data[keep], dtype=o.dtype) if keep in data else y) * gates[s.name]


def _table(
    o: Ops, invariant, s: Stream, name: str, table: str, count: int, start: int = 0
) -> list[Term]:
    """Rows of the block's `table` from `start` on, plus the stream's modulation rows `name`."""
    rows = invariant[f"{s.name}_{name}"]
    index = invariant[f"{s.name}_index"] if rows.type.size("levels") > 1 else None
    return Modulation(rows, index).with_table(
        o, o.param(table, rows=count, **{s.axis: s.width}), start
    )


def _own_parts(config: TransformerConfig) -> tuple[str, ...]:
    """Parts of a block that a stream's table modulates, in its order: shift, scale, gate."""
    return ("self", "ff", "text") if config.text_modulation else ("self", "ff")


def _own_rows(
    o: Ops, config: TransformerConfig, invariant, s: Stream
) -> dict[str, tuple[Rows, Term]]:
    parts = _own_parts(config)
    rows = iter(_table(o, invariant, s, "mod", f"{s.prefix}scale_shift_table", 3 * len(parts)))
    return {
        part: (Rows(shift, scale), gate)
        for part, shift, scale, gate in zip(parts, rows, rows, rows, strict=True)
    }


def _cross_rows(
    o: Ops, invariant, pair: list[Stream]
) -> tuple[dict[str, dict[str, Rows]], dict[str, Term]]:
    """Rows of each stream in either cross-attention, and its gate. These tables are scale first."""
    rows, gates = {}, {}
    for s in pair:
        a2v_scale, a2v_shift, v2a_scale, v2a_shift = _table(
            o, invariant, s, "cross_mod", CROSS_TABLE + s.name, 5
        )
        a2v, v2a = Rows(a2v_shift, a2v_scale), Rows(v2a_shift, v2a_scale)
        rows[s.name] = {"audio_to_video_attn": a2v, "video_to_audio_attn": v2a}
    for s in pair:
        (gates[s.name],) = _table(o, invariant, s, "gate_mod", CROSS_TABLE + s.name, 5, start=4)
    return rows, gates


def _prompt_rows(o: Ops, config: TransformerConfig, invariant, s: Stream) -> Rows:
    """Rows of the text context: the block's table, plus the prompt MLP's rows if there is one."""
    name = f"{s.prefix}prompt_scale_shift_table"
    if config.prompt_adaln:
        return Rows(*_table(o, invariant, s, "prompt_mod", name, 2))
    table = o.param(name, rows=2, **{s.axis: s.width})
    return Rows(*(o.at(table, axis="rows", index=i) for i in range(2)))


def _tokens(o: Ops, s: Stream, latent: Term, keyframes: Term | None) -> Term:
    """The stream's tokens (B, axis, D); keyframes are marked by a vector that is learnt."""
    x = o.linear(o.cast(latent, dtype=o.dtype), f"{s.prefix}patchify_proj", {s.axis: s.width})
    if keyframes is None:
        return x
    vector = o.param("keyframes_abs_pos_embedding", one=1, **{s.axis: s.width})
    marked = o.expand(o.cast(keyframes, dtype=o.dtype), axis=s.axis, size=s.width)
    return x + marked * o.at(vector, axis="one", index=0)


# whose time the rows and the gate of a cross-attention are of, by rule
CROSS_TIMES = {"A": ("own", "own"), "B": ("other", "other"), "C": ("own", "other")}


def _modulations(
    o: Ops, config: TransformerConfig, s: Stream, times: Mapping[str, Levels], both: bool, rule: str
) -> tuple[dict[str, Term], Term]:
    """Modulation rows of all blocks by name, and the embedded timestep. times: of the stream's
    tokens (own), of the stream, and of the other one. both: there are two streams."""

    def made(name: str, time: str, count: int, factor: float = 1.0) -> tuple[Modulation, Term]:
        values = times[time].values * config.timestep_scale
        values = values if factor == 1.0 else values * factor
        level = Levels(values, times[time].index)
        return adaln(o.under(name), level, s.width, count, s.axis)

    found = {}
    modulation, embedded = made(f"{s.prefix}adaln_single", "own", 3 * len(_own_parts(config)))
    found["mod"] = modulation.rows
    if times["own"].index is not None:
        found["index"] = times["own"].index
    if both:
        rows_of, gate_of = CROSS_TIMES[rule]
        cross, _ = made(f"av_ca_{s.name}_scale_shift_adaln_single", rows_of, 4)
        gate_name = "a2v" if s.name == "video" else "v2a"
        factor = config.av_gate_scale / config.timestep_scale
        gate, _ = made(f"av_ca_{gate_name}_gate_adaln_single", gate_of, 1, factor)
        found |= {"cross_mod": cross.rows, "gate_mod": gate.rows}
    if config.text_modulation and config.prompt_adaln:
        found["prompt_mod"] = made(f"{s.prefix}prompt_adaln_single", "scalar", 2)[0].rows
    return found, embedded


def _context(o: Ops, config: TransformerConfig, s: Stream, context: Term) -> Term:
    """The stream's text context (B, text, D)."""
    context = o.cast(context, dtype=o.dtype)
    if not config.caption_projection:
        return context
    under = o.under(f"{s.prefix}caption_projection")
    context = under.gelu(under.linear(context, "linear_1", {s.axis: s.width}))
    return under.linear(context, "linear_2", {s.axis: s.width})


def _velocity(o: Ops, s: Stream, x: Term, embedded: Term, level: Levels) -> Term:
    """The stream's velocity (B, axis, C) in float32. embedded: its timesteps."""
    rows = o.expand(embedded, axis="rows", size=2, before=s.axis)
    table = o.param(f"{s.prefix}scale_shift_table", rows=2, **{s.axis: s.width})
    shift, scale = Modulation(rows, level.index).with_table(o, table)
    y = o.modulate(o.layer_norm(x, over=s.axis, eps=1e-6), scale, shift)
    return o.cast(o.linear(y, f"{s.prefix}proj_out", {"C": s.channels}), dtype="float32")


def transformer(
    o: Ops,
    config: TransformerConfig,
    *,
    latents: dict[str, Term],
    levels: dict[str, Levels],
    sigmas: dict[str, Term],
    contexts: dict[str, Term],
    tables: dict[str, dict[str, Term]],
    keeps: dict[str, Term],
    bias: Term | None,
    rule: str,
    audio_bias: Term | None = None,
    keyframes: Term | None = None,
    relays: Mapping[str, Term] | None = None,
    nag: Term | None = None,
) -> dict[str, Term]:
    """Velocities {"video": (B, tokens, C), "audio": (B, audio_tokens, C)} in float32, of the
    streams that there are.

    latents: (B, tokens, C) of the streams that there are. levels: timesteps in [0,1]. sigmas ((B)).
    contexts (B, text, C'). keeps: any of video_self_keep, audio_self_keep, a2v_keep, v2a_keep
    (layers, B). bias: video self-attention. audio_bias (B, audio_keys): all attention to sound.
    keyframes: ((B,) tokens), 1 where a video token is a keyframe's. relays: biases (B, tokens,
    text) of text attention. nag: (terms) of `attention.away`, where the video's context is two
    texts, one behind the other.
    """
    o = o.under(PREFIX.rstrip("."))
    pair = [s for s in streams(config) if s.name in latents]
    x, invariant, embedded = {}, {}, {}
    scalar = {s.name: Levels(o.expand(sigmas[s.name], axis="levels", size=1), None) for s in pair}
    for s, other in zip(pair, reversed(pair), strict=True):
        marks = keyframes if s.name == "video" else None
        x[s.name] = _tokens(o, s, latents[s.name], marks)
        times = {"own": levels[s.name], "scalar": scalar[s.name], "other": scalar[other.name]}
        rows, embedded[s.name] = _modulations(o, config, s, times, len(pair) == 2, rule)
        rows["context"] = _context(o, config, s, contexts[s.name])
        invariant |= {f"{s.name}_{name}": value for name, value in rows.items()}
    invariant |= rope_tables(o, config, tables)
    if bias is not None:
        invariant["video_bias"] = bias
    if audio_bias is not None:
        invariant["audio_bias"] = audio_bias
    invariant |= {f"{name}_relay": value for name, value in (relays or {}).items()}
    if nag is not None:
        invariant["video_nag"] = nag

    x, _ = o.repeat(
        partial(_block, config),
        config.num_layers,
        carry=x,
        invariant=invariant,
        data=keeps,
        prefix="transformer_blocks.*.",
    )
    return {s.name: _velocity(o, s, x[s.name], embedded[s.name], levels[s.name]) for s in pair}


def declare_levels(o: Ops, name: str, levels: int, **axes: int) -> Levels:
    """Inputs `{name}_levels` (B, levels) and, of several, `{name}_level_index` ((B,) tokens)."""
    batch = {"B": axes["B"]} if "B" in axes else {}
    values = o.input(f"{name}_levels", "float32", **batch, levels=levels)
    return Levels(values, o.input(f"{name}_level_index", "int32", **axes) if levels > 1 else None)


def declare_keyframes(
    o: Ops, config: TransformerConfig, streams: Sequence[str], **axes: int
) -> Term | None:
    """Input `video_keyframes_mask` (*axes) of a model with that vector, for video."""
    if not config.keyframe_vector or "video" not in streams:
        return None
    return o.input("video_keyframes_mask", "float32", **axes)


def declare_context(o: Ops, config: TransformerConfig, s: Stream, **axes: int) -> Term:
    """Input `{stream}_context` (*axes, width of the connector's output)."""
    width = {"caption": config.caption_channels} if config.caption_projection else {s.axis: s.width}
    return o.input(f"{s.name}_context", "float32", **axes, **width)


def trace(config: TransformerConfig, s: ForwardShape, dtype: str) -> Graph:
    """One forward. Inputs per stream: *_latent, *_levels, *_level_index, *_sigma, *_context;
    tables, keeps, masks. Outputs: video_velocity, audio_velocity."""

    def model(o: Ops) -> dict[str, Term]:
        latents, levels, sigmas, contexts = {}, {}, {}, {}
        sizes = ((s.video_tokens, s.video_levels), (s.audio_tokens, s.audio_levels))
        for stream, (size, k) in zip(streams(config), sizes, strict=True):
            if stream.name not in s.streams:
                continue
            n, axes = stream.name, {"B": s.batch, stream.tokens: size}
            latents[n] = o.input(f"{n}_latent", "float32", **axes, C=stream.channels)
            levels[n] = declare_levels(o, n, k, **axes)
            sigmas[n] = o.input(f"{n}_sigma", "float32", B=s.batch)
            contexts[n] = declare_context(o, config, stream, B=s.batch, text=s.text_tokens)
        keeps, bias = {}, None
        if s.perturbed:
            names = keep_names(s.streams)
            keeps = {n: o.input(n, "float32", layers=config.num_layers, B=s.batch) for n in names}
        if s.masked:
            mask = o.input(
                "video_attention_mask",
                "float32",
                B=s.batch,
                tokens=s.video_tokens,
                keys=s.video_tokens,
            )
            bias = mask_bias(o, mask)
        keyframes = declare_keyframes(o, config, s.streams, B=s.batch, tokens=s.video_tokens)
        tables = declare_tables(o, config, s)
        v = transformer(
            o, config, latents=latents, levels=levels, sigmas=sigmas, contexts=contexts,
            tables=tables, keeps=keeps,
            bias=bias, rule=s.rule, keyframes=keyframes,
        )  # fmt: skip
        return {f"{name}_velocity": velocity for name, velocity in v.items()}

    return trace_graph("transformer", model, dtype)
