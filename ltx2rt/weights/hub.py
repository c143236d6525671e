"""Models of the Hugging Face hub: `ORG/NAME[/FILE][@REVISION]` to files in its cache.

Decides which of a repository's files a run needs, as `checkpoint` decides what a folder holds: by
headers and configs, which are read over the network, never by names. Leaves the download itself,
which goes on where a connection was cut, to huggingface_hub. A path that exists is never a
repository.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.notes import note
from ltx2rt.weights.names import component_of
from ltx2rt.weights.part_table import names_of
from ltx2rt.weights.parts import (
    INDEX,
    file_kind,
    folder_kind,
    listed,
    model_index,
    refuse_ambiguous,
)

_NAME = re.compile(
    r"(?P<name>[\w.-]{1,96}/[\w.-]{1,96}?)(?:/(?P<file>[\w./-]+\.safetensors|model_index\.json))?(?:@(?P<revision>[\w./-]+))?"
)
FOLDERS = names_of(
    lambda part: part.source and part.every and not part.either
)  # those of every diffusers checkpoint
DECODERS = names_of(lambda part: part.decoder)  # each with an encoder of its own
TEXTS = (".json", ".model", ".jinja")


@dataclass(frozen=True)
class Repo:
    """file: one of the repository's, None: whatever the run needs. revision: a branch, a tag or a
    commit."""

    name: str
    file: str | None = None
    revision: str = "main"


@dataclass(frozen=True)
class RemoteFile:
    """A safetensors file on the hub, as `file_kind` reads it."""

    tensors: dict[str, Any]

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def info(self, name: str) -> Any:
        return self.tensors[name]


def parse_repo(path: Path) -> Repo | None:
    """None for a path that exists, and for what is no name of a repository."""
    match = _NAME.fullmatch(str(path))
    if match is None or os.path.exists(path) or str(path).startswith("."):  # it takes any length
        return None
    return Repo(match["name"], match["file"], match["revision"] or "main")


@cache
def fetch(
    repo: Repo, part: str = "main", wanted: tuple[str, ...] = (), offline: bool = False
) -> Path:
    """Download what is not in the cache yet; the file or folder to open.

    part: "main" for a checkpoint and what belongs to it, "gemma" for a repository that is a Gemma
    folder, anything else for one file. wanted: kinds of files that come with a checkpoint where the
    repository has them and it does not hold them itself; of the two video decoders the other comes
    if there is but that. offline: look into the cache alone. Raises InputError.
    """
    with _hub(repo):
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        if offline or constants.HF_HUB_OFFLINE:
            return _cached(repo, Path(constants.HF_HUB_CACHE))
        if repo.file and part != "main":
            return Path(
                huggingface_hub.hf_hub_download(repo.name, repo.file, revision=repo.revision)
            )
        info = huggingface_hub.model_info(
            repo.name,
            revision=repo.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    for name, size in sizes.items():
        if not isinstance(name, str) or not isinstance(size, int) or size < 0:
            raise InputError(
                f"{repo.name}: its list on the hub holds {str(name)[:80]!r} of {str(size)[:20]} bytes, "
                "expected names and sizes of files; is HF_ENDPOINT a hub?"
            )
    if part == "gemma":
        return _download(
            repo, sizes, [n for n in sizes if "/" not in n and n.endswith((".safetensors", *TEXTS))]
        )
    if part != "main":
        raise InputError(f"{repo.name}: name one file of it, such as {repo.name}/FILE.safetensors")
    names, main = _needed(repo, sizes, wanted, info.sha or repo.revision)
    return _download(repo, sizes, names) / main


def _needed(
    repo: Repo, sizes: dict[str, int], wanted: Collection[str], commit: str
) -> tuple[list[str], str]:
    """Names of the files that a checkpoint needs, and which of them to open. Raises InputError."""
    folders = _folders(repo, sizes)
    headers = _headers(repo, sizes, commit, "transformer" in folders)
    files: dict[str, list[str]] = {}
    for name, header in headers.items():
        files.setdefault(file_kind(header) or "", []).append(name)
    mains = [*files.get("main", []), *([INDEX] if "transformer" in folders else [])]
    if repo.file:
        if repo.file not in (*mains, INDEX) or repo.file not in sizes:
            raise InputError(
                f"{repo.name}: {repo.file} is no checkpoint in it; found: {', '.join(mains) or 'none'}"
            )
        mains = [repo.file]
    if not mains:
        raise InputError(
            f"{repo.name}: no checkpoint of LTX-2 in it; pass another repository, or a folder, as --model"
        )
    own = headers[mains[0]].names() if mains != [INDEX] and len(mains) == 1 else ()
    layouts = (folders, files) if mains == [INDEX] else (files, folders)
    found = _chosen(
        {*wanted, *(FOLDERS if mains == [INDEX] else ())} - {component_of(n) for n in own}, *layouts
    )
    places = {"main": mains, **found}
    refuse_ambiguous(
        **{part: [f"{repo.name}/{name}" for name in names] for part, names in places.items()}
    )
    starts = [name for names in places.values() for name in names]
    starts += [
        name.removesuffix("tokenizer.json")
        for name in sizes
        if re.fullmatch(r"[^/]+/tokenizer\.json", name)
    ]
    return [name for name in sizes if name.startswith(tuple(starts))], mains[0]


def _folders(repo: Repo, sizes: dict[str, int]) -> dict[str, list[str]]:
    """The repository's folders that have a config, by part; of several those that its index
    lists."""
    configs = [name for name in sizes if name == INDEX or re.fullmatch(r"[^/]+/config\.json", name)]
    if not configs:
        return {}
    snapshot, folders = _download(repo, {}, configs), {}
    for folder in sorted({Path(name).parent for name in configs} - {Path()}):
        folders.setdefault(folder_kind(snapshot / folder) or "", []).append(folder)
    index = model_index(snapshot)
    return {
        part: [f"{folder}/" for folder in listed(found, index)] for part, found in folders.items()
    }


def _headers(
    repo: Repo, sizes: dict[str, int], commit: str, diffusers: bool
) -> dict[str, RemoteFile]:
    """Headers of the repository's own files; where those have no checkpoint, of its folders without
    a config, too, as LTX-2.5 is released. diffusers: it has a transformer's folder."""

    def at(depth: int) -> dict[str, RemoteFile]:
        plain = (name for name in sizes if f"{Path(name).parent}/config.json" not in sizes)
        chosen = [
            name for name in plain if name.endswith(".safetensors") and name.count("/") == depth
        ]
        return {name: _header(repo, name, commit) for name in chosen}

    found = at(0)
    complete = diffusers or any(file_kind(header) == "main" for header in found.values())
    return found if complete and "/" not in (repo.file or "") else found | at(1)


def _chosen(
    wanted: set[Any], first: dict[str, list[str]], second: dict[str, list[str]]
) -> dict[str, list[str]]:
    """Files or folders of the parts that are wanted. first, second: those of the checkpoint's
    layout, and of the other, which some parts may be taken from. Of the two video decoders the
    other is taken if there is but that."""
    video = wanted.intersection(DECODERS)
    if video and not any(part in first for part in video):
        wanted = wanted | {part for part in DECODERS if part in first}
    either = {*names_of(lambda part: part.either), "lora"}
    return {
        part: first.get(part) or (second.get(part, []) if part in either else [])
        for part in sorted(wanted)
    }


def _header(repo: Repo, name: str, commit: str) -> RemoteFile:
    import huggingface_hub

    with _hub(repo):
        return RemoteFile(
            huggingface_hub.parse_safetensors_file_metadata(
                repo.name, name, revision=commit
            ).tensors
        )


def _download(repo: Repo, sizes: dict[str, int], names: list[str]) -> Path:
    """The snapshot's folder."""
    import huggingface_hub

    if total := sum(sizes.get(name, 0) for name in names):
        note(
            f"{repo.name}: {len(names)} files, {total / 1e9:.3g} GB, those in the cache included",
            prefix="",
        )
    with _hub(repo):
        folder = huggingface_hub.snapshot_download(
            repo.name, revision=repo.revision, allow_patterns=names
        )
    return Path(folder)


def _cached(repo: Repo, cache_folder: Path) -> Path:
    """The part of the cache that is there, complete or not: opening it says what is missing."""
    root = cache_folder / f"models--{repo.name.replace('/', '--')}"
    ref = root / "refs" / repo.revision
    folder = root / "snapshots" / (ref.read_text().strip() if ref.is_file() else repo.revision)
    path = folder / (repo.file or "")
    if not path.exists():
        raise InputError(
            f"{repo.name}: neither a path nor in the hub's cache ({path}), and this run is offline; "
            f"run `ltx2rt weights fetch {repo.name}` online first"
        )
    return path


@contextmanager
def _hub(repo: Repo) -> Iterator[None]:
    """Whatever goes wrong within becomes one InputError; the transport's errors have no common
    class."""
    try:
        yield
    except InputError:
        raise
    except ImportError as error:
        raise InputError(
            f"{repo.name} does not exist; if it is a repository of the Hugging Face hub, install ltx2rt[hub] "
            f"({error}), or download it and pass the folder"
        ) from error
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        status = getattr(getattr(error, "response", None), "status_code", None)
        login = "log in with `hf auth login`, or set HF_TOKEN"
        if "GatedRepoError" in kinds:
            said = f"is gated: accept its terms on its page of the hub, then {login}"
        elif "RevisionNotFoundError" in kinds:
            said = f"has no revision {repo.revision} on the hub; choose with @REVISION"
        elif "RepositoryNotFoundError" in kinds:
            said = (
                f"is neither a path nor a repository of the hub (if it is a private one, {login})"
            )
        elif "EntryNotFoundError" in kinds:
            said = f"has no file {repo.file} at {repo.revision} on the hub; check the name"
        elif status in (401, 403):
            said = f"may not be read with this login ({status}): {login}"
        else:
            first = " ".join(str(error).split())[:200] or type(error).__name__
            said = f"is no path here, and could not be fetched from the hub: {first}; run it again, or check the path"
        raise InputError(f"{repo.name} {said}") from error
