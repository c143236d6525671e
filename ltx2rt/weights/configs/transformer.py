"""Configs of the transformer, the text projection and the connectors, in both layouts."""

from __future__ import annotations

from typing import Any

from ltx2rt.config import ConnectorConfig, TextConfig, TransformerConfig
from ltx2rt.errors import InputError
from ltx2rt.weights.configs.keys import Keys, Row, read, write

SCALE = "timestep_scale_multiplier"
KEYFRAMES = "use_keyframes_abs_pos_embedding"
KEYFRAME_VECTOR = "model.diffusion_model.keyframes_abs_pos_embedding"  # [1, D]
ROWS = [
    Row("num_layers", "count"),
    Row("video_channels", "int", "in_channels"),
    Row("audio_channels", "int", "audio_out_channels", "audio_in_channels"),
    Row("num_heads", "int", "num_attention_heads"),
    Row("head_dim", "int", "attention_head_dim"),
    Row("audio_num_heads", "int", "audio_num_attention_heads"),
    Row("audio_head_dim", "int", "audio_attention_head_dim"),
    Row("caption_channels", "int"),
    Row("gated_attention", "flag", "apply_gated_attention", "gated_attn", False),
    Row("text_modulation", "flag", "cross_attention_adaln", "cross_attn_mod", False),
    Row("ff_bias", "flag", default=True),
    Row("audio_ff_bias", "flag", default=True),
    Row("keyframe_vector", "flag", KEYFRAMES, default=False),
    Row("rope_theta", "float", "positional_embedding_theta", "rope_theta"),
    Row("timestep_scale", "float", SCALE),
    Row("av_gate_scale", "float", f"av_ca_{SCALE}", f"cross_attn_{SCALE}"),
    Row("norm_eps", "float"),
]
OWN = [  # each modality's; the sound's are the video's where an official file leaves them out
    Row("num_heads", "count", "connector_num_attention_heads"),
    Row("head_dim", "int", "connector_attention_head_dim"),
    Row("num_layers", "count", "connector_num_layers"),
]
SHARED = [  # once in an official file
    Row("num_registers", "count", "connector_num_learnable_registers"),
    Row("gated_attention", "flag", "connector_apply_gated_attention", "gated_attn", False),
]
# absent if usual
SWITCHES = {"ff_bias", "audio_ff_bias", "apply_gated_attention", "cross_attention_adaln", KEYFRAMES}
CAPTION_KEYS = {  # all four: the 2.3 feature extractor; none: the 2.0 one
    "caption_proj_before_connector": True,
    "caption_projection_first_linear": False,
    "caption_proj_input_norm": False,
    "caption_projection_second_linear": False,
}
OFFICIAL_FIXED = {
    "rope_type": "split",
    "use_middle_indices_grid": True,
    "causal_temporal_positioning": True,
    "qk_norm": "rms_norm",
}
OFFICIAL_USUAL = {
    "dropout": 0.0, "attention_bias": True, "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000, "use_linear_projection": False, "only_cross_attention": False,
    "double_self_attention": False, "upcast_attention": False, "share_ff": False,
    "norm_elementwise_affine": False, "cross_attention_norm": True, "av_cross_ada_norm": True,
    "use_audio_video_cross_attention": True, "standardization_norm": "rms_norm",
    "positional_embedding_type": "rope", "use_embeddings_connector": True,
    "connector_norm_output": True,
}  # fmt: skip
DIFFUSERS_FIXED = {"rope_type": "split", "causal_offset": 1, "vae_scale_factors": [8, 32, 32]}
DIFFUSERS_USUAL = {
    "patch_size": 1, "patch_size_t": 1, "audio_patch_size": 1, "audio_patch_size_t": 1,
    "activation_fn": "gelu-approximate", "qk_norm": "rms_norm_across_heads",
    "norm_elementwise_affine": False, "attention_bias": True, "attention_out_bias": True,
}  # fmt: skip
MAX_POS = ("pos_embed_max_pos", "base_height", "base_width")  # seconds, pixels, pixels
PRECISIONS = {"float64": True, "float32": False}


def official(keys: Keys) -> TransformerConfig:
    keys.must(**OFFICIAL_FIXED)
    keys.may(**OFFICIAL_USUAL)
    fields = read(ROWS, keys, "official")
    config = TransformerConfig(
        **fields,
        caption_projection=not _caption_before_connector(keys),
        prompt_adaln=fields["text_modulation"] and keys.flag("use_prompt_adaln_single", True),
        rope_max_pos=keys.sizes("positional_embedding_max_pos", 3),  # type: ignore[arg-type]
        audio_rope_max_pos=keys.sizes("audio_positional_embedding_max_pos", 1)[0],
        rope_float64_grid=keys.choice("frequencies_precision", PRECISIONS),
    )
    keys.must(audio_num_attention_heads=config.num_heads, out_channels=config.video_channels)
    keys.must(**_widths(config))
    keys.may(audio_in_channels=config.audio_channels)
    return config


def _widths(t: TransformerConfig) -> dict[str, int]:
    """Keys of both layouts that repeat sizes."""
    return {"cross_attention_dim": t.width, "audio_cross_attention_dim": t.audio_width}


def _caption_before_connector(keys: Keys) -> bool:
    present = {key: keys.data[key] for key in CAPTION_KEYS if key in keys}
    if present and present != CAPTION_KEYS:
        raise InputError(
            f"{keys.where}: {present} is no known feature extractor; expected none of them or "
            f"{CAPTION_KEYS}"
        )
    return bool(present)


def official_text(keys: Keys, projection_in: int) -> TextConfig:
    """projection_in: input width of the text projection, = Gemma's hidden size x (layers + 1)."""
    hidden = keys.number("caption_channels")
    if projection_in % hidden:
        raise InputError(
            f"{keys.where}: the text projection takes {projection_in}, no multiple of "
            f"caption_channels = {hidden}"
        )
    per_token = _caption_before_connector(keys)

    def connector(prefix: str) -> ConnectorConfig:
        own: dict[str, Any] = {}
        for row in OWN:
            key = prefix + row.official
            own[row.field] = row.read(keys, key if key in keys else row.official)
        ff_bias = keys.flag("connector_ff_bias", True)
        return ConnectorConfig(**own, **read(SHARED, keys, "official"), ff_bias=ff_bias)

    return TextConfig(
        gemma_hidden=hidden,
        num_states=projection_in // hidden,
        per_token_norm=per_token,
        projection_bias=per_token,
        video=connector(""),
        audio=connector("audio_"),
        rope_theta=keys.number("positional_embedding_theta", float),
        rope_max_pos=keys.sizes("connector_positional_embedding_max_pos", 1)[0],
        rope_float64_grid=keys.choice("frequencies_precision", PRECISIONS),
        norm_eps=keys.number("norm_eps", float),
    )


def official_json(transformer: TransformerConfig, text: TextConfig) -> dict[str, Any]:
    t, video, audio = transformer, text.video, text.audio
    out = {"_class_name": "AVTransformer3DModel", **OFFICIAL_FIXED, **OFFICIAL_USUAL}
    out |= {"attention_type": "default", "num_vector_embeds": None, "norm_num_groups": 32}
    out |= {key: value for key, value in write(ROWS, t, "official").items() if key not in SWITCHES}
    out |= {
        SCALE: int(t.timestep_scale),
        "out_channels": t.video_channels,
        **_widths(t),
        "positional_embedding_max_pos": list(t.rope_max_pos),
        "audio_positional_embedding_max_pos": [t.audio_rope_max_pos],
        "frequencies_precision": "float64" if t.rope_float64_grid else "float32",
        **write(OWN + SHARED[:1], video, "official"),
        "connector_positional_embedding_max_pos": [text.rope_max_pos],
    }
    if not t.caption_projection:
        out |= CAPTION_KEYS | {
            "cross_attention_adaln": t.text_modulation,
            "apply_gated_attention": t.gated_attention,
            "connector_apply_gated_attention": video.gated_attention,
            **write(OWN, audio, "official", "audio_"),
            "text_encoder_norm_type": "per_token_rms",
        }
    switches = {
        "use_prompt_adaln_single": t.prompt_adaln or not t.text_modulation,
        "ff_bias": t.ff_bias,
        "audio_ff_bias": t.audio_ff_bias,
        "connector_ff_bias": video.ff_bias,
    }
    out |= {KEYFRAMES: True} if t.keyframe_vector else {}
    return out | {key: value for key, value in switches.items() if not value}


def diffusers(keys: Keys) -> TransformerConfig:
    """`perturbed_attn` is ignored: it says whether diffusers runs STG."""
    keys.must(**DIFFUSERS_FIXED)
    keys.may(**DIFFUSERS_USUAL)
    fields = read(ROWS, keys, "diffusers")
    config = TransformerConfig(
        **fields,
        caption_projection=keys.flag("use_prompt_embeddings", True),
        prompt_adaln=fields["text_modulation"] and keys.flag("use_prompt_adaln_single", True),
        rope_max_pos=tuple(keys.number(key) for key in MAX_POS),  # type: ignore[arg-type]
        audio_rope_max_pos=keys.number("audio_pos_embed_max_pos"),
        rope_float64_grid=keys.flag("rope_double_precision"),
    )
    keys.may(audio_gated_attn=config.gated_attention, audio_cross_attn_mod=config.text_modulation)
    keys.may(out_channels=config.video_channels, audio_out_channels=config.audio_channels)
    keys.must(**_widths(config))
    return config


def diffusers_json(t: TransformerConfig) -> dict[str, Any]:
    return {
        "_class_name": "LTX2VideoTransformer3DModel",
        **DIFFUSERS_FIXED,
        **DIFFUSERS_USUAL,
        **write(ROWS, t, "diffusers"),
        SCALE: int(t.timestep_scale),
        f"cross_attn_{SCALE}": int(t.av_gate_scale),
        "out_channels": t.video_channels,
        **_widths(t),
        "audio_out_channels": t.audio_channels,
        "use_prompt_embeddings": t.caption_projection,
        "audio_gated_attn": t.gated_attention,
        "audio_cross_attn_mod": t.text_modulation,
        "use_prompt_adaln_single": t.prompt_adaln or not t.text_modulation,
        "perturbed_attn": t.text_modulation,  # as the released configs: true in 2.3 only
        **dict(zip(MAX_POS, t.rope_max_pos, strict=True)),
        "audio_pos_embed_max_pos": t.audio_rope_max_pos,
        "rope_double_precision": t.rope_float64_grid,
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

    return TextConfig(
        gemma_hidden=keys.number("caption_channels"),
        num_states=keys.count("text_proj_in_factor"),
        per_token_norm=per_token,
        projection_bias=keys.flag("proj_bias", False),
        video=ConnectorConfig(**read(OWN + SHARED, keys, "diffusers", "video_"), ff_bias=True),
        audio=ConnectorConfig(**read(OWN + SHARED, keys, "diffusers", "audio_"), ff_bias=True),
        rope_theta=keys.number("rope_theta", float),
        rope_max_pos=keys.number("connector_rope_base_seq_len"),
        rope_float64_grid=keys.flag("rope_double_precision"),
        norm_eps=transformer.norm_eps,
    )


def diffusers_text_json(text: TextConfig, transformer: TransformerConfig) -> dict[str, Any]:
    return {
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
        **write(OWN + SHARED, text.video, "diffusers", "video_"),
        **write(OWN + SHARED, text.audio, "diffusers", "audio_"),
    }


def check_connectors(text: TextConfig, transformer: TransformerConfig, where: str) -> None:
    """Raise InputError for connectors of another generation, of contexts of other widths."""
    found = (text.video.width, text.audio.width)
    taken = (transformer.caption_channels,) * 2  # 2.0 projects both itself
    if not transformer.caption_projection:
        taken = (transformer.width, transformer.audio_width)
    if found != taken or text.per_token_norm == transformer.caption_projection:
        raise InputError(
            f"{where}: connectors of another generation: their contexts are {found} wide (video, "
            f"audio), the transformer takes {taken}; pass the parts of one checkpoint"
        )
