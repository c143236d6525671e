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
| `oft_blocks`, `rescale`, `oft_R`, `a1` to `b2`, `on_input` | OFT, GLoRA and (IA)^3 |
| `block_size`, ..., `scaled` | musubi-tuner's settings of OFT |
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
_KEY = re.compile(
    r"(?P<module>.+?)(?:"
    rf"{_LORA}(?:(?P<down>A|down)|(?P<up>B|up)){_ADAPTER}(?:\.weight)?"
    rf"|{_LORA}(?:B|up){_ADAPTER}\.(?P<up_bias>bias)"
    r"|\.(?P<part>hada_w[12]_[ab]|lokr_w[12](?:_[ab])?|diff_b|diff)(?:\.default)?"
    r"|\.(?P<times>oft_blocks|rescale|on_input|(?:oft_R|[ab][12])(?=\.weight$))(?:\.weight)?"
    r"|\.(?:oft_)?(?P<setting>coft_eps|coft|block_share|block_size|scaled)(?:_oft)?_metadata"
    r"|\.oft_R\.(?P<scaled>scaled)_oft"
    r"|\.(?P<alpha>alpha|lora_alpha|network_alpha)"
    r"|\.(?P<magnitude>dora_scale|magnitude|lora_magnitude_vector(?:\.[^.]+){0,2})"
    r"|\.(?P<norm>initial_norm)|\.(?P<diff>w_norm)|\.(?P<diff_b>b_norm)"
    r"|(?:\.modules_to_save(?:\.[^.]+)?)?\.(?P<whole>set_weight|weight)"
    r"|(?:\.modules_to_save(?:\.[^.]+)?|\.base_layer)?\.(?P<whole_b>bias)"
    r")"
)
# Words that no checkpoint has; they save parsing the names of its tensors.
_OWN = re.compile(
    r"lora[._]|oft_|on_input|[ab][12]\.weight$|hada_w|lokr_w|dora_scale|magnitude|\.diff(?:_b)?$|_norm$"
)
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
    found = {name: text for name, text in match.groupdict().items() if text}
    module = found.pop("module")
    named = next((found[name] for name in ("part", "times", "setting") if name in found), None)
    return Key(module, named or next(iter(found)))


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
