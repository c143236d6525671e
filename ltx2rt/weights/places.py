"""Places of a checkpoint's parts: in a file of the official layout, or in diffusers folders.

Decides what a file or a folder holds for the flag that names it. Reads no tensor data. `checkpoint`
decides which files are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.graph.encodings import ADVISED, E4M3, E5M2
from ltx2rt.notes import note
from ltx2rt.release import of_version, version_tuple
from ltx2rt.weights import configs
from ltx2rt.weights.configs import gemma3, video_vae
from ltx2rt.weights.configs.keys import ConfigSource, Keys, parse_json
from ltx2rt.weights.files import TensorFile, TensorFolder, TensorReader, open_tensors
from ltx2rt.weights.gguf import unread
from ltx2rt.weights.names import (
    GEMMA,
    collapse,
    component_of,
    fused_of,
    official_names,
    to_official,
    unsaved,
)
from ltx2rt.weights.part_table import PARTS, Part
from ltx2rt.weights.parts import contents, file_kind, folder_kind, read_json
from ltx2rt.weights.quant.packed import Packed
from ltx2rt.weights.quant.reader import JoinedRows, RenamedSource, dequantised, renamed
from ltx2rt.weights.text_encoder import gemma_keys, lone_gemma, open_gemma

ENCODED = [np.dtype(x) for x in (E4M3, E5M2, np.int8, np.uint8)]


@dataclass(frozen=True)
class Place:
    """A part that was found: its tensors, the holder of its config, and the config once read."""

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


def version_of(file: TensorFile | TensorFolder | None) -> tuple[int, ...]:
    return version_tuple(file.metadata.get("model_version")) if file else ()


def refuse_encoded(source: RenamedSource) -> None:
    """Raises InputError for quantised tensors without the companions of `quantised`: scales are
    spelled in several ways, and some files have none. And for GGUF types that are not read."""
    infos = (source.info(name) for name in source.names())
    if types := sorted({i.format for i in infos if isinstance(i, Packed) and i.dtype in ENCODED}):
        raise InputError(f"{source.where}: tensors {unread(', '.join(types))}")
    found = {name: source.info(name).dtype for name in source.names() if name.endswith("weight")}
    if encoded := {name: str(dtype) for name, dtype in found.items() if dtype in ENCODED}:
        dtypes = ", ".join(sorted({*encoded.values()}))
        raise InputError(
            f"{source.where}: {len(encoded)} tensors are {dtypes} without the scales of a known "
            f"format (first {next(iter(encoded))}); pass the bfloat16 file and, for 8 bits on the "
            f"device, --weights-dtype {ADVISED}"
        )


def check_release(file: TensorFile | TensorFolder, version: tuple[int, ...], flag: str) -> None:
    """Raises InputError for a file of another release, if either is particular about it."""
    own = version_of(file)
    if version and not of_version(own).goes_with(of_version(version)):
        said = f"of LTX-{'.'.join(map(str, own))}" if own else "that states no model_version"
        said = f"{file.path}: a file {said} beside LTX-{'.'.join(map(str, version))}; pass that"
        raise InputError(f"{said} release's own with {flag}")


def official_metadata(file: TensorFile | TensorFolder) -> Keys:
    """Its config's sections; those that are null, as the files of LTX-2.5 have them, are absent."""
    if "config" not in file.metadata:
        raise InputError(
            f"{file.path}: its metadata has no `config`; pass the original file, not a re-saved one"
        )
    found = parse_json(file.metadata["config"], f"{file.path}: config")
    return Keys(
        {k: section for k, section in found.data.items() if section is not None}, found.where
    )


def open_either(part: Part, path: Path) -> Place:
    """A file, or a diffusers folder, of a part that goes with both layouts."""
    if part.read is not None:
        return open_part(part, path)[part.name]
    config, source = open_gemma(path := lone_gemma(path))
    return Place("official", source, lambda: Keys({}, str(path)), config=config)


def open_part(part: Part, path: Path) -> Places:
    """A part's file, or diffusers folder, of any part that its flag takes. Raises InputError."""
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
    if kind in PARTS and part.kind and PARTS[kind].kind == part.kind:
        kind = part.name  # an upsampler of any scale
    if kind in takes:
        found[kind] = path
    whole = path.parent if kind in takes else path
    for name, other in takes.items():
        if other.folder and name not in found and folder_kind(whole / other.folder) == name:
            found[name] = whole / other.folder
    if part.name not in found and kind not in takes:
        word = part.kind or part.word
        raise InputError(f"{path}: no {word} folder; pass one, or a file, with {part.flag}")
    return {name: open_folder(PARTS[name], folder) for name, folder in found.items()}


def open_folder(part: Part, path: Path) -> Place:
    """A folder of the diffusers layout; rows that are one tensor in the official one are joined."""
    keys = read_json(path / "config.json")
    stages = len(video_vae.diffusers(keys).encoder) if part.name == "video_vae" else 0
    source = renamed(open_tensors(path), path, lambda name: to_official(part.name, name, stages))
    joined, names = fused_of(part.name, source.names()), dict.fromkeys(source.names())
    for row in (row for rows in joined.values() for row in rows):
        if names.pop(row, row) is not None:
            raise InputError(f"{path}: no {row}; pass a complete folder")
    if joined:
        source = renamed(JoinedRows(source, joined), path, str).joined(source, names)
    return Place("diffusers", source, lambda: keys)


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
    """Sources of a part's separate file by component; missing prefixes are put back."""
    if any(p.option and p.option == PARTS[part].option for p in PARTS.values() if not p.header):
        return official_sources(file)  # also another part's
    if part == "text":
        names = official_names(file.names())
        text = {name: ours for name, ours in names.items() if component_of(ours) == "text"}
        return {"text": renamed(file, file.path, text.get)}
    prefix = PARTS[part].prefix
    return {part: renamed(file, file.path, lambda name: prefix + name.removeprefix(prefix))}


def gemma_of(source: RenamedSource, near: Iterable[Path]) -> Place:
    """The text encoder in a checkpoint that ComfyUI has saved, with the config of a folder near it
    that has one of the same sizes, else with the released one."""
    shapes = {name.removeprefix(GEMMA): source.info(name).shape for name in source.names()}
    config = configs.gemma(gemma3.plain_gemma3(shapes, str(source.where)))
    for folder in filter(Path.is_dir, near):
        theirs = configs.gemma(gemma_keys(folder))
        if all(getattr(theirs, n, None) == getattr(config, n) for n in gemma3.GEMMA_SIZES):
            config = theirs
    return Place("official", source, lambda: Keys({}, str(source.where)), config=config)


def donated(donor: TensorFile | TensorFolder | None, own: Collection[str], main: Path) -> Places:
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


def check_gemma_version(
    main: TensorFile | TensorFolder, version: tuple[int, ...], gemma: Keys, where: Path
) -> None:
    """Raises InputError if both name a text encoder, and not the same one."""
    found, release = gemma.get("gemma_version", None), f"LTX-{'.'.join(map(str, version)) or '2'}"
    if "gemma_source_checkpoint" in main.metadata:
        source = parse_json(
            main.metadata["gemma_source_checkpoint"], f"{main.path}: gemma_source_checkpoint"
        )
        if (wanted := source.need("gemma_version")) != found:
            said = f"{where}: gemma_version {found!r}, the transformer was trained with {wanted!r};"
            raise InputError(f"{said} pass the text encoder of its release with --text-encoder")
    elif of_version(version).split:
        if found is not None and not main.architecture:
            said = f"gemma_version {found!r}, but {main.path} names none"
            raise InputError(f"{where}: {said}; pass the original files of one release")
        silent = f"{main.path.name} names no"
        if found is None:
            silent = f"neither {main.path.name} nor {where.name} names its"
        note(f"{silent} gemma_version; whether they fit is not known")
    elif not str(gemma.get("model_type", "")).startswith("gemma3"):
        said = f"{where}: model_type {gemma.get('model_type', None)!r}, but {release} was trained"
        raise InputError(f"{said} with Gemma 3; pass that with --text-encoder")
