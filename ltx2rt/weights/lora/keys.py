"""The keys of LoRA files: which part of a change each one holds, and which program wrote them.

| part | endings that are read |
|---|---|
| `down`, `up` | `lora_A`, `lora_down`, `lora.down`, `lora_linear_layer.down`; `lora_B` or `up`; \
all with or without `.weight` and the name of an adapter (`.default`) |
| `up_bias` | `lora_B.bias`, of PEFT's `lora_bias` |
| `alpha` | `alpha`, `lora_alpha`, `network_alpha` |
| `hada_*`, `lokr_*` | LyCORIS' and PEFT's factors of LoHa and LoKr |
| `magnitude` | DoRA: `dora_scale`, `lora_magnitude_vector`, `magnitude` |
| `norm` | `initial_norm`: musubi-tuner's norms of the base weight, which nothing needs |
| `diff`, `diff_b` | differences of a weight and a bias; LyCORIS also writes `w_norm`, `b_norm` |
| `multiplied` | `oft_blocks`, `oft_R`, `a1` to `b2`, `on_input` and the like, of OFT, BOFT, GLoRA \
and (IA)^3, which are refused |
| `whole`, `whole_b` | a whole tensor: `set_weight`, or `weight` and `bias` beside other parts |

Sources: ComfyUI's comfy/lora.py and comfy/weight_adapter, PEFT's save_and_load.py, LyCORIS, kohya's
networks, musubi-tuner's LTX-2 branch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

_LORA = r"[._]lora(?:_linear_layer)?[._]"
_ADAPTER = r"(?:\.(?!(?:weight|bias)$)[^.]+)?"
_SAVED = r"(?:\.modules_to_save(?:\.[^.]+)?)?"
# Rows of (part, the ending that holds it, a word of that ending which no checkpoint's names have).
# A file is a LoRA if a name has such a word; "": checkpoints have such endings as well. An ending
# with a group `part` names its part itself.
ENDINGS = (
    ("down", rf"{_LORA}(?:A|down){_ADAPTER}(?:\.weight)?", r"lora[._]"),
    ("up", rf"{_LORA}(?:B|up){_ADAPTER}(?:\.weight)?", r"lora[._]"),
    ("up_bias", rf"{_LORA}(?:B|up){_ADAPTER}\.bias", r"lora[._]"),
    ("", r"\.(?P<part>hada_w[12]_[ab]|lokr_w[12](?:_[ab])?)(?:\.default)?", "hada_w|lokr_w"),
    ("magnitude", r"\.(?:dora_scale|magnitude)", "dora_scale|magnitude"),
    ("magnitude", r"\.lora_magnitude_vector(?:\.[^.]+){0,2}", "magnitude"),
    ("diff", r"\.(?:diff(?:\.default)?|w_norm)", r"\.diff$|\.diff\.default$|_norm$"),
    ("diff_b", r"\.(?:diff_b(?:\.default)?|b_norm)", r"\.diff_b|_norm$"),
    ("norm", r"\.initial_norm", "_norm$"),
    (
        "multiplied",
        r"\.(?:oft_blocks|rescale|on_input|(?:oft_R|[ab][12])\.weight|oft_R\.scaled_oft"
        r"|(?:oft_)?(?:coft_eps|coft|block_share|block_size|scaled)(?:_oft)?_metadata)",
        r"oft_|on_input|[ab][12]\.weight$",
    ),
    ("alpha", r"\.(?:alpha|lora_alpha|network_alpha)", ""),
    ("whole", rf"{_SAVED}\.(?:set_weight|weight)", ""),
    ("whole_b", rf"(?:{_SAVED}|\.base_layer)\.bias", ""),
)
_KEY = re.compile(
    r"(?P<module>.+?)(?:"
    + "|".join(f"(?P<row{i}>{ending})" for i, (_, ending, _) in enumerate(ENDINGS))
    + ")"
)
_OWN = re.compile("|".join(dict.fromkeys(word for _, _, word in ENDINGS if word)))
FORMS = (
    "NAME.lora_A.weight and .lora_B.weight, .lora_down.weight and .lora_up.weight, .hada_w1_a, "
    ".lokr_w1, .dora_scale, .diff and .diff_b are read, NAME such as "
    "diffusion_model.transformer_blocks.0.attn1.to_q or lora_unet_transformer_blocks_0_attn1_to_q"
)
# By a key of the header's metadata.
_WRITERS = {
    "ltx2rt": "ltx2rt",
    "ot_config": "OneTrainer",
    "lora_adapter_metadata": "diffusers",
    "lora_config": "finetrainers",
}
_NETWORKS = {
    "networks.lora_ltx2": "musubi-tuner",
    "networks.lokr": "musubi-tuner",
    "lycoris.": "LyCORIS",
}


class Key(NamedTuple):
    """part: as in the table above."""

    module: str
    part: str


@lru_cache(2**14)  # a run opens a LoRA several times
def parse(key: str) -> Key | None:
    """The module and part of a key; None for one of no form that is read."""
    if (match := _KEY.fullmatch(key)) is None:
        return None
    row = next(i for i in range(len(ENDINGS)) if match[f"row{i}"] is not None)
    return Key(match["module"], ENDINGS[row][0] or match["part"])


def holds_lora(names: Iterable[str]) -> bool:
    """Whether a file with these keys holds changes of weights."""
    found = (parse(name) for name in names if _OWN.search(name))
    return any(key is not None and not key.part.startswith("whole") for key in found)


def writer(metadata: Mapping[str, str], names: Iterable[str]) -> str:
    """The program that made the file, as far as header and keys show it; else empty."""
    if network := metadata.get("ss_network_module", ""):
        found = (name for start, name in _NETWORKS.items() if network.startswith(start))
        return next(found, "kohya")
    if "ai-toolkit" in metadata.get("software", ""):
        return "ai-toolkit"
    if known := next((name for key, name in _WRITERS.items() if key in metadata), ""):
        return known
    return "LyCORIS" if any(name.startswith("lycoris_") for name in names) else ""
