"""Jobs of a file and the clips that a server makes of them.

Decides what is done already: a job whose result line says `completed` for the same digest and
model, and whose clip is there. A clip of another model is never replaced. A result line is written,
and on the disk, after the clip has its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError, concerning
from ltx2rt.flags import flagged
from ltx2rt.pipelines.groups.images import PlacedImage, parse_image
from ltx2rt.pipelines.groups.seeds import DRAWN
from ltx2rt.serve.admission import Admission
from ltx2rt.serve.fields import file_field, served, several, uploads
from ltx2rt.serve.folder import sync
from ltx2rt.serve.jobs import COMPLETED
from ltx2rt.serve.upload import IMAGE
from ltx2rt.session.options import LoraSpec
from ltx2rt.text_files import mismatch, once, parse, read_bytes, read_text
from ltx2rt.weights.digests import digest

ID = re.compile(r"(?!.*[^\D0-9])\w[\w.-]{0,99}")  # letters of any script, digits 0 to 9
LINE_LIMIT = 10**6
MOST_RESULTS = 2**40  # bytes


@dataclass(frozen=True)
class Line:
    """One job: number is its line's."""

    number: int
    id: str
    given: dict[str, Any]


@dataclass(frozen=True)
class Shard:
    """The number-th of `count` parts of the jobs, by their ids: lines that are added move none to
    another part."""

    number: int = 1
    count: int = 1

    def has(self, id: str) -> bool:
        return int(hashlib.sha256(id.encode()).hexdigest(), 16) % self.count == self.number - 1

    @property
    def results(self) -> str:
        part = "" if self.count == 1 else f".{self.number}-of-{self.count}"
        return f"results{part}.jsonl"


def parse_shard(text: str | Shard) -> Shard:
    """`I/N`, I from 1 on. Raises InputError."""
    if isinstance(text, Shard):
        return text
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise InputError(f"--shard: {text[:80]!r}, expected I/N such as 1/8 to 8/8")
    return Shard(int(match[1]), int(match[2]))


def read_lines(path: Path) -> list[Line]:
    """Raises InputError that names each line that is no job."""
    text = read_text(path)
    lines, wrong, seen = [], [], dict[str, int]()
    for number, one in enumerate(text.split("\n"), 1):  # a text may hold U+2028
        if not one.strip():
            continue
        if len(one) > LINE_LIMIT:
            wrong.append(f"line {number}: {len(one)} characters, expected at most {LINE_LIMIT}")
            continue
        try:
            given = parse(one, dict, once)
        except ValueError as error:
            wrong.append(f"line {number}: no JSON object ({str(error)[:80]})")
            continue
        id = given.pop("id", None)
        if not isinstance(id, str) or not ID.fullmatch(id):
            wrong.append(
                f"line {number}: id {str(id)[:80]!r}, expected letters, digits 0 to 9, '.', "
                "'_' and '-'"
            )
        elif id in seen:
            wrong.append(f"line {number}: id {id!r} is that of line {seen[id]}")
        else:
            seen[id] = number
            lines.append(Line(number, id, given))
    if wrong:
        raise InputError(f"{path}: " + "; ".join(wrong))
    return lines


def made_by(admission: Admission) -> dict[str, Any]:
    """The model as a result states it: digests of its files and LoRAs, and flags that change
    numbers."""
    asked, model = admission.options, admission.checkpoint
    distilled = [asked.distilled_lora] if asked.distilled_lora else map(LoraSpec, model.loras_found)
    specs = [spec for spec in (*distilled, *asked.loras) if spec.path.exists()]
    loras = [[s.path.name, digest(s.path), s.strength, s.stage] for s in specs]
    flags = {"dtype": asked.dtype, "weights_dtype": asked.weights_dtype}
    flags["assume"] = asked.assume
    flags["attention"] = None if asked.attention == "auto" else asked.attention
    set_ = {name: value for name, value in flags.items() if value is not None}
    return {"name": model.path.name, "digest": model.digest(), "loras": loras, **set_}


def seeded(line: Line, given: Mapping[str, Any]) -> dict[str, Any]:
    """A job without a seed gets one of its own, the same whenever it is made. given: its files are
    digests."""
    drawn = hashlib.sha256(json.dumps([line.id, given], sort_keys=True).encode()).hexdigest()
    drawn_too = given.get("seed") in (None, DRAWN, str(DRAWN))
    return {**given, **({"seed": int(drawn[:8], 16)} if drawn_too else {})}


def clashes(jobs: Iterable[tuple[Line, int, int]]) -> list[str]:
    """A sentence for each job that would write a clip of an earlier one. jobs: lines with the first
    seed and the number of clips."""
    owners, wrong = dict[str, Line](), []
    for line, seed, count in jobs:
        for name in Results.names(line.id, seed, count):
            other = owners.setdefault(name, line)
            if other is not line:
                wrong.append(
                    f"line {line.number} ({line.id}) and line {other.number} ({other.id}) "
                    f"would both write {name}; change the id of one"
                )
                break
    return wrong


def with_files(
    given: Mapping[str, Any], kept: Callable[[str, str], dict[str, Any]]
) -> dict[str, Any]:
    """The fields of a line with what `kept(path, kind)` gives in place of every path. Raises
    InputError."""
    kinds = {"images": IMAGE} | uploads()
    found = dict(given)
    items = {name: _items(name, found.pop(name)) for name in kinds if name in found}
    for name, value in given.items():
        if not _may_be_file(name, value) or (meant := file_field(name, kinds)) is None:
            continue
        field, place = meant
        if field in items and not several(field):
            raise InputError(f"{name}: given twice, also as {field}; give one file")
        items.setdefault(field, []).extend(one | place for one in _items(field, found.pop(name)))
    for name, named in items.items():
        found[name] = []
        for item in named:
            rest = {key: value for key, value in item.items() if key != "path"}
            with concerning(name):
                path = os.path.expanduser(str(item.get("path")))
                found[name].append(rest | (kept(path, kinds[name]) if "path" in item else {}))
    return found


def _may_be_file(name: str, value: Any) -> bool:
    """Whether it may be a file by another program's name; `audio` is a switch as well."""
    text = isinstance(value, str) and value.lower() not in ("true", "false")
    return text and (name not in flagged(*served().values()) or name == "audio")


def _items(name: str, value: Any) -> list[dict[str, Any]]:
    """The objects that a field's value stands for. Raises InputError."""
    items = value if isinstance(value, list) else [value]
    items = [_item(name, item) if isinstance(item, str) else item for item in items]
    if not all(isinstance(item, dict) for item in items):
        raise InputError(f"{name}: expected a list of objects or paths")
    return items


def _item(name: str, text: str) -> dict[str, Any]:
    """The object that a text stands for: an image with its frame and strength, or a path."""
    if name != "images":
        return {"path": text}
    image = parse_image(text)
    frame = image.at if isinstance(image, PlacedImage) else image.frame
    return {"path": str(image.path), "frame": frame, "strength": image.strength}


class Results:
    """The clips of a batch and what became of each job: a line in the shard's file, on the disk
    after the clip."""

    def __init__(self, output: Path, shard: Shard):
        self.output, self.path = output, output / shard.results
        files = sorted(output.glob("results*.jsonl"))
        self._told = [line for file in files for line in _lines(file)]

    def done(
        self, model: Mapping[str, Any], loras: Mapping[str, list[list[str | None]]]
    ) -> dict[str, str]:
        """Digests of the completed jobs by id, as all result files of the folder tell, whose clips
        are there. loras: names and digests of the LoRAs of the jobs of this batch, by id. Raises
        InputError if one of these jobs has a clip of another model."""

        def digests(loras: list[list[Any]] | None) -> list[Any]:
            return [digest for _, digest in loras or ()]

        made = [told for told in self._told if told.get("status") == COMPLETED]
        there = [x for x in made if all((self.output / name).exists() for name in x["files"])]
        latest = {told["id"]: told for told in there}
        for id in latest.keys() & loras.keys():
            was = latest[id].get("model")
            if not isinstance(was, dict) or not model:
                continue  # an earlier version did not state it
            for key in sorted((was.keys() | model.keys()) - {"name"}):
                if was.get(key) != model.get(key):
                    raise InputError(
                        f"--output-dir: the clip of {id} in {self.output} is of another model "
                        f"({key} {was.get(key)}, now {model.get(key)}); name another folder"
                    )
            if "loras" in latest[id] and digests(latest[id]["loras"]) != digests(loras[id]):
                del latest[id]
        return {id: told["digest"] for id, told in latest.items()}

    def replaced(self, names: Iterable[str]) -> str:
        """A sentence about clips that are there and will be made again; "" without any."""
        there = [name for name in names if (self.output / name).exists()]
        more = f" and {len(there) - 1} more clips" if len(there) > 1 else ""
        return f"; {there[0]}{more} will be replaced" if there else ""

    def failures(self, id: str, digest: str) -> int:
        """How often the job has failed in earlier runs."""
        return sum((told.get("id"), told.get("digest")) == (id, digest) for told in self._told)

    @staticmethod
    def names(id: str, seed: int, count: int) -> list[str]:
        """Names of a job's clips, as `generate` names them."""
        several = [f"{id}-{seed + number}.mp4" for number in range(count)]
        return several if count > 1 else [f"{id}.mp4"]

    def keep(self, id: str, status: str, digest: str, files: Sequence[str], **facts: Any) -> None:
        """Enter what became of a job, whose clips have their names."""
        sync(self.output)
        made = list(files) if status == COMPLETED else []
        result = {"id": id, "status": status, "digest": digest, "files": made}
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                file.write(b"" if file.read() == b"\n" else b"\n")
            file.write(f"{json.dumps(result | facts)}\n".encode())
            file.flush()
            os.fsync(file.fileno())


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Raises InputError for JSON that is no result."""
    text = read_bytes(path, MOST_RESULTS).decode(errors="replace")
    for number, line in enumerate(text.split("\n"), 1):
        try:
            told = json.loads(line)
        except (ValueError, RecursionError):  # cut off when its writer died
            continue
        if mismatch(told, {"id": str, "digest": str, "files": [str]}):
            raise InputError(
                f"{path}, line {number}: no result of a batch; move the line or the file away"
            )
        yield told
