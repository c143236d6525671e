"""Which files and folders hold which parts of a checkpoint.

Decides from headers and configs alone, never from names. Leaves opening what was found to
`checkpoint`, choosing among several to `choose`, downloading to `hub`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ltx2rt.errors import InputError
from ltx2rt.weights import comfy, configs
from ltx2rt.weights.configs import Keys, parse_json
from ltx2rt.weights.files import (
    SHARD_INDEX,
    WEIGHTS,
    TensorFile,
    TensorFolder,
    open_file,
    open_tensors,
    read_index,
)
from ltx2rt.weights.names import CONNECTORS, TEXT_PROJECTION, official_names

T = TypeVar("T")
DIFFUSERS_CLASSES = {
    "LTX2VideoTransformer3DModel": "transformer",
    "LTX2TextConnectors": "text",
    "AutoencoderKLLTX2Video": "video_vae",
    "AutoencoderKLLTX2Audio": "audio_vae",
    "LTX2Vocoder": "vocoder",
    "LTX2VocoderWithBWE": "vocoder",
    "LTX2LatentUpsamplerModel": "upsampler",
    "LTX2VideoDiffusionDecoderModel": "diffusion_decoder",
    "LTX2DurationHead": "duration_head",
}
FLAGS = {
    "gemma": "--text-encoder",
    "upsampler": "--upsampler",
    "temporal_upsampler": "--temporal-upsampler",
    "video_vae": "--video-vae",
    "diffusion_decoder": "--video-vae",
    "audio_vae": "--audio-vae",
    "vocoder": "--audio-vae",
    "duration_head": "--duration-head",
    "lora": "--distilled-lora",
}
WORDS = {
    "gemma": "text encoder",
    "video_vae": "video VAE",
    "diffusion_decoder": "diffusion video decoder",
    "audio_vae": "audio VAE",
    "duration_head": "duration head",
    "upsampler": "x2 spatial upsampler",
    "x15_upsampler": "x1.5 spatial upsampler",
    "temporal_upsampler": "x2 temporal upsampler",
    "main": "checkpoint",
    "connectors": "embeddings connectors",
    "lora": "LoRA",
}
UPSAMPLERS = {  # kind by the upsampling convolution's dimensions, and output channels over input channels
    (4, 4): "upsampler",
    (4, 9): "x15_upsampler",
    (5, 2): "temporal_upsampler",
}
LORA_KEY = re.compile(r"\.(?:lora_A|lora_B|lora_down|lora_up)(?:\.default)?\.weight$|\.alpha$")
INDEX = "model_index.json"  # passed as the model, it means the diffusers folders beside it
MAIN_KEY = "model.diffusion_model.transformer_blocks."
GEMMA_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
GEMMA_KEYS = ("layers.0.post_feedforward_layernorm.weight", "layers.0.self_attn.q_norm.weight", "norm.weight")
GEMMA_GGUF = "gemma3"  # the architecture that a GGUF file of the text encoder names


def needed(part: str) -> str:
    """The word for a part that a run needs."""
    return "distilled LoRA" if part == "lora" else WORDS.get(part, part)


def absent(
    parts: str | Sequence[str], path: Path, unreadable: Iterable[str] = (), also: Sequence[str] = ()
) -> InputError:
    """One line for all parts that are missing. also: those that some pipelines need besides."""
    parts = [parts] if isinstance(parts, str) else list(parts)
    words = " and no ".join(map(needed, parts))
    flags = " and ".join(dict.fromkeys(FLAGS.get(part, "--model") for part in parts))
    one = "one" if len(parts) == 1 else "them"
    said = f"{path}: no {words} was found; pass {one} with {flags}"
    if also:
        named = ", ".join(f"{needed(part)} ({FLAGS.get(part, '--model')})" for part in also)
        said += f"; missing too, which some pipelines need: {named}"
    return InputError(said + "".join(f"; not readable: {line}" for line in unreadable))


def only(part: str, candidates: list[T]) -> T | None:
    refuse_ambiguous(**{part: candidates})
    return candidates[0] if candidates else None


def refuse_ambiguous(**found: Sequence[Any]) -> None:
    """Raise one InputError for all parts that have several candidates, listing them and the flags that choose."""
    said = []
    for part, candidates in found.items():
        if len(candidates) > 1:
            listed, flag = ", ".join(map(str, candidates)), FLAGS.get(part, "--model")
            choose = "keep one of them there" if part == "connectors" else f"choose with {flag}"
            word = WORDS.get(part, part)
            said.append(f"{len(candidates)} candidates for the {word}: {listed}; {choose}")
    if said:
        raise InputError(". ".join(said))


@dataclass
class Parts:
    """The files of a folder by kind."""

    main: list[TensorFile | TensorFolder] = field(default_factory=list)  # a folder: shards under an index
    video_vae: list[Path] = field(default_factory=list)  # with the convolutional decoder
    diffusion_decoder: list[Path] = field(default_factory=list)
    audio_vae: list[Path] = field(default_factory=list)
    connectors: list[Path] = field(default_factory=list)  # or the text projection, or both
    duration_head: list[Path] = field(default_factory=list)
    upsampler: list[Path] = field(default_factory=list)
    x15_upsampler: list[Path] = field(default_factory=list)  # only used if it is named: sizes depend on it
    temporal_upsampler: list[Path] = field(default_factory=list)
    lora: list[Path] = field(default_factory=list)
    gemma: list[Path] = field(default_factory=list)
    tokenizer: list[Path] = field(default_factory=list)
    diffusers: dict[str, list[Path]] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)


def file_kind(file: Any) -> str | None:
    """ "main", "lora", one of `UPSAMPLERS`, another part that has a file of its own, or None, from the names and shapes
    in the header."""
    names = set(file.names())
    if any(name.startswith(MAIN_KEY) for name in names):
        return "main"
    whole = any(all(prefix + key in names for key in GEMMA_KEYS) for prefix in GEMMA_PREFIXES)
    if whole or getattr(file, "architecture", "") == GEMMA_GGUF:
        return "gemma"
    if any(name.startswith("duration_head.") for name in names):
        return "duration_head"
    if any(name.startswith(("audio_vae.", "vocoder.")) for name in names):
        return "audio_vae"
    if any(name.removeprefix("vae.").startswith("per_channel_statistics.") for name in names):
        diffusion = any(name.removeprefix("vae.").startswith("decoder.det_stages.") for name in names)
        return "diffusion_decoder" if diffusion else "video_vae"
    if names and all(LORA_KEY.search(name) for name in names):
        return "lora"
    official = official_names(names).values()
    if any(name.startswith((*CONNECTORS, TEXT_PROJECTION)) for name in official):
        return "connectors"
    if {"initial_conv.weight", "final_conv.weight"} <= names:
        for name in {"upsampler.0.weight", "upsampler.conv.weight"} & names:
            shape = file.info(name).shape
            return UPSAMPLERS.get((len(shape), shape[0] // shape[1])) if len(shape) > 1 and shape[1] else None
    return None


def folder_kind(folder: Path) -> str | None:
    """A diffusers component, "gemma", one of `UPSAMPLERS` or None, from config.json."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    keys = read_json(path)
    if str(keys.get("model_type", "")).startswith("gemma"):
        return "gemma"
    kind = DIFFUSERS_CLASSES.get(str(keys.get("_class_name", "")))
    return configs.upsampler_kind(keys) if kind == "upsampler" else kind


def read_json(path: Path) -> Keys:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}") from error
    if text.startswith(b"version https://git-lfs"):
        raise InputError(f"{path}: a git-lfs pointer; run `git lfs pull` in its repository")
    return parse_json(text, str(path))


def scan(folder: Path, deep: bool = False) -> Parts:
    """Files directly in the folder and in its sub-folders that have a config; headers only. deep: also the files in
    sub-folders without one, as LTX-2.5 is released."""
    inner = []
    if deep:
        folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and not (path / "config.json").exists()]
        inner = [file for one in folders for file in comfy.inside(one) if file.suffix in WEIGHTS]
    return examine([*sorted(folder.iterdir()), *inner])


def scan_quietly(paths: Iterable[Path]) -> Parts:
    """As `scan`, among files of other models, which are not mentioned even if they are damaged."""
    chosen = [path for path in paths if path.is_dir() or _may_belong(path)]
    parts = examine(chosen)
    parts.main = [file for file in parts.main if _joint(file)]
    parts.lora = [path for path in parts.lora if _joint(open_file(path))]
    parts.tokenizer += [path for path in chosen if path.name == "tokenizer.json" and path not in parts.tokenizer]
    parts.tokenizer = [path for path in parts.tokenizer if comfy.is_gemma_tokenizer(path)]
    parts.diffusers = {}
    files = tuple(f"{path}:" for path in chosen if path.suffix in WEIGHTS)
    ours = (*files, *(f"{path}: a config without weights" for path in chosen))
    parts.unreadable = [line for line in parts.unreadable if line.startswith(ours)]
    return parts


def _may_belong(path: Path) -> bool:
    if path.name.endswith(SHARD_INDEX):
        try:
            return comfy.JOINT in path.read_bytes()
        except OSError:
            return False
    return path.name == "tokenizer.json" or comfy.may_be_ltx(path)


def _joint(file: Any) -> bool:
    """Whether a transformer, or a LoRA of one, has the layers between video and sound."""
    return any(comfy.JOINT.decode() in name for name in file.names())


def examine(paths: Iterable[Path]) -> Parts:
    """The kinds of these files, and of the folders that have a config."""
    parts = Parts()
    shards: set[Path] = set()
    for path in sorted(paths, key=lambda p: not p.name.endswith(SHARD_INDEX)):
        try:
            if path.is_dir():
                kind = folder_kind(path)
                if kind and not any(path.glob("*.safetensors*")):  # as a download of other parts leaves it
                    parts.unreadable.append(f"{path}: a config without weights")
                elif kind in ("gemma", *UPSAMPLERS.values()):
                    getattr(parts, kind).append(path)
                elif kind:
                    parts.diffusers.setdefault(kind, []).append(path)
                if (path / "tokenizer.json").is_file():
                    parts.tokenizer.append(path / "tokenizer.json")
            elif path.name.endswith(SHARD_INDEX):
                own = set(read_index(path).values())
                shards |= own  # and not files of their own if one of them cannot be read
                file = open_tensors(path)
                if file_kind(file) == "main":
                    parts.main.append(file)
                else:
                    shards -= own
            elif path.suffix in WEIGHTS and path not in shards:
                file = open_file(path)
                kind = file_kind(file)
                if kind == "main":
                    parts.main.append(file)
                elif kind:
                    getattr(parts, kind).append(path)
        except InputError as error:
            parts.unreadable.append(str(error))
        except PermissionError as error:
            parts.unreadable.append(f"{path}: cannot read: {error.strerror}")
    return parts


def contents(file: TensorFile | TensorFolder) -> str:
    kind = file_kind(file)
    if kind:
        return f"it is {'' if kind == 'connectors' else 'a '}{WORDS[kind]}"
    if architecture := getattr(file, "architecture", ""):
        return f"it is a GGUF file of {architecture[:40]!r}"
    names = list(file.names())
    return f"{len(names)} tensors, first {names[0]}" if names else "no tensors"


def contents_of_folder(path: Path, parts: Parts) -> str:
    if folder_kind(path) == "gemma":
        return "it is a Gemma folder, which --text-encoder takes"
    files = ("gemma", "video_vae", "diffusion_decoder", "audio_vae", "connectors", "duration_head")
    kinds = [WORDS[kind] for kind in (*files, *UPSAMPLERS.values(), "lora") if getattr(parts, kind)]
    return f"found: {', '.join([*kinds, *parts.diffusers]) or 'nothing of LTX-2'}"


def model_index(folder: Path) -> frozenset[str]:
    """The names of a diffusers folder's own parts; none if it does not list them."""
    path = folder / "model_index.json"
    return frozenset(read_json(path).data) if path.is_file() else frozenset()


def listed(found: list[Path], index: frozenset[str]) -> list[Path]:
    """Of several candidates those that the folder's index lists, if it does."""
    named = [path for path in found if path.name in index]
    return named if len(found) > 1 and named else found


def video_files(chosen: str | Path | None, parts: Parts, own: Container[str]) -> dict[str, Path | None]:
    """The files with either decoder: the one that was chosen, of whichever kind, or what was found of each that the
    main file has not of its own."""
    kinds = ("video_vae", "diffusion_decoder")
    if chosen is None:
        return {kind: only(kind, getattr(parts, kind)) for kind in kinds if kind not in own}
    kind = file_kind(file := TensorFile(chosen))
    if kind not in kinds:
        raise InputError(f"{chosen}: no video VAE ({contents(file)}); pass one with --video-vae")
    return {kind: Path(chosen)}
