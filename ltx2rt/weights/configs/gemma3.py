"""Config of a Gemma 3 folder, in the old and the new spelling, with a vision part or text only; and
of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ltx2rt.config import Gemma4Config, GemmaConfig, TextConfig
from ltx2rt.errors import InputError
from ltx2rt.notes import note
from ltx2rt.weights.configs.keys import MISSING, Keys, Row, read, write

TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
LAYERS = {"sliding_attention": True, "full_attention": False}


def size_rows(vocab_size: int, sliding_window: int) -> list[Row]:
    """Config rows of either Gemma's text branch, with transformers' defaults."""
    return [
        Row("vocab_size", "int", default=vocab_size),
        Row("hidden_size", "int"),
        Row("num_layers", "count", "num_hidden_layers"),
        Row("num_heads", "int", "num_attention_heads"),
        Row("num_kv_heads", "int", "num_key_value_heads"),
        Row("head_dim", "int", default=256),
        Row("intermediate_size", "int"),
        Row("sliding_window", "int", default=sliding_window),
        Row("norm_eps", "float", "rms_norm_eps", default=1e-6),
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

GEMMA_SIZES = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
               "intermediate_size", "vocab_size")  # fmt: skip
GGUF_OPTIONS = (
    "attention.value_length", "attention.sliding_window_pattern", "attention.causal",
    "rope.dimension_count", "rope.global.freq_base", "rope.local.freq_base", "rope.freq_base_swa",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scale_linear",
)  # fmt: skip
GGUF_TOKENS = {
    key: f"tokenizer.ggml.{word}_token_id"
    for key, word in zip(TOKENS, ("padding", "eos", "bos"), strict=True)
}
GEMMA_27B, GEMMA_27B_SCALAR = (62, 5376), 168  # layers and width; its width over its heads
SCALED_SIZES = ((34, 2560), (48, 3840), GEMMA_27B)  # released models with a RoPE scaling
SCALED_FACTOR = 8.0


def token_ids(*levels: Keys) -> dict[str, int]:
    """The special tokens, from the first level that has each. Raises InputError."""
    found = {}
    for key, default in TOKENS.items():
        value = next((level.data[key] for level in levels if key in level), None)
        value = value[0] if isinstance(value, list) and value else value
        found[key] = default if value is None else value
        if type(found[key]) is not int:
            raise levels[0].wrong(key, value, "a token id")
    return found


def sliding_layers(keys: Keys, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer is a sliding one; without `layer_types` all but every sixth."""
    types = keys.get("layer_types", None)
    if types is None:
        period = keys.number("sliding_window_pattern", default=6)
        period = keys.number("_sliding_window_pattern", default=period)
        return tuple((layer + 1) % period != 0 for layer in range(num_layers))
    if not isinstance(types, list | tuple) or len(types) != num_layers:
        raise keys.wrong("layer_types", types, f"one kind for each of {num_layers} layers")
    kinds = (Keys({"layer_types": kind}, keys.where) for kind in types)
    return tuple(kind.choice("layer_types", LAYERS) for kind in kinds)


def own_json(config: GemmaConfig | Gemma4Config) -> dict[str, Any]:
    """Keys of either Gemma's text branch that no row has."""
    tokens = {key: getattr(config, key) for key in TOKENS}
    layers = layer_words(config.layer_is_sliding)
    return {"layer_types": layers, "tie_word_embeddings": True, **tokens}


def layer_words(sliding: Iterable[Any]) -> list[str]:
    return ["sliding_attention" if slides else "full_attention" for slides in sliding]


def whole_json(architecture: str, model_type: str, text: dict[str, Any]) -> dict[str, Any]:
    """config.json of a Gemma with this text branch, without its towers."""
    kind = {"architectures": [architecture], "model_type": model_type, "dtype": "bfloat16"}
    shared = {key: text[key] for key in ("tie_word_embeddings", *TOKENS)}
    return {**kind, "text_config": text, **shared}


def gemma3(outer: Keys) -> GemmaConfig:
    """config.json of a Gemma 3 folder: with `text_config` or not, RoPE spelled either way."""
    outer.choice("model_type", {"gemma3": 0, "gemma3_text": 0})
    keys = outer.inner("text_config") if "text_config" in outer else outer
    keys.may(
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        attn_logit_softcapping=None,
        use_bidirectional_attention=False,
    )

    sizes = read(ROWS, keys, "official")
    if keys.get("rope_parameters", None) is not None:
        both = keys.inner("rope_parameters")
        local, full = both.inner("sliding_attention"), both.inner("full_attention")
        local.must(rope_type="default")
        theta, local_theta = full.number("rope_theta", float), local.number("rope_theta", float)
    else:
        scaling = keys.get("rope_scaling", None) or {"rope_type": "default"}
        full = Keys(scaling, f"{keys.where}.rope_scaling")
        theta = keys.number("rope_theta", float, 1e6)
        local_theta = keys.number("rope_local_base_freq", float, 1e4)
    scaled = full.choice("rope_type", {"linear": True, "default": False})
    return GemmaConfig(
        **sizes,
        layer_is_sliding=sliding_layers(keys, sizes["num_layers"]),
        rope_theta=theta,
        rope_scaling_factor=full.number("factor", float) if scaled else 1.0,
        rope_local_theta=local_theta,
        query_scale=keys.number("query_pre_attn_scalar", float, 256) ** -0.5,
        **token_ids(keys, outer),
    )


def gguf_gemma3(metadata: Mapping[str, str], vocab_size: int, where: str) -> Keys:
    """The keys of a text-only Gemma 3's config.json, from the metadata of a `GgufFile` of it.

    vocab_size: rows of its embedding. Raises InputError for a size that is absent, and for a key of
    attention or RoPE that is not known. An absent key has llama.cpp's default, except that released
    models with a RoPE scaling get theirs, which early converters did not write.
    Sources: llama.cpp's gguf-py/gguf/constants.py and convert_hf_to_gguf.py, Ollama's converter.
    """
    texts = {name.removeprefix("gemma3."): text for name, text in metadata.items()}
    keys = Keys(texts, f"{where}: gemma3")
    known = {*GGUF_KEYS.values(), *GGUF_OPTIONS}
    if unknown := [k for k in texts if k.startswith(("rope.", "attention.")) and k not in known]:
        raise InputError(f"{keys.where}: key {unknown[0]} is not known; pass another file")

    def need(key: str, *others: str, default: Any = MISSING) -> Any:
        key = next((each for each in (key, *others) if each in keys), key)
        absent = key not in keys and default is not MISSING
        return default if absent else number(keys.need(key), key)

    def number(text: str, key: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise keys.wrong(key, text, "a number") from None

    found = {ours: need(theirs) for ours, theirs in GGUF_KEYS.items() if ours != "rope_theta"}
    found["rope_theta"] = need("rope.freq_base", "rope.global.freq_base")
    found["rope_local_base_freq"] = need("rope.local.freq_base", "rope.freq_base_swa", default=1e4)
    size = (found["num_hidden_layers"], found["hidden_size"])
    kind = keys.get("rope.scaling.type", None)
    if kind not in (None, "none", "linear"):
        raise InputError(f"{keys.where}: rope.scaling.type = {kind!r} is not supported")
    factor = 1.0
    if kind == "linear" or "rope.scaling.factor" in keys or "rope.scale_linear" in keys:
        factor = need("rope.scaling.factor", "rope.scale_linear")
    elif kind is None and size in SCALED_SIZES:
        factor = SCALED_FACTOR
        note(f"{where}: its header has no RoPE scaling; {factor:g}, that of the released model")
    head_dim = found["head_dim"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if (own := need(key, default=head_dim)) != head_dim:
            raise keys.wrong(key, own, str(head_dim))
    pattern = need("attention.sliding_window_pattern", default=6)
    if isinstance(pattern, list):
        found["layer_types"] = layer_words(pattern)
    else:
        found["sliding_window_pattern"] = pattern
    scalar = GEMMA_27B_SCALAR if size == GEMMA_27B else head_dim
    scaling = {"rope_type": "linear", "factor": factor} if factor != 1 else None
    found |= {"query_pre_attn_scalar": scalar, "rope_scaling": scaling}
    for ours, theirs in GGUF_TOKENS.items():
        if theirs in metadata:
            found[ours] = number(metadata[theirs], theirs)
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
    text = {
        "model_type": "gemma3_text",
        **write(ROWS, g, "official"),
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": g.rope_local_theta},
        },
        "query_pre_attn_scalar": round(g.query_scale**-2),
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        **own_json(g),
    }
    return {
        **whole_json("Gemma3ForConditionalGeneration", "gemma3", text),
        "vision_config": dict(vision),
        "mm_tokens_per_image": 256 if vision.get("image_size") == 896 else 4,
        "boi_token_index": 7,
        "eoi_token_index": 8,
        "image_token_index": 9,
    }


def check(config: GemmaConfig | Gemma4Config, text: TextConfig, where: str) -> None:
    found, taken = (config.hidden_size, config.num_layers), (text.gemma_hidden, text.num_states - 1)
    if found != taken:
        own, wanted = (
            f"hidden size {width} with {layers} layers" for width, layers in (found, taken)
        )
        raise InputError(
            f"{where}: a Gemma of {own}, but the checkpoint's text projection takes {wanted}; "
            "pass that one with --text-encoder"
        )
