"""Configuration files of both layouts <-> the dataclasses of `ltx2rt.config`.

Decides which keys matter. A key that shapes a network and is absent, or holds something no released LTX-2.0/2.3
file holds, is an InputError naming it: the customary defaults (interleaved RoPE, float32 grid, multiplier 1,
timestep conditioning on) are each wrong for these checkpoints. Keys that change nothing are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

from ltx2rt.config import (
    AudioVaeConfig,
    ConnectorConfig,
    GeneratorConfig,
    ModelConfig,
    TextConfig,
    TransformerConfig,
    UpsamplerConfig,
    VaeStage,
    VideoVaeConfig,
    VocoderConfig,
)
from ltx2rt.config import GemmaConfig as GemmaConfig
from ltx2rt.errors import InputError

MISSING = object()
STEREO = 2


class Keys:
    """A JSON object that knows where it came from: every access names the key it misses."""

    def __init__(self, data: Any, where: str):
        if not isinstance(data, Mapping):
            raise InputError(f"{where}: expected a JSON object, found {type(data).__name__}")
        self.data, self.where = data, where

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def inner(self, key: str) -> Keys:
        return Keys(self.need(key), f"{self.where}.{key}")

    def need(self, key: str) -> Any:
        if key not in self.data:
            raise InputError(f"{self.where}: required key {key} is absent; pass a checkpoint with its full metadata")
        return self.data[key]

    def get(self, key: str, default: Any) -> Any:
        return self.data.get(key, default)

    def number(self, key: str, kind: type = int, default: Any = MISSING) -> Any:
        """A number > 0 as `kind` (int: integral)."""
        value = self.need(key) if default is MISSING else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or kind(value) != value or value <= 0:
            raise InputError(f"{self.where}: {key} = {value!r}, expected a positive {kind.__name__}")
        return kind(value)

    def flag(self, key: str, default: Any = MISSING) -> bool:
        value = self.need(key) if default is MISSING else self.get(key, default)
        if not isinstance(value, bool):
            raise InputError(f"{self.where}: {key} = {value!r}, expected true or false")
        return value

    def sizes(self, key: str, length: int | None = None) -> tuple[int, ...]:
        value = self.need(key)
        if not isinstance(value, list | tuple) or not value or length not in (None, len(value)):
            raise InputError(f"{self.where}: {key} = {value!r}, expected {length or 'some'} integers")
        return tuple(Keys({key: item}, self.where).number(key) for item in value)

    def choice(self, key: str, known: Mapping[Any, Any], default: Any = MISSING) -> Any:
        value = self.need(key) if default is MISSING else self.get(key, default)
        if isinstance(value, list | dict) or value not in known:
            raise InputError(f"{self.where}: {key} = {value!r} is not supported, known: {', '.join(map(repr, known))}")
        return known[value]

    def must(self, **expected: Any) -> None:
        """Keys that have to be there with this value."""
        for key, value in expected.items():
            if self.need(key) != value:
                raise InputError(f"{self.where}: {key} = {self.data[key]!r} is not supported, expected {value!r}")

    def may(self, **expected: Any) -> None:
        """Keys whose absence means this value."""
        self.must(**{key: value for key, value in expected.items() if key in self.data})


def parse_json(text: str | bytes, where: str) -> Keys:
    try:
        return Keys(json.loads(text), where)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where}: not valid JSON: {error}") from error


def version_tuple(text: str | None) -> tuple[int, ...]:
    """ "2.3.0" -> (2, 3, 0): the leading integers, "-" read as "."; () if there are none."""
    parts: list[int] = []
    for part in (text or "").strip().strip('"').replace("-", ".").split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)


# ---- transformer and text -------------------------------------------------------------------------------------------

CAPTION_KEYS = {  # all four: the 2.3 feature extractor; none: the 2.0 one
    "caption_proj_before_connector": True,
    "caption_projection_first_linear": False,
    "caption_proj_input_norm": False,
    "caption_projection_second_linear": False,
}
OFFICIAL_TRANSFORMER_FIXED = {
    "rope_type": "split",
    "use_middle_indices_grid": True,
    "causal_temporal_positioning": True,
    "qk_norm": "rms_norm",
}
OFFICIAL_TRANSFORMER_USUAL = {
    "dropout": 0.0,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "use_linear_projection": False,
    "only_cross_attention": False,
    "double_self_attention": False,
    "upcast_attention": False,
    "share_ff": False,
    "norm_elementwise_affine": False,
    "cross_attention_norm": True,
    "av_cross_ada_norm": True,
    "use_audio_video_cross_attention": True,
    "standardization_norm": "rms_norm",
    "positional_embedding_type": "rope",
    "use_embeddings_connector": True,
    "connector_norm_output": True,
}
PRECISIONS = {"float64": True, "float32": False}


def official_transformer(keys: Keys) -> TransformerConfig:
    if keys.get("use_keyframes_abs_pos_embedding", False):
        raise InputError(
            f"{keys.where}: use_keyframes_abs_pos_embedding: LTX-2.5 is not supported, pass LTX-2.0 or 2.3"
        )
    keys.must(**OFFICIAL_TRANSFORMER_FIXED)
    keys.may(**OFFICIAL_TRANSFORMER_USUAL)
    heads = keys.number("num_attention_heads")
    keys.must(audio_num_attention_heads=heads)
    modulation = keys.flag("cross_attention_adaln", False)
    (audio_max_pos,) = keys.sizes("audio_positional_embedding_max_pos", 1)
    time, rows, columns = keys.sizes("positional_embedding_max_pos", 3)
    config = TransformerConfig(
        num_layers=keys.number("num_layers"),
        video_channels=keys.number("in_channels"),
        audio_channels=keys.number("audio_out_channels"),
        num_heads=heads,
        head_dim=keys.number("attention_head_dim"),
        audio_num_heads=heads,
        audio_head_dim=keys.number("audio_attention_head_dim"),
        caption_channels=keys.number("caption_channels"),
        caption_projection=not _caption_before_connector(keys),
        gated_attention=keys.flag("apply_gated_attention", False),
        text_modulation=modulation,
        prompt_adaln=modulation and keys.flag("use_prompt_adaln_single", True),
        ff_bias=keys.flag("ff_bias", True),
        audio_ff_bias=keys.flag("audio_ff_bias", True),
        rope_theta=keys.number("positional_embedding_theta", float),
        rope_max_pos=(time, rows, columns),
        audio_rope_max_pos=audio_max_pos,
        rope_float64_grid=keys.choice("frequencies_precision", PRECISIONS),
        timestep_scale=keys.number("timestep_scale_multiplier", float),
        av_gate_scale=keys.number("av_ca_timestep_scale_multiplier", float),
        norm_eps=keys.number("norm_eps", float),
    )
    keys.must(out_channels=config.video_channels)
    keys.may(audio_in_channels=config.audio_channels)
    keys.must(cross_attention_dim=config.width, audio_cross_attention_dim=config.audio_width)
    return config


def _caption_before_connector(keys: Keys) -> bool:
    present = {key: keys.data[key] for key in CAPTION_KEYS if key in keys}
    if present and present != CAPTION_KEYS:
        raise InputError(
            f"{keys.where}: {present} is no known feature extractor; expected none of them or {CAPTION_KEYS}"
        )
    return bool(present)


def official_text(keys: Keys, projection_in: int) -> TextConfig:
    """projection_in: input width of the text projection, = Gemma's hidden size x (layers + 1)."""
    hidden = keys.number("caption_channels")
    per_token = _caption_before_connector(keys)

    def connector(prefix: str) -> ConnectorConfig:
        def size(name: str) -> int:
            own = f"{prefix}connector_{name}"
            return keys.number(own if own in keys else f"connector_{name}")

        return ConnectorConfig(
            num_heads=size("num_attention_heads"),
            head_dim=size("attention_head_dim"),
            num_layers=size("num_layers"),
            num_registers=keys.number("connector_num_learnable_registers"),
            gated_attention=keys.flag("connector_apply_gated_attention", False),
            ff_bias=keys.flag("connector_ff_bias", True),
        )

    (max_pos,) = keys.sizes("connector_positional_embedding_max_pos", 1)
    return TextConfig(
        gemma_hidden=hidden,
        num_states=_num_states(hidden, projection_in, keys.where),
        per_token_norm=per_token,
        projection_bias=per_token,
        video=connector(""),
        audio=connector("audio_"),
        rope_theta=keys.number("positional_embedding_theta", float),
        rope_max_pos=max_pos,
        rope_float64_grid=keys.choice("frequencies_precision", PRECISIONS),
        norm_eps=keys.number("norm_eps", float),
    )


def _num_states(hidden: int, projection_in: int, where: str) -> int:
    if projection_in % hidden:
        raise InputError(
            f"{where}: the text projection takes {projection_in}, no multiple of caption_channels = {hidden}"
        )
    return projection_in // hidden


def official_transformer_json(transformer: TransformerConfig, text: TextConfig) -> dict[str, Any]:
    t, video, audio = transformer, text.video, text.audio
    out = {
        "_class_name": "AVTransformer3DModel",
        **OFFICIAL_TRANSFORMER_FIXED,
        **OFFICIAL_TRANSFORMER_USUAL,
        "attention_type": "default",
        "num_vector_embeds": None,
        "norm_num_groups": 32,
        "num_layers": t.num_layers,
        "in_channels": t.video_channels,
        "out_channels": t.video_channels,
        "audio_out_channels": t.audio_channels,
        "num_attention_heads": t.num_heads,
        "attention_head_dim": t.head_dim,
        "audio_num_attention_heads": t.audio_num_heads,
        "audio_attention_head_dim": t.audio_head_dim,
        "cross_attention_dim": t.width,
        "audio_cross_attention_dim": t.audio_width,
        "caption_channels": t.caption_channels,
        "positional_embedding_theta": t.rope_theta,
        "positional_embedding_max_pos": list(t.rope_max_pos),
        "audio_positional_embedding_max_pos": [t.audio_rope_max_pos],
        "frequencies_precision": "float64" if t.rope_float64_grid else "float32",
        "timestep_scale_multiplier": int(t.timestep_scale),
        "av_ca_timestep_scale_multiplier": t.av_gate_scale,
        "norm_eps": t.norm_eps,
        "connector_num_attention_heads": video.num_heads,
        "connector_attention_head_dim": video.head_dim,
        "connector_num_layers": video.num_layers,
        "connector_num_learnable_registers": video.num_registers,
        "connector_positional_embedding_max_pos": [text.rope_max_pos],
    }
    if not t.caption_projection:
        out |= CAPTION_KEYS | {
            "cross_attention_adaln": t.text_modulation,
            "apply_gated_attention": t.gated_attention,
            "connector_apply_gated_attention": video.gated_attention,
            "audio_connector_num_attention_heads": audio.num_heads,
            "audio_connector_attention_head_dim": audio.head_dim,
            "audio_connector_num_layers": audio.num_layers,
            "text_encoder_norm_type": "per_token_rms",
        }
    switches = {  # present only where they differ from what their absence means
        "use_prompt_adaln_single": t.prompt_adaln or not t.text_modulation,
        "ff_bias": t.ff_bias,
        "audio_ff_bias": t.audio_ff_bias,
        "connector_ff_bias": video.ff_bias,
    }
    return out | {key: value for key, value in switches.items() if not value}


DIFFUSERS_TRANSFORMER_FIXED = {"rope_type": "split", "causal_offset": 1, "vae_scale_factors": [8, 32, 32]}
DIFFUSERS_TRANSFORMER_USUAL = {
    "patch_size": 1,
    "patch_size_t": 1,
    "audio_patch_size": 1,
    "audio_patch_size_t": 1,
    "activation_fn": "gelu-approximate",
    "qk_norm": "rms_norm_across_heads",
    "norm_elementwise_affine": False,
    "attention_bias": True,
    "attention_out_bias": True,
}


def diffusers_transformer(keys: Keys) -> TransformerConfig:
    if keys.get("use_keyframes_abs_pos_embedding", False):
        raise InputError(
            f"{keys.where}: use_keyframes_abs_pos_embedding: LTX-2.5 is not supported, pass LTX-2.0 or 2.3"
        )
    keys.must(**DIFFUSERS_TRANSFORMER_FIXED)
    keys.may(**DIFFUSERS_TRANSFORMER_USUAL)
    gated, modulation = keys.flag("gated_attn", False), keys.flag("cross_attn_mod", False)
    keys.may(audio_gated_attn=gated, audio_cross_attn_mod=modulation)
    config = TransformerConfig(
        num_layers=keys.number("num_layers"),
        video_channels=keys.number("in_channels"),
        audio_channels=keys.number("audio_in_channels"),
        num_heads=keys.number("num_attention_heads"),
        head_dim=keys.number("attention_head_dim"),
        audio_num_heads=keys.number("audio_num_attention_heads"),
        audio_head_dim=keys.number("audio_attention_head_dim"),
        caption_channels=keys.number("caption_channels"),
        caption_projection=keys.flag("use_prompt_embeddings", True),
        gated_attention=gated,
        text_modulation=modulation,
        prompt_adaln=modulation and keys.flag("use_prompt_adaln_single", True),
        ff_bias=keys.flag("ff_bias", True),
        audio_ff_bias=keys.flag("audio_ff_bias", True),
        rope_theta=keys.number("rope_theta", float),
        rope_max_pos=(keys.number("pos_embed_max_pos"), keys.number("base_height"), keys.number("base_width")),
        audio_rope_max_pos=keys.number("audio_pos_embed_max_pos"),
        rope_float64_grid=keys.flag("rope_double_precision"),
        timestep_scale=keys.number("timestep_scale_multiplier", float),
        av_gate_scale=keys.number("cross_attn_timestep_scale_multiplier", float),
        norm_eps=keys.number("norm_eps", float),
    )
    keys.may(out_channels=config.video_channels, audio_out_channels=config.audio_channels)
    keys.must(cross_attention_dim=config.width, audio_cross_attention_dim=config.audio_width)
    return config


def diffusers_transformer_json(t: TransformerConfig) -> dict[str, Any]:
    return {
        "_class_name": "LTX2VideoTransformer3DModel",
        **DIFFUSERS_TRANSFORMER_FIXED,
        **DIFFUSERS_TRANSFORMER_USUAL,
        "num_layers": t.num_layers,
        "in_channels": t.video_channels,
        "out_channels": t.video_channels,
        "audio_in_channels": t.audio_channels,
        "audio_out_channels": t.audio_channels,
        "num_attention_heads": t.num_heads,
        "attention_head_dim": t.head_dim,
        "audio_num_attention_heads": t.audio_num_heads,
        "audio_attention_head_dim": t.audio_head_dim,
        "cross_attention_dim": t.width,
        "audio_cross_attention_dim": t.audio_width,
        "caption_channels": t.caption_channels,
        "use_prompt_embeddings": t.caption_projection,
        "gated_attn": t.gated_attention,
        "audio_gated_attn": t.gated_attention,
        "cross_attn_mod": t.text_modulation,
        "audio_cross_attn_mod": t.text_modulation,
        "use_prompt_adaln_single": t.prompt_adaln or not t.text_modulation,
        "perturbed_attn": t.text_modulation,  # as the released configs: true in 2.3 only
        "ff_bias": t.ff_bias,
        "audio_ff_bias": t.audio_ff_bias,
        "rope_theta": t.rope_theta,
        "pos_embed_max_pos": t.rope_max_pos[0],
        "base_height": t.rope_max_pos[1],
        "base_width": t.rope_max_pos[2],
        "audio_pos_embed_max_pos": t.audio_rope_max_pos,
        "rope_double_precision": t.rope_float64_grid,
        "timestep_scale_multiplier": int(t.timestep_scale),
        "cross_attn_timestep_scale_multiplier": int(t.av_gate_scale),
        "norm_eps": t.norm_eps,
        "audio_scale_factor": 4,
        "audio_sampling_rate": 16000,
        "audio_hop_length": 160,
    }


def diffusers_text(keys: Keys, transformer: TransformerConfig) -> TextConfig:
    keys.must(rope_type="split")
    keys.may(causal_temporal_positioning=False)
    per_token = keys.flag("per_modality_projections", False)
    if per_token:
        keys.must(video_hidden_dim=transformer.width, audio_hidden_dim=transformer.audio_width)

    def connector(prefix: str) -> ConnectorConfig:
        return ConnectorConfig(
            num_heads=keys.number(f"{prefix}_connector_num_attention_heads"),
            head_dim=keys.number(f"{prefix}_connector_attention_head_dim"),
            num_layers=keys.number(f"{prefix}_connector_num_layers"),
            num_registers=keys.number(f"{prefix}_connector_num_learnable_registers"),
            gated_attention=keys.flag(f"{prefix}_gated_attn", False),
            ff_bias=True,
        )

    return TextConfig(
        gemma_hidden=keys.number("caption_channels"),
        num_states=keys.number("text_proj_in_factor"),
        per_token_norm=per_token,
        projection_bias=keys.flag("proj_bias", False),
        video=connector("video"),
        audio=connector("audio"),
        rope_theta=keys.number("rope_theta", float),
        rope_max_pos=keys.number("connector_rope_base_seq_len"),
        rope_float64_grid=keys.flag("rope_double_precision"),
        norm_eps=transformer.norm_eps,
    )


def diffusers_text_json(text: TextConfig, transformer: TransformerConfig) -> dict[str, Any]:
    out = {
        "_class_name": "LTX2TextConnectors",
        "caption_channels": text.gemma_hidden,
        "text_proj_in_factor": text.num_states,
        "per_modality_projections": text.per_token_norm,
        "proj_bias": text.projection_bias,
        "video_hidden_dim": transformer.width,
        "audio_hidden_dim": transformer.audio_width,
        "connector_rope_base_seq_len": text.rope_max_pos,
        "rope_theta": text.rope_theta,
        "rope_type": "split",
        "rope_double_precision": text.rope_float64_grid,
        "causal_temporal_positioning": False,
    }
    for prefix, connector in (("video", text.video), ("audio", text.audio)):
        out |= {
            f"{prefix}_connector_num_attention_heads": connector.num_heads,
            f"{prefix}_connector_attention_head_dim": connector.head_dim,
            f"{prefix}_connector_num_layers": connector.num_layers,
            f"{prefix}_connector_num_learnable_registers": connector.num_registers,
            f"{prefix}_gated_attn": connector.gated_attention,
        }
    return out


# ---- Gemma ----------------------------------------------------------------------------------------------------------

GEMMA_DEFAULTS = {  # Gemma3TextConfig's own: the released 12B config.json leaves these keys out
    "vocab_size": 262208,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def gemma(outer: Keys) -> GemmaConfig:
    """config.json of a Gemma 3 folder: with `text_config` or text only, RoPE spelled the old or the new way."""
    outer.choice("model_type", {"gemma3": 0, "gemma3_text": 0})
    keys = outer.inner("text_config") if "text_config" in outer else outer
    keys.may(
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        attn_logit_softcapping=None,
        use_bidirectional_attention=False,
    )

    def number(key: str, kind: type = int) -> Any:
        return keys.number(key, kind, GEMMA_DEFAULTS[key])

    def token(key: str) -> int:
        value = keys.get(key, outer.get(key, None))
        value = value[0] if isinstance(value, list) and value else value
        return GEMMA_DEFAULTS[key] if value is None else value

    num_layers = keys.number("num_hidden_layers")
    if (types := keys.get("layer_types", None)) is not None:
        known = {"sliding_attention": True, "full_attention": False}
        sliding = tuple(Keys({"layer_types": kind}, keys.where).choice("layer_types", known) for kind in types)
    else:
        pattern = keys.number("_sliding_window_pattern", default=number("sliding_window_pattern"))
        sliding = tuple((layer + 1) % pattern != 0 for layer in range(num_layers))
    if len(sliding) != num_layers:
        raise InputError(f"{keys.where}: layer_types has {len(sliding)} entries, num_hidden_layers is {num_layers}")
    theta, local_theta, factor = number("rope_theta", float), number("rope_local_base_freq", float), 1.0
    if (parameters := keys.get("rope_parameters", None)) is not None:
        both = Keys(parameters, f"{keys.where}.rope_parameters")
        local, scaling = both.inner("sliding_attention"), both.inner("full_attention")
        local.must(rope_type="default")
        theta, local_theta = scaling.number("rope_theta", float), local.number("rope_theta", float)
    else:
        scaling = Keys(keys.get("rope_scaling", None) or {"rope_type": "default"}, f"{keys.where}.rope_scaling")
    if scaling.choice("rope_type", {"linear": True, "default": False}):
        factor = scaling.number("factor", float)
    return GemmaConfig(
        vocab_size=number("vocab_size"),
        hidden_size=keys.number("hidden_size"),
        num_layers=num_layers,
        num_heads=keys.number("num_attention_heads"),
        num_kv_heads=keys.number("num_key_value_heads"),
        head_dim=number("head_dim"),
        intermediate_size=keys.number("intermediate_size"),
        layer_is_sliding=sliding,
        sliding_window=number("sliding_window"),
        rope_theta=theta,
        rope_scaling_factor=factor,
        rope_local_theta=local_theta,
        query_scale=number("query_pre_attn_scalar", float) ** -0.5,
        norm_eps=number("rms_norm_eps", float),
        pad_token_id=token("pad_token_id"),
        eos_token_id=token("eos_token_id"),
        bos_token_id=token("bos_token_id"),
    )


def gemma_json(g: GemmaConfig, vision: Mapping[str, Any]) -> dict[str, Any]:
    """The Gemma3ForConditionalGeneration form. vision: its vision_config."""
    full = {"rope_type": "linear", "factor": g.rope_scaling_factor, "rope_theta": g.rope_theta}
    tokens = {"pad_token_id": g.pad_token_id, "eos_token_id": g.eos_token_id, "bos_token_id": g.bos_token_id}
    text = {
        "model_type": "gemma3_text",
        "vocab_size": g.vocab_size,
        "hidden_size": g.hidden_size,
        "num_hidden_layers": g.num_layers,
        "num_attention_heads": g.num_heads,
        "num_key_value_heads": g.num_kv_heads,
        "head_dim": g.head_dim,
        "intermediate_size": g.intermediate_size,
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in g.layer_is_sliding],
        "sliding_window": g.sliding_window,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": g.rope_local_theta},
        },
        "query_pre_attn_scalar": round(g.query_scale**-2),
        "rms_norm_eps": g.norm_eps,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
        **tokens,
    }
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": dict(vision),
        "mm_tokens_per_image": 256 if vision.get("image_size") == 896 else 4,
        "boi_token_index": 7,
        "eoi_token_index": 8,
        "image_token_index": 9,
        "tie_word_embeddings": True,
        **tokens,
    }


def check_gemma(config: GemmaConfig, text: TextConfig, where: str) -> None:
    found = (config.hidden_size, config.num_layers + 1)
    if found != (text.gemma_hidden, text.num_states):
        raise InputError(
            f"{where}: a Gemma of hidden size {found[0]} with {config.num_layers} layers, but the checkpoint's text "
            f"projection takes hidden size {text.gemma_hidden} with {text.num_states - 1} layers; "
            f"pass that one with --text-encoder"
        )


# ---- video VAE ------------------------------------------------------------------------------------------------------

STRIDES = {"space": (1, 2, 2), "time": (2, 1, 1), "all": (2, 2, 2)}
STRIDE_WORDS = {stride: word for word, stride in STRIDES.items()}
DIFFUSERS_STRIDES = {"spatial": (1, 2, 2), "temporal": (2, 1, 1), "spatiotemporal": (2, 2, 2)}
DIFFUSERS_STRIDE_WORDS = {stride: word for word, stride in DIFFUSERS_STRIDES.items()}
PADDINGS = {"zeros": "zeros", "reflect": "reflect"}
OFFICIAL_VAE_FIXED = {"timestep_conditioning": False}
OFFICIAL_VAE_USUAL = {
    "_class_name": "CausalVideoAutoencoder",
    "dims": 3,
    "in_channels": 3,
    "out_channels": 3,
    "scaling_factor": 1.0,
    "norm_layer": "pixel_norm",
    "latent_log_var": "uniform",
    "use_quant_conv": False,
    "causal_decoder": False,
    "normalize_latent_channels": False,
}


def official_video_vae(keys: Keys) -> VideoVaeConfig:
    """Encoder blocks apply in the order listed, decoder blocks in the reverse order."""
    if keys.get("_class_name", None) == "CausalDiffusionVAE":
        raise InputError(f"{keys.where}: the diffusion VAE of LTX-2.5 is not supported, pass a convolutional one")
    keys.must(**OFFICIAL_VAE_FIXED)
    keys.may(**OFFICIAL_VAE_USUAL)
    channels = keys.number("encoder_base_channels")
    encoder = []
    for name, block in _blocks(keys, "encoder_blocks"):
        stage = _official_stage(name, block, "_res", channels, encode=True)
        encoder.append(stage)
        channels = stage.out_channels
    blocks = _blocks(keys, "decoder_blocks")[::-1]
    factors = [block.number("multiplier", default=1) for name, block in blocks if name != "res_x"]
    channels = keys.number("decoder_base_channels") * prod(factors)
    decoder = []
    for name, block in blocks:
        stage = _official_stage(name, block, "", channels, encode=False)
        decoder.append(stage)
        channels = stage.out_channels
    padding = keys.choice("spatial_padding_mode", PADDINGS | {None: None}, None)
    return VideoVaeConfig(
        latent_channels=keys.number("latent_channels"),
        patch_size=keys.number("patch_size"),
        encoder=tuple(encoder),
        decoder=tuple(decoder),
        encoder_padding=padding or keys.choice("encoder_spatial_padding_mode", PADDINGS, "zeros"),
        decoder_padding=padding or "reflect",
        encoder_causal=True,
        decoder_causal=False,
    )


def _blocks(keys: Keys, key: str) -> list[tuple[str, Keys]]:
    blocks = keys.need(key)
    where = f"{keys.where}.{key}"
    if not isinstance(blocks, list) or not all(isinstance(block, list) and len(block) == 2 for block in blocks):
        raise InputError(f"{where}: expected a list of [name, parameters]")
    out = [(str(n), Keys({"num_layers": p} if isinstance(p, int) else p, f"{where}.{n}")) for n, p in blocks]
    names = [name for name, _ in out]
    if not names or any((name == "res_x") != (i % 2 == 0) for i, name in enumerate(names)) or len(names) % 2 == 0:
        raise InputError(f"{where}: {names}, expected res_x blocks with one compress_* between each two")
    return out


def _official_stage(name: str, block: Keys, suffix: str, channels: int, *, encode: bool) -> VaeStage:
    block.may(inject_noise=False)
    if name == "res_x":
        return VaeStage("res", channels, channels, num_layers=block.number("num_layers"))
    names = {f"compress_{word}{suffix}": stride for word, stride in STRIDES.items()}
    stride = Keys({"block": name}, block.where).choice("block", names)
    multiplier = block.number("multiplier", default=2 if encode else 1)
    out = channels * multiplier if encode else channels // multiplier
    residual = not encode and name == "compress_all" and block.flag("residual", False)
    return VaeStage("sample", channels, out, stride=stride, residual=residual)


def official_video_vae_json(v: VideoVaeConfig) -> dict[str, Any]:
    def block(stage: VaeStage, suffix: str) -> list[Any]:
        if stage.kind == "res":
            return ["res_x", {"num_layers": stage.num_layers}]
        large, small = max(stage.channels, stage.out_channels), min(stage.channels, stage.out_channels)
        parameters = {"multiplier": large // small} | ({"residual": True} if stage.residual else {})
        return [f"compress_{STRIDE_WORDS[stage.stride]}{suffix}", parameters]

    out = OFFICIAL_VAE_USUAL | OFFICIAL_VAE_FIXED
    out |= {
        "latent_channels": v.latent_channels,
        "patch_size": v.patch_size,
        "encoder_blocks": [block(stage, "_res") for stage in v.encoder],
        "decoder_blocks": [block(stage, "") for stage in reversed(v.decoder)],
        "encoder_base_channels": v.encoder[0].channels,
        "decoder_base_channels": v.decoder[-1].channels,
    }
    if v.decoder_padding == "zeros":  # 2.0 has no such key: its absence means reflect in the decoder
        out["spatial_padding_mode"] = "zeros"
    return out


DIFFUSERS_VAE_USUAL = {"in_channels": 3, "out_channels": 3, "patch_size_t": 1, "scaling_factor": 1.0}


def diffusers_video_vae(keys: Keys) -> VideoVaeConfig:
    """The encoder's first width is the number of latent channels; decoder lists are reversed except upsample_type."""
    keys.may(**DIFFUSERS_VAE_USUAL)
    keys.must(timestep_conditioning=False)
    latent = keys.number("latent_channels")

    def per_stage(key: str, count: int, default: Any) -> list[Any]:
        value = keys.get(key, default)
        value = value if isinstance(value, list | tuple) else [value] * count
        if len(value) != count:
            raise InputError(f"{keys.where}: {key} has {len(value)} entries, expected {count}")
        return list(value)

    def strides(key: str, count: int) -> list[tuple[int, int, int]]:
        words = per_stage(key, count, keys.need(key))
        return [Keys({key: word}, keys.where).choice(key, DIFFUSERS_STRIDES) for word in words]

    widths, layers = keys.sizes("block_out_channels"), keys.sizes("layers_per_block")
    encoder, channels = [], latent
    for width, num_layers, stride in zip(widths, layers, strides("downsample_type", len(widths)), strict=False):
        encoder.append(VaeStage("res", channels, channels, num_layers=num_layers))
        encoder.append(VaeStage("sample", channels, width, stride=stride))
        channels = width
    encoder.append(VaeStage("res", channels, channels, num_layers=layers[-1]))

    widths = keys.sizes("decoder_block_out_channels")[::-1]
    count = len(widths)
    decoder_layers = keys.sizes("decoder_layers_per_block")[::-1]
    factors = per_stage("upsample_factor", count, keys.sizes("upsample_factor"))[::-1]
    residuals = per_stage("upsample_residual", count, keys.need("upsample_residual"))[::-1]
    if len(layers) != len(encoder) // 2 + 1 or len(decoder_layers) != count + 1:
        raise InputError(f"{keys.where}: layers_per_block must have one entry more than block_out_channels")
    for key in ("spatio_temporal_scaling", "decoder_spatio_temporal_scaling"):
        if not all(per_stage(key, count if key.startswith("decoder") else len(encoder) // 2, True)):
            raise InputError(f"{keys.where}: {key} = {keys.data[key]!r} is not supported, expected all true")
    if any(per_stage("decoder_inject_noise", count + 1, False)):
        raise InputError(f"{keys.where}: decoder_inject_noise is not supported, expected all false")
    channels = widths[0]
    decoder = [VaeStage("res", channels, channels, num_layers=decoder_layers[0])]
    for i, stride in enumerate(strides("upsample_type", count)):
        out = widths[i] // factors[i]
        if channels != out * factors[i]:
            raise InputError(
                f"{keys.where}: decoder stage {i} gets {channels} channels, its lists say {out * factors[i]}"
            )
        decoder.append(VaeStage("sample", channels, out, stride=stride, residual=bool(residuals[i])))
        decoder.append(VaeStage("res", out, out, num_layers=decoder_layers[i + 1]))
        channels = out
    return VideoVaeConfig(
        latent_channels=latent,
        patch_size=keys.number("patch_size"),
        encoder=tuple(encoder),
        decoder=tuple(decoder),
        encoder_padding=keys.choice("encoder_spatial_padding_mode", PADDINGS),
        decoder_padding=keys.choice("decoder_spatial_padding_mode", PADDINGS),
        encoder_causal=keys.flag("encoder_causal"),
        decoder_causal=keys.flag("decoder_causal"),
    )


def diffusers_video_vae_json(v: VideoVaeConfig) -> dict[str, Any]:
    if v.encoder[0].channels != v.latent_channels:
        raise InputError(
            f"diffusers ties the encoder's first width to the latent channels, {v.latent_channels}; "
            f"found {v.encoder[0].channels}"
        )
    downs, ups = v.encoder[1::2], v.decoder[1::2]
    return {
        "_class_name": "AutoencoderKLLTX2Video",
        **DIFFUSERS_VAE_USUAL,
        "latent_channels": v.latent_channels,
        "patch_size": v.patch_size,
        "block_out_channels": [stage.out_channels for stage in downs],
        "down_block_types": ["LTX2VideoDownBlock3D"] * len(downs),
        "layers_per_block": [stage.num_layers for stage in v.encoder[::2]],
        "spatio_temporal_scaling": [True] * len(downs),
        "downsample_type": [DIFFUSERS_STRIDE_WORDS[stage.stride] for stage in downs],
        "decoder_block_out_channels": [stage.channels for stage in reversed(ups)],
        "decoder_layers_per_block": [stage.num_layers for stage in v.decoder[::-2]],
        "decoder_spatio_temporal_scaling": [True] * len(ups),
        "decoder_inject_noise": [False] * (len(ups) + 1),
        "upsample_type": [DIFFUSERS_STRIDE_WORDS[stage.stride] for stage in ups],
        "upsample_factor": [stage.channels // stage.out_channels for stage in reversed(ups)],
        "upsample_residual": [stage.residual for stage in reversed(ups)],
        "timestep_conditioning": False,
        "encoder_causal": v.encoder_causal,
        "decoder_causal": v.decoder_causal,
        "encoder_spatial_padding_mode": v.encoder_padding,
        "decoder_spatial_padding_mode": v.decoder_padding,
        "resnet_norm_eps": 1e-6,
        "spatial_compression_ratio": v.space_factor,
        "temporal_compression_ratio": v.time_factor,
    }


# ---- audio VAE ------------------------------------------------------------------------------------------------------

AUDIO_FIXED = {"double_z": True, "norm_type": "pixel", "causality_axis": "height"}
AUDIO_USUAL = {"mid_block_add_attention": False, "dropout": 0.0, "in_channels": STEREO}


def official_audio_vae(keys: Keys) -> AudioVaeConfig:
    params = keys.inner("model").inner("params")
    dd = params.inner("ddconfig")
    dd.must(**AUDIO_FIXED)
    dd.may(**AUDIO_USUAL)
    if dd.get("attn_resolutions", None):
        raise InputError(
            f"{dd.where}: attn_resolutions = {dd.data['attn_resolutions']} is not supported, expected none"
        )
    return AudioVaeConfig(
        base_channels=dd.number("ch"),
        channel_multipliers=dd.sizes("ch_mult"),
        num_res_blocks=dd.number("num_res_blocks"),
        latent_channels=dd.number("z_channels"),
        out_channels=dd.number("out_ch"),
        mel_bins=dd.number("mel_bins"),
        sample_rate=params.number("sampling_rate"),
        mel_hop=keys.inner("preprocessing").inner("stft").number("hop_length"),
    )


def official_audio_vae_json(a: AudioVaeConfig) -> dict[str, Any]:
    ddconfig = AUDIO_FIXED | AUDIO_USUAL
    ddconfig |= {
        "ch": a.base_channels,
        "ch_mult": list(a.channel_multipliers),
        "num_res_blocks": a.num_res_blocks,
        "z_channels": a.latent_channels,
        "out_ch": a.out_channels,
        "mel_bins": a.mel_bins,
        "resolution": 256,
        "downsample_time": False,
        "attn_resolutions": [],
    }
    stft = {"filter_length": 1024, "hop_length": a.mel_hop, "win_length": 1024, "causal": True}
    audio = {"sampling_rate": a.sample_rate, "max_wav_value": 32768.0, "duration": 5.12, "stereo": True}
    mel = {"n_mel_channels": a.mel_bins, "mel_fmin": 0, "mel_fmax": a.sample_rate // 2}
    return {
        "model": {"params": {"ddconfig": ddconfig, "sampling_rate": a.sample_rate}},
        "preprocessing": {"audio": audio | {"causal_padding": 3}, "stft": stft, "mel": mel},
    }


def diffusers_audio_vae(keys: Keys) -> AudioVaeConfig:
    keys.must(**AUDIO_FIXED)
    keys.may(**AUDIO_USUAL, is_causal=True)
    if keys.get("attn_resolutions", None):
        raise InputError(f"{keys.where}: attn_resolutions is not supported, expected null")
    return AudioVaeConfig(
        base_channels=keys.number("base_channels"),
        channel_multipliers=keys.sizes("ch_mult"),
        num_res_blocks=keys.number("num_res_blocks"),
        latent_channels=keys.number("latent_channels"),
        out_channels=keys.number("output_channels"),
        mel_bins=keys.number("mel_bins"),
        sample_rate=keys.number("sample_rate"),
        mel_hop=keys.number("mel_hop_length"),
    )


def diffusers_audio_vae_json(a: AudioVaeConfig) -> dict[str, Any]:
    return {
        "_class_name": "AutoencoderKLLTX2Audio",
        **AUDIO_FIXED,
        **AUDIO_USUAL,
        "is_causal": True,
        "attn_resolutions": None,
        "resolution": 256,
        "base_channels": a.base_channels,
        "ch_mult": list(a.channel_multipliers),
        "num_res_blocks": a.num_res_blocks,
        "latent_channels": a.latent_channels,
        "output_channels": a.out_channels,
        "mel_bins": a.mel_bins,
        "sample_rate": a.sample_rate,
        "mel_hop_length": a.mel_hop,
    }


# ---- vocoder --------------------------------------------------------------------------------------------------------


def official_vocoder(keys: Keys, audio: AudioVaeConfig) -> VocoderConfig:
    """Flat: HiFi-GAN (2.0), its rate follows from the mel rate. Nested `vocoder` and `bwe`: BigVGAN (2.3)."""
    if "bwe" not in keys:
        first = _official_generator(keys, "leaky_relu", audio.mel_bins)
        rate = audio.sample_rate // audio.mel_hop * prod(first.upsample_rates)
        return VocoderConfig(first, None, 0, 0, 0, rate, rate)
    bwe = keys.inner("bwe")
    bwe.must(win_size=bwe.need("n_fft"))
    return VocoderConfig(
        generator=_official_generator(keys.inner("vocoder"), "snakebeta", audio.mel_bins),
        bandwidth_extension=_official_generator(bwe, "snakebeta", bwe.number("num_mels")),
        stft_size=bwe.number("n_fft"),
        stft_hop=bwe.number("hop_length"),
        stft_mels=bwe.number("num_mels"),
        input_sample_rate=bwe.number("input_sampling_rate"),
        sample_rate=bwe.number("output_sampling_rate"),
    )


def _official_generator(keys: Keys, activation: str, mel_bins: int) -> GeneratorConfig:
    snake = activation == "snakebeta"
    keys.may(resblock="AMP1" if snake else "1", stereo=True)
    if snake:
        keys.must(activation="snakebeta")
    final = "none"
    if keys.flag("apply_final_activation", True):
        final = "tanh" if keys.flag("use_tanh_at_final", True) else "clamp"
    return GeneratorConfig(
        in_channels=STEREO * mel_bins,
        hidden_channels=keys.number("upsample_initial_channel"),
        out_channels=STEREO,
        upsample_rates=keys.sizes("upsample_rates"),
        upsample_kernels=keys.sizes("upsample_kernel_sizes"),
        resblock_kernels=keys.sizes("resblock_kernel_sizes") if "resblock_kernel_sizes" in keys else (3, 7, 11),
        resblock_dilations=_dilations(keys, "resblock_dilation_sizes", [[1, 3, 5]] * 3),
        activation=activation,
        final_bias=keys.flag("use_bias_at_final", True),
        final_activation=final,
    )


def _dilations(keys: Keys, key: str, default: Any = MISSING) -> tuple[tuple[int, ...], ...]:
    rows = keys.need(key) if default is MISSING else keys.get(key, default)
    if not isinstance(rows, list):
        raise InputError(f"{keys.where}: {key} = {rows!r}, expected a list of lists")
    return tuple(Keys({key: row}, keys.where).sizes(key) for row in rows)


def official_vocoder_json(v: VocoderConfig) -> dict[str, Any]:
    def generator(g: GeneratorConfig) -> dict[str, Any]:
        out = {
            "resblock": "AMP1" if g.activation == "snakebeta" else "1",
            "stereo": True,
            "upsample_initial_channel": g.hidden_channels,
            "upsample_rates": list(g.upsample_rates),
            "upsample_kernel_sizes": list(g.upsample_kernels),
            "resblock_kernel_sizes": list(g.resblock_kernels),
            "resblock_dilation_sizes": [list(row) for row in g.resblock_dilations],
        }
        if g.activation == "snakebeta":
            out |= {"activation": "snakebeta", "use_tanh_at_final": False, "use_bias_at_final": g.final_bias}
        return out | ({"apply_final_activation": False} if g.final_activation == "none" else {})

    if v.bandwidth_extension is None:
        return generator(v.generator)
    stft = {"hop_length": v.stft_hop, "n_fft": v.stft_size, "win_size": v.stft_size, "num_mels": v.stft_mels}
    rates = {"input_sampling_rate": v.input_sample_rate, "output_sampling_rate": v.sample_rate}
    return {"vocoder": generator(v.generator), "bwe": generator(v.bandwidth_extension) | stft | rates}


def diffusers_vocoder(keys: Keys) -> VocoderConfig:
    extended = keys.choice("_class_name", {"LTX2Vocoder": False, "LTX2VocoderWithBWE": True})
    first = _diffusers_generator(keys, "", "snakebeta" if extended else "leaky_relu")
    rate = keys.number("output_sampling_rate")
    if not extended:
        return VocoderConfig(first, None, 0, 0, 0, rate, rate)
    keys.must(window_length=keys.need("filter_length"))
    return VocoderConfig(
        generator=first,
        bandwidth_extension=_diffusers_generator(keys, "bwe_", "snakebeta"),
        stft_size=keys.number("filter_length"),
        stft_hop=keys.number("hop_length"),
        stft_mels=keys.number("num_mel_channels"),
        input_sample_rate=keys.number("input_sampling_rate"),
        sample_rate=rate,
    )


def _diffusers_generator(keys: Keys, prefix: str, activation: str) -> GeneratorConfig:
    """The first of two generators clamps whatever its config says, as the official code does."""
    keys.must(**{f"{prefix}act_fn": activation})
    slope = {f"{prefix}leaky_relu_negative_slope": 0.1} if activation == "leaky_relu" else {}
    keys.may(**slope, **{f"{prefix}antialias_ratio": 2, f"{prefix}antialias_kernel_size": 12})
    final = keys.choice(f"{prefix}final_act_fn", {"tanh": "tanh", "clamp": "clamp", None: "none"})
    return GeneratorConfig(
        in_channels=keys.number(f"{prefix}in_channels"),
        hidden_channels=keys.number(f"{prefix}hidden_channels"),
        out_channels=keys.number(f"{prefix}out_channels"),
        upsample_rates=keys.sizes(f"{prefix}upsample_factors"),
        upsample_kernels=keys.sizes(f"{prefix}upsample_kernel_sizes"),
        resblock_kernels=keys.sizes(f"{prefix}resnet_kernel_sizes"),
        resblock_dilations=_dilations(keys, f"{prefix}resnet_dilations"),
        activation=activation,
        final_bias=keys.flag(f"{prefix}final_bias"),
        final_activation="clamp" if activation == "snakebeta" and not prefix else final,
    )


def diffusers_vocoder_json(v: VocoderConfig) -> dict[str, Any]:
    def generator(g: GeneratorConfig, prefix: str) -> dict[str, Any]:
        out = {
            "in_channels": g.in_channels,
            "hidden_channels": g.hidden_channels,
            "out_channels": g.out_channels,
            "upsample_factors": list(g.upsample_rates),
            "upsample_kernel_sizes": list(g.upsample_kernels),
            "resnet_kernel_sizes": list(g.resblock_kernels),
            "resnet_dilations": [list(row) for row in g.resblock_dilations],
            "act_fn": g.activation,
            "leaky_relu_negative_slope": 0.1,
            "antialias": g.activation == "snakebeta",
            "antialias_ratio": 2,
            "antialias_kernel_size": 12,
            "final_act_fn": "tanh" if g.final_activation == "tanh" else None,  # the released 2.3 config says null
            "final_bias": g.final_bias,
        }
        return {prefix + key: value for key, value in out.items()}

    out = generator(v.generator, "") | {"output_sampling_rate": v.sample_rate}
    if v.bandwidth_extension is None:
        return {"_class_name": "LTX2Vocoder", **out}
    return {
        "_class_name": "LTX2VocoderWithBWE",
        **out,
        **generator(v.bandwidth_extension, "bwe_"),
        "filter_length": v.stft_size,
        "window_length": v.stft_size,
        "hop_length": v.stft_hop,
        "num_mel_channels": v.stft_mels,
        "input_sampling_rate": v.input_sample_rate,
    }


# ---- upsampler ------------------------------------------------------------------------------------------------------


def upsampler(keys: Keys) -> UpsamplerConfig:
    """The metadata of an official upsampler file, or a diffusers config.json; only the x2 spatial one is known."""
    keys.must(spatial_upsample=True, temporal_upsample=False, dims=3)
    official = "rational_resampler" in keys
    rational = keys.flag("rational_resampler" if official else "use_rational_resampler")
    if rational:
        keys.must(**{"spatial_scale" if official else "rational_spatial_scale": 2.0})
    return UpsamplerConfig(
        in_channels=keys.number("in_channels"),
        mid_channels=keys.number("mid_channels"),
        num_blocks=keys.number("num_blocks_per_stage"),
        rational=rational,
    )


def upsampler_json(u: UpsamplerConfig, layout: str) -> dict[str, Any]:
    shared = {
        "in_channels": u.in_channels,
        "mid_channels": u.mid_channels,
        "num_blocks_per_stage": u.num_blocks,
        "dims": 3,
        "spatial_upsample": True,
        "temporal_upsample": False,
    }
    if layout == "official":
        return {
            "_class_name": "LatentUpsampler",
            **shared,
            "spatial_scale": 2.0,
            "rational_resampler": u.rational,
        }
    return {
        "_class_name": "LTX2LatentUpsamplerModel",
        **shared,
        "rational_spatial_scale": 2.0,
        "use_rational_resampler": u.rational,
    }


# ---- a whole checkpoint ---------------------------------------------------------------------------------------------


def official_json(config: ModelConfig) -> dict[str, Any]:
    """The object under `__metadata__["config"]` of the official single file."""
    scheduler = {"_class_name": "RectifiedFlowScheduler", "num_train_timesteps": 1000, "sampler": "LinearQuadratic"}
    return {
        "transformer": official_transformer_json(config.transformer, config.text),
        "vae": official_video_vae_json(config.video_vae),
        "scheduler": scheduler,
        "audio_vae": official_audio_vae_json(config.audio_vae),
        "vocoder": official_vocoder_json(config.vocoder),
    }
