"""Which tensors a checkpoint of a given config holds, read off the graphs.

Decides nothing about values or files.
"""

from __future__ import annotations

from ltx2rt.config import DiffusionDecoderConfig, ModelConfig
from ltx2rt.graph import Graph
from ltx2rt.models import (
    audio_vae,
    connectors,
    diffusion_decoder,
    duration_head,
    text_encoder,
    transformer,
    upsampler,
    video_vae,
    vocoder,
)

Shapes = dict[str, dict[str, tuple[int, ...]]]  # component -> canonical name -> shape


def networks(config: ModelConfig) -> Shapes:
    """What the graphs read, traced at the smallest legal inputs; without Gemma or upsampler where there is none."""
    c, space = config, config.video_vae.space_factor
    tokens = max(c.text.video.num_registers, c.text.audio.num_registers)
    structure = transformer.ForwardShape(1, 1, 1, tokens, (1,) * len(transformer.TABLES))
    graphs = {
        "transformer": [transformer.trace(c.transformer, structure, "float32")],
        "text": [connectors.trace(c.text, 1, tokens, "float32")],
        "gemma": [text_encoder.trace_states(c.gemma, 1, tokens, "float32")] if c.gemma else [],
        "video_vae": [
            video_vae.trace_encoder(c.video_vae, 1, 1, space, space, "float32"),
            video_vae.trace_decoder(c.video_vae, 1, 2, 2, 2, "float32"),
        ],
        "diffusion_decoder": _diffusion_decoder(c.diffusion_decoder) if c.diffusion_decoder else [],
        "audio_vae": [
            audio_vae.trace_encoder(c.audio_vae, 1, c.audio_vae.time_factor + 1, "float32"),
            audio_vae.trace_decoder(c.audio_vae, 1, 2, "float32"),
        ],
        "vocoder": [vocoder.trace(c.vocoder, 1, 5, "float32")],
        "duration_head": [duration_head.trace(c.duration_head, 1, 2, "float32")]
        if c.duration_head
        else [],
        "upsampler": [upsampler.trace(c.upsampler, 1, 1, 2, 2, "float32")] if c.upsampler else [],
        "temporal_upsampler": (
            [upsampler.trace(c.temporal_upsampler, 1, 1, 2, 2, "float32")]
            if c.temporal_upsampler
            else []
        ),
    }
    return {
        component: {
            name: spec.shape for graph in traced for name, spec in graph.parameters().items()
        }
        for component, traced in graphs.items()
        if traced
    }


def _diffusion_decoder(config: DiffusionDecoderConfig) -> list[Graph]:
    shape = diffusion_decoder.whole(config, 1, (1, 1, 1))
    return [
        diffusion_decoder.trace_features(config, 1, 1, 1, 1, "float32"),
        diffusion_decoder.trace(config, shape, "float32"),
    ]
