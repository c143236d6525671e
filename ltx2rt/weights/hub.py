"""Models of the Hugging Face hub: `ORG/NAME[/FILE][@REVISION]` to files in its cache.

Decides which of a repository's files a run needs: `parts` examines them as in a folder, by a
`Repository`, which reads headers and configs over the network. huggingface_hub downloads them. A
path that exists is never a repository.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ltx2rt.atomic_file import existing_folder
from ltx2rt.errors import InputError, few
from ltx2rt.notes import note
from ltx2rt.weights.configs.keys import Keys
from ltx2rt.weights.distilled import FULL, SCHEDULER, kind_by_name
from ltx2rt.weights.files import SHARD_INDEX
from ltx2rt.weights.forms import ACTIVATION_BYTES, TEXT_BYTES, largest
from ltx2rt.weights.lora.config import ADAPTER_CONFIG
from ltx2rt.weights.lora.config import FILES as LORA_FILES
from ltx2rt.weights.names import component_of, official_names
from ltx2rt.weights.near import NO_DEVICE, Chooser
from ltx2rt.weights.part_table import names_of
from ltx2rt.weights.parts import (
    INDEX,
    Listing,
    Parts,
    listed,
    look_into,
    model_index,
    of_layout,
    read_json,
    refuse_ambiguous,
    scan,
)

_REPO = r"(?P<name>[\w.-]{1,96}/[\w.-]{1,96}?)"
_FILE = r"(?:/(?P<file>[\w./-]+\.(?:safetensors|gguf|index(?:\.\w+)?\.json)|model_index\.json))?"
_NAME = re.compile(rf"{_REPO}{_FILE}(?:@(?P<revision>[\w./-]+))?")
# An address of the hub, in which a Path has one slash after the colon.
_ADDRESS = re.compile(
    r"(?:(?:https?:/{1,2}(?:www\.)?)?(?:huggingface\.co|hf\.co|hf-mirror\.com)|hf:/{0,1})/"
    rf"(?:models/)?{_REPO}(?:/(?:tree|blob|resolve|raw)/(?P<revision>refs/pr/\d+|[\w.-]+))?{_FILE}"
    r"/?(?:[?#].*)?"
)
FILE_SUFFIXES = (".safetensors", ".gguf", ".ckpt", ".pt", ".pth", ".bin", ".json", ".zip")
# folders of every diffusers checkpoint
FOLDERS = names_of(lambda part: part.source and part.every and not part.either)
DECODERS = names_of(lambda part: part.decoder)  # each with its encoder
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
FAULTS = {  # by class of the transport's error, what is wrong with the repository
    "GatedRepoError": f"is gated: accept its terms on its page of the hub, then {LOGIN}",
    "RevisionNotFoundError": "has no revision {repo.revision} on the hub; choose with @REVISION",
    "RepositoryNotFoundError": "is neither a path nor a repository of the hub (if it is a private "
    f"one, {LOGIN})",
    "TimeoutException": "is no path here, and the hub does not answer; run it again, or name a mirror "
    "by HF_ENDPOINT",
    "EntryNotFoundError": "has no file {repo.file} at {repo.revision} on the hub; check the name",
}
FOUR_BITS = 0.45  # share of a bfloat16 file's bytes; forms of four bits have less
TEXTS = (".safetensors", ".json", ".model", ".jinja")  # files of a Gemma folder


@dataclass(frozen=True)
class Repo:
    """file: one of its files, None: all that the run needs. revision: branch, tag or commit."""

    name: str
    file: str | None = None
    revision: str = "main"


@dataclass(frozen=True)
class RemoteFile:
    """The header of a safetensors file on the hub, or of several under an index."""

    path: Path
    tensors: dict[str, Any]
    shards: frozenset[Path] = frozenset()

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def info(self, name: str) -> Any:
        return self.tensors[name]

    def __hash__(self) -> int:
        return hash(self.path)

    def transformer_bytes(self) -> int:
        """Stored bytes of its transformer."""
        ours = official_names(self.tensors)
        ends = (
            self.tensors[n].data_offsets for n in ours if component_of(ours[n]) == "transformer"
        )
        return sum(end - begin for begin, end in ends)


class Repository(Listing):
    """The listing of a repository, with paths inside it. Only headers and configs are read. Raises
    errors of the transport as they are, so that a scan does not go on after one."""

    def __init__(self, repo: Repo, sizes: Mapping[str, int], commit: str):
        """sizes: bytes of each file. commit: of the listing, so that headers are of its files."""
        self.repo, self.sizes, self.commit = repo, sizes, commit
        # headers of GGUF files are not read over the network
        self.files = {Path(name) for name in sizes if not name.endswith(".gguf")}
        self._entries: dict[Path, set[Path]] = {Path(): set()}  # by folder
        self._opened: dict[Path, RemoteFile] = {}
        for path in self.files:
            for entry, folder in pairwise((path, *path.parents)):
                self._entries.setdefault(folder, set()).add(entry)

    def inside(self, folder: Path) -> list[Path]:
        return sorted(self._entries[folder])

    def size(self, path: Path) -> int:
        """Bytes of a file, or of the files in a folder."""
        own = (name for name in self.sizes if path in (Path(name), *Path(name).parents))
        return sum(map(self.sizes.__getitem__, own))

    def is_dir(self, path: Path) -> bool:
        return path in self._entries

    def is_file(self, path: Path) -> bool:
        return path in self.files

    @cached_property
    def snapshot(self) -> Path:
        """The cache folder, with folders' configs, the list of a model's parts, shard indices."""

        def small(name: str) -> bool:
            top = "/" not in name and (name == INDEX or SHARD_INDEX.fullmatch(name))
            return bool(top or re.fullmatch(r"[^/]+/config\.json", name))

        return _download(self.repo, {}, [*filter(small, map(str, self.files))])

    def json(self, path: Path) -> Keys:
        return read_json(self.snapshot / path)

    def shards(self, index: Path) -> set[Path]:
        found = super().shards(self.snapshot / index)
        return {Path(os.path.relpath(path, self.snapshot)) for path in found}

    def open(self, path: Path) -> RemoteFile:
        if SHARD_INDEX.fullmatch(path.name):
            files = [self.open(shard) for shard in sorted(self.shards(path))]
            tensors = {name: file.info(name) for file in files for name in file.names()}
            return RemoteFile(path, tensors, frozenset(file.path for file in files))
        if path not in self.files:
            raise InputError(f"{self.repo.name}: no file {path}, which a shard index lists")
        if path not in self._opened:
            import huggingface_hub

            read = huggingface_hub.parse_safetensors_file_metadata
            header = read(self.repo.name, str(path), revision=self.commit)
            self._opened[path] = RemoteFile(path, header.tensors)
        return self._opened[path]


def parse_repo(path: Path) -> Repo | None:
    """The repository with the name ORG/NAME, or with this address on the web. None for a path that
    exists or if its first folder exists, for a file's name, and for all other text."""
    if match := _ADDRESS.fullmatch(unquote(str(path))):
        return Repo(match["name"], match["file"], match["revision"] or "main")
    match = _NAME.fullmatch(str(path))
    if match is None or os.path.exists(path) or str(path).startswith("."):  # it takes any length
        return None
    if path.parts[0] not in ("", "/") and os.path.isdir(path.parts[0]):
        return None
    if not match["file"] and path.suffix.lower() in FILE_SUFFIXES:
        return None
    return Repo(match["name"], match["file"], match["revision"] or "main")


@cache
def fetch(
    repo: Repo,
    part: str = "main",
    wanted: tuple[str, ...] = (),
    offline: bool = False,
    chooser: Chooser = NO_DEVICE,
) -> Path:
    """Download the files that the cache lacks; returns the file or folder to open.

    part: "main" for a checkpoint and its parts, "gemma" for a repository that is a Gemma folder,
    "lora" for a LoRA and its config, anything else for one file. wanted: parts that a checkpoint
    needs beside those in its file. offline: look only into the cache. chooser: among several
    transformers and text encoders, of the distilled kind by default. Raises InputError.
    """
    with _hub(repo):
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        if offline or constants.HF_HUB_OFFLINE:
            return _cached(repo, Path(constants.HF_HUB_CACHE))
        if repo.file and (part not in ("main", "lora") or repo.file.endswith(".gguf")):
            found = huggingface_hub.hf_hub_download(repo.name, repo.file, revision=repo.revision)
            return Path(found)
        how = {"files_metadata": True, "timeout": constants.HF_HUB_ETAG_TIMEOUT}
        info = huggingface_hub.model_info(repo.name, revision=repo.revision, **how)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    for name, size in sizes.items():
        if not isinstance(name, str) or not isinstance(size, int) or size < 0:
            raise InputError(
                f"{repo.name}: its list on the hub holds {str(name)[:80]!r} of {str(size)[:20]} "
                "bytes, expected names and sizes of files; is HF_ENDPOINT a hub?"
            )
    if part == "gemma":
        top = [name for name in sizes if "/" not in name]
        return _download(repo, sizes, [name for name in top if name.endswith(TEXTS)])
    if part == "lora":
        return _lora(repo, sizes)
    if part != "main":
        raise InputError(f"{repo.name}: name one file of it, such as {repo.name}/FILE.safetensors")
    with _hub(repo):
        listing = Repository(repo, sizes, info.sha or repo.revision)
        deep = "/" in (repo.file or "")
        parts = scan(Path(), listing, deep=True) if deep else look_into(Path(), listing)
        names, main = _needed(listing, parts, wanted, chooser)
    return _download(repo, sizes, names) / main


def _lora(repo: Repo, sizes: dict[str, int]) -> Path:
    """The file that is named, or the one of the repository, with the config in its folder."""
    found = [name for name in sizes if "/" not in name and name.endswith(".safetensors")]
    chosen = [repo.file] if repo.file else [n for n in LORA_FILES if n in found][:1] or found
    if len(chosen) != 1 or chosen[0] not in sizes:
        named = f"no {repo.file}; " if repo.file else ""
        raise InputError(
            f"{repo.name}: {named}{', '.join(found) or 'no LoRA'}; name one file of it, such "
            f"as {repo.name}/FILE.safetensors"
        )
    config = str(Path(chosen[0]).parent / ADAPTER_CONFIG)
    return _download(repo, sizes, [*chosen, *([config] if config in sizes else [])]) / chosen[0]


def _needed(
    listing: Repository, parts: Parts, wanted: Collection[str], chooser: Chooser
) -> tuple[list[str], str]:
    """Names of the files that a checkpoint needs, and which of them to open. Raises InputError."""
    mains = _mains(listing, parts, chooser)
    folders = list(mains) == [INDEX]
    names = mains.values() if len(mains) == 1 and not folders else ()
    kind = _kind_of_folders(parts, chooser) if folders else None
    if (kind or kind_by_name(listing.repo.name if folders else next(iter(mains)))) == "distilled":
        wanted = {part for part in wanted if part != "lora"}
    own = {component_of(name) for file in names for name in file.names()}
    chosen = _chosen({*wanted, *(FOLDERS if folders else ())} - own, listing, parts, folders)
    index = model_index(Path(), listing)
    found = {"main": [*map(Path, mains)]}
    found |= {part: listed(paths, index) for part, paths in chosen.items()}
    if gemmas := found.get("gemma"):
        sizes = {path: listing.size(path) for path in gemmas}
        found["gemma"] = _form(sizes, chooser, "text encoder", TEXT_BYTES) or gemmas
    at = {part: [f"{listing.repo.name}/{path}" for path in found[part]] for part in found}
    refuse_ambiguous(**at)
    places = {path for paths in found.values() for path in paths} | {Path(SCHEDULER)}
    places |= {path.parent for path in parts.tokenizer}
    places |= {shard for file in names for shard in file.shards}
    files = [name for name in listing.sizes if places & {Path(name), *Path(name).parents}]
    return files, next(iter(mains))


def _kind_of_folders(parts: Parts, chooser: Chooser) -> str | None:
    """The kind of a repository with folders of both kinds, of which that one's stays; else None."""
    folders = parts.diffusers.get("transformer", [])
    full = [path for path in folders if path.name == FULL]
    if not full:
        return None
    kind = chooser.assume or "distilled"
    rest = [path for path in folders if path not in full]
    parts.diffusers["transformer"] = full if kind == "dev" else rest or full
    return kind


def _form(
    sizes: Mapping[Any, int], chooser: Chooser, word: str, more: int = ACTIVATION_BYTES
) -> list[Any] | None:
    """The largest form that the device keeps whole, else the smallest, but none of four bits if
    there is another; None if several models may be meant."""
    least = FOUR_BITS * max(sizes.values())
    return largest([{x: n for x, n in sizes.items() if n > least}], chooser.room, word, more)


def _mains(listing: Repository, parts: Parts, chooser: Chooser) -> dict[str, Any]:
    """The main files by name; the index, with None, for diffusers folders. Of several files one of
    the kind that is asked for. Raises InputError."""
    repo, mains = listing.repo, {str(file.path): file for file in parts.files["main"]}
    if "transformer" in parts.diffusers:
        mains[INDEX] = None
    if repo.file:
        if repo.file not in (*mains, INDEX) or repo.file not in listing.sizes:
            raise InputError(
                f"{repo.name}: {repo.file} is no checkpoint in it; found: {few(mains)}"
            )
        return {repo.file: mains.get(repo.file)}
    if not mains:
        said = "".join(f"; not readable: {line}" for line in parts.unreadable)
        raise InputError(
            f"{repo.name}: no checkpoint of LTX-2 in it; pass another repository, or a folder, "
            f"as --model{said}"
        )
    kinds: dict[str | None, dict[Any, int]] = {}
    for file in parts.files["main"] if len(mains) > 1 else ():
        kinds.setdefault(kind_by_name(file.path.name), {})[file] = file.transformer_bytes()
    sizes = kinds.get(chooser.assume or "distilled")
    chosen = _form(sizes, chooser, "transformer") if sizes else None
    return {str(chosen[0].path): chosen[0]} if chosen else mains


def _chosen(
    wanted: set[Any], listing: Repository, parts: Parts, folders: bool
) -> dict[str, list[Path]]:
    """Files or folders of the parts that are wanted. folders: the checkpoint is a diffusers one. Of
    the two video decoders the other is taken if there is but that."""
    found = parts.diffusers if folders else parts.files
    video = wanted.intersection(DECODERS)
    if video and not any(found.get(part) for part in video):
        wanted = wanted | {part for part in DECODERS if found.get(part)}
    either = {*names_of(lambda part: part.either), "lora"}
    own = {part: of_layout(parts.files[part], folders, listing) for part in either}
    return {part: own.get(part, found.get(part, [])) for part in sorted(wanted)}


def _download(repo: Repo, sizes: dict[str, int], names: list[str]) -> Path:
    """The snapshot's folder. Raises InputError where the disk has no room for what is missing."""
    import huggingface_hub
    from huggingface_hub import constants

    at = repo.revision
    if total := sum(sizes.get(name, 0) for name in names):
        cached = huggingface_hub.try_to_load_from_cache
        missing = [n for n in names if not isinstance(cached(repo.name, n, revision=at), str)]
        left = sum(sizes.get(name, 0) for name in missing)
        cache = existing_folder(Path(constants.HF_HUB_CACHE) / "a file")
        free = shutil.disk_usage(cache).free
        said = (
            f"{len(names)} files, {total / 1e9:.3g} GB, of which {left / 1e9:.3g} GB are not in the"
        )
        said += f" cache {cache}; its disk has {free / 1e9:.3g} GB free"
        if left > free:
            raise InputError(f"{repo.name}: {said}; set HF_HOME to a folder on another disk")
        note(f"{repo.name}: {said}", prefix="")
    with _hub(repo):
        return Path(huggingface_hub.snapshot_download(repo.name, revision=at, allow_patterns=names))


def _cached(repo: Repo, cache_folder: Path) -> Path:
    """The cached folder, complete or not: opening it reports missing files."""
    root = cache_folder / f"models--{repo.name.replace('/', '--')}"
    ref = root / "refs" / repo.revision
    folder = root / "snapshots" / (ref.read_text().strip() if ref.is_file() else repo.revision)
    path = folder / (repo.file or "")
    if not path.exists():
        raise InputError(
            f"{repo.name}: neither a path nor in the hub's cache ({path}), and this run is "
            f"offline; run `ltx2rt weights fetch {repo.name}` online first"
        )
    return path


@contextmanager
def _hub(repo: Repo) -> Iterator[None]:
    """Turn any error within into an InputError; the transport's have no common class."""
    try:
        yield
    except InputError:
        raise
    except ImportError as error:
        raise InputError(
            f"{repo.name} does not exist; if it is a repository of the Hugging Face hub, in the "
            f"clone: pip install '.[hub]' ({error}), or download it and pass the folder"
        ) from error
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        status = getattr(getattr(error, "response", None), "status_code", None)
        first = " ".join(str(error).split())[:200] or type(error).__name__
        said = f"is no path here, and could not be fetched from the hub: {first}; "
        said += "run it again, or check the path"
        if status in (401, 403):
            said = f"may not be read with this login ({status}): {LOGIN}"
        known = next((FAULTS[kind] for kind in kinds if kind in FAULTS), None)
        said = known.format(repo=repo) if known else said
        raise InputError(f"{repo.name} {said}") from error
