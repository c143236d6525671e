"""The main file of a checkpoint, and the parts that are near it.

Decides which folders are searched, and keeps the candidates that fit the transformer by their
release and sizes. A main file without a config gets the one that the user
names, else that of the release with its names and shapes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ltx2rt.errors import InputError
from ltx2rt.notes import note
from ltx2rt.release import named, stated
from ltx2rt.weights import configs
from ltx2rt.weights.audit import networks
from ltx2rt.weights.comfyui import entries, extra_folders, models_folder, tree_around
from ltx2rt.weights.distilled import KINDS, kinds_of_folders
from ltx2rt.weights.files import WEIGHTS, TensorFile, TensorFolder, open_file, open_tensors
from ltx2rt.weights.forms import TEXT_BYTES, Room, largest, newest, transformers
from ltx2rt.weights.names import collapse, component_of
from ltx2rt.weights.part_table import PARTS, UPSAMPLERS, names_of, word_of
from ltx2rt.weights.parts import (
    INDEX,
    Parts,
    contents,
    contents_of_folder,
    file_kind,
    folder_kind,
    inside,
    listed,
    look_into,
    model_index,
    of_layout,
    refuse_ambiguous,
    release_of,
    scan,
    scan_quietly,
    words,
)
from ltx2rt.weights.presets import SIZES, preset
from ltx2rt.weights.quant.reader import dequantised
from ltx2rt.weights.text_encoder import gemma_keys

COMPLETE = {"video_vae", "audio_vae", "vocoder", "text"}
WIDTHS = tuple(
    f"{PARTS['transformer'].prefix}{name}patchify_proj.weight" for name in ("", "audio_")
)
MID_CHANNELS = 4  # the transformer's width over that of an upsampler; LTX-Video's are half as wide
Main = TypeVar("Main", bound=TensorFile | TensorFolder)
COPIED = ("model_version", "gemma_source_checkpoint")  # metadata of the release, next to the config
FLAG = "pass a safetensors file of its release with --config-from FILE"
# Parts in separate files; `Fit` decides their release.
NEARBY = names_of(lambda part: part.header and part.name not in ("text", "lora", "main"))
Given = Mapping[str, str | Path | None]  # files that flags name, by option


class Found(NamedTuple):
    """path: of the checkpoint. main: its file (None: a diffusers folder). index: the names of the
    parts that a diffusers folder lists. distilled: another transformer, where the main one is dev."""

    path: Path
    main: TensorFile | TensorFolder | None
    parts: Parts
    index: frozenset[str]
    distilled: TensorFile | TensorFolder | Path | None = None


@dataclass(frozen=True)
class Chooser:
    """Choose among several files of a network. room: memory of the device that computes, asked
    where it decides; None: not known. assume: the kind of the transformer."""

    room: Callable[[], Room | None] | None = None
    assume: str | None = None


NO_DEVICE = Chooser()


def find(path: Path, given: Given, config_from: str | Path | None, chooser: Chooser) -> Found:
    """The files and folders of a checkpoint.

    Near is: in the folder, or in that of the file; in a folder of ComfyUI all of its folders; for a
    lone transformer also the neighbouring folders, but from them only parts found once. Raises
    InputError.
    """
    spot = _spot(path)
    path = spot.path
    mains, parts = _scanned(spot)
    index = model_index(path if path.is_dir() and not spot.network else path.parent)
    path = path.parent if path.name == INDEX else path
    mains, distilled = _chosen(mains, parts, chooser)
    main = mains[0] if mains and not isinstance(mains[0], Path) else None
    parts.files["upsampler"] = of_layout(parts.files["upsampler"], main is None)
    if len(mains) > 1 and spot.tree:
        candidates = ", ".join(f"{file.path} ({words(file)})" for file in mains)
        raise InputError(
            f"{path}: {len(mains)} candidates for the checkpoint: {candidates}; choose with "
            "--model FILE"
        )
    sought = ["gemma", "upsampler"]
    if main is not None and len(mains) == 1:
        main = _completed(main, parts, config_from)
        if distilled and not isinstance(distilled, Path):
            distilled = with_config(distilled, None, main)
        _keep_fitting(parts, Fit.of(main), bool(spot.tree))
        if not spot.tree and not path.is_dir():
            _borrow(parts, main, given)
        sought = _sought(main, parts)
    asked = [part for part in sought if not given.get(PARTS[part].option)]
    found = {part: listed(parts.files[part], index) for part in asked}
    if gemmas := {file: _size(file) for file in found.get("gemma", ())}:
        one = largest([gemmas], chooser.room, word_of("gemma"), TEXT_BYTES)
        parts.files["gemma"] = found["gemma"] = one or found["gemma"]
    refuse_ambiguous(main=[getattr(file, "path", file) for file in mains], **found)
    if main is None and "transformer" not in parts.diffusers:
        if parts.unreadable:
            raise InputError(parts.unreadable[0])
        raise InputError(
            f"{path}: no checkpoint: neither an official single file nor a diffusers transformer "
            f"({contents_of_folder(path, parts)}); pass one with --model"
        )
    return Found(path, main, parts, index, distilled)


class Spot(NamedTuple):
    """Where a path leads. tree: the folder of ComfyUI around it; network: whether the path is the
    transformer of a diffusers folder."""

    path: Path
    tree: Path | None
    network: bool


def _spot(path: Path) -> Spot:
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; pass a checkpoint with --model")
    if path.is_file() and path.name != INDEX and folder_kind(path.parent) == "transformer":
        path = path.parent  # a file of a diffusers folder
    network = path.is_dir() and folder_kind(path) == "transformer"
    if path.name == INDEX or network:
        return Spot(path, None, network)
    return Spot(path, (models_folder(path) if path.is_dir() else None) or tree_around(path), False)


def _scanned(spot: Spot) -> tuple[list[Any], Parts]:
    """The main files that a path names, and the parts near it."""
    path, tree, network = spot
    if path.name == INDEX or network:
        parts = scan(path.parent)
        parts.diffusers |= {"transformer": [path]} if network else {}
        return [], parts
    if path.is_dir():
        return _look_into(path, tree)
    return [_opened(path)], scan_quietly(entries(tree)) if tree else scan(path.parent)


def _chosen(
    mains: list[Any], parts: Parts, chooser: Chooser
) -> tuple[list[Any], TensorFile | TensorFolder | Path | None]:
    """The main files between which nothing decides, and the distilled transformer there."""
    files = newest([file for file in mains if not isinstance(file, Path)])
    if len(files) > 1 and (chosen := transformers(files, chooser.assume, chooser.room)):
        return [chosen.main], chosen.distilled
    mains = [file for file in mains if file in files or isinstance(file, Path)]
    return mains, None if files else _dev_and_distilled(parts, chooser.assume)


def _completed(main: Main, parts: Parts, config_from: str | Path | None) -> Main:
    """The main file with a config, and the file that gives the parts that it lacks."""
    if _lacks(main):
        parts.donor = open_file(config_from) if config_from else _donor(parts, main)
    return with_config(main, config_from, parts.donor)


def _sought(main: TensorFile | TensorFolder, parts: Parts) -> list[str]:
    """The parts that neither the main file nor its donor holds."""
    own = {component_of(name) for name in main.names()}
    if parts.donor is not None:
        own |= {component_of(name) for name in parts.donor.names()} - {"gemma"}
    usual = [part for part in ("gemma", "upsampler") if part not in own]
    return usual + [part for part in NEARBY if PARTS[part].option and part not in (*own, *usual)]


def _dev_and_distilled(parts: Parts, assume: str | None) -> Path | None:
    """Return the distilled one of two diffusers transformers, and leave the dev one in `parts`. The
    index tells of more, or of two of one kind."""
    folders = parts.diffusers.get("transformer", [])
    kinds = kinds_of_folders(folders)
    if len(folders) != 2 or kinds.keys() != set(KINDS):
        return None
    parts.diffusers["transformer"] = [kinds[assume or "dev"]]
    return None if assume else kinds["distilled"]


def _size(path: Path) -> int:
    """Bytes of a text encoder's file, or of those in its folder."""
    files = (
        [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in WEIGHTS]
    )
    return sum(file.stat().st_size for file in files)


def _lacks(main: TensorFile | TensorFolder) -> set[str]:
    """The parts of a release's one file that this one has not."""
    return COMPLETE - {component_of(name) or "" for name in main.names()}


def _donor(parts: Parts, main: TensorFile | TensorFolder) -> TensorFile | TensorFolder | None:
    """The first complete file with a config, of the same release and as wide."""

    def shapes(file: TensorFile | TensorFolder) -> list[tuple[int, ...] | None]:
        names = set(file.names())
        return [file.info(name).shape if name in names else None for name in WIDTHS]

    for file in parts.files["main"]:
        other = os.path.abspath(file.path) != os.path.abspath(main.path)
        complete = other and not _lacks(file) and "config" in file.metadata
        if complete and release_of(file) == release_of(main) and shapes(file) == shapes(main):
            return file
    return None


def _opened(path: Path) -> TensorFile | TensorFolder:
    file = open_tensors(path)
    if file_kind(file) != "main":
        raise InputError(
            f"{path}: no LTX-2 checkpoint ({contents(file)}); pass the main file or a folder "
            "with --model"
        )
    return file


def _look_into(path: Path, tree: Path | None) -> tuple[list[Any], Parts]:
    """The main files in a folder, or its index of a diffusers model; and the parts near it."""
    if tree:
        parts, whole = scan_quietly(entries(tree)), Path(os.path.abspath(path))
        roots = [whole]
        if os.path.abspath(tree) in (str(whole), str(whole / "models")):
            roots += [Path(os.path.abspath(folder)) for folder in extra_folders(tree)]
        above = {file: Path(os.path.abspath(file.path)).parents for file in parts.files["main"]}
        return [file for file in above if any(root in above[file] for root in roots)], parts
    parts = look_into(path)
    index = [path / INDEX] if "transformer" in parts.diffusers else []
    return [*parts.files["main"], *index], parts


def _keep_fitting(parts: Parts, fit: Fit, tree: bool) -> None:
    """Keep those that fit, of parts found more than once. tree: of all, as ComfyUI mixes models."""
    for part in NEARBY:
        found = parts.files[part]
        if len(found) > 1 or (tree and found):
            fitting = fit.choose(part, found)
            parts.files[part] = fitting if fitting or tree else found


def _borrow(parts: Parts, main: TensorFile | TensorFolder, given: Given) -> None:
    """Take parts that a lone transformer lacks from neighbouring folders, where just one fits."""
    folder = main.path.parent
    whole = any(component_of(name) == "video_vae" for name in main.names())
    decoders = names_of(lambda part: part.decoder)
    if whole or given.get("video_vae") or any(parts.files[name] for name in decoders):
        return
    beside = [each for each in inside(folder.parent) if each != folder]
    plain = [each for each in beside if each.is_dir() and not (each / "config.json").exists()]
    found = scan_quietly([*beside, *(path for each in plain for path in inside(each))])
    _keep_fitting(found, Fit.of(main), tree=True)
    parts.donor = parts.donor or _donor(found, main)
    said = "in a folder beside that of"
    for part in (*NEARBY, "lora", "text"):
        one = found.files[part]
        if len(one) == 1 and not parts.files[part] and not given.get(PARTS[part].option):
            parts.files[part] = one
            note(f"{word_of(part)}: {one[0]}, {said} {main.path.name}")
    if len(found.tokenizer) == 1 and not parts.tokenizer:
        parts.tokenizer = found.tokenizer
        note(f"tokenizer: {found.tokenizer[0]}, {said} {main.path.name}")


@dataclass(frozen=True)
class Fit:
    """The transformer that parts have to fit. release: such as "2.3". hidden: the text encoder's
    width; it and `width` are 0 if not known."""

    release: str
    hidden: int
    width: int

    @staticmethod
    def of(main: TensorFile | TensorFolder) -> Fit:
        """Read from a main file's header."""
        try:
            transformer = json.loads(main.metadata["config"])["transformer"]
            hidden = int(transformer["caption_channels"])
            width = int(transformer["num_attention_heads"]) * int(transformer["attention_head_dim"])
        except (KeyError, TypeError, ValueError, RecursionError):  # opening it reports the error
            hidden = width = 0
        return Fit(release_of(main), hidden, width)

    def choose(self, part: str, paths: Sequence[Path]) -> list[Path]:
        """The paths that fit, preferring files that state their release."""
        if part == "gemma":
            return [path for path in paths if self._gemma(path)]
        said = {path: self._stated(part, path) for path in paths}
        same = [path for path in paths if said[path] == self.release]
        return same or [path for path in paths if not said[path]]

    def _gemma(self, path: Path) -> bool:
        try:
            config = configs.gemma(gemma_keys(path))
        except InputError:
            return False
        if config.family != named(self.release).text_encoder:
            return False
        return self.hidden in (0, config.hidden_size)

    def _stated(self, part: str, path: Path) -> str:
        """The release of a file; empty if neither header nor names show it."""
        if path.is_dir():
            return ""
        try:
            file = open_file(path)
        except InputError:
            return ""
        if (said := stated(file.metadata)) or part not in UPSAMPLERS:
            return said
        if self.width and file.info("initial_conv.weight").shape[0] * MID_CHANNELS != self.width:
            return "another model's"
        if part != "upsampler":
            return ""
        return "2.0" if "upsampler.conv.weight" in file.names() else "2.3"


def with_config(
    main: Main, config_from: str | Path | None, donor: TensorFile | TensorFolder | None = None
) -> Main:
    """The file with a `config` in its metadata: its own, the donor's, the flag's or a preset's."""
    if "config" in main.metadata:
        if config_from:
            note(f"--config-from gives no config: {main.path} has a config of its own")
        return main
    if config_from or donor is not None:
        found = donor.metadata if donor is not None else TensorFile(str(config_from)).metadata
        if "config" not in found:
            raise InputError(f"{config_from}: its metadata has no `config`; {FLAG}")
        added = {key: found[key] for key in ("config", *COPIED) if key in found}
    else:
        config = preset(_release(main)).config
        version = ".".join(map(str, config.version))
        added = {"config": json.dumps(configs.official_json(config)), "model_version": version}
    main.metadata = added | main.metadata
    return main


def _release(main: TensorFile | TensorFolder) -> str:
    """The preset with the file's names and shapes. Raises InputError with the nearest one."""
    read = dequantised(main)
    names = (name for name in read.names() if component_of(name) == "transformer")
    found = {(name, tuple(read.info(name).shape)) for name in names}
    different = {release: found ^ set(_shapes(release).items()) for release in SIZES}
    nearest = min(different, key=lambda release: len(different[release]))
    if names := sorted({name for name, _ in different[nearest]}):
        raise InputError(
            f"{main.path}: no `config` in its metadata, and names and shapes of its transformer "
            f"are of no known release (nearest: {nearest}, {len(names)} tensors differ: "
            f"{collapse(names)}); {FLAG}"
        )
    return nearest


@cache
def _shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The transformer's tensors, by official name, of a preset."""
    return networks(preset(name).config, ("transformer",))["transformer"]
