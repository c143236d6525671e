"""The networks of the family, one row each: which parts of a checkpoint it reads, how it is traced,
from which sizes.

Decides nothing about devices: which axes of a network are split where is in the placement's
profiles, under the name in `rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.graph import Graph
from ltx2rt.models import (
    audio_vae,
    connectors,
    diffusion_decoder,
    duration_head,
    guided_step,
    text_encoder,
    train_step,
    transformer,
    upsampler,
    video_vae,
    vocoder,
)
from ltx2rt.models.geometry import Geometry, audio_positions, pixel_frames, video_positions

PROMPT_TOKENS = 1024  # the length every released pipeline pads to


@dataclass(frozen=True)
class Network:
    """One network.

    parts: parts of the checkpoint with its tensors. trace(config, sizes, dtype): its graph.
    sizes(config, geometry, branches): the `sizes` of a whole clip. rules: the network that gives it
    weights and placement. branches: guidance branches in its sizes, None if its mesh is
    not a stage's. dtype: its own whatever the run's is. shared(sizes, devices): the sizes where so
    many devices share it.
    """

    name: str
    parts: tuple[str, ...]
    trace: Callable[[ModelConfig, Any, str], Graph]
    sizes: Callable[[ModelConfig, Geometry, int], Hashable]
    rules: str
    branches: Callable[[Any], int] | None = None
    dtype: str | None = None
    partial: Callable[[Any], str] = lambda sizes: ""
    shared: Callable[[Any, int], Any] = lambda sizes, devices: sizes


def _sized(
    trace: Callable[..., Graph], part: str
) -> Callable[[ModelConfig, tuple[int, ...], str], Graph]:
    """A trace by the shape (batch, channels, frames, rows, columns) of its input."""
    return lambda c, s, dtype: trace(c.need(part), s[0], *s[2:], dtype)


def _step(c: ModelConfig, g: Geometry, branches: int) -> guided_step.StepShape:
    """Sizes of a step without conditionings. 1 branch is the conditional one; then the negative
    prompt, the perturbed and the isolated branch join. Raises InputError."""
    if not 1 <= branches <= 4:
        raise InputError(f"--branches: {branches}, expected 1 to 4")
    feeds = transformer.position_feeds(c.transformer, video_positions(g), audio_positions(g))
    return guided_step.StepShape(
        branches=guided_step.Branches(*(branches > i for i in (1, 2, 3))),
        video_tokens=g.num_video_tokens,
        audio_tokens=g.audio_latents,
        text_tokens=PROMPT_TOKENS,
        coordinates=transformer.coordinate_counts(feeds),
        stg_blocks=c.release.stg_blocks(c.transformer.num_layers) if branches > 2 else (),
    )


def _forward(c: ModelConfig, g: Geometry, branches: int) -> transformer.ForwardShape:
    s = _step(c, g, branches)
    return transformer.ForwardShape(
        batch=branches,
        video_tokens=s.video_tokens,
        audio_tokens=s.audio_tokens,
        text_tokens=s.text_tokens,
        coordinates=s.coordinates,
        perturbed=branches > 2,
    )


def _streams(sizes: guided_step.StepShape | transformer.ForwardShape) -> str:
    return "" if len(sizes.streams) == 2 else sizes.streams[0]


def _pixels(c: ModelConfig, g: Geometry, branches: int) -> tuple[int, ...]:
    return (1, 3, pixel_frames(g.frames, g.time_factor), *g.size_px)


CATALOG = {
    row.name: row
    for row in (
        Network(
            "text-encoder", ("gemma", "text"),
            lambda c, s, dtype: text_encoder.trace(c.need("gemma"), c.text, *s, dtype),
            lambda *_: (2, PROMPT_TOKENS), "text-encoder",
        ),
        Network(  # behind features that another program has made
            "text-connectors", ("text",),
            lambda c, s, dtype: connectors.trace_contexts(c.text, *s, dtype),
            lambda *_: (1, PROMPT_TOKENS), "text-encoder", partial=lambda _: "connectors",
        ),
        Network(
            "transformer", ("transformer",),
            lambda c, s, dtype: transformer.trace(c.transformer, s, dtype), _forward,
            "transformer", lambda s: s.batch, partial=_streams,
        ),
        Network(
            "guided-step", ("transformer",),
            lambda c, s, dtype: guided_step.trace(c.transformer, s, dtype), _step,
            "transformer", lambda s: len(s.branches.names), partial=_streams,
        ),
        Network(
            "train-step", ("transformer",),
            lambda c, s, dtype: train_step.trace(c.transformer, s, dtype),
            lambda c, g, _: _forward(c, g, 1),
            "transformer", lambda s: 1, partial=_streams,
        ),
        Network(
            "video-encoder", ("video_vae",), _sized(video_vae.trace_encoder, "video_vae"), _pixels,
            "video-encoder"
        ),
        Network(
            "video-decoder", ("video_vae",), _sized(video_vae.trace_decoder, "video_vae"),
            lambda c, g, branches: g.video_shape, "video-decoder",
        ),
        Network(
            "upsampler", ("upsampler",), _sized(upsampler.trace, "upsampler"),
            lambda c, g, branches: g.video_shape, "upsampler",
        ),
        Network(
            "temporal-upsampler", ("temporal_upsampler",), _sized(upsampler.trace, "temporal_upsampler"),
            lambda c, g, branches: g.video_shape, "temporal-upsampler",
        ),
        Network(
            "diffusion-features", ("diffusion_decoder",),
            lambda c, s, dtype: diffusion_decoder.trace_features(
                diffusion_decoder.config_of(c), s[0], *s[2:], dtype
            ),
            lambda c, g, branches: g.video_shape, "diffusion-features",
            shared=lambda s, devices: (*s, devices),
        ),
        Network(
            "diffusion-decoder", ("diffusion_decoder",),
            lambda c, s, dtype: diffusion_decoder.trace(diffusion_decoder.config_of(c), s, dtype),
            lambda c, g, branches: diffusion_decoder.whole(
                diffusion_decoder.config_of(c), 1, (g.frames, g.rows, g.columns)
            ),
            "diffusion-decoder",
        ),
        Network(  # both of them, in slabs
            "diffusion-slabs", ("diffusion_decoder",),
            lambda c, s, dtype: diffusion_decoder.trace_slabs(
                diffusion_decoder.config_of(c), s[2:5], *s[5:], dtype
            ),
            lambda c, g, branches: g.video_shape, "diffusion-slabs",
            shared=lambda s, devices: (*s, devices),
        ),
        Network(
            "audio-encoder", ("audio_vae",),
            lambda c, s, dtype: audio_vae.trace_encoder(c.audio_vae, s[0], s[2], dtype),
            lambda c, g, branches: g.mel_shape(c.audio_vae), "audio-encoder",
        ),
        Network(
            "audio-decoder", ("audio_vae",),
            lambda c, s, dtype: audio_vae.trace_decoder(c.audio_vae, s[0], s[2], dtype),
            lambda c, g, branches: g.audio_shape, "audio-decoder",
        ),
        Network(  # bfloat16 is audible in the vocoder
            "vocoder", ("vocoder",), lambda c, s, dtype: vocoder.trace(c.vocoder, s[0], s[2],
            dtype),
            lambda c, g, branches: g.mel_shape(c.audio_vae), "vocoder", dtype="float32",
        ),
        Network(  # reads the positive prompt's contexts
            "duration-head", ("duration_head",),
            lambda c, s, dtype: duration_head.trace(c.need("duration_head"), *s, dtype),
            lambda *_: (1, PROMPT_TOKENS), "duration-head", dtype="float32",
        ),
    )
}  # fmt: skip


def network(name: str) -> Network:
    """Raises InputError naming the known ones."""
    if name not in CATALOG:
        raise InputError(f"no network is called {name!r}; known: {', '.join(CATALOG)}")
    return CATALOG[name]
