"""Configuration files of both layouts <-> the dataclasses of `ltx2rt.config`.

Decides which keys matter. A key that shapes a network and is absent, or holds something no released
LTX-2.0/2.3 file holds, is an InputError naming it: the customary defaults (interleaved RoPE,
float32 grid, multiplier 1, timestep conditioning on) are each wrong for these checkpoints. Keys
that change nothing are ignored.
"""
# ruff: noqa: F401  the functions of all parts, under one name

from __future__ import annotations

from typing import Any

from ltx2rt.config import Gemma4Config, GemmaConfig, ModelConfig
from ltx2rt.release import version_tuple
from ltx2rt.weights.configs.audio import (
    diffusers_audio_vae,
    diffusers_audio_vae_json,
    diffusers_vocoder,
    diffusers_vocoder_json,
    official_audio_vae,
    official_audio_vae_json,
    official_vocoder,
    official_vocoder_json,
)
from ltx2rt.weights.configs.gemma3 import (
    GEMMA_SIZES,
    check_gemma,
    gemma3,
    gemma_json,
    gguf_gemma3,
    plain_gemma3,
)
from ltx2rt.weights.configs.gemma4 import MODEL_TYPES, gemma4, gemma4_json, towers_json
from ltx2rt.weights.configs.keys import ConfigSource, Keys, parse_json
from ltx2rt.weights.configs.latent_upsampler import (
    check_upsampler,
    read_upsampler,
    upsampler,
    upsampler_json,
    upsampler_kind,
)
from ltx2rt.weights.configs.transformer import (
    KEYFRAME_VECTOR,
    check_connectors,
    diffusers_text,
    diffusers_text_json,
    diffusers_transformer,
    diffusers_transformer_json,
    official_text,
    official_transformer,
    official_transformer_json,
)
from ltx2rt.weights.configs.video_vae import (
    diffusers_video_vae,
    diffusers_video_vae_json,
    official_diffusion_vae,
    official_diffusion_vae_json,
    official_video_vae,
    official_video_vae_json,
)


def official_json(config: ModelConfig) -> dict[str, Any]:
    """The object under `__metadata__["config"]` of the official single file."""
    scheduler = {
        "_class_name": "RectifiedFlowScheduler",
        "num_train_timesteps": 1000,
        "sampler": "LinearQuadratic",
    }
    return {
        "transformer": official_transformer_json(config.transformer, config.text),
        "vae": official_video_vae_json(config.video_vae),
        "scheduler": scheduler,
        "audio_vae": official_audio_vae_json(config.audio_vae),
        "vocoder": official_vocoder_json(config.vocoder),
    }


def gemma(keys: Keys) -> GemmaConfig | Gemma4Config:
    """config.json of a Gemma folder, or the `gemma_config` of a text-encoder file."""
    return gemma4(keys) if keys.get("model_type", None) in MODEL_TYPES else gemma3(keys)
