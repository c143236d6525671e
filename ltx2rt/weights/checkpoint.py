"""Opening a checkpoint: which files are its parts, what they hold, and whether they are what the graphs expect.

Decides, from headers and configs only and never from file names, the layout (official: a single file, since LTX-2.5 a
file for each part; or a diffusers folder) and each part; no tensor data is read. Leaves data, LoRA and devices to
others.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

import ml_dtypes
import numpy as np

from ltx2rt.config import V25, DurationHeadConfig, Gemma4Config, GemmaConfig, ModelConfig, UpsamplerConfig
from ltx2rt.errors import GraphError, InputError
from ltx2rt.graph.ir import Cut
from ltx2rt.notes import note
from ltx2rt.weights import configs
from ltx2rt.weights.configs import Keys, parse_json, version_tuple
from ltx2rt.weights.files import TensorFile, TensorInfo, TensorSource, cut, open_tensors
from ltx2rt.weights.lora import open_lora
from ltx2rt.weights.names import TEXT_PROJECTION, collapse, component_of, fused_of, gemma_to_canonical, to_official

T = TypeVar("T")
FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
COMPONENTS = ("transformer", "text", "gemma", "video_vae", "audio_vae", "vocoder", "upsampler", "temporal_upsampler")
COMPONENTS += ("diffusion_decoder", "duration_head")
OPTIONAL = ("temporal_upsampler", "diffusion_decoder", "duration_head")  # not every generation has them
STATISTICS = ("vae.per_channel_statistics.mean-of-means", "vae.per_channel_statistics.std-of-means")
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
    "lora": "LoRA",
}
UPSAMPLERS = {  # kind by the upsampling convolution's dimensions, and output channels over input channels
    (4, 4): "upsampler",
    (4, 9): "x15_upsampler",
    (5, 2): "temporal_upsampler",
}
LORA_KEY = re.compile(r"\.(?:lora_A|lora_B|lora_down|lora_up)(?:\.default)?\.weight$|\.alpha$")
BLOCK_MATRIX = re.compile(r"transformer_blocks\.\d+\..*(?:attn.*\.to_(?:q|k|v|out\.0)|ff\.net\.(?:0\.proj|2))\.weight$")
MAIN_KEY = "model.diffusion_model.transformer_blocks."
TEXT_ENCODER_KEY = "model.layers.0.post_feedforward_layernorm.weight"
TOKENIZER_ASSET = "tokenizer_json"
ASSETS = ("hf_asset__", TOKENIZER_ASSET)  # prefixes of the files that a text-encoder file carries
KNOWN_UNUSED = [  # tensors that checkpoints carry and no network of ours reads
    r"vae\.decoder\.type_emb",  # of decoding with keyframes, which the first release of 2.5 does not do
    r"(?:audio_)?vae\.per_channel_statistics\.(?:channel|mean-of-stds|mean-of-stds_over_std-of-means)",
    r"vocoder\.mel_stft\.stft_fn\.inverse_basis",
    r"upsampler\.blur_down\.kernel",
    r"(?:model\.)?(?:vision_(?:tower|model|embedder)|multi_modal_projector|audio_projector|embed_(?:vision|audio))\..*",
    r"(?:language_model\.)?lm_head\..*",
]
_KNOWN_UNUSED = re.compile("|".join(f"(?:{pattern})" for pattern in KNOWN_UNUSED))
_HALVES = re.compile(  # networks in one file, each used without the others; the diffusion decoder is two
    r"(?:audio_)?vae\.(?:per_channel_statistics|encoder|decoder)\."
    r"(?:(?:conv_in(?!\.conv)|(?:det_stages|upsamples)\.[0-2])\.)?"
)


class RenamedSource:
    """Part of one or more sources, under canonical names."""

    def __init__(self, where: Path, home: Mapping[str, tuple[TensorSource, str]]):
        self.where, self._home = where, dict(home)

    def names(self) -> Iterable[str]:
        return self._home.keys()

    def info(self, name: str) -> TensorInfo:
        source, stored = self._home[name]
        return source.info(stored)

    def read(self, name: str, *cuts: Cut) -> np.ndarray:
        source, stored = self._home[name]
        return source.read(stored, *cuts)

    def joined(self, other: RenamedSource, names: Iterable[str]) -> RenamedSource:
        return RenamedSource(self.where, self._home | {name: other._home[name] for name in names})


class JoinedRows:
    """A source in which some tensors of another are one, row after row."""

    def __init__(self, source: TensorSource, joined: Mapping[str, tuple[str, ...]]):
        self._source, self._joined = source, dict(joined)

    def names(self) -> Iterable[str]:
        gone = {part for parts in self._joined.values() for part in parts}
        return [*(name for name in self._source.names() if name not in gone), *self._joined]

    def info(self, name: str) -> TensorInfo:
        if name not in self._joined:
            return self._source.info(name)
        first, *more = (self._source.info(part) for part in self._joined[name])
        return TensorInfo((first.shape[0] + sum(i.shape[0] for i in more), *first.shape[1:]), first.dtype)

    def read(self, name: str, *cuts: Cut) -> np.ndarray:
        if name not in self._joined:
            return self._source.read(name, *cuts)
        return cut(np.concatenate([self._source.read(part) for part in self._joined[name]]), *cuts)


@dataclass(frozen=True)
class Asset:
    """A file in a safetensors file, as a tensor of bytes or as a metadata string of that name."""

    path: Path
    name: str

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"

    def read_bytes(self) -> bytes:
        file = TensorFile(self.path)
        return file.read(self.name).tobytes() if self.name in file.names() else file.metadata[self.name].encode()


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: sizes, and one tensor source per component (canonical names, nothing read yet)."""

    path: Path
    layout: str  # "official" or "diffusers"
    config: ModelConfig
    sources: Mapping[str, RenamedSource]
    tokenizer: Path | Asset | None  # tokenizer.json
    loras_found: tuple[Path, ...] = ()
    unreadable: tuple[str, ...] = ()  # one line per file nearby that could not be opened

    @property
    def files(self) -> list[Path]:
        """The files and folders that were found, those beside the one that was named included."""
        tokenizer = [self.tokenizer] if isinstance(self.tokenizer, Path) else []
        return [self.path, *tokenizer, *self.loras_found, *(source.where for source in self.sources.values())]

    def source(self, component: str) -> RenamedSource:
        """Raises InputError if the component was not found, naming the flag that gives it."""
        if component in self.sources:
            return self.sources[component]
        if component not in COMPONENTS:
            raise InputError(f"unknown component {component!r}, known are {', '.join(COMPONENTS)}")
        raise absent(component, self.path, self.unreadable)

    def distilled_lora(self) -> Path:
        """The LoRA beside the weights whose header is that of a released distilled one, whatever its name.

        Those change every matrix of attention and feed-forward, audio and cross-modal ones included, at a rank near a
        tenth of the width (384 and 450 of 4096). Raises InputError listing the candidates if not exactly one fits.
        """
        source = self.source("transformer")
        matrices = {n for n in source.names() if BLOCK_MATRIX.search(n) and len(source.info(n).shape) == 2}

        def fits(path: Path) -> bool:
            try:
                lora = open_lora(path)
            except InputError:  # such as one of int8, which may lie there for others
                return False
            ranks = [lora.file.info(pair.down).shape[0] for pair in lora.pairs.values()]
            return matrices <= lora.pairs.keys() and 16 * max(ranks) >= self.config.transformer.width

        if not self.loras_found:
            raise absent("lora", self.path, self.unreadable)
        if found := only("lora", [path for path in self.loras_found if fits(path)]):
            return found
        listed = ", ".join(map(str, self.loras_found))
        raise InputError(
            f"{self.path}: no LoRA in it has the header of a distilled one: {listed}; pass one with --distilled-lora"
        )

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Within it graphs are traced: what a config that contradicts itself raises there becomes one InputError."""
        try:
            with np.errstate(divide="raise", invalid="raise"):  # in filters that rates decide
                yield
        except InputError:
            raise
        except (GraphError, ArithmeticError, IndexError, MemoryError, ValueError) as error:
            raise InputError(f"{self.path}: its config contradicts itself: {error}; pass another checkpoint") from error

    def require_tokenizer(self) -> Path | Asset:
        if self.tokenizer is None:
            raise InputError(
                f"{self.path}: no tokenizer.json was found; pass a Gemma folder with one by --text-encoder"
            )
        return self.tokenizer

    def video_decoder(self, asked: str | None) -> str:
        """ "conv" or "diffusion": the one that is asked for, else the convolutional one if there is one.

        Raises InputError if what is asked for was not found.
        """
        found = {"conv": bool(self.config.video_vae.decoder), "diffusion": "diffusion_decoder" in self.sources}
        if asked is None:
            return "conv" if found["conv"] or not found["diffusion"] else "diffusion"
        if not found[asked]:
            part = "video_vae" if asked == "conv" else "diffusion_decoder"
            raise InputError(
                f"--video-decoder: {asked}, but no {WORDS[part]} with that decoder was found; pass its file with "
                "--video-vae"
            )
        return asked


def absent(part: str, path: Path, unreadable: Iterable[str] = ()) -> InputError:
    flag = FLAGS.get(part, "--model")
    notes = "".join(f"; not readable: {line}" for line in unreadable)
    return InputError(f"{path}: no {WORDS.get(part, part)} was found; pass one with {flag}{notes}")


def only(part: str, candidates: list[T], describe: Callable[[T], str] = str) -> T | None:
    if len(candidates) > 1:
        listed = ", ".join(map(describe, candidates))
        flag = FLAGS.get(part, "--model")
        raise InputError(f"{len(candidates)} candidates for the {WORDS.get(part, part)}: {listed}; choose with {flag}")
    return candidates[0] if candidates else None


# ---- recognising parts ----------------------------------------------------------------------------------------------


@dataclass
class Parts:
    """What lies in a folder, by kind."""

    main: list[TensorFile] = field(default_factory=list)
    video_vae: list[Path] = field(default_factory=list)  # with the convolutional decoder
    diffusion_decoder: list[Path] = field(default_factory=list)
    audio_vae: list[Path] = field(default_factory=list)
    duration_head: list[Path] = field(default_factory=list)
    upsampler: list[Path] = field(default_factory=list)
    x15_upsampler: list[Path] = field(default_factory=list)  # only used if it is named: sizes depend on it
    temporal_upsampler: list[Path] = field(default_factory=list)
    lora: list[Path] = field(default_factory=list)
    gemma: list[Path] = field(default_factory=list)
    tokenizer: list[Path] = field(default_factory=list)
    diffusers: dict[str, list[Path]] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)


def file_kind(file: TensorFile) -> str | None:
    """ "main", "lora", one of `UPSAMPLERS`, another part that has a file of its own, or None, from the names and shapes
    in the header."""
    names = set(file.names())
    if any(name.startswith(MAIN_KEY) for name in names):
        return "main"
    if TEXT_ENCODER_KEY in names:
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
    parts, inner = Parts(), []
    if deep:
        folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and not (path / "config.json").exists()]
        inner = [path for one in folders if os.access(one, os.R_OK) for path in sorted(one.glob("*.safetensors"))]
    for path in [*sorted(folder.iterdir()), *inner]:
        try:
            if path.is_dir():
                kind = folder_kind(path)
                if kind in ("gemma", *UPSAMPLERS.values()):
                    getattr(parts, kind).append(path)
                elif kind:
                    parts.diffusers.setdefault(kind, []).append(path)
                if (path / "tokenizer.json").is_file():
                    parts.tokenizer.append(path / "tokenizer.json")
            elif path.suffix == ".safetensors":
                file = TensorFile(path)
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


# ---- opening --------------------------------------------------------------------------------------------------------


def open_checkpoint(
    model: str | Path,
    text_encoder: str | Path | None = None,
    upsampler: str | Path | None = None,
    temporal_upsampler: str | Path | None = None,
    *,
    video_vae: str | Path | None = None,
    audio_vae: str | Path | None = None,
    duration_head: str | Path | None = None,
) -> Checkpoint:
    """Open a file or a folder; parts that are not given are looked for in that folder (beside that file, and if it is
    a transformer alone also in the folders beside its own).

    upsampler: of any kind, whether it fits is decided by the stage that runs it; x1.5 ones are not looked for.
    Raises InputError for what is no checkpoint, an ambiguous part, a Gemma of the wrong size, and tensors of the main
    file that belong to no component. A part that is missing is an error only when its source is asked for.
    """
    path = Path(model)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; pass a checkpoint with --model")
    given = {
        "gemma": text_encoder,
        "upsampler": upsampler,
        "temporal_upsampler": temporal_upsampler,
        "video_vae": video_vae,
        "audio_vae": audio_vae,
        "duration_head": duration_head,
    }
    if path.is_dir() and folder_kind(path) == "transformer":
        parts, main = scan(path.parent), None
        parts.diffusers["transformer"] = [path]
    elif path.is_dir():
        parts = scan(path)
        if not parts.main and "transformer" not in parts.diffusers:
            parts = scan(path, deep=True)
        main = only("main", parts.main, lambda file: str(file.path))
    else:
        main = TensorFile(path)
        if file_kind(main) != "main":
            raise InputError(
                f"{path}: no LTX-2 checkpoint ({_contents(main)}); pass the main file or a folder with --model"
            )
        parts = scan(path.parent)
        if "video_vae" not in official_sources(main) and not (parts.video_vae or parts.diffusion_decoder):
            parts = scan(path.parent.parent, deep=True)
    if main is not None and "transformer" in parts.diffusers and path.is_dir():
        raise InputError(
            f"{path}: both a single file ({main.path.name}) and a diffusers transformer; pass one as --model"
        )
    if main is None and "transformer" not in parts.diffusers:
        if parts.unreadable:
            raise InputError(parts.unreadable[0])
        raise InputError(
            f"{path}: no checkpoint: neither an official single file nor a diffusers transformer "
            f"({_contents_of_folder(path, parts)}); pass one with --model"
        )
    index = model_index(path if path.is_dir() else path.parent)

    def pick(part: str) -> Path | None:
        return Path(chosen) if (chosen := given[part]) else only(part, listed(getattr(parts, part), index))

    gemma_path = pick("gemma")
    upsampler_paths = {part: pick(part) for part in ("upsampler", "temporal_upsampler")}

    sources: dict[str, RenamedSource] = {}
    gemma_config = None
    if gemma_path is not None:
        gemma_config, sources["gemma"] = open_gemma(gemma_path)
    upsamplers: dict[str, UpsamplerConfig] = {}
    for part, path_ in upsampler_paths.items():
        if path_ is not None:
            upsamplers[part], sources[part] = open_upsampler(path_, FLAGS[part])
    if (temporal := upsamplers.get("temporal_upsampler")) and not temporal.temporal:
        raise InputError(
            f"--temporal-upsampler: {temporal_upsampler} is a {temporal.kind} upsampler, expected a temporal one; pass "
            "this one with --upsampler"
        )

    if main is not None:
        layout = "official"
        files = {part: pick(part) for part in ("audio_vae", "duration_head")} | video_files(video_vae, parts)
        own = official_sources(main).keys()
        files = {part: path for part, path in files.items() if part not in own or given[part]}
        config, components = open_official(main, files, gemma_path, gemma_config, parts.unreadable)
    else:
        layout = "diffusers"
        folders = {part: only(part, listed(found, index)) for part, found in parts.diffusers.items()}
        config, components = open_diffusers(path, folders, gemma_config, parts.unreadable)
    sources |= components
    configs.check_connectors(config.text, config.transformer, str(sources["text"].where))
    if gemma_config is not None:
        configs.check_gemma(gemma_config, config.text, str(gemma_path))
    if config.duration_head is not None:
        configs.check_duration_head(config.duration_head, config.text, str(sources["duration_head"].where))
    config = replace(config, **upsamplers)
    for part, found in upsamplers.items():
        check_release(upsampler_paths[part], config.version, FLAGS[part])
        if found.in_channels != config.video_vae.latent_channels:
            raise InputError(
                f"{upsampler_paths[part]}: an upsampler of {found.in_channels} channels, the checkpoint's latents "
                f"have {config.video_vae.latent_channels}; pass that one with {FLAGS[part]}"
            )
        sources[part] = sources[part].joined(sources["video_vae"], STATISTICS)
    for source in sources.values():
        _refuse_float8(source)
    tokenizer = _tokenizer(gemma_path, parts.tokenizer)
    return Checkpoint(path, layout, config, sources, tokenizer, tuple(parts.lora), tuple(parts.unreadable))


def _refuse_float8(source: RenamedSource) -> None:
    """Their scales are spelled in several ways, and some files have none."""
    if encoded := [name for name in source.names() if source.info(name).dtype in FLOAT8]:
        raise InputError(
            f"{source.where}: {len(encoded)} tensors are float8 (first {encoded[0]}), and no float8 file is read; "
            "pass the bfloat16 one and, for float8 on the device, --weights-dtype float8"
        )


def _contents(file: TensorFile) -> str:
    kind = file_kind(file)
    if kind:
        return f"it is a {WORDS[kind]}"
    names = list(file.names())
    return f"{len(names)} tensors, first {names[0]}" if names else "no tensors"


def _contents_of_folder(path: Path, parts: Parts) -> str:
    if folder_kind(path) == "gemma":
        return "it is a Gemma folder, which --text-encoder takes"
    files = ("gemma", "video_vae", "diffusion_decoder", "audio_vae", "duration_head")
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


def video_files(chosen: str | Path | None, parts: Parts) -> dict[str, Path | None]:
    """The files with either decoder: the one that was chosen, of whichever kind, or what was found of each."""
    kinds = ("video_vae", "diffusion_decoder")
    if chosen is None:
        return {kind: only(kind, getattr(parts, kind)) for kind in kinds}
    kind = file_kind(file := TensorFile(chosen))
    if kind not in kinds:
        raise InputError(f"{chosen}: no video VAE ({_contents(file)}); pass one with --video-vae")
    return {kind: Path(chosen)}


def check_release(path: Path | None, version: tuple[int, ...], flag: str) -> None:
    """Files of LTX-2.5 state their version. Raises InputError for one of an earlier release beside it, and for one of
    LTX-2.5 beside an earlier release."""
    if path is None or path.is_dir() or not version:
        return
    own = version_tuple(TensorFile(path).metadata.get("model_version"))
    if (own >= V25) != (version >= V25):
        said = f"of LTX-{'.'.join(map(str, own))}" if own else "that states no model_version"
        raise InputError(
            f"{path}: a file {said} beside LTX-{'.'.join(map(str, version))}; pass that release's own with {flag}"
        )


def _tokenizer(gemma_dir: Path | None, found: list[Path]) -> Path | Asset | None:
    """The text encoder's own, or its neighbour's, or the only other one found."""
    if gemma_dir is not None and gemma_dir.is_file():
        file = TensorFile(gemma_dir)
        return Asset(gemma_dir, TOKENIZER_ASSET) if TOKENIZER_ASSET in (*file.names(), *file.metadata) else None
    if gemma_dir is not None:
        if (gemma_dir / "tokenizer.json").is_file():
            return gemma_dir / "tokenizer.json"
        beside = [path / "tokenizer.json" for path in sorted(gemma_dir.parent.iterdir())]
        found = [path for path in beside if path.is_file()] or found
    return found[0] if len(found) == 1 else None


def official_metadata(file: TensorFile) -> Keys:
    if "config" not in file.metadata:
        raise InputError(f"{file.path}: its metadata has no `config`; pass the original file, not a re-saved one")
    return parse_json(file.metadata["config"], f"{file.path}: config")


def open_official(
    main: TensorFile,
    paths: Mapping[str, Path | None],
    gemma_path: Path | None,
    gemma: GemmaConfig | Gemma4Config | None,
    unreadable: Iterable[str],
) -> tuple[ModelConfig, dict[str, RenamedSource]]:
    """Without upsamplers. paths: by part, of files beside the main one, which take the place of what that one holds.

    Raises InputError for what is missing, and for a text encoder of another release.
    """
    sources = official_sources(main)
    conv = "video_vae" in sources or paths.get("video_vae") is not None
    files = {part: TensorFile(path) for part, path in paths.items() if path}
    keys = {part: official_metadata(file) for part, file in files.items()}
    for part, file in files.items():
        sources |= component_sources(part, file)
    if "video_vae" not in sources and "diffusion_decoder" in files:  # both files have the encoder
        sources["video_vae"] = sources["diffusion_decoder"]
    for part in ("video_vae", "audio_vae", "vocoder"):
        if part not in sources:
            raise absent(part, main.path, unreadable)

    def section(name: str, part: str) -> Keys:
        return (keys[part] if part in keys else official_metadata(main)).inner(name)

    version = version_tuple(main.metadata.get("model_version"))
    if gemma_path is not None:
        check_gemma_version(main, version, gemma_keys(gemma_path), gemma_path)
    transformer, audio = section("transformer", ""), configs.official_audio_vae(section("audio_vae", "audio_vae"))
    sources["text"], width = _text_source(main, sources.get("text"), gemma_path)
    diffusion = files.get("diffusion_decoder")
    if conv or diffusion is None:
        video = configs.official_video_vae(section("vae", "video_vae"))
    else:
        shape = sources["video_vae"].info("vae.encoder.conv_in.conv.weight").shape
        video = configs.official_diffusion_vae(section("vae", "diffusion_decoder"), shape)
    video_file = files.get("video_vae") or (main if conv else diffusion) or main
    config = ModelConfig(
        version=version,
        transformer=configs.official_transformer(transformer),
        text=configs.official_text(transformer, width),
        gemma=gemma,
        video_vae=video,
        audio_vae=audio,
        vocoder=configs.official_vocoder(section("vocoder", "audio_vae"), audio),
        upsampler=None,
        video_vae_version=version_tuple(video_file.metadata.get("model_version")),
    )
    if diffusion is not None:
        decoder = configs.official_diffusion_decoder(section("vae", "diffusion_decoder"))
        config = replace(config, diffusion_decoder=decoder)
    if "duration_head" in sources:
        head = keys["duration_head"]
        head = head.inner("duration_head") if "duration_head" in head else Keys({}, head.where)
        config = replace(config, duration_head=_duration_head(head, sources["duration_head"], "official"))
    return config, sources


def _duration_head(keys: Keys, source: RenamedSource, layout: str) -> DurationHeadConfig:
    names = [f"duration_head.{m}_input_proj.weight" for m in ("video", "audio")]
    if missing := [name for name in names if name not in set(source.names())]:
        raise InputError(f"{source.where}: no {missing[0]}; pass a complete duration head with --duration-head")
    return configs.duration_head(keys, layout, *(source.info(name).shape[-1] for name in names))


def _text_source(main: TensorFile, text: RenamedSource | None, gemma_path: Path | None) -> tuple[RenamedSource, int]:
    """Connectors and text projection, which is in the main file or in the text encoder's; the width that it takes."""
    if text is None:
        raise InputError(f"{main.path}: no embeddings connectors; pass a complete checkpoint")

    def projections(source: TensorSource) -> list[str]:
        return [name for name in source.names() if re.match(rf"{TEXT_PROJECTION}.*aggregate_embed\.weight$", name)]

    if not projections(text):
        if gemma_path is None:
            raise absent("gemma", main.path)
        tensors = open_tensors(gemma_path)
        if not projections(tensors):
            raise InputError(
                f"{gemma_path}: a Gemma without LTX-2.5's text projection ({TEXT_PROJECTION}*aggregate_embed), which "
                f"{main.path} has not either; pass the release's own text-encoder file with --text-encoder"
            )
        projection = renamed(tensors, gemma_path, lambda name: name if name.startswith(TEXT_PROJECTION) else None)
        text = text.joined(projection, projection.names())
    widths = {text.info(name).shape[-1] for name in projections(text)}
    if len(widths) != 1:
        raise InputError(f"{text.where}: the text projections take different widths: {sorted(widths)}")
    return text, widths.pop()


def check_gemma_version(main: TensorFile, version: tuple[int, ...], gemma: Keys, where: Path) -> None:
    """Raises InputError if, as far as both say, the transformer was trained with another text encoder."""
    found, release = gemma.get("gemma_version", None), f"LTX-{'.'.join(map(str, version)) or '2'}"
    if "gemma_source_checkpoint" in main.metadata:
        source = parse_json(main.metadata["gemma_source_checkpoint"], f"{main.path}: gemma_source_checkpoint")
        if (wanted := source.need("gemma_version")) != found:
            raise InputError(
                f"{where}: gemma_version {found!r}, the transformer was trained with {wanted!r}; pass the text encoder "
                "of its release with --text-encoder"
            )
    elif version >= V25:
        if found is not None:
            raise InputError(
                f"{where}: gemma_version {found!r}, but {main.path} names none; pass the original files of one release"
            )
        note(f"neither {main.path.name} nor {where.name} names its gemma_version; whether they fit is not known")
    elif not str(gemma.get("model_type", "")).startswith("gemma3"):
        raise InputError(
            f"{where}: model_type {gemma.get('model_type', None)!r}, but {release} was trained with Gemma 3; pass that "
            "with --text-encoder"
        )


def official_sources(file: TensorFile) -> dict[str, RenamedSource]:
    homes: dict[str | None, dict[str, tuple[TensorSource, str]]] = {}
    for name in file.names():
        homes.setdefault(component_of(name), {})[name] = (file, name)
    if stray := homes.pop(None, None):
        raise InputError(f"{file.path}: {len(stray)} tensors belong to no component: {collapse(stray)}")
    return {str(component): RenamedSource(file.path, home) for component, home in homes.items()}


def component_sources(part: str, file: TensorFile) -> dict[str, RenamedSource]:
    """The sources of a file of its own, by component; prefixes that such a file leaves out are put back."""
    if part == "audio_vae":
        return official_sources(file)
    if part == "duration_head":
        return {part: renamed(file, file.path, lambda name: name)}
    return {part: renamed(file, file.path, lambda name: f"vae.{name.removeprefix('vae.')}")}


def gemma_keys(path: Path) -> Keys:
    """config.json of a Gemma folder, or the `gemma_config` of a text-encoder file."""
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"{path}: no Gemma folder (it must hold config.json); pass one with --text-encoder")
        return read_json(path / "config.json")
    file = TensorFile(path)
    if file_kind(file) != "gemma":
        raise InputError(f"{path}: no text encoder ({_contents(file)}); pass a Gemma folder, or a file of LTX-2.5")
    if "gemma_config" not in file.metadata:
        raise InputError(f"{path}: its metadata has no `gemma_config`; pass the original file, not a re-saved one")
    return parse_json(file.metadata["gemma_config"], f"{path}: gemma_config")


def open_gemma(path: Path) -> tuple[GemmaConfig | Gemma4Config, RenamedSource]:
    """The language model of a Gemma folder or of a text-encoder file."""
    config = configs.gemma(gemma_keys(path))

    def canonical(name: str) -> str | None:
        beside = path.is_file() and name.startswith((TEXT_PROJECTION, *ASSETS))
        return None if beside else gemma_to_canonical(name)

    return config, renamed(open_tensors(path), path, canonical)


def open_upsampler(path: Path, flag: str = "--upsampler") -> tuple[UpsamplerConfig, RenamedSource]:
    """An official upsampler file, or a diffusers folder, of any kind. flag: that names it."""
    if path.is_dir():
        if folder_kind(path) not in UPSAMPLERS.values():
            raise InputError(f"{path}: no latent upsampler folder; pass one, or a file, with {flag}")
        tensors, keys = open_tensors(path), read_json(path / "config.json")
    else:
        tensors = TensorFile(path)
        if file_kind(tensors) not in UPSAMPLERS.values():
            raise InputError(f"{path}: no latent upsampler ({_contents(tensors)}); pass one with {flag}")
        if "config" not in tensors.metadata:
            raise InputError(f"{path}: its metadata has no `config`; pass the original file, not a re-saved one")
        keys = parse_json(tensors.metadata["config"], f"{path}: config")
    rational = "upsampler.conv.weight" in set(tensors.names())
    return configs.upsampler(keys, rational), renamed(tensors, path, lambda name: name)


def renamed(tensors: TensorSource, where: Path, canonical: Callable[[str], str | None]) -> RenamedSource:
    """canonical: a tensor's name, None leaves it out. Raises InputError for two of one name."""
    home: dict[str, tuple[TensorSource, str]] = {}
    for stored in tensors.names():
        name = canonical(stored)
        if name is None:
            continue
        if name in home:
            raise InputError(f"{where}: {home[name][1]} and {stored} are two spellings of {name}")
        home[name] = (tensors, stored)
    return RenamedSource(where, home)


def open_diffusers(
    path: Path,
    folders: Mapping[str, Path | None],
    gemma: GemmaConfig | Gemma4Config | None,
    unreadable: Iterable[str],
) -> tuple[ModelConfig, dict[str, RenamedSource]]:
    """Without upsamplers."""

    def keys(component: str) -> Keys:
        folder = folders.get(component)
        if folder is None:
            raise absent(component, path, unreadable)
        return read_json(folder / "config.json")

    transformer = configs.diffusers_transformer(keys("transformer"))
    config = ModelConfig(
        version=(),
        transformer=transformer,
        text=configs.diffusers_text(keys("text"), transformer),
        gemma=gemma,
        video_vae=configs.diffusers_video_vae(keys("video_vae")),
        audio_vae=configs.diffusers_audio_vae(keys("audio_vae")),
        vocoder=configs.diffusers_vocoder(keys("vocoder")),
        upsampler=None,
    )
    stages = len(config.video_vae.encoder)
    sources = {}
    for component, folder in folders.items():
        assert folder is not None
        tensors = open_tensors(folder)
        source = renamed(tensors, folder, lambda name, c=component: to_official(c, name, stages))
        sources[component] = _joined_rows(component, source)
    if "diffusion_decoder" in folders:
        config = replace(config, diffusion_decoder=configs.diffusers_diffusion_decoder(keys("diffusion_decoder")))
    if "duration_head" in folders:
        head = _duration_head(keys("duration_head"), sources["duration_head"], "diffusers")
        config = replace(config, duration_head=head)
    return config, sources


def _joined_rows(component: str, source: RenamedSource) -> RenamedSource:
    """With tensors that are one in the official layout joined. Raises InputError where one of three is missing."""
    joined, names = fused_of(component, source.names()), set(source.names())
    if missing := [part for parts in joined.values() for part in parts if part not in names]:
        raise InputError(f"{source.where}: no {missing[0]}; pass a complete folder")
    return renamed(JoinedRows(source, joined), source.where, lambda name: name) if joined else source


# ---- audit ----------------------------------------------------------------------------------------------------------


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def audit(parameters: Mapping[str, Shaped], source: TensorSource, where: str | Path, partial: bool = False) -> None:
    """Every parameter has exactly one tensor of its shape; every tensor is a parameter or known to be unused.

    Reads headers only. Of an autoencoder's two halves, one that no parameter belongs to is not looked at. partial: the
    parameters are those of a part of the network, whose other tensors are not looked at.
    """
    names = set(source.names())
    missing = [name for name in parameters if name not in names]
    halves = {match[0] for name in parameters if (match := _HALVES.match(name))}
    unexpected = [
        name
        for name in sorted(names - parameters.keys())
        if not _KNOWN_UNUSED.fullmatch(name) and not ((match := _HALVES.match(name)) and match[0] not in halves)
    ]
    misshapen = [
        f"{name} is {list(source.info(name).shape)}, expected {list(spec.shape)}"
        for name, spec in parameters.items()
        if name in names and tuple(source.info(name).shape) != tuple(spec.shape)
    ]
    problems = []
    if missing:
        near = sorted({match for name in missing[:20] for match in difflib.get_close_matches(name, unexpected, 1)})
        hint = f" (nearest in the file: {collapse(near)})" if near else ""
        problems.append(f"{len(missing)} parameters have no tensor: {collapse(missing)}{hint}")
    if misshapen:
        more = f" and {len(misshapen) - 4} more" if len(misshapen) > 4 else ""
        problems.append(f"{len(misshapen)} tensors have another shape: {'; '.join(misshapen[:4])}{more}")
    if unexpected and not partial:
        problems.append(f"{len(unexpected)} tensors are used by no network: {collapse(unexpected)}")
    if problems:
        raise InputError(f"{where}: {'; '.join(problems)}; pass the checkpoint that its config describes")
