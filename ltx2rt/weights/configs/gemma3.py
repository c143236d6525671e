"""Config of a Gemma 3 folder: the old and the new spelling, with a vision part or text only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ltx2rt.config import Gemma4Config, GemmaConfig, TextConfig
from ltx2rt.errors import InputError
from ltx2rt.weights.configs.keys import Keys, Row, read_official, write_official

TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def size_rows(vocab_size: int, sliding_window: int) -> list[Row]:
    """Of either Gemma's text branch. Defaults are those of transformers' class: released configs leave some out."""
    return [
        Row("vocab_size", "vocab_size", "vocab_size", "int", vocab_size),
        Row("hidden_size", "hidden_size", "hidden_size", "int"),
        Row("num_layers", "num_hidden_layers", "num_hidden_layers", "count"),
        Row("num_heads", "num_attention_heads", "num_attention_heads", "int"),
        Row("num_kv_heads", "num_key_value_heads", "num_key_value_heads", "int"),
        Row("head_dim", "head_dim", "head_dim", "int", 256),
        Row("intermediate_size", "intermediate_size", "intermediate_size", "int"),
        Row("sliding_window", "sliding_window", "sliding_window", "int", sliding_window),
        Row("norm_eps", "rms_norm_eps", "rms_norm_eps", "float", 1e-6),
    ]


ROWS = size_rows(262208, 4096)


def token_ids(*levels: Keys) -> dict[str, int]:
    """The special tokens, each of the first level that has it; of a list the first. Raises InputError."""
    found = {}
    for key, default in TOKENS.items():
        value = next((level.data[key] for level in levels if key in level), None)
        value = value[0] if isinstance(value, list) and value else value
        found[key] = default if value is None else value
        if type(found[key]) is not int:
            raise InputError(f"{levels[0].where}: {key} = {value!r}, expected a token id")
    return found


def gemma3(outer: Keys) -> GemmaConfig:
    """config.json of a Gemma 3 folder: with `text_config` or text only, RoPE spelled the old or the new way."""
    outer.choice("model_type", {"gemma3": 0, "gemma3_text": 0})
    keys = outer.inner("text_config") if "text_config" in outer else outer
    keys.may(
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        attn_logit_softcapping=None,
        use_bidirectional_attention=False,
    )

    sizes = read_official(ROWS, keys)
    num_layers = sizes["num_layers"]
    if (types := keys.get("layer_types", None)) is not None:
        if not isinstance(types, list | tuple):
            raise InputError(f"{keys.where}: layer_types = {types!r}, expected one kind per layer")
        known = {"sliding_attention": True, "full_attention": False}
        sliding = tuple(Keys({"layer_types": kind}, keys.where).choice("layer_types", known) for kind in types)
    else:
        pattern = keys.number("_sliding_window_pattern", default=keys.number("sliding_window_pattern", default=6))
        sliding = tuple((layer + 1) % pattern != 0 for layer in range(num_layers))
    if len(sliding) != num_layers:
        raise InputError(f"{keys.where}: layer_types has {len(sliding)} entries, num_hidden_layers is {num_layers}")
    theta, local_theta = keys.number("rope_theta", float, 1e6), keys.number("rope_local_base_freq", float, 1e4)
    factor = 1.0
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
        **sizes,
        layer_is_sliding=sliding,
        rope_theta=theta,
        rope_scaling_factor=factor,
        rope_local_theta=local_theta,
        query_scale=keys.number("query_pre_attn_scalar", float, 256) ** -0.5,
        **token_ids(keys, outer),
    )


def gemma_json(g: GemmaConfig, vision: Mapping[str, Any]) -> dict[str, Any]:
    """The Gemma3ForConditionalGeneration form. vision: its vision_config."""
    full = {"rope_type": "linear", "factor": g.rope_scaling_factor, "rope_theta": g.rope_theta}
    tokens = {key: getattr(g, key) for key in TOKENS}
    text = {
        "model_type": "gemma3_text",
        **write_official(ROWS, g),
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in g.layer_is_sliding],
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": g.rope_local_theta},
        },
        "query_pre_attn_scalar": round(g.query_scale**-2),
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


def check_gemma(config: GemmaConfig | Gemma4Config, text: TextConfig, where: str) -> None:
    found = (config.hidden_size, config.num_layers + 1)
    if found != (text.gemma_hidden, text.num_states):
        raise InputError(
            f"{where}: a Gemma of hidden size {found[0]} with {config.num_layers} layers, but the checkpoint's text "
            f"projection takes hidden size {text.gemma_hidden} with {text.num_states - 1} layers; "
            f"pass that one with --text-encoder"
        )
