"""Opening a checkpoint: which files are its parts, what they hold, and whether they are what the graphs expect.

Decides, from headers and configs only and never from file names, the layout (official single file or diffusers
folder) and each part; no tensor data is read. Leaves data, LoRA and devices to others.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ml_dtypes
import numpy as np

from ltx2rt.config import GemmaConfig, ModelConfig
from ltx2rt.errors import GraphError, InputError
from ltx2rt.graph.ir import Cut
from ltx2rt.weights import configs
from ltx2rt.weights.configs import Keys, parse_json, version_tuple
from ltx2rt.weights.files import TensorFile, TensorFolder, TensorInfo, TensorSource, open_tensors
from ltx2rt.weights.lora import open_lora
from ltx2rt.weights.names import TEXT_PROJECTION, collapse, component_of, gemma_to_canonical, to_official
from ltx2rt.weights.quantised import Float8, dequantised, stored_float8

T = TypeVar("T")
ENCODED = [np.dtype(x) for x in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8, np.uint8)]
COMPONENTS = ("transformer", "text", "gemma", "video_vae", "audio_vae", "vocoder", "upsampler")
STATISTICS = ("vae.per_channel_statistics.mean-of-means", "vae.per_channel_statistics.std-of-means")
DIFFUSERS_CLASSES = {
    "LTX2VideoTransformer3DModel": "transformer",
    "LTX2TextConnectors": "text",
    "AutoencoderKLLTX2Video": "video_vae",
    "AutoencoderKLLTX2Audio": "audio_vae",
    "LTX2Vocoder": "vocoder",
    "LTX2VocoderWithBWE": "vocoder",
    "LTX2LatentUpsamplerModel": "upsampler",
}
FLAGS = {"gemma": "--text-encoder", "upsampler": "--upsampler", "lora": "--distilled-lora"}
WORDS = {"gemma": "Gemma folder", "upsampler": "x2 spatial upsampler", "main": "checkpoint", "lora": "LoRA"}
LORA_KEY = re.compile(r"\.(?:lora_A|lora_B|lora_down|lora_up)(?:\.default)?\.weight$|\.alpha$")
BLOCK_MATRIX = re.compile(r"transformer_blocks\.\d+\..*(?:attn.*\.to_(?:q|k|v|out\.0)|ff\.net\.(?:0\.proj|2))\.weight$")
INDEX = "model_index.json"  # passed as the model, it means the diffusers folders beside it
MAIN_KEY = "model.diffusion_model.transformer_blocks."
KNOWN_UNUSED = [  # tensors that checkpoints carry and no network of ours reads
    r"(?:audio_)?vae\.per_channel_statistics\.(?:channel|mean-of-stds|mean-of-stds_over_std-of-means)",
    r"vocoder\.mel_stft\.stft_fn\.inverse_basis",
    r"upsampler\.blur_down\.kernel",
    r"(?:model\.)?(?:vision_tower|multi_modal_projector)\..*",
    r"(?:language_model\.)?lm_head\..*",
]
_KNOWN_UNUSED = re.compile("|".join(f"(?:{pattern})" for pattern in KNOWN_UNUSED))
_HALVES = re.compile(r"(?:audio_)?vae\.(?:encoder|decoder)\.")  # two networks in one file, each used without the other


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

    def float8(self, name: str, *cuts: Cut) -> Float8 | None:
        source, stored = self._home[name]
        return stored_float8(source, stored, *cuts)

    def joined(self, other: RenamedSource, names: Iterable[str]) -> RenamedSource:
        return RenamedSource(self.where, self._home | {name: other._home[name] for name in names})


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: sizes, and one tensor source per component (canonical names, nothing read yet)."""

    path: Path
    layout: str  # "official" or "diffusers"
    config: ModelConfig
    sources: Mapping[str, RenamedSource]
    tokenizer_path: Path | None  # tokenizer.json
    loras_found: tuple[Path, ...] = ()
    unreadable: tuple[str, ...] = ()  # one line per file nearby that could not be opened

    @property
    def files(self) -> list[Path]:
        """The files and folders that were found, those beside the one that was named included."""
        tokenizer = [self.tokenizer_path] if self.tokenizer_path else []
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

    def require_tokenizer(self) -> Path:
        if self.tokenizer_path is None:
            raise InputError(
                f"{self.path}: no tokenizer.json was found; pass a Gemma folder with one by --text-encoder"
            )
        return self.tokenizer_path


def absent(part: str, path: Path, unreadable: Iterable[str] = ()) -> InputError:
    flag = FLAGS.get(part, "--model")
    notes = "".join(f"; not readable: {line}" for line in unreadable)
    return InputError(f"{path}: no {WORDS.get(part, part)} was found; pass one with {flag}{notes}")


def only(part: str, candidates: list[T]) -> T | None:
    refuse_ambiguous(**{part: candidates})
    return candidates[0] if candidates else None


def refuse_ambiguous(**found: Sequence[Any]) -> None:
    """Raise one InputError for all parts that have several candidates, listing them and the flags that choose."""
    said = []
    for part, candidates in found.items():
        if len(candidates) > 1:
            listed, flag = ", ".join(map(str, candidates)), FLAGS.get(part, "--model")
            said.append(f"{len(candidates)} candidates for the {WORDS.get(part, part)}: {listed}; choose with {flag}")
    if said:
        raise InputError(". ".join(said))


# ---- recognising parts ----------------------------------------------------------------------------------------------


@dataclass
class Parts:
    """What lies in a folder, by kind."""

    main: list[TensorFile] = field(default_factory=list)
    upsampler: list[Path] = field(default_factory=list)
    lora: list[Path] = field(default_factory=list)
    gemma: list[Path] = field(default_factory=list)
    tokenizer: list[Path] = field(default_factory=list)
    diffusers: dict[str, list[Path]] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)


def file_kind(file: Any) -> str | None:
    """ "main", "upsampler" (x2 spatial), "lora" or None, from the names and shapes in the header."""
    names = set(file.names())
    if any(name.startswith(MAIN_KEY) for name in names):
        return "main"
    if names and all(LORA_KEY.search(name) for name in names):
        return "lora"
    if {"initial_conv.weight", "final_conv.weight"} <= names:
        for name in {"upsampler.0.weight", "upsampler.conv.weight"} & names:
            shape = file.info(name).shape
            return "upsampler" if len(shape) == 4 and shape[0] == 4 * shape[1] else None
    return None


def folder_kind(folder: Path) -> str | None:
    """A diffusers component, "gemma" or None, from config.json."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    keys = read_json(path)
    if str(keys.get("model_type", "")).startswith("gemma"):
        return "gemma"
    return DIFFUSERS_CLASSES.get(str(keys.get("_class_name", "")))


def read_json(path: Path) -> Keys:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}") from error
    if text.startswith(b"version https://git-lfs"):
        raise InputError(f"{path}: a git-lfs pointer; run `git lfs pull` in its repository")
    return parse_json(text, str(path))


def scan(folder: Path) -> Parts:
    """Files directly in the folder and in its sub-folders that have a config; headers only."""
    parts = Parts()
    for path in sorted(folder.iterdir()):
        try:
            if path.is_dir():
                kind = folder_kind(path)
                if kind and not any(path.glob("*.safetensors*")):  # as a download of other parts leaves it
                    parts.unreadable.append(f"{path}: a config without weights")
                elif kind in ("gemma", "upsampler"):
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
    model: str | Path, text_encoder: str | Path | None = None, upsampler: str | Path | None = None
) -> Checkpoint:
    """Open a single file or a folder; parts that are not given are looked for in that folder (beside that file).

    Raises InputError for what is no checkpoint, an ambiguous part, a Gemma of the wrong size, and tensors of the main
    file that belong to no component. A part that is missing is an error only when its source is asked for.
    """
    path = Path(model)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; pass a checkpoint with --model")
    mains: list[Any] = []
    if path.name == INDEX:
        path = path.parent
        parts, main = scan(path), None
    elif path.is_dir():
        parts = scan(path)
        mains = [file.path for file in parts.main]
        mains += [path / INDEX] if "transformer" in parts.diffusers else []
        main = parts.main[0] if parts.main else None
    else:
        main = TensorFile(path)
        if file_kind(main) != "main":
            raise InputError(
                f"{path}: no LTX-2 checkpoint ({_contents(main)}); pass the main file or a folder with --model"
            )
        parts = scan(path.parent)
    parts.upsampler = [each for each in parts.upsampler if each.is_dir() == (main is None)] or parts.upsampler
    upsamplers = [] if upsampler else parts.upsampler
    refuse_ambiguous(main=mains, gemma=[] if text_encoder else parts.gemma, upsampler=upsamplers)
    if main is None and "transformer" not in parts.diffusers:
        if parts.unreadable:
            raise InputError(parts.unreadable[0])
        raise InputError(
            f"{path}: no checkpoint: neither an official single file nor a diffusers transformer "
            f"({_contents_of_folder(path, parts)}); pass one with --model"
        )
    gemma_dir = Path(text_encoder) if text_encoder else only("gemma", parts.gemma)
    upsampler_path = Path(upsampler) if upsampler else only("upsampler", parts.upsampler)

    sources: dict[str, RenamedSource] = {}
    gemma_config = None
    if gemma_dir is not None:
        gemma_config, sources["gemma"] = open_gemma(gemma_dir)
    upsampler_config = None
    if upsampler_path is not None:
        upsampler_config, sources["upsampler"] = open_upsampler(upsampler_path)

    if main is not None:
        main = dequantised(main)
        layout, config = "official", official_config(main, gemma_config, upsampler_config)
        sources |= official_sources(main)
    else:
        layout = "diffusers"
        folders = {part: only(part, found) for part, found in parts.diffusers.items()}
        config, components = open_diffusers(path, folders, gemma_config, upsampler_config, parts.unreadable)
        sources |= components
    configs.check_connectors(config.text, config.transformer, str(sources["text"].where))
    if gemma_config is not None:
        configs.check_gemma(gemma_config, config.text, str(gemma_dir))
    if upsampler_config is not None:
        if upsampler_config.in_channels != config.video_vae.latent_channels:
            raise InputError(
                f"{upsampler_path}: an upsampler of {upsampler_config.in_channels} channels, the checkpoint's latents "
                f"have {config.video_vae.latent_channels}; pass that one with --upsampler"
            )
        sources["upsampler"] = sources["upsampler"].joined(sources["video_vae"], STATISTICS)
    for source in sources.values():
        _refuse_encoded(source)
    tokenizer = _tokenizer(gemma_dir, parts.tokenizer)
    return Checkpoint(path, layout, config, sources, tokenizer, tuple(parts.lora), tuple(parts.unreadable))


def _refuse_encoded(source: RenamedSource) -> None:
    """Raises InputError for quantised tensors without the companions of `quantised`: scales are spelled in several
    ways, and some files have none."""
    names = [name for name in source.names() if name.endswith("weight")]
    if encoded := [name for name in names if source.info(name).dtype in ENCODED]:
        dtypes = ", ".join(sorted({str(source.info(name).dtype) for name in encoded}))
        raise InputError(
            f"{source.where}: {len(encoded)} tensors are {dtypes} without the scales of a known format (first "
            f"{encoded[0]}); pass the bfloat16 file and, for float8 on the device, --weights-dtype float8"
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
    kinds = [WORDS[kind] for kind in ("gemma", "upsampler", "lora") if getattr(parts, kind)]
    return f"found: {', '.join([*kinds, *parts.diffusers]) or 'nothing of LTX-2'}"


def _tokenizer(gemma_dir: Path | None, found: list[Path]) -> Path | None:
    """The Gemma folder's own, or its neighbour's, or the only other one found."""
    if gemma_dir is not None:
        if (gemma_dir / "tokenizer.json").is_file():
            return gemma_dir / "tokenizer.json"
        beside = [path / "tokenizer.json" for path in sorted(gemma_dir.parent.iterdir())]
        found = [path for path in beside if path.is_file()] or found
    return found[0] if len(found) == 1 else None


def official_metadata(file: TensorFile) -> Keys:
    if "config" not in file.metadata:
        raise InputError(f"{file.path}: its metadata has no `config`; pass the original file, not a re-saved one")
    if "gemma_source_checkpoint" in file.metadata:
        raise InputError(f"{file.path}: LTX-2.5 (Gemma 4) is not supported; pass an LTX-2.0 or 2.3 checkpoint")
    return parse_json(file.metadata["config"], f"{file.path}: config")


def official_config(file: TensorFile, gemma: GemmaConfig | None, upsampler: Any) -> ModelConfig:
    keys = official_metadata(file)
    projections = [name for name in file.names() if re.match(rf"{TEXT_PROJECTION}.*aggregate_embed\.weight$", name)]
    if not projections:
        raise InputError(f"{file.path}: no {TEXT_PROJECTION}*aggregate_embed.weight; pass a complete checkpoint")
    widths = {file.info(name).shape[-1] for name in projections}
    if len(widths) != 1:
        raise InputError(f"{file.path}: the text projections take different widths: {sorted(widths)}")
    transformer, audio = keys.inner("transformer"), configs.official_audio_vae(keys.inner("audio_vae"))
    return ModelConfig(
        version=version_tuple(file.metadata.get("model_version")),
        transformer=configs.official_transformer(transformer),
        text=configs.official_text(transformer, widths.pop()),
        gemma=gemma,
        video_vae=configs.official_video_vae(keys.inner("vae")),
        audio_vae=audio,
        vocoder=configs.official_vocoder(keys.inner("vocoder"), audio),
        upsampler=upsampler,
    )


def official_sources(file: TensorFile) -> dict[str, RenamedSource]:
    homes: dict[str | None, dict[str, tuple[TensorSource, str]]] = {}
    for name in file.names():
        homes.setdefault(component_of(name), {})[name] = (file, name)
    if stray := homes.pop(None, None):
        raise InputError(f"{file.path}: {len(stray)} tensors belong to no component: {collapse(stray)}")
    return {str(component): RenamedSource(file.path, home) for component, home in homes.items()}


def open_gemma(folder: Path) -> tuple[GemmaConfig, RenamedSource]:
    if not folder.is_dir() or not (folder / "config.json").is_file():
        raise InputError(f"{folder}: no Gemma folder (it must hold config.json); pass one with --text-encoder")
    config = configs.gemma(read_json(folder / "config.json"))
    tensors = open_tensors(folder)
    return config, renamed(tensors, folder, gemma_to_canonical)


def open_upsampler(path: Path) -> tuple[Any, RenamedSource]:
    """An official upsampler file, or a diffusers folder."""
    if path.is_dir():
        if folder_kind(path) != "upsampler":
            raise InputError(f"{path}: no latent upsampler folder; pass one, or a file, with --upsampler")
        tensors, keys = open_tensors(path), read_json(path / "config.json")
    else:
        tensors = TensorFile(path)
        if file_kind(tensors) != "upsampler":
            raise InputError(
                f"{path}: no x2 spatial latent upsampler ({_contents(tensors)}); pass one with --upsampler"
            )
        if "config" not in tensors.metadata:
            raise InputError(f"{path}: its metadata has no `config`; pass the original file, not a re-saved one")
        keys = parse_json(tensors.metadata["config"], f"{path}: config")
    rational = "upsampler.conv.weight" in set(tensors.names())
    return configs.upsampler(keys, rational), renamed(tensors, path, lambda name: name)


def renamed(tensors: TensorFile | TensorFolder, where: Path, canonical: Callable[[str], str]) -> RenamedSource:
    home: dict[str, tuple[TensorSource, str]] = {}
    tensors = dequantised(tensors)
    for stored in tensors.names():
        name = canonical(stored)
        if name in home:
            raise InputError(f"{where}: {home[name][1]} and {stored} are two spellings of {name}")
        home[name] = (tensors, stored)
    return RenamedSource(where, home)


def open_diffusers(
    path: Path,
    folders: Mapping[str, Path | None],
    gemma: GemmaConfig | None,
    upsampler: Any,
    unreadable: Iterable[str],
) -> tuple[ModelConfig, dict[str, RenamedSource]]:
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
        upsampler=upsampler,
    )
    stages = len(config.video_vae.encoder)
    sources = {}
    for component, folder in folders.items():
        assert folder is not None
        tensors = open_tensors(folder)
        sources[component] = renamed(tensors, folder, lambda name, c=component: to_official(c, name, stages))
    return config, sources


# ---- audit ----------------------------------------------------------------------------------------------------------


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def audit(parameters: Mapping[str, Shaped], source: TensorSource, where: str | Path) -> None:
    """Every parameter has exactly one tensor of its shape; every tensor is a parameter or known to be unused.

    Reads headers only. Of an autoencoder's two halves, one that no parameter belongs to is not looked at.
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
    if unexpected:
        problems.append(f"{len(unexpected)} tensors are used by no network: {collapse(unexpected)}")
    if problems:
        raise InputError(f"{where}: {'; '.join(problems)}; pass the checkpoint that its config describes")
