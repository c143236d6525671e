"""Config of a Gemma 3 folder, in the old and the new spelling, with a vision part or text only; and
of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ltx2rt.config import Gemma4Config, GemmaConfig, TextConfig
from ltx2rt.errors import InputError
from ltx2rt.weights.configs.keys import Keys, Row, read_official, write_official

TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def size_rows(vocab_size: int, sliding_window: int) -> list[Row]:
    """Configuration of either Gemma's text branch. Defaults are those of transformers' class:
    released configs leave some out."""
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
GGUF_KEYS = {  # after "gemma3."
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}


def token_ids(*levels: Keys) -> dict[str, int]:
    """The special tokens, each of the first level that has it; of a list the first. Raises
    InputError."""
    found = {}
    for key, default in TOKENS.items():
        value = next((level.data[key] for level in levels if key in level), None)
        value = value[0] if isinstance(value, list) and value else value
        found[key] = default if value is None else value
        if type(found[key]) is not int:
            raise InputError(f"{levels[0].where}: {key} = {value!r}, expected a token id")
    return found


def gemma3(outer: Keys) -> GemmaConfig:
    """config.json of a Gemma 3 folder: with `text_config` or text only, RoPE spelled the old or the
    new way."""
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
        sliding = tuple(
            Keys({"layer_types": kind}, keys.where).choice("layer_types", known) for kind in types
        )
    else:
        pattern = keys.number(
            "_sliding_window_pattern", default=keys.number("sliding_window_pattern", default=6)
        )
        sliding = tuple((layer + 1) % pattern != 0 for layer in range(num_layers))
    if len(sliding) != num_layers:
        raise InputError(
            f"{keys.where}: layer_types has {len(sliding)} entries, num_hidden_layers is "
            f"{num_layers}"
        )
    theta, local_theta = (
        keys.number("rope_theta", float, 1e6),
        keys.number("rope_local_base_freq", float, 1e4),
    )
    factor = 1.0
    if (parameters := keys.get("rope_parameters", None)) is not None:
        both = Keys(parameters, f"{keys.where}.rope_parameters")
        local, scaling = both.inner("sliding_attention"), both.inner("full_attention")
        local.must(rope_type="default")
        theta, local_theta = scaling.number("rope_theta", float), local.number("rope_theta", float)
    else:
        scaling = Keys(
            keys.get("rope_scaling", None) or {"rope_type": "default"}, f"{keys.where}.rope_scaling"
        )
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


def gguf_gemma3(metadata: Mapping[str, str], vocab_size: int, where: str) -> Keys:
    """The keys of a text-only Gemma 3's config.json, from the metadata of a `GgufFile` of it.

    vocab_size: rows of its embedding. Raises InputError for a key that is absent: llama.cpp's
    defaults are not used, but for the period of 6 layers and the local RoPE base of 10000, which no
    converter writes. Source: llama.cpp's convert_hf_to_gguf.py, Gemma3Model.set_gguf_parameters.
    """
    texts = {name.removeprefix("gemma3."): text for name, text in metadata.items()}
    keys = Keys(texts, f"{where}: gemma3")

    def need(key: str) -> Any:
        text = keys.need(key)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise InputError(f"{keys.where}: {key} = {text!r:.100}, expected a number") from None

    keys.must(**{"rope.scaling.type": "linear"})
    found = {ours: need(theirs) for ours, theirs in GGUF_KEYS.items()}
    scaling = {"rope_type": "linear", "factor": need("rope.scaling.factor")}
    found |= {"query_pre_attn_scalar": found["head_dim"], "rope_scaling": scaling}
    return Keys({"model_type": "gemma3_text", "vocab_size": vocab_size} | found, keys.where)


def plain_gemma3(shapes: Mapping[str, tuple[int, ...]], where: str) -> Keys:
    """The keys of a text-only Gemma 3's config.json, from the shapes of its tensors.

    shapes: by name without prefix, such as "layers.0.mlp.up_proj.weight"; of matrices only the rows
    are looked at, since packed ones have fewer columns. What shapes do not tell is as in the
    released 4B and 12B models. Raises InputError for a tensor that is absent.
    Source: config.json of google/gemma-3-12b-it.
    """

    def rows(name: str) -> int:
        if not shapes.get(name):
            raise InputError(f"{where}: no tensor {name} of Gemma 3; pass a complete file")
        return shapes[name][0]

    layers = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
    attention = "layers.0.self_attn."
    head_dim = rows(f"{attention}q_norm.weight")
    if head_dim <= 0:
        raise InputError(f"{where}: {attention}q_norm.weight has no numbers; pass a complete file")
    found = {
        "vocab_size": rows("embed_tokens.weight"),
        "hidden_size": rows("norm.weight"),
        "num_hidden_layers": len(layers),
        "num_attention_heads": rows(f"{attention}q_proj.weight") // head_dim,
        "num_key_value_heads": rows(f"{attention}k_proj.weight") // head_dim,
        "head_dim": head_dim,
        "intermediate_size": rows("layers.0.mlp.gate_proj.weight"),
        "query_pre_attn_scalar": head_dim,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    return Keys({"model_type": "gemma3_text"} | found, where)


def gemma_json(g: GemmaConfig, vision: Mapping[str, Any]) -> dict[str, Any]:
    """The Gemma3ForConditionalGeneration form. vision: its vision_config."""
    full = {"rope_type": "linear", "factor": g.rope_scaling_factor, "rope_theta": g.rope_theta}
    tokens = {key: getattr(g, key) for key in TOKENS}
    text = {
        "model_type": "gemma3_text",
        **write_official(ROWS, g),
        "layer_types": [
            "sliding_attention" if sliding else "full_attention" for sliding in g.layer_is_sliding
        ],
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
            f"{where}: a Gemma of hidden size {found[0]} with {config.num_layers} layers, but the "
            f"checkpoint's text projection takes hidden size {text.gemma_hidden} with "
            f"{text.num_states - 1} layers; pass that one with --text-encoder"
        )
