"""Parameter names: the official single file's (ours everywhere) <-> diffusers'; and Gemma's.

Both directions are one regular-expression pass over whole dotted words, so no rename can meet
another's result.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache

from ltx2rt.errors import few
from ltx2rt.weights.configs.keys import MAX_COUNT
from ltx2rt.weights.part_table import CONNECTORS, PARTS, TEXT_PROJECTION

# names in diffusers, for the rows of one official tensor in this order
QKV = ("to_q", "to_k", "to_v")
GEMMA = "language_model.model."
COMFY_TEXT = "text_encoders."  # before names of the text encoder, in checkpoints of ComfyUI
_COMFY_GEMMA = re.compile(r"gemma\w*\.transformer\.")
LLAMA_CPP = {  # llama.cpp's words for Gemma 3. Source: gguf-py's tensor_mapping.py
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
_LLAMA_CPP = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<word>\w+)\.weight")
_GEMMA_PREFIX = re.compile(
    r"(?:language_model\.model\.|model\.language_model\.|model\.)?(?=(?:embed_tokens|layers|norm)\.)"
)
_FIELD = re.compile(
    r"\.weight\.(?:_data|_(scale)"
    r"|((?:nested_)?(?:absmax|quant_map)|quant_state)(?:\.bitsandbytes__\w+)?)$"
)


def _rename(name: str, words: Mapping[str, str]) -> str:
    return _any_of(tuple(words)).sub(lambda match: words[match[0]], name) if words else name


@cache
def _any_of(words: tuple[str, ...]) -> re.Pattern[str]:
    """Each of the words between dots or ends of a name, the longest that fits."""
    pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return re.compile(rf"(?<![^.])(?:{pattern})(?![^.])")


@cache
def _words(component: str, num_encoder_stages: int) -> dict[str, str]:
    """Diffusers' words for official ones. The official stages of a video VAE are one list; diffusers
    pairs each block with a resampler, and has a mid_block."""
    words = dict(PARTS[component].renames)
    if component == "video_vae":
        for i in range(MAX_COUNT):
            half, odd = divmod(i, 2)
            down, up = f"encoder.down_blocks.{half}", f"decoder.up_blocks.{half}"
            words[f"encoder.down_blocks.{i}"] = f"{down}.downsamplers.0" if odd else down
            words[f"decoder.up_blocks.{i + 1}"] = up if odd else f"{up}.upsamplers.0"
        words[f"encoder.down_blocks.{num_encoder_stages - 1}"] = "encoder.mid_block"
        words["decoder.up_blocks.0"] = "decoder.mid_block"
    return words


def to_diffusers(component: str, official: str, num_encoder_stages: int = 0) -> str:
    """num_encoder_stages: entries of the video VAE's encoder list, for it only."""
    name = official.removeprefix(PARTS[component].prefix)
    return _rename(name, _words(component, num_encoder_stages))


def to_official(component: str, diffusers: str, num_encoder_stages: int = 0) -> str:
    words = {theirs: ours for ours, theirs in _words(component, num_encoder_stages).items()}
    if component == "vocoder":  # the upsampling filter has no extra level
        words |= {"downsample.filter": "downsample.lowpass.filter"}
        del words["downsample"]
    return PARTS[component].prefix + _rename(diffusers, words)


def rows_of(component: str, official: str) -> tuple[str, ...]:
    """Diffusers' names of an official tensor's three parts before renaming; () if it is one."""
    pattern = PARTS[component].fused
    if pattern is None or pattern[0] not in official:
        return ()
    return tuple(official.replace(pattern[0], pattern[1].format(part)) for part in QKV)


def fused_of(component: str, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Official names of tensors that lie among `names` in three parts, and those parts."""
    if (fused := PARTS[component].fused) is None:
        return {}
    joined, part = fused
    firsts = [name for name in names if f".{part.format(QKV[0])}" in name]
    official = [name.replace(f".{part.format(QKV[0])}", f".{joined}") for name in firsts]
    return {name: rows_of(component, name) for name in official}


def gemma_to_canonical(name: str) -> str:
    """`language_model.model.` in front of a text branch's name; other names unchanged."""
    match = _GEMMA_PREFIX.match(name)
    return GEMMA + name[match.end() :] if match else name


def llama_cpp_to_canonical(name: str) -> str | None:
    """Gemma's canonical name of a tensor in llama.cpp's layout; None: the output matrix and the
    picture tower that Ollama's files have, which are not used."""
    if name == "output.weight" or name.startswith(("v.", "mm.")):
        return None
    match = _LLAMA_CPP.fullmatch(name)
    if not match or match["word"] not in LLAMA_CPP:
        return name
    layer = f"layers.{match['layer']}." if match["layer"] else ""
    return f"{GEMMA}{layer}{LLAMA_CPP[match['word']]}.weight"


def official_names(names: Iterable[str]) -> dict[str, str]:
    """The official name of each: with the transformer's prefix, which some files leave out."""
    names, prefix = list(names), PARTS["transformer"].prefix
    firsts = ("audio_patchify_proj.", *(connector.removeprefix(prefix) for connector in CONNECTORS))
    bare = any(name.startswith(firsts) for name in names)
    return {name: prefix + name if bare and component_of(name) is None else name for name in names}


def called(name: str) -> str:
    """The name of a tensor here: quanto and bitsandbytes write companions below the weight."""
    if (found := _FIELD.search(name)) is None:
        return name
    field = found[1] or found[2]
    return f"{name[: found.start()]}.weight{f'_{field}' if field else ''}"


def unsaved(name: str) -> str:
    """The official name of a tensor in a checkpoint that ComfyUI has saved, Gemma's canonical one;
    empty for the text encoder's other tensors. Other names are unchanged."""
    if not name.startswith(COMFY_TEXT):
        return name
    name = name.removeprefix(COMFY_TEXT)
    if match := _COMFY_GEMMA.match(name):
        ours = gemma_to_canonical(name[match.end() :])
        return ours if ours.startswith(GEMMA) else ""
    if name.startswith(TEXT_PROJECTION):
        own = name.removeprefix(TEXT_PROJECTION)
        return TEXT_PROJECTION + ("" if "." in own else "aggregate_embed.") + own
    connector = PARTS["transformer"].prefix + name
    return connector if connector.startswith(CONNECTORS) else ""


def component_of(name: str) -> str | None:
    """The component of an official name or one of ComfyUI's; empty: it is not read."""
    name = unsaved(name)
    if name.startswith((*CONNECTORS, TEXT_PROJECTION)):
        return "text"
    if not name or name.startswith(GEMMA):
        return name and "gemma"
    for component in ("transformer", "video_vae", "audio_vae", "vocoder"):
        if name.startswith(PARTS[component].prefix):
            return component
    return None


def collapse(names: Iterable[str]) -> str:
    """Names with layer numbers as `*`, each once, `few` of them."""
    patterns = Counter(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names)
    return few(name + (f" ({count})" if count > 1 else "") for name, count in patterns.items())
