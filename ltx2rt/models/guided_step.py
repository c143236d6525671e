"""One guided denoise step as a graph: the active branches through the transformer in one batch,
guidance, a sampler.

Which branches exist and which blocks STG perturbs is structure: the pass `share` computes what
branches have in common once. Guidance scales and sigmas are inputs, so changing them among
non-neutral values compiles nothing. Values that depend only on the timestep have no batch.
Everything after the transformer is float32.

    x0   = x - v * mask * sigma                                        per branch
    pred = c + (cfg-1)(c-u) + stg (c-p) + (modality-1)(c-q)            c cond, u uncond, p
    perturbed, q isolated; of sound + voice (c-w), w without tokens added to the clip's
    pred = pred * (r std(c) / max(std(pred), 1e-5) + 1 - r)            std unbiased, over tokens and
    channels
    x0   = pred * mask + clean * (1 - mask)
    x'   = the sampler's next latents                                  `models.samplers`

A frozen stream is given whole: its latents are the clean ones at sigma 0 in every step, it has no
x0 and no noise, and reads its positive context in every branch. A stream that the clip does not
have is not computed.

Several videos of one prompt go through in one batch: the transformer's B is branches x videos, a
branch's videos together. They differ in their noise only.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

import numpy as np

from ltx2rt.config import TransformerConfig
from ltx2rt.graph import Ops, Term, traced
from ltx2rt.models.modulation import Levels
from ltx2rt.models.samplers import CARRIED, COEFFICIENTS, NOISY, advance
from ltx2rt.models.transformer import (
    ForwardShape,
    Stream,
    declare_context,
    declare_keyframes,
    declare_levels,
    declare_tables,
    mask_bias,
    streams,
    transformer,
)

CFG, STG, MODALITY, RESCALE = range(4)  # columns of the input `guidance` (modalities, scales)
VOICE = 4  # column behind them for sound: the input `voice`
HIDDEN = -1e30  # added to the scores of keys that a branch does not see
MIN_STD = 1e-5  # survives float16, unlike 1e-8


@dataclass(frozen=True)
class Branches:
    """The guidance branches that run in addition to the conditional one."""

    uncond: bool = False
    perturbed: bool = False
    isolated: bool = False
    unheard: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        found = ("uncond", "perturbed", "isolated", "unheard")
        return ("cond", *(name for name in found if getattr(self, name)))

    @classmethod
    def of(cls, guidance: np.ndarray) -> Branches:
        """The branches that `guidance` [..., 4] needs: not neutral in some row."""
        g = np.asarray(guidance, np.float32).reshape(-1, 4)
        return cls(
            uncond=not np.allclose(g[:, CFG], 1),
            perturbed=not np.allclose(g[:, STG], 0),
            isolated=not np.allclose(g[:, MODALITY], 1),
        )


@dataclass(frozen=True)
class StepShape:
    """The sizes of a guided-step graph, in addition to its config: the key under which programs are
    kept.

    streams: the clip's, of video and audio; frozen: the given ones among them. A stream that is
    absent has 0 tokens. masked: video self-attention is weighted by an input. stg_blocks: those
    that the perturbed branch perturbs, as `perturbed_blocks` reads them. relay: groups of video and of
    audio tokens, each with a separate bias in its attention to the positive text, 0 for none. nag:
    the first stream's attention to its text is moved away from that to the negative one.
    """

    branches: Branches
    video_tokens: int
    audio_tokens: int
    text_tokens: int
    coordinates: tuple[int, ...]
    video_levels: int = 1
    audio_levels: int = 1
    rule: str = "C"
    videos: int = 1
    sampler: str = "euler"
    streams: tuple[str, ...] = ("video", "audio")
    frozen: tuple[str, ...] = ()
    masked: bool = False
    stg_blocks: tuple[int | str, ...] = ()
    relay: tuple[int, int] = (0, 0)
    nag: bool = False


def perturbed_blocks(blocks: Iterable[int | str], stream: str) -> list[int]:
    """Numbers of the blocks in which STG perturbs a stream: 28 is of both, "audio=29" of one."""
    named = (str(block).rpartition("=") for block in blocks)
    return [int(number) for of, _, number in named if of in ("", stream)]


def mask_feeds(name: str, mask: np.ndarray) -> dict[str, np.ndarray]:
    """`{name}_mask`, `_levels` [K], if K > 1 `_level_index` [T]; mask [T]: 1 generate, 0 keep."""
    mask = np.asarray(mask, np.float32)
    levels, index = np.unique(mask, return_inverse=True)
    feeds: dict[str, np.ndarray] = {f"{name}_mask": mask, f"{name}_levels": levels}
    if len(levels) > 1:
        feeds[f"{name}_level_index"] = index.astype(np.int32)
    return feeds


def _std(o: Ops, x: Term, over: tuple[str, ...]) -> Term:
    """Unbiased standard deviation per sample."""
    n = math.prod(map(x.type.size, over))
    return o.sqrt(o.sum(o.square(x - o.mean(x, over=over)), over=over) / max(n - 1, 1))


def _guide(o: Ops, x0: Term, names: tuple[str, ...], scales: list[Term], tokens: str) -> Term:
    """The guided x0 (videos, tokens, C) of a modality from (branches, videos, tokens, C)."""
    c = o.at(x0, axis="branches", index=0)
    pred = c
    columns = {"uncond": CFG, "perturbed": STG, "isolated": MODALITY, "unheard": VOICE}
    for name, column in columns.items():
        if name in names and column < len(scales):
            scale = scales[column] - 1 if column in (CFG, MODALITY) else scales[column]
            pred += (c - o.at(x0, axis="branches", index=names.index(name))) * scale
    ratio = _std(o, c, (tokens, "C")) / o.clamp(_std(o, pred, (tokens, "C")), low=MIN_STD)
    r = scales[RESCALE]
    return pred * (ratio * r + (1 - r))


def _keeps(
    o: Ops,
    config: TransformerConfig,
    names: tuple[str, ...],
    scales: dict[str, list[Term]],
    s: StepShape,
) -> dict[str, Term]:
    """Keep masks (layers, B): STG passes values through, the isolated branch hears no other."""
    layers = range(config.num_layers)

    def columns(branch: str, blocks: Container[int], inside: Term) -> Term:
        """`inside` in these blocks of a branch, 1 elsewhere."""
        one, ones = o.full(1.0, "float32"), o.full(1.0, "float32", layers=len(layers))
        each = (inside if layer in blocks else one for layer in layers)
        own = o.stack(*each, axis="layers", dim=0)
        keep = o.stack(*(own if name == branch else ones for name in names), axis="branches", dim=1)
        keep = o.expand(keep, axis="videos", size=s.videos)
        return o.merge(keep, axes=("branches", "videos"), into="B")

    keeps, zero = {}, o.full(0.0, "float32")
    if "perturbed" in names:
        for name in scales:
            # except a stream with stg 0
            active = o.select(scales[name][STG], o.full(1.0, "float32"), zero)
            own = perturbed_blocks(s.stg_blocks, name)
            keeps[f"{name}_self_keep"] = columns("perturbed", own, 1 - active)
    if "isolated" in names and len(s.streams) > 1:
        cross = columns("isolated", layers, zero)
        keeps |= {"a2v_keep": cross, "v2a_keep": cross}
    return keeps


@dataclass(frozen=True)
class _StreamInputs:
    """One stream's latents (videos, tokens, C), clean latents (tokens, C), mask (tokens; None if
    frozen), noise levels of its tokens, context (B, text, C'), and the bias of a relay (B, tokens,
    text)."""

    x: Term
    clean: Term
    mask: Term | None
    levels: Levels
    context: Term
    relay: Term | None


class _Step:
    """The parts of one step: inputs are declared where they are read."""

    def __init__(self, o: Ops, config: TransformerConfig, s: StepShape):
        self.o, self.config, self.s = o, config, s
        self.names = s.branches.names
        self.present = [stream for stream in streams(config) if stream.name in s.streams]
        self.made = [stream for stream in self.present if stream.name not in s.frozen]
        pairs = o.input("sigmas", "float32", ends=2)
        ends = range(2 if s.sampler == "euler" else 1)
        self.ends = [o.at(pairs, axis="ends", index=i) for i in ends]

    def branched(self, x: Term) -> Term:
        """Every branch starts from the same."""
        return self.o.expand(x, axis="branches", size=len(self.names), before=x.type.axes[0])

    def batched(self, x: Term) -> Term:
        """(branches, ...) or (branches, videos, ...) as the transformer's batch."""
        if "videos" not in x.type.axes:
            x = self.o.expand(x, axis="videos", size=self.s.videos, before=x.type.axes[1])
        return self.o.merge(x, axes=("branches", "videos"), into="B")

    def by_branch(self, rows: list[Term]) -> Term:
        """Rows (1, ...) of the branches, each for all videos, as the transformer's batch."""
        return self.batched(self.o.concat(*rows, axis="branches"))

    def scales(self) -> dict[str, list[Term]]:
        """The scales of guidance of each stream that is made, none of a step without guidance."""
        o, found = self.o, {}
        if len(self.names) > 1:
            guidance = o.input("guidance", "float32", modalities=2, scales=4)
            for stream in self.made:
                row = o.at(guidance, axis="modalities", index=("video", "audio").index(stream.name))
                found[stream.name] = o.each(row, "scales")
        if self.s.branches.unheard:
            found["audio"] += o.each(o.input("voice", "float32", terms=1), "terms")
        return found

    def unheard(self) -> Term | None:
        """Bias (B, audio_keys) that hides other sound from the branch of a voice's guidance."""
        if not self.s.branches.unheard:
            return None
        o = self.o
        beside = o.input("audio_beside", "float32", audio_keys=self.s.audio_tokens)
        off = o.expand(beside * HIDDEN, axis="branches", size=1, before="audio_keys")
        on = o.full(0.0, "float32", branches=1, audio_keys=self.s.audio_tokens)
        return self.by_branch([off if name == "unheard" else on for name in self.names])

    def given(self, stream: Stream) -> _StreamInputs:
        """The inputs of a stream."""
        o, s, n, video = self.o, self.s, stream.name, stream.name == "video"
        axes = {stream.tokens: s.video_tokens if video else s.audio_tokens}
        shape = {**axes, "C": stream.channels}
        if n in s.frozen:
            clean = o.input(f"{n}_clean", "float32", **shape)
            x = o.expand(clean, axis="videos", size=s.videos, before=stream.tokens)
            levels = Levels(o.full(0.0, "float32", levels=1), None)
            return _StreamInputs(x, clean, None, levels, self.context(stream), None)
        x = o.input(f"{n}_latent", "float32", videos=s.videos, **shape)
        clean = o.input(f"{n}_clean", "float32", **shape)
        mask = o.input(f"{n}_mask", "float32", **axes)
        own = declare_levels(o, n, s.video_levels if video else s.audio_levels, **axes)
        levels = Levels(own.values * self.ends[0], own.index)
        return _StreamInputs(x, clean, mask, levels, self.context(stream), self.relay(stream, axes))

    def context(self, stream: Stream) -> Term:
        """The text of each branch (B, text, C'): negative in uncond; of NAG both in a row."""
        o, s = self.o, self.s
        frozen = stream.name in s.frozen
        moved = s.nag and stream.name == s.streams[0] and not frozen
        count = 2 if moved or (s.branches.uncond and not frozen) else 1
        both = declare_context(o, self.config, stream, contexts=count, text=s.text_tokens)
        both = o.rename(both, names={"contexts": "branches"})
        chosen = (int(name == "uncond" and count == 2) for name in self.names)
        rows = [o.slice(both, axis="branches", start=i, stop=i + 1) for i in chosen]
        context = self.by_branch(rows)
        if not moved:
            return context
        negative = o.slice(both, axis="branches", start=1, stop=2)
        return o.concat(context, self.by_branch([negative] * len(self.names)), axis="text")

    def relay(self, stream: Stream, axes: dict[str, int]) -> Term | None:
        """The bias (B, tokens, text) of prompts by time, for the scores of the positive text."""
        o, n = self.o, stream.name
        groups = self.s.relay[("video", "audio").index(n)]
        if not groups:
            return None
        sizes = {"groups": groups, "text": self.s.text_tokens}
        table = o.input(f"{n}_relay", "float32", **sizes)
        table = o.expand(table, axis="branches", size=1, before="groups")
        none = o.full(0.0, "float32", branches=1, **sizes)
        index = o.input(f"{n}_group", "int32", **axes)
        rows = [none if name == "uncond" else table for name in self.names]
        return o.take(self.by_branch(rows), index, axis="groups")

    def velocities(
        self, given: dict[str, _StreamInputs], scales: dict[str, list[Term]], unheard: Term | None
    ) -> dict[str, Term]:
        """The transformer's velocity (branches, videos, tokens, C) of each stream."""
        o, config, s = self.o, self.config, self.s
        shape = ForwardShape(
            batch=len(self.names) * s.videos,
            video_tokens=s.video_tokens,
            audio_tokens=s.audio_tokens,
            text_tokens=s.text_tokens,
            coordinates=s.coordinates,
            streams=s.streams,
        )
        tables = declare_tables(o, config, shape)
        bias = mask_bias(o, tokens=s.video_tokens, keys=s.video_tokens) if s.masked else None
        keyframes = declare_keyframes(o, config, s.streams, tokens=s.video_tokens)
        return transformer(
            o, config,
            latents={n: self.batched(self.branched(one.x)) for n, one in given.items()},
            levels={n: one.levels for n, one in given.items()},
            sigmas={n: o.full(0.0, "float32") if n in s.frozen else self.ends[0] for n in given},
            contexts={n: one.context for n, one in given.items()},
            tables=tables,
            keeps=_keeps(o, config, self.names, scales, s),
            bias=bias,
            audio_bias=unheard,
            keyframes=keyframes,
            relays={n: one.relay for n, one in given.items() if one.relay is not None},
            nag=o.input("nag", "float32", terms=3) if s.nag else None,
            rule=s.rule,
        )  # fmt: skip

    def coefficients(self) -> list[Term]:
        """The sampler's coefficients, which the host computes."""
        if not (count := COEFFICIENTS[self.s.sampler]):
            return []
        return self.o.each(self.o.input("coefficients", "float32", terms=count), "terms")

    def guided(
        self, stream: Stream, one: _StreamInputs, velocity: Term, scales: dict[str, list[Term]]
    ) -> Term:
        """x0 (videos, tokens, C) of a stream from the velocities (B, tokens, C) of all branches."""
        assert one.mask is not None, "a stream that is made has a mask"
        into = {"branches": len(self.names), "videos": self.s.videos}
        v = self.o.split(velocity, axis="B", into=into)
        x0 = self.branched(one.x) - v * (one.mask * self.ends[0])
        if len(self.names) > 1:
            x0 = _guide(self.o, x0, self.names, scales[stream.name], stream.tokens)
        else:
            x0 = self.o.at(x0, axis="branches", index=0)
        return x0 * one.mask + one.clean * (1 - one.mask)

    def advanced(
        self, name: str, one: _StreamInputs, x0: Term, coefficients: list[Term]
    ) -> dict[str, Term]:
        """The sampler's next latents of a stream, and its carried state."""
        assert one.mask is not None, "a stream that is made has a mask"
        o, sampler = self.o, self.s.sampler
        more = [*CARRIED[sampler], *(["noise"] if sampler in NOISY else [])]
        given = {key: o.input(f"{name}_{key}", "float32", **one.x.type.sizes) for key in more}
        noise = given.pop("noise", None)
        found = advance(
            o, sampler, one.x, x0, one.clean, one.mask, self.ends, coefficients, noise, given
        )  # fmt: skip
        return {f"{name}_{key}": value for key, value in found.items()}


@traced("guided-step")
def trace(o: Ops, config: TransformerConfig, s: StepShape) -> dict[str, Term]:
    """Inputs, for a modality m of the clip's, all float32 unless said:

    m_latent (videos, tokens, C); m_clean (tokens, C); m_mask (tokens), its values m_levels (K) and,
    if K > 1, m_level_index int32 (tokens); m_context (1 or 2, text, C'): positive, then negative if
    the uncond branch runs or NAG reads it; of a frozen modality only m_clean and the positive
    context; the RoPE tables.
    sigmas (2): from, to; guidance (2, 4): rows video, audio; columns cfg, stg, modality, rescale
    (if any branch but cond runs); video_attention_mask (tokens, keys) in [0, 1], if masked;
    video_keyframes_mask (tokens): 1 = a keyframe, if the model has its vector; of a relay m_relay
    (groups, text) and m_group int32 (tokens); if the unheard branch runs voice (1) and audio_beside
    (audio_keys): 1 = a token beside the clip's, which that branch does not hear; nag (3), if so: of
    `attention.away`. Of a sampler that wants them, coefficients (n), m_noise, m_anchor and m_kept
    (videos, tokens, C). Outputs, of the modalities that are not frozen: m_latent, m_x0, m_anchor,
    m_kept (videos, tokens, C).
    """
    step = _Step(o, config, s)
    scales, unheard = step.scales(), step.unheard()
    given = {stream.name: step.given(stream) for stream in step.present}
    velocity = step.velocities(given, scales, unheard)
    coefficients = step.coefficients()
    latents, x0s = {}, {}
    for stream in step.made:
        n, one = stream.name, given[stream.name]
        x0 = step.guided(stream, one, velocity[n], scales)
        latents |= step.advanced(n, one, x0, coefficients)
        x0s[f"{n}_x0"] = x0
    return latents | x0s
