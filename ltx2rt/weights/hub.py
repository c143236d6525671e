"""Models of the Hugging Face hub: `ORG/NAME[/FILE][@REVISION]` to files in its cache.

Decides which of a repository's files a run needs, as `checkpoint` decides what a folder holds: by headers and configs,
which are read over the network, never by names. Leaves the download itself, which goes on where a connection was cut,
to huggingface_hub. A path that exists is never a repository.
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
from ltx2rt.weights.parts import INDEX, UPSAMPLERS, file_kind, folder_kind, listed, model_index, refuse_ambiguous

_NAME = re.compile(
    r"(?P<name>[\w.-]{1,96}/[\w.-]{1,96}?)(?:/(?P<file>[\w./-]+\.safetensors|model_index\.json))?(?:@(?P<revision>[\w./-]+))?"
)
OPTIONAL = ("upsampler", "temporal_upsampler", "lora")  # kinds of files that not every pipeline needs
FOLDERS = ("transformer", "text", "video_vae", "audio_vae", "vocoder")  # of every diffusers checkpoint
DECODERS = ("video_vae", "diffusion_decoder")  # each with an encoder of its own
TEXTS = (".json", ".model", ".jinja")


@dataclass(frozen=True)
class Repo:
    """file: one of the repository's, None: whatever the run needs. revision: a branch, a tag or a commit."""

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
def fetch(repo: Repo, part: str = "main", wanted: tuple[str, ...] = (), offline: bool = False) -> Path:
    """Download what is not in the cache yet; the file or folder to open.

    part: "main" for a checkpoint and what belongs to it, "gemma" for a repository that is a Gemma folder, anything else
    for one file. wanted: kinds of files that come with a checkpoint where the repository has them and it does not hold
    them itself; of a video VAE and a diffusion decoder the other comes if there is but that. offline: look into the
    cache alone. Raises InputError.
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


def parts(video_decoder: str | None) -> tuple[str, ...]:
    """Kinds of files that a checkpoint has beside its main one. video_decoder: "diffusion", else the other."""
    return "gemma", "diffusion_decoder" if video_decoder == "diffusion" else "video_vae", "audio_vae", "duration_head"


def _needed(repo: Repo, sizes: dict[str, int], wanted: Collection[str], commit: str) -> tuple[list[str], str]:
    """Names of the files that a checkpoint needs, and which of them to open. Raises InputError."""
    configs = [name for name in sizes if name == INDEX or re.fullmatch(r"[^/]+/config\.json", name)]
    snapshot = _download(repo, {}, configs) if configs else None
    folders: dict[str, list[Path]] = {}  # with a config, by kind
    for folder in {Path(name).parent for name in configs} - {Path()}:
        folders.setdefault((snapshot and folder_kind(snapshot / folder)) or "", []).append(folder)
    index = model_index(snapshot) if snapshot else frozenset()
    beside = {kind: [f"{folder}/" for folder in listed(sorted(found), index)] for kind, found in folders.items()}
    headers: dict[str, RemoteFile] = {}
    files: dict[str, list[str]] = {}

    def look(depth: int) -> None:
        for name in sizes:
            plain = f"{Path(name).parent}/config.json" not in sizes
            if plain and name.endswith(".safetensors") and name.count("/") == depth:
                headers[name] = _header(repo, name, commit)
                files.setdefault(file_kind(headers[name]) or "", []).append(name)

    look(0)
    if ("main" not in files and "transformer" not in beside) or (repo.file and "/" in repo.file):
        look(1)  # as LTX-2.5 is released
    mains = [*files.get("main", []), *([INDEX] if "transformer" in beside else [])]
    if repo.file:
        if repo.file not in (*mains, INDEX) or repo.file not in sizes:
            raise InputError(f"{repo.name}: {repo.file} is no checkpoint in it; found: {', '.join(mains) or 'none'}")
        mains = [repo.file]
    if not mains:
        raise InputError(f"{repo.name}: no checkpoint of LTX-2 in it; pass another repository, or a folder, as --model")
    diffusers = mains == [INDEX]
    kinds = {*wanted, *(FOLDERS if diffusers else ())}
    if not diffusers and len(mains) == 1:
        kinds -= {component_of(name) for name in headers[mains[0]].names()}
    first, second = (beside, files) if diffusers else (files, beside)
    if (video := [kind for kind in DECODERS if kind in kinds]) and not any(kind in first for kind in video):
        kinds |= {kind for kind in DECODERS if kind in first}
    found = {kind: first.get(kind, []) for kind in sorted(kinds)}
    for kind in kinds & {"gemma", "lora", *UPSAMPLERS.values()}:  # each layout has its own, or takes the other's
        found[kind] = found[kind] or second.get(kind, [])
    refuse_ambiguous(main=[f"{repo.name}/{name}" for name in mains],
                     **{kind: [f"{repo.name}/{name}" for name in names] for kind, names in found.items()})  # fmt: skip
    starts = [*mains, *(name for names in found.values() for name in names)]
    starts += [name.removesuffix("tokenizer.json") for name in sizes if re.fullmatch(r"[^/]+/tokenizer\.json", name)]
    return [name for name in sizes if name.startswith(tuple(starts))], mains[0]


def _header(repo: Repo, name: str, commit: str) -> RemoteFile:
    import huggingface_hub

    with _hub(repo):
        return RemoteFile(huggingface_hub.parse_safetensors_file_metadata(repo.name, name, revision=commit).tensors)


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
            said = f"is no path here, and could not be fetched from the hub: {first}; run it again, or check the path"
        raise InputError(f"{repo.name} {said}") from error
