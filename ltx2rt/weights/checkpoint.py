"""Opening a checkpoint: its configuration, and a source of tensors for each of its parts.

Decides the layout (official: a single file or its shards under an
index, since LTX-2.5 a file for each part; or a diffusers folder) and which of the
files that `parts` finds are taken; no tensor data is read. Leaves data, LoRA and devices to others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.config import ModelConfig, TransformerConfig
from ltx2rt.errors import GraphError, InputError
from ltx2rt.graph.encodings import ADVISED, E4M3, E5M2
from ltx2rt.notes import note
from ltx2rt.release import of_version, stated, version_tuple
from ltx2rt.weights import configs
from ltx2rt.weights.changes import Pair
from ltx2rt.weights.configs import ConfigSource, Keys, parse_json
from ltx2rt.weights.files import (
    TensorFile,
    TensorFolder,
    TensorReader,
    digest,
    open_file,
    open_tensors,
)
from ltx2rt.weights.gguf import unread
from ltx2rt.weights.lora import Lora, open_lora
from ltx2rt.weights.names import (
    CONNECTORS,
    GEMMA,
    TEXT_PROJECTION,
    collapse,
    component_of,
    fused_of,
    official_names,
    to_official,
    unsaved,
)
from ltx2rt.weights.near import Given, find
from ltx2rt.weights.part_table import FILES, PARTS, PROJECTION, Part, names_of
from ltx2rt.weights.parts import (
    Parts,
    absent,
    contents,
    examine,
    file_kind,
    folder_kind,
    inside,
    listed,
    only,
    read_json,
    refuse_ambiguous,
)
from ltx2rt.weights.quant_formats import Packed
from ltx2rt.weights.quantised import JoinedRows, RenamedSource, dequantised, renamed
from ltx2rt.weights.text_encoder import Asset, find_tokenizer, gemma_keys, no_tokenizer, open_gemma

ENCODED = [np.dtype(x) for x in (E4M3, E5M2, np.int8, np.uint8)]
COMPONENTS = names_of(lambda part: part.source)
BLOCK_MATRIX = re.compile(
    r"transformer_blocks\.\d+\..*(?:attn.*\.to_(?:q|k|v|out\.0)|ff\.net\.(?:0\.proj|2))\.weight$"
)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: sizes, and one tensor source per component (canonical names, nothing
    read yet)."""

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

    def digest(self, *parts: str) -> str:
        """Twenty hex digits that tell the files of these parts, or of all, from other ones. Earlier
        versions gave 16, by sizes and headers."""
        places = {s.where for part, s in self.sources.items() if part in parts or not parts}
        places |= {self.tokenizer} if isinstance(self.tokenizer, Path) else set()
        return sha256(" ".join(sorted(map(digest, places))).encode()).hexdigest()[:20]

    def source(self, component: str) -> RenamedSource:
        """Raises InputError if the component was not found, naming its flag and what else is
        missing."""
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

    def fitting_loras(self) -> list[Path]:
        """LoRAs near the weights with the header of a released distilled one, whatever their name.

        Those change every matrix of attention and feed-forward, audio and cross-modal ones
        included, at a rank near a tenth of the width (384 and 450 of 4096).
        """
        source = self.source("transformer")
        matrices = {
            n for n in source.names() if BLOCK_MATRIX.search(n) and len(source.info(n).shape) == 2
        }

        def fits(path: Path) -> bool:
            try:
                lora = open_lora(path)
            except InputError:  # such as one of int8, which may be there for others
                return False
            ranks = [change.rank for change in lora.changes.values() if isinstance(change, Pair)]
            wide = 16 * max(ranks, default=0) >= self.config.transformer.width
            return matrices <= lora.changes.keys() and wide

        def of_another_release(path: Path) -> bool:
            return stated(TensorFile(path).metadata) not in ("", self.config.release.name)

        fitting = [path for path in self.loras_found if fits(path) and not of_another_release(path)]
        if len(fitting) > 1:
            fitting = [path for path in fitting if self._shapes_fit(open_lora(path))] or fitting
        return fitting

    def distilled_lora(self) -> Path:
        """The one of `fitting_loras`. Raises InputError with the candidates if there is not exactly
        one."""
        if not self.loras_found:
            raise self._absent("lora")
        if found := only("lora", self.fitting_loras()):
            return found
        listed = ", ".join(map(str, self.loras_found))
        raise InputError(
            f"{self.path}: no LoRA in it has the header of a distilled one: {listed}; pass one "
            "with --distilled-lora"
        )

    def _shapes_fit(self, lora: Lora) -> bool:
        """Whether every matrix that a LoRA changes is there, as large as the LoRA has it."""
        source = self.source("transformer")
        names = set(source.names())

        return all(
            name in names and source.info(name).shape == change.shape
            for name, change in lora.changes.items()
        )

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Within it graphs are traced: what a config that contradicts itself raises there becomes
        one InputError."""
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


@dataclass(frozen=True)
class Place:
    """Where a part was found: its tensors, what holds its config, and the config if it is read."""

    layout: str
    source: RenamedSource
    keys: Callable[[], Keys]
    file: TensorFile | TensorFolder | None = None  # None: a folder
    config: Any = None

    def read(self, part: Part, configs: Mapping[str, Any]) -> Any:
        """configs: of the parts before this one."""
        if part.read is None:
            return self.config
        keys = self.keys()
        if part.section and self.layout == "official":
            keys = keys.inner(part.section)
        return part.read(ConfigSource(self.layout, keys, self.source, configs))


Places = dict[str, Place]


def open_checkpoint(
    model: str | Path, *, config_from: str | Path | None = None, **files: str | Path | None
) -> Checkpoint:
    """Open a file or a folder; parts that are not given are looked for near it (`near.find`).

    files: of parts, by option of the part table. An upsampler is of any kind, whether it fits is
    decided by the stage that runs it; x1.5 ones are not looked for. config_from: a safetensors file
    whose config is meant where the main file has none. Raises InputError for what is no checkpoint,
    an ambiguous part, parts that do not fit each other, and tensors of the main file that belong to
    no component. A part that is missing is an error only when its source is asked for.
    """
    if unknown := files.keys() - FILES.keys():
        raise TypeError(f"no part has a file {', '.join(unknown)}; known: {', '.join(FILES)}")
    path, main, near, index = find(Path(model), files, config_from)
    places: Places = {}
    own: dict[str, RenamedSource] = {}
    if main is not None:
        main = dequantised(main)
        own = official_sources(main)
        if "gemma" in own and not files.get("text_encoder"):
            places["gemma"] = _gemma_of(own["gemma"], near.files["gemma"])
    for part in PARTS.values():
        if part.source and part.either and part.name not in places:
            given = files.get(part.option)
            if where := given or only(part.name, listed(near.files[part.name], index)):
                places[part.name] = _open_either(part, Path(where))
    if main is not None:
        places |= _official(main, own, files, near, places)
    else:
        places |= _diffusers(path, files, near, index, config_from)
    read = _read(places)
    config = _config(read, main, places["video_vae"].file)
    sources = {name: place.source for name, place in places.items()}
    for name, source in sources.items():
        part, file = PARTS[name], places[name].file
        if part.own_release and file:
            check_release(file, config.version, part.flag)
        if part.check:
            part.check(read[name], config, str(source.where))
        sources[name] = source.joined(sources["video_vae"], part.borrowed)
        _refuse_encoded(source)
    gemma = places["gemma"].source.where if "gemma" in places else None
    return Checkpoint(
        path,
        "diffusers" if main is None else "official",
        config,
        sources,
        find_tokenizer(gemma, near.tokenizer),
        tuple(near.files["lora"]),
        tuple(near.unreadable),
        tuple(near.tokenizer),
    )


def open_parts(model: str | Path, names: Sequence[str], **files: str | Path | None) -> Checkpoint:
    """Some parts of a checkpoint: a file or folder of one, or a folder with several.

    names: the parts; files: as for `open_checkpoint`. Every use of a config that was not found
    raises InputError. Raises InputError for a part of `names` that was not found, or found twice.
    """
    path = Path(model)
    near = examine([path, *(inside(path) if path.is_dir() else ())])
    places: Places = {}
    for main in map(dequantised, near.files["main"]):
        own = {n: source for n, source in official_sources(main).items() if n in names}
        keys = partial(official_metadata, main)
        places |= {name: Place("official", source, keys, main) for name, source in own.items()}
    for name in names:
        part, folder = PARTS[name], only(name, near.diffusers.get(name, []))
        if where := files.get(part.option) or only(name, near.files[name]):
            if part.either:
                places[name] = _open_either(part, Path(where))
            else:
                places |= open_part(part, Path(where))
        elif folder:
            places[name] = _open_folder(part, folder)
    places |= {n: places[i] for n in names if n not in places and (i := PARTS[n].instead) in places}
    if missing := [name for name in names if name not in places]:
        raise absent(missing, path, near.unreadable)
    read, sources = _read(places), {name: place.source for name, place in places.items()}
    for name, source in sources.items():
        if "video_vae" in places:
            sources[name] = source.joined(sources["video_vae"], PARTS[name].borrowed)
        _refuse_encoded(source)
    core = names_of(lambda part: part.every and part.source and part.name not in read)
    read = {name: Absent(absent(name, path)) for name in core} | read
    file = next((place.file for place in places.values() if place.file), None)
    gemma = sources["gemma"].where if "gemma" in sources else None
    return Checkpoint(
        path,
        next(iter(places.values())).layout,
        _config(read, file, places["video_vae"].file if "video_vae" in places else None),
        sources,
        find_tokenizer(gemma, near.tokenizer) if gemma or near.tokenizer else None,
        unreadable=tuple(near.unreadable),
        tokenizers_found=tuple(near.tokenizer),
    )


class Absent:
    """The config of a part that was not opened: every use of it raises the error that names its
    flag."""

    def __init__(self, error: InputError):
        self._error = error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error


def _read(places: Mapping[str, Place]) -> dict[str, Any]:
    """The configs of these parts, in the order of the table, since some need those before them."""
    read: dict[str, Any] = {}
    for name in COMPONENTS:
        if name in places:
            read[name] = places[name].read(PARTS[name], read)
    return read


def _config(
    read: Mapping[str, Any],
    main: TensorFile | TensorFolder | None,
    video: TensorFile | TensorFolder | None,
) -> ModelConfig:
    """video: the file that the video VAE is in."""
    names = {field.name for field in fields(ModelConfig)}
    core: dict[str, Any] = {"gemma": None, "upsampler": None}
    core |= {name: config for name, config in read.items() if name in names}
    parts = {name: config for name, config in read.items() if name not in names}
    return ModelConfig(
        version=_version(main), video_vae_version=_version(video), parts=parts, **core
    )


def _version(file: TensorFile | TensorFolder | None) -> tuple[int, ...]:
    return version_tuple(file.metadata.get("model_version")) if file else ()


def _refuse_encoded(source: RenamedSource) -> None:
    """Raises InputError for quantised tensors without the companions of `quantised`: scales are
    spelled in several ways, and some files have none. And for GGUF types that are not read."""
    infos = (source.info(name) for name in source.names())
    if types := sorted({i.format for i in infos if isinstance(i, Packed) and i.dtype in ENCODED}):
        raise InputError(f"{source.where}: tensors {unread(', '.join(types))}")
    names = [name for name in source.names() if name.endswith("weight")]
    if encoded := [name for name in names if source.info(name).dtype in ENCODED]:
        dtypes = ", ".join(sorted({str(source.info(name).dtype) for name in encoded}))
        raise InputError(
            f"{source.where}: {len(encoded)} tensors are {dtypes} without the scales of a known "
            f"format (first {encoded[0]}); pass the bfloat16 file and, for 8 bits on the device, "
            f"--weights-dtype {ADVISED}"
        )


def check_release(file: TensorFile | TensorFolder, version: tuple[int, ...], flag: str) -> None:
    """Raises InputError for a file of another release, where either is one that goes with its own
    alone."""
    own = _version(file)
    if version and not of_version(own).goes_with(of_version(version)):
        said = f"of LTX-{'.'.join(map(str, own))}" if own else "that states no model_version"
        raise InputError(
            f"{file.path}: a file {said} beside LTX-{'.'.join(map(str, version))}; pass that "
            f"release's own with {flag}"
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


def _open_either(part: Part, path: Path) -> Place:
    """A file, or a diffusers folder, of a part that goes with both layouts."""
    if part.read is not None:
        return open_part(part, path)[part.name]
    config, source = open_gemma(path)
    return Place("official", source, lambda: Keys({}, str(path)), config=config)


def open_part(part: Part, path: Path) -> Places:
    """Contents of a file of the official layout, or of a diffusers folder; of any part that the
    flag of this one takes.

    Raises InputError.
    """
    takes = [p for p in PARTS.values() if p.header and p.option == part.option and p.option]
    takes += [p for p in PARTS.values() if p.kind and p.kind == part.kind and p not in takes]
    word = part.kind or part.word
    if path.is_file() and folder_kind(path.parent) in [p.name for p in takes]:
        path = path.parent  # a file of a diffusers folder; its names and config are of the folder
    if path.is_dir():
        return _open_folders(part, path)
    file = TensorFile(path)
    kind = file_kind(file)
    if kind == "main":  # a complete file
        keys, own = partial(official_metadata, file), official_sources(dequantised(file))
        if found := {n: s for n, s in own.items() if PARTS[n].option == part.option}:
            return {name: Place("official", source, keys, file) for name, source in found.items()}
    if kind not in [p.name for p in takes]:
        raise InputError(f"{path}: no {word} ({contents(file)}); pass one with {part.flag}")
    name = part.name if part.kind else kind
    keys = partial(official_metadata, file)
    sources = component_sources(name, file)
    return {name: Place("official", source, keys, file) for name, source in sources.items()}


def _open_folders(part: Part, path: Path) -> Places:
    """The diffusers folder of a part, or of those that its flag names together; the folder of a
    whole model stands for the one in it. Raises InputError."""
    takes = {p.name: p for p in PARTS.values() if p.option == part.option and p.read}
    kind, found = folder_kind(path), {}
    if kind in takes:
        found[kind] = path
    whole = path.parent if kind in takes else path
    for name, other in takes.items():
        if other.folder and name not in found and folder_kind(whole / other.folder) == name:
            found[name] = whole / other.folder
    if part.name not in found and kind not in takes:
        word = part.kind or part.word
        raise InputError(f"{path}: no {word} folder; pass one, or a file, with {part.flag}")
    return {name: _open_folder(PARTS[name], folder) for name, folder in found.items()}


def _open_folder(part: Part, path: Path) -> Place:
    """A folder of the diffusers layout; rows that are one tensor in the official one are joined."""
    keys = read_json(path / "config.json")
    stages = 0
    if part.name == "video_vae":
        stages = len(configs.diffusers_video_vae(keys).encoder)
    source = renamed(open_tensors(path), path, lambda name: to_official(part.name, name, stages))
    joined, names = fused_of(part.name, source.names()), set(source.names())
    if missing := [row for rows in joined.values() for row in rows if row not in names]:
        raise InputError(f"{path}: no {missing[0]}; pass a complete folder")
    if joined:
        source = renamed(JoinedRows(source, joined), path, lambda name: name)
    return Place("diffusers", source, lambda: keys)


def _gemma_of(source: RenamedSource, near: Iterable[Path]) -> Place:
    """The text encoder in a checkpoint that ComfyUI has saved, with the config of a folder near it
    that has one of the same sizes, else with the released one."""
    shapes = {name.removeprefix(GEMMA): source.info(name).shape for name in source.names()}
    config = configs.gemma(configs.plain_gemma3(shapes, str(source.where)))
    for folder in filter(Path.is_dir, near):
        theirs = configs.gemma(gemma_keys(folder))
        if all(getattr(theirs, n, None) == getattr(config, n) for n in configs.GEMMA_SIZES):
            config = theirs
    return Place("official", source, lambda: Keys({}, str(source.where)), config=config)


def _official(
    main: TensorFile | TensorFolder,
    own: Mapping[str, RenamedSource],
    given: Given,
    near: Parts,
    either: Places,
) -> Places:
    """The parts of the main file, and of files beside it, which take the place of those in it.

    own: sources in the main file. either: the parts that go with both layouts. A part that neither
    has comes from a complete file of the release. Raises InputError for what is missing, and for a
    text encoder of another release.
    """
    keys = partial(official_metadata, main)
    places = {n: Place("official", s, keys, main) for n, s in own.items() if n != "gemma"}
    for option, first in FILES.items():
        if first.either:
            continue
        if named := given.get(option):
            places |= open_part(first, Path(named))
            continue
        for name in names_of(lambda part: part.option == option and part.header):  # noqa: B023
            if name not in own and (found := only(name, near.files[name])):
                places |= open_part(first, found)
    places = _donated(near.donor, {*own, *places}, main.path) | places
    for part in PARTS.values():
        if part.instead in places and part.name not in places:
            places[part.name] = places[part.instead]
    missing = [
        name
        for name in names_of(lambda part: part.every and part.read and not part.either)
        if name not in places and name != "text"
    ]
    if {"audio_vae", "vocoder"} <= {*missing}:  # one file has both
        missing.remove("vocoder")
    if missing:
        also = ("upsampler", "lora")
        more = [part for part in ("gemma", *also) if part not in either and not near.files[part]]
        raise absent(missing, main.path, near.unreadable, more)
    gemma = either["gemma"].source.where if "gemma" in either else None
    gemma = None if gemma == main.path else gemma
    if gemma is not None:
        check_gemma_version(main, _version(main), gemma_keys(gemma), gemma)
    network = configs.official_transformer(keys().inner("transformer"))
    text = _with_connectors(main, own.get("text"), near.files["text"], network, near.donor)
    places["text"] = Place("official", _text_source(main, text, gemma), keys, main)
    return places


def _donated(donor: TensorFile | TensorFolder | None, own: Collection[str], main: Path) -> Places:
    """The parts of a complete file of the release that the main file and its neighbours lack."""
    if donor is None:
        return {}
    file = dequantised(donor)
    keys = partial(official_metadata, file)
    sources = {n: s for n, s in official_sources(file).items() if n not in (*own, "gemma", "text")}
    if sources:
        words = ", ".join(PARTS[name].word for name in sources)
        note(f"{words}: {donor.path}, since {main.name} has none")
    return {name: Place("official", source, keys, file) for name, source in sources.items()}


def _with_connectors(
    main: TensorFile | TensorFolder,
    text: RenamedSource | None,
    files: Iterable[Path],
    config: TransformerConfig,
    donor: TensorFile | TensorFolder | None = None,
) -> RenamedSource | None:
    """Connectors and text projection of the main file; what it lacks comes from the files beside
    it, else from the donor.

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
            if not found and donor is not None:
                source = official_sources(dequantised(donor)).get(
                    "text", RenamedSource(donor.path, {})
                )
                theirs = [name for name in source.names() if name.startswith(prefix)]
                found = [(source, theirs)] if theirs and fits(source, theirs) else []
            text = text.joined(*found[0]) if found else text
    return text if list(text.names()) else None


def _text_source(
    main: TensorFile | TensorFolder, text: RenamedSource | None, gemma_path: Path | None
) -> RenamedSource:
    """Connectors and text projection, which is in the main file or in the text encoder's."""
    if text is None:
        raise InputError(
            f"{main.path}: no embeddings connectors; pass a complete checkpoint, or put the file "
            "with those of the same transformer beside it"
        )

    def projections(source: TensorReader) -> list[str]:
        return [name for name in source.names() if PROJECTION.match(name)]

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
                f"{gemma_path}: a Gemma without LTX-2.5's text projection "
                f"({TEXT_PROJECTION}*aggregate_embed), which {main.path} has not either; pass the "
                "release's own text-encoder file with --text-encoder"
            )
        projection = renamed(
            tensors, gemma_path, lambda name: name if name.startswith(TEXT_PROJECTION) else None
        )
        text = text.joined(projection, projection.names())
    return text


def check_gemma_version(
    main: TensorFile | TensorFolder, version: tuple[int, ...], gemma: Keys, where: Path
) -> None:
    """Raises InputError if, as far as both say, the transformer was trained with another text
    encoder."""
    found, release = gemma.get("gemma_version", None), f"LTX-{'.'.join(map(str, version)) or '2'}"
    if "gemma_source_checkpoint" in main.metadata:
        source = parse_json(
            main.metadata["gemma_source_checkpoint"], f"{main.path}: gemma_source_checkpoint"
        )
        if (wanted := source.need("gemma_version")) != found:
            raise InputError(
                f"{where}: gemma_version {found!r}, the transformer was trained with {wanted!r}; "
                "pass the text encoder of its release with --text-encoder"
            )
    elif of_version(version).split:
        if found is not None and not main.architecture:
            raise InputError(
                f"{where}: gemma_version {found!r}, but {main.path} names none; pass the original "
                "files of one release"
            )
        silent = f"{main.path.name} names no"
        if found is None:
            silent = f"neither {main.path.name} nor {where.name} names its"
        note(f"{silent} gemma_version; whether they fit is not known")
    elif not str(gemma.get("model_type", "")).startswith("gemma3"):
        raise InputError(
            f"{where}: model_type {gemma.get('model_type', None)!r}, but {release} was trained "
            "with Gemma 3; pass that with --text-encoder"
        )


def official_sources(file: TensorFile | TensorFolder) -> dict[str, RenamedSource]:
    homes: dict[str | None, dict[str, tuple[TensorReader, str]]] = {}
    for name in file.names():
        homes.setdefault(component_of(name), {})[unsaved(name)] = (file, name)
    homes.pop("", None)
    if stray := homes.pop(None, None):
        raise InputError(
            f"{file.path}: {len(stray)} tensors belong to no component: {collapse(stray)}"
        )
    return {str(component): RenamedSource(file.path, home) for component, home in homes.items()}


def component_sources(part: str, file: TensorFile | TensorFolder) -> dict[str, RenamedSource]:
    """The sources of a file of its own, by component; prefixes that such a file leaves out are put
    back."""
    if any(p.option and p.option == PARTS[part].option for p in PARTS.values() if not p.header):
        return official_sources(file)  # another part's, too
    if part == "text":
        names = official_names(file.names())
        text = {name: ours for name, ours in names.items() if component_of(ours) == "text"}
        return {"text": renamed(file, file.path, text.get)}
    prefix = PARTS[part].prefix
    return {part: renamed(file, file.path, lambda name: prefix + name.removeprefix(prefix))}


def _diffusers(
    path: Path, given: Given, near: Parts, index: frozenset[str], config_from: str | Path | None
) -> Places:
    """The parts of a diffusers folder. Raises InputError for what is missing, and for a flag that
    it needs not."""
    if config_from:
        raise InputError(f"--config-from: {path} has its own config; leave the flag out")
    named: Places = {}
    for option, part in FILES.items():
        if (file := given.get(option)) and not part.either:
            named |= open_part(part, Path(file))
    folders = {name: only(name, listed(found, index)) for name, found in near.diffusers.items()}
    for name in names_of(lambda part: part.every and part.read and not part.either):
        if folders.get(name) is None and name not in named:
            raise absent(name, path, near.unreadable)
    own = {name: folder for name, folder in folders.items() if folder and name not in named}
    return named | {name: _open_folder(PARTS[name], folder) for name, folder in own.items()}
