"""The tensor that a module of a LoRA file means, however its trainer spelled it.

Trainers put words before a module's name and replace its dots by underscores. Names are therefore
compared with underscores, and words are taken from the front until the rest is a name of the
family, official or diffusers': of the transformer, its connectors, the text projection, or Gemma.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, lru_cache

from ltx2rt.weights.audit import networks
from ltx2rt.weights.names import GEMMA, component_of, to_diffusers
from ltx2rt.weights.part_table import CONNECTORS, PARTS
from ltx2rt.weights.presets import preset

# Parts of a Gemma that no prompt goes through.
UNREAD = re.compile(
    r"vision_(?:tower|model)|multi_modal_projector|embed_vision|audio_tower|lm_head"
)
PRESETS = ("tiny-2.0", "tiny-2.3", "tiny-2.5")  # together they have every module of the family
_BLOCK = re.compile(r"(blocks|layers)[_.](\d+)(?=[_.])")
_FUSED = re.compile(r"(?P<start>.*?[._])(?:to_)?(?P<parts>qkv|kv)")
_WORDS = (
    r"_*(?:lora|lycoris|base_model|model|diffusion_model|velocity_model|transformer|unet|dit|net"
    r"|prior|pipe|module|orig_mod|fsdp_wrapped_module|ema|student|generator|connectors|text_encoders?|te\d?|gemma_?\d+_\d+b(?:_it)?|gemma\d*"
    r"|language_model|text_model)"
)
# Within a name: diffusers' attention processors, and wrappers of torch.compile and torch.distributed.
_WRAPPERS = re.compile(
    r"[._](?:processor|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=[._])"
)
_WORD, _DOTTED = re.compile(rf"{_WORDS}_+"), re.compile(rf"(?:{_WORDS}\.)+")


@lru_cache(2**14)  # a run opens a LoRA several times
def target(module: str, tensor: str = "weight") -> str | None:
    """The official name of a module's tensor; None for a module that is not of the family. tensor:
    "weight", "bias", or empty where the module is a tensor itself."""
    name = _WRAPPERS.sub("", module).replace(".", "_")
    block = _BLOCK.search(name)
    name = _BLOCK.sub(r"\1_*", name, count=1)
    while True:
        for end in (f"_{tensor}", ""):
            found = _spellings().get(name + end)
            if found and (end or not found.endswith((".weight", ".bias"))):
                return found.replace("*", block[2]) if block else found
        if (word := _WORD.match(name)) is None:
            return None
        name = name[word.end() :]


def unfused(module: str) -> tuple[str, ...]:
    """The modules that a fused one, such as `attn1.to_qkv`, is made of; none for any other."""
    if (match := _FUSED.fullmatch(module)) is None or target(module):
        return ()
    found = tuple(f"{match['start']}to_{part}" for part in match["parts"])
    return found if all(map(target, found)) else ()


def bare(module: str) -> str:
    """A module's name without the words before it, if it has dots."""
    return _DOTTED.sub("", module, count=1) if _DOTTED.match(module) else module


def part_of(name: str) -> str:
    """The part of the checkpoint that an official tensor's name belongs to."""
    return "gemma" if name.startswith(GEMMA) else component_of(name) or ""


@cache
def _spellings() -> dict[str, str]:
    """Official names, with `*` for the block, by every spelling with underscores."""
    found = {}
    for each in PRESETS:
        shapes = networks(preset(each).config, ("transformer", "text-encoder"))
        for name in {name for part in shapes.values() for name in part}:
            official = _BLOCK.sub(r"\1.*", name, count=1)
            found |= {spelling.replace(".", "_"): official for spelling in _of(official)}
    return found


def _of(official: str) -> Iterator[str]:
    """Spellings of a name behind the words that are taken away."""
    if (part := part_of(official)) == "gemma":
        yield official.removeprefix(GEMMA)
        return
    for name in (official.removeprefix(PARTS["transformer"].prefix), to_diffusers(part, official)):
        yield name
        yield re.sub(r"(to_out)\.0\.", r"\1.", name)  # as diffusers' old attention processors
    if official.startswith(CONNECTORS[0]):  # musubi-tuner's name of the video connector
        yield official.removeprefix(f"{PARTS['transformer'].prefix}video_")
