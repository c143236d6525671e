"""Opening a checkpoint: its configuration, and a source of tensors for each of its parts.

Decides the layout (official: a file, or shards under an index, and since LTX-2.5 a file for each
part; or a diffusers folder), and which of the files that `parts` finds are taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.config import ModelConfig, TransformerConfig
from ltx2rt.errors import GraphError, InputError
from ltx2rt.release import of_version, stated, version_tuple
from ltx2rt.weights.configs import transformer
from ltx2rt.weights.digests import digest
from ltx2rt.weights.files import TensorFile, TensorFolder, open_file, open_tensors
from ltx2rt.weights.lora.changes import Pair
from ltx2rt.weights.lora.file import open_lora
from ltx2rt.weights.names import CONNECTORS, TEXT_PROJECTION
from ltx2rt.weights.near import NO_DEVICE, Chooser, Given, find
from ltx2rt.weights.part_table import FILES, PARTS, PROJECTION, names_of
from ltx2rt.weights.parts import Parts, absent, examine, inside, listed, only, refuse_ambiguous
from ltx2rt.weights.places import (
    Place,
    Places,
    check_gemma_version,
    check_release,
    component_sources,
    donated,
    gemma_of,
    official_metadata,
    official_sources,
    open_either,
    open_folder,
    open_part,
    refuse_encoded,
    version_of,
)
from ltx2rt.weights.quant.reader import RenamedSource, dequantised, renamed
from ltx2rt.weights.text_encoder import Asset, find_tokenizer, gemma_keys, no_tokenizer

COMPONENTS = names_of(lambda part: part.source)
BLOCK_MATRIX = re.compile(
    r"transformer_blocks\.\d+\..*(?:attn.*\.to_(?:q|k|v|out\.0)|ff\.net\.(?:0\.proj|2))\.weight$"
)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: sizes, and a source of tensors for each component."""

    path: Path
    layout: str  # "official" or "diffusers"
    config: ModelConfig
    sources: Mapping[str, RenamedSource]
    tokenizer: Path | Asset | None  # tokenizer.json
    loras_found: tuple[Path, ...] = ()
    unreadable: tuple[str, ...] = ()  # one line per file nearby that could not be opened
    tokenizers_found: tuple[Path, ...] = ()
    distilled: RenamedSource | None = None  # another transformer; `sources` has the dev one

    @property
    def files(self) -> list[Path]:
        """All files and folders that were found, not only the named one."""
        tokenizer = [self.tokenizer] if isinstance(self.tokenizer, Path) else []
        parts = [source.where for source in (*self.sources.values(), self.distilled) if source]
        return [self.path, *tokenizer, *self.loras_found, *parts]

    def digest(self, *parts: str) -> str:
        """Twenty hex digits that tell the files of these parts, or of all, from other ones. Earlier
        versions gave 16, by sizes and headers."""
        places = {s.where for part, s in self.sources.items() if part in parts or not parts}
        places |= {self.tokenizer} if isinstance(self.tokenizer, Path) else set()
        places |= {self.distilled.where} if self.distilled and not parts else set()
        return sha256(" ".join(sorted(map(digest, places))).encode()).hexdigest()[:20]

    def source(self, component: str) -> RenamedSource:
        """Raises InputError that names a missing component's flag, and others'."""
        if component in self.sources:
            return self.sources[component]
        if component not in COMPONENTS:
            raise InputError(f"unknown component {component!r}, known are {', '.join(COMPONENTS)}")
        raise absent(component, self.path, self.unreadable, self.missing(component))

    def missing(self, *found: str) -> list[str]:
        """Parts that a generation has and some pipelines need, and that were not found."""
        found = (*found, *self.sources, *(["lora"] if self.loras_found else []))
        return [part for part in ("gemma", "upsampler", "lora") if part not in found]

    @cached_property
    def fitting_loras(self) -> list[Path]:
        """LoRAs near the weights with the header of a released distilled one, whatever their name."""
        return self.distilled_among(self.loras_found)

    def distilled_among(self, loras: Iterable[Path]) -> list[Path]:
        """LoRAs with the header of a released distilled one.

        Those change every matrix of attention and feed-forward, audio and cross-modal ones
        included, at a rank near a tenth of the width (384 and 450 of 4096).
        """
        source, fitting = self.source("transformer"), {}
        shapes = {name: source.info(name).shape for name in source.names()}
        matrices = {n for n in shapes if BLOCK_MATRIX.search(n) and len(shapes[n]) == 2}
        for path in loras:
            with suppress(InputError):  # such as one of int8, which may be there for others
                lora = open_lora(path)
                changes = lora.changes.values()
                ranks = [change.rank for change in changes if isinstance(change, Pair)]
                wide = 16 * max(ranks, default=0) >= self.config.transformer.width
                own_release = stated(lora.file.metadata) in ("", self.config.release.name)
                if wide and own_release and matrices <= lora.changes.keys():
                    fitting[path] = {name: change.shape for name, change in lora.changes.items()}
        return [path for path in fitting if fitting[path].items() <= shapes.items()] or [*fitting]

    def distilled_lora(self) -> Path:
        """The only one of `fitting_loras`. Raises InputError that lists several."""
        if not self.loras_found:
            raise absent("lora", self.path, self.unreadable, self.missing("lora"))
        if found := only("lora", self.fitting_loras):
            return found
        listed = ", ".join(map(str, self.loras_found))
        raise InputError(
            f"{self.path}: no LoRA in it has the header of a distilled one: {listed}; pass one "
            "with --distilled-lora"
        )

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace graphs in this context: a config's contradictions become one InputError."""
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
    *,
    config_from: str | Path | None = None,
    chooser: Chooser = NO_DEVICE,
    **files: str | Path | None,
) -> Checkpoint:
    """Open a file or a folder; parts that are not given are looked for near it (`near.find`).

    files: of parts, by option of the part table; an upsampler is of any kind, but x1.5 ones are not
    looked for. config_from: a safetensors file with the config that the main file lacks.
    chooser: among several files of a network. Raises
    InputError for an ambiguous part, parts that do not fit each other, and tensors of no component;
    for a missing part when its source is asked for.
    """
    if unknown := files.keys() - FILES.keys():
        raise TypeError(f"no part has a file {', '.join(unknown)}; known: {', '.join(FILES)}")
    path, main, near, index, other = find(Path(model), files, config_from, chooser)
    places: Places = {}
    own: dict[str, RenamedSource] = {}
    if main is not None:
        main = dequantised(main)
        own = official_sources(main)
        if "gemma" in own and not files.get("text_encoder"):
            places["gemma"] = gemma_of(own["gemma"], near.files["gemma"])
    for part in PARTS.values():
        if part.source and part.either and part.name not in places:
            given = files.get(part.option)
            if where := given or only(part.name, listed(near.files[part.name], index)):
                places[part.name] = open_either(part, Path(where))
    if main is not None:
        places |= _official(main, own, files, near, places)
    else:
        places |= _diffusers(path, files, near, index, config_from)
    read = _read(places)
    config = _config(read, main, places)
    for name, place in places.items():
        part = PARTS[name]
        if part.own_release and place.file:
            check_release(place.file, config.version, part.flag)
        if part.check:
            part.check(read[name], config, str(place.source.where))
    layout = "diffusers" if main is None else "official"
    opened = _checkpoint(path, layout, config, places, near)
    return replace(opened, distilled=_distilled(other, config)) if other else opened


def _distilled(found: TensorFile | TensorFolder | Path, config: ModelConfig) -> RenamedSource:
    """The other transformer. Raises InputError if it is of other sizes."""
    part = PARTS["transformer"]
    if isinstance(found, Path):
        place = open_folder(part, found)
    else:
        file = dequantised(found)
        source = official_sources(file)[part.name]
        place = Place("official", source, partial(official_metadata, file), file)
    if place.read(part, {}) != config.transformer:
        where = place.source.where
        raise InputError(
            f"{where}: its config differs from the dev transformer's; choose one with --model FILE"
        )
    refuse_encoded(place.source)
    return place.source


def _checkpoint(
    path: Path, layout: str, config: ModelConfig, places: Places, near: Parts
) -> Checkpoint:
    """The checkpoint with these parts. Raises InputError for tensors in no known encoding."""
    sources = {name: place.source for name, place in places.items()}
    for name, source in sources.items():
        if "video_vae" in places:
            sources[name] = source.joined(places["video_vae"].source, PARTS[name].borrowed)
        refuse_encoded(source)
    gemma = sources["gemma"].where if "gemma" in sources else None
    tokenizer = find_tokenizer(gemma, near.tokenizer)
    loras, others, unread = tuple(near.files["lora"]), tuple(near.tokenizer), tuple(near.unreadable)
    return Checkpoint(path, layout, config, sources, tokenizer, loras, unread, others)


def open_parts(model: str | Path, names: Sequence[str], **files: str | Path | None) -> Checkpoint:
    """Some parts of a checkpoint: a file or folder of one, or a folder with several.

    names: the parts; files: as for `open_checkpoint`. Raises InputError for a part of `names` that
    was not found, or found twice, and on any use of another part's config.
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
                places[name] = open_either(part, Path(where))
            else:
                places |= open_part(part, Path(where))
        elif folder:
            places[name] = open_folder(part, folder)
    places |= {n: places[i] for n in names if n not in places and (i := PARTS[n].instead) in places}
    if missing := [name for name in names if name not in places]:
        raise absent(missing, path, near.unreadable)
    read = _read(places)
    core = names_of(lambda part: part.every and part.source and part.name not in read)
    read = {name: Absent(absent(name, path)) for name in core} | read
    file = next((place.file for place in places.values() if place.file), None)
    layout = next(iter(places.values())).layout
    return _checkpoint(path, layout, _config(read, file, places), places, near)


class Absent:
    """The config of an unopened part: every use raises the error that names its flag."""

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
    read: Mapping[str, Any], main: TensorFile | TensorFolder | None, places: Places
) -> ModelConfig:
    names = {field.name for field in fields(ModelConfig)}
    core: dict[str, Any] = {"gemma": None, "upsampler": None, "version": version_of(main)}
    vae = places.get("video_vae")
    core["video_vae_version"] = version_of(vae.file if vae else None)
    core |= {name: config for name, config in read.items() if name in names}
    parts = {name: config for name, config in read.items() if name not in names}
    return ModelConfig(parts=parts, **core)


def _official(
    main: TensorFile | TensorFolder,
    own: Mapping[str, RenamedSource],
    given: Given,
    near: Parts,
    either: Places,
) -> Places:
    """The parts of the main file, replaced by files that lie near it.

    own: sources in the main file. either: the parts that go with both layouts. Raises InputError
    for missing parts, and for a text encoder of another release.
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
    places = donated(near.donor, {*own, *places}, main.path) | places
    for part in PARTS.values():
        if part.instead in places and part.name not in places:
            places[part.name] = places[part.instead]
    core = names_of(lambda part: part.every and part.read and not part.either)
    missing = [name for name in core if name not in places and name != "text"]
    if {"audio_vae", "vocoder"} <= {*missing}:  # one file has both
        missing.remove("vocoder")
    if missing:
        also = ("gemma", "upsampler", "lora")
        more = [part for part in also if part not in either and not near.files[part]]
        raise absent(missing, main.path, near.unreadable, more)
    gemma = either["gemma"].source.where if "gemma" in either else None
    gemma = None if gemma == main.path else gemma
    if gemma is not None:
        check_gemma_version(main, version_of(main), gemma_keys(gemma), gemma)
    network = transformer.official(keys().inner("transformer"))
    text = _with_connectors(main, own.get("text"), near.files["text"], network, near.donor)
    places["text"] = Place("official", _text_source(main, text, gemma), keys, main)
    return places


def _with_connectors(
    main: TensorFile | TensorFolder,
    text: RenamedSource | None,
    files: Iterable[Path],
    config: TransformerConfig,
    donor: TensorFile | TensorFolder | None,
) -> RenamedSource | None:
    """Connectors and text projection of the main file, else of fitting files near it or the donor."""
    own = (config.width, config.audio_width)
    widths = (config.caption_channels,) * 2 if config.caption_projection else own
    expected = dict(zip(map("{}learnable_registers".format, CONNECTORS), widths, strict=True))

    def part(source: RenamedSource, prefix: str) -> list[str]:
        """Its names with a prefix, if the connectors' width or the projection's kind fits."""
        names = [name for name in source.names() if name.startswith(prefix)]
        if prefix == TEXT_PROJECTION:
            shared = f"{TEXT_PROJECTION}aggregate_embed.weight" in names
            return names if shared == config.caption_projection else []
        known = [name for name in names if name in expected]
        fits = all(source.info(name).shape[-1:] == (expected[name],) for name in known)
        return names if fits else []

    text = text or RenamedSource(main.path, {})
    prefixes = (*CONNECTORS, TEXT_PROJECTION)
    lacking = [p for p in prefixes if not any(name.startswith(p) for name in text.names())]
    beside = [component_sources("text", open_file(path))["text"] for path in files if lacking]
    other = official_sources(dequantised(donor)).get("text") if donor and lacking else None
    for prefix in lacking:
        found = [(source, names) for source in beside if (names := part(source, prefix))]
        refuse_ambiguous(text=[source.where for source, _ in found])
        if not found and other:
            found = [(other, part(other, prefix))]
        text = text.joined(*found[0]) if found else text
    return text if list(text.names()) else None


def _text_source(
    main: TensorFile | TensorFolder, text: RenamedSource | None, gemma_path: Path | None
) -> RenamedSource:
    """Connectors and text projection, which is in the main file or in the text encoder's."""
    if text is None:
        said = f"{main.path}: no embeddings connectors; pass a complete checkpoint, or put the file"
        raise InputError(f"{said} with those of the same transformer beside it")

    if not any(map(PROJECTION.match, text.names())):
        tensors = open_tensors(gemma_path) if gemma_path is not None else None
        has = tensors is not None and any(map(PROJECTION.match, tensors.names()))
        if not has and not of_version(version_tuple(main.metadata.get("model_version"))).split:
            said = f"{main.path}: no text projection ({TEXT_PROJECTION}*aggregate_embed); put the"
            raise InputError(f"{said} release's file that holds it beside this one")
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


def _diffusers(
    path: Path, given: Given, near: Parts, index: frozenset[str], config_from: str | Path | None
) -> Places:
    """A diffusers folder's parts. InputError for missing ones and flags without effect."""
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
    return named | {name: open_folder(PARTS[name], folder) for name, folder in own.items()}
