"""Several files of one network: dev and distilled weights, and each in several forms.

Decides which of them a checkpoint has. Of forms, as bfloat16, int8 and nvfp4 are, the largest is
taken that the device keeps whole while it computes, else the smallest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ltx2rt.notes import note
from ltx2rt.release import RELEASES
from ltx2rt.weights.distilled import kind_by_name
from ltx2rt.weights.names import component_of, official_names
from ltx2rt.weights.parts import gigabytes, release_of

T = TypeVar("T")
# Activations of a denoising step at 1920x1088 and 121 frames, at most; `plan` says 5.13 GB.
ACTIVATION_BYTES = 5_200_000_000
TEXT_BYTES = 3_400_000_000  # activations of the text encoder, and connectors in int8
SAME = 0.02  # two files that differ by less in size are of one form
# Words of names that say the form, or nothing.
_FORM = re.compile(
    r"(?:bf|fp|int|nvfp|mxfp|w)\d+|a\d+|e\dm\d(?:fn)?|i?q\d|gguf|comfy|convrot|scaled|input|rowwise|"
    r"mixed|transformer|only|diffusion|model|learned|v\d+|[0skmlxn]{1,2}|\d{5}|of"
)


class Room(NamedTuple):
    """A device's memory for weights and activations, and its name, "" to say nothing."""

    size: int
    device: str


class Transformers(NamedTuple):
    """The transformer of a checkpoint; and a distilled one where that is dev."""

    main: Any
    distilled: Any = None


def transformers(
    files: Sequence[Any], assume: str | None, room: Callable[[], Room | None] | None
) -> Transformers | None:
    """The transformers among open main files; None if several may be meant. assume: the only kind
    that is taken, of `distilled.KINDS`."""
    kinds: dict[str | None, list[Any]] = {}
    for file in files:
        kinds.setdefault(kind_by_name(file.path.name), []).append(file)
    if assume in kinds:
        kinds = {assume: kinds[assume]}
    if kinds.keys() == {None, "distilled"}:
        kinds["dev"] = kinds.pop(None)  # as it says no other kind
    if len({release_of(file) for file in files}) > 1 or (len(kinds) > 1 and None in kinds):
        return None
    sizes = {kind: {x: transformer_bytes(x) for x in own} for kind, own in kinds.items()}
    found = largest([sizes[kind] for kind in ("dev", "distilled", None) if kind in sizes], room)
    return Transformers(*found) if found else None


def newest(files: Sequence[Any]) -> list[Any]:
    """Keep the open main files of the latest release; a note says so."""
    releases = [release.name for release in RELEASES]
    found = sorted({release_of(file) for file in files} & {*releases}, key=releases.index)
    if len(found) < 2:
        return [*files]
    kept = [file for file in files if release_of(file) == found[0]]
    others = " or ".join(f"LTX-{name}" for name in found[1:])
    note(f"LTX-{found[0]} is taken, {kept[0].path.name}; for {others} name its file with --model")
    return kept


def transformer_bytes(file: Any) -> int:
    """Stored bytes of the transformer in a main file."""
    ours = official_names(file.names())
    own = (name for name, official in ours.items() if component_of(official) == "transformer")
    return sum(file.info(name).nbytes for name in own)


def largest(
    kinds: Sequence[Mapping[T, int]],
    room: Callable[[], Room | None] | None,
    what: str = "transformer",
    more: int = ACTIVATION_BYTES,
) -> list[T] | None:
    """The largest form of each kind that the device keeps whole, else the smallest, which a note
    says; of an unknown device (None) the largest. None if files are of several models, or of one form.
    kinds: the forms of each, and their sizes. more: bytes that a run adds to them."""
    several = any(len(sizes) > 1 for sizes in kinds)
    device = room() if room and several else None
    found: list[T] = []
    notes = []
    for sizes in kinds:
        ordered = sorted(sizes, key=lambda form: -sizes[form])
        fits = [f for f in ordered if not device or sizes[f] + more <= device.size]
        chosen = fits[0] if fits else ordered[-1]
        others = [sizes[form] for form in ordered if form is not chosen]
        same = any(abs(size - sizes[chosen]) <= SAME * sizes[chosen] for size in others)
        if same or len({_model(_path(form)) for form in ordered}) > 1:
            return None
        found.append(chosen)
        if others and device and device.device:
            how = f"the largest of {len(ordered)} forms that {device.device} keeps whole"
            if not fits:
                how = f"the smallest of {len(ordered)} forms, of which {device.device} keeps none whole"
            notes.append(f"{_path(chosen).name}, {gigabytes(sizes[chosen])}, {how}")
    if notes:
        note(f"{what}: {'; '.join(notes)}")
    return found


def _path(form: Any) -> Path:
    return Path(getattr(form, "path", form))


def _model(path: Path) -> str:
    """The words of a file's name that do not say its form."""
    name = path.name.lower().partition(".safetensors")[0].removesuffix(".gguf")
    return " ".join(x for x in re.split(r"[\W_]+", name) if x and not _FORM.fullmatch(x))
