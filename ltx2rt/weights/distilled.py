"""Signs of whether a transformer is distilled: the scheduler of a diffusers folder, the number of
quantised matrices of the released files, and names.

Dev and distilled transformers of a release have the same tensors and config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ltx2rt.graph.encodings import E4M3_FORMAT
from ltx2rt.weights.parts import read_json
from ltx2rt.weights.quant.packed import Packed

if TYPE_CHECKING:
    from ltx2rt.weights.checkpoint import Checkpoint

KINDS = ("dev", "distilled")
SCHEDULER = "scheduler/scheduler_config.json"
FULL = "transformer_full"  # the dev one beside a distilled `transformer` of diffusers
# Matrices of e4m3 numbers in LTX-2.3's released files of them: 43 and 44 blocks of 34.
QUANTISED = {1462: "dev", 1496: "distilled"}
_WORD = re.compile(r"(?<![a-z])(?:(?P<distilled>distilled)|dev)(?![a-z])", re.IGNORECASE)


class Sign(NamedTuple):
    kind: str  # one of KINDS
    how: str  # the sign, such as "its name"


def sign(checkpoint: Checkpoint, assume: str | None = None) -> Sign | None:
    """The flag if it is given, else the strongest sign in the files; None if there is none."""
    return Sign(assume, f"--assume {assume}") if assume else next(_signs(checkpoint), None)


def kind_by_name(name: str) -> str | None:
    """The kind that the name of a file or repository states."""
    if name == FULL:
        return "dev"
    match = _WORD.search(name)
    return match and ("distilled" if match["distilled"] else "dev")


def by_scheduler(model: Path) -> Sign | None:
    """The kind of the transformer that a diffusers folder is listed with."""
    if not (path := model / SCHEDULER).is_file():
        return None
    keys = read_json(path)
    shift = [keys.get(name, "") for name in ("use_dynamic_shifting", "shift_terminal")]
    if shift == [False, None]:
        return Sign("distilled", f"its {SCHEDULER} shifts no noise level")
    return Sign("dev", f"its {SCHEDULER} shifts noise levels") if shift[0] is True else None


def kinds_of_folders(folders: Iterable[Path]) -> dict[str | None, Path]:
    """Return diffusers' transformers of one model by kind, which the name of each tells, else
    their scheduler."""
    found: dict[str | None, Path] = {}
    for folder in folders:
        listed = by_scheduler(folder.parent)
        found[kind_by_name(folder.name) or (listed.kind if listed else None)] = folder
    return found


def _signs(checkpoint: Checkpoint) -> Iterator[Sign]:
    source = checkpoint.source("transformer")
    if source.where.name == FULL:
        yield Sign("dev", "its folder's name")
    if checkpoint.layout == "diffusers" and (found := by_scheduler(checkpoint.path)):
        yield found
    for word, name in _names(checkpoint.path, source.where):
        if kind := kind_by_name(name):
            yield Sign(kind, f"its {word}")
    infos = map(source.info, source.names())
    count = sum(isinstance(info, Packed) and info.format == E4M3_FORMAT for info in infos)
    if checkpoint.config.release.name == "2.3" and count in QUANTISED:
        yield Sign(QUANTISED[count], f"its {count} {E4M3_FORMAT} matrices")


def _names(model: Path, file: Path) -> Iterator[tuple[str, str]]:
    """Each thing with a name, and the name: the file, the model's folder, the hub's repository."""
    if not file.is_dir():
        yield "name", file.name
    model = model.absolute()
    if model.is_dir():
        yield "folder's name", model.name
    if repo := [part for part in model.parts if part.startswith("models--")]:
        yield "repository's name", repo[-1]
