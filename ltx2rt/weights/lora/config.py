"""The strength that a LoRA's own config gives it, where no `alpha` tensor does.

Such a config is PEFT's: `adapter_config.json` in the file's folder, as PEFT and diffusion-pipe
write it, or JSON in the header, as diffusers (`lora_adapter_metadata`, each key behind the name of
a part) and finetrainers (`lora_config`) do. kohya's `ss_network_alpha` counts for nothing: its
loaders take a file without `alpha` tensors at alpha = rank, and its converters have multiplied them
in.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError, few
from ltx2rt.weights.configs.keys import Keys, parse_json
from ltx2rt.weights.files import TensorFile

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_MODEL = "adapter_model.safetensors"
FILES = (ADAPTER_MODEL, "pytorch_lora_weights.safetensors")  # written by PEFT, by diffusers
ALPHAS, RANKS = ("lora_alpha", "alpha"), ("lora_rank", "rank", "r")  # plain numbers of a header
_PREFIX = {"transformer": "transformer", "text": "connectors", "gemma": "text_encoder"}
# Settings of PEFT that change the tensors' meaning, and their neutral values.
_PLAIN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("fan_in_fan_out", "use_qalora", "coft"), (False,)),
    "use_bdlora": (False, None),
    **dict.fromkeys(("layer_replication", "alora_invocation_tokens"), (None, [])),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "arrow_config": (None,),
    "use_cayley_neumann": (True,),
    "num_cayley_neumann_terms": (5,),
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # values of init_lora_weights
ALPHA = {"LORA": "lora_alpha", "LOHA": "alpha", "LOKR": "alpha"}  # by peft_type


@dataclass(frozen=True)
class Config:
    """Configs by the part that they are for, "" for all. source: their file or header key."""

    parts: Mapping[str, Keys]
    source: str = ""

    def of(self, part: str) -> Keys | None:
        """The config of a part of the checkpoint ("transformer", "text", "gemma")."""
        own = self.parts.get(_PREFIX.get(part, part), self.parts.get(""))
        strange = [keys for name, keys in self.parts.items() if name not in ("", *_PREFIX.values())]
        return strange[0] if own is None and part == "transformer" and strange else own

    def scale(self, part: str, module: str, rank: int) -> float | None:
        """alpha / r, or alpha / sqrt(r), of a module; None without a config of its part.

        module: its name in the file, which patterns are matched with; rank: of its tensors, 0 for
        LoHa and LoKr, which take the config's. Raises InputError.
        """
        if (keys := self.of(part)) is None:
            return None
        kind = str(keys.get("peft_type", None) or "LORA").upper()
        found = _by_module(keys, "rank_pattern", module, "r")
        found = keys.get("rank", None) if found is None else found  # as finetrainers has it
        r = _number(keys, "r", rank if found is None else found)
        if rank and r != rank:
            raise InputError(
                f"{keys.where}: r is {r:g} for {module}, its tensors have rank {rank}; pass "
                "the config that belongs to the file, or take it away"
            )
        alpha = _by_module(keys, "alpha_pattern", module, ALPHA[kind])
        alpha = _number(keys, ALPHA[kind], r if alpha is None else alpha)
        return alpha / (math.sqrt(r) if keys.get("use_rslora", False) else r)

    def check(self, has_magnitudes: bool) -> None:
        """Raises InputError for unsupported settings that change the tensors' meaning."""
        for keys in self.parts.values():
            kind = str(keys.get("peft_type", None) or "LORA").upper()
            if kind not in ALPHA:
                raise InputError(
                    f"{keys.where}: peft_type {kind[:40]}, read are {', '.join(ALPHA)}"
                )
            for name, plain in _PLAIN.items():
                if (value := keys.get(name, plain[0])) not in plain:
                    raise InputError(f"{keys.where}: {name} = {value!r:.80}, which is not read")
            begun = str(keys.get("init_lora_weights", True)).lower()
            if begun.startswith(_CHANGES_BASE):
                said = f"init_lora_weights is {begun[:40]!r}, which changes the weights that the "
                said += "LoRA goes with; convert it by PEFT's save_pretrained with "
                raise InputError(f"{keys.where}: {said}path_initial_model_for_weight_conversion")
            if keys.get("use_dora", False) and not has_magnitudes:
                said = "use_dora, but no tensor ends in lora_magnitude_vector"
                raise InputError(f"{keys.where}: {said}; pass the complete file")


def lora_file(path: Path) -> Path:
    """The file, or the one in a folder, the last of a training run. Raises InputError."""
    if not os.path.isdir(path):  # False as well for a name that is none
        return path
    found = sorted(path.glob("[!.]*.safetensors"))
    chosen = [path / name for name in FILES if path / name in found][:1] or found
    if all(re.fullmatch(r"lora-\d{6,}", file.stem) for file in found):
        chosen = sorted(found, key=lambda file: int(file.stem[5:]))[-1:]
    if len(chosen) != 1:
        inside = sorted([*path.glob("*.bin"), *path.glob("*/[!.]*.safetensors")])
        raise InputError(
            f"{path}: expected one LoRA in the folder, found {few(found or inside)}; pass a file"
        )
    return chosen[0]


def read_config(file: TensorFile, ranks: set[int]) -> Config:
    """The config in the header, else in the folder, which is taken for a file of another name than
    PEFT's only if its rank is the file's. Raises InputError."""
    for key, text in file.metadata.items():
        stated = text[:1] == "{" and re.search(r'"(?:[\w.]*\.)?(?:lora_alpha|peft_type)"', text)
        if stated or key == "lora_adapter_metadata":
            return _config(parse_json(text, f"{file.path}: {key}"), key)
    alpha, rank = (_plain(file.metadata, names) for names in (ALPHAS, RANKS))
    if alpha and rank and alpha != rank:
        where = f"{file.path}: alpha and rank in its header"
        return Config({"": Keys({"r": rank, "lora_alpha": alpha}, where)}, "its header")
    beside = file.path.parent / ADAPTER_CONFIG
    if beside.is_file():
        config = _config(parse_json(beside.read_bytes(), str(beside)), beside.name)
        own = file.path.name == ADAPTER_MODEL or not (beside.parent / ADAPTER_MODEL).exists()
        fits = not ranks or any(keys.get("r", 0) in ranks for keys in config.parts.values())
        if file.path.name == ADAPTER_MODEL or (own and fits):
            return config
    return Config({})


def _plain(metadata: Mapping[str, str], names: tuple[str, ...]) -> float:
    """The first of these keys that is a number, else 0."""
    found = (metadata[name] for name in names if name in metadata)
    return float(next((text for text in found if re.fullmatch(r"\d+(?:\.\d+)?", text)), 0))


def _config(keys: Keys, source: str) -> Config:
    parts: dict[str, dict[str, Any]] = {}
    for key, value in keys.data.items():
        prefix, _, name = str(key).rpartition(".")
        parts.setdefault(prefix, {})[name] = value
    return Config({prefix: Keys(found, keys.where) for prefix, found in parts.items()}, source)


def _by_module(keys: Keys, pattern: str, module: str, default: str) -> Any:
    """The value of the first pattern that ends the module's name, as PEFT matches them."""
    found = keys.get(pattern, None) or {}
    if not isinstance(found, Mapping):
        raise InputError(f"{keys.where}: {pattern} is {json.dumps(found)[:80]}, expected an object")
    for key, value in found.items():
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except re.error as error:
            raise InputError(f"{keys.where}: {pattern}: {key[:80]!r} is no pattern") from error
    return keys.get(default, None)


def _number(keys: Keys, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise keys.wrong(name, value, "a positive number")
    return float(value)
