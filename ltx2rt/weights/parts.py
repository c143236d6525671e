"""Which files and folders hold which parts of a checkpoint, and a file in a few words.

Decides from headers and configs, never from names. One scan serves a disk's folders (`Listing`) and
a repository of the hub (`hub.Repository`). `near` chooses among several, `checkpoint` opens them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ltx2rt.errors import InputError
from ltx2rt.release import of_tensors, stated
from ltx2rt.system import first_bytes
from ltx2rt.weights.configs.keys import Keys, parse_json
from ltx2rt.weights.files import (
    DTYPE_NAMES,
    GGUF,
    MAX_HEADER_BYTES,
    SHARD_INDEX,
    WEIGHTS,
    TensorFile,
    TensorFolder,
    TensorInfo,
    TensorReader,
    open_file,
    open_tensors,
    read_index,
    visible,
)
from ltx2rt.weights.gguf import later_part
from ltx2rt.weights.names import component_of, official_names
from ltx2rt.weights.part_table import (
    JOINT,
    PARTS,
    TEXT_PROJECTION,
    Header,
    of_config,
    of_header,
    word_of,
)

T = TypeVar("T")
HOLDERS = ("video_vae", "audio_vae")  # parts in files that may hold a text projection as well
SMALL = 0.0005  # share of the bytes: types that are not worth a word
REFERENCE_MARKS = (b"reference_downscale_factor", b"hdr_transform")  # in headers of IC-LoRAs
MARKS = (*{part.mark for part in PARTS.values() if part.mark}, TEXT_PROJECTION.encode())
MARKS += REFERENCE_MARKS
GGUF_MARKS = (b"ltxv", b"gemma3", JOINT)
GEMMA_3_TOKEN = b"<start_of_image>"  # Gemma 2 and other models' tokenizers have no such token
START_BYTES, MAX_TOKENIZER_BYTES = 2**20, 2**27
INDEX = "model_index.json"  # passed as the model, it means its folder


def absent(
    parts: str | Sequence[str], path: Path, unreadable: Iterable[str] = (), also: Sequence[str] = ()
) -> InputError:
    """One line for all parts that are missing. also: further parts that some pipelines need."""
    parts = [parts] if isinstance(parts, str) else parts
    flags = " and ".join(dict.fromkeys(PARTS[part].flag for part in parts))
    said = f"{path}: no {' and no '.join(map(word_of, parts))} was found; "
    said += f"pass {'one' if len(parts) == 1 else 'them'} with {flags}"
    if also:
        named = ", ".join(f"{word_of(part)} ({PARTS[part].flag})" for part in also)
        said += f"; missing too, which some pipelines need: {named}"
    return InputError(said + "".join(f"; not readable: {line}" for line in unreadable))


def only(part: str, candidates: list[T]) -> T | None:
    refuse_ambiguous(**{part: candidates})
    return candidates[0] if candidates else None


def refuse_ambiguous(**found: Sequence[Any]) -> None:
    """Raise one InputError for all parts with several candidates, and flags that choose."""
    said = []
    for part, candidates in found.items():
        if len(candidates) > 1:
            row, listed = PARTS[part], ", ".join(map(str, candidates))
            choose = "keep one of them there" if part == "text" else f"choose with {row.flag}"
            said.append(f"{len(candidates)} candidates for the {row.word}: {listed}; {choose}")
    if said:
        raise InputError(". ".join(said))


@dataclass
class Parts:
    """The files and folders near a checkpoint, by part."""

    # those that go with the official layout, or with either; the main one is open
    files: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    diffusers: dict[str, list[Path]] = field(default_factory=dict)  # folders of only that layout
    tokenizer: list[Path] = field(default_factory=list)
    donor: Any = None  # an open, complete file of the release, for parts that the main file lacks
    unreadable: list[str] = field(default_factory=list)


class Listing:
    """Files and folders of a disk that are scanned. Raises InputError for damaged files."""

    def inside(self, folder: Path) -> list[Path]:
        """The entries of a folder, sorted."""
        return visible(folder)

    def is_dir(self, path: Path) -> bool:
        return path.is_dir()

    def is_file(self, path: Path) -> bool:
        return path.is_file()

    def json(self, path: Path) -> Keys:
        """The content of a JSON file."""
        return read_json(path)

    def shards(self, index: Path) -> set[Path]:
        """The files that a shard index lists."""
        return set(read_index(index).values())

    def open(self, path: Path) -> Any:
        """The header of a file, or of an index's shards: `path`, `names()`, `info(name)`."""
        return open_tensors(path)


DISK = Listing()


def file_kind(file: Any) -> str | None:
    """The part that a file holds, from the names and shapes in its header; None if it is none."""
    names = frozenset(file.names())
    official = frozenset(official_names(names).values())
    architecture = getattr(file, "architecture", "")
    return of_header(Header(names, official, lambda name: file.info(name).shape, architecture))


def has_text(file: Any) -> bool:
    """Whether a file has connectors or a text projection, under official names."""
    return any(component_of(name) == "text" for name in file.names())


def folder_kind(folder: Path, listing: Listing = DISK) -> str | None:
    """The part that a folder holds, from its config.json; None if it is none."""
    path = folder / "config.json"
    return of_config(listing.json(path)) if listing.is_file(path) else None


def read_json(path: Path) -> Keys:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}") from error
    if text.startswith(b"version https://git-lfs"):
        raise InputError(f"{path}: a git-lfs pointer; run `git lfs pull` in its repository")
    return parse_json(text, str(path))


def scan(folder: Path, listing: Listing = DISK, deep: bool = False) -> Parts:
    """Parts in the files of a folder, and in its sub-folders that have a config; headers only.
    deep: also in the files of sub-folders without one, as LTX-2.5 is released."""
    found, inner = listing.inside(folder), []
    for path in found if deep else ():
        if listing.is_dir(path) and not listing.is_file(path / "config.json"):
            with suppress(OSError):  # a folder that cannot be read has nothing to offer
                inner += [file for file in listing.inside(path) if file.suffix in WEIGHTS]
    return examine([*found, *inner], listing)


def look_into(folder: Path, listing: Listing = DISK) -> Parts:
    """Like `scan`, but goes deeper if it finds no checkpoint."""
    parts = scan(folder, listing)
    found = parts.files["main"] or "transformer" in parts.diffusers
    return parts if found else scan(folder, listing, deep=True)


def scan_quietly(paths: Iterable[Path]) -> Parts:
    """Like `scan`, but silent about files of other models, even damaged ones."""
    chosen = [path for path in paths if path.is_dir() or _may_belong(path)]
    parts = examine(chosen)
    parts.files["main"] = [file for file in parts.files["main"] if _joint(file)]
    parts.files["lora"] = [path for path in parts.files["lora"] if _joint(open_file(path))]
    tokenizers = [*parts.tokenizer, *(path for path in chosen if path.name == "tokenizer.json")]
    parts.tokenizer = [
        path
        for path in dict.fromkeys(tokenizers)
        if GEMMA_3_TOKEN in first_bytes(path, MAX_TOKENIZER_BYTES)
    ]
    parts.diffusers = {}
    files = tuple(f"{path}:" for path in chosen if path.suffix in WEIGHTS)
    ours = (*files, *(f"{path}: a config without weights" for path in chosen))
    parts.unreadable = [line for line in parts.unreadable if line.startswith(ours)]
    return parts


def _may_belong(path: Path) -> bool:
    """Whether an unparsed header has a word that a part of LTX-2 has; a tokenizer may."""
    if SHARD_INDEX.fullmatch(path.name):
        return JOINT in first_bytes(path, MAX_HEADER_BYTES)
    if path.suffix not in WEIGHTS:
        return path.name == "tokenizer.json"
    start = first_bytes(path, 8)
    is_gguf = start.startswith(GGUF)
    size = START_BYTES if is_gguf else 8 + int.from_bytes(start, "little")
    header = first_bytes(path, size) if size <= MAX_HEADER_BYTES + 8 else b""
    return any(mark in header for mark in (GGUF_MARKS if is_gguf else MARKS))


def inside(folder: Path) -> list[Path]:
    """The entries of a folder, sorted; none if it cannot be read."""
    with suppress(OSError):
        return visible(folder)
    return []


def _joint(file: Any) -> bool:
    """Whether a transformer, or a LoRA of one, has the layers between video and sound, or a LoRA
    has learnt references."""
    learnt = any(mark.decode() in file.metadata for mark in REFERENCE_MARKS)
    return learnt or any(JOINT.decode() in name for name in file.names())


def examine(paths: Iterable[Path], listing: Listing = DISK) -> Parts:
    """The kinds of these files, and of the folders that have a config."""
    parts = Parts()
    shards: set[Path] = set()
    for path in sorted(paths, key=lambda p: not SHARD_INDEX.fullmatch(p.name)):
        try:
            if listing.is_dir(path):
                kind = folder_kind(path, listing)
                if kind and not any(".safetensors" in file.name for file in listing.inside(path)):
                    # as a download of other parts leaves it
                    parts.unreadable.append(f"{path}: a config without weights")
                elif kind and PARTS[kind].either:
                    parts.files[kind].append(path)
                elif kind:
                    parts.diffusers.setdefault(kind, []).append(path)
                if listing.is_file(path / "tokenizer.json"):
                    parts.tokenizer.append(path / "tokenizer.json")
            elif SHARD_INDEX.fullmatch(path.name):
                own = listing.shards(path)
                shards |= own  # even if one of them cannot be read
                file = listing.open(path)
                if file_kind(file) == "main":
                    parts.files["main"].append(file)
                else:
                    shards -= own
            elif path.suffix in WEIGHTS and path not in shards and not later_part(path):
                file = listing.open(path)
                if kind := file_kind(file):
                    parts.files[kind].append(file if kind == "main" else path)
                if kind in HOLDERS and has_text(file):
                    parts.files["text"].append(path)  # which several parts share
        except InputError as error:
            parts.unreadable.append(str(error))
        except PermissionError as error:
            parts.unreadable.append(f"{path}: cannot read: {error.strerror}")
    return parts


def contents(file: TensorFile | TensorFolder) -> str:
    kind = file_kind(file)
    if kind:
        return f"it is {'' if kind == 'text' else 'a '}{PARTS[kind].word}"
    if file.architecture == "clip":
        return "it is an mmproj, the picture tower of a model; the model is another GGUF file"
    if file.architecture:
        return f"it is a GGUF file of {file.architecture[:40]!r}"
    names = list(file.names())
    return f"{len(names)} tensors, first {names[0]}" if names else "no tensors"


def contents_of_folder(path: Path, parts: Parts) -> str:
    if folder_kind(path) == "gemma":
        return "it is a Gemma folder, which --text-encoder takes"
    kinds = [part.word for part in PARTS.values() if part.name != "main" and parts.files[part.name]]
    return f"found: {', '.join([*kinds, *parts.diffusers]) or 'nothing of LTX-2'}"


def model_index(folder: Path, listing: Listing = DISK) -> frozenset[str]:
    """The names of a diffusers folder's own parts; none if it does not list them."""
    path = folder / INDEX
    return frozenset(listing.json(path).data) if listing.is_file(path) else frozenset()


def of_layout(found: list[Path], folders: bool, listing: Listing = DISK) -> list[Path]:
    """Folders or files, as the checkpoint's layout has this part; the other where it has none."""
    return [path for path in found if listing.is_dir(path) == folders] or found


def listed(found: list[Path], index: frozenset[str]) -> list[Path]:
    """Candidates that the folder's index lists; all if it lists none or there is only one."""
    named = [path for path in found if path.name in index]
    return named if len(found) > 1 and named else found


def type_of(info: TensorInfo) -> str:
    """Such as BF16 or Q4_K."""
    return getattr(info, "format", None) or DTYPE_NAMES[info.dtype]


def type_bytes(source: TensorReader) -> Counter[str]:
    """Stored bytes by type."""
    found: Counter[str] = Counter()
    for info in map(source.info, source.names()):
        found[type_of(info)] += info.nbytes
    return found


def mix(sizes: Mapping[str, int]) -> str:
    """Such as "Q4_K 61 %, Q6_K 39 %", the largest first; a single type without a number."""
    whole = sum(sizes.values()) or 1
    shares = sorted(((size / whole, name) for name, size in sizes.items()), reverse=True)
    shares = [share for share in shares if share[0] >= SMALL]
    if len(shares) == 1:
        return shares[0][1]
    digits = {name: 0 if 0.01 <= share < 0.99 else 1 for share, name in shares}
    return ", ".join(f"{name} {100 * share:.{digits[name]}f} %" for share, name in shares)


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"


def release_of(file: TensorReader) -> str:
    """The name of the release that a transformer's file states, or that its tensors tell."""
    return stated(getattr(file, "metadata", {})) or of_tensors(set(file.names())).name


def words(file: TensorReader) -> str:
    """A transformer's file, such as "LTX-2.3, Q4_K 61 %, Q6_K 39 %, 15.3 GB"."""
    sizes = type_bytes(file)
    return f"LTX-{release_of(file)}, {mix(sizes)}, {gigabytes(sum(sizes.values()))}"
