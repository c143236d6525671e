"""Opening a checkpoint: its configuration, and a source of tensors for each of its parts.

Decides the layout (official: a single file or its shards under an
index, since LTX-2.5 a file for each part; or a diffusers folder) and which of the
files that `parts` finds are taken; no tensor data is read. Leaves data, LoRA and devices to others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np

from ltx2rt.config import (
    DurationHeadConfig,
    Gemma4Config,
    GemmaConfig,
    ModelConfig,
    TransformerConfig,
    UpsamplerConfig,
)
from ltx2rt.errors import GraphError, InputError
from ltx2rt.notes import note
from ltx2rt.release import of_version, stated, version_tuple
from ltx2rt.weights import configs
from ltx2rt.weights.configs import Keys, parse_json
from ltx2rt.weights.files import TensorFile, TensorFolder, TensorSource, open_file, open_tensors
from ltx2rt.weights.gguf import GgufFile, unread
from ltx2rt.weights.lora import Lora, Pair, open_lora
from ltx2rt.weights.names import (
    CONNECTORS,
    TEXT_PROJECTION,
    collapse,
    component_of,
    fused_of,
    official_names,
    to_official,
)
from ltx2rt.weights.near import find
from ltx2rt.weights.part_table import PARTS, UPSAMPLERS, names_of
from ltx2rt.weights.parts import (
    Parts,
    absent,
    contents,
    file_kind,
    folder_kind,
    listed,
    only,
    read_json,
    refuse_ambiguous,
    video_files,
)
from ltx2rt.weights.quantised import Packed, dequantised
from ltx2rt.weights.sources import JoinedRows, RenamedSource, renamed
from ltx2rt.weights.text_encoder import Asset, find_tokenizer, gemma_keys, no_tokenizer, open_gemma

ENCODED = [np.dtype(x) for x in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8, np.uint8)]
COMPONENTS = names_of(lambda part: part.source)
STATISTICS = ("vae.per_channel_statistics.mean-of-means", "vae.per_channel_statistics.std-of-means")
BLOCK_MATRIX = re.compile(
    r"transformer_blocks\.\d+\..*(?:attn.*\.to_(?:q|k|v|out\.0)|ff\.net\.(?:0\.proj|2))\.weight$"
)


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
    tokenizers_found: tuple[Path, ...] = ()

    @property
    def files(self) -> list[Path]:
        """The files and folders that were found, those beside the one that was named included."""
        tokenizer = [self.tokenizer] if isinstance(self.tokenizer, Path) else []
        return [
            self.path,
            *tokenizer,
            *self.loras_found,
            *(source.where for source in self.sources.values()),
        ]

    def source(self, component: str) -> RenamedSource:
        """Raises InputError if the component was not found, naming its flag and what else is missing."""
        if component in self.sources:
            return self.sources[component]
        if component not in COMPONENTS:
            raise InputError(f"unknown component {component!r}, known are {', '.join(COMPONENTS)}")
        raise self._absent(component)

    def _absent(self, part: str) -> InputError:
        return absent(
            part, self.path, self.unreadable, [each for each in self.missing() if each != part]
        )

    def missing(self) -> list[str]:
        """Parts that a generation has and some pipelines need, and that were not found."""
        found = {*self.sources, *(["lora"] if self.loras_found else [])}
        return [part for part in ("gemma", "upsampler", "lora") if part not in found]

    def distilled_lora(self) -> Path:
        """The LoRA beside the weights whose header is that of a released distilled one, whatever its name.

        Those change every matrix of attention and feed-forward, audio and cross-modal ones included, at a rank near a
        tenth of the width (384 and 450 of 4096). Raises InputError listing the candidates if not exactly one fits.
        """
        source = self.source("transformer")
        matrices = {
            n for n in source.names() if BLOCK_MATRIX.search(n) and len(source.info(n).shape) == 2
        }

        def fits(path: Path) -> bool:
            try:
                lora = open_lora(path)
            except InputError:  # such as one of int8, which may lie there for others
                return False
            ranks = [lora.file.info(pair.down).shape[0] for pair in lora.pairs.values()]
            return (
                matrices <= lora.pairs.keys() and 16 * max(ranks) >= self.config.transformer.width
            )

        def of_another_release(path: Path) -> bool:
            return stated(TensorFile(path).metadata) not in ("", self.config.release.name)

        if not self.loras_found:
            raise self._absent("lora")
        fitting = [path for path in self.loras_found if fits(path) and not of_another_release(path)]
        if len(fitting) > 1:
            fitting = [path for path in fitting if self._shapes_fit(open_lora(path))] or fitting
        if found := only("lora", fitting):
            return found
        listed = ", ".join(map(str, self.loras_found))
        raise InputError(
            f"{self.path}: no LoRA in it has the header of a distilled one: {listed}; pass one with --distilled-lora"
        )

    def _shapes_fit(self, lora: Lora) -> bool:
        """Whether every matrix that a LoRA changes is there, as large as the LoRA has it."""
        source = self.source("transformer")
        names = set(source.names())

        def fits(name: str, pair: Pair) -> bool:
            shape = lora.file.info(pair.up).shape[0], lora.file.info(pair.down).shape[1]
            return name in names and source.info(name).shape == shape

        return all(fits(name, pair) for name, pair in lora.pairs.items())

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Within it graphs are traced: what a config that contradicts itself raises there becomes one InputError."""
        try:
            with np.errstate(divide="raise", invalid="raise"):  # in filters that rates decide
                yield
        except InputError:
            raise
        except (GraphError, ArithmeticError, IndexError, MemoryError, ValueError) as error:
            raise InputError(
                f"{self.path}: its config contradicts itself: {error}; pass another checkpoint"
            ) from error

    def require_tokenizer(self) -> Path | Asset:
        if self.tokenizer is None:
            gemma = self.sources["gemma"].where if "gemma" in self.sources else None
            raise no_tokenizer(self.path, gemma, self.tokenizers_found)
        return self.tokenizer


def open_checkpoint(
    model: str | Path,
    text_encoder: str | Path | None = None,
    upsampler: str | Path | None = None,
    temporal_upsampler: str | Path | None = None,
    *,
    video_vae: str | Path | None = None,
    audio_vae: str | Path | None = None,
    duration_head: str | Path | None = None,
    config_from: str | Path | None = None,
) -> Checkpoint:
    """Open a file or a folder; parts that are not given are looked for near it (`near.find`).

    upsampler: of any kind, whether it fits is decided by the stage that runs it; x1.5 ones are not looked for.
    config_from: a safetensors file whose config is meant where the main file has none.
    Raises InputError for what is no checkpoint, an ambiguous part, a Gemma of the wrong size, and tensors of the main
    file that belong to no component. A part that is missing is an error only when its source is asked for.
    """
    given = {
        "text_encoder": text_encoder,
        "upsampler": upsampler,
        "temporal_upsampler": temporal_upsampler,
        "video_vae": video_vae,
        "audio_vae": audio_vae,
        "duration_head": duration_head,
    }
    path, main, parts, index = find(Path(model), given, config_from)

    def pick(part: str) -> Path | None:
        return (
            Path(chosen)
            if (chosen := given[PARTS[part].option])
            else only(part, listed(parts.files[part], index))
        )

    gemma_path = pick("gemma")
    upsampler_paths = {part: pick(part) for part in ("upsampler", "temporal_upsampler")}

    sources: dict[str, RenamedSource] = {}
    gemma_config = None
    if gemma_path is not None:
        gemma_config, sources["gemma"] = open_gemma(gemma_path)
    upsamplers: dict[str, UpsamplerConfig] = {}
    for part, path_ in upsampler_paths.items():
        if path_ is not None:
            upsamplers[part], sources[part] = open_upsampler(path_, PARTS[part].flag)
    if (temporal := upsamplers.get("temporal_upsampler")) and not temporal.temporal:
        raise InputError(
            f"--temporal-upsampler: {temporal_upsampler} is a {temporal.kind} upsampler, expected a temporal one; pass "
            "this one with --upsampler"
        )

    if main is not None:
        main = dequantised(main)
        layout = "official"
        own = official_sources(main).keys()
        files = {
            part: pick(part)
            for part in ("audio_vae", "duration_head")
            if part not in own or given[part]
        }
        files |= video_files(video_vae, parts, own)
        config, components = open_official(main, files, gemma_path, gemma_config, parts)
    else:
        layout = "diffusers"
        if config_from:
            raise InputError(f"--config-from: {path} has its own config; leave the flag out")
        if named := [
            PARTS[part].flag for part in ("video_vae", "audio_vae", "duration_head") if given[part]
        ]:
            raise InputError(
                f"{named[0]}: {path} is a diffusers folder, which has its own; leave the flag out"
            )
        folders = {
            part: only(part, listed(found, index)) for part, found in parts.diffusers.items()
        }
        config, components = open_diffusers(path, folders, gemma_config, parts.unreadable)
    sources |= components
    configs.check_connectors(config.text, config.transformer, str(sources["text"].where))
    if gemma_config is not None:
        configs.check_gemma(gemma_config, config.text, str(gemma_path))
    if config.duration_head is not None:
        configs.check_duration_head(
            config.duration_head, config.text, str(sources["duration_head"].where)
        )
    config = replace(config, **upsamplers)
    for part, found in upsamplers.items():
        _check_upsampler(found, upsampler_paths[part], config, PARTS[part].flag)
        sources[part] = sources[part].joined(sources["video_vae"], STATISTICS)
    for source in sources.values():
        _refuse_encoded(source)
    tokenizer, found_ = find_tokenizer(gemma_path, parts.tokenizer), tuple(parts.tokenizer)
    unreadable = tuple(parts.unreadable)
    return Checkpoint(
        path, layout, config, sources, tokenizer, tuple(parts.files["lora"]), unreadable, found_
    )


def _check_upsampler(
    found: UpsamplerConfig, path: Path | None, config: ModelConfig, flag: str
) -> None:
    """Raises InputError for an upsampler of another release, or of other latents."""
    check_release(path, config.version, flag)
    if found.in_channels != config.video_vae.latent_channels:
        raise InputError(
            f"{path}: an upsampler of {found.in_channels} channels, the checkpoint's latents "
            f"have {config.video_vae.latent_channels}; pass that one with {flag}"
        )


def _refuse_encoded(source: RenamedSource) -> None:
    """Raises InputError for quantised tensors without the companions of `quantised`: scales are spelled in several
    ways, and some files have none. And for GGUF types that are not read."""
    infos = (source.info(name) for name in source.names())
    if types := sorted({i.format for i in infos if isinstance(i, Packed) and i.dtype in ENCODED}):
        raise InputError(f"{source.where}: tensors {unread(', '.join(types))}")
    names = [name for name in source.names() if name.endswith("weight")]
    if encoded := [name for name in names if source.info(name).dtype in ENCODED]:
        dtypes = ", ".join(sorted({str(source.info(name).dtype) for name in encoded}))
        raise InputError(
            f"{source.where}: {len(encoded)} tensors are {dtypes} without the scales of a known format (first "
            f"{encoded[0]}); pass the bfloat16 file and, for float8 on the device, --weights-dtype float8"
        )


def check_release(path: Path | None, version: tuple[int, ...], flag: str) -> None:
    """Raises InputError for a file of another release, where either is one that goes with its own alone."""
    if path is None or path.is_dir() or not version:
        return
    own = version_tuple(TensorFile(path).metadata.get("model_version"))
    if not of_version(own).goes_with(of_version(version)):
        said = f"of LTX-{'.'.join(map(str, own))}" if own else "that states no model_version"
        raise InputError(
            f"{path}: a file {said} beside LTX-{'.'.join(map(str, version))}; pass that release's own with {flag}"
        )


def official_metadata(file: TensorFile | TensorFolder) -> Keys:
    """Its config's sections; those that are null, as the files of LTX-2.5 have them, are absent."""
    if "config" not in file.metadata:
        raise InputError(
            f"{file.path}: its metadata has no `config`; pass the original file, not a re-saved one"
        )
    found = parse_json(file.metadata["config"], f"{file.path}: config")
    return Keys(
        {name: section for name, section in found.data.items() if section is not None}, found.where
    )


def open_official(
    main: TensorFile | TensorFolder,
    paths: Mapping[str, Path | None],
    gemma_path: Path | None,
    gemma: GemmaConfig | Gemma4Config | None,
    found: Parts,
) -> tuple[ModelConfig, dict[str, RenamedSource]]:
    """Without upsamplers. paths: by part, of files beside the main one, which take the place of what that one holds.
    found: also the files with connectors or text projection, for a main file that lacks either.

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
    if missing := [part for part in ("video_vae", "audio_vae", "vocoder") if part not in sources]:
        if {"audio_vae", "vocoder"} <= {*missing}:  # one file has both
            missing.remove("vocoder")
        more = {
            "gemma": gemma_path,
            "upsampler": found.files["upsampler"],
            "lora": found.files["lora"],
        }
        also = [part for part, there in more.items() if not there]
        raise absent(missing, main.path, found.unreadable, also)

    def section(name: str, part: str) -> Keys:
        return (keys[part] if part in keys else official_metadata(main)).inner(name)

    version = version_tuple(main.metadata.get("model_version"))
    if gemma_path is not None:
        check_gemma_version(main, version, gemma_keys(gemma_path), gemma_path)
    transformer, audio = (
        section("transformer", ""),
        configs.official_audio_vae(section("audio_vae", "audio_vae")),
    )
    network = configs.official_transformer(transformer)
    text = _with_connectors(main, sources.get("text"), found.files["text"], network)
    sources["text"], width = _text_source(main, text, gemma_path)
    diffusion = files.get("diffusion_decoder")
    if conv or diffusion is None:
        video = configs.official_video_vae(section("vae", "video_vae"))
    else:
        shape = sources["video_vae"].info("vae.encoder.conv_in.conv.weight").shape
        video = configs.official_diffusion_vae(section("vae", "diffusion_decoder"), shape)
    video_file = files.get("video_vae") or (main if conv else diffusion) or main
    config = ModelConfig(
        version=version,
        transformer=network,
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
        config = replace(
            config, duration_head=_duration_head(head, sources["duration_head"], "official")
        )
    return config, sources


def _duration_head(keys: Keys, source: RenamedSource, layout: str) -> DurationHeadConfig:
    names = [f"duration_head.{m}_input_proj.weight" for m in ("video", "audio")]
    if missing := [name for name in names if name not in set(source.names())]:
        raise InputError(
            f"{source.where}: no {missing[0]}; pass a complete duration head with --duration-head"
        )
    return configs.duration_head(keys, layout, *(source.info(name).shape[-1] for name in names))


def _with_connectors(
    main: TensorFile | TensorFolder,
    text: RenamedSource | None,
    files: Iterable[Path],
    config: TransformerConfig,
) -> RenamedSource | None:
    """Connectors and text projection of the main file, and of those beside it what it lacks.

    Files of another generation are not looked at. Raises InputError where several files have that.
    """
    widths = (config.width, config.audio_width)
    if config.caption_projection:
        widths = (config.caption_channels,) * 2
    registers = [f"{prefix}learnable_registers" for prefix in CONNECTORS]
    expected = dict(zip(registers, widths, strict=True))

    def fits(source: RenamedSource, names: list[str]) -> bool:
        """Connectors by their width, a projection by whether it is one for both modalities."""
        if names[0].startswith(TEXT_PROJECTION):
            shared = f"{TEXT_PROJECTION}aggregate_embed.weight" in names
            return shared == config.caption_projection
        known = [name for name in names if name in expected]
        return all(source.info(name).shape[-1:] == (expected[name],) for name in known)

    text, beside = text or RenamedSource(main.path, {}), None
    for prefix in (*CONNECTORS, TEXT_PROJECTION):
        if not any(name.startswith(prefix) for name in text.names()):
            if beside is None:
                opened = [component_sources("text", open_file(path)) for path in files]
                beside = [sources["text"] for sources in opened]
            names = [[n for n in source.names() if n.startswith(prefix)] for source in beside]
            found = [each for each in zip(beside, names, strict=True) if each[1] and fits(*each)]
            refuse_ambiguous(text=[source.where for source, _ in found])
            text = text.joined(*found[0]) if found else text
    return text if list(text.names()) else None


def _text_source(
    main: TensorFile | TensorFolder, text: RenamedSource | None, gemma_path: Path | None
) -> tuple[RenamedSource, int]:
    """Connectors and text projection, which is in the main file or in the text encoder's; the width that it takes."""
    if text is None:
        raise InputError(
            f"{main.path}: no embeddings connectors; pass a complete checkpoint, or put the file "
            "with those of the same transformer beside it"
        )

    def projections(source: TensorSource) -> list[str]:
        return [
            name
            for name in source.names()
            if re.match(rf"{TEXT_PROJECTION}.*aggregate_embed\.weight$", name)
        ]

    if not projections(text):
        tensors = open_tensors(gemma_path) if gemma_path is not None else None
        has = tensors is not None and bool(projections(tensors))
        if not has and not of_version(version_tuple(main.metadata.get("model_version"))).split:
            raise InputError(
                f"{main.path}: no text projection ({TEXT_PROJECTION}*aggregate_embed); put the "
                "release's file that holds it beside this one"
            )
        if gemma_path is None or tensors is None:
            raise absent("gemma", main.path)
        if not has:
            raise InputError(
                f"{gemma_path}: a Gemma without LTX-2.5's text projection ({TEXT_PROJECTION}*aggregate_embed), which "
                f"{main.path} has not either; pass the release's own text-encoder file with --text-encoder"
            )
        projection = renamed(
            tensors, gemma_path, lambda name: name if name.startswith(TEXT_PROJECTION) else None
        )
        text = text.joined(projection, projection.names())
    widths = {text.info(name).shape[-1] for name in projections(text)}
    if len(widths) != 1:
        raise InputError(
            f"{text.where}: the text projections take different widths: {sorted(widths)}"
        )
    return text, widths.pop()


def check_gemma_version(
    main: TensorFile | TensorFolder, version: tuple[int, ...], gemma: Keys, where: Path
) -> None:
    """Raises InputError if, as far as both say, the transformer was trained with another text encoder."""
    found, release = gemma.get("gemma_version", None), f"LTX-{'.'.join(map(str, version)) or '2'}"
    if "gemma_source_checkpoint" in main.metadata:
        source = parse_json(
            main.metadata["gemma_source_checkpoint"], f"{main.path}: gemma_source_checkpoint"
        )
        if (wanted := source.need("gemma_version")) != found:
            raise InputError(
                f"{where}: gemma_version {found!r}, the transformer was trained with {wanted!r}; pass the text encoder "
                "of its release with --text-encoder"
            )
    elif of_version(version).split:
        if found is not None and not isinstance(main, GgufFile):
            raise InputError(
                f"{where}: gemma_version {found!r}, but {main.path} names none; pass the original files of one release"
            )
        silent = f"{main.path.name} names no"
        if found is None:
            silent = f"neither {main.path.name} nor {where.name} names its"
        note(f"{silent} gemma_version; whether they fit is not known")
    elif not str(gemma.get("model_type", "")).startswith("gemma3"):
        raise InputError(
            f"{where}: model_type {gemma.get('model_type', None)!r}, but {release} was trained with Gemma 3; pass that "
            "with --text-encoder"
        )


def official_sources(file: TensorFile | TensorFolder) -> dict[str, RenamedSource]:
    homes: dict[str | None, dict[str, tuple[TensorSource, str]]] = {}
    for name in file.names():
        homes.setdefault(component_of(name), {})[name] = (file, name)
    if stray := homes.pop(None, None):
        raise InputError(
            f"{file.path}: {len(stray)} tensors belong to no component: {collapse(stray)}"
        )
    return {str(component): RenamedSource(file.path, home) for component, home in homes.items()}


def component_sources(part: str, file: TensorFile) -> dict[str, RenamedSource]:
    """The sources of a file of its own, by component; prefixes that such a file leaves out are put back."""
    if part == "audio_vae":
        return official_sources(file)
    if part == "text":
        names = official_names(file.names())
        text = {name: ours for name, ours in names.items() if component_of(ours) == "text"}
        return {"text": renamed(file, file.path, text.get)}
    if part == "duration_head":
        return {part: renamed(file, file.path, lambda name: name)}
    return {part: renamed(file, file.path, lambda name: f"vae.{name.removeprefix('vae.')}")}


def open_upsampler(path: Path, flag: str = "--upsampler") -> tuple[UpsamplerConfig, RenamedSource]:
    """An official upsampler file, or a diffusers folder, of any kind. flag: that names it."""
    if path.is_dir():
        if folder_kind(path) not in UPSAMPLERS:
            raise InputError(
                f"{path}: no latent upsampler folder; pass one, or a file, with {flag}"
            )
        tensors, keys = open_tensors(path), read_json(path / "config.json")
    else:
        tensors = TensorFile(path)
        if file_kind(tensors) not in UPSAMPLERS:
            raise InputError(
                f"{path}: no latent upsampler ({contents(tensors)}); pass one with {flag}"
            )
        if "config" not in tensors.metadata:
            raise InputError(
                f"{path}: its metadata has no `config`; pass the original file, not a re-saved one"
            )
        keys = parse_json(tensors.metadata["config"], f"{path}: config")
    rational = "upsampler.conv.weight" in set(tensors.names())
    return configs.upsampler(keys, rational), renamed(tensors, path, lambda name: name)


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
        config = replace(
            config, diffusion_decoder=configs.diffusers_diffusion_decoder(keys("diffusion_decoder"))
        )
    if "duration_head" in folders:
        head = _duration_head(keys("duration_head"), sources["duration_head"], "diffusers")
        config = replace(config, duration_head=head)
    return config, sources


def _joined_rows(component: str, source: RenamedSource) -> RenamedSource:
    """With tensors that are one in the official layout joined. Raises InputError where one of three is missing."""
    joined, names = fused_of(component, source.names()), set(source.names())
    if missing := [part for parts in joined.values() for part in parts if part not in names]:
        raise InputError(f"{source.where}: no {missing[0]}; pass a complete folder")
    return (
        renamed(JoinedRows(source, joined), source.where, lambda name: name) if joined else source
    )
