"""Requests from elsewhere: a preset, a configuration file, the settings in a clip that was made.

Decides their order: flags that are given come before the preset, this one before the file, and the
clip is last.
"""

from __future__ import annotations

import os
import re
from argparse import SUPPRESS
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, replace
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError, concerning
from ltx2rt.flags import Flag, convert, field_names, flagged, reader, spelling
from ltx2rt.media.output import STILLS, picture_comment
from ltx2rt.notes import note
from ltx2rt.pipelines import FIRST, chosen, pipeline, pipelines, readers, sound_alone
from ltx2rt.pipelines.earlier import EMPTY, current, require_known
from ltx2rt.pipelines.groups.size import Size, with_sides
from ltx2rt.pipelines.groups.source_clip import SourceClip
from ltx2rt.pipelines.request import Request
from ltx2rt.session.options import MEMORY, ModelOptions, parse_distilled, parse_lora, parse_part
from ltx2rt.suggest import nearest
from ltx2rt.text_files import mismatch, parse, read_toml
from ltx2rt.weights.digests import same_digest

MOST_COMMENT = 2**20  # characters: what a file of --prompts may have
SETTINGS = {"pipeline": str, "options?": dict}
PLAIN = re.compile(r"(?!\.\.?$)[^/\\\x00-\x1f]{1,255}")  # a file's name without folders

PRESETS: dict[str, dict[str, Any]] = {
    "draft": {"pipeline": "distilled", "quality": "draft"},
    "standard": {},
    "best": {"pipeline": "hq", "quality": "best"},
}


def recipe(
    given: Collection[str],
    *types: type,
    name: str | None = None,
    preset: str | None = None,
    config: Path | str | None = None,
    like: Path | str | None = None,
) -> dict[str, Any]:
    """The fields that preset, file and clip give, with `pipeline`; those in `given` left out.

    types: dataclasses of flags that a file may name, besides the pipeline's. name: of the pipeline,
    None for the one that all inputs choose. What it does not read is left out with a note. Raises
    InputError.
    """
    if preset is not None and preset not in PRESETS:
        raise InputError(f"--preset: {preset!r}, expected one of {', '.join(PRESETS)}")
    found = _of_clip(Path(like).expanduser(), given, types, name) if like else {}
    if config:
        found |= _of_file(Path(config).expanduser(), types)
    if preset:
        found |= PRESETS[preset]
    default = found.pop("pipeline", FIRST)
    name = name or chosen({*given, *found}, default)[0]
    read = {*flagged(*types, pipeline(name)), "pipeline"}
    unread = [field for field in found if field not in read and field not in given]
    if said := [field for field in unread if field not in PRESETS[preset or "standard"]]:
        note(f"left out, for the {name} pipeline does not read them: {', '.join(said)}")
    found = {"pipeline": name} | found
    return {field: found[field] for field in found if field not in (*given, *unread)}


def drafted(request: Request) -> Request | None:
    """The request as --preset draft makes it; None for one that has no size to choose, or is a
    preset's already."""
    if not request.has(Size) or request.quality or request.width or request.height:
        return None
    makes_all = request.name in (FIRST, PRESETS["best"]["pipeline"])
    found = request.made_by(pipeline(PRESETS["draft"]["pipeline"])) if makes_all else request
    return replace(found, quality="draft")


def with_recipe(name: str | None, given: Mapping[str, Any], **sources: Any) -> dict[str, Any]:
    """The keywords of a Python caller, or the fields of a job, with what the sources give. name: of
    the pipeline, if they name one. Raises InputError."""
    names = field_names(*pipelines().values())
    fields = {names.get(key, key) for key in given}
    return recipe(fields, name=name, **sources) | dict(given)


def _of_file(path: Path, types: Sequence[type]) -> dict[str, Any]:
    stated = {key.replace("-", "_"): value for key, value in read_toml("--config", path).items()}
    with concerning(f"--config: {path}"):
        stated = with_sides(stated)
    spelled = field_names(*pipelines().values())
    outputs = stated.get("output", [])
    asking = {spelled.get(key, key) for key in stated}
    asking |= sound_alone(map(str, outputs if isinstance(outputs, list) else [outputs]))
    name = stated.pop("pipeline", None) or chosen(asking)[0]
    known, names = flagged(*types, pipeline(name)), field_names(*types, pipeline(name))
    found = current(name, stated) | {k: stated[k] for k in ("seconds",) if k in stated}
    for key in stated.keys() - names.keys():
        if key not in found and not readers(key):
            continue  # it is gone, and had changed nothing
        require_known(f"--config: {path}", name, {key: stated[key]})
        near = nearest(key, names)
        meant = f"; did you mean {near}?" if near else ""
        raise InputError(f"--config: {path} has {key!r}, which is no flag of {name}{meant}")
    named = {field for field, f in known.items() if f.metadata["flag"].file}
    values, inputs = {}, named | flagged(ModelOptions).keys()
    for key, value in found.items():
        check_value("--config", path, key, known[names[key]], value)
        value = _beside(path.parent, value) if names[key] in inputs else value
        negated = key.startswith("no_") and isinstance(value, bool)
        values[names[key]] = not value if negated else value
    return values | {"pipeline": name}


def _beside(folder: Path, value: Any) -> Any:
    """Return a file's name, or a list of them, with the folder if the file is there and not here."""
    if isinstance(value, list):
        return [_beside(folder, one) for one in value]
    name = value.partition(":")[0] if isinstance(value, str) else ""
    there = name and os.path.exists(folder / name) and not os.path.exists(name)
    return str(folder / value) if there else value


def check_value(source: str, path: Path, key: str, f: Field, value: Any) -> None:
    """Refuse a value of a file that its flag does not take. source: the flag that names the file.
    Raises InputError."""
    try:
        convert(f, value)
    except InputError as error:
        reason = str(error).removeprefix(f"{spelling(f)}: ")
        raise InputError(f"{source}: {path}, {key}: {reason}") from None


def settings_in(path: Path) -> dict[str, Any]:
    """The settings that a clip's file holds. Raises InputError."""
    import av
    from PIL import Image, UnidentifiedImageError

    try:
        if path.suffix.lower() in (*STILLS, ".gif"):
            with Image.open(path) as image:
                text = picture_comment(image)
        else:
            with av.open(str(path)) as file:
                tags = [file.metadata, *(stream.metadata for stream in file.streams)]
                known = {key.lower(): value for tag in tags for key, value in tag.items()}
                text = known.get("comment", "")
        if len(text) > MOST_COMMENT:
            raise ValueError(f"{len(text)} characters")
        read = text if isinstance(text, str) else text.decode()
        return parse(read, {"settings": SETTINGS})["settings"]
    except (OSError, av.FFmpegError, UnidentifiedImageError) as error:
        raise InputError(f"--like: {path} cannot be read ({error}); name a clip's file") from None
    except (TypeError, ValueError):
        raise InputError(
            f"--like: {path} holds no settings of ltx2rt; name a file that was made without "
            "--no-metadata"
        ) from None


def _of_clip(
    path: Path, given: Collection[str], types: Sequence[type], asked: str | None
) -> dict[str, Any]:
    """The fields of the request and the options that shape the clip, which may be a stranger's:
    never files to write, marks or places. asked: the pipeline that the user names; files that it
    does not read need not be there."""
    settings = settings_in(path)
    options, name = settings.pop("options", {}), settings.pop("pipeline")
    if name not in pipelines():
        raise InputError(f"--like: {path} has pipeline={name[:80]!r}, which this version lacks")
    shaping = {field: f for field, f in flagged(*types).items() if _shapes(field, f)}
    known = flagged(pipeline(name)) | shaping
    settings = current(name, settings)
    hidden = {n for n, f in known.items() if f.metadata["flag"].help == SUPPRESS} - {"fps"}
    left = [field for field in settings if field in flagged(*types) and field not in known]
    if left := sorted(left):
        note(f"--like: {path} may not decide {', '.join(left)}; left out")
    require_known(f"--like: {path}", name, settings)
    settings |= {field: options[field] for field in shaping if options.get(field)}
    found = {"pipeline": name}
    for field, value in settings.items():
        skipped = field in given or field in left or ("seed" in given and field == "noise_in")
        if skipped or value in EMPTY or field in hidden:
            continue
        if field not in known:
            raise InputError(
                f"--like: {path} has {field[:80]}={str(value)[:80]!r}, which this version lacks"
            )
        unread = asked and field not in flagged(*types, pipeline(asked))
        found[field] = value if unread else _restored(path, known[field], value)
    if pipeline(name).has(SourceClip) and not Path(found.get("video_path", "")).is_dir():
        found.pop("fps", None)  # the file decides it
    return found


def _shapes(field: str, f: Field) -> bool:
    """Whether a flag of a model shapes the clip: the others say where a run is computed, or name
    the model's parts."""
    own: Flag = f.metadata["flag"]
    place = (own.group == MEMORY and not own.choices) or field == "offline"
    return field in flagged(ModelOptions) and not place and reader(f) not in (parse_part, Path)


def _restored(clip: Path, f: Field, value: Any) -> Any:
    """The value as Python's keywords take it; files by the path at which they are now."""
    own: Flag = f.metadata["flag"]
    if own.file or reader(f) in (parse_lora, parse_distilled):
        several = own.repeat and isinstance(value, list)
        found = [_placed(clip, f, item) for item in (value if several else [value])]
        value = found if several else found[0]
    check_value("--like", clip, f.name, f, value)
    return value


def _placed(clip: Path, f: Field, item: Any) -> Any:
    """A file, or a tuple of one and its other parts, such as the frame of an image."""
    if not isinstance(item, dict) or "path" not in item:
        return _file(clip, f, item)
    if reader(f) is parse_distilled and item["path"] == {"name": "none"}:
        return "none"
    rest = [part for key, part in item.items() if key != "path" and part is not None]
    return (_file(clip, f, item["path"]), *rest)


def _file(clip: Path, f: Field, stated: Any) -> Path:
    """The file of that name, in no other folder than the clip's and this one."""
    flag = spelling(f)
    name = "" if mismatch(stated, {"name": str, "digest?": str}) else stated["name"]
    if not name or PLAIN.fullmatch(name) is None:
        raise InputError(
            f"--like: {clip} names a file of {flag} in a way that ltx2rt does not write; give "
            "the flag"
        )
    folder = f.metadata["flag"].file in ("folder", "video")  # a Gemma, numbered pictures
    for path in (clip.parent / name, Path(name)):
        there = path.is_file() or (folder and path.is_dir())
        if there and same_digest(path, stated.get("digest", "")):
            return path
    raise InputError(
        f"{flag}: {name}, with which {clip} was made, was not found beside the clip or here, or has "
        "changed since; copy it there, or give the flag"
    )
