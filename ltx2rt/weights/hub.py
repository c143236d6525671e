"""Models of the Hugging Face hub: `ORG/NAME[/FILE][@REVISION]` to files in its cache.

Decides which of a repository's files a run needs, as `checkpoint` decides what a folder holds: by headers and configs,
which are read over the network, never by names. Leaves the download itself, which goes on where a connection was cut,
to huggingface_hub. A path that exists is never a repository.
"""

from __future__ import annotations

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
from ltx2rt.weights.checkpoint import INDEX, file_kind, folder_kind, refuse_ambiguous

_NAME = re.compile(
    r"(?P<name>[\w.-]{1,96}/[\w.-]{1,96}?)(?:/(?P<file>[\w./-]+\.safetensors|model_index\.json))?(?:@(?P<revision>[\w./-]+))?"
)
OPTIONAL = ("upsampler", "lora")  # kinds of files that not every pipeline needs
TEXTS = (".json", ".model", ".jinja")


@dataclass(frozen=True)
class Repo:
    """file: one of the repository's, None: whatever the run needs. revision: a branch, a tag or a commit."""

    name: str
    file: str | None = None
    revision: str = "main"


@dataclass(frozen=True)
class RemoteFile:
    """What `file_kind` reads of a safetensors file on the hub."""

    tensors: dict[str, Any]

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def info(self, name: str) -> Any:
        return self.tensors[name]


def parse_repo(path: Path) -> Repo | None:
    """None for a path that exists, and for what is no name of a repository."""
    match = _NAME.fullmatch(str(path))
    if match is None or path.exists() or str(path).startswith("."):
        return None
    return Repo(match["name"], match["file"], match["revision"] or "main")


@cache
def fetch(repo: Repo, part: str = "main", wanted: tuple[str, ...] = OPTIONAL, offline: bool = False) -> Path:
    """Download what is not in the cache yet; the file or folder to open.

    part: "main" for a checkpoint and what belongs to it, "gemma" for a repository that is a Gemma folder, anything else
    for one file. wanted: optional kinds of files, and "gemma", that come with a checkpoint where the repository has
    them. offline: look into the cache alone. Raises InputError.
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
            return Path(huggingface_hub.hf_hub_download(repo.name, repo.file, revision=repo.revision))
        info = huggingface_hub.model_info(repo.name, revision=repo.revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    if part == "gemma":
        return _download(repo, sizes, [n for n in sizes if "/" not in n and n.endswith((".safetensors", *TEXTS))])
    if part != "main":
        raise InputError(f"{repo.name}: name one file of it, such as {repo.name}/FILE.safetensors")
    names, main = _needed(repo, sizes, wanted, info.sha or repo.revision)
    return _download(repo, sizes, names) / main


def _needed(repo: Repo, sizes: dict[str, int], wanted: Collection[str], commit: str) -> tuple[list[str], str]:
    """Names of the files that a checkpoint needs, and which of them to open. Raises InputError."""
    found: dict[str, list[str]] = {}  # files by kind
    for name in sizes:
        if "/" not in name and name.endswith(".safetensors"):
            found.setdefault(_kind(repo, name, commit) or "", []).append(name)
    folders: dict[str, list[str]] = {}
    configs = [name for name in sizes if name.count("/") == 1 and name.endswith("/config.json")]
    snapshot = _download(repo, {}, configs) if configs else Path()
    for name in configs:
        folder = name.partition("/")[0]
        folders.setdefault(folder_kind(snapshot / folder) or "", []).append(f"{folder}/")
    mains = [*found.pop("main", []), *([INDEX] if "transformer" in folders else [])]
    if repo.file:
        if repo.file not in (*mains, INDEX) or repo.file not in sizes:
            raise InputError(f"{repo.name}: {repo.file} is no checkpoint in it; found: {', '.join(mains) or 'none'}")
        mains = [repo.file]
    if not mains:
        raise InputError(f"{repo.name}: no checkpoint of LTX-2 in it; pass another repository, or a folder, as --model")
    files = {kind: names for kind, names in found.items() if kind and (kind not in OPTIONAL or kind in wanted)}
    for kind in ("gemma", "upsampler"):
        beside = folders.pop(kind, [])
        if kind in wanted and (mains == [INDEX] or not files.get(kind)):  # each layout has its own
            files[kind] = beside or files.get(kind, [])
    refuse_ambiguous(main=[f"{repo.name}/{name}" for name in mains],
                     **{kind: [f"{repo.name}/{name}" for name in names] for kind, names in files.items()})  # fmt: skip
    parts = [*mains, *(name for names in files.values() for name in names)]
    if mains == [INDEX]:
        parts += [name for kind, names in folders.items() if kind for name in names]
    parts += [name.removesuffix("tokenizer.json") for name in sizes if re.fullmatch(r"[^/]+/tokenizer\.json", name)]
    return [name for name in sizes if name.startswith(tuple(parts))], mains[0]


def _kind(repo: Repo, name: str, commit: str) -> str | None:
    import huggingface_hub

    with _hub(repo):
        header = huggingface_hub.parse_safetensors_file_metadata(repo.name, name, revision=commit)
    return file_kind(RemoteFile(header.tensors))


def _download(repo: Repo, sizes: dict[str, int], names: list[str]) -> Path:
    """The snapshot's folder."""
    import huggingface_hub

    if total := sum(sizes.get(name, 0) for name in names):
        note(f"{repo.name}: {len(names)} files, {total / 1e9:.3g} GB, those in the cache included", prefix="")
    with _hub(repo):
        folder = huggingface_hub.snapshot_download(repo.name, revision=repo.revision, allow_patterns=names)
    return Path(folder)


def _cached(repo: Repo, cache_folder: Path) -> Path:
    """What lies in the cache, complete or not: opening it says what is missing."""
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
    """Whatever goes wrong within becomes one InputError; the transport's errors have no common class."""
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
            said = f"is neither a path nor a repository of the hub (if it is a private one, {login})"
        elif "EntryNotFoundError" in kinds:
            said = f"has no file {repo.file} at {repo.revision} on the hub; check the name"
        elif status in (401, 403):
            said = f"may not be read with this login ({status}): {login}"
        else:
            first = " ".join(str(error).split())[:200] or type(error).__name__
            said = f"could not be fetched from the hub: {first}; run it again to go on, or pass a local path"
        raise InputError(f"{repo.name} {said}") from error
