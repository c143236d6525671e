"""Requests from elsewhere: a preset, a configuration file, the settings in a clip that was made.

Decides their order: flags that are given come before the preset, this one before the file, and the
clip is last.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.flags import Flag, convert, field_names, flagged, spelling
from ltx2rt.media.output import STILLS, picture_comment
from ltx2rt.notes import note
from ltx2rt.pipelines import FIRST, chosen, pipeline, pipelines
from ltx2rt.pipelines.groups.size import with_sides
from ltx2rt.session.options import MEMORY, ModelOptions
from ltx2rt.suggest import nearest
from ltx2rt.text_files import read_toml
from ltx2rt.weights.digests import digest

PRESETS: dict[str, dict[str, Any]] = {
    "draft": {"pipeline": "distilled"},
    "standard": {},
    "best": {"pipeline": "hq"},
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
        own = {"width", "height"} | {"size", "video_path"}
        found |= PRESETS[preset]
        if preset == "draft" and not own.intersection(given):
            found["half_size"] = True  # a given clip is made at its own size
    default = found.pop("pipeline", FIRST)
    name = name or chosen({*given, *found}, default)[0]
    read = {*flagged(*types, pipeline(name)), "pipeline"}
    unread = [field for field in found if field not in read and field not in given]
    if unread:
        note(f"left out, for the {name} pipeline does not read them: {', '.join(unread)}")
    found = {"pipeline": name} | found
    return {field: found[field] for field in found if field not in (*given, *unread)}


def with_recipe(name: str | None, given: Mapping[str, Any], **sources: Any) -> dict[str, Any]:
    """The keywords of a Python caller, or the fields of a job, with what the sources give. name: of
    the pipeline, if they name one. Raises InputError."""
    names = field_names(*pipelines().values())
    fields = {names.get(key, key) for key in given}
    return recipe(fields, name=name, **sources) | dict(given)


def _of_file(path: Path, types: Sequence[type]) -> dict[str, Any]:
    found = with_sides(read_toml("--config", path))
    spelled = field_names(*pipelines().values())
    asking = {spelled.get(key.replace("-", "_"), key) for key in found}
    name = found.pop("pipeline", None) or chosen(asking)[0]
    known, names = flagged(*types, pipeline(name)), field_names(*types, pipeline(name))
    named = {field for field, f in known.items() if f.metadata["flag"].file}
    values, inputs = {}, named | flagged(ModelOptions).keys()
    for key, value in found.items():
        spelt = key.replace("-", "_")
        if spelt not in names:
            near = nearest(spelt, names)
            meant = f"; did you mean {near}?" if near else ""
            raise InputError(f"--config: {path} has {key!r}, which is no flag of {name}{meant}")
        check_value(path, key, known[names[spelt]], value)
        value = _beside(path.parent, value) if names[spelt] in inputs else value
        negated = spelt.startswith("no_") and isinstance(value, bool)
        values[names[spelt]] = not value if negated else value
    return values | {"pipeline": name}


def _beside(folder: Path, value: Any) -> Any:
    """Return a file's name, or a list of them, with the folder if the file is there and not here."""
    if isinstance(value, list):
        return [_beside(folder, one) for one in value]
    name = value.partition(":")[0] if isinstance(value, str) else ""
    there = name and (folder / name).exists() and not Path(name).exists()
    return str(folder / value) if there else value


def check_value(path: Path, key: str, f: Field, value: Any) -> None:
    """Refuse a value of a configuration file that its flag does not take. Raises InputError."""
    try:
        convert(f, value)
    except InputError as error:
        reason = str(error).removeprefix(f"{spelling(f)}: ")
        raise InputError(f"--config: {path}, {key}: {reason}") from None


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
                known = {key.lower(): value for key, value in file.metadata.items()}
                text = known.get("comment", "")
        return json.loads(text)["settings"]
    except (OSError, av.FFmpegError, UnidentifiedImageError) as error:
        raise InputError(f"--like: {path} cannot be read ({error}); name a clip's file") from None
    except (KeyError, TypeError, ValueError):
        raise InputError(
            f"--like: {path} holds no settings of ltx2rt; name a file that was made without "
            "--no-metadata"
        ) from None


def _of_clip(
    path: Path, given: Collection[str], types: Sequence[type], asked: str | None
) -> dict[str, Any]:
    """asked: the pipeline that the user names; files that it does not read need not be there."""
    settings = settings_in(path)
    options = settings.pop("options", {})
    name = settings.pop("pipeline")
    for field, f in flagged(*types).items():
        own: Flag = f.metadata["flag"]
        shaping = own.group != MEMORY or own.choices  # the others say where a run is computed
        if shaping and options.get(field) and "name" not in options[field]:
            settings[field] = options[field]
    known = flagged(*types, pipeline(name))
    found = {"pipeline": name}
    for field, value in settings.items():
        if field in given or value in (None, [], "") or ("seed" in given and field == "noise_in"):
            continue
        if field not in known:
            raise InputError(f"--like: {path} has {field}={value!r}, which this version lacks")
        unread = asked and field not in flagged(*types, pipeline(asked))
        found[field] = value if unread else _restored(path, field, value)
    return found


def _restored(clip: Path, field: str, value: Any) -> Any:
    """The value as Python's keywords take it; files by the path at which they are now."""
    if isinstance(value, dict) and "name" in value:
        return _file(clip, field, value)
    if isinstance(value, dict):
        return tuple(_restored(clip, field, part) for part in value.values() if part is not None)
    return [_restored(clip, field, part) for part in value] if isinstance(value, list) else value


def _file(clip: Path, field: str, named: Mapping[str, str]) -> Path:
    for path in (clip.parent / named["name"], Path(named["name"])):
        if path.exists() and named.get("digest") == digest(path):
            return path
    flag = field.replace("_", "-")
    raise InputError(
        f"--like: {clip} was made with {named['name']} (--{flag}), which lies neither beside it nor "
        "here as it was; put it there, or give the flag"
    )
