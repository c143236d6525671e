"""One guided denoise step as a graph: the active branches through the transformer in one batch, guidance, Euler.

Which branches exist is structure; guidance scales, sigmas and the STG block list are inputs, so changing them among
non-neutral values compiles nothing. Everything after the transformer is float32.

    x0   = x - v * mask * sigma                                        per branch
    pred = c + (cfg-1)(c-u) + stg (c-p) + (modality-1)(c-q)            c cond, u uncond, p perturbed, q isolated
    pred = pred * (r std(c) / max(std(pred), 1e-5) + 1 - r)            std unbiased, over tokens and channels
    x0   = pred * mask + clean * (1 - mask)
    x'   = x + (x - x0) / sigma * (sigma' - sigma)

Several videos of one prompt go through in one batch: the transformer's B is branches x videos, a branch's videos
together. They differ in their noise only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ltx2rt.config import TransformerConfig
from ltx2rt.graph import Graph, Ops, Term
from ltx2rt.graph import trace as trace_graph
from ltx2rt.models.modulation import Levels
from ltx2rt.models.transformer import (
    ForwardShape,
    declare_context,
    declare_levels,
    declare_tables,
    streams,
    transformer,
)

CFG, STG, MODALITY, RESCALE = range(4)  # columns of the input `guidance` (modalities, scales)
STATE = ("video_latent", "audio_latent")  # inputs that the outputs of the same names replace from step to step
PER_STEP = ("sigmas",)  # inputs of which every step has its own
MIN_STD = 1e-5  # survives float16, unlike 1e-8


@dataclass(frozen=True)
class Branches:
    """Which guidance branches run besides the conditional one."""

    uncond: bool = False
    perturbed: bool = False
    isolated: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        found = ["cond"]
        found += [name for name in ("uncond", "perturbed", "isolated") if getattr(self, name)]
        return tuple(found)

    @classmethod
    def of(cls, guidance: np.ndarray) -> Branches:
        """The branches that `guidance` [2, 4] needs: those whose scale is not neutral for some modality."""
        g = np.asarray(guidance, np.float32)
        return cls(
            uncond=not np.allclose(g[:, CFG], 1),
            perturbed=not np.allclose(g[:, STG], 0),
            isolated=not np.allclose(g[:, MODALITY], 1),
        )


@dataclass(frozen=True)
class StepShape:
    """What shapes a guided-step graph besides its config: the key under which programs are kept."""

    branches: Branches
    video_tokens: int
    audio_tokens: int
    text_tokens: int
    coordinates: tuple[int, ...]
    video_levels: int = 1
    audio_levels: int = 1
    rule: str = "C"
    videos: int = 1


def mask_feeds(name: str, mask: np.ndarray) -> dict[str, np.ndarray]:
    """`{name}_mask`, `{name}_levels` [K] and, if K > 1, `{name}_level_index` [T]; mask [T]: 1 generate, 0 keep."""
    mask = np.asarray(mask, np.float32)
    levels, index = np.unique(mask, return_inverse=True)
    feeds = {f"{name}_mask": mask, f"{name}_levels": levels}
    if len(levels) > 1:
        feeds[f"{name}_level_index"] = index.astype(np.int32)
    return feeds


def _std(o: Ops, x: Term, over: tuple[str, ...]) -> Term:
    """Unbiased standard deviation per sample."""
    n = math.prod(map(x.type.size, over))
    return o.sqrt(o.sum(o.square(x - o.mean(x, over=over)), over=over) / max(n - 1, 1))


def _guide(o: Ops, x0: Term, names: tuple[str, ...], scales: list[Term], tokens: str) -> Term:
    """The guided x0 (videos, tokens, C) of one modality from all branches (branches, videos, tokens, C)."""
    c = o.at(x0, axis="branches", index=0)
    pred = c
    for name, column in (("uncond", CFG), ("perturbed", STG), ("isolated", MODALITY)):
        if name in names:
            scale = scales[column] if column == STG else scales[column] - 1
            pred += (c - o.at(x0, axis="branches", index=names.index(name))) * scale
    ratio = _std(o, c, (tokens, "C")) / o.clamp(_std(o, pred, (tokens, "C")), low=MIN_STD)
    r = scales[RESCALE]
    return pred * (ratio * r + (1 - r))


def _keeps(
    o: Ops, config: TransformerConfig, names: tuple[str, ...], scales: dict[str, list[Term]], videos: int
) -> dict[str, Term]:
    """Keep masks (layers, B): STG's value pass-through in `stg_blocks`, cross-attention off in the isolated branch."""
    if "perturbed" not in names and "isolated" not in names:
        return {}
    n = config.num_layers
    blocks = o.input("stg_blocks", "float32", layers=n)
    zeros, ones = (o.full(value, "float32", layers=n) for value in (0.0, 1.0))

    def columns(branch: str, inside: Term) -> Term:
        keep = o.stack(*(inside if name == branch else ones for name in names), axis="branches", dim=1)
        return o.merge(o.expand(keep, axis="videos", size=videos), axes=("branches", "videos"), into="B")

    keeps = {}
    for s in ("video", "audio"):
        active = o.select(scales[s][STG], blocks, zeros)  # a modality whose own stg is 0 is not perturbed
        keeps[f"{s}_self_keep"] = columns("perturbed", 1 - active)
    cross = columns("isolated", zeros)
    return keeps | {"a2v_keep": cross, "v2a_keep": cross}


def trace(config: TransformerConfig, s: StepShape, dtype: str) -> Graph:
    """Inputs, for a modality m of video and audio, all float32 unless said:

    m_latent (videos, tokens, C); m_clean (tokens, C); m_mask (tokens), its values m_levels (K) and, if K > 1,
    m_level_index int32 (tokens); m_context (1 or 2, text, C'): positive, then negative if the uncond branch runs;
    sigmas (2): from, to; guidance (2, 4): rows video, audio; columns cfg, stg, modality, rescale (if any branch runs
    besides cond);
    stg_blocks (layers): 1 = perturbed (if such a branch runs); the RoPE tables.
    Outputs: video_latent, audio_latent, video_x0, audio_x0 (videos, tokens, C).
    """

    def model(o: Ops) -> dict[str, Term]:
        names = s.branches.names
        video, audio = pair = streams(config)

        def branched(x: Term) -> Term:
            """Every branch starts from the same."""
            return o.expand(x, axis="branches", size=len(names), before=x.type.axes[0])

        def batched(x: Term) -> Term:
            """(branches, ...) or (branches, videos, ...) as the transformer's batch."""
            if "videos" not in x.type.axes:
                x = o.expand(x, axis="videos", size=s.videos, before=x.type.axes[1])
            return o.merge(x, axes=("branches", "videos"), into="B")

        def everywhere(x: Term) -> Term:
            """A scalar or (levels) for all of the batch."""
            return o.expand(x, axis="B", size=len(names) * s.videos, before=x.type.axes[0] if x.type.axes else None)

        pairs = o.input("sigmas", "float32", ends=2)
        sigma, target = (o.at(pairs, axis="ends", index=i) for i in range(2))
        scales: dict[str, list[Term]] = {}
        if len(names) > 1:
            guidance = o.input("guidance", "float32", modalities=2, scales=4)
            for i, stream in enumerate(pair):
                row = o.at(guidance, axis="modalities", index=i)
                scales[stream.name] = [o.at(row, axis="scales", index=j) for j in range(4)]
        x, clean, mask, levels, contexts = {}, {}, {}, {}, {}
        for stream, size, count in ((video, s.video_tokens, s.video_levels), (audio, s.audio_tokens, s.audio_levels)):
            n, axes = stream.name, {stream.tokens: size}
            x[n] = o.input(f"{n}_latent", "float32", videos=s.videos, **axes, C=stream.channels)
            clean[n] = o.input(f"{n}_clean", "float32", **axes, C=stream.channels)
            mask[n] = o.input(f"{n}_mask", "float32", **axes)
            own = declare_levels(o, n, count, **axes)
            levels[n] = Levels(everywhere(own.values * sigma), own.index)
            context = declare_context(o, config, stream, contexts=2 if s.branches.uncond else 1, text=s.text_tokens)
            context = o.rename(context, names={"contexts": "branches"})
            chosen = [int(name == "uncond") for name in names]
            rows = [o.slice(context, axis="branches", start=i, stop=i + 1) for i in chosen]
            contexts[n] = batched(o.concat(*rows, axis="branches"))
        shape = (len(names) * s.videos, s.video_tokens, s.audio_tokens, s.text_tokens, s.coordinates)
        tables = declare_tables(o, config, ForwardShape(*shape))
        velocity = transformer(
            o, config,
            latents={n: batched(branched(x[n])) for n in x},
            levels=levels,
            sigmas={n: everywhere(sigma) for n in x},
            contexts=contexts,
            tables=tables,
            keeps=_keeps(o, config, names, scales, s.videos),
            bias=None,
            rule=s.rule,
        )  # fmt: skip
        outputs = {}
        for stream in pair:
            n, tokens = stream.name, stream.tokens
            v = o.split(velocity[n], axis="B", into={"branches": len(names), "videos": s.videos})
            x0 = branched(x[n]) - v * (mask[n] * sigma)
            x0 = _guide(o, x0, names, scales[n], tokens) if len(names) > 1 else o.at(x0, axis="branches", index=0)
            x0 = x0 * mask[n] + clean[n] * (1 - mask[n])
            outputs[f"{n}_latent"] = x[n] + (x[n] - x0) / sigma * (target - sigma)
            outputs[f"{n}_x0"] = x0
        return {k: outputs[k] for k in ("video_latent", "audio_latent", "video_x0", "audio_x0")}

    return trace_graph("guided-step", model, dtype)
