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

import numpy as np

from ltx2rt.config import TransformerConfig
from ltx2rt.graph import Ops, Term, traced
from ltx2rt.models.attention import Rope, attention, feed_forward
from ltx2rt.models.modulation import Levels, adaln, with_table
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
    own = [name for name in TABLES if name.partition("_")[0] in streams]
    return [name for name in own if len(streams) > 1 or not name.endswith("cross")]


def _grids(config: TransformerConfig) -> dict[str, tuple[int, int, int, int]]:
    """By table: an axis of the positions and its range, width and axes of the frequencies."""
    c = config
    video = [(axis, limit, c.width, 3) for axis, limit in enumerate(c.rope_max_pos)]
    audio = 0, c.audio_rope_max_pos, c.audio_width, 1
    cross = 0, max(c.rope_max_pos[0], c.audio_rope_max_pos), c.audio_width, 1
    return dict(zip(TABLES, (*video, cross, audio, cross), strict=True))


def position_feeds(
    config: TransformerConfig, video: np.ndarray | None, audio: np.ndarray | None
) -> dict[str, np.ndarray]:
    """RoPE inputs of video positions [(B,) 3, T, 2] (s, px, px; start, end) and audio positions
    [(B,) 1, Ta, 2] (s); None where a stream is absent."""
    given = {name: x for name, x in (("video", video), ("audio", audio)) if x is not None}
    grids, feeds = _grids(config), {}
    for name in table_names(list(given)):
        axis, limit, width, axes = grids[name]
        grid = frequency_grid(width, axes, config.rope_theta, config.rope_float64_grid)
        bounds = given[name.partition("_")[0]][..., axis, :, :]
        feeds |= coordinate_table(name, bounds, limit, grid)
    return feeds


def coordinate_counts(feeds: dict[str, np.ndarray]) -> tuple[int, ...]:
    return tuple(len(feeds.get(f"{name}_cos", ())) for name in TABLES)


def level_feeds(name: str, timesteps: np.ndarray) -> dict[str, np.ndarray]:
    """`{name}_levels` [B, K] and, if K > 1, `{name}_level_index` [B, T] from timesteps [B, T]."""
    per_sample = [np.unique(t, return_inverse=True) for t in np.asarray(timesteps, np.float32)]
    count = max(len(values) for values, _ in per_sample)
    levels = [np.pad(values, (0, count - len(values)), mode="edge") for values, _ in per_sample]
    feeds = {f"{name}_levels": np.stack(levels)}
    if count > 1:
        feeds[f"{name}_level_index"] = np.stack([index for _, index in per_sample]).astype(np.int32)
    return feeds


def keep_names(streams: Sequence[str]) -> list[str]:
    """The masks that take attention out of layers."""
    between = ["a2v_keep", "v2a_keep"] if len(streams) > 1 else []
    return [f"{name}_self_keep" for name in streams] + between


# --- graph side -----------------------------------------------------------------------------------


def declare_tables(
    o: Ops, config: TransformerConfig, s: ForwardShape
) -> dict[str, dict[str, Term]]:
    """RoPE inputs per table: cos, sin (coordinates, frequencies) and index ((B,) tokens)."""
    grids, counts = _grids(config), dict(zip(TABLES, s.coordinates, strict=True))
    tables = {}
    for name in table_names(s.streams):
        *_, width, axes = grids[name]
        sizes = {"coordinates": counts[name], "frequencies": width // (2 * axes)}
        at = {"B": s.batch} if s.batched_positions else {}
        video = name.startswith("video")
        at |= {"tokens": s.video_tokens} if video else {"audio_tokens": s.audio_tokens}
        table = {kind: o.input(f"{name}_{kind}", "float32", **sizes) for kind in ("cos", "sin")}
        tables[name] = table | {"index": o.input(f"{name}_index", "int32", **at)}
    return tables


def rope_tables(
    o: Ops, config: TransformerConfig, tables: dict[str, dict[str, Term]]
) -> dict[str, Term]:
    """cos and sin of the attentions that rotate, as named values."""
    attentions = {"video": TABLES[:3], "video_cross": ["video_cross"]}
    attentions |= {"audio": ["audio_time"], "audio_cross": ["audio_cross"]}
    found = {}
    for name, read in attentions.items():
        if read[0] in tables:
            video, audio = streams(config)
            s = video if name == "video" else audio
            pair = gather_tables(o, [tables[table] for table in read], s.heads, s.head_dim)
            found |= zip((f"{name}_cos", f"{name}_sin"), pair, strict=True)
    return found


def mask_bias(o: Ops, **sizes: int) -> Term:
    """Additive bias of the input `video_attention_mask` in [0, 1]: its logarithm, -1e30 for 0."""
    mask = o.input("video_attention_mask", "float32", **sizes)
    return o.select(mask, o.log(o.clamp(mask, low=1e-30)), o.full(-1e30, "float32", **sizes))


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
    attend = partial(_attend, o, config)

    def norm(s: Stream) -> Term:
        return o.rms_norm(x[s.name], over=(s.axis,), eps=config.norm_eps)

    own = {s.name: _own_rows(o, config, invariant, s) for s in pair}
    for s in pair:
        *rows, gate = own[s.name]["self"]
        h = o.modulate(norm(s), *rows)
        more = {"bias": invariant.get(f"{s.name}_bias"), "keep": data.get(f"{s.name}_self_keep")}
        y = attend(f"{s.prefix}attn1", h, h, s, rope=_rope(invariant, s.name), **more)
        x[s.name] += y * gate
        h, context = norm(s), invariant[f"{s.name}_context"]
        if config.text_modulation:
            *rows, gate = own[s.name]["text"]
            h = o.modulate(h, *rows)
            context = o.modulate(context, *_prompt_rows(o, config, invariant, s))
        more = {"bias": invariant.get(f"{s.name}_relay"), "nag": invariant.get(f"{s.name}_nag")}
        y = attend(f"{s.prefix}attn2", h, context, s, **more)
        x[s.name] += y * gate if config.text_modulation else y
    if len(pair) == 2:
        normed = {s.name: norm(s) for s in pair}
        for name, delta in _between(o, config, invariant, data, pair, normed):
            x[name] += delta
    for s in pair:
        *rows, gate = own[s.name]["ff"]
        h = o.modulate(norm(s), *rows)
        x[s.name] += feed_forward(o.under(f"{s.prefix}ff"), h, s.ff_bias) * gate
    return x, {}


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
    # scale and shift of audio-to-video, then of video-to-audio attention, and the gate
    tables = [partial(_table, o, invariant, s, table=CROSS_TABLE + s.name, count=5) for s in pair]
    rows = {s.name: read("cross_mod") for s, read in zip(pair, tables, strict=True)}
    gates = {s.name: read("gate_mod", start=4) for s, read in zip(pair, tables, strict=True)}
    deltas = []
    for first, name, s, other, keep in (
        (0, "audio_to_video_attn", video, audio, "a2v_keep"),
        (2, "video_to_audio_attn", audio, video, "v2a_keep"),
    ):
        h, context = (o.modulate(normed[t.name], *rows[t.name][first:][:2]) for t in (s, other))
        rope, context_rope = (_rope(invariant, f"{t.name}_cross") for t in (s, other))
        bias = invariant.get("audio_bias") if other is audio else None
        more = {"bias": bias, "rope": rope, "context_rope": context_rope}
        deltas.append((s, keep, _attend(o, config, name, h, context, audio, **more)))
    for s, keep, y in deltas:
        kept = y * o.cast(data[keep], dtype=o.dtype) if keep in data else y
        yield s.name, kept * gates[s.name][0]


def _table(
    o: Ops, invariant, s: Stream, name: str, table: str, count: int, start: int = 0
) -> list[Term]:
    """Rows of the block's `table` from `start` on, plus the stream's modulation rows `name`."""
    rows = invariant[f"{s.name}_{name}"]
    index = invariant[f"{s.name}_index"] if rows.type.size("levels") > 1 else None
    return with_table(o, rows, index, o.param(table, rows=count, **{s.axis: s.width}), start)


def _own_parts(config: TransformerConfig) -> tuple[str, ...]:
    """Parts of a block that a stream's table modulates, in its order: shift, scale, gate."""
    return ("self", "ff", "text") if config.text_modulation else ("self", "ff")


def _own_rows(
    o: Ops, config: TransformerConfig, invariant, s: Stream
) -> dict[str, tuple[Term, Term, Term]]:
    """Scale, shift and gate of each part."""
    parts = _own_parts(config)
    rows = iter(_table(o, invariant, s, "mod", f"{s.prefix}scale_shift_table", 3 * len(parts)))
    each = zip(parts, rows, rows, rows, strict=True)
    return {part: (scale, shift, gate) for part, shift, scale, gate in each}


def _prompt_rows(o: Ops, config: TransformerConfig, invariant, s: Stream) -> tuple[Term, Term]:
    """Scale and shift of the text context: the block's table, plus the prompt MLP's rows if there
    is one."""
    name = f"{s.prefix}prompt_scale_shift_table"
    if config.prompt_adaln:
        shift, scale = _table(o, invariant, s, "prompt_mod", name, 2)
    else:
        table = o.param(name, rows=2, **{s.axis: s.width})
        shift, scale = o.each(table, "rows")
    return scale, shift


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

    def made(name: str, time: str, count: int, factor: float = 1.0) -> tuple[Term, Term]:
        values = times[time].values * config.timestep_scale
        values = values if factor == 1.0 else values * factor
        level = Levels(values, times[time].index)
        return adaln(o.under(name), level, s.width, count, s.axis)

    found = {}
    found["mod"], embedded = made(f"{s.prefix}adaln_single", "own", 3 * len(_own_parts(config)))
    if times["own"].index is not None:
        found["index"] = times["own"].index
    if both:
        rows_of, gate_of = CROSS_TIMES[rule]
        found["cross_mod"], _ = made(f"av_ca_{s.name}_scale_shift_adaln_single", rows_of, 4)
        gate_name = "a2v" if s.name == "video" else "v2a"
        factor = config.av_gate_scale / config.timestep_scale
        found["gate_mod"], _ = made(f"av_ca_{gate_name}_gate_adaln_single", gate_of, 1, factor)
    if config.text_modulation and config.prompt_adaln:
        found["prompt_mod"], _ = made(f"{s.prefix}prompt_adaln_single", "scalar", 2)
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
    shift, scale = with_table(o, rows, level.index, table)
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
    text) of text attention. nag: (terms) of `attention.away`, where the context of the video, or of
    sound alone, is two texts, one behind the other.
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
    more = {"video_bias": bias, "audio_bias": audio_bias, f"{pair[0].name}_nag": nag}
    more |= {f"{name}_relay": value for name, value in (relays or {}).items()}
    invariant |= {name: value for name, value in more.items() if value is not None}
    block, stack = partial(_block, config), "transformer_blocks.*."
    x, _ = o.repeat(block, config.num_layers, x, invariant, keeps, prefix=stack)
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


def present(config: TransformerConfig, s: ForwardShape) -> Iterator[tuple[Stream, dict[str, int]]]:
    """The streams that a shape has, with the axes of their tokens."""
    sizes = {"video": s.video_tokens, "audio": s.audio_tokens}
    for stream in streams(config):
        if stream.name in s.streams:
            yield stream, {"B": s.batch, stream.tokens: sizes[stream.name]}


@traced("transformer")
def trace(o: Ops, config: TransformerConfig, s: ForwardShape) -> dict[str, Term]:
    """One forward. Inputs per stream: *_latent, *_levels, *_level_index, *_sigma, *_context;
    tables, keeps, masks. Outputs: video_velocity, audio_velocity."""
    latents, levels, sigmas, contexts = {}, {}, {}, {}
    counts = {"video": s.video_levels, "audio": s.audio_levels}
    for stream, axes in present(config, s):
        n = stream.name
        latents[n] = o.input(f"{n}_latent", "float32", **axes, C=stream.channels)
        levels[n] = declare_levels(o, n, counts[n], **axes)
        sigmas[n] = o.input(f"{n}_sigma", "float32", B=s.batch)
        contexts[n] = declare_context(o, config, stream, B=s.batch, text=s.text_tokens)
    layers = {"layers": config.num_layers, "B": s.batch}
    names = keep_names(s.streams) if s.perturbed else ()
    keeps = {name: o.input(name, "float32", **layers) for name in names}
    pairs = {"B": s.batch, "tokens": s.video_tokens, "keys": s.video_tokens}
    bias = mask_bias(o, **pairs) if s.masked else None
    keyframes = declare_keyframes(o, config, s.streams, B=s.batch, tokens=s.video_tokens)
    tables = declare_tables(o, config, s)
    v = transformer(
        o, config, latents=latents, levels=levels, sigmas=sigmas, contexts=contexts,
        tables=tables, keeps=keeps, bias=bias, rule=s.rule, keyframes=keyframes,
    )  # fmt: skip
    return {f"{name}_velocity": velocity for name, velocity in v.items()}
