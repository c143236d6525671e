"""Configuration files of both layouts <-> the dataclasses of `ltx2rt.config`.

Decides which keys matter. A key that shapes a network and is absent, or holds something no released
LTX-2.0/2.3 file holds, is an InputError naming it: the customary defaults (interleaved RoPE,
float32 grid, multiplier 1, timestep conditioning on) are each wrong for these checkpoints. Keys
that change nothing are ignored.
"""

from __future__ import annotations

from typing import Any

from ltx2rt.config import Gemma4Config, GemmaConfig, ModelConfig
from ltx2rt.weights.configs import audio, gemma3, gemma4, transformer, video_vae
from ltx2rt.weights.configs.keys import Keys


def official_json(config: ModelConfig) -> dict[str, Any]:
    """The object under `__metadata__["config"]` of the official single file."""
    return {
        "transformer": transformer.official_json(config.transformer, config.text),
        "vae": video_vae.official_json(config.video_vae),
        "scheduler": {
            "_class_name": "RectifiedFlowScheduler",
            "num_train_timesteps": 1000,
            "sampler": "LinearQuadratic",
        },
        "audio_vae": audio.official_json(config.audio_vae),
        "vocoder": audio.official_vocoder_json(config.vocoder),
    }


def gemma(keys: Keys) -> GemmaConfig | Gemma4Config:
    """config.json of a Gemma folder, or the `gemma_config` of a text-encoder file."""
    is_4 = keys.get("model_type", None) in gemma4.MODEL_TYPES
    return gemma4.gemma4(keys) if is_4 else gemma3.gemma3(keys)
