"""Config of a Gemma 4: `config.json` of a folder, or the `gemma_config` of a text-encoder file of
LTX-2.5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ltx2rt.config import Gemma4Config
from ltx2rt.errors import InputError
from ltx2rt.weights.configs.gemma3 import own_json, size_rows, sliding_layers, token_ids, whole_json
from ltx2rt.weights.configs.keys import Keys, read, write

ROWS = size_rows(262144, 1024)
USUAL = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
}
PLACEHOLDERS = {"image_token_id": 258880, "audio_token_id": 258881, "video_token_id": 258884}
MODEL_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")


def gemma4(outer: Keys) -> Gemma4Config:
    """Read a config. Raises InputError for per-layer embeddings, experts and shared keys."""
    keys = outer.inner("text_config") if "text_config" in outer else outer
    keys.may(**USUAL)
    keys.must(attention_k_eq_v=True)
    # neither concerns text
    keys.choice("use_bidirectional_attention", {"vision": None, None: None}, None)
    sizes = read(ROWS, keys, "official")
    sliding = sliding_layers(keys, sizes["num_layers"])
    both = keys.inner("rope_parameters")
    local, full = both.inner("sliding_attention"), both.inner("full_attention")
    local.must(rope_type="default")
    full.must(rope_type="proportional")
    full.may(factor=1.0)
    fraction = full.number("partial_rotary_factor", float, 1.0)
    if fraction > 1:
        raise full.wrong("partial_rotary_factor", fraction, "at most 1")
    whole = PLACEHOLDERS if "text_config" in outer else {}
    placeholders = [outer.get(key, default) for key, default in whole.items()]
    if any(value is not None and type(value) is not int for value in placeholders):
        raise outer.wrong(", ".join(PLACEHOLDERS), placeholders, "token ids")
    return Gemma4Config(
        **sizes,
        **_full_sizes(keys, sizes["num_kv_heads"], sliding),
        layer_is_sliding=sliding,
        rope_theta=full.number("rope_theta", float),
        rope_fraction=fraction,
        rope_local_theta=local.number("rope_theta", float),
        **token_ids(keys),
        placeholder_ids=tuple(value for value in placeholders if value is not None),
    )


def _full_sizes(keys: Keys, num_kv_heads: int, sliding: Sequence[bool]) -> dict[str, int]:
    """Sizes of full layers: under separate keys or, from newer transformers, by layer."""
    if "per_layer_config" in keys:
        layers = keys.inner("per_layer_config")
        own = [layers.inner(str(layer)) for layer, slides in enumerate(sliding) if not slides]
        if any(one.data != own[0].data for one in own):
            raise InputError(f"{layers.where}: full layers of unlike sizes are not supported")
        own = own[0] if own else Keys({}, layers.where)
        names = "head_dim", "num_key_value_heads"
    else:
        own, names = keys, ("global_head_dim", "num_global_key_value_heads")
    same = own.get(names[1], None) is None
    heads = num_kv_heads if same else own.number(names[1])
    return {"full_head_dim": own.number(names[0], default=512), "full_num_kv_heads": heads}


def towers_json(g: Gemma4Config) -> dict[str, Any]:
    """Configs of the image and sound embedders, which no network of ours reads."""
    patch, positions, sound = (16, 1120, 640) if g.hidden_size == 3840 else (1, 4, 8)
    vision = {"patch_size": patch, "pooling_kernel_size": 3, "mm_embed_dim": g.hidden_size}
    vision |= {"mm_posemb_size": positions, "output_proj_dims": g.hidden_size}
    return {
        "vision_config": {"model_type": "gemma4_unified_vision", **vision},
        "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": sound},
    }


def gemma4_json(g: Gemma4Config, towers: Mapping[str, Any]) -> dict[str, Any]:
    """The Gemma4UnifiedForConditionalGeneration form. towers: vision_config, audio_config."""
    sliding = {"rope_type": "default", "rope_theta": g.rope_local_theta}
    full = {"rope_type": "proportional", "rope_theta": g.rope_theta}
    full |= {"partial_rotary_factor": g.rope_fraction}
    text = {
        "model_type": "gemma4_unified_text",
        **write(ROWS, g, "official"),
        "global_head_dim": g.full_head_dim,
        "num_global_key_value_heads": g.full_num_kv_heads,
        "attention_k_eq_v": True,
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 262144,
        "use_bidirectional_attention": "vision",
        **USUAL,
        **own_json(g),
    }
    whole = whole_json("Gemma4UnifiedForConditionalGeneration", "gemma4_unified", text)
    return {**whole, **towers, **dict(zip(PLACEHOLDERS, g.placeholder_ids, strict=True))}
